"""Ranks of islands as real processes that start quickly.

`Nursery` is one process that has loaded torch and forks a rank in milliseconds (island_nursery.py). A rank runs its
exit handlers, or is killed. Each `Job` has a store of its own on a port the kernel chose, as torchrun's agent has, by
which the test also tells its ranks what to do.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from diloco.testing import LearnerProcess, Process
from diloco.testing.child import DEADLINE_S, Event

PROGRAMS = Path(__file__).with_name("island_nursery.py")


class Job:
    """So many ranks that run one program."""

    _numbers = itertools.count(1)

    def __init__(self, process: Process, program: str, ranks: int, each: Sequence[dict[str, Any]], **arguments: Any):
        """`process`: the nursery's."""
        self._begin(program, ranks)
        self.process = process
        for rank in range(ranks):
            own = arguments | (dict(each[rank]) if each else {})
            process.tell(json.dumps(self._order | {"rank": rank, "ranks": ranks, "arguments": own}))

    def _begin(self, program: str, ranks: int) -> None:
        self.number, self.ranks = next(self._numbers), ranks
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._order: dict[str, Any] = {"job": self.number, "port": self._store.port, "program": program}

    def wait(
        self,
        event: str,
        rank: int | None = 0,
        where: Callable[[Event], bool] = lambda _: True,
        *,
        start: int = 0,
        errors: bool = True,
        timeout_s: float = DEADLINE_S,
    ) -> Event:
        """The first such event of this job (of any rank: None); `errors`: a rank's error is raised."""

        def matches(found: Event) -> bool:
            return found.get("job") == self.number and (
                (found["event"] == event and rank in (None, found["rank"]) and where(found))
                or (errors and event != "exited" and found["event"] == "error")
            )

        found: Event = self.process._wait(
            self.process.events, matches, f"{event!r} of rank {rank} of job {self.number}", timeout_s, start
        )
        assert found["event"] == event, f"rank {found['rank']}: {found['type']}: {found['text']}\n{found['trace']}"
        return found

    def every(self, event: str, where: Callable[[Event], bool] = lambda _: True, **options: Any) -> list[Event]:
        """One of each rank."""
        return [self.wait(event, rank, where, **options) for rank in range(self.ranks)]

    def mark(self) -> int:
        return self.process.mark()

    def events(self, event: str, rank: int = 0) -> list[Event]:
        return [
            found
            for found in list(self.process.events)
            if found.get("job") == self.number and found["rank"] == rank and found["event"] == event
        ]

    def tell(self, command: str) -> None:
        """Rank 0 takes it up at its next step and tells the others: all act at the same step."""
        self._store.set("command", command)

    def pid(self, rank: int) -> int:
        return int(self.wait("forked", rank)["pid"])

    def kill(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGKILL)
        assert self.wait("exited", rank)["status"] == -signal.SIGKILL

    def finish(self, timeout_s: float = DEADLINE_S) -> list[Event]:
        """The report of every rank, all of which must have ended well."""
        reports = self.every("done", timeout_s=timeout_s)
        for ended in self.every("exited", timeout_s=timeout_s):
            assert ended["status"] == 0, f"rank {ended['rank']} ended with {ended['status']}\n{self.process.tail()}"
        return reports

    def end(self) -> None:
        """Kills what is left of it."""
        for forked in list(self.process.events):
            if forked.get("job") != self.number or forked["event"] != "forked":
                continue
            if not self.events("exited", forked["rank"]):
                os.kill(forked["pid"], signal.SIGKILL)
        for rank in range(self.ranks):
            self.wait("exited", rank)


class TorchrunJob(Job):
    """The same under torchrun, which starts the ranks again once."""

    def __init__(self, program: str, ranks: int, **arguments: Any) -> None:
        self._begin(program, ranks)
        words = ["--standalone", "--nproc-per-node", ranks, "--max-restarts", 1, "--monitor-interval", 0.1]
        order = json.dumps(self._order | {"arguments": arguments})
        # Without it, torch 2.13's second life reads from the agent's store where the first one's gloo could be reached.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.process = LearnerProcess(*words, PROGRAMS, order, module="torch.distributed.run", name="torchrun", env=env)
        self.name, self.tail, self.close = self.process.name, self.process.tail, self.process.close


class Nursery:
    def __init__(self) -> None:
        self.process: Process = LearnerProcess(script=PROGRAMS, name="ranks")
        self.process.wait_for("ready")

    def job(self, program: str, ranks: int, each: Sequence[dict[str, Any]] = (), **arguments: Any) -> Job:
        """`each`: arguments of one rank, beside those of all."""
        return Job(self.process, program, ranks, each, **arguments)


@contextmanager
def nursery() -> Iterator[Callable[..., Job]]:
    """Gives a function that starts jobs; ends all of them."""
    with ExitStack() as stack:
        home = Nursery()
        stack.callback(home.process.close)

        def start(program: str, ranks: int, *, each: Sequence[dict[str, Any]] = (), **arguments: Any) -> Job:
            return home.job(program, ranks, each, **arguments)

        yield start
