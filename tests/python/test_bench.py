"""`diloco bench memory` and `merge`: the rows they promise, arguments that cannot work. Never how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.bench.rows import Row, table
from diloco.bench.timing import in_turn, ratios
from diloco.cli import app
from diloco.doctor import machine

ROWS = [
    "merge_mean_f32",
    "merge_rda_torch_1m_f32",
    "merge_mean_bf16",
    "merge_rda_bf16",
    "merge_rda_arrived_bf16",
    "merge_rda_torch_1m_bf16",
    "merge_rda_torch_16k_bf16",
    "merge_rda_torch_one_bf16",
]
KEYS = {"name", "value", "unit", "yardstick", "ratio", "op", "goal", "reached"}


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *words])
    return result.exit_code, result.output


def test_every_row_of_merge_is_there_with_its_goal(tmp_path: Path) -> None:
    file = tmp_path / "merge.json"
    status, screen = run("merge", "--elements", "0.03", "--megabytes", "1", "--turns", "1", "--json", str(file))
    report: dict[str, Any] = json.loads(file.read_text())
    assert {"schema", "command", "commit", "machine", "seed", "software"} <= report.keys()
    assert [row["name"] for row in report["results"]] == ROWS
    for row in report["results"]:
        assert row.keys() >= KEYS
        assert row["goal"] > 0
        assert row["value"] > 0
        assert row["yardstick"] > 0
        assert row["ratio"] == pytest.approx(row["ratio_least"])  # of one turn
    assert status == (0 if all(row["reached"] for row in report["results"]) else 1)
    assert screen.count("goal") == 1
    assert screen.count(">=") + screen.count("<=") == len(ROWS)


def test_memory_gives_read_copy_and_triad_by_threads() -> None:
    status, screen = run(
        "memory", "--threads", "1", "--threads", "2", "--megabytes", "1", "--turns", "2", "--json", "-"
    )
    assert status == 0
    report = json.loads(screen[screen.index("{") :])
    assert report["gigabytes_per_s"].keys() == {"1", "2"}
    for one in report["gigabytes_per_s"].values():
        assert one.keys() == {"read", "copy", "triad"}
        assert all(each["best"] >= each["median"] > 0 for each in one.values())


@pytest.mark.parametrize("command", ["memory", "merge"])
def test_too_little_memory_says_how_much_it_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 20, "the machine"))
    status, screen = run(command)
    assert status == 2
    assert f"diloco bench {command}: this takes " in screen
    assert "of memory, and the machine has 1.0 MiB left" in screen


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for command in ("memory", "merge", "islands"):
        status, screen = run(command, "--json", str(tmp_path / "no" / "folder.json"))
        assert status == 2
        assert "cannot be written" in screen
    assert run("merge", "--threads", "0")[0] == 2


def test_runs_are_made_in_turn_and_the_first_does_not_count() -> None:
    order: list[str] = []

    def one(name: str) -> float:
        order.append(name)
        return float(len(order))

    seconds = in_turn({"a": lambda: one("a"), "b": lambda: one("b")}, 2)
    assert "".join(order) == "ababab"
    assert seconds == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert ratios(seconds["b"], seconds["a"], 3.0) == (pytest.approx(3.6), pytest.approx(3.8), pytest.approx(4.0))


def test_a_row_is_reached_by_its_median_and_its_direction() -> None:
    def row(ratio: float, op: Any) -> Row:
        return Row("n", "text", 1.0, "ms", 2.0, "other", ratio, 0.1, 9.0, op, 1.5)

    assert [row(1.4, ">=").reached, row(1.5, ">=").reached, row(1.6, "<=").reached] == [False, True, False]
    screen = table([row(1.4, ">="), row(1.4, "<=")])
    assert "1.40  (0.10 … 9.00)    >= 1.5 MISSED: other" in screen
    assert "<= 1.5 reached" in screen
