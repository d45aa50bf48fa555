"""A GradScaler keeps its books by optimizer object, so it takes a wrapper and its inner optimizer for two."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

# Not public: a torch without it has no check, and test_gradients_are_never_divided_twice says so.
_UNSCALES = getattr(getattr(GradScaler, "_unscale_grads_", None), "__code__", None)


def refuse_second_division(frame: Any, inner: Iterable[Optimizer]) -> None:
    """RuntimeError if `frame` is a scaler about to divide gradients that it has divided for an inner optimizer."""
    if frame.f_code is not _UNSCALES:
        return
    states = frame.f_locals["self"]._per_optimizer_states
    if any(id(one) in states and states[id(one)]["stage"].name != "READY" for one in inner):
        raise RuntimeError(
            "scaler.unscale_() was called with the inner optimizer and scaler.step() with the DiLoCoOptimizer: the "
            "gradients would be divided by the scale twice. Expected the DiLoCoOptimizer in both calls"
        )


caller = sys._getframe
