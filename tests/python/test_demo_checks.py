"""The demo's checks on invented runs: all hold on a good one, and each fails when what it promises is broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from demo_record import BACK_S, KILLED_S, good_record

from diloco.demo import checks
from diloco.demo.record import Paired, Record


def test_all_hold_on_a_good_run() -> None:
    results = checks.run_checks(good_record())
    assert [(check.name, check.ok) for check in results] == [
        (name, True)
        for name in ("better_than_alone", "nobody_starved", "kill_unnoticed", "came_back", "ledger_exact", "blocked")
    ]
    assert all(check.text for check in results)


def slow_call(record: Record, learner: int, at: float, seconds: float) -> None:
    life = record.lives[learner]
    index = min(range(len(life.steps)), key=lambda i: abs(life.steps[i].t - at))
    life.steps[index] = replace(life.steps[index], inside_s=seconds)


def no_kill(record: Record) -> None:
    record.kill = None


def worse(record: Record) -> None:
    record.losses.end = record.losses.alone


def unknown_loss(record: Record) -> None:
    record.losses.end = float("nan")


def alone_too_short(record: Record) -> None:
    record.alone_steps -= 1


def starved(record: Record) -> None:
    record.audit["learners"]["learner-3"]["merged_fraction"] = 0.599


def one_fragment_never(record: Record) -> None:
    record.rounds = [
        replace(r, members=tuple(m for m in r.members if m.learner != "learner-3" or r.fragment != 2))
        for r in record.rounds
    ]


def slow_during(record: Record) -> None:
    slow_call(record, 0, (KILLED_S + BACK_S) / 2, 0.00021)


def slow_but_in_ratio(record: Record) -> None:
    slow_call(record, 0, 15.0, 0.04)
    slow_call(record, 0, (KILLED_S + BACK_S) / 2, 0.0501)


def rounds_stopped(record: Record) -> None:
    record.rounds = [r for r in record.rounds if not KILLED_S <= r.t < BACK_S]


def rounds_nearly_stopped(record: Record) -> None:
    during = [r for r in record.rounds if KILLED_S <= r.t < BACK_S]
    record.rounds = [r for r in record.rounds if r not in during[2:]]


def never_merged_again(record: Record) -> None:
    record.rounds = [
        replace(r, members=tuple(m for m in r.members if m.incarnation != f"{5:016x}")) for r in record.rounds
    ]


def died_otherwise(record: Record) -> None:
    assert record.kill
    record.kill = replace(record.kill, wait_status=256)


def inexact(record: Record) -> None:
    record.audit.update(ok=False, errors=["gap [1, 2)"])


def no_audit(record: Record) -> None:
    record.audit = {}


def rounds_missing_in_audit(record: Record) -> None:
    record.audit["rounds"] -= 1


def nothing_processed(record: Record) -> None:
    record.audit["ledger"]["processed"] = 0


def blocking(record: Record) -> None:
    for life in record.lives:
        life.steps = [replace(step, inside_s=0.005) for step in life.steps]


def paired_disagrees(record: Record) -> None:
    record.paired = Paired((0.102,) * 30, (0.1,) * 30, (0.0001,) * 30)


def no_paired_run(record: Record) -> None:
    record.paired = Paired()


@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (worse, "better_than_alone", "2.310"),
        (unknown_loss, "better_than_alone", "nan"),
        (alone_too_short, "better_than_alone", "no comparison"),
        (starved, "nobody_starved", "59.9%"),
        (one_fragment_never, "nobody_starved", "3 of 4 fragments"),
        (no_kill, "kill_unnoticed", "no learner was killed"),
        (slow_during, "kill_unnoticed", "0.2 ms during"),
        (slow_but_in_ratio, "kill_unnoticed", "50.1 ms during"),
        (rounds_stopped, "kill_unnoticed", "0 rounds during"),
        (rounds_nearly_stopped, "kill_unnoticed", "2 rounds during"),
        (no_kill, "came_back", "no learner was killed"),
        (never_merged_again, "came_back", "merged 0 times"),
        (died_otherwise, "came_back", "did not die of that signal"),
        (inexact, "ledger_exact", "gap"),
        (no_audit, "ledger_exact", "did not run"),
        (rounds_missing_in_audit, "ledger_exact", "rounds"),
        (nothing_processed, "ledger_exact", "0 tokens"),
        (blocking, "blocked", "0.500%"),
        (paired_disagrees, "blocked", "does not confirm"),
        (no_paired_run, "blocked", "does not confirm"),
    ],
)
def test_each_check_can_fail(spoil: Callable[[Record], None], name: str, words: str) -> None:
    record = good_record()
    spoil(record)
    check = next(check for check in checks.run_checks(record) if check.name == name)
    assert not check.ok
    assert words in check.text


def test_a_quick_run_may_be_a_little_above_and_says_so() -> None:
    record = good_record()
    record.allowance = 0.05
    record.losses.end = record.losses.alone + 0.049
    check = checks.better_than_alone(record)
    assert check.ok and "quick" in check.text and check.limit == pytest.approx(record.losses.alone + 0.05)
    record.losses.end += 0.002
    assert not checks.better_than_alone(record).ok


def test_only_the_broken_promise_fails() -> None:
    record = good_record()
    starved(record)
    assert [check.name for check in checks.run_checks(record) if not check.ok] == ["nobody_starved"]


def test_the_killed_learners_own_calls_do_not_count() -> None:
    record = good_record()
    slow_call(record, 1, 19.0, 1.0)
    before = checks.longest_call(checks.peers_steps(record, record.kill, during=False)) if record.kill else 0
    assert before == pytest.approx(0.0001)


def test_deliberate_sleep_is_left_out_of_the_blocked_share() -> None:
    record = good_record()
    slow = [life for life in record.lives if life.slowdown == 3.0]
    assert checks.blocked_share(slow) == pytest.approx(0.0001)
    assert math.isnan(checks.blocked_share([]))


def test_an_outlier_does_not_move_the_paired_overhead() -> None:
    bare = [0.1] * 30
    wrapped = [0.1002 + 0.00001 * (i % 2) for i in range(29)] + [5.0]
    overhead, error = checks.paired_overhead(Paired(tuple(wrapped), tuple(bare), ()))
    assert overhead == pytest.approx(0.002, abs=0.0002)
    assert 0 <= error < 0.001
