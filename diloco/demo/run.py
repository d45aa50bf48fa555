"""Runs the demo: a syncer, four learners, a kill and a return, the reference runs, the checks.

Returns 0 if every check holds, 1 if one fails or a process broke, 2 for arguments that cannot work.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from diloco._report import why_unwritable
from diloco.demo import picture, report
from diloco.demo.cluster import DemoError
from diloco.demo.plan import LEAST_STEPS, QUICK_STEPS, STEPS
from diloco.demo.table import make_screen


@dataclass(frozen=True)
class DemoOptions:
    json: str | None = None
    picture: str | None = None
    seed: int = 0
    steps: int | None = None  # of the fastest learner
    quick: bool = False  # fewer steps, shorter paired run; the same checks
    plain: bool = False
    keep: str | None = None  # folder for logs and ledgers; else a temporary one
    margin_seeds: int = 0  # only measure the margin of better_than_alone over so many seeds

    def step_count(self) -> int:
        return self.steps if self.steps is not None else QUICK_STEPS if self.quick else STEPS

    def command(self) -> str:
        words = ["diloco demo", f"--seed {self.seed}", f"--steps {self.step_count()}"]
        return " ".join(words + (["--quick"] if self.quick else []))


def problem_with(options: DemoOptions) -> str:
    """Why these options cannot work, found out before anything is started; "" if they can."""
    if options.step_count() < LEAST_STEPS:
        return f"--steps {options.step_count()} is too short to lose a learner and see it back; at least {LEAST_STEPS}"
    if options.margin_seeds == 1 or options.margin_seeds < 0:
        return f"--margin-seeds {options.margin_seeds}: a spread needs at least 2 seeds"
    if options.picture and not picture.available():
        return "--picture needs matplotlib, which is not installed; install it or leave --picture out"
    if options.picture and (reason := picture.why_unknown(options.picture)):
        return f"--picture {options.picture}: {reason}"
    for name, path in (("--json", options.json), ("--picture", options.picture)):
        reason = why_unwritable(path) if path else ""
        if reason:
            return f"{name} {path} cannot be written: {reason}; choose another file"
    return ""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo like Ctrl-C does: by an exception, so that every child is ended."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    names = [signal.SIGTERM, signal.SIGHUP] if hasattr(signal, "SIGHUP") else [signal.SIGTERM]
    before = {name: signal.signal(name, stop) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def work_folder(options: DemoOptions) -> Iterator[Path]:
    if options.keep:
        folder = Path(options.keep)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="diloco-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_demo(options: DemoOptions) -> int:
    """The verb `demo`."""
    problem = problem_with(options)
    if problem:
        print(f"diloco demo: {problem}", file=sys.stderr)
        return 2
    try:
        with ended_by_signals(), work_folder(options) as folder:
            if options.margin_seeds:
                from diloco.demo.margin import measure_margin

                return measure_margin(options, folder)
            return run_once(options, folder)
    except KeyboardInterrupt:
        print("\ninterrupted; no process is left behind", file=sys.stderr)
        return 130
    except SystemExit as stopped:
        print("\nstopped; no process is left behind", file=sys.stderr)
        return int(stopped.code or 0)
    except DemoError as error:
        print(f"diloco demo: {error}", file=sys.stderr)
        return 1


def run_once(options: DemoOptions, folder: Path) -> int:
    from diloco.demo.checks import run_checks
    from diloco.demo.experiment import run_experiment

    with make_screen(options.plain) as screen:
        record = run_experiment(options.seed, options.step_count(), options.quick, folder, screen)
    checks = run_checks(record)
    values = report.build(record, checks, options.command())
    print(report.screen(values))
    write(values, record, options)
    failed = [check for check in checks if not check.ok]
    if not failed:
        print("all checks hold; next: docs/quickstart.md makes your own script a learner")
    for check in failed:
        print(f"FAILED {check.name}: value {check.value}, limit {check.limit}", file=sys.stderr)
    return 1 if failed else 0


def write(values: dict[str, Any], record: Any, options: DemoOptions) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        print(f"report: {options.json}")
    if options.picture:
        picture.draw(record, options.picture)
        print(f"picture: {options.picture}")
