"""docs/evidence.md from the report: nothing else goes into it, so that the check can write it again and compare."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from diloco.evidence.stats import CONTRADICTED, NOT_RESOLVED, REPRODUCED
from diloco.evidence.table import Table

MARK = "<!-- Written by `diloco evidence` from docs/evidence.json; change the code in diloco/evidence. -->"

INTRO = """\
What the papers say, and what this project says of itself, tried with learners that really train, in simulated time: the
production code runs in the virtual cluster (`diloco.sim`), only clock and network are made up. The model is a residual
MLP of 0.11 M parameters, the text comes from Markov chains of order two with eight topics, 640 steps of 128 symbols per
learner, AdamW with a cosine schedule. The loss is that of the *outer* parameters on held-out text, in nats per symbol,
lower is better; a table gives its mean over the seeds and their standard deviation.

**What this can and cannot show.** Everything is small and short: a verdict here says whether an effect is there at this
size, not how large it is at billions of parameters. A claim is a range for a quantity that is computed seed by seed,
with everything else equal; the interval is its bootstrap interval over seeds (percentiles, {level:.0%}; with so few
seeds such intervals are somewhat too narrow).

* `{reproduced}`: the whole interval lies in the range.
* `{contradicted}`: the whole interval lies outside of it.
* `{unresolved}`: anything else.

Nothing is tuned per row except where a table says it is a sweep. `diloco evidence --check` makes one row of each table
again and compares it with [evidence.json](evidence.json), which has every number of every seed.
"""


def page(report: dict[str, Any], tables: tuple[Table, ...]) -> str:
    by_name = {table.name: table for table in tables}
    told = report["tables"]
    verdicts = Counter(claim["verdict"] for table in told for claim in table["claims"])
    machine, software = report["machine"], report["software"]
    lines = [
        MARK,
        "",
        "# Evidence",
        "",
        INTRO.format(level=report["level"], reproduced=REPRODUCED, contradicted=CONTRADICTED, unresolved=NOT_RESOLVED),
        f"{report['seeds']} seed{'s' if report['seeds'] != 1 else ''}, {report['wall_s'] / 60:.0f} minutes, "
        f"commit {report['commit'][:8] or 'unknown'}, {machine['cpu']}, {machine['cores']} cores, "
        f"torch {software['torch']}. {sum(verdicts.values())} claims: "
        + ", ".join(f"{verdicts[one]} {one}" for one in (REPRODUCED, CONTRADICTED, NOT_RESOLVED))
        + ".",
        "",
    ]
    for values in told:
        if values["name"] not in by_name:  # recorded by another commit
            continue
        lines += [*table_lines(by_name[values["name"]], values), ""]
    return "\n".join(lines).rstrip() + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table_lines(table: Table, values: dict[str, Any]) -> list[str]:
    columns = table.columns
    lines = [f"## {table.title}", "", table.intro, ""]
    lines += ["| row | " + " | ".join(column.heading for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in values["rows"]:
        cells = []
        for column in columns:
            numbers = [math.nan if value is None else value for value in row["values"].get(column.metric, [math.nan])]
            mean = sum(numbers) / len(numbers)
            text = column.text(mean)
            if column.metric == "loss" and len(numbers) > 1:
                spread = math.sqrt(sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))
                text += f" ± {spread:.3f}"
            cells.append(text)
        lines.append(f"| {cell(row['name'])} | " + " | ".join(cells) + " |")
    if table.curve_at:
        lines += ["", *curve_lines(table.curve_at, values)]
    lines += ["", "| claim | source | quantity | mean | interval | verdict |", "|---|---|---|---|---|---|"]
    for claim in values["claims"]:
        low, high = claim["interval"]
        interval = "one seed" if low is None else f"{low:+.4f} … {high:+.4f}"
        mean = "-" if claim["mean"] is None else f"{claim['mean']:+.4f}"
        texts = [claim["text"], claim["source"], claim["quantity"], mean, interval, f"**{claim['verdict']}**"]
        lines.append("| " + " | ".join(map(cell, texts)) + " |")
    if table.notes:
        lines += ["", table.notes]
    return lines


def curve_lines(times: tuple[float, ...], values: dict[str, Any]) -> list[str]:
    """Mean held-out loss at a few times."""
    lines = ["| loss at step | " + " | ".join(f"{t:.0f}" for t in times) + " |", "|---" * (len(times) + 1) + "|"]
    for row in values["rows"]:
        cells = []
        for t in times:
            known = [loss for curve in row["curve"] for at, loss in curve if at == t and loss is not None]
            cells.append(f"{sum(known) / len(known):.3f}" if known else "-")
        lines.append(f"| {cell(row['name'])} | " + " | ".join(cells) + " |")
    return lines
