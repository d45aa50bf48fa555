"""diloco.leave_on_sigterm(): a polite end for learners whose launcher says SIGTERM first and SIGKILL later."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from diloco import _exit


def leave_on_sigterm(flush_s: float = 2.0) -> None:
    """From now on SIGTERM closes the open learners of this process, in at most `flush_s` seconds together, and then
    ends the process as SIGTERM does. A second SIGTERM ends it at once.

    Without this call SIGTERM is left alone: the process is gone without a goodbye, the syncer sees the connection
    break, and what was not delivered whole is lost. For programs; call it once, in the main thread. The handler runs
    as soon as the main thread is back from the torch call it is in.

    Raises RuntimeError if SIGTERM has a handler already, as under Lightning, whose callback closes by itself: call
    close() from that handler, or from what it starts.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("leave_on_sigterm(): expected to be called in the main thread, where signals are handled")
    present = signal.getsignal(signal.SIGTERM)
    if present is not signal.SIG_DFL and not isinstance(present, _Leave):
        raise RuntimeError(
            f"leave_on_sigterm(): SIGTERM has a handler already ({present!r}); expected none. Call close() of the "
            "DiLoCoOptimizer from that handler instead"
        )
    signal.signal(signal.SIGTERM, _Leave(float(flush_s)))


class _Leave:
    def __init__(self, flush_s: float) -> None:
        self._flush_s = flush_s

    def __call__(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        deadline = time.monotonic() + self._flush_s
        _exit.close_learners(lambda: max(0.0, deadline - time.monotonic()))
        os.kill(os.getpid(), number)
