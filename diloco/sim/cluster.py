"""VirtualCluster: csrc/diloco/sim/cluster.h with torch modules as learners."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from diloco._native import _C
from diloco.config import SettingValue, setting_texts
from diloco.parameters import collect
from diloco.sim.types import LearnerSpec, Ledger, Member, Merge

Parameters = nn.Module | dict[str, Tensor]
_ARGUMENTS = ("learners", "model", "layout", "begin", "step", "settings", "seed", "delay_s", "bytes_per_s", "merge_s")


class VirtualCluster:
    """A syncer and learners in virtual time.

    Give `model`, a function from the learner's number to a new module, or `layout`, names with shapes. `begin` is
    called when a life of a learner begins and `step` for each of its steps, both with its number and its module (with
    `layout`: its tensors by name). `step` returns the tokens of the step, or None for the LearnerSpec's. What a
    callback raises comes out of the method that was running; the cluster is of no use afterwards. Callbacks may read
    the cluster but not run it.

    Without `step` the parameters walk towards the LearnerSpec's `target` at `learning_rate`.
    """

    def __init__(
        self,
        learners: Sequence[LearnerSpec],
        *,
        model: Callable[[int], nn.Module] | None = None,
        layout: Mapping[str, Sequence[int]] | None = None,
        begin: Callable[[int, Any], None] | None = None,
        step: Callable[[int, Any], int | None] | None = None,
        settings: Mapping[str, SettingValue] | None = None,
        seed: int = 1,
        delay_s: float = 0.01,
        bytes_per_s: float = 0.0,
        merge_s: float = 0.01,
        payload_memory_bytes: int = 1 << 30,
        learning_rate: float = 0.05,
        **more_settings: SettingValue,
    ) -> None:
        if (model is None) == (layout is None):
            raise TypeError("VirtualCluster expects either model or layout")
        if model is not None and step is None:
            raise TypeError("VirtualCluster with a model expects step, which trains it")
        if not learners or len({spec.id for spec in learners}) != len(learners):
            raise ValueError(f"expected learners with ids of their own, got {[spec.id for spec in learners]}")
        self.specs = tuple(learners)
        self._model, self._begin, self._step = model, begin, step
        self._shapes = _layout_of(model(0)) if model is not None else [(n, list(s), []) for n, s in layout.items()]  # type: ignore[union-attr]
        self._names = [name for name, _, _ in self._shapes]
        self._held: list[Parameters] = [{} for _ in self.specs]
        self._past: list[Ledger] = [Ledger() for _ in self.specs]
        self._fragment_count = 0  # as last known while the syncer was alive
        self._merge_lines: list[dict[str, Any]] = []
        self._records: list[str] = []
        self._in_callback = False
        self.cluster = _C.VirtualCluster(
            setting_texts({**(settings or {}), **more_settings}, "VirtualCluster", _ARGUMENTS),
            self._shapes,
            [(s.id, s.step_s, s.start_s, s.tokens_per_step, s.jitter, s.target) for s in self.specs],
            seed,
            delay_s,
            bytes_per_s,
            merge_s,
            payload_memory_bytes,
            learning_rate,
            step is not None,
        )

    # ---- time and faults ----

    def run_until(self, t: float) -> None:
        """Runs what happens until `t`, in seconds of the virtual clock."""
        if not math.isfinite(t):
            raise ValueError(f"run_until expects a finite time, got {t}")
        self._not_in_callback()
        self.cluster.run_until(t, self._begin_life, self._train if self._step else None)

    @property
    def now(self) -> float:
        return self.cluster.now()

    def kill_learner(self, learner: int) -> None:
        """SIGKILL: its connections are reset."""
        self._not_in_callback()
        if not self.cluster.learner_alive(learner):  # IndexError for one that does not exist
            return
        self._past[learner] = self._account(learner)
        self.cluster.kill_learner(learner)
        self._let_go(learner)

    def start_learner(self, learner: int) -> None:
        """A new incarnation of a learner that is dead, with a new module."""
        self._not_in_callback()
        if self.cluster.learner_alive(learner):
            raise ValueError(f"learner {learner} is alive; kill it first")
        self._let_go(learner)
        self.cluster.start_learner(learner, self._begin_life)

    def freeze_learner(self, learner: int, frozen: bool = True) -> None:
        """SIGSTOP, SIGCONT: silent, with its connections open."""
        self._not_in_callback()
        self.cluster.freeze_learner(learner, frozen)

    def partition_learner(self, learner: int, cut_off: bool = True) -> None:
        """Its frames are held back in both directions, and nobody is told."""
        self._not_in_callback()
        self.cluster.partition_learner(learner, cut_off)

    def poison(self, learner: int) -> None:
        """Its parameters become NaN at its next step."""
        self._not_in_callback()
        self.cluster.poison(learner)

    def kill_syncer(self) -> None:
        self._not_in_callback()
        self._fragment_count = len(self.cluster.fragments()) or self._fragment_count
        self.cluster.kill_syncer()

    def start_syncer(self) -> None:
        """A new one without state."""
        self._not_in_callback()
        self.cluster.start_syncer()

    def stop_syncer(self, give_up_after_s: float = 10.0) -> None:
        """SIGTERM."""
        self._not_in_callback()
        self.cluster.stop_syncer(give_up_after_s)

    # ---- views ----

    @property
    def syncer_alive(self) -> bool:
        return self.cluster.syncer_alive()

    def alive(self, learner: int) -> bool:
        return self.cluster.learner_alive(learner)

    def status(self) -> dict[str, Any] | None:
        """What `diloco status --json` shows; None while the syncer is dead."""
        text = self.cluster.status_json()
        return json.loads(text) if text else None

    def records(self) -> list[str]:
        """The lines of the event log, of all lives of the syncer."""
        new = self.cluster.records(len(self._records))
        self._records += new
        self._merge_lines += [line for line in map(json.loads, new) if line["event"] == "merge"]
        return self._records

    def merges(self) -> list[Merge]:
        self.records()
        merges = []
        for line, told in zip(self._merge_lines, self.cluster.merges(), strict=True):
            fragment, version, at, life, reason, lost, members = told
            merges.append(
                Merge(
                    fragment=fragment,
                    version=version,
                    at=at,
                    clock=line["clock"],
                    reason=reason,
                    delta_norm=line["delta_norm"],
                    syncer_life=life,
                    lost=lost != 0,
                    members=tuple(
                        Member(learner, incarnation, start, end, written["steps"], weight)
                        for (learner, incarnation, start, end, weight), written in zip(
                            members, line["members"], strict=True
                        )
                    ),
                )
            )
        return merges

    def log_lines(self) -> list[str]:
        return self.cluster.log_lines()

    def steps(self, learner: int) -> int:
        """Of the current life."""
        return self.cluster.steps(learner)

    def longest_hold(self, learner: int) -> float:
        """Lockstep: the longest wait at a boundary, in virtual seconds."""
        return self.cluster.longest_hold(learner)

    def merged_fraction(self, learner_id: str) -> float:
        """Share of a learner's tokens that was merged, over all its lives, averaged over fragments."""
        return self.cluster.merged_fraction(learner_id)

    def ledger(self, learner: int | str) -> Ledger:
        """Where a learner's tokens are, over all its lives. The learner by number or id."""
        names = [spec.id for spec in self.specs]
        if isinstance(learner, str):
            learner = names.index(learner)
        total = self._account(learner)
        name = names[learner]
        total.merged = sum(
            member.end - member.start
            for merge in self.merges()
            if not merge.lost
            for member in merge.members
            if member.learner == name
        )
        rest = total.processed - total.merged - sum(total.discarded.values())
        if self.alive(learner):
            total.open = rest
        elif rest > 0:
            total.discarded["lost"] = total.discarded.get("lost", 0) + rest
        return total

    def fragments(self) -> list[tuple[list[str], int]]:
        """Names of the tensors and number of elements of each fragment, as the syncer has planned them."""
        return [([self._names[i] for i in tensors], numel) for tensors, numel in self.cluster.fragments()]

    def peak_payload_bytes(self) -> int:
        """Most that the syncer held of contributions."""
        return self.cluster.peak_payload_bytes()

    def parameters(self, learner: int) -> dict[str, Tensor]:
        """A copy of a learner's parameters; empty while it is dead."""
        return dict(zip(self._names, self.cluster.parameters(learner), strict=False))

    def global_parameters(self) -> dict[str, Tensor]:
        """A copy of the syncer's weights; empty until it has some."""
        return dict(zip(self._names, self.cluster.global_parameters(), strict=False))

    def check(self) -> list[str]:
        """Violated invariants, one sentence each; empty is good."""
        return self.cluster.check()

    # ---- inside ----

    def _not_in_callback(self) -> None:
        if self._in_callback:
            raise RuntimeError(
                "begin and step may read the cluster, but not run or change it; do that between two run_until"
            )

    @contextmanager
    def _callback(self) -> Iterator[None]:
        self._in_callback = True
        try:
            yield
        finally:
            self._in_callback = False

    def _begin_life(self, learner: int, views: list[Tensor]) -> None:
        held: Parameters
        if self._model is not None:
            module = self._model(learner)
            with torch.no_grad():
                for parameter, view in zip(collect(module), views, strict=True):
                    view.copy_(parameter.tensor)
                    parameter.tensor.data = view
            held = module
        else:
            held = dict(zip(self._names, views, strict=True))
        self._held[learner] = held
        if self._begin is not None:
            with self._callback():
                self._begin(learner, held)

    def _train(self, learner: int) -> int | None:
        assert self._step is not None
        with self._callback():
            return self._step(learner, self._held[learner])

    def _let_go(self, learner: int) -> None:
        """The arrays of a life end with it: whoever still has its module keeps a copy of the values."""
        held = self._held[learner]
        for tensor in held.values() if isinstance(held, dict) else held.parameters():
            tensor.data = tensor.data.clone()
        self._held[learner] = {}

    def _account(self, learner: int) -> Ledger:
        """Processed and discarded, of this life and those before it."""
        stats = self.cluster.stats(learner)
        before = self._past[learner]
        total = Ledger(processed=before.processed, discarded=dict(before.discarded))
        if stats is not None:
            self._fragment_count = len(self.cluster.fragments()) or self._fragment_count
            total.processed += stats["tokens"] * self._fragment_count
            for reason, tokens in stats["discarded"].items():
                total.discarded[reason] = total.discarded.get(reason, 0) + tokens
        return total


def _layout_of(module: nn.Module) -> list[tuple[str, list[int], list[str]]]:
    parameters = collect(module)
    for parameter in parameters:
        if parameter.tensor.dtype != torch.float32 or parameter.tensor.device.type != "cpu":
            raise ValueError(f"parameter '{parameter.name}' is {parameter.tensor.dtype}; expected float32 on the CPU")
    return [(p.name, list(p.tensor.shape), p.aliases) for p in parameters]
