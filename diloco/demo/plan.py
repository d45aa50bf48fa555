"""The fixed parts of the experiment: who takes part, with which settings, and when the kill comes."""

from __future__ import annotations

from dataclasses import dataclass

SLOWDOWN = {"learner-0": 1.0, "learner-1": 1.0, "learner-2": 1.5, "learner-3": 3.0}
REFERENCE = "learner-0"  # full speed, never killed: its steps are the clock of the run
VICTIM = "learner-1"
SYNC_EVERY = 24

SYNCER_SETTINGS = {
    "sync-every": str(SYNC_EVERY),
    "num-fragments": "24",
    "overlap-steps": "2",
    "merge": "rda",
    "outer-optimizer": "sgd",
    "outer-lr": "1",
    "adopt": "rebase",
    "min-quorum": "1",
    "grace": "adaptive",
    "wire-dtype": "bf16",
}

STEPS = 480
QUICK_STEPS = 168
# So early the advantage over a single learner has only begun to show: `--quick` asks that merging does no harm.
QUICK_ALLOWANCE = 0.05
LEAST_STEPS = 6 * SYNC_EVERY  # fewer leave no time to come back and be merged
WEIGHTS_EVERY = 24  # steps between two points of the loss curve


@dataclass(frozen=True)
class Timing:
    """Steps of the reference learner at which things happen."""

    steps: int

    @property
    def kill(self) -> int:
        return self.steps // 3

    @property
    def restart(self) -> int:
        return self.steps // 2
