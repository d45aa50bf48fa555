"""Every example, as its head says to run it: it starts a syncer and two learners by itself and checks what they did."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diloco.testing import child_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
CHECKED = ("minimal", "hf_trainer", "lightning", "finetune_lora")
RECIPES = ("ssh.sh", "slurm.sh")
Sized = Callable[[str, int, int], int]


def run(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in argv]
    env = child_environment(environment)
    return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, cwd=EXAMPLES.parent, env=env)


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("HF_HUB_OFFLINE", "WANDB_MODE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")  # so that what the module sets is taken back
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("common", EXAMPLES / "common.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CHECKED)
def test_example(name: str, sized: Sized) -> None:
    """Five merged rounds of two learners, and a loss that falls by a tenth: it looks at that itself."""
    done = run(sys.executable, f"examples/{name}.py", "--steps", sized("steps", 60, 200))
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert done.stdout.count("ok: ") == 3, output
    assert "FAILED" not in output


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.*")), ids=lambda file: file.name)
def test_an_example_is_short_and_says_what_to_type(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 150
    if file.name in RECIPES:
        assert f"examples/{file.name}" in text.split("set -euo pipefail")[0]
    elif file.stem != "common":
        assert f"python examples/{file.name}" in (ast.get_docstring(ast.parse(text)) or "")


def test_an_example_that_does_not_reach_its_goal_says_so_and_fails() -> None:
    """One learner is no quorum: nothing is merged."""
    done = run(sys.executable, "examples/minimal.py", "--learners", 1)
    assert done.returncode == 1, done.stderr
    assert "FAILED: 0 rounds merged work of 2 learners or more, expected 5" in done.stdout


def test_each_check_can_fail(common: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def merges(count: int, *learners: str) -> list[dict[str, Any]]:
        return [{"event": "merge", "members": [{"learner": name} for name in learners]}] * count

    good, flat = [2.0] * 20 + [1.8] * 20, [2.0] * 20 + [1.81] * 20
    two = merges(5, "a", "b")
    cases: dict[str, tuple[list[dict[str, Any]], dict[str, list[float]], list[str]]] = {
        "": (two, {"a": good, "b": good}, []),
        "FAILED: 4 rounds merged": (two[:4] + merges(9, "a") + merges(9, "a", "a"), {"a": good}, []),
        "FAILED: loss of b: 2.000": (two, {"a": good, "b": flat}, []),
        "FAILED: loss of a": (two, {"a": good[1:]}, []),
        "FAILED: learner b": (two, {"a": good}, ["learner b ended with status 1"]),
    }
    for wanted, (events, losses, failed) in cases.items():
        status = common.check(events, losses, failed)
        output = capsys.readouterr().out
        assert status == (1 if wanted else 0), output
        assert wanted in output
        assert output.count("FAILED") == status


# ---- recipes: the programs they call are replaced by ones that run the command here ----

FAKE_SSH = """#!/usr/bin/env bash
forward=
while [ $# -gt 0 ]; do
  case $1 in -o) shift 2 ;; -R) forward=$2; shift 2 ;; -*) shift ;; *) break ;; esac
done
echo "$1 $forward" >>"$CALLS"
shift
exec bash -c "$*"
"""
FAKE_SRUN = """#!/usr/bin/env bash
for word in "$@"; do
  case $word in --output=*) out=${word#*=} ;; --relative=*) echo "$word" >>"$CALLS" ;; -*) ;; *) break ;; esac
  shift
done
if [ -e "$CALLS.fail" ] && rm "$CALLS.fail"; then exit 1; fi
exec "$@" >>"$out" 2>&1
"""


def recipe(
    script: str, fake: str, program: str, folder: Path, *hosts: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str], list[dict[str, Any]]]:
    """Runs it; what it said, what the replaced program was called with, the syncer's event log."""
    (folder / "bin").mkdir()
    (folder / "bin" / program).write_text(fake)
    (folder / "bin" / program).chmod(0o755)
    environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    environment |= {"PYTHON": sys.executable, "RUN_DIR": str(folder), "SCRIPT": "examples/minimal.py"}
    environment |= {"STEPS": "60", "RESTARTS": "1"}
    done = run(EXAMPLES / script, *hosts, **environment)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return done, sorted((folder / "calls").read_text().splitlines()), events


def together(events: list[dict[str, Any]]) -> int:
    return sum(event["event"] == "merge" and len(event["members"]) == 2 for event in events)


def test_the_ssh_recipe_runs(tmp_path: Path) -> None:
    done, calls, events = recipe("ssh.sh", FAKE_SSH, "ssh", tmp_path, "alice@gpu1", "gpu2")
    assert done.returncode == 0, done.stdout + done.stderr
    port = (tmp_path / "endpoint").read_text().strip().rsplit(":", 1)[1]
    assert calls == [f"alice@gpu1 {port}:127.0.0.1:{port}", f"gpu2 {port}:127.0.0.1:{port}"]
    assert {event["learner"] for event in events if event["event"] == "join"} == {"gpu1-0", "gpu2-1"}
    assert together(events) >= 5
    assert events[-1]["event"] == "stop"


def test_the_slurm_recipe_runs_and_starts_a_failed_learner_again(tmp_path: Path) -> None:
    (tmp_path / "calls.fail").touch()
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SYNCER_ADDRESS": "127.0.0.1"}
    script = EXAMPLES / "slurm.sh"
    assert "#SBATCH --no-kill" in script.read_text()
    done, calls, events = recipe("slurm.sh", FAKE_SRUN, "srun", tmp_path, **job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(calls) == {"--relative=0", "--relative=1"}
    assert len(calls) == 3
    assert "ended with an error (try 1 of 2)" in done.stderr
    assert {event["learner"] for event in events if event["event"] == "join"} == {"77-node-0", "77-node-1"}
    assert together(events) >= 5
    assert events[-1]["event"] == "stop"


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_is_clean(script: str) -> None:
    checker = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    done = run(*checker, EXAMPLES / script)
    assert done.returncode == 0, done.stdout + done.stderr
