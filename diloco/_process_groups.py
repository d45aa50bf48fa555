"""Process groups of torch: which one a caller means, a second one over which its ranks agree, what it can move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from diloco._meeting import Meeting

Group = distributed.ProcessGroup | DeviceMesh


def group_of(argument: str, meant: Group | None, otherwise: str = "or None") -> distributed.ProcessGroup:
    """The process group that `argument` means: a group, that of a device mesh of one dimension, or (None) all ranks of
    the job. ValueError and TypeError say what was expected; `otherwise`: what may be passed that is no group."""
    if meant is None:
        meant = distributed.group.WORLD
    if isinstance(meant, DeviceMesh):
        if meant.ndim != 1:
            raise ValueError(
                f"{argument}: expected one dimension of a device mesh, got all {meant.ndim} ({meant.mesh_dim_names}); "
                'name the one that is meant, as in mesh["replicate"]'
            )
        meant = meant.get_group()
    outside: object = distributed.GroupMember.NON_GROUP_MEMBER
    if meant is outside:
        raise ValueError(f"{argument}: this process is not in the group that was passed; pass the one it belongs to")
    if not isinstance(meant, distributed.ProcessGroup):
        raise TypeError(
            f"{argument}: expected a process group, one dimension of a device mesh, {otherwise}; got "
            f"{type(meant).__name__}"
        )
    return meant


def of_learners(group: Group | None, backend: str | None) -> distributed.ProcessGroup:
    """The group whose ranks are the learners of a job; with `backend`, a new one of all ranks that uses it."""
    if not distributed.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised: start the script with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    return group_of("group", group) if backend is None else _new_group(group, backend)


def _new_group(group: object, backend: str) -> distributed.ProcessGroup:
    if group is not None:
        raise ValueError("give a group, which has its backend, or backend=, for a new group of all ranks; got both")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend must be gloo or nccl, got {backend!r}")
    if backend == "nccl" and not distributed.is_nccl_available():
        raise ValueError(
            f"backend = nccl was asked for and this torch ({torch.__version__}) is built without NCCL; "
            "use gloo, or install a torch for CUDA"
        )
    made: distributed.ProcessGroup = distributed.new_group(backend=backend)
    return made


def control_of(group: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """A Gloo group of the same ranks, with the same timeout. Only they need to call this."""
    meeting = Meeting(group)
    return meeting.group("control", range(meeting.size))


def merges_on_device(group: distributed.ProcessGroup, tensors: Iterable[Tensor]) -> bool:
    """True if the group moves the tensors on their device by itself (NCCL), so that they are merged there; false if
    everything goes through host memory. ValueError if it can do neither."""
    devices = {tensor.device.type for tensor in tensors}
    names = {device.type: _backend(group, device).name() for device in group._device_types}
    if len(devices) == 1 and names.get(*devices) not in (None, "gloo"):
        return devices != {"cpu"}
    if "cpu" not in names:
        where = " and ".join(sorted(devices))
        raise ValueError(
            f"the group's backend ({', '.join(sorted(set(names.values())))}) cannot move tensors that are on {where}; "
            "move the model to the group's device, or use a gloo group"
        )
    return False


def _backend(group: distributed.ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)
