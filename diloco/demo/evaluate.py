"""Held-out loss of the copies of the weights that a learner process writes; in the parent, at low priority.

A copy is taken by the learner that ran longest at full speed (its anchors: the global weights as it last received
them), between two steps and outside every measured time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from diloco.demo import data
from diloco.demo.model import CONTEXT, ByteModel, held_out_loss
from diloco.demo.record import LossPoint

LIVE_WINDOWS = 96  # for the curve: a third of a second on one core
FINAL_WINDOWS = 512  # for the figures that are compared


class Evaluator:
    """Evaluates weight files. One user thread at a time."""

    def __init__(self, shards: int) -> None:
        torch.set_num_threads(1)  # of this thread; two that wait for each other are slower beside four learners
        text = data.load_part(data.HELD_OUT, shards)
        self._live = data.held_out_windows(text, LIVE_WINDOWS, CONTEXT)
        self._final = data.held_out_windows(text, FINAL_WINDOWS, CONTEXT)
        self._model = ByteModel()

    def evaluate(self, path: Path, final: bool = False) -> tuple[float, float, int, int]:
        """(loss, monotonic time, step, tokens) of one file."""
        saved = torch.load(path, weights_only=True)
        self._model.load_state_dict(saved["weights"])
        loss = held_out_loss(self._model, self._final if final else self._live)
        return loss, float(saved["t"]), int(saved["step"]), int(saved["tokens"])


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt"))


class CurveThread(threading.Thread):
    """Evaluates every new weight file of a folder and appends to `curve`; all but first and last file are removed."""

    def __init__(
        self, folder: Path, shards: int, curve: list[LossPoint], place: Callable[[float, int], LossPoint]
    ) -> None:
        super().__init__(name=f"curve-{folder.name}", daemon=True)
        self._folder, self._shards, self._curve, self._place = folder, shards, curve, place
        self._wake = threading.Event()
        self._ending = self._abandoned = False
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            if hasattr(os, "setpriority"):
                mine = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, mine, min(19, os.getpriority(os.PRIO_PROCESS, mine) + 5))
            evaluator = Evaluator(self._shards)
            seen: list[Path] = []
            while True:
                fresh = [path for path in weight_files(self._folder) if path not in seen]
                for path in fresh:
                    if self._abandoned:
                        return
                    loss, t, step, _ = evaluator.evaluate(path)
                    point = self._place(t, step)
                    self._curve.append(LossPoint(point.t, point.step, point.tokens, loss))
                    if len(seen) > 1:
                        seen[-1].unlink()
                    seen.append(path)
                if not fresh and self._ending:
                    return
                self._wake.wait(0.3)
        except Exception as error:
            self.failure = error

    def finish(self) -> None:
        """Evaluates what is there and returns."""
        self._ending = True
        self._wake.set()
        self.join()
        if self.failure:
            raise self.failure

    def stop(self) -> None:
        """Leaves the rest undone and returns. A thread inside torch must not outlive the interpreter."""
        self._abandoned = True
        self._ending = True
        self._wake.set()
        self.join()
