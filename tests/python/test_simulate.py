"""`diloco simulate cluster`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diloco._native import _C
from diloco.cli.simulate import add


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "diloco", "simulate", "cluster", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("mode", ["none", "small"])
def test_report_has_the_keys_and_the_numbers(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "report.json"
    done = run("--events", 300_000, "--seed", 5, "--mode", mode, "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert {"schema", "command", "commit", "machine", "seed", "software"} <= set(report)
    assert report["schema"] == "diloco.simulate.cluster.1"
    assert (report["seed"], report["mode"], report["violations"]) == (5, mode, [])
    assert report["events"] == sum(report["events_by_kind"].values()) >= 300_000
    assert report["events"] <= 200 * report["merges"]
    assert report["share_of_steps_and_heartbeats"] <= 0.5
    assert report["events_per_s_per_core"] > 10_000
    assert report["faults"]
    assert "no invariant was violated" in done.stdout
    for counts in (report["events_by_kind"], report["faults"]):
        assert all(f"{kind} {count}" in done.stdout for kind, count in counts.items())


def test_a_rate_below_the_floor_is_a_failure() -> None:
    done = run("--events", 2000, "--floor", 1e12)
    assert done.returncode == 1
    assert "slower than the floor" in done.stderr


def test_an_unwritable_file_is_refused_before_the_run(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run("--events", 10**12, "--json", tmp_path / "missing" / "report.json")
    assert done.returncode == 2
    assert "missing" in done.stderr
    assert time.monotonic() - began < 60


def planted(tmp_path: Path) -> Path:
    scenario = json.loads(_C.random_scenario(12, True))
    scenario["plant"] = "forged_merge"
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(scenario))
    return file


def test_a_violation_is_named_and_shrinks(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("--replay", planted(tmp_path), "--json", report, "--shrink")
    assert done.returncode == 1, done.stderr
    assert "VIOLATED merged_once with seed 12 at event" in done.stderr
    violation = json.loads(report.read_text())["violations"][0]
    assert set(violation) == {"seed", "invariant", "text", "event", "at_s"}
    small = json.loads(done.stdout)
    assert json.loads(_C.replay_scenario(json.dumps(small)))["violations"][0]["event"] <= 50


def test_a_bad_scenario_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    file.write_text("")  # a torn one must not pass for a run without violations
    assert run("--replay", file).returncode == 2
    file.write_text("{}")
    done = run("--replay", file)
    assert done.returncode == 2
    assert "key 'schema' not found" in done.stderr
    assert "json.exception" not in done.stderr
    file.write_text('{"schema": ')
    assert "no JSON; it goes wrong at byte 12" in run("--replay", file).stderr
    scenario = json.loads(_C.random_scenario(1, False))
    file.write_text(json.dumps(scenario | {"merge_s": "long"}))
    assert "a value is not of its type: type must be number, but is string" in run("--replay", file).stderr
    scenario["learners"][0]["step_s"] = 0.0
    file.write_text(json.dumps(scenario))
    assert "step_s must be above 0" in run("--replay", file).stderr
    assert run("--replay", tmp_path / "nothing.json").returncode == 2


def test_the_report_on_stdout_is_alone_there() -> None:
    done = run("--events", 1000, "--json", "-")
    assert json.loads(done.stdout)["events"] >= 1000
    assert "no invariant was violated" in done.stderr
    done = run("--events", 1000, "--json", "-", "--shrink")
    assert done.returncode == 2
    assert "--json expects a file, got -" in done.stderr


def test_the_same_seed_gives_the_same_report() -> None:
    def one() -> dict[str, Any]:
        report: dict[str, Any] = json.loads(_C.simulate(20_000, 3, True))
        return {key: value for key, value in report.items() if not key.startswith(("cpu_s", "events_per_s"))}

    assert one() == one()


def test_reports_add_up() -> None:
    a, b = (json.loads(_C.simulate(1, seed, False)) for seed in (1, 2))
    both, whole = add(a, b), json.loads(_C.simulate(a["events"] + 1, 1, False))
    for key in ("events", "scenarios", "merges", "violations", "events_by_kind", "faults"):
        assert both[key] == whole[key], key


def test_ctrl_c_ends_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "diloco", "simulate", "cluster", "--events", str(10**12)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "events" in process.stderr.readline()  # the first progress line
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.communicate()
