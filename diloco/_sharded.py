"""DTensors: what this process holds of one, all of it, and putting values of its shape back into one."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "DTensor"


def local(tensor: Tensor) -> Tensor:
    """What this process holds: the tensor whose memory the optimizer changes."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it, on the CPU. The ranks that hold parts of a DTensor call this together."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full.cpu().clone()


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """`values`, of the shape of local(tensor), as a DTensor laid out as `tensor`; as they are if that is none."""
    if not is_sharded(tensor):
        return values
    from torch.distributed.tensor import DTensor

    sharded: Any = tensor
    mesh = sharded.device_mesh
    return DTensor.from_local(
        values.to(mesh.device_type),
        mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
