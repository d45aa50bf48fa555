"""What the wrapper must know about the insides of torch optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def is_initialising_call(groups: list[dict[str, Any]]) -> bool:
    """True for a step that only creates optimizer state: learning rate 0 everywhere and no gradient but zeros.

    torch.distributed.checkpoint makes such a call by itself, whenever an optimizer has no state yet. A warm-up that
    starts from learning rate 0 is a real step: its gradients are not zero.
    """
    for group in groups:  # no generator: this runs at every step
        if group.get("lr", 1.0) != 0.0:
            return False
    return not any(_has_nonzero(p.grad) for group in groups for p in group["params"] if p.grad is not None)


def _has_nonzero(grad: Tensor) -> bool:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return bool(torch.count_nonzero(values))


@torch.no_grad()
def reset_inner_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Moments and step counters of these parameters back to zero. What is neither is dropped, to be made anew."""
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        if not state:
            continue
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.numel() == 1):
                value.zero_()
            elif isinstance(value, bool) or value is None:
                continue
            elif isinstance(value, int | float):
                state[key] = type(value)(0)
            else:
                optimizer.state.pop(parameter)
                break
