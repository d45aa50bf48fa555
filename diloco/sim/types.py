"""What a virtual cluster is made of, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LearnerSpec:
    """One learner. `target` is where its data pulls every parameter in a cluster without a model."""

    id: str
    step_s: float = 1.0
    start_s: float = 0.0
    tokens_per_step: int = 100
    jitter: float = 0.0  # a step takes step_s * (1 + uniform(-jitter, jitter))
    target: float = 1.0


@dataclass(frozen=True)
class Member:
    """A merged contribution: tokens [start, end) of one incarnation of a learner."""

    learner: str
    incarnation: int
    start: int
    end: int
    steps: int
    weight: float


@dataclass(frozen=True)
class Merge:
    """One merged round."""

    fragment: int
    version: tuple[int, int]
    at: float
    clock: int  # T_K when the round opened
    reason: str  # why it closed
    delta_norm: float  # of the merged outer gradient
    syncer_life: int
    lost: bool  # a later life of the syncer went on without this version
    members: tuple[Member, ...]


@dataclass
class Ledger:
    """A learner's tokens over all its lives, summed over fragments: merged + discarded + open = processed.

    `open` is what may still be merged, on the way or waiting; after a death that is `lost`, unless it was merged later.
    """

    processed: int = 0
    merged: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    open: int = 0

    @property
    def merged_fraction(self) -> float:
        return self.merged / self.processed if self.processed else 0.0
