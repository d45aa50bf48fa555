"""The dispatcher operators torch.ops.diloco.*: fake kernels, so that torch.compile and torch.library.opcheck can trace
them. Schemas are in csrc/diloco/torch/ops.cpp; none has a gradient, they run under no_grad."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco import _C as _C  # registers the operators


@torch.library.register_fake("diloco::fragment_diff")  # type: ignore[untyped-decorator]
def _fragment_diff(
    params: list[Tensor], anchors: list[Tensor], out: Tensor, byte_offsets: list[int], bf16: list[bool]
) -> None:
    return None


@torch.library.register_fake("diloco::fragment_adopt")  # type: ignore[untyped-decorator]
def _fragment_adopt(
    params: list[Tensor],
    anchors: list[Tensor],
    next: list[Tensor],
    sent: list[Tensor] | None,
    formula: str,
    alpha: float,
) -> None:
    return None


@torch.library.register_fake("diloco::mean_merge")  # type: ignore[untyped-decorator]
def _mean_merge(deltas: list[Tensor], weights: Tensor) -> Tensor:
    return torch.empty_like(deltas[0])


@torch.library.register_fake("diloco::rda_merge")  # type: ignore[untyped-decorator]
def _rda_merge(deltas: list[Tensor], weights: Tensor) -> Tensor:
    return torch.empty_like(deltas[0])


@torch.library.register_fake("diloco::outer_step")  # type: ignore[untyped-decorator]
def _outer_step(gradient: Tensor, theta: Tensor, state: Tensor | None, settings: str, step: int) -> None:
    return None
