"""Closes what is still open when the interpreter ends, learners before syncers, so that native threads are gone before
Python takes itself apart. A forked child closes nothing: the threads are its parent's."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet


class Closeable(Protocol):
    def _close_at_exit(self) -> None: ...


class ClosesInChild(Closeable, Protocol):
    def _after_fork(self) -> None: ...
    def close(self, flush_s: float) -> None: ...


_learners: WeakSet[ClosesInChild] = WeakSet()
_syncers: WeakSet[Closeable] = WeakSet()


def close_learner_at_exit(learner: ClosesInChild) -> None:
    _learners.add(learner)


def close_syncer_at_exit(syncer: Closeable) -> None:
    _syncers.add(syncer)


def _after_fork() -> None:
    for learner in _learners:
        learner._after_fork()
    _learners.clear()
    _syncers.clear()


os.register_at_fork(after_in_child=_after_fork)


def close_learners(flush_s: Callable[[], float]) -> None:
    """Closes every open learner; `flush_s` says how long the next one may take."""
    for learner in list(_learners):
        with _carefully():
            learner.close(flush_s())


@atexit.register
def _close_all() -> None:
    for group in (_learners, _syncers):
        for thing in list(group):
            with _carefully():
                thing._close_at_exit()


@contextmanager
def _carefully() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the exit status must stay what the program made it
        from diloco._errors import logger

        logger.warning("while closing at exit: %s", error)
