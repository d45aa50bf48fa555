"""What the ranks of an island pay for being one learner: time and memory, beside two controls in the same run.

For each kind of island and number of ranks three islands exist at once and train by turns, a few steps each, so that
what the machine does meanwhile falls on all of them: one with the bare optimizer, one whose syncer is not there, one in
a run. Their ranks are processes, forked from one that has imported torch. First their peaks of memory are taken, while
freed memory is given back at once; then time, as fast as they can.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from diloco.bench.island_rank import PEAK, SHARDINGS, VARIANTS, Job, main, width_of
from diloco.testing import SyncerProcess

TURN = 3  # steps
SYNC_EVERY, FRAGMENTS = 8, 4  # a short run has several syncs of every fragment
FIRST_STEPS = 3  # after them a rank has had in memory all that training takes
FIRST_SYNCS_S = 60.0  # within which every fragment is merged
ANSWER_S = 180.0


class BenchError(RuntimeError):
    """A rank ended or did not answer."""


@dataclass(frozen=True)
class Options:
    shardings: tuple[str, ...] = SHARDINGS
    ranks: tuple[int, ...] = (1, 2, 4)
    parameters: int = 1_500_000
    steps: int = 12  # that are timed, of each island
    seed: int = 0


@dataclass
class Measured:
    """Three islands of one kind: seconds of each turn (the slowest rank's), of each rank its peak and report."""

    sharding: str
    ranks: int
    turns: dict[str, list[float]] = field(default_factory=lambda: {variant: [] for variant in VARIANTS})
    peaks: dict[str, list[int]] = field(default_factory=dict)
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    rounds_merged: int = 0


@contextmanager
def nobody() -> Iterator[str]:
    """An address where connecting is refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


class Ranks:
    """The processes of one island."""

    def __init__(self, context: ForkServerContext, jobs: list[Job]) -> None:
        self.jobs = jobs
        self._pipes: list[Connection] = []
        self._processes = []
        for job in jobs:
            here, there = context.Pipe()
            process = context.Process(target=main, args=(job, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def tell(self, word: int | str | None) -> None:
        for job, pipe in zip(self.jobs, self._pipes, strict=True):
            try:
                pipe.send(word)
            except OSError:
                raise BenchError(f"{_name(job)} has ended; its error is above") from None

    def answers(self) -> list[Any]:
        """One of each rank."""
        out = []
        for job, pipe in zip(self.jobs, self._pipes, strict=True):
            if not pipe.poll(ANSWER_S):
                raise BenchError(f"{_name(job)} did not answer within {ANSWER_S:g} s")
            try:
                out.append(pipe.recv())
            except EOFError:
                raise BenchError(f"{_name(job)} has ended; its error is above") from None
        return out

    def train(self, steps: int) -> float:
        """Seconds that the slowest rank took."""
        self.tell(steps)
        return float(max(self.answers()))

    def join(self) -> None:
        for job, process in zip(self.jobs, self._processes, strict=True):
            process.join(ANSWER_S)
            if process.exitcode != 0:
                raise BenchError(f"{_name(job)} ended with status {process.exitcode}, expected 0")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


def _name(job: Job) -> str:
    return f"rank {job.rank} of {job.ranks} ({job.sharding}, {job.variant})"


def sync(island: Ranks, syncer: SyncerProcess) -> None:
    """Trains until every fragment has been merged, and adopted: then a rank has had in memory all that it ever has."""
    deadline = time.monotonic() + FIRST_SYNCS_S
    while syncer.status()["rounds_merged"] < FRAGMENTS:
        if time.monotonic() > deadline:
            raise BenchError(f"not all fragments were merged within {FIRST_SYNCS_S:g} s\n{syncer.tail()}")
        island.train(TURN)
    island.train(SYNC_EVERY)


def measure_all(options: Options, say: Callable[[str], None]) -> list[Measured]:
    """Raises BenchError. `say` is told what is measured."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the ranks: models this small are slower with more
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diloco.bench.island_rank"])
    out = []
    for sharding in options.shardings:
        for ranks in options.ranks:
            say(f"{sharding}, {ranks} rank(s)")
            out.append(measure(context, options, sharding, ranks))
    return out


def measure(context: ForkServerContext, options: Options, sharding: str, ranks: int) -> Measured:
    out = Measured(sharding, ranks)
    with (
        tempfile.TemporaryDirectory() as folder,
        nobody() as absent,
        SyncerProcess(sync_every=SYNC_EVERY, num_fragments=FRAGMENTS) as syncer,
    ):
        islands: dict[str, Ranks] = {}
        try:
            for variant in VARIANTS:
                address = syncer.endpoint if variant == "joined" else absent
                store = str(Path(folder, variant))
                jobs = [
                    Job(sharding, variant, r, ranks, width_of(options.parameters), options.seed, address, store)
                    for r in range(ranks)
                ]
                islands[variant] = Ranks(context, jobs)
            for island in islands.values():
                island.answers()
            for variant, island in islands.items():
                island.train(FIRST_STEPS)
                if variant == "joined":
                    sync(island, syncer)
                island.tell(PEAK)
                out.peaks[variant] = island.answers()
            for turn in range(1 + options.steps // TURN):
                for variant in VARIANTS if turn % 2 else reversed(VARIANTS):
                    slowest = islands[variant].train(TURN)
                    if turn:  # the first one is to get under way
                        out.turns[variant].append(slowest)
            for variant, island in islands.items():
                island.tell(None)
                out.reports[variant] = island.answers()
            out.rounds_merged = syncer.status()["rounds_merged"]
            for island in islands.values():
                island.tell(None)
            for island in islands.values():
                island.join()
        finally:
            for island in islands.values():
                island.kill()
    return out
