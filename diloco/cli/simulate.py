"""`diloco simulate cluster`: random simulations of the virtual cluster, invariants checked after every event."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

SCHEMA = "diloco.simulate.cluster.1"
CHUNK_EVENTS = 200_000  # events between two looks at Ctrl-C
PROGRESS_S = 10.0

app = typer.Typer(no_args_is_help=True, help="Simulations under a virtual clock.")


@app.callback()
def _group() -> None:
    pass


@app.command("cluster")
def _cluster(
    events: Annotated[
        int, typer.Option(min=1, metavar="N", help="Events (messages, timers, steps), at least.")
    ] = 1_000_000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**62, metavar="S", help="Seed of the first scenario; the next has S + 1.")
    ] = 1,
    mode: Annotated[
        Literal["none", "small"],
        typer.Option(help="none: fast, tensors hardly move. small: every merge is recomputed."),
    ] = "none",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for stdout.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run the scenario in FILE instead of random ones.")
    ] = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Print the smallest scenario found with the same first violation.")
    ] = False,
    floor: Annotated[
        float, typer.Option(min=0.0, metavar="RATE", help="Fail below so many events a second and core. 0: never.")
    ] = 0.0,
) -> None:
    """Run learners and syncer through random schedules of faults and check what must always hold."""
    raise typer.Exit(run(events, seed, mode, json_file, replay, shrink, floor))


def run(
    events: int, seed: int, mode: str, json_file: str | None, replay: Path | None, shrink: bool, floor: float
) -> int:
    """The command. 0: nothing was violated; 1: something was, or it was slower than `floor`; 2: bad arguments."""
    from diloco._native import _C
    from diloco._report import why_unwritable

    try:
        if shrink and json_file == "-":
            raise ValueError("--shrink prints a scenario on stdout, so --json expects a file, got -")
        if json_file and json_file != "-" and (reason := why_unwritable(json_file)):
            raise ValueError(f"--json {json_file} cannot be written: {reason}; choose another file")
        scenario = replay.read_text() if replay else None
        report = (
            json.loads(_C.replay_scenario(scenario)) if scenario is not None else many(events, seed, mode == "small")
        )
    except (OSError, ValueError) as error:
        typer.echo(f"diloco simulate cluster: {error}", err=True)
        return 2
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return 130
    typer.echo(text(report), err=shrink or json_file == "-")  # then stdout is the scenario or the report alone
    if json_file == "-":
        typer.echo(json.dumps(with_origin(report, mode), indent=2))
    elif json_file:
        Path(json_file).write_text(json.dumps(with_origin(report, mode), indent=2) + "\n")
    if not report["violations"]:
        if report["events_per_s_per_core"] >= floor:
            return 0
        typer.echo(f"slower than the floor of {floor:.0f} events/s per core", err=True)
        return 1
    if shrink:
        first = report["violations"][0]["seed"]
        typer.echo(_C.shrink_scenario(scenario or _C.random_scenario(first, mode == "small")))
    return 1


def many(events: int, seed: int, values: bool) -> dict[str, Any]:
    """Scenario after scenario; a line now and then when it takes long. Ctrl-C ends it within a second or so."""
    from diloco._native import _C

    began = told = time.monotonic()
    total: dict[str, Any] = {}
    while not total or total["events"] < events:
        done = total.get("events", 0)
        part = json.loads(_C.simulate(min(CHUNK_EVENTS, events - done), seed + total.get("scenarios", 0), values))
        total = part if not total else add(total, part)
        now = time.monotonic()
        if now - told > PROGRESS_S and total["events"] < events:
            told = now
            left = (now - began) * (events - total["events"]) / total["events"]
            typer.echo(f"{total['events']} of {events} events, {left:.0f} s left", err=True)
            sys.stderr.flush()
    total["seed"] = seed
    return total


def add(total: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Two reports as one."""
    steps = sum(r["share_of_steps_and_heartbeats"] * r["events"] for r in (total, part))
    out = {
        key: total[key] + part[key] for key in ("events", "scenarios", "merges", "violations", "cpu_s", "simulated_s")
    }
    for key in ("events_by_kind", "faults"):
        out[key] = {k: total[key].get(k, 0) + part[key].get(k, 0) for k in sorted({*total[key], *part[key]})}
    out["events_per_s_per_core"] = out["events"] / out["cpu_s"] if out["cpu_s"] > 0 else 0.0
    out["share_of_steps_and_heartbeats"] = steps / out["events"] if out["events"] else 0.0
    return out


def with_origin(report: dict[str, Any], mode: str) -> dict[str, Any]:
    """With the keys every report has."""
    from diloco._report import common

    origin = common(SCHEMA, " ".join(["diloco", *sys.argv[1:]]), report["seed"])
    return {**origin, **report, "mode": mode}


def histogram(counts: dict[str, int]) -> str:
    """The most frequent first."""
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items(), key=lambda item: -item[1]))


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"{report['events']} events in {report['scenarios']} scenarios from seed {report['seed']}: "
        f"{report['merges']} merges, {sum(report['faults'].values())} faults, "
        f"{report['events_per_s_per_core']:.0f} events/s per core",
        f"events: {histogram(report['events_by_kind'])}",
        f"faults: {histogram(report['faults']) or 'none'}",
    ]
    lines += [
        f"VIOLATED {one['invariant']} with seed {one['seed']} at event {one['event']} ({one['at_s']:.3f} s): "
        f"{one['text']}"
        for one in report["violations"]
    ]
    if not report["violations"]:
        lines.append("no invariant was violated")
    return "\n".join(lines)
