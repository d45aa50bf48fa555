"""Makes one row of each table again, with the first seed, and compares it with what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco.evidence.page import page
from diloco.evidence.runner import Say, Unit, run_units
from diloco.evidence.table import Table
from diloco.evidence.train import Result

# On the machine that recorded the numbers they are equal to the last digit. Other CPUs round differently, training
# amplifies that, and then a loss moves by a few thousandths. Who takes part in which round does not depend on it.
LOSS_TOLERANCE = 0.03  # nats
OF_WEIGHTS = ("norm", "cosine", "shrink")
RELATIVE, ABSOLUTE = 0.10, 0.02  # for these
EXACT = 1e-6  # relative, for all others: what JSON's digits leave


def near(name: str, was: float | None, now: float) -> bool:
    if was is None:
        return now != now or abs(now) == float("inf")
    if name == "loss":
        return abs(now - was) <= LOSS_TOLERANCE
    if name in OF_WEIGHTS:
        return abs(now - was) <= ABSOLUTE + RELATIVE * abs(was)
    return abs(now - was) <= EXACT * abs(was)


def differences(table: Table, recorded: dict[str, Any], result: Result) -> list[str]:
    """Of the table's check row, one sentence each."""
    row = next((row for row in recorded["rows"] if row["name"] == table.check), None)
    if row is None:
        return [f"{table.name}: no row `{table.check}` is recorded"]
    gone = row["values"].keys() - result.values.keys()
    found = [f"{table.name}, row `{table.check}`: {name} is recorded and no longer measured" for name in sorted(gone)]
    for name, value in result.values.items():
        was = row["values"].get(name, [None])[0]
        if not near(name, was, value):
            found.append(f"{table.name}, row `{table.check}`: {name} was {was}, is now {value:.6g}")
    return found


def check(tables: tuple[Table, ...], folder: Path, workers: int, say: Say, every: tuple[Table, ...] = ()) -> list[str]:
    """What differs; empty is good. `every`: the tables of the page, if more than those that are made again."""
    report = json.loads((folder / "evidence.json").read_text())
    recorded = {table["name"]: table for table in report["tables"]}
    found = [f"{table.name}: no such table is recorded" for table in tables if table.name not in recorded]
    chosen = [table for table in tables if table.name in recorded]
    written = (folder / "evidence.md").read_text() if (folder / "evidence.md").exists() else ""
    if page(report, every or tables) != written:
        found.append(
            f"{folder / 'evidence.md'} is not what evidence.json and the code say; run `diloco evidence --page`"
        )
    units = {table.name: Unit(row.config, 0) for table in chosen for row in table.rows if row.name == table.check}
    order = sorted(set(units.values()), key=lambda unit: -unit.cost)
    results = run_units(order, workers, say)
    for table in chosen:
        found += differences(table, recorded[table.name], results[units[table.name]])
    return found
