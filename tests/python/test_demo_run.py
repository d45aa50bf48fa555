"""The demo as a command: however it ends, no process of it is left; a broken learner is reported with its words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.demo.processes import Children

DEADLINE_S = 90.0


def below(pid: int) -> list[int]:
    """Living descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *below(int(child))]
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: str, condition: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for: {what}"
        time.sleep(0.05)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that has begun to train; its folder is tmp_path / "work"."""
    command = [sys.executable, "-m", "diloco", "demo", "--plain", "--keep", str(tmp_path / "work")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        progress = tmp_path / "work" / "learner-0.0.progress"
        wait_for(
            "the first step",
            lambda: process.poll() is not None or (progress.exists() and '"step"' in progress.read_text()),
        )
        assert process.poll() is None, process.stderr and process.stderr.read()
        yield process
    finally:
        for pid in below(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_child(demo: subprocess.Popen[str], number: int, status: int) -> None:
    children = below(demo.pid)
    assert len(children) >= 5  # a syncer and four learners
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=30)
    assert demo.returncode == status, errors
    assert "no process is left behind" in errors and "Traceback" not in errors
    assert [pid for pid in children if running(pid)] == []


def test_killing_the_demo_itself_leaves_no_child(demo: subprocess.Popen[str]) -> None:
    children = below(demo.pid)
    demo.kill()
    demo.wait()
    wait_for("the end of all children", lambda: not any(map(running, children)))


def test_a_learner_that_breaks_is_reported_with_its_last_words(demo: subprocess.Popen[str], tmp_path: Path) -> None:
    children = below(demo.pid)
    victim = next(p for p in children if "learner-2" in Path(f"/proc/{p}/cmdline").read_text())
    (tmp_path / "work" / "learner-2.0.log").open("a").write("the reason it broke\n")
    os.kill(victim, signal.SIGSEGV)
    _, errors = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert "learner-2 ended with -11" in errors and "the reason it broke" in errors
    assert [pid for pid in children if running(pid)] == []


def test_unwritable_report_is_refused_before_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco", "demo", "--json", str(tmp_path / "nowhere" / "report.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "report.json cannot be written" in run.stderr
    assert run.stdout == ""


def test_end_all_reaps_even_what_ignores_sigterm(tmp_path: Path) -> None:
    children = Children(tmp_path)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    )
    child = children.start("deaf", [sys.executable, "-c", deaf])
    wait_for("its first word", lambda: "deaf" in children.last_words(child))
    children.end_all(patience_s=0.1)
    assert child.returncode == -signal.SIGKILL
    children.end_all()


def test_kill_gives_the_wait_status(tmp_path: Path) -> None:
    children = Children(tmp_path)
    child = children.start("sleeper", [sys.executable, "-c", "import time; time.sleep(99)"])
    status = children.kill(child)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert child.returncode == -signal.SIGKILL
