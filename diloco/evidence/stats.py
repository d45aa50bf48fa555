"""Paired statistics over seeds: a bootstrap interval and what it says about a claim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
EXACT = 50_000  # up to so many resamples all of them are taken, not a sample
RESAMPLES = 20_000

REPRODUCED = "reproduced"
CONTRADICTED = "contradicted"
NOT_RESOLVED = "not resolved at this size"


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Percentile interval of the mean. With one value it is unbounded: one seed tells nothing about others."""
    if not values:
        raise ValueError("expected at least one value, got none")
    sample = np.asarray(values, dtype=np.float64)
    n = len(sample)
    mean = float(sample.mean())
    if n == 1 or not np.isfinite(sample).all():
        return Interval(mean, -math.inf, math.inf)
    if n**n <= EXACT:
        draws = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        draws = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    low, high = np.quantile(sample[draws].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high))


def verdict(interval: Interval, low: float, high: float) -> str:
    """Of a claim that says the quantity lies between `low` and `high`."""
    if low <= interval.low and interval.high <= high:
        return REPRODUCED
    if interval.high < low or interval.low > high:
        return CONTRADICTED
    return NOT_RESOLVED
