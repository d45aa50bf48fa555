"""The wrapper's own state as an object of its own, as torch.distributed.checkpoint wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.optimizer import DiLoCoOptimizer


class OuterState:
    """dcp.save({"outer": opt.outer_state(), ...}) and dcp.load of the same. Never part of the optimizer's own state:
    loading that casts it to the parameters' dtypes."""

    def __init__(self, optimizer: DiLoCoOptimizer, full: bool = False) -> None:
        self._optimizer = optimizer
        self._full = full

    def state_dict(self) -> dict[str, Any]:
        # Loading writes into the tensors that this gives: not into the model's own, before anything has been checked.
        return self._optimizer._outer_state_together(self._full)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer._load_outer_state_dict(state_dict)
