"""What a benchmark found: figures beside the yardstick of the same run, and the goal for their ratio."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

_HOLDS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Row:
    """`value` and `yardstick` are medians over the turns, in `unit`; `ratio` is the median of the turns' ratios, from
    `least` to `largest`."""

    name: str
    text: str
    value: float
    unit: str
    yardstick: float
    yardstick_text: str
    ratio: float
    least: float
    largest: float
    op: Literal[">=", "<="]
    goal: float

    @property
    def reached(self) -> bool:
        return bool(_HOLDS[self.op](self.ratio, self.goal))

    def values(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "yardstick": self.yardstick,
            "yardstick_text": self.yardstick_text,
            "ratio": self.ratio,
            "ratio_least": self.least,
            "ratio_largest": self.largest,
            "op": self.op,
            "goal": self.goal,
            "reached": self.reached,
        }


def table(rows: Iterable[Row]) -> str:
    """For a terminal: each row, its yardstick, the ratio with its range over the turns, the goal."""
    rows = list(rows)
    width = max((len(row.text) for row in rows), default=0)
    lines = [f"{'':<{width}}  {'measured':>14}  {'yardstick':>14}  {'ratio':>6}  {'(range)':<15}  goal"]
    for row in rows:
        measured, yardstick = (f"{value:>9.4g} {row.unit:<4}" for value in (row.value, row.yardstick))
        between = f"({row.least:.2f} … {row.largest:.2f})"
        goal = f"{row.op} {row.goal:g} {'reached' if row.reached else 'MISSED'}: {row.yardstick_text}"
        lines.append(f"{row.text:<{width}}  {measured}  {yardstick}  {row.ratio:>6.2f}  {between:<15}  {goal}")
    return "\n".join(lines)
