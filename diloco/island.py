"""Islands: several processes that train one copy of a model together and are one learner. Each holds some of the
elements of every parameter; ranks that hold the same are replicas, and the first of them exchanges for the others.

  DDP                       everything on every rank: rank 0 exchanges
  FSDP2, tensor parallel    DTensors with shards: every rank exchanges its own
  HSDP                      the first replica of every shard exchanges
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from diloco._native import _C
from diloco._sharded import is_sharded, local
from diloco.parameters import Parameter

# A group of ranks; None: the default group, if it has more than one; False: this process alone.
Ranks: TypeAlias = ProcessGroup | bool | None
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of what a rank holds


@dataclass(frozen=True)
class Island:
    """What this process is in its island."""

    rank: int
    ranks: int
    native: _C.Island
    learner_id: str  # rank 0's
    talk: ProcessGroup  # for what is said in Python, between two steps

    def from_leader(self, value: Any) -> Any:
        """Rank 0's value, on all ranks. Collective."""
        box = [value]
        dist.broadcast_object_list(box, group=self.talk, group_src=0)
        return box[0]


def group_of(ranks: Ranks) -> ProcessGroup | None:
    """The island's process group; None if this process is a learner by itself."""
    if ranks is False:
        return None
    if ranks is None or ranks is True:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return dist.group.WORLD
    if not isinstance(ranks, ProcessGroup):
        raise TypeError(
            f"island: expected a process group, None (the default group) or False, got {type(ranks).__name__}; "
            "of a device mesh pass mesh.get_group()"
        )
    return ranks if dist.get_world_size(ranks) > 1 else None


def make_island(ranks: Ranks, parameters: list[Parameter], learner_id: str, settings: dict[str, str]) -> Island | None:
    """Collective over the island's ranks. ValueError on all of them, naming the first difference, if they disagree on
    the model or the settings, or if a parameter cannot be taken apart."""
    group = group_of(ranks)
    if group is None:
        for parameter in parameters:
            if is_sharded(parameter.tensor) and parameter.tensor.device_mesh.size() > 1:  # type: ignore[attr-defined]
                raise ValueError(
                    f"parameter '{parameter.name}' is a DTensor; expected torch.distributed with all its ranks. Start "
                    "the script under torchrun, and do not pass island=False"
                )
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    plan = _cpu_group(group)
    fault: str | None = None
    boxes: list[Box] = []
    try:
        boxes = [box_of(parameter) for parameter in parameters]
    except ValueError as error:
        fault = str(error)  # told to all, or they would wait for this rank
    shapes = [list(parameter.tensor.shape) for parameter in parameters]
    mine = _Description(
        fault,
        [(p.name, tuple(p.tensor.shape), str(p.tensor.dtype)) for p in parameters],
        settings,
        tuple(boxes),
        learner_id,
    )
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, mine, group=plan)
    _check_agreement(everybody)

    kinds = list(dict.fromkeys(each.boxes for each in everybody))  # in rank order
    part_of = [kinds.index(each.boxes) for each in everybody]
    replicas = None
    any_replicas = len(kinds) < size
    if any_replicas:
        for part in range(len(kinds)):
            members = [r for r in range(size) if part_of[r] == part]
            made = _cpu_group(group, members)
            if rank in members and len(members) > 1:
                replicas = made
    part = part_of[rank]
    native = _C.Island(
        plan=plan,
        replicas=replicas,
        any_replicas=any_replicas,
        part=part,
        parts=len(kinds),
        replica=part_of.index(part) != rank,
        shapes=shapes,
        held=[(list(offset), list(shape)) for offset, shape in boxes] if len(kinds) > 1 else [],
    )
    return Island(rank, size, native, everybody[0].learner_id, _cpu_group(group))


@dataclass(frozen=True)
class _Description:
    fault: str | None
    tensors: list[tuple[str, tuple[int, ...], str]]
    settings: dict[str, str]
    boxes: tuple[Box, ...]
    learner_id: str


def box_of(parameter: Parameter) -> Box:
    """Offset and shape of what this process holds of a parameter."""
    tensor = parameter.tensor
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Replicate

    placements = tensor.placements  # type: ignore[attr-defined]
    for placement in placements:
        if not isinstance(placement, Shard | Replicate) and type(placement).__name__ != "_StridedShard":
            raise ValueError(
                f"parameter '{parameter.name}' has the placement {placement}; expected Shard or Replicate on every "
                "mesh dimension. Redistribute it before wrapping the optimizer"
            )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        placements,
    )
    held = tuple(local(tensor).shape)
    if held != tuple(shape):
        raise ValueError(
            f"parameter '{parameter.name}': this rank holds {held}, its placements {tuple(placements)} say "
            f"{tuple(shape)}"
        )
    if 0 in held:  # where an empty shard lies means nothing
        return (0,) * len(held), held
    return tuple(offset), held


def _check_agreement(everybody: list[_Description]) -> None:
    first = everybody[0]
    for rank, other in enumerate(everybody):
        if other.fault is not None:
            raise ValueError(f"rank {rank}: {other.fault}")
    for rank, other in enumerate(everybody):
        if other.settings != first.settings:
            names = sorted(first.settings.keys() | other.settings.keys())
            name = next(n for n in names if first.settings.get(n) != other.settings.get(n))
            raise ValueError(
                f"the ranks of this island disagree on setting '{name}': rank 0 has "
                f"{first.settings.get(name, 'none')}, rank {rank} has {other.settings.get(name, 'none')}; give all "
                "ranks the same"
            )
        if other.tensors == first.tensors:
            continue
        for mine, theirs in zip(first.tensors, other.tensors, strict=False):
            if mine != theirs:
                raise ValueError(
                    f"the ranks of this island disagree on the model: rank 0 has '{mine[0]}' ({mine[2]} {mine[1]}) "
                    f"where rank {rank} has '{theirs[0]}' ({theirs[2]} {theirs[1]}); build the same model on all ranks"
                )
        raise ValueError(
            f"the ranks of this island disagree on the model: rank 0 synchronises {len(first.tensors)} parameters, "
            f"rank {rank} {len(other.tensors)}; build the same model on all ranks"
        )


def _cpu_group(group: ProcessGroup, members: list[int] | None = None) -> ProcessGroup:
    """A new gloo group of (some of) the ranks of `group`, with its timeout. Collective over its members only."""
    everybody = dist.get_process_group_ranks(group)
    chosen = everybody if members is None else [everybody[r] for r in members]
    if dist.get_rank() not in chosen:
        return None  # type: ignore[return-value]
    if len(chosen) == 1:
        return None  # type: ignore[return-value]
    made = dist.new_group(chosen, timeout=_timeout_of(group), backend="gloo", use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    return made


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long its collectives may take; None if its backend does not say."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None
