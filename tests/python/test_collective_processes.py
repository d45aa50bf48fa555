"""Ranks as real processes: no collective of Python is called, a rank that is gone is an error, the example."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from collective_rank import TIMEOUT_S

from diloco.testing import child_environment

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pair(program: Callable[..., Any], tmp_path: Path) -> Callable[[str], list[Any]]:
    script = ROOT / "tests" / "python" / "collective_rank.py"

    def start(what: str) -> list[Any]:
        return [program(tmp_path / "store", rank, what, script=script, name=f"rank {rank}") for rank in range(2)]

    return start


def test_no_collective_of_python_is_called(pair: Callable[[str], list[Any]]) -> None:
    done = [rank.wait_for("done") for rank in pair("no_python")]
    assert done[0]["weights"] == done[1]["weights"]
    assert [one["merges"] for one in done] == [10, 10]
    assert done[0]["ranks"] == 2


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_rank_that_is_gone_is_an_error_of_one_sentence_within_the_timeout(
    how: str, pair: Callable[[str], list[Any]]
) -> None:
    survivor, victim = pair("for_ever")
    survivor.wait_for("running")
    victim.wait_for("running")
    getattr(victim, how)()  # SIGKILL: the connection breaks. SIGSTOP: only the group's timeout tells
    failed = survivor.wait_for("failed", timeout_s=40)
    assert failed["text"].startswith("rank 0 of 2: exchange failed, a rank of the group has ended or is late (")
    assert "\n" not in failed["text"] and ".cc" not in failed["text"]
    assert failed["after_s"] < TIMEOUT_S + 5  # a loaded machine included
    assert survivor.wait_for("again")["text"] == failed["text"]
    assert survivor.wait(30) == 3


def test_the_example_starts_torchrun_on_itself() -> None:
    done = subprocess.run(
        [sys.executable, "examples/streaming_collective.py", "--steps", "60"],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"rank [01]: 10 merges of 2 members", done.stdout)) == 2, done.stdout
