"""A C function that does not let go of the interpreter lock stops Python, and nothing of ours: heartbeats go on."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from toys import QUICK, Pair, train_step

import diloco
from diloco.testing import SyncerProcess, TinyLearner

HELD_S = 5
SILENCE = {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 1.0}  # one fifth of the silence that Python makes


def hold_the_lock() -> None:
    """sleep() through PyDLL, which keeps the lock, for HELD_S; checks that no other Python thread ran meanwhile."""
    turns = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal turns
        for turns in itertools.count(1):  # noqa: B007 (read by the other thread)
            if ended.wait(0.001):
                return

    witness = threading.Thread(target=count)
    witness.start()
    while turns < 3:
        time.sleep(0.001)
    before = turns
    assert ctypes.PyDLL(None).sleep(HELD_S) == 0
    after = turns  # nobody else has had the lock yet
    ended.set()
    witness.join()
    assert after - before < 50  # some thousand, were the lock free


def lines(syncer: SyncerProcess, event: str) -> list[dict[str, Any]]:
    return [line for line in syncer.events if line["event"] == event]


def test_a_learner_that_holds_the_lock_is_not_taken_for_dead(syncer: Callable[..., SyncerProcess]) -> None:
    running = syncer(**QUICK | SILENCE)
    pair = Pair(running.endpoint, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pair.opt:
        train_step(pair.model, pair.opt, 0)
        incarnation = pair.opt.learner.incarnation
        start = time.monotonic()
        hold_the_lock()
        assert time.monotonic() - start >= HELD_S
        (seen,) = running.status()["learners"]
        assert (seen["id"], seen["incarnation"]) == (pair.opt.learner.learner_id, incarnation)
        for step in range(1, 9):
            train_step(pair.model, pair.opt, step)
        assert pair.opt.stats()["reconnects"] == 0
        assert pair.opt.learner.incarnation == incarnation
        assert lines(running, "leave") == []


def test_an_embedded_syncer_serves_on_while_its_process_holds_the_lock(learner: Callable[..., TinyLearner]) -> None:
    with diloco.Syncer(**QUICK | SILENCE) as embedded:
        other = learner(embedded.endpoint, "other", step_time_s=0.05)
        other.steps(5)
        before = embedded.status()["rounds_merged"]
        hold_the_lock()
        # 20 steps a second, a round every 2: what was merged since can only have been merged during the hold.
        assert embedded.status()["rounds_merged"] - before >= 20
        other.steps(5)
        assert other.finish()["stats"]["reconnects"] == 0
