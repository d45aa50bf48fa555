"""What a table of the evidence is: rows to run, columns to show, claims to judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from diloco.evidence.stats import Interval, bootstrap, verdict
from diloco.evidence.train import Result


class Runnable(Protocol):
    """A setting of an experiment; hashable, so that equal ones are run once."""

    def run(self, seed: int) -> Result: ...


@dataclass(frozen=True)
class Row:
    name: str
    config: Runnable


@dataclass(frozen=True)
class Column:
    metric: str
    heading: str
    digits: int = 3
    percent: bool = False

    def text(self, value: float) -> str:
        if math.isnan(value):
            return "-"
        return f"{100 * value:.{self.digits}f} %" if self.percent else f"{value:.{self.digits}f}"


LOSS = Column("loss", "held-out loss")
MERGED = Column("merged", "tokens merged", 1, percent=True)
GOODPUT = Column("goodput", "goodput", 1, percent=True)

Results = Mapping[str, Sequence[Result]]  # by row, one per seed
Quantity = Callable[[Results], list[float]]  # one number per seed


@dataclass(frozen=True)
class Claim:
    """`quantity` lies between `low` and `high`; `source` says who says so."""

    text: str
    source: str
    quantity: Quantity
    what: str  # the quantity in words
    low: float = 0.0
    high: float = math.inf

    def judge(self, results: Results) -> tuple[Interval, str]:
        interval = bootstrap(self.quantity(results))
        return interval, verdict(interval, self.low, self.high)


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    intro: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    claims: tuple[Claim, ...]
    check: str  # the row that --check makes again
    notes: str = ""
    seeds: int = 0  # 0: as many as asked for
    curve_at: tuple[float, ...] = ()  # times of the curve that are shown


def of(row: str, metric: str = "loss") -> Quantity:
    return lambda results: [result.values[metric] for result in results[row]]


def difference(larger: str, smaller: str, metric: str = "loss") -> Quantity:
    """Paired, larger - smaller."""

    def quantity(results: Results) -> list[float]:
        pairs = zip(results[larger], results[smaller], strict=True)
        return [a.values[metric] - b.values[metric] for a, b in pairs]

    return quantity


def ratio(upper: str, lower: str, metric: str) -> Quantity:
    def quantity(results: Results) -> list[float]:
        pairs = zip(results[upper], results[lower], strict=True)
        return [a.values[metric] / b.values[metric] for a, b in pairs]

    return quantity


def best(results: Results, rows: Sequence[str]) -> str:
    """The row with the lowest mean loss; one that diverged is none."""

    def mean_loss(row: str) -> float:
        losses = [result.values["loss"] for result in results[row]]
        mean = sum(losses) / len(losses)
        return mean if math.isfinite(mean) else math.inf

    return min(rows, key=mean_loss)


def best_difference(larger: Sequence[str], smaller: Sequence[str]) -> Quantity:
    """Of the best of each group."""
    return lambda results: difference(best(results, larger), best(results, smaller))(results)


def lower(better: str, than: str, text: str, source: str) -> Claim:
    """The first row's loss is below the second's."""
    return Claim(text, source, difference(than, better), f"loss of `{than}` - `{better}`")


def same(row: str, other: str, margin: float, text: str, source: str) -> Claim:
    """Losses within `margin` nats of each other."""
    what = f"loss of `{row}` - `{other}`, within ±{margin}"
    return Claim(text, source, difference(row, other), what, -margin, margin)
