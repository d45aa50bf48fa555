"""diloco.Learner: takes part in a run from any training loop. DiLoCoOptimizer is built on it."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from diloco import _exit, _resume, _saved, config
from diloco._errors import logger
from diloco._goodput import describe, goodput, lost_share
from diloco._late_load import warn_of_late_loads
from diloco._native import _C
from diloco._replaced import Watch
from diloco._sharded import whole
from diloco.island import Island, Ranks, make_island
from diloco.parameters import Named, Parameter, collect, notice_buffers, repeatable

_T = TypeVar("_T")
_EXIT_FLUSH_S = 1.0
_CALLS_KEPT = 1 << 16
_STEPS_KEPT = 1 << 12  # whose token counts a saved state can name
_ARGUMENTS = ("syncer", "learner_id", "run_id", "ledger_dir", "give_up_after_s", "join_timeout_s", "island")


class StepResult(NamedTuple):
    """What a step boundary did."""

    adopted: int  # fragments taken over from the syncer
    reset: list[Tensor]  # parameters whose inner optimizer state must be reset: their last delta was not finite


class Learner:
    """One learner of a run.

    Args:
        named_parameters: the model, or pairs of name and tensor. Trainable floating-point and complex tensors take
            part, complex ones as their real view.
        syncer: "host:port" of the syncer; default DILOCO_SYNCER, then 127.0.0.1:29400.
        learner_id: at most 64 bytes of text, unique in the run; default DILOCO_LEARNER_ID, then host and rank under
            torchrun, then random.
        run_id: must equal the syncer's, if that has one; default DILOCO_RUN_ID.
        ledger_dir: folder for the exact account of tokens, a small file that survives SIGKILL; default
            DILOCO_LEDGER_DIR, then none.
        give_up_after_s: raise ConnectionError after so long without a syncer; 0 = never, train on alone.
        join_timeout_s: how long the constructor waits for the global weights; an unreachable syncer ends the wait.
        island: the process group, or one dimension of a device mesh, whose ranks train one copy of the model together
            and are this learner; all of them make it, step it and close it. Default: the default group, where
            torch.distributed has more than one rank. False: this process is a learner by itself.
        settings: names of the settings table. They live on the syncer; one given here must equal the syncer's, or
            the learner is refused, naming both.

    Raises ValueError (refused, wrong option), TypeError (unknown option), ConnectionError (gave up). One thread, the
    training thread, may use it; the network has a thread of its own that never touches Python.
    """

    _island: Island | None = None

    def __init__(
        self,
        named_parameters: Named,
        syncer: str | None = None,
        *,
        learner_id: str | None = None,
        run_id: str | None = None,
        ledger_dir: str | os.PathLike[str] | None = None,
        give_up_after_s: float = 0.0,
        join_timeout_s: float = 10.0,
        island: Ranks = None,
        **settings: config.SettingValue,
    ) -> None:
        named_parameters = repeatable(named_parameters)
        parameters = _trainable(named_parameters)
        self._start(
            named_parameters,
            parameters,
            syncer=syncer,
            learner_id=learner_id,
            run_id=run_id,
            ledger_dir=ledger_dir,
            give_up_after_s=give_up_after_s,
            join_timeout_s=join_timeout_s,
            island=island,
            settings=settings,
        )

    @classmethod
    def _of(cls, model: Named, parameters: list[Parameter], **options: Any) -> Learner:
        learner = cls.__new__(cls)
        learner._start(model, parameters, **options)
        return learner

    def _start(
        self,
        model: Named,
        parameters: list[Parameter],
        *,
        syncer: str | None,
        learner_id: str | None,
        run_id: str | None,
        ledger_dir: str | os.PathLike[str] | None,
        give_up_after_s: float,
        join_timeout_s: float,
        island: Ranks,
        settings: dict[str, config.SettingValue],
    ) -> None:
        self._began = time.perf_counter()
        if syncer is not None and not isinstance(syncer, str):
            raise TypeError(f'syncer: expected text like "127.0.0.1:29400", got {syncer!r}')
        texts = config.environment_settings() | config.setting_texts(settings, "a learner", _ARGUMENTS)
        from_environment = texts.pop("run_id", "")
        staging_bytes = int(texts.pop("staging_bytes", "0"))
        self._syncer = config.argument(syncer, "DILOCO_SYNCER", config.DEFAULT_SYNCER)
        learner_id = config.argument(learner_id, "DILOCO_LEARNER_ID", config.default_learner_id())
        self._island = member = make_island(island, parameters, learner_id, texts)
        self.rank, self.ranks = (member.rank, member.ranks) if member else (0, 1)
        self._prepare(model, parameters)
        self._c = _C.Learner(
            parameters=[(p.name, p.real, p.aliases) for p in parameters],
            syncer=self._syncer,
            learner_id=member.learner_id if member else learner_id,
            run_id=run_id if run_id is not None else from_environment,
            settings=texts,
            give_up_after_s=float(give_up_after_s),
            staging_bytes=staging_bytes,
            ledger_dir=os.fspath(ledger_dir) if ledger_dir is not None else os.environ.get("DILOCO_LEDGER_DIR", ""),
            linger_s=_EXIT_FLUSH_S,
            island=member.native if member else None,
        )
        self.learner_id = self._c.learner_id()
        _exit.close_learner_at_exit(self)
        try:
            self._join(join_timeout_s)
        except BaseException:
            self._c.close(0.0)
            raise
        warn_of_late_loads(model, self)

    def _prepare(self, model: Named, parameters: list[Parameter]) -> None:
        """All there is but the native learner."""
        self._parameters = parameters
        self._views = [parameter for parameter in parameters if parameter.real is not parameter.tensor]
        self._watch = Watch(model, parameters)
        self._before = _saved.Counters()
        self._recent: deque[int] = deque(maxlen=_STEPS_KEPT)  # token counts of the last steps
        self._adopted = self._fragments = 0  # adoptions since all places were looked at; how many make a round
        self._came_round = False
        self._carried: list[Tensor] = []  # resets that resuming brought, for the next step to tell
        self.closed = False  # also in a forked child, where it cannot be used
        self._pid = os.getpid()
        self._calls: deque[float] = deque(maxlen=_CALLS_KEPT)
        self._blocked_s = self._longest_s = 0.0
        self._blocked_calls = 0
        self._joining_s = self._catching_up_s = self._closing_s = 0.0
        self._ended: float | None = None

    @property
    def incarnation(self) -> str:
        """Of this life of the learner, 16 hex digits; one for all ranks of an island."""
        return f"{self._c.incarnation():016x}"

    def _join(self, timeout_s: float) -> None:
        start = time.perf_counter()
        try:
            joined = self._c.join(timeout_s, self._write_log)
        finally:
            now = time.perf_counter()
            self._account(now - start)
            self._joining_s, self._catching_up_s = now - start, now - self._began
            self._write_log()
        logger.info("[%s] %s", self.learner_id, self._c.describe())
        stats = self._c.stats()
        if joined:
            self._fill()
            if any(n > 0 for _, n in stats["versions"]):
                logger.info(
                    "[%s] the run is under way: the model has its global weights now, in place of those it had. To go "
                    "on with work of an earlier life, load that learner's saved state",
                    self.learner_id,
                )
        elif stats["state"] == "joining":  # the core itself says when nobody is there
            logger.warning(
                "[%s] the global weights of the syncer at %s were not here after %g s; training starts from the local "
                "ones and joins as soon as they are",
                self.learner_id,
                self._syncer,
                timeout_s,
            )

    @torch.no_grad()
    def _fill(self) -> None:
        """Memory that had no values (to_empty() after the meta device) may hold NaN; NaN - NaN is no displacement."""
        for index, parameter in enumerate(self._parameters):
            if not torch.isfinite(parameter.real).all():
                parameter.real.copy_(self._c.anchor(index, parameter.real))

    def step(self, tokens: int = 1, *, lr: float = 0.0) -> StepResult:
        """After each real optimizer step, with the number of tokens (or samples) it trained on.

        Counts, stages, adopts and reports; waits for nobody, except in lockstep mode. A step of 0 tokens is a step
        without weight: it counts as one, and what it changed travels with the tokens of the next. With `lr`, the inner
        learning rate, the syncer can warn when a learner's schedule is not that of the others.
        """
        return self._step(_token_count(tokens), float(lr))

    def add_parameters(self, named_parameters: Named) -> None:
        """Tensors that the model has got since: a new head, thawed layers. Those known already are passed over.

        The run takes them once another learner has added the same ones (the only learner's at once); until then, and
        where nobody else does, this learner trains them alone, and the log says so. What a learner has added must be
        in the model from the start in its next life. ValueError in an island or in collective mode, whose ranks cannot
        do this together.
        """
        if why := self._cannot_grow():
            raise ValueError(f"add_parameters: {why}; make a new learner of the whole model on every rank")
        known = {id(parameter.tensor) for parameter in self._parameters}
        self._add([p for p in collect(repeatable(named_parameters)) if id(p.tensor) not in known])

    def _cannot_grow(self) -> str:
        """ "" or why."""
        return "the ranks of an island cannot add parameters" if self._island is not None else ""

    def _add(self, parameters: list[Parameter]) -> None:
        if not parameters:
            return
        self._check_process()
        self._c.grow([(p.name, p.real, p.aliases) for p in parameters])
        self._write_log()
        self._parameters += parameters
        self._views += [parameter for parameter in parameters if parameter.real is not parameter.tensor]
        self._watch.add(parameters)

    def _step(self, tokens: int, lr: float) -> StepResult:
        start = time.perf_counter()
        logged = True
        # All of this runs with a cold cache, after a step of training: it costs ten times what it seems to.
        self._watch.look()
        for parameter in self._views:
            parameter.follow()
        if self._island is None:
            self._recent.append(tokens)
        try:
            adopted, reset, logged, counted = self._c.boundary(tokens, lr, self._write_log)
            if self._island is not None:
                self._recent.append(counted)
        finally:
            if logged:
                self._write_log()
            self._account(time.perf_counter() - start)
        self._came_round = adopted > 0 and self._comes_round(adopted)
        if self._came_round:
            self._watch.look_at_all()
        carried, self._carried = self._carried, []
        return StepResult(adopted, carried + [self._parameters[index].tensor for index in reset])

    def _comes_round(self, adopted: int) -> bool:
        """True when as many fragments have been adopted as there are: what walks over the whole model belongs there,
        and not into every step that adopts something."""
        self._adopted += adopted
        if self._adopted < self._fragments:
            return False
        self._adopted, self._fragments = 0, len(self._c.stats()["versions"])
        return True

    def stats(self) -> dict[str, Any]:
        """The learner's account: state, steps, tokens, adoptions, versions, bytes, time spent in here, and under
        "goodput" where all its time went (diloco._goodput.goodput defines the terms).

        `total_steps` and `total_tokens` include the lives a loaded state came from. The keys are always the same. In an
        island, steps and tokens are the island's on every rank, tokens without those of the last step (but in
        lockstep and after close()); only rank 0 knows what became of them.
        """
        return {
            "learner_id": self.learner_id,
            "incarnation": self.incarnation,
            "syncer": self._syncer,
            "rank": self.rank,
            "ranks": self.ranks,
            **self._counts(),
        }

    def _counts(self) -> dict[str, Any]:
        stats = self._c.stats()
        self._write_log()
        return {
            **stats,
            "total_steps": stats["steps"] + self._before.steps,
            "total_tokens": stats["tokens"] + self._before.tokens,
            "blocked_s": self._blocked_s,
            "blocked_longest_s": self._longest_s,
            "blocked_calls": self._blocked_calls,
            "goodput": self._goodput(stats),
        }

    def _waited_s(self, stats: dict[str, Any]) -> float:
        return float(stats["hold_s"] + stats["rank_waits_s"])

    # A finalizer may ask for stats() when the interpreter has taken this module apart already.
    _terms, _share = staticmethod(goodput), staticmethod(lost_share)

    def _goodput(self, stats: dict[str, Any]) -> dict[str, float]:
        return self._terms(
            wall_s=(self._ended or time.perf_counter()) - self._began,
            catching_up_s=self._catching_up_s,
            boundaries_s=self._blocked_s - self._joining_s,
            hold_s=self._waited_s(stats),
            closing_s=self._closing_s,
            lost=self._share(stats),
        )

    def take_blocked(self) -> list[float]:
        """Seconds spent in each call since this was last asked (at most 65536 of them), joining included."""
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def anchor_state_dict(self, *, aliases: bool = True, full: bool = False) -> dict[str, Tensor]:
        """The global weights as this learner last received them (at first: as they were when it was made), copied.

        Has every synchronised tensor under the names that the model's state_dict has without wrappers; buffers and
        frozen tensors are not in it. The names of a tied tensor share one tensor, so torch.save keeps one copy. Without
        `aliases` each is there once, under its first name, as safetensors wants it.

        In an island a DTensor has this rank's part, and no rank waits for another. `full`: whole tensors on the CPU in
        place of DTensors; all ranks of an island call it together, and the same comes out on each.
        """
        out: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            values = parameter.as_parameter(self._c.anchor(index, parameter.real))
            if full:
                values = whole(values)
            for name in (parameter.name, *parameter.aliases) if aliases else (parameter.name,):
                out[name] = values
        return out

    def state_dict(self) -> dict[str, Any]:
        """What the next life of this learner needs: the global weights as last received with their versions, the
        trained tensors as they are (not copied), counters. Tensors, numbers, text, lists and dictionaries only.

        Waits for nobody; rank 0 of an island, until all ranks have made the last step. Save it together with the model
        and the optimizer, between two steps. In an island it is this rank's: docs/islands.md says what to save.
        """
        return _saved.save(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what state_dict() saved: counters, and on top of the global weights the work that had not been
        merged; that work counts again in this life. What may have been merged is dropped, and the log says so.

        After joining, before the first step. Asks the syncer for its status, and waits at most a few seconds. All
        ranks of an island load together. ValueError (on all of them) for a state of another model or format, naming
        the first difference.
        """
        _resume.load(self, state_dict)

    def _state_together(self, pending_tokens: int, full: bool) -> dict[str, Any]:
        return _saved.save_together(self, pending_tokens, full=full)

    def _of_leader(self, value: Callable[[], _T]) -> _T:
        """What rank 0 makes of it, on all ranks of an island, which call this together."""
        if self._island is None:
            return value()
        found: _T = self._island.from_leader(value() if self.rank == 0 else None)
        return found

    def _on_all_ranks(self, holds: list[bool]) -> list[bool]:
        """One by one whether it holds on every rank of an island; they call this together."""
        if self._island is None:
            return holds
        return [all(each) for each in zip(*self._island.gather(holds), strict=True)]

    def close(self, flush_s: float = 5.0) -> None:
        """Waits at most `flush_s` until what was sent has arrived, says goodbye, ends the thread. Idempotent."""
        first, self.closed = not self.closed, True
        start = time.perf_counter()
        self._c.close(float(flush_s))
        if first:
            self._ended = time.perf_counter()
            self._closing_s = self._ended - start
        self._write_log()
        if first and os.getpid() == self._pid:
            stats = self._c.stats()
            tail = stats["tokens_outstanding"]
            if stats.get("epoch") == 0 and self.rank == 0:  # without a syncer there are no epochs
                logger.warning(
                    "[%s] closed without ever having reached the syncer at %s: %d steps were made alone, and nothing "
                    "was merged",
                    self.learner_id,
                    self._syncer,
                    stats["steps"],
                )
            logger.info("[%s] closed; the last %d tokens (summed over fragments) are not merged", self.learner_id, tail)
            logger.info("[%s] %s", self.learner_id, describe(self._goodput(stats)))

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<diloco.Learner '{self.learner_id}' of {self._syncer}>"

    def __getstate__(self) -> object:
        raise TypeError("a diloco.Learner is a live connection and cannot be copied or pickled; make a new one there")

    def _close_at_exit(self) -> None:
        self.close(_EXIT_FLUSH_S)

    def _after_fork(self) -> None:
        self.closed = True

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"learner '{self.learner_id}' belongs to process {self._pid} and cannot be used in its child "
                f"{os.getpid()}: threads and sockets do not survive fork(); make a learner in the child, or leave it "
                "to the parent"
            )

    def _account(self, seconds: float) -> None:
        self._calls.append(seconds)
        self._blocked_s += seconds
        self._blocked_calls += 1
        self._longest_s = max(self._longest_s, seconds)

    def _write_log(self) -> None:
        for level, text in self._c.take_log():
            logger.log(getattr(logging, level), "[%s] %s", self.learner_id, text)


