"""What the examples share. Without --syncer an example starts a syncer and two learners, each of them the same script
with --syncer, and checks what they did; with --syncer it is one learner of that run.

    import common
    run = common.start(sync_every=8)     # goes on in a learner only
    optimizer = diloco.DiLoCoOptimizer(optimizer, model, run.syncer, learner_id=run.learner_id)
    run.wait_for_others()
    for step in range(run.steps):
        ...
        run.report(loss.item(), optimizer.stats())
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Nothing is downloaded and nobody is told. Read by libraries when they are imported, so this module comes before them.
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false"}
# One of the examples is called like the library it shows: what follows must not look for modules in this folder.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import torch

import diloco
from diloco.console import Console
from diloco.testing import SyncerProcess

torch.set_num_threads(1)  # models this small are slower with more, and the learners share the machine
ROUNDS, MEMBERS, WINDOW, FALL = 5, 2, 20, 0.9  # what a run must reach, see check()


class Run:
    """One learner's part: where the syncer is, who it is, how long it trains."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.syncer: str = options.syncer
        self.learner_id: str = options.learner_id
        self.steps: int = options.steps
        self.seed = diloco.shard_seed(self.learner_id)  # other data than the other learners'
        self._others: int = options.wait_for
        self._losses: list[float] = []
        self._file: Path | None = options.losses
        self._console = Console()

    def wait_for_others(self) -> None:
        """Only so that a run of seconds shows all learners at work: learners need not start together."""
        deadline = time.monotonic() + 120
        while self._others and len(diloco.status(self.syncer, timeout_s=60)["learners"]) < self._others:
            if time.monotonic() > deadline:
                sys.exit(f"FAILED: {self.learner_id}: the other learners did not come within two minutes")
            time.sleep(0.01)
        self._console = Console()  # speed counts from here

    def _keep_together(self, step: int) -> None:
        """For the same reason: steps this small would be over on one learner before they began on the other."""
        deadline = time.monotonic() + 30
        while self._others and time.monotonic() < deadline:
            rows = diloco.status(self.syncer, timeout_s=60)["learners"]
            if all(row["step"] >= step - 10 or row["state"] == "gone" for row in rows):
                return
            time.sleep(0.01)

    def report(self, loss: float, stats: Mapping[str, Any] | None = None) -> None:
        """After each step; prints every tenth and the last."""
        self._losses.append(loss)
        step = len(self._losses)
        if step % 10 == 0 or step == self.steps:
            line = self._console.line(step, loss, stats) if stats else f"step: {step:4d}  loss: {loss:7.4f}"
            print(f"[{self.learner_id}] {line}", flush=True)
            self._keep_together(step)
        if self._file and step == self.steps:
            self._file.write_text("\n".join(map(str, self._losses)))


def start(*, launch: Sequence[str] = (sys.executable,), **settings: object) -> Run:
    """This learner's part; where no --syncer is given, starts and checks a whole run and ends the program.

    `launch` starts a learner (such as torchrun and its options); `settings` are the syncer's.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--syncer", metavar="HOST:PORT", help="join this run; without it, start one and check it")
    parser.add_argument("--learner-id", default=f"learner-{os.getpid()}", help="unique in the run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learners", type=int, default=2, help="how many to start")
    parser.add_argument("--wait-for", type=int, default=0, help="begin to train when so many learners have joined")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write the loss of every step there")
    options = parser.parse_args()
    if options.syncer:
        return Run(options)
    sys.exit(run_and_check(launch, options.learners, options.steps, settings))


def run_and_check(launch: Sequence[str], learners: int, steps: int, settings: Mapping[str, Any]) -> int:
    names = [chr(ord("a") + index) for index in range(learners)]
    with tempfile.TemporaryDirectory() as folder, SyncerProcess(min_quorum=MEMBERS, **settings) as syncer:
        files = {name: Path(folder, name) for name in names}
        options = ["--syncer", syncer.endpoint, "--steps", str(steps), "--wait-for", str(learners)]
        processes = {
            name: subprocess.Popen([*launch, sys.argv[0], *options, "--learner-id", name, "--losses", str(files[name])])
            for name in names
        }
        try:
            ended = {name: process.wait() for name, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
        syncer.stop()
        syncer.wait_for("stop")
        failed = [f"learner {name} ended with status {status}" for name, status in ended.items() if status]
        losses = {name: list(map(float, file.read_text().split())) for name, file in files.items() if file.exists()}
        return check(syncer.events, losses, failed)


def check(events: Sequence[Mapping[str, Any]], losses: Mapping[str, Sequence[float]], failed: list[str]) -> int:
    """Prints what held and what did not; the exit status. `events`: lines of the syncer's event log."""
    merges = [event for event in events if event["event"] == "merge"]
    together = sum(len({member["learner"] for member in merge["members"]}) >= MEMBERS for merge in merges)
    claims = [(together >= ROUNDS, f"{together} rounds merged work of {MEMBERS} learners or more, expected {ROUNDS}")]
    for name, values in losses.items():
        first, last = (sum(part) / max(len(part), 1) for part in (values[:WINDOW], values[-WINDOW:]))
        text = f"loss of {name}: {first:.3f} in the first {WINDOW} steps, {last:.3f} in the last, expected {FALL} of it"
        claims.append((len(values) >= 2 * WINDOW and last <= FALL * first, text))
    for holds, text in claims:
        print(f"{'ok:    ' if holds else 'FAILED:'} {text}")
    for text in failed:
        print(f"FAILED: {text}")
    return 0 if not failed and all(holds for holds, _ in claims) else 1


def text(seed: int, length: int = 50_000) -> torch.Tensor:
    """Bytes of sentences of a small grammar, as token ids below 128."""
    source = random.Random(seed)
    things, deeds = ["the cat", "a dog", "my sister", "the old king", "a bird"], ["sees", "likes", "hears", "forgets"]
    words: list[str] = []
    while sum(map(len, words)) < length:
        words.append(f"{source.choice(things)} {source.choice(deeds)} {source.choice(things)}. ")
    return torch.tensor(list("".join(words)[:length].encode("ascii")))
