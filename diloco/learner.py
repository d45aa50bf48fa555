"""diloco.Learner: takes part in a run from any training loop. DiLoCoOptimizer is built on it."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from diloco import _exit, config
from diloco._errors import logger
from diloco._late_load import warn_of_late_loads
from diloco._native import _C
from diloco.parameters import Named, Parameter, collect, notice_buffers, repeatable

_EXIT_FLUSH_S = 1.0
_CALLS_KEPT = 1 << 16
_ARGUMENTS = ("syncer", "learner_id", "run_id", "ledger_dir", "give_up_after_s", "join_timeout_s")


class StepResult(NamedTuple):
    """What a step boundary did."""

    adopted: int  # fragments taken over from the syncer
    reset: list[Tensor]  # parameters whose inner optimizer state must be reset: their last delta was not finite


class Learner:
    """One learner of a run.

    Args:
        named_parameters: the model, or pairs of name and tensor. Trainable floating-point tensors take part.
        syncer: "host:port" of the syncer; default DILOCO_SYNCER, then 127.0.0.1:29400.
        learner_id: at most 64 bytes of text, unique in the run; default DILOCO_LEARNER_ID, then host and rank under
            torchrun, then random.
        run_id: must equal the syncer's, if that has one; default DILOCO_RUN_ID.
        ledger_dir: folder for the exact account of tokens, a small file that survives SIGKILL; default
            DILOCO_LEDGER_DIR, then none.
        give_up_after_s: raise ConnectionError after so long without a syncer; 0 = never, train on alone.
        join_timeout_s: how long the constructor waits for the global weights; an unreachable syncer ends the wait.
        settings: names of the settings table. They live on the syncer; one given here must equal the syncer's, or
            the learner is refused, naming both.

    Raises ValueError (refused, wrong option), TypeError (unknown option), ConnectionError (gave up). One thread, the
    training thread, may use it; the network has a thread of its own that never touches Python.
    """

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
        **settings: config.SettingValue,
    ) -> None:
        named_parameters = repeatable(named_parameters)
        parameters = _trainable(named_parameters)
        self._start(
            parameters,
            syncer=syncer,
            learner_id=learner_id,
            run_id=run_id,
            ledger_dir=ledger_dir,
            give_up_after_s=give_up_after_s,
            join_timeout_s=join_timeout_s,
            settings=settings,
        )
        warn_of_late_loads(named_parameters, self)

    @classmethod
    def _of(cls, parameters: list[Parameter], **options: Any) -> Learner:
        learner = cls.__new__(cls)
        learner._start(parameters, **options)
        return learner

    def _start(
        self,
        parameters: list[Parameter],
        *,
        syncer: str | None,
        learner_id: str | None,
        run_id: str | None,
        ledger_dir: str | os.PathLike[str] | None,
        give_up_after_s: float,
        join_timeout_s: float,
        settings: dict[str, config.SettingValue],
    ) -> None:
        if syncer is not None and not isinstance(syncer, str):
            raise TypeError(f'syncer: expected text like "127.0.0.1:29400", got {syncer!r}')
        texts = config.environment_settings() | config.setting_texts(settings, "a learner", _ARGUMENTS)
        from_environment = texts.pop("run_id", "")
        staging_bytes = int(texts.pop("staging_bytes", "0"))
        self._syncer = config.argument(syncer, "DILOCO_SYNCER", config.DEFAULT_SYNCER)
        self._parameters = parameters
        self.closed = False  # also in a forked child, where it cannot be used
        self._pid = os.getpid()
        self._calls: deque[float] = deque(maxlen=_CALLS_KEPT)
        self._blocked_s = self._longest_s = 0.0
        self._blocked_calls = 0
        self._c = _C.Learner(
            parameters=[(p.name, p.tensor, p.aliases) for p in parameters],
            syncer=self._syncer,
            learner_id=config.argument(learner_id, "DILOCO_LEARNER_ID", config.default_learner_id()),
            run_id=run_id if run_id is not None else from_environment,
            settings=texts,
            give_up_after_s=float(give_up_after_s),
            staging_bytes=staging_bytes,
            ledger_dir=os.fspath(ledger_dir) if ledger_dir is not None else os.environ.get("DILOCO_LEDGER_DIR", ""),
            linger_s=_EXIT_FLUSH_S,
        )
        self.learner_id = self._c.learner_id()
        self.incarnation = f"{self._c.incarnation():016x}"
        _exit.close_learner_at_exit(self)
        try:
            self._join(join_timeout_s)
        except BaseException:
            self._c.close(0.0)
            raise

    def _join(self, timeout_s: float) -> None:
        start = time.perf_counter()
        try:
            joined = self._c.join(timeout_s, self._write_log)
        finally:
            self._account(time.perf_counter() - start)
            self._write_log()
        logger.info("[%s] %s", self.learner_id, self._c.describe())
        if not joined and self._c.stats()["state"] == "joining":  # the core itself says when nobody is there
            logger.warning(
                "[%s] the global weights of the syncer at %s were not here after %g s; training starts from the local "
                "ones and joins as soon as they are",
                self.learner_id,
                self._syncer,
                timeout_s,
            )

    def step(self, tokens: int = 1, *, lr: float = 0.0) -> StepResult:
        """After each real optimizer step, with the number of tokens (or samples) it trained on.

        Counts, stages, adopts and reports; waits for nobody, except in lockstep mode. With `lr`, the inner learning
        rate, the syncer can warn when a learner's schedule is not that of the others.
        """
        return self._step(_token_count(tokens), float(lr))

    def _step(self, tokens: int, lr: float) -> StepResult:
        start = time.perf_counter()
        logged = True
        try:
            adopted, reset, logged = self._c.boundary(tokens, lr, self._write_log)
        finally:
            if logged:
                self._write_log()
            self._account(time.perf_counter() - start)
        return StepResult(adopted, [self._parameters[index].tensor for index in reset])

    def stats(self) -> dict[str, Any]:
        """The learner's account: state, steps, tokens, adoptions, versions, bytes, and time spent in here."""
        return {
            "learner_id": self.learner_id,
            "incarnation": self.incarnation,
            "syncer": self._syncer,
            **self._counts(),
        }

    def _counts(self) -> dict[str, Any]:
        stats = self._c.stats()
        self._write_log()
        return {
            **stats,
            "blocked_s": self._blocked_s,
            "blocked_longest_s": self._longest_s,
            "blocked_calls": self._blocked_calls,
        }

    def take_blocked(self) -> list[float]:
        """Seconds spent in each call since this was last asked (at most 65536 of them), joining included."""
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def anchor_state_dict(self) -> dict[str, Tensor]:
        """The global weights as this learner last received them (at first: as they were when it was made), copied.

        Has every name of every synchronised tensor; buffers and frozen tensors are not in it.
        """
        out: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            values = self._c.anchor(index, parameter.tensor).to(parameter.tensor.dtype)
            for name in (parameter.name, *parameter.aliases):
                out[name] = values
        return out

    def close(self, flush_s: float = 5.0) -> None:
        """Waits at most `flush_s` until what was sent has arrived, says goodbye, ends the thread. Idempotent."""
        first, self.closed = not self.closed, True
        self._c.close(float(flush_s))
        self._write_log()
        if first and os.getpid() == self._pid:
            tail = self._c.stats()["tokens_outstanding"]
            logger.info("[%s] closed; the last %d tokens (summed over fragments) are not merged", self.learner_id, tail)

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
    count = int(tokens)
    if count != tokens or count < 0:
        raise ValueError(f"expected a whole number of tokens, at least 0, got {tokens!r}")
    return count
