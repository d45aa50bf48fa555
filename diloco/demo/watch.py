"""Follows a running demo: the learners' progress files, the syncer's event log, `diloco.status` over the network."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from diloco.demo.record import Life, Member, Record, Round, Step


class Tail:
    """The new complete JSON lines of a growing file; a file that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class Watcher:
    """Folds what the processes write into the Record. Times become seconds since `origin` (monotonic)."""

    def __init__(self, record: Record, event_log: Path) -> None:
        self.record = record
        self.origin = time.monotonic()
        self._events = Tail(event_log)
        self._syncer_start: float | None = None
        self._lives: list[tuple[Life, Tail]] = []

    def syncer_is_up_for(self, uptime_s: float) -> None:
        """Places the event log's clock, which starts with the syncer, on the run's. Events are read from now on."""
        self._syncer_start = self.now() - uptime_s

    def now(self) -> float:
        return time.monotonic() - self.origin

    def follow(self, life: Life, progress: Path) -> None:
        self.record.lives.append(life)
        self._lives.append((life, Tail(progress)))

    def poll(self) -> None:
        for life, tail in self._lives:
            for line in tail.read():
                self._progress(life, line)
        if self._syncer_start is not None:
            for event in self._events.read():
                self._event(event, event["t"] + self._syncer_start)

    def tokens_at(self, t: float) -> int:
        """Tokens all learners together had processed at time `t`."""
        total = 0
        for life in self.record.lives:
            total += max((step.tokens for step in life.steps if step.t <= t), default=0)
        return total

    def _progress(self, life: Life, line: dict[str, Any]) -> None:
        t, kind = line["t"] - self.origin, line["event"]
        if kind == "step":
            life.steps.append(
                Step(t, line["step"], line["tokens"], line["loss"], line["busy_s"], line["inside_s"], line["gap_s"])
            )
        elif kind == "joined":
            life.joined_s, life.join_took_s, life.state = t, line["took_s"], line["state"]
        elif kind == "state":
            life.state = line["state"]
        elif kind == "closed":
            life.ended_s, life.stats, life.state = t, line["stats"], "closed"

    def _event(self, event: dict[str, Any], t: float) -> None:
        kind = event["event"]
        if kind == "plan":
            self.record.fragments = len(event["fragments"])
        elif kind == "join":
            for life in self.record.lives:
                if life.learner == event["learner"] and life.pid == event["pid"]:
                    life.incarnation = event["incarnation"]
        elif kind == "merge":
            self.record.rounds.append(round_of(event, t))


def round_of(event: dict[str, Any], t: float) -> Round:
    """A merge event as a Round."""
    members = tuple(Member(m["learner"], m["incarnation"], m["to"] - m["from"], m["weight"]) for m in event["members"])
    version = (event["version"][0], event["version"][1])
    return Round(t, event["round"], event["fragment"], version, members, event["reason"], event["wait_s"])


class StatusPoller(threading.Thread):
    """Asks the syncer how it is, every second, as `diloco status` does."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="status", daemon=True)
        self._endpoint = endpoint
        self._ending = threading.Event()
        self.latest: dict[str, Any] = {}
        self.failures = 0

    def run(self) -> None:
        import diloco

        while not self._ending.wait(1.0):
            try:
                self.latest = diloco.status(self._endpoint, timeout_s=2.0)
            except Exception:  # the syncer may be busy or gone; the main loop notices by itself
                self.failures += 1

    def stop(self) -> None:
        self._ending.set()
        self.join()
