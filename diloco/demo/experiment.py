"""One run from start to end: training with a kill and a return, the audit, the single learner, the paired run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.demo.cluster import Cluster, DemoError
from diloco.demo.evaluate import CurveThread, Evaluator, weight_files
from diloco.demo.plan import QUICK_ALLOWANCE, REFERENCE, SLOWDOWN, VICTIM, Timing
from diloco.demo.processes import Children
from diloco.demo.record import Kill, LossPoint, Paired, Record
from diloco.demo.table import Phase, PlainScreen, RichScreen
from diloco.demo.watch import StatusPoller, Tail, Watcher

POLL_S = 0.1
CLOSE_PATIENCE_S = 30.0
STEP_PATIENCE_S = 60.0
PACE_STEPS = 8  # the speed of the slower learners follows the mean of so many steps of the fastest
PAIRS, QUICK_PAIRS = 60, 30
ALONE_SHARE = 0.6  # guess for the estimate of the rest: a step alone over a step beside three others

Screen = PlainScreen | RichScreen


def run_experiment(seed: int, steps: int, quick: bool, folder: Path, screen: Screen, paired: bool = True) -> Record:
    """The record of one run. Whatever happens, no child is alive afterwards."""
    children = Children(folder)
    experiment = Experiment(seed, steps, quick, folder, screen, children)
    try:
        return experiment.run(paired)
    finally:
        # A second signal must not cut this short.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        children.end_all()
        experiment.end_threads()
        for number, handler in before.items():
            signal.signal(number, handler)


def count_steps(progress: Tail) -> int:
    return sum(line["event"] == "step" for line in progress.read())


class Experiment:
    def __init__(self, seed: int, steps: int, quick: bool, folder: Path, screen: Screen, children: Children) -> None:
        self.timing = Timing(steps)
        self.quick = quick
        self.screen = screen
        allowance = QUICK_ALLOWANCE if quick else 0.0
        self.record = Record(seed=seed, steps=steps, reference=REFERENCE, allowance=allowance)
        self.cluster = Cluster(folder, seed, children)
        self.watcher = Watcher(self.record, self.cluster.events)
        self.threads: list[StatusPoller | CurveThread] = []

    def end_threads(self) -> None:
        for thread in self.threads:
            thread.stop()

    def start_curve(
        self, folder: Path, curve: list[LossPoint], place: Callable[[float, int], LossPoint]
    ) -> CurveThread:
        thread = CurveThread(folder, len(SLOWDOWN), curve, place)
        thread.start()
        self.threads.append(thread)
        return thread

    def run(self, paired: bool) -> Record:
        import diloco

        record = self.record
        syncer, self.cluster.endpoint = self.cluster.start_syncer()
        self.watcher.syncer_is_up_for(diloco.status(self.cluster.endpoint, timeout_s=10.0)["uptime_s"])
        poller = StatusPoller(self.cluster.endpoint)
        poller.start()
        self.threads.append(poller)
        curve = self.start_curve(self.cluster.weights, record.losses.curve, self.place)
        self.train(poller)
        poller.stop()
        self.finish_syncer(syncer)
        curve.finish()
        self.audit()
        self.alone()
        if paired:
            self.paired()
        self.final_losses()
        record.wall_s = self.watcher.now()
        return record

    def place(self, t: float, step: int) -> LossPoint:
        """Where a copy of the global weights belongs: its time, and the tokens of all learners by then."""
        at = t - self.watcher.origin
        return LossPoint(at, step, self.watcher.tokens_at(at), 0.0)

    def reference_steps(self) -> int:
        return sum(len(life.steps) for life in self.record.lives_of(REFERENCE))

    def train(self, poller: StatusPoller) -> None:
        for name in sorted(SLOWDOWN):
            self.watcher.follow(*self.cluster.start_learner(name, 0, self.watcher.now()))
        self.until("training", self.timing.kill, poller)
        self.kill(VICTIM)
        self.until("training, one learner killed", self.timing.restart, poller)
        restarted = self.cluster.start_learner(VICTIM, 1, self.watcher.now())
        self.watcher.follow(*restarted)
        self.screen.say(f"{VICTIM} is started again (pid {restarted[0].pid})")
        self.until("training, all back", self.timing.steps, poller)
        self.cluster.stop_file.touch()
        self.record.trained_s = self.watcher.now()
        deadline = time.monotonic() + CLOSE_PATIENCE_S
        while not self.cluster.ended(self.record.lives):
            if time.monotonic() > deadline:
                raise DemoError(f"a learner did not end within {CLOSE_PATIENCE_S:.0f} s of being asked to")
            time.sleep(POLL_S)
        self.watcher.poll()
        self.cluster.check_alive(self.record.lives)
        self.complete_kill()

    def until(self, text: str, steps: int, poller: StatusPoller) -> None:
        """Watches until the reference learner has made `steps` steps."""
        seen, since = self.reference_steps(), time.monotonic()
        while self.reference_steps() < steps:
            self.cluster.check_alive(self.record.lives)
            if self.reference_steps() > seen:
                seen, since = self.reference_steps(), time.monotonic()
            elif time.monotonic() - since > STEP_PATIENCE_S:
                raise DemoError(f"{REFERENCE} made no step for {STEP_PATIENCE_S:.0f} s after step {seen}")
            self.watcher.poll()
            self.tell_pace()
            self.record.status = poller.latest
            self.screen.show(self.record, Phase(text, self.reference_steps(), self.timing.steps, self.rest_s()))
            time.sleep(POLL_S)

    def tell_pace(self) -> None:
        recent = self.record.lives_of(REFERENCE)[0].steps[-PACE_STEPS:]
        if recent:
            self.cluster.tell_pace(sum(step.busy_s for step in recent) / len(recent))

    def rest_s(self) -> float | None:
        """Estimate of the rest of the whole demo."""
        done = self.record.lives_of(REFERENCE)[0].steps
        if len(done) < 8:
            return None
        pace = (done[-1].t - done[0].t) / (len(done) - 1)
        return pace * (self.timing.steps - len(done)) + ALONE_SHARE * pace * self.timing.steps

    def kill(self, name: str) -> None:
        life = self.record.lives_of(name)[-1]
        at = self.watcher.now()
        status = self.cluster.kill(life)
        life.ended_s, life.state = at, "killed"
        self.record.kill = Kill(name, life.pid, int(signal.SIGKILL), status, at, at)
        self.screen.say(f"{name} (pid {life.pid}) is killed with SIGKILL after {at:.0f} s")

    def complete_kill(self) -> None:
        kill = self.record.kill
        life = self.record.lives_of(VICTIM)[-1]
        if kill is None or life.joined_s is None:
            raise DemoError(f"{VICTIM} was started again but never joined")
        again = [r.t for r in self.record.rounds if any(m.incarnation == life.incarnation for m in r.members)]
        self.record.kill = replace(
            kill,
            back_at_s=life.joined_s,
            back_incarnation=life.incarnation,
            merged_again_at_s=min(again, default=None) if life.incarnation else None,
        )

    def finish_syncer(self, syncer: subprocess.Popen[bytes]) -> None:
        """A last status, then SIGTERM; the event log is complete afterwards."""
        import diloco

        self.record.status = diloco.status(self.cluster.endpoint, timeout_s=10.0)
        syncer.terminate()
        try:
            code = syncer.wait(30)
        except subprocess.TimeoutExpired as error:
            raise DemoError("the syncer did not end within 30 s of SIGTERM") from error
        if code != 0:
            raise DemoError(f"the syncer ended with {code}:\n{self.cluster.children.last_words(syncer)}")
        self.watcher.poll()

    def audit(self) -> None:
        """By the audit script in a process of its own, which imports nothing of the package."""
        script = Path(__file__).resolve().parents[1] / "audit.py"
        out = self.cluster.folder / "audit.json"
        command = [sys.executable, "-I", str(script), str(self.cluster.events)]
        command += ["--ledger-dir", str(self.cluster.ledgers), "--json", str(out)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if run.returncode not in (0, 1) or not out.exists():
            raise DemoError(f"the audit did not run: {run.stderr.strip()}")
        self.record.audit = json.loads(out.read_text())
        if (run.returncode == 0) != self.record.audit["ok"]:
            raise DemoError(f"the audit's exit status {run.returncode} contradicts its report")

    def alone(self) -> None:
        """The single learner: as many steps as the fastest made, with the machine to itself."""
        steps = self.reference_steps()
        curve = self.start_curve(self.cluster.alone_weights, self.record.losses.alone_curve, self.place_alone)
        child, progress = self.cluster.start_alone(steps)
        tail, began, done = Tail(progress), time.monotonic(), 0
        while not self.has_ended(child, "the single learner"):
            done += count_steps(tail)
            rest = (time.monotonic() - began) / done * (steps - done) if done else None
            self.screen.show(self.record, Phase("one learner alone, to compare", done, steps, rest))
            time.sleep(POLL_S)
        self.record.alone_steps = done + count_steps(tail)
        curve.finish()

    def paired(self) -> None:
        """With a free core, as a training machine has: the network threads must not compete with the training."""
        pairs = QUICK_PAIRS if self.quick else PAIRS
        _, endpoint = self.cluster.start_syncer("syncer-paired", event_log=False)
        child, out = self.cluster.start_paired(endpoint, pairs)
        while not self.has_ended(child, "the paired run"):
            self.screen.show(self.record, Phase(f"wrapped and bare steps in turn, {pairs} pairs", 0, 0))
            time.sleep(POLL_S)
        self.record.paired = Paired(**{k: tuple(v) for k, v in json.loads(out.read_text()).items()})

    def has_ended(self, child: subprocess.Popen[bytes], what: str) -> bool:
        if child.poll() not in (None, 0):
            raise DemoError(f"{what} failed:\n{self.cluster.children.last_words(child)}")
        return child.returncode == 0

    def place_alone(self, t: float, step: int) -> LossPoint:
        return LossPoint(t - self.watcher.origin, step, step * self.tokens_per_step(), 0.0)

    def tokens_per_step(self) -> int:
        first: Any = self.record.lives_of(REFERENCE)[0].steps[0]
        return int(first.tokens)

    def final_losses(self) -> None:
        """First and last copy of the global weights and the last of the single learner, on the large held-out set."""
        evaluator = Evaluator(len(SLOWDOWN))
        ours, alone = weight_files(self.cluster.weights), weight_files(self.cluster.alone_weights)
        losses = self.record.losses
        losses.start, losses.end, losses.alone = (
            evaluator.evaluate(path, final=True)[0] for path in (ours[0], ours[-1], alone[-1])
        )
