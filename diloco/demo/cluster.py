"""The processes of one run as things with names: the syncer, the learners, the single learner, the paired run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco.demo.plan import REFERENCE, SLOWDOWN, SYNCER_SETTINGS, WEIGHTS_EVERY
from diloco.demo.processes import Children, syncer_command
from diloco.demo.record import LearnerConfig, Life

START_PATIENCE_S = 60.0


class DemoError(Exception):
    """Something the demo needs did not work; the message says what and shows the process' last lines."""


class Cluster:
    """Starts the processes of a run in `folder`; knows where each of them writes."""

    def __init__(self, folder: Path, seed: int, children: Children) -> None:
        self.folder, self.seed, self.children = folder, seed, children
        self.events = folder / "events.jsonl"
        self.ledgers = folder / "ledgers"
        self.weights = folder / "weights"
        self.alone_weights = folder / "weights-alone"
        self.stop_file = folder / "stop"
        self.pace_file = folder / "pace"
        self.endpoint = ""
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for path in (self.ledgers, self.weights, self.alone_weights):
            path.mkdir(exist_ok=True)

    def start_syncer(self, name: str = "syncer", event_log: bool = True) -> tuple[subprocess.Popen[bytes], str]:
        """The process and its endpoint, "127.0.0.1:port"."""
        at = self.folder / f"{name}.endpoint"
        command = [*syncer_command(), "--bind", "127.0.0.1:0", "--endpoint-file", str(at), "--die-with-parent"]
        if event_log:
            command += ["--event-log", str(self.events)]
        for setting, value in SYNCER_SETTINGS.items():
            command += [f"--{setting}", value]
        child = self.children.start(name, command)
        deadline = time.monotonic() + START_PATIENCE_S
        while not (at.exists() and at.read_text().strip()):
            if child.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"the syncer did not start:\n{self.children.last_words(child)}")
            time.sleep(0.02)
        return child, at.read_text().strip().removeprefix("tcp://")

    def start_learner(self, name: str, life: int, now: float) -> tuple[Life, Path]:
        """A life of a learner and the file with its progress."""
        number = sorted(SLOWDOWN).index(name)
        config = LearnerConfig(
            learner=name,
            shard=number,
            shards=len(SLOWDOWN),
            seed=self.learner_seed(number),
            life=life,
            slowdown=SLOWDOWN[name],
            progress=str(self.folder / f"{name}.{life}.progress"),
            pace=str(self.pace_file),
            stop=str(self.stop_file),
            parent=os.getpid(),
            syncer=self.endpoint,
            ledger_dir=str(self.ledgers),
            weights=str(self.weights) if name == REFERENCE else "",
            weights_every=WEIGHTS_EVERY,
        )
        child = self.start_python(f"{name}.{life}", "learner_process", asdict(config))
        return Life(name, child.pid, now, SLOWDOWN[name]), Path(config.progress)

    def start_alone(self, steps: int) -> tuple[subprocess.Popen[bytes], Path]:
        """The reference learner once more, without a syncer."""
        number = sorted(SLOWDOWN).index(REFERENCE)
        config = LearnerConfig(
            learner=REFERENCE,
            shard=number,
            shards=len(SLOWDOWN),
            seed=self.learner_seed(number),
            life=0,
            slowdown=1.0,
            progress=str(self.folder / "alone.progress"),
            pace="",
            stop=str(self.folder / "never"),
            parent=os.getpid(),
            max_steps=steps,
            weights=str(self.alone_weights),
            weights_every=WEIGHTS_EVERY,
        )
        return self.start_python("alone", "learner_process", asdict(config)), Path(config.progress)

    def start_paired(self, endpoint: str, pairs: int) -> tuple[subprocess.Popen[bytes], Path]:
        out = self.folder / "paired.json"
        config = {"syncer": endpoint, "pairs": pairs, "seed": self.seed, "shards": len(SLOWDOWN), "out": str(out)}
        return self.start_python("paired", "paired", {**config, "parent": os.getpid()}), out

    def learner_seed(self, number: int) -> int:
        return 10 * self.seed + number

    def start_python(self, name: str, module: str, config: dict[str, Any]) -> subprocess.Popen[bytes]:
        file = self.folder / f"{name}.config.json"
        file.write_text(json.dumps(config))
        child = self.children.start(name, [sys.executable, "-m", f"diloco.demo.{module}", "--config", str(file)])
        self._running[child.pid] = child
        return child

    def tell_pace(self, seconds: float) -> None:
        """To the learners that are slower on purpose. Replaced in one piece: they may read at any time."""
        part = self.pace_file.with_suffix(".part")
        part.write_text(repr(seconds))
        os.replace(part, self.pace_file)

    def kill(self, life: Life) -> int:
        """SIGKILL; returns the wait status."""
        child = self._running.pop(life.pid)
        status = self.children.kill(child)
        life.returncode = child.returncode
        return status

    def check_alive(self, lives: list[Life]) -> None:
        """Raises DemoError if a learner ended by itself, or before it was asked to."""
        asked = self.stop_file.exists()
        for life in lives:
            child = self._running.get(life.pid)
            if child is not None and child.poll() not in ((None, 0) if asked else (None,)):
                raise DemoError(f"{life.learner} ended with {child.returncode}:\n{self.children.last_words(child)}")

    def ended(self, lives: list[Life]) -> bool:
        for life in lives:
            if life.returncode is None:
                life.returncode = self._running[life.pid].poll()
        return all(life.returncode is not None for life in lives)
