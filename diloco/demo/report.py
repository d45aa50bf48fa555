"""The demo's report: JSON with the keys every report of the package has, and the text for the screen."""

from __future__ import annotations

import math
from typing import Any

from diloco._report import common
from diloco.demo.checks import (
    Check,
    blocked_share,
    longest_call,
    longest_gap,
    paired_overhead,
    peers_ratio,
    peers_steps,
)
from diloco.demo.record import Record

SCHEMA = "diloco.demo.1"


def build(record: Record, checks: list[Check], command: str) -> dict[str, Any]:
    """The whole report as JSON values."""
    kill = record.kill
    overhead, error = paired_overhead(record.paired)
    report = {
        **common(SCHEMA, command, record.seed),
        "ok": all(check.ok for check in checks),
        "checks": {c.name: {"ok": c.ok, "value": c.value, "limit": c.limit, "text": c.text} for c in checks},
        "loss": {
            "start": record.losses.start,
            "end": record.losses.end,
            "alone": record.losses.alone,
            "curve": [vars(p) for p in record.losses.curve],
            "alone_curve": [vars(p) for p in record.losses.alone_curve],
        },
        "steps": record.steps,
        "rounds": len(record.rounds),
        "kills": 0 if kill is None else 1,
        "ledger": record.audit.get("ledger", {}),
        "merged_fraction": {
            name: one["merged_fraction"] for name, one in sorted(record.audit.get("learners", {}).items())
        },
        "blocked_fraction": blocked_share(record.lives),
        "paired": {"overhead": overhead, "standard_error": error, "pairs": len(record.paired.bare_s)},
        "kill": kill_values(record),
        "fragment_versions": [f["version"] for f in record.status.get("fragments", ())],
        "bytes_on_wire": record.status.get("bytes", {}),
        "learners": [learner_values(record, name) for name in record.learners()],
        "trained_s": record.trained_s,
        "wall_s": record.wall_s,
    }
    values: dict[str, Any] = finite(report)
    return values


def kill_values(record: Record) -> dict[str, Any] | None:
    kill = record.kill
    if kill is None:
        return None
    before, during = (peers_steps(record, kill, during) for during in (False, True))
    return {
        "learner": kill.learner,
        "pid": kill.pid,
        "signal": kill.signal,
        "wait_status": kill.wait_status,
        "at_s": kill.at_s,
        "back_at_s": kill.back_at_s,
        "merged_again_at_s": kill.merged_again_at_s,
        "peers_longest_call_ratio": peers_ratio(record),
        "peers_longest_call_before_s": longest_call(before),
        "peers_longest_call_during_s": longest_call(during),
        "peers_longest_gap_before_s": longest_gap(before),
        "peers_longest_gap_during_s": longest_gap(during),
    }


def learner_values(record: Record, name: str) -> dict[str, Any]:
    lives = record.lives_of(name)
    return {
        "learner": name,
        "slowdown": lives[0].slowdown,
        "steps": sum(len(life.steps) for life in lives),
        "tokens": sum(life.steps[-1].tokens for life in lives if life.steps),
        "rounds": sum(any(m.learner == name for m in r.members) for r in record.rounds),
        "blocked_fraction": blocked_share(lives),
        "lives": len(lives),
    }


def finite(value: Any) -> Any:
    """NaN and infinity are no JSON: null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def screen(report: dict[str, Any]) -> str:
    """The report for people."""
    loss, ledger = report["loss"], report["ledger"]
    lines = [
        "",
        f"loss of the global weights on held-out text: {number(loss['start'])} -> {number(loss['end'])};"
        f" one learner alone: {number(loss['alone'])}",
        f"{report['rounds']} rounds in {report['trained_s']:.0f} s; whole demo {report['wall_s']:.0f} s",
        "",
        "learner    speed   steps    tokens  rounds  merged  in DiLoCo",
    ]
    for one in report["learners"]:
        speed = "full" if one["slowdown"] == 1 else f"1/{one['slowdown']:g}"
        merged = report["merged_fraction"].get(one["learner"], 0.0)
        blocked = one["blocked_fraction"] or 0.0
        lines.append(
            f"{one['learner']:<10} {speed:>5} {one['steps']:>7} {one['tokens']:>9} {one['rounds']:>7} {merged:>7.1%}"
            f" {blocked:>10.3%}" + (f"  ({one['lives']} lives)" if one["lives"] > 1 else "")
        )
    if ledger:
        gone = ", ".join(f"{reason} {tokens}" for reason, tokens in sorted(ledger["discarded"].items())) or "none"
        lines += [
            "",
            f"tokens, summed over fragments: {ledger['processed']} processed = {ledger['merged']} merged"
            f" + {ledger['outstanding']} outstanding + {ledger['in_flight']} in flight + discarded ({gone})",
        ]
    lines.append("")
    for name, check in report["checks"].items():
        lines.append(f"{'ok  ' if check['ok'] else 'FAIL'} {name}: {check['text']}")
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
