"""What the runs gave, as JSON values: docs/evidence.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from diloco._report import common
from diloco.evidence.runner import seeds_of
from diloco.evidence.stats import LEVEL
from diloco.evidence.table import Claim, Results, Table

SCHEMA = "diloco.evidence.1"
DIGITS = 8  # significant ones of what is recorded


def build(parts: list[tuple[Table, Results]], seeds: int, wall_s: float, command: str) -> dict[str, Any]:
    return {
        **common(SCHEMA, command, 0),
        "seeds": seeds,
        "wall_s": round(wall_s, 1),
        "level": LEVEL,
        "tables": [table_values(table, results, seeds) for table, results in parts],
    }


def table_values(table: Table, results: Results, seeds: int) -> dict[str, Any]:
    return {
        "name": table.name,
        "seeds": seeds_of(table, seeds),
        "rows": [row_values(row.name, results) for row in table.rows],
        "claims": [claim_values(claim, results) for claim in table.claims],
    }


def row_values(name: str, results: Results) -> dict[str, Any]:
    """Values by name, each a list over the seeds."""
    row = results[name]
    names = list(dict.fromkeys(value for result in row for value in result.values))
    out: dict[str, Any] = {
        "name": name,
        "values": {value: [rounded(result.values.get(value, math.nan)) for result in row] for value in names},
    }
    if row[0].curve:
        out["curve"] = [[[t, rounded(loss)] for t, loss in result.curve] for result in row]
    if row[0].learners:
        out["learners"] = [
            {key: rounded(value) if isinstance(value, float) else value for key, value in learner.items()}
            for learner in row[0].learners
        ]
    return out


def claim_values(claim: Claim, results: Results) -> dict[str, Any]:
    interval, judged = claim.judge(results)
    return {
        "text": claim.text,
        "source": claim.source,
        "quantity": claim.what,
        "mean": rounded(interval.mean),
        "interval": [rounded(interval.low), rounded(interval.high)],
        "expected": [rounded(claim.low), rounded(claim.high)],
        "verdict": judged,
    }


def rounded(value: float) -> float | None:
    """None for what JSON has no number for."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def write(report: dict[str, Any], path: Path) -> None:
    """A line per row, so that a change of one is seen as one."""
    lines = ["{"]
    lines += [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in report.items() if key != "tables"]
    lines.append('"tables": [')
    for table in report["tables"]:
        lines.append(f'{{"name": {json.dumps(table["name"])}, "seeds": {table["seeds"]}, "rows": [')
        lines.append(",\n".join(json.dumps(row) for row in table["rows"]))
        lines.append('], "claims": [')
        lines.append(",\n".join(json.dumps(claim) for claim in table["claims"]))
        lines.append("]}" + ("," if table is not report["tables"][-1] else ""))
    lines += ["]", "}"]
    path.write_text("\n".join(lines) + "\n")
