"""Saving and resuming a learner: the account, the schedule and the bits (field cases F023, F126, F127, F130)."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from toys import LOCKSTEP, QUICK, dead_address, small_model, train_step

import diloco

H = 4
ALONE = LOCKSTEP | {"min_quorum": 1, "sync_every": H}


class Life:
    """One life of a learner: model, AdamW, a schedule. `saved` is what torch.load gave, in order: model, then the rest."""

    def __init__(self, address: str, saved: dict[str, Any] | None = None, learner_id: str = "a", seed: int = 0) -> None:
        self.model = small_model(seed)
        if saved:
            self.model.load_state_dict(saved["model"])
        self.opt = diloco.DiLoCoOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.02),
            self.model,
            address,
            learner_id=learner_id,
            tokens=lambda: 16,
        )
        self.schedule = lr_scheduler.CosineAnnealingLR(self.opt, 50)
        self.rates: list[float] = []
        if saved and "opt" in saved:
            self.opt.load_state_dict(saved["opt"])
            self.schedule.load_state_dict(saved["schedule"])

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.rates.append(self.opt.param_groups[0]["lr"])
            train_step(self.model, self.opt, step)
            self.schedule.step()

    def save(self) -> dict[str, Any]:
        file = io.BytesIO()
        state = {"model": self.model.state_dict(), "opt": self.opt.state_dict(), "schedule": self.schedule.state_dict()}
        torch.save(state, file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@contextmanager
def syncer(**settings: Any) -> Iterator[diloco.Syncer]:
    with diloco.Syncer(**settings, shutdown_s=0.5) as running:
        yield running


def interrupted(
    settings: dict[str, Any], cut: int, steps: int, merged: int = 0
) -> tuple[Life, dict[str, Any], dict[str, torch.Tensor]]:
    """A run of `steps` steps that ends and is taken up again after `cut` of them, and after `merged` rounds."""
    with syncer(**settings) as running:
        first = Life(running.endpoint)
        first.train(1, cut)
        deadline = time.monotonic() + 20
        while running.status()["rounds_merged"] < merged:
            assert time.monotonic() < deadline
        saved = first.save()
        first.opt.close()
        second = Life(running.endpoint, saved)
        second.train(cut + 1, steps)
        second.rates = first.rates + second.rates
        second.opt.close()
        return second, running.status(), running.weights()


VARIANTS: dict[str, dict[str, Any]] = {
    "overwrite": {},
    "rebase_bf16_nesterov": {
        "adopt": "rebase",
        "wire_dtype": "bf16",
        "outer_optimizer": "nesterov",
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    },
    "staggered_rda": {"num_fragments": 2, "merge": "rda", "weights": "tokens_per_step"},
    "overlap": {"overlap_steps": 1, "adopt": "rebase"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_at_every_step_is_the_uninterrupted_run(variant: str) -> None:
    settings, steps = ALONE | VARIANTS[variant], 3 * H
    with syncer(**settings) as running:
        whole = Life(running.endpoint)
        whole.train(1, steps)
        whole.opt.close()
        wanted, rounds = running.weights(), running.status()["rounds_merged"]
    for cut in range(1, 2 * H + 1):
        in_flight = settings["overlap_steps"] == 1 and cut % H == H - 1  # sent at this step, adopted at the next
        life, done, found = interrupted(settings, cut, steps, merged=(cut + 1) // H if in_flight else 0)
        assert life.opt.stats()["total_steps"] == steps, cut
        assert life.opt.stats()["total_tokens"] == 16 * steps, cut
        assert life.rates == whole.rates, cut
        assert done["rounds_merged"] == rounds, cut
        # What was merged while it was away is adopted at once, one step before its time: the same up to rounding.
        same(life.weights(), whole.weights(), atol=2e-6 if in_flight else 0.0)
        same(found, wanted, atol=2e-6 if in_flight else 0.0)


