"""What the demo promises, checked on the record of a run. Pure functions; every check can fail.

The limits are the promise of the demo, not measurements of one machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from diloco.demo.record import Kill, Life, Paired, Record, Step

LEAST_MERGED = 0.60  # of the slowest learner's tokens
MOST_RATIO = 2.0  # peers' longest call during the outage over before
LONGEST_CALL_S = 0.050
MOST_BLOCKED = 0.005  # share of training threads' time


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    value: float | int | None
    limit: float | int | None
    text: str


def run_checks(record: Record) -> list[Check]:
    """All six, in the order of the report."""
    return [
        better_than_alone(record),
        nobody_starved(record),
        kill_unnoticed(record),
        came_back(record),
        ledger_exact(record),
        blocked(record),
    ]


def better_than_alone(record: Record) -> Check:
    losses = record.losses
    reference = sum(len(life.steps) for life in record.lives_of(record.reference))
    same = record.alone_steps == reference
    text = f"held-out loss {losses.end:.3f}, one learner alone {losses.alone:.3f} after {record.alone_steps} steps"
    limit = losses.alone + record.allowance
    if record.allowance:
        text += f" (quick run: up to {record.allowance:g} above it is allowed)"
    if not same:
        text += f"; the fastest learner made {reference} steps, so this is no comparison"
    return Check("better_than_alone", same and losses.end < limit, losses.end, limit, text)


def slowest(record: Record) -> str:
    return max(record.lives, key=lambda life: life.slowdown).learner


def nobody_starved(record: Record) -> Check:
    name = slowest(record)
    audited = record.audit.get("learners", {}).get(name, {})
    share = float(audited.get("merged_fraction", 0.0))
    merged = {r.fragment for r in record.rounds if any(m.learner == name and m.tokens > 0 for m in r.members)}
    ok = record.fragments > 0 and len(merged) == record.fragments and share >= LEAST_MERGED
    text = f"slowest learner {name}: merged in {len(merged)} of {record.fragments} fragments, {share:.1%} of its tokens"
    return Check("nobody_starved", ok, share, LEAST_MERGED, text)


def peers_steps(record: Record, kill: Kill, during: bool) -> list[Step]:
    """Steps of the learners that were not killed, during the outage or before it."""
    found = []
    for life in record.lives:
        if life.learner != kill.learner:
            for step in life.steps:
                if (kill.at_s <= step.t <= kill.back_at_s) if during else step.t < kill.at_s:
                    found.append(step)
    return found


def longest_call(steps: Iterable[Step]) -> float:
    return max((step.inside_s for step in steps), default=math.nan)


def longest_gap(steps: Iterable[Step]) -> float:
    return max((step.gap_s for step in steps), default=math.nan)


def peers_ratio(record: Record) -> float:
    if record.kill is None:
        return math.nan
    before = longest_call(peers_steps(record, record.kill, during=False))
    during = longest_call(peers_steps(record, record.kill, during=True))
    return during / before if before > 0 else math.nan


def rounds_per_step(record: Record, start: float, end: float) -> float:
    """Rounds merged per step of the reference learner between two times."""
    steps = sum(start <= s.t < end for life in record.lives_of(record.reference) for s in life.steps)
    rounds = sum(start <= r.t < end for r in record.rounds)
    return rounds / steps if steps else math.nan


def kill_unnoticed(record: Record) -> Check:
    kill = record.kill
    if kill is None:
        return Check("kill_unnoticed", False, None, MOST_RATIO, "no learner was killed")
    before, during = (peers_steps(record, kill, during) for during in (False, True))
    ratio, longest = peers_ratio(record), longest_call(during)
    first = min((life.joined_s for life in record.lives if life.joined_s is not None), default=0.0)
    pace = [rounds_per_step(record, first, kill.at_s), rounds_per_step(record, kill.at_s, kill.back_at_s)]
    rounds = sum(kill.at_s <= r.t < kill.back_at_s for r in record.rounds)
    went_on = rounds > 0 and pace[1] >= pace[0] / 2
    text = (
        f"the others' longest time in a DiLoCo call: {longest_call(before) * 1e3:.1f} ms before,"
        f" {longest * 1e3:.1f} ms during the outage (limit {LONGEST_CALL_S * 1e3:.0f} ms);"
        f" longest gap between steps {longest_gap(before) * 1e3:.0f} and {longest_gap(during) * 1e3:.0f} ms;"
        f" {rounds} rounds during the outage, {pace[1]:.2f} a step ({pace[0]:.2f} before)"
    )
    ok = ratio <= MOST_RATIO and longest < LONGEST_CALL_S and went_on
    return Check("kill_unnoticed", ok, ratio, MOST_RATIO, text)


def came_back(record: Record) -> Check:
    kill = record.kill
    if kill is None:
        return Check("came_back", False, None, 1, "no learner was killed")
    again = merges_of(record, kill.learner, kill.back_incarnation)
    killed = kill.wait_status == kill.signal
    text = f"learner {kill.learner}, pid {kill.pid}, signal {kill.signal}, wait status {kill.wait_status}: "
    text += f"killed at {kill.at_s:.1f} s, back at {kill.back_at_s:.1f} s, merged {again} times since"
    if not killed:
        text += "; it did not die of that signal"
    return Check("came_back", killed and again >= 1, again, 1, text)


def merges_of(record: Record, learner: str, incarnation: str) -> int:
    """Merges with this life of the learner as a member."""
    if not incarnation:
        return 0
    return sum(any(m.learner == learner and m.incarnation == incarnation for m in r.members) for r in record.rounds)


def ledger_exact(record: Record) -> Check:
    audit = record.audit
    if not audit:
        return Check("ledger_exact", False, None, 0, "the audit did not run")
    errors = list(audit["errors"])
    if audit["rounds"] != len(record.rounds):
        errors.append(f"the audit counts {audit['rounds']} rounds, the demo saw {len(record.rounds)}")
    ledger = audit["ledger"]
    text = f"the intervals partition {ledger['processed']} tokens (summed over fragments), {ledger['merged']} merged"
    text = errors[0] if errors else text
    return Check("ledger_exact", bool(audit["ok"]) and not errors and ledger["processed"] > 0, len(errors), 0, text)


def blocked_share(lives: Iterable[Life]) -> float:
    """Share of the training threads' busy time (deliberate sleep left out) spent in DiLoCo calls."""
    steps = [step for life in lives for step in life.steps]
    busy = sum(step.busy_s for step in steps)
    return sum(step.inside_s for step in steps) / busy if busy else math.nan


