"""Lines for people, in the manner of torchtitan."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from typing import Any

import torch


class Console:
    """Makes one line per call, with the speed since the last one.

    `step:   20  loss:  2.3145  tps: 12,345  memory:  0.41GiB  merged:   12  goodput: 98.7%`

    tps: tokens per second; memory: the most so far, of the GPU if there is one, else of the process; merged:
    contributions of this learner that are in a published version; goodput: the share of wall time that was the
    script's own, and was not lost.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._at = time.perf_counter()

    def line(self, step: int, loss: float, stats: Mapping[str, Any]) -> str:
        """The line for `optimizer.stats()` of now."""
        now = time.perf_counter()
        speed = (stats["tokens"] - self._tokens) / max(now - self._at, 1e-9)
        self._tokens, self._at = stats["tokens"], now
        goodput = stats["goodput"]
        return (
            f"step: {step:4d}  loss: {loss:7.4f}  tps: {speed:,.0f}  memory: {_memory_gib():5.2f}GiB  "
            f"merged: {stats['contributions_merged']:4d}  "
            f"goodput: {100 * goodput['compute_s'] / (goodput['wall_s'] or 1.0):.1f}%"
        )


def _memory_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / (1 << 30)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
