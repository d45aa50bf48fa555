"""Margin of `better_than_alone` and its spread over several seeds: the figures in the documentation."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco._report import common
from diloco.demo import report
from diloco.demo.experiment import run_experiment
from diloco.demo.table import make_screen

if TYPE_CHECKING:
    from diloco.demo.run import DemoOptions

LEAST_RATIO = 3.0


def measure_margin(options: DemoOptions, folder: Path) -> int:
    """One run a seed, without the paired run; prints and writes margin, spread, ratio. 1 if that is too small."""
    results = []
    for seed in range(options.seed, options.seed + options.margin_seeds):
        place = folder / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        with make_screen(options.plain) as screen:
            record = run_experiment(seed, options.step_count(), options.quick, place, screen, paired=False)
        losses = record.losses
        results.append({"seed": seed, "end": losses.end, "alone": losses.alone, "margin": losses.alone - losses.end})
        print(f"seed {seed}: global {losses.end:.4f}, alone {losses.alone:.4f}, margin {losses.alone - losses.end:.4f}")
    values = summary(results)
    print(
        f"margin {values['margin']:.4f}, spread {values['spread']:.4f} (standard deviation over {len(results)} seeds),"
        f" ratio {values['ratio']:.1f} (at least {LEAST_RATIO:g} wanted)"
    )
    if options.json:
        command = f"{options.command()} --margin-seeds {options.margin_seeds}"
        whole = {**common(report.SCHEMA, command, options.seed), "steps": options.step_count(), **values}
        Path(options.json).write_text(json.dumps(report.finite(whole), indent=1) + "\n", encoding="utf-8")
    return 0 if values["ratio"] >= LEAST_RATIO else 1


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean margin, its standard deviation over the seeds, and their ratio."""
    margins = [float(one["margin"]) for one in results]
    margin, spread = statistics.fmean(margins), statistics.stdev(margins)
    return {"seeds": results, "margin": margin, "spread": spread, "ratio": margin / spread if spread else float("inf")}
