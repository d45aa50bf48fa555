"""AdamW that measures its own step, so that what a wrapper adds around it can be told apart from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class TimedAdamW(torch.optim.AdamW):
    """`seconds`: what the last step took."""

    seconds = 0.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        start = time.perf_counter()
        result = super().step(closure)
        self.seconds = time.perf_counter() - start
        return result

    # AdamW.step is hooked by torch already; hooking it twice would look like time spent in the wrapper.
    step.hooked = True  # type: ignore[attr-defined]
