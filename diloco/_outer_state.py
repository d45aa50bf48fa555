"""The wrapper's own state as an object of its own, as torch.distributed.checkpoint wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.optimizer import DiLoCoOptimizer


class OuterState:
    """dcp.save({"outer": opt.outer_state(), ...}) and dcp.load of the same. Never part of the optimizer's own state:
    loading that casts it to the parameters' dtypes."""

    def __init__(self, optimizer: DiLoCoOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer._outer_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer._load_outer_state_dict(state_dict)