def _trainable(model: Named) -> list[Parameter]:
    parameters = collect(model)
    if not parameters:
        raise ValueError("nothing to synchronise: no parameter requires grad; unfreeze what is to be trained first")
    notice_buffers(model)
    return parameters


def _token_count(tokens: Any) -> int:
    try:
        count = int(tokens)
        if count == tokens and 0 <= count < 1 << 63:
            return count
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"expected a whole number of tokens, at least 0, got {tokens!r}")


def disconnected_stats(steps: int, tokens: int) -> dict[str, Any]:
    """What stats() gives for a copy that takes no part in a run: every key, nothing done."""
    texts = dict.fromkeys(("learner_id", "incarnation", "syncer"), "")
    counts = dict.fromkeys(
        [
            *("epoch", "steps", "tokens", "clock", "run_clock", "run_tokens", "adoptions", "contributions_sent"),
            *("contributions_merged", "reconnects", "tokens_merged", "tokens_outstanding", "tokens_absent"),
            *("staged_bytes", "sent_image_bytes", "arriving_bytes", "bytes_in", "bytes_out", "malformed_frames"),
            *("blocked_calls", "rank", "ranks", "rank_exchanges", "rank_waits"),
        ],
        0,
    )
    return {
        **texts,
        "state": "disconnected",
        **counts,
        "discarded": {},
        "versions": [],
        "total_steps": steps,
        "total_tokens": tokens,
        **dict.fromkeys(("blocked_s", "blocked_longest_s", "stage_s", "adopt_s", "hold_s"), 0.0),
        **dict.fromkeys(("rank_waits_s", "rank_waits_longest_s"), 0.0),
        "goodput": goodput(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    }
