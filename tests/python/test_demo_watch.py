"""Reading along a running demo: growing files, half lines, and how events become the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.demo.record import Life, Record
from diloco.demo.watch import Tail, Watcher


def append(path: Path, *values: dict[str, Any]) -> None:
    with path.open("a") as file:
        for value in values:
            file.write(json.dumps(value) + "\n")


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.read() == [{"a": 2}]


def watched(tmp_path: Path) -> tuple[Watcher, Life]:
    watcher = Watcher(Record(seed=0, steps=60), tmp_path / "events")
    life = Life("a", 7, 0.0, 1.0)
    watcher.follow(life, tmp_path / "progress")
    return watcher, life


def test_progress_becomes_steps(tmp_path: Path) -> None:
    watcher, life = watched(tmp_path)
    at = watcher.origin
    step = {"event": "step", "loss": 3.0, "busy_s": 0.1, "inside_s": 0.001, "gap_s": 0.1}
    append(
        tmp_path / "progress",
        {"event": "joined", "t": at + 1, "took_s": 0.2, "state": "training"},
        {**step, "t": at + 2, "step": 1, "tokens": 10},
        {**step, "t": at + 3, "step": 2, "tokens": 20},
        {"event": "state", "t": at + 3, "state": "away"},
    )
    watcher.poll()
    assert life.joined_s == pytest.approx(1) and life.state == "away"
    assert [(s.step, s.tokens) for s in life.steps] == [(1, 10), (2, 20)]
    assert life.steps[1].t == pytest.approx(3)
    assert [watcher.tokens_at(t) for t in (0.5, 2.5, 9.0)] == [0, 10, 20]
    append(tmp_path / "progress", {"event": "closed", "t": at + 4, "stats": {"steps": 2}})
    watcher.poll()
    assert life.ended_s == pytest.approx(4) and life.stats == {"steps": 2}


def test_events_become_rounds_on_the_runs_clock(tmp_path: Path) -> None:
    watcher, life = watched(tmp_path)
    member = {"learner": "a", "incarnation": "0f", "from": 10, "to": 40, "steps": 3, "clock": 9, "weight": 1.0}
    append(
        tmp_path / "events",
        {"event": "start", "t": 0.0, "epoch": 1, "settings": {}},
        {"event": "plan", "t": 0.6, "fragments": [{}, {}, {}]},
        {"event": "join", "t": 0.7, "learner": "a", "incarnation": "0f", "host": "h", "pid": 7},
        {"event": "open", "t": 0.8, "round": 1, "fragment": 2},
        {
            "event": "merge",
            "t": 4.0,
            "round": 1,
            "fragment": 2,
            "version": [1, 1],
            "members": [member],
            "reason": "all_present",
            "wait_s": 0.25,
        },
    )
    watcher.poll()
    assert watcher.record.fragments == 0  # the two clocks are not related yet
    watcher.syncer_is_up_for(watcher.now() - 1.0)
    watcher.poll()
    assert watcher.record.fragments == 3
    assert life.incarnation == "0f"
    (merged,) = watcher.record.rounds
    assert merged.t == pytest.approx(5.0, abs=0.01)
    assert (merged.version, merged.members[0].tokens, merged.wait_s) == ((1, 1), 30, 0.25)
