"""One experiment: learners train the small model in the virtual cluster; what came out, as numbers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from diloco._native import _C
from diloco.config import SettingValue, setting_texts
from diloco.evidence import data
from diloco.evidence.model import TinyModel, loss_of
from diloco.sim import LearnerSpec, VirtualCluster

STEPS = 640  # of a learner with step_s = 1
WARMUP = 20
LAST_LR = 0.1  # share of the learning rate that is left at the end
TOKENS = data.BATCH * data.CONTEXT
CURVE_S = 20.0

Settings = tuple[tuple[str, SettingValue], ...]
Action = tuple[float, str, int]  # time, what, learner

DECOUPLED: dict[str, SettingValue] = {"sync_every": 24, "num_fragments": 8}
# Classic DiLoCo: everybody meets every H steps, the whole model at once.
CLASSIC: dict[str, SettingValue] = {
    "mode": "lockstep",
    "sync_every": 16,
    "num_fragments": 1,
    "overlap_steps": 0,
    "adopt": "overwrite",
    "merge": "mean",
    "grace": "none",
    "wire_dtype": "f32",
}


@cache
def default_texts() -> dict[str, str]:
    return {info.name: info.default_value for info in _C.settings_table()}


def without_defaults(settings: Mapping[str, SettingValue]) -> Settings:
    """In one form, so that equal ones are equal."""
    texts = setting_texts(settings, "Config", ())
    return tuple(sorted((name, settings[name]) for name, text in texts.items() if text != default_texts()[name]))


DECOUPLED_SETTINGS = without_defaults(DECOUPLED)


@dataclass(frozen=True)
class Config:
    """What is run, without the seed. Equal ones are run once."""

    settings: Settings = DECOUPLED_SETTINGS
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # seconds per step of each learner
    starts: tuple[float, ...] = ()  # when each begins; empty: all at 0
    jitter: float = 0.05
    steps: int = STEPS
    iid: bool = True
    lr: float = 3e-3
    pretrain: int = 0  # steps of one learner before the run, which is so much shorter
    delay_s: float = 0.05
    script: tuple[Action, ...] = ()
    miss: float = 0.0  # chance of a learner to be cut off around a round
    curve: bool = False
    plain: bool = False  # one learner, no cluster

    def but(self, **changes: Any) -> Config:
        """Fields by their names, settings by theirs."""
        own = {name: value for name, value in changes.items() if name in self.__dataclass_fields__}
        settings = dict(self.settings) | {name: value for name, value in changes.items() if name not in own}
        return replace(self, **own, settings=without_defaults(settings))

    def run(self, seed: int) -> Result:
        """Deterministic for a machine type: other CPUs round differently."""
        return run_plain(self, seed) if self.plain else Experiment(self, seed).run()

    def setting(self, name: str) -> str:
        return (default_texts() | setting_texts(dict(self.settings), "Config", ()))[name]

    @cached_property
    def every(self) -> int:
        return int(self.setting("sync_every"))

    @cached_property
    def lockstep(self) -> bool:
        return self.setting("mode") == "lockstep"


@dataclass
class Result:
    """Numbers by name; the curve is (virtual time, held-out loss of the outer parameters)."""

    values: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[float, float]] = field(default_factory=list)
    learners: list[dict[str, Any]] = field(default_factory=list)  # of each one, where a table wants it


BASE = Config()
CLASSIC_BASE = Config(settings=without_defaults(CLASSIC), jitter=0.0)


def speeds(learners: int) -> tuple[float, ...]:
    return (1.0,) * learners


def held_out_loss(model: nn.Module, seed: int) -> float:
    with torch.no_grad():
        return float(loss_of(model, data.text(seed).held_out))


class Worker:
    """A life of a learner: model, optimizer, learning-rate schedule."""

    def __init__(self, model: nn.Module, stream: data.Stream, lr: float) -> None:
        self.model, self.stream, self.lr, self.steps = model, stream, lr, 0
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, fused=True)

    def step(self, progress: float) -> None:
        """`progress` is the share of the training that is over."""
        decay = LAST_LR + (1.0 - LAST_LR) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        self.optimizer.param_groups[0]["lr"] = self.lr * decay * min(1.0, (self.steps + 1) / WARMUP)
        loss = loss_of(self.model, self.stream.next())
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.steps += 1


class Experiment:
    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.seed = config, seed
        self.learners = len(config.speeds)
        self.workers: dict[int, Worker] = {}
        self.streams = [data.Stream(seed, i, self.learners, config.iid) for i in range(self.learners)]
        self.evaluated = TinyModel(data.VOCABULARY, seed)
        self.first = pretrained(seed, config.pretrain, config.steps, config.lr)
        self.rounds = Rounds(config, self.learners)
        starts = config.starts or (0.0,) * self.learners
        self.cluster = VirtualCluster(
            [
                LearnerSpec(f"l{i}", step_s, start, TOKENS, config.jitter)
                for i, (step_s, start) in enumerate(zip(config.speeds, starts, strict=True))
            ],
            model=self.model,
            begin=self.begin,
            step=self.step,
            settings=dict(config.settings),
            seed=seed + 1,
            delay_s=config.delay_s,
        )

    def model(self, learner: int) -> nn.Module:
        model = TinyModel(data.VOCABULARY, self.seed)
        model.load_state_dict(self.first)
        return model

    def begin(self, learner: int, model: nn.Module) -> None:
        self.workers[learner] = Worker(model, self.streams[learner], self.config.lr)

    def step(self, learner: int, model: nn.Module) -> int:
        config, worker = self.config, self.workers[learner]
        done = worker.steps if config.lockstep else self.cluster.now
        self.rounds.before(learner, worker)
        worker.step((done + config.pretrain) / config.steps)
        self.rounds.after(learner, worker)
        return TOKENS

    def run(self) -> Result:
        result = Result()
        end = float(self.config.steps - self.config.pretrain)
        if self.config.lockstep:
            self.run_lockstep(end)
        else:
            for time, action, learner in self.moments(end):
                self.cluster.run_until(time)
                if action == "look":
                    result.curve.append((time, self.loss()))
                else:
                    self.act(action, learner)
            self.cluster.run_until(end)
        for violation in self.cluster.check():
            raise AssertionError(violation)
        result.values = self.values()
        return result

    def run_lockstep(self, steps: float) -> None:
        """Until the round at the last step; the time that learners wait at rounds comes on top."""
        rounds = int(steps) // self.config.every * int(self.config.setting("num_fragments"))
        self.cluster.run_until(steps)
        while len(self.cluster.merges()) < rounds:
            if self.cluster.now > 10 * steps:
                raise AssertionError(f"{len(self.cluster.merges())} of {rounds} rounds in lockstep, then no more")
            self.cluster.run_until(self.cluster.now + 0.25)

    def moments(self, end: float) -> list[Action]:
        looks = [(CURVE_S * (i + 1), "look", 0) for i in range(int(end / CURVE_S))] if self.config.curve else []
        return sorted([*self.config.script, *self.misses(end), *looks])

    def misses(self, end: float) -> Iterator[Action]:
        """Cut off from shortly before a round until after it, by chance."""
        generator = random.Random(self.seed)
        every = self.config.every
        for n in range(1, int(end / every) + 1):
            for learner in range(self.learners):
                if generator.random() < self.config.miss:
                    yield (n * every - 1.5, "cut", learner)
                    yield (n * every + 3.0, "heal", learner)

    def act(self, action: str, learner: int) -> None:
        cluster = self.cluster
        actions = {
            "kill": lambda: cluster.kill_learner(learner),
            "start": lambda: cluster.start_learner(learner),
            "cut": lambda: cluster.partition_learner(learner, True),
            "heal": lambda: cluster.partition_learner(learner, False),
            "freeze": lambda: cluster.freeze_learner(learner, True),
            "thaw": lambda: cluster.freeze_learner(learner, False),
            "kill syncer": cluster.kill_syncer,
            "start syncer": cluster.start_syncer,
        }
        actions[action]()

    def loss(self) -> float:
        """Of the outer parameters, on held-out text."""
        weights = self.cluster.global_parameters()
        if not weights:
            return math.nan
        self.evaluated.load_state_dict(weights)
        return held_out_loss(self.evaluated, self.seed)

    def values(self) -> dict[str, float]:
        cluster = self.cluster
        merges = cluster.merges()
        squares: dict[int, list[float]] = {}
        for merge in merges:
            squares.setdefault(merge.fragment, []).append(merge.delta_norm**2)
        ledgers = [cluster.ledger(i) for i in range(self.learners)]
        processed = sum(ledger.processed for ledger in ledgers)
        values = {
            "loss": self.loss(),
            "rounds": float(len(merges)),
            "members": sum(len(merge.members) for merge in merges) / max(1, len(merges)),
            "norm": math.sqrt(sum(sum(norms) / len(norms) for norms in squares.values())),
            "merged": sum(ledger.merged for ledger in ledgers) / max(1, processed),
            "least_merged": min(ledger.merged_fraction for ledger in ledgers),
            "tokens": processed / max(1, len(cluster.fragments())),
            "goodput": goodput(cluster.records(), min(self.config.speeds)),
            "largest_fragment": float(max((numel for _, numel in cluster.fragments()), default=0)),
        }
        return values | self.rounds.values()


class Rounds:
    """Lockstep: outer gradients of all learners side by side, as they are before they are merged."""

    def __init__(self, config: Config, learners: int) -> None:
        self.every = config.every if config.lockstep else 0
        self.learners = learners
        self.start: dict[int, Tensor] = {}
        self.deltas: dict[int, dict[int, Tensor]] = {}
        self.cosines: list[float] = []
        self.shrinks: list[float] = []

    def wanted(self, steps: int) -> bool:
        return self.every > 1 and self.learners > 1 and steps % self.every == 0

    def before(self, learner: int, worker: Worker) -> None:
        if self.wanted(worker.steps):
            self.start[learner] = flat(worker.parameters)

    def after(self, learner: int, worker: Worker) -> None:
        if not self.wanted(worker.steps):
            return
        deltas = self.deltas.setdefault(worker.steps // self.every, {})
        deltas[learner] = self.start[learner] - flat(worker.parameters)
        if len(deltas) == self.learners:
            self.add(torch.stack([deltas[i] for i in range(self.learners)]))
            del self.deltas[worker.steps // self.every]

    def add(self, deltas: Tensor) -> None:
        norms = deltas.norm(dim=1)
        units = deltas / norms[:, None]
        cosines = units @ units.T
        pairs = self.learners * (self.learners - 1)
        self.cosines.append(float((cosines.sum() - cosines.trace()) / pairs))
        self.shrinks.append(float(deltas.mean(dim=0).norm() / norms.mean()))

    def values(self) -> dict[str, float]:
        if not self.cosines:
            return {}
        return {
            "cosine": sum(self.cosines) / len(self.cosines),
            "shrink": sum(self.shrinks) / len(self.shrinks),
        }


def flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def goodput(records: list[str], fastest_step_s: float) -> float:
    """Advance of the syncer's clock T_K, over the steps that the fastest learner makes in that time."""
    opened: list[dict[str, Any]] = []
    for line in map(json.loads, records):
        if line["event"] != "open":
            continue
        if opened and line["t"] < opened[-1]["t"]:  # another life of the syncer
            opened.clear()
        opened.append(line)
    if len(opened) < 2 or opened[-1]["t"] == opened[0]["t"]:
        return 0.0
    steps = (opened[-1]["t"] - opened[0]["t"]) / fastest_step_s
    return float((opened[-1]["clock"] - opened[0]["clock"]) / steps)


@lru_cache(maxsize=2)
def pretrained(seed: int, steps: int, of: int, lr: float) -> dict[str, Tensor]:
    """The weights a run begins with."""
    model = TinyModel(data.VOCABULARY, seed)
    worker = Worker(model, data.Stream(seed, 10_000, 1, True), lr)
    for step in range(steps):
        worker.step(step / of)
    return model.state_dict()


def run_plain(config: Config, seed: int) -> Result:
    """The same optimizer and schedule, one learner, no DiLoCo."""
    model = TinyModel(data.VOCABULARY, seed)
    worker = Worker(model, data.Stream(seed, 0, 1, config.iid), config.lr)
    for step in range(config.steps):
        worker.step(step / config.steps)
    return Result({"loss": held_out_loss(model, seed), "tokens": float(config.steps * TOKENS)})
