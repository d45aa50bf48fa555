"""Plain data of one demo run: what `run` collects and what `checks`, `report` and `picture` read. No behaviour.

Times `t` are seconds since the start of the run (the parent's monotonic clock), except in LearnerConfig.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LearnerConfig:
    """What a learner process is told, as JSON. Without `syncer` it trains alone."""

    learner: str
    shard: int
    shards: int
    seed: int  # of the model's weights and the data order
    life: int  # 0, then 1 after a restart: continues with other data
    slowdown: float  # 1.0 = full speed; else the process sleeps until a step has taken so many times `pace`
    progress: str  # file: one JSON line a step
    pace: str  # file: seconds a step takes at full speed, kept up to date by the parent
    stop: str  # the process ends after the step at which this file exists
    parent: int  # pid: dies with it
    max_steps: int = 0  # 0 = until `stop`
    syncer: str = ""
    ledger_dir: str = ""
    weights: str = ""  # folder for copies of the global weights (alone: its own), "" = none
    weights_every: int = 0


@dataclass(frozen=True)
class Step:
    """One inner step of a learner. `inside_s`: spent in DiLoCo; `gap_s`: since the end of the step before."""

    t: float
    step: int
    tokens: int
    loss: float
    busy_s: float
    inside_s: float
    gap_s: float


@dataclass
class Life:
    """One process of a learner."""

    learner: str
    pid: int
    started_s: float
    slowdown: float
    state: str = "starting"
    joined_s: float | None = None
    ended_s: float | None = None
    returncode: int | None = None
    incarnation: str = ""
    join_took_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    learner: str
    incarnation: str
    tokens: int
    weight: float


@dataclass(frozen=True)
class Round:
    """One merge, from the event log."""

    t: float
    number: int
    fragment: int
    version: tuple[int, int]
    members: tuple[Member, ...]
    reason: str
    wait_s: float


@dataclass(frozen=True)
class Kill:
    learner: str
    pid: int
    signal: int
    wait_status: int
    at_s: float
    back_at_s: float
    back_incarnation: str = ""
    merged_again_at_s: float | None = None


@dataclass(frozen=True)
class LossPoint:
    """Held-out loss of a copy of the weights: the learner's clock and the tokens of all learners when it was made."""

    t: float
    step: int
    tokens: int
    loss: float


@dataclass
class Losses:
    start: float = float("nan")
    end: float = float("nan")
    alone: float = float("nan")
    curve: list[LossPoint] = field(default_factory=list)
    alone_curve: list[LossPoint] = field(default_factory=list)


@dataclass(frozen=True)
class Paired:
    """Seconds of paired steps, one learner wrapped and one bare, taken in turn on the same machine."""

    wrapped_s: tuple[float, ...] = ()
    bare_s: tuple[float, ...] = ()
    inside_s: tuple[float, ...] = ()


@dataclass
class Record:
    """Everything about one run."""

    seed: int
    steps: int
    fragments: int = 0
    reference: str = ""  # the fastest learner
    allowance: float = 0.0  # by so much the global loss may be above that of a single learner
    lives: list[Life] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    kill: Kill | None = None
    losses: Losses = field(default_factory=Losses)
    audit: dict[str, Any] = field(default_factory=dict)
    paired: Paired = field(default_factory=Paired)
    status: dict[str, Any] = field(default_factory=dict)
    alone_steps: int = 0
    trained_s: float = 0.0
    wall_s: float = 0.0

    def learners(self) -> list[str]:
        return sorted({life.learner for life in self.lives})

    def lives_of(self, learner: str) -> list[Life]:
        return [life for life in self.lives if life.learner == learner]
