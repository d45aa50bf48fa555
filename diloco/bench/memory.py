"""`diloco bench memory`: what this machine's memory gives, the yardstick of other benchmarks."""

from __future__ import annotations

import statistics
from functools import partial

from diloco._native import _C
from diloco.bench.timing import in_turn

NAMES = ("read", "copy", "triad")


def measure(threads: list[int], megabytes: int, turns: int) -> dict[int, dict[str, dict[str, float]]]:
    """GB/s by threads and name: {"best": ..., "median": ...}. Takes 3 * megabytes of memory."""
    found = {}
    for count in threads:
        native = _C.Workloads(count)
        native.add_memory(megabytes)
        size = native.bytes()
        seconds = in_turn({name: partial(native.run, name) for name in NAMES}, turns)
        found[count] = {
            name: {
                "best": size[name] / min(seconds[name]) / 1e9,
                "median": size[name] / statistics.median(seconds[name]) / 1e9,
            }
            for name in NAMES
        }
    return found
