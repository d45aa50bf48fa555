"""`diloco bench islands`: the shape of its report, numbers that agree with each other, and a check that can fail."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.bench import island_report
from diloco.bench.island_rank import COUNTED, LAYERS, VARIANTS, Job, width_of
from diloco.bench.islands import TURN, BenchError, Measured, Options, Ranks, measure_all
from diloco.cli import app
from diloco.cli import bench as bench_cli
from diloco.testing import child_environment

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report of a run as small as it can be, and what it printed."""
    file = tmp_path_factory.mktemp("bench") / "islands.json"
    argv = [sys.executable, "benchmarks/python/island_cost.py", "--ranks", "1", "--ranks", "2", "--million", "0.02"]
    argv += ["--steps", "6", "--json", str(file)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT, env=child_environment()
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report: dict[str, Any] = json.loads(file.read_text())
    return report, done.stdout


def test_the_report_has_the_common_keys_and_every_island(tiny: tuple[dict[str, Any], str]) -> None:
    report, _ = tiny
    assert report["schema"] == "diloco.bench.islands.1"
    assert report["command"].startswith("diloco bench islands --ranks 1")
    assert {"commit", "machine", "seed", "software", "ok", "checks"} <= report.keys()
    assert report["parameters"] == LAYERS * width_of(20_000) ** 2 == 20_164
    kinds = [(one["sharding"], one["ranks"]) for one in report["islands"]]
    assert kinds == [("ddp", 1), ("ddp", 2), ("fsdp2", 1), ("fsdp2", 2)]
    for one in report["islands"]:
        assert [each["rank"] for each in one["per_rank"]] == list(range(one["ranks"]))
        assert one["step_s"].keys() == set(VARIANTS)
        assert one["ratios"].keys() == {"joined_to_bare", "joined_to_alone", "alone_to_bare"}
    assert report["checks"].keys() == {"memory_of_2_ranks"}


def test_the_numbers_agree_with_each_other(tiny: tuple[dict[str, Any], str]) -> None:
    report, _ = tiny
    for one in report["islands"]:
        for ratio in one["ratios"].values():
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        held = [each["held_parameters"] for each in one["per_rank"]]
        assert sum(held) == report["parameters"] * (one["ranks"] if one["sharding"] == "ddp" else 1)
        assert one["rounds_merged"] > 0
        for each in one["per_rank"]:
            assert each["steps"] == 6 + TURN
            assert each["rank_exchanges"] == (each["steps"] if one["ranks"] > 1 else 0)
            assert 0 <= each["rank_waits"] <= each["rank_exchanges"]
            assert each["blocked_s_per_step"] > 0
            assert each["blocked_share"] == pytest.approx(each["blocked_s_per_step"] / one["step_s"]["joined"])
            assert each["peak_bytes"] > max(each["above_alone_bytes"], each["above_bare_bytes"])
        sent = [each["bytes_out"] for each in one["per_rank"]]
        assert all(sent) if one["sharding"] == "fsdp2" else not any(sent[1:]) and sent[0]


def test_the_table_has_a_line_for_each_rank_and_check(tiny: tuple[dict[str, Any], str]) -> None:
    report, printed = tiny
    assert printed.rstrip("\n") == island_report.screen(report)
    assert printed.count("  rank ") == 6
    assert "ok   fsdp2, 2 ranks: a rank needs" in printed
    assert max(map(len, printed.splitlines())) <= 120


def invented(ranks: int, above_bare: int) -> Measured:
    out = Measured("fsdp2", ranks, turns={variant: [0.3, 0.6, 0.9] for variant in VARIANTS})
    out.turns["joined"] = [0.6, 0.6, 0.9]
    counted = dict.fromkeys(COUNTED, 15)
    out.reports = {"alone": [counted] * ranks, "joined": [counted] * ranks}
    out.peaks = {"bare": [300 * MIB] * ranks, "alone": [310 * MIB] * ranks, "joined": [300 * MIB + above_bare] * ranks}
    return out


def test_memory_that_is_not_shared_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [invented(1, 100 * MIB), invented(2, 69 * MIB), invented(4, 38 * MIB)]
    report = island_report.build(Options(), good, "diloco bench islands")
    assert report["ok"] and len(report["checks"]) == 2
    assert report["islands"][0]["ratios"]["joined_to_bare"]["median"] == 1.0
    assert report["islands"][0]["step_s"]["joined"] == pytest.approx(0.6 / TURN)
    bad = [invented(1, 100 * MIB), invented(2, 100 * MIB)]
    monkeypatch.setattr("diloco.bench.islands.measure_all", lambda *_: bad)
    done = CliRunner().invoke(app, ["bench", "islands"])
    assert done.exit_code == 1
    assert "FAIL fsdp2, 2 ranks: a rank needs 100.0 MiB, one process 100.0 MiB: 1.00 of it" in done.output


def test_json_on_stdout_is_json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.bench.islands.measure_all", lambda *_: [invented(1, MIB)])
    done = CliRunner().invoke(app, ["bench", "islands", "--json", "-"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["islands"][0]["per_rank"][0]["above_bare_bytes"] == MIB


def test_a_file_that_cannot_be_written_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("diloco.bench.islands.measure_all", measure_all)
    assert bench_cli.run_islands([1], ["ddp"], 0.01, 6, 0, str(tmp_path / "none" / "x.json")) == 2


def test_a_rank_that_ends_is_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    job = Job("ddp", "bare", 0, 1, -1, 0, "127.0.0.1:1", str(tmp_path / "store"))  # -1: no width of a layer
    ranks = Ranks(context, [job])
    try:
        with pytest.raises(BenchError, match=r"rank 0 of 1 \(ddp, bare\) has ended; its error is above"):
            ranks.answers()
    finally:
        ranks.kill()
