"""Loops that need no integration: accelerate, and one in the manner of nanoGPT (field cases F019, F021)."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from framework_learner import BATCH, data
from torch import nn
from torch.utils.data import DataLoader
from toys import alone, batch, small_model, snapshot

import diloco


class Loop:
    """What accelerate's documentation shows, and where a learner joins in it: after the weights are there."""

    def __init__(self, syncer: str | None, resume: Path | None = None) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
        self.model = self.accelerator.prepare(small_model(seed=7))
        if resume is not None:
            self.accelerator.load_state(str(resume))
        self.joined_with = snapshot(self.model)
        inner: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.wrapper = diloco.DiLoCoOptimizer(inner, self.model, syncer, learner_id="a") if syncer else None
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.wrapper or inner, 20)
        self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            self.wrapper or inner, scheduler, DataLoader(data(1, 4000), batch_size=BATCH)
        )
        if resume is not None:
            self.optimizer.load_state_dict(torch.load(resume / "optimizer.bin", weights_only=True))

    def train(self, micro_batches: int) -> list[float]:
        losses: list[float] = []
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                if self.wrapper:
                    self.wrapper.add_tokens(len(inputs))
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == micro_batches:
                break
        return losses


def test_accelerate_steps_the_wrapper_and_unwraps(tmp_path: Path) -> None:
    """Accumulate 4, H = 10, 80 micro-batches: 20 steps, 2 rounds. What is saved at the end are the global weights."""
    with alone(sync_every=10) as syncer:
        loop = Loop(syncer.endpoint)
        assert loop.wrapper is not None
        assert type(loop.optimizer).__name__ == "AcceleratedOptimizer"
        assert loop.optimizer.optimizer is loop.wrapper
        loop.train(80)
        stats = loop.wrapper.stats()
        assert (stats["steps"], stats["tokens"]) == (20, 80 * BATCH)
        assert syncer.status()["rounds_merged"] == 2
        loop.wrapper.close()
        expected = syncer.weights()
    loop.accelerator.unwrap_model(loop.model).load_state_dict(loop.wrapper.learner.anchor_state_dict())
    loop.accelerator.save_model(loop.model, str(tmp_path))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], values) for name, values in expected.items())


def test_accelerate_trains_as_without_us(nobody: str) -> None:
    assert Loop(nobody).train(40) == Loop(None).train(40)


def test_accelerate_saves_and_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with alone(sync_every=5) as syncer, caplog.at_level(logging.WARNING, "diloco"):
        loop = Loop(syncer.endpoint)
        loop.train(24)
        saved = Path(loop.accelerator.save_state(str(tmp_path / "saved")))
        weights = snapshot(loop.model)
        assert loop.wrapper is not None
        loop.wrapper.close()
    with alone(sync_every=5) as syncer:
        loop = Loop(syncer.endpoint, resume=saved)
        assert all(torch.equal(loop.joined_with[name], values) for name, values in weights.items())
        loop.train(20)
        assert loop.wrapper is not None
        stats = loop.wrapper.stats()
        assert (stats["steps"], stats["total_steps"], stats["total_tokens"]) == (5, 11, 44 * BATCH)
        assert syncer.status()["rounds_merged"] == 1
        loop.wrapper.close()
    assert "weights were loaded into a model that is in a run" not in caplog.text


# ---- in the manner of nanoGPT: groups by dimension, rate by hand, clipping, accumulation, a checkpoint dict ----


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def learning_rate(step: int) -> float:
    return 0.02 * (step + 1) / 4 if step < 4 else 0.002 + 0.009 * (1 + math.cos(math.pi * min(1.0, (step - 4) / 16)))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, accumulate: int = 4, set_to_none: bool = True
) -> list[float]:
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for micro in range(accumulate):
            inputs, targets = batch(1000 * step + micro)
            loss = nn.functional.mse_loss(model(inputs), targets) / accumulate
            loss.backward()
            if isinstance(optimizer, diloco.DiLoCoOptimizer):
                optimizer.add_tokens(len(inputs))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.02, betas=(0.9, 0.95))


@pytest.mark.parametrize("compiled", [False, True])
def test_own_loop_trains_as_without_us(nobody: str, compiled: bool) -> None:
    plain, wrapped = small_model(), small_model()
    run_plain, run_wrapped = (torch.compile(m, backend="eager") if compiled else m for m in (plain, wrapped))
    expected = train(run_plain, adamw(plain), range(20))
    with diloco.DiLoCoOptimizer(adamw(wrapped), run_wrapped, nobody) as optimizer:
        assert train(run_wrapped, optimizer, range(20)) == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_own_loop_counts_steps_not_micro_batches(set_to_none: bool) -> None:
    """F019: accumulate 4, H = 10, 80 micro-batches. Which way gradients are cleared changes nothing."""
    model = small_model()
    with alone(sync_every=10) as syncer, diloco.DiLoCoOptimizer(adamw(model), model, syncer.endpoint) as optimizer:
        train(model, optimizer, range(20), set_to_none=set_to_none)
        stats = optimizer.stats()
        assert (stats["steps"], stats["tokens"]) == (20, 80 * 16)
        assert syncer.status()["rounds_merged"] == 2


def test_own_loop_saves_and_resumes(tmp_path: Path) -> None:
    """A dictionary with the model's and the optimizer's state, as nanoGPT writes it: resumed, it is the same run."""
    straight = small_model()
    with alone(sync_every=5) as syncer, diloco.DiLoCoOptimizer(adamw(straight), straight, syncer.endpoint) as optimizer:
        expected = train(straight, optimizer, range(20))
    first = small_model()
    with alone(sync_every=5) as syncer:
        with diloco.DiLoCoOptimizer(adamw(first), first, syncer.endpoint, learner_id="a") as optimizer:
            losses = train(first, optimizer, range(10))
            checkpoint = {"model": first.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 10}
            torch.save(checkpoint, tmp_path / "ckpt.pt")
        second = small_model(seed=9)
        saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
        second.load_state_dict(saved["model"])
        with diloco.DiLoCoOptimizer(adamw(second), second, syncer.endpoint, learner_id="a") as optimizer:
            optimizer.load_state_dict(saved["optimizer"])
            losses += train(second, optimizer, range(saved["iter_num"], 20))
            assert optimizer.stats()["total_tokens"] == 80 * 16
    assert losses == expected
