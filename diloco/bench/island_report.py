"""The report of `diloco bench islands`: JSON with the keys every report of the package has, and the table."""

from __future__ import annotations

import statistics
from typing import Any

from diloco._report import common
from diloco.bench.island_rank import LAYERS, VARIANTS, width_of
from diloco.bench.islands import FRAGMENTS, SYNC_EVERY, TURN, Measured, Options

SCHEMA = "diloco.bench.islands.1"
MIB = 1 << 20
# What a rank may need beside an R-th of what one process needs: a quarter more copies, as the ranks behind the first
# keep what they sent until it is merged; and threads, process groups, the code itself.
SLACK, SLACK_BYTES = 1.25, 7 * MIB
HEAD = (
    "              step, ms            joined to bare      blocked in diloco   waits   memory above, MiB   wire, MiB",
    "          bare  alone joined  ratio   (quartiles)    ms  share  alone of steps   alone   bare   peak    in   out",
)


def build(options: Options, measured: list[Measured], command: str) -> dict[str, Any]:
    """The whole report as JSON values. `ok`: memory is shared out among FSDP2's ranks; never a matter of speed."""
    islands = [island(one) for one in measured]
    checks = memory_checks(islands)
    return {
        **common(SCHEMA, command, options.seed),
        "ok": all(check["ok"] for check in checks.values()),
        "checks": checks,
        "parameters": LAYERS * width_of(options.parameters) ** 2,
        "sync_every": SYNC_EVERY,
        "num_fragments": FRAGMENTS,
        "islands": islands,
    }


def island(one: Measured) -> dict[str, Any]:
    step_s = {variant: statistics.median(one.turns[variant]) / TURN for variant in VARIANTS}
    return {
        "sharding": one.sharding,
        "ranks": one.ranks,
        "rounds_merged": one.rounds_merged,
        "step_s": step_s,
        "ratios": {
            f"{over}_to_{under}": ratio(one.turns[over], one.turns[under])
            for over, under in (("joined", "bare"), ("joined", "alone"), ("alone", "bare"))
        },
        "per_rank": [rank(one, index, step_s["joined"]) for index in range(one.ranks)],
    }


def ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """Of turns that followed each other: median and quartiles."""
    low, median, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


def rank(one: Measured, index: int, step_s: float) -> dict[str, Any]:
    joined, alone = dict(one.reports["joined"][index]), one.reports["alone"][index]
    blocked = joined.pop("blocked_s") / joined["steps"]
    peaks = {variant: one.peaks[variant][index] for variant in VARIANTS}
    return {
        "rank": index,
        **joined,
        "blocked_s_per_step": blocked,
        "blocked_share": blocked / step_s,
        "alone_blocked_s_per_step": alone["blocked_s"] / alone["steps"],
        "peak_bytes": peaks["joined"],
        "above_alone_bytes": peaks["joined"] - peaks["alone"],
        "above_bare_bytes": peaks["joined"] - peaks["bare"],
    }


def memory_checks(islands: list[dict[str, Any]]) -> dict[str, Any]:
    """FSDP2: at the rank with most, an R-th of what one process needs beside the bare optimizer's peak, with slack."""
    most = {
        one["ranks"]: max(each["above_bare_bytes"] for each in one["per_rank"])
        for one in islands
        if one["sharding"] == "fsdp2"
    }
    checks = {}
    for ranks, value in most.items():
        if ranks == 1 or 1 not in most:
            continue
        limit = SLACK * most[1] / ranks + SLACK_BYTES
        checks[f"memory_of_{ranks}_ranks"] = {
            "ok": value <= limit,
            "value": value,
            "limit": limit,
            "text": f"fsdp2, {ranks} ranks: a rank needs {value / MIB:.1f} MiB, one process {most[1] / MIB:.1f} MiB: "
            f"{value / max(most[1], 1):.2f} of it; at most {SLACK:g} / {ranks} of it and {SLACK_BYTES / MIB:.0f} MiB",
        }
    return checks


def screen(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"{report['parameters']} parameters in {report['num_fragments']} fragments, each synced every "
        f"{report['sync_every']} steps; {report['machine']['cores']} cores, {report['machine']['cpu']}",
        "",
        *HEAD,
    ]
    for one in report["islands"]:
        steps, to_bare = one["step_s"], one["ratios"]["joined_to_bare"]
        lines.append(
            f"{one['sharding']:<5} {one['ranks']}{steps['bare'] * 1e3:7.2f}{steps['alone'] * 1e3:7.2f}"
            f"{steps['joined'] * 1e3:7.2f}{to_bare['median']:7.3f} ({to_bare['low']:.3f}-{to_bare['high']:.3f})"
        )
        for each in one["per_rank"]:
            lines.append(
                f"  rank {each['rank']:<38}{each['blocked_s_per_step'] * 1e3:7.3f}{each['blocked_share']:7.2%}"
                f"{each['alone_blocked_s_per_step'] * 1e3:7.3f}{each['rank_waits']:5}/{each['steps']:<3}"
                f"{each['above_alone_bytes'] / MIB:8.1f}{each['above_bare_bytes'] / MIB:7.1f}"
                f"{each['peak_bytes'] / MIB:7.1f}{each['bytes_in'] / MIB:6.1f}{each['bytes_out'] / MIB:6.1f}"
            )
    lines += ["", *(f"{'ok  ' if check['ok'] else 'FAIL'} {check['text']}" for check in report["checks"].values())]
    return "\n".join(lines)