def paired_overhead(paired: Paired) -> tuple[float, float]:
    """(overhead, its standard error) as shares of a bare step: trimmed mean of the differences of paired steps."""
    differences = sorted(w - b for w, b in zip(paired.wrapped_s, paired.bare_s, strict=True))
    if len(differences) < 10:
        return math.nan, math.nan
    bare = statistics.median(paired.bare_s)
    cut = len(differences) // 5
    kept = differences[cut : len(differences) - cut]
    # Standard error of a trimmed mean: from the winsorised spread (Tukey and McLaughlin 1963).
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorised) / (len(kept) / len(differences)) / math.sqrt(len(differences))
    return statistics.fmean(kept) / bare, error / bare


def blocked(record: Record) -> Check:
    share = blocked_share(record.lives)
    overhead, error = paired_overhead(record.paired)
    confirmed = overhead - 2 * error < MOST_BLOCKED
    text = (
        f"{share:.3%} of the training threads' time inside DiLoCo; paired with the bare optimizer"
        f" {overhead:+.2%} ± {error:.2%} a step ({len(record.paired.bare_s)} pairs)"
    )
    if not confirmed:
        text += "; the paired run does not confirm it"
    return Check("blocked", share < MOST_BLOCKED and confirmed, share, MOST_BLOCKED, text)
