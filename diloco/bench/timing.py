"""Several things timed in turn, so that all of them see the same machine: memory of shared machines changes its speed
for minutes at a time, and only a ratio of one turn means anything."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

Seconds = dict[str, list[float]]


def in_turn(runs: Mapping[str, Callable[[], float]], turns: int) -> Seconds:
    """Each run gives the seconds it took. Once all of them to warm up, then `turns` times in their order."""
    for run in runs.values():
        run()
    seconds: Seconds = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            seconds[name].append(run())
    return seconds


def ratios(over: list[float], under: list[float], scale: float = 1.0) -> tuple[float, float, float]:
    """Of each turn, times `scale`: least, median, largest."""
    each = [scale * a / b for a, b in zip(over, under, strict=True)]
    return min(each), statistics.median(each), max(each)
