"""diloco/audit.py on handcrafted event logs and ledger files: what is exact passes, every deviation is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco import audit

A, A2, B = 0xA1, 0xA2, 0xB1
Event = dict[str, Any]


def hexed(incarnation: int) -> str:
    return f"{incarnation:016x}"


def write_ledger(
    folder: Path,
    learner: str,
    incarnation: int,
    tokens: int,
    discards: list[tuple[int, int, int, str]] | None = None,
    closed: bool = True,
    fragments: int = 2,
) -> Path:
    entries = discards or []
    raw = audit.HEADER.pack(
        audit.MAGIC, incarnation, tokens, fragments, len(entries), int(closed), 7, 0, learner.encode().ljust(64, b"\0")
    )
    for fragment, start, end, reason in entries:
        raw += audit.ENTRY.pack(fragment, start, end, audit.REASONS.index(reason))
    path = folder / f"{learner}.{hexed(incarnation)}.ledger"
    path.write_bytes(raw)
    return path


def join(learner: str, incarnation: int) -> Event:
    return {"event": "join", "t": 0.0, "learner": learner, "incarnation": hexed(incarnation), "host": "h", "pid": 7}


def leave(learner: str, incarnation: int) -> Event:
    return {"event": "leave", "t": 0.0, "learner": learner, "incarnation": hexed(incarnation), "why": "gone"}


def merge(fragment: int, version: tuple[int, int], *members: tuple[str, int, int, int]) -> Event:
    return {
        "event": "merge",
        "t": 0.0,
        "round": version[1],
        "fragment": fragment,
        "version": list(version),
        "members": [
            {"learner": name, "incarnation": hexed(inc), "from": start, "to": end, "weight": 1 / len(members)}
            for name, inc, start, end in members
        ],
    }


PLAN: Event = {"event": "plan", "t": 0.0, "fragments": [{"tensors": ["a"]}, {"tensors": ["b"]}]}


def run_audit(folder: Path, *events: Event) -> dict[str, Any]:
    return audit.audit([PLAN, *events], audit.read_ledgers(folder))


def test_exact_account(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100, [(1, 40, 60, "overwritten")])
    write_ledger(tmp_path, "b", B, 50)
    report = run_audit(
        tmp_path,
        join("a", A),
        join("b", B),
        merge(0, (1, 1), ("a", A, 0, 40), ("b", B, 0, 50)),
        merge(0, (1, 2), ("a", A, 40, 100)),
        merge(1, (1, 1), ("a", A, 0, 40)),
        merge(1, (1, 2), ("a", A, 60, 90)),
    )
    assert report["errors"] == []
    assert report["ledger"] == {
        "processed": 300,
        "merged": 40 + 50 + 60 + 40 + 30,
        "outstanding": 10 + 50,
        "in_flight": 0,
        "discarded": {"overwritten": 20},
    }
    assert report["learners"]["a"]["merged_fraction"] == pytest.approx(170 / 200)
    assert report["learners"]["a"]["fragments_merged"] == 2
    assert report["learners"]["b"]["fragments_merged"] == 1
    assert report["rounds"] == 4


def test_overlap_is_found(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    report = run_audit(tmp_path, merge(0, (1, 1), ("a", A, 0, 40)), merge(0, (1, 2), ("a", A, 30, 100)))
    assert not report["ok"]
    assert "fragment 0" in report["errors"][0] and "10 tokens twice" in report["errors"][0]


def test_merged_and_discarded_is_found(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100, [(0, 0, 40, "carry_limit")])
    report = run_audit(tmp_path, merge(0, (1, 1), ("a", A, 0, 40)))
    assert any("40 tokens twice" in error for error in report["errors"])


def test_gap_is_found(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    report = run_audit(tmp_path, merge(0, (1, 1), ("a", A, 0, 40)), merge(0, (1, 2), ("a", A, 41, 100)))
    assert any("gap [40, 41)" in error and "1 tokens unaccounted" in error for error in report["errors"])


def test_past_the_end_is_found(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    report = run_audit(tmp_path, merge(0, (1, 1), ("a", A, 0, 101)))
    assert any("past the 100 tokens" in error for error in report["errors"])


@pytest.mark.parametrize("interval", [(10, 10), (10, 5)])
def test_empty_and_reversed_intervals_are_found(tmp_path: Path, interval: tuple[int, int]) -> None:
    write_ledger(tmp_path, "a", A, 100)
    report = run_audit(tmp_path, merge(0, (1, 1), ("a", A, *interval)))
    assert any("empty or reversed" in error for error in report["errors"])


def test_a_merge_without_a_ledger_file_is_found(tmp_path: Path) -> None:
    report = run_audit(tmp_path, merge(0, (1, 1), ("a", A, 0, 10)))
    assert any("no ledger file" in error and hexed(A) in error for error in report["errors"])


def test_a_fragment_that_does_not_exist_is_found(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    report = run_audit(tmp_path, merge(2, (1, 1), ("a", A, 0, 10)))
    assert any("fragment 2" in error and "there are 2" in error for error in report["errors"])


def test_the_tail_of_a_killed_learner_is_lost(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100, closed=False)
    write_ledger(tmp_path, "a", A2, 30)
    report = run_audit(tmp_path, join("a", A), merge(0, (1, 1), ("a", A, 0, 60)), leave("a", A), join("a", A2))
    assert report["ok"]
    assert report["ledger"]["discarded"] == {"lost": 40 + 100}
    assert report["ledger"]["outstanding"] == 60
    assert [life["state"] for life in report["learners"]["a"]["incarnations"]] == ["lost", "closed"]


def test_a_later_life_marks_the_earlier_one_lost(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100, closed=False)
    write_ledger(tmp_path, "a", A2, 30, closed=False)
    report = run_audit(tmp_path, join("a", A), join("a", A2))
    assert [life["state"] for life in report["learners"]["a"]["incarnations"]] == ["lost", "running"]


def test_lives_are_in_the_order_they_joined(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    write_ledger(tmp_path, "a", A2, 30)
    report = run_audit(tmp_path, join("a", A2), join("a", A))
    assert [life["tokens"] for life in report["learners"]["a"]["incarnations"]] == [30, 100]


def test_a_learner_that_left_and_came_back_is_not_lost(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100, closed=False)
    report = run_audit(tmp_path, join("a", A), leave("a", A), join("a", A))
    assert report["ledger"]["outstanding"] == 200
    assert report["ledger"]["discarded"] == {}


def test_a_learner_that_never_joined_counts_with_the_plan(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100, fragments=0)
    assert run_audit(tmp_path)["ledger"]["processed"] == 200


RECOVER: Event = {"event": "recover", "t": 0.0, "fragment": 0, "from_version": [1, 1], "version": [2, 1]}


def test_merges_after_the_recovered_version_are_void(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    before = [merge(0, (1, 1), ("a", A, 0, 40)), merge(0, (1, 2), ("a", A, 40, 80))]
    again = merge(0, (2, 2), ("a", A, 40, 100))
    assert not run_audit(tmp_path, *before, again)["ok"]
    report = run_audit(tmp_path, *before, RECOVER, again)
    assert report["errors"] == []
    assert (report["void_merges"], report["rounds"]) == (1, 2)
    assert report["ledger"]["merged"] == 100


def test_recovery_leaves_other_fragments_alone(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    report = run_audit(tmp_path, merge(1, (1, 1), ("a", A, 0, 40)), merge(1, (1, 2), ("a", A, 40, 80)), RECOVER)
    assert report["void_merges"] == 0
    assert report["ledger"]["merged"] == 80


def test_a_new_start_voids_every_earlier_merge(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    init: Event = {"event": "init", "t": 0.0, "fragment": 0, "version": [2, 0], "from": "a"}
    report = run_audit(tmp_path, merge(0, (1, 1), ("a", A, 0, 40)), init, merge(0, (2, 1), ("a", A, 0, 50)))
    assert report["errors"] == []
    assert report["ledger"]["merged"] == 50


def test_a_recovery_after_a_new_start_in_the_same_life_counts(tmp_path: Path) -> None:
    """A fresh learner came first, then one that held the old weights: the life began from those."""
    write_ledger(tmp_path, "a", A, 100)
    before = [merge(0, (1, 1), ("a", A, 0, 40)), merge(0, (1, 2), ("a", A, 40, 80))]
    init: Event = {"event": "init", "t": 0.0, "fragment": 0, "version": [2, 0], "from": "b"}
    report = run_audit(tmp_path, *before, init, RECOVER, merge(0, (2, 2), ("a", A, 40, 100)))
    assert report["errors"] == []
    assert report["void_merges"] == 1
    assert report["ledger"]["merged"] == 100


def test_work_a_restarted_syncer_lost_is_lost(tmp_path: Path) -> None:
    """The learner went on behind it: nobody will merge [40, 80) again."""
    write_ledger(tmp_path, "a", A, 100)
    before = [merge(0, (1, 1), ("a", A, 0, 40)), merge(0, (1, 2), ("a", A, 40, 80))]
    report = run_audit(tmp_path, *before, RECOVER, merge(0, (2, 2), ("a", A, 80, 100)))
    assert report["errors"] == []
    assert report["ledger"]["merged"] == 60
    assert report["ledger"]["discarded"] == {"lost": 40}


@pytest.mark.parametrize("closed", [False, True])
def test_a_hole_that_was_declared_sent_is_explained(tmp_path: Path, closed: bool) -> None:
    write_ledger(tmp_path, "a", A, 100, [(0, 10, 40, "in_flight"), (0, 30, 40, "overwritten")], closed=closed)
    report = run_audit(tmp_path, join("a", A), merge(0, (1, 1), ("a", A, 0, 10)), merge(0, (1, 2), ("a", A, 40, 100)))
    assert report["errors"] == []
    assert report["ledger"]["in_flight"] == (0 if closed else 20)
    assert report["ledger"]["discarded"] == {"overwritten": 10} | ({"lost": 20} if closed else {})
    merged = merge(0, (1, 2), ("a", A, 10, 30))  # it was merged after all
    report = run_audit(tmp_path, join("a", A), merge(0, (1, 1), ("a", A, 0, 10)), merged)
    assert report["errors"] == []
    assert report["ledger"]["in_flight"] == 0


def test_a_hole_only_partly_declared_is_found(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100, [(0, 10, 30, "in_flight")])
    report = run_audit(tmp_path, merge(0, (1, 1), ("a", A, 0, 10)), merge(0, (1, 2), ("a", A, 40, 100)))
    assert any("gap [10, 40)" in error for error in report["errors"])


def test_versions_must_increase(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    report = run_audit(tmp_path, merge(0, (1, 2), ("a", A, 0, 40)), merge(0, (1, 2), ("a", A, 40, 80)))
    assert any("version [1, 2] follows [1, 2]" in error for error in report["errors"])


def test_weights_must_add_up_to_one(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    event = merge(0, (1, 1), ("a", A, 0, 40))
    event["members"][0]["weight"] = 0.5
    assert any("weights add up to 0.5" in error for error in run_audit(tmp_path, event)["errors"])


def test_refusals_are_counted_but_are_no_account(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100, [(0, 0, 10, "nonfinite")])
    refuse: Event = {"event": "refuse", "t": 0.0, "learner": "a", "fragment": 0, "from": 0, "to": 10}
    report = run_audit(tmp_path, refuse)
    assert report["ok"] and report["refused"] == 1
    assert report["ledger"]["discarded"] == {"nonfinite": 10}


def log_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    return path


def test_a_torn_last_line_is_tolerated(tmp_path: Path) -> None:
    events, notes = audit.read_events([log_of(tmp_path, json.dumps(PLAN) + '\n{"event": "mer')])
    assert [event["event"] for event in events] == ["plan"]
    assert "line 2 is torn" in notes[0]


@pytest.mark.parametrize("glue", ["", "\n"])
def test_a_restarted_syncer_goes_on_behind_a_torn_line(tmp_path: Path, glue: str) -> None:
    start = '{"event": "start", "t": 0}'
    text = json.dumps(PLAN) + '\n{"event": "mer' + glue + start + "\n" + json.dumps(PLAN) + "\n"
    events, notes = audit.read_events([log_of(tmp_path, text)])
    assert [event["event"] for event in events] == ["plan", "start", "plan"]
    assert len(notes) == 1


def test_garbage_in_the_middle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(audit.AuditError, match="line 2"):
        audit.read_events([log_of(tmp_path, json.dumps(PLAN) + "\ngarbage\n" + json.dumps(PLAN) + "\n")])


@pytest.mark.parametrize("raw", [b"", b"x" * 200])
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.0.ledger").write_bytes(raw)
    with pytest.raises(audit.AuditError):
        audit.read_ledgers(tmp_path)


def test_a_ledger_shorter_than_it_says_is_refused(tmp_path: Path) -> None:
    path = write_ledger(tmp_path, "a", A, 100, [(0, 0, 10, "stale")])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(audit.AuditError, match="promises 1 entries"):
        audit.read_ledgers(tmp_path)


def script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", audit.__file__, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30, check=False)


def test_as_a_script_without_the_package(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    log = log_of(tmp_path, "\n".join(map(json.dumps, [PLAN, merge(0, (1, 1), ("a", A, 0, 100))])) + "\n")
    run = script(str(log), "--ledger-dir", str(tmp_path), "--json", "out.json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "exact" in run.stdout
    assert json.loads((tmp_path / "out.json").read_text())["ledger"]["merged"] == 100


def test_as_a_script_exit_status(tmp_path: Path) -> None:
    write_ledger(tmp_path, "a", A, 100)
    log = log_of(tmp_path, "\n".join(map(json.dumps, [PLAN, merge(0, (1, 1), ("a", A, 1, 100))])) + "\n")
    run = script(str(log), "--ledger-dir", str(tmp_path), cwd=tmp_path)
    assert run.returncode == 1
    assert "ERROR" in run.stdout and "NOT exact" in run.stdout
    missing = script("nowhere.jsonl", "--ledger-dir", str(tmp_path), cwd=tmp_path)
    assert missing.returncode == 1
    assert "nowhere.jsonl" in missing.stderr
    unwritable = script(str(log), "--ledger-dir", str(tmp_path), "--json", "/nonexistent/x", cwd=tmp_path)
    assert unwritable.returncode == 2


def test_it_imports_the_standard_library_only() -> None:
    lines = Path(audit.__file__).read_text().splitlines()
    modules = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert modules <= sys.stdlib_module_names
