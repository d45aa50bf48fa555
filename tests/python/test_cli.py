"""The `diloco` command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from toys import QUICK, dead_address, small_model

import diloco
from diloco.cli.status import fragment_rows, headlines, render
from diloco.cli.units import duration, size


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "diloco", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


@pytest.fixture
def running() -> Iterator[diloco.Syncer]:
    with (
        diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer,
        diloco.Learner(small_model(), syncer.endpoint, learner_id="learner-a") as learner,
    ):
        learner.step(tokens=5)
        yield syncer


def test_version_names_everything() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert f"diloco {diloco.__version__} (protocol 1, torch {torch.__version__}, libzmq 4." in done.stdout
    assert "pybind11 internals" in done.stdout
    assert "curve" in done.stdout


def test_help_lists_the_verbs() -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb in ("demo", "doctor", "syncer", "status", "audit"):
        assert verb in done.stdout


@pytest.mark.parametrize("verb", ["syncer", "audit", "demo", "doctor", "status"])
def test_every_verb_explains_itself(verb: str) -> None:
    done = run(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert f"diloco {verb}" in done.stdout


def test_syncer_help_has_every_setting() -> None:
    text = run("syncer", "--help").stdout
    for info in diloco._native._C.settings_table():
        assert "--" + info.name.replace("_", "-") in text


def test_status_without_a_terminal_is_plain(running: diloco.Syncer, tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    done = run("status", running.endpoint, "--json", file)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert f"syncer {running.endpoint}: epoch 1, decoupled, quorum 1" in done.stdout
    # Stalled: alive, but without a step for some seconds, which starting a program takes on a busy machine.
    assert re.search(r"id=learner-a state=(live|stalled) step=1 ", done.stdout)
    assert "tokens, summed over fragments: 10 processed" in done.stdout
    status = json.loads(file.read_text())
    assert status["learners"][0]["id"] == "learner-a"
    keys = {"epoch", "learners", "fragments", "rounds", "waiting", "ledger", "bytes", "memory", "timings", "effective"}
    assert keys <= status.keys()


def test_status_on_a_terminal_is_a_table(running: diloco.Syncer) -> None:
    console = Console(force_terminal=True, width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    render(running.endpoint, running.status(), console)
    text = console.export_text()
    assert "learners (1)" in text
    assert "│ learner-a │" in text


def test_status_names_preset_and_trigger() -> None:
    with diloco.Syncer(preset="async", shutdown_s=0.1) as syncer, diloco.Learner(small_model(), syncer.endpoint):
        status = syncer.status()
    lines = headlines("a:1", status)
    assert lines[0].startswith("syncer a:1: epoch 1, preset async, decoupled, trigger arrival, quorum 1")
    assert {row[4] for row in fragment_rows(status)} == {"-"}  # every learner has due clocks of its own


def test_status_as_json_on_stdout(running: diloco.Syncer) -> None:
    done = run("status", running.endpoint, "--json", "-")
    assert json.loads(done.stdout)["mode"] == "decoupled"


def test_status_refuses_an_unwritable_file_before_it_asks(tmp_path: Path) -> None:
    with dead_address() as address:
        done = run("status", address, "--json", tmp_path / "missing" / "status.json")
    assert done.returncode == 2
    assert "cannot write --json" in done.stderr
    assert "No such file or directory" in done.stderr


def test_status_of_nobody() -> None:
    with dead_address() as address:
        done = run("status", address)
    assert done.returncode == 1
    assert address in done.stderr
    assert "Traceback" not in done.stderr
    done = run("status", "localhost")
    assert done.returncode == 2
    assert "expected HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["syncer", "--sync-evry", "3"], "sync-evry"),
        (["syncer", "--sync-every", "often"], "often"),
        (["syncer", "--bind", "localhost"], "expected HOST:PORT"),
        (["statsu"], "statsu"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_toml_error_names_its_line(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("sync_every = 12\nmin_quorm = 2\n")
    done = run("syncer", "--config", config)
    assert done.returncode == 2
    assert f"{config}:2:" in done.stderr
    assert "did you mean min_quorum?" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_syncer_runs_until_a_signal(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "diloco", "syncer", "--bind", "127.0.0.1:0", "--sync-every", "12"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on tcp://127.0.0.1:")
        status = diloco.status(line.split("tcp://")[1].strip())
        assert status["effective"]["sync_every"] == 12
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_native_program_is_shipped() -> None:
    program = Path(diloco.__file__).parent / "bin" / "diloco-syncer"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0
    assert diloco.__version__ in done.stdout
    script = [sys.executable, "-P", "-c", "import diloco_commands; diloco_commands.diloco_syncer()", "--version"]
    assert subprocess.run(script, capture_output=True, text=True, timeout=60, check=True).stdout == done.stdout
    # The command neither needs nor loads torch.
    code = "import os, sys; os.execv = lambda *_: sys.exit('torch' in sys.modules); "
    code += "import diloco_commands; diloco_commands.diloco_syncer()"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


MINIMAL = Path(__file__).parents[2] / "examples" / "minimal.py"


def without_diloco() -> tuple[str, int]:
    """The program without its marked lines, and how many those are."""
    lines = MINIMAL.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.rstrip().endswith("# <- diloco")]
    return "".join(kept), len(lines) - len(kept)


def test_example_differs_by_at_most_three_lines() -> None:
    plain, marked = without_diloco()
    assert marked == 3
    assert "diloco." not in plain.split('"""')[2]


@pytest.mark.parametrize("form", ["with", "without"])
def test_example_runs_without_a_syncer(form: str, tmp_path: Path) -> None:
    """The marked lines in it and nobody there, or the ordinary script that is left without them: both train."""
    script = MINIMAL
    if form == "without":
        (tmp_path / "common.py").write_text((MINIMAL.parent / "common.py").read_text())
        script = tmp_path / "minimal.py"
        script.write_text(without_diloco()[0])
    with dead_address() as address:
        argv = [sys.executable, script, "--syncer", address, "--learner-id", "a", "--losses", tmp_path / "losses"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in (tmp_path / "losses").read_text().split()]
    assert len(losses) == 60
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (duration, 0.0042, "4 ms"),
        (duration, 12.34, "12.3 s"),
        (duration, 600, "10 min"),
        (duration, 9000, "2.5 h"),
        (duration, None, "-"),
        (size, 100, "100 B"),
        (size, 3 << 20, "3.0 MiB"),
        (size, 5 << 40, "5.0 TiB"),
    ],
)
def test_units(call: Callable[[Any], str], value: Any, text: str) -> None:
    assert call(value) == text
