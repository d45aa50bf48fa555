"""The demo's report, picture and screens on an invented run; and the options it refuses before starting anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from demo_record import FRAGMENTS, good_record

from diloco.demo import checks, picture, report, table
from diloco.demo.margin import summary
from diloco.demo.record import Record
from diloco.demo.run import DemoOptions, problem_with, run_demo


def built(record: Record) -> dict[str, Any]:
    return json.loads(json.dumps(report.build(record, checks.run_checks(record), "diloco demo"), allow_nan=False))


def test_the_report_has_the_common_and_the_promised_keys() -> None:
    values = built(good_record())
    common = {"schema", "command", "commit", "machine", "seed", "software", "ledger", "rounds", "kills"}
    promised = {"checks", "loss", "merged_fraction", "blocked_fraction", "kill", "bytes_on_wire", "fragment_versions"}
    assert common | promised <= values.keys()
    assert values["rounds"] == 59 and values["kills"] == 1
    assert {"start", "end", "alone"} <= values["loss"].keys()
    assert values["ledger"].keys() == {"processed", "merged", "outstanding", "in_flight", "discarded"}
    assert all(check.keys() >= {"ok", "value", "limit"} for check in values["checks"].values())
    kill = {"learner", "pid", "signal", "at_s", "back_at_s", "merged_again_at_s", "peers_longest_call_ratio"}
    assert kill <= values["kill"].keys()
    assert values["kill"]["wait_status"] == 9
    assert values["fragment_versions"] == [[1, 15]] * FRAGMENTS
    assert values["merged_fraction"]["learner-3"] == 0.94
    assert values["bytes_on_wire"] == {"in": 1000, "out": 2000}
    assert values["software"].keys() >= {"diloco", "python", "torch"}


def test_the_report_of_a_broken_run_is_still_json() -> None:
    record = replace(Record(seed=0, steps=60), reference="learner-0", lives=good_record().lives)
    values = built(record)
    assert values["ok"] is False and values["kills"] == 0 and values["kill"] is None
    assert values["loss"]["end"] is None


def test_the_screen_names_every_check_and_every_learner() -> None:
    record = good_record()
    record.losses.end = 3.0
    text = report.screen(built(record))
    assert "FAIL better_than_alone" in text and "ok   ledger_exact" in text
    assert all(name in text for name in record.learners())
    assert "(2 lives)" in text and "lost 6" in text


@pytest.mark.parametrize("name", ["picture.png", "picture.svg", "picture"])
def test_the_picture_is_drawn(tmp_path: Path, name: str) -> None:
    picture.draw(good_record(), str(tmp_path / name))
    head = (tmp_path / name).read_bytes()[:100]
    assert head.startswith(b"\x89PNG") or b"<?xml" in head


def test_the_picture_of_an_empty_run_is_drawn(tmp_path: Path) -> None:
    picture.draw(Record(seed=0, steps=60), str(tmp_path / "picture.png"))


def test_plain_lines_have_no_control_codes(capsys: pytest.CaptureFixture[str]) -> None:
    screen = table.make_screen(plain=False)  # standard output is no terminal here
    assert isinstance(screen, table.PlainScreen)
    with screen:
        screen.show(replace(good_record(), trained_s=0.0), table.Phase("training", 30, 60, 42.0))
        screen.show(good_record(), table.Phase("training", 31, 60, 41.0))  # too soon after the last
        screen.say("hello")
    lines = capsys.readouterr().out.splitlines()
    assert "learner-1:48" in lines[0]  # both lives
    assert len(lines) == 2 and "50%" in lines[0] and "about 42 s left" in lines[0] and lines[1] == "hello"
    assert "\x1b" not in "".join(lines)


def test_the_live_table_shows_learners_rounds_and_loss() -> None:
    from rich.console import Console, Group

    record = good_record()
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    phase = table.Phase("training", 30, 60)
    console.print(Group(table.header(record, phase), table.learner_table(record), table.round_table(record)))
    text = console.export_text()
    assert "killed (signal 9)" in text and "1/1.5" in text
    assert "learner-2 0.25" in text
    assert f"{record.losses.curve[-1].loss:.3f}" in text


def test_tokens_per_s() -> None:
    life = good_record().lives[0]
    assert table.tokens_per_s(life) == pytest.approx(1024)
    life.steps.clear()
    assert table.tokens_per_s(life) == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (DemoOptions(json="/nonexistent/report.json"), "--json /nonexistent/report.json"),
        (DemoOptions(picture="/nonexistent/p.png"), "--picture /nonexistent/p.png"),
        (DemoOptions(steps=10), "--steps 10"),
        (DemoOptions(margin_seeds=1), "--margin-seeds 1"),
    ],
)
def test_options_are_refused_before_anything_starts(
    options: DemoOptions, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(options) == 2
    assert words in capsys.readouterr().err


def test_a_refused_report_leaves_no_file(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    assert "--picture" in problem_with(DemoOptions(json=str(report_path), picture="/nonexistent/p.png"))
    assert not report_path.exists()


def test_an_earlier_report_is_not_emptied_by_the_test_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")
    assert problem_with(DemoOptions(json=str(path))) == ""
    assert path.read_text() == "before"


def test_margin_over_seeds() -> None:
    values = summary([{"margin": 0.10}, {"margin": 0.12}, {"margin": 0.11}])
    assert values["margin"] == pytest.approx(0.11)
    assert values["spread"] == pytest.approx(0.01)
    assert values["ratio"] == pytest.approx(11)
