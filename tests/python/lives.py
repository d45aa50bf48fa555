"""Lives of a learner that is saved and resumed: what test_resume*.py share."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import lr_scheduler
from toys import LOCKSTEP, small_model, train_step

import diloco

H = 4
ALONE = LOCKSTEP | {"min_quorum": 1, "sync_every": H}


class Life:
    """One life of a learner: model, AdamW, a schedule. `saved`: what save() gave; its model is loaded first."""

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
        torch.testing.assert_close(
            tensor, right[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@contextmanager
def syncer(**settings: Any) -> Iterator[diloco.Syncer]:
    with diloco.Syncer(**settings, shutdown_s=0.5) as running:
        yield running
