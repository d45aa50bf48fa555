"""Small models and helpers of the wrapper's tests."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import diloco

# A round every few steps and f32 on the wire, so that a test needs few steps and can compare numbers.
QUICK: dict[str, Any] = {
    "sync_every": 4,
    "num_fragments": 2,
    "wire_dtype": "f32",
    "heartbeat_interval_s": 0.2,
    "heartbeat_timeout_s": 2.0,
}


@contextmanager
def dead_address() -> Iterator[str]:
    """An address where connecting is refused, and that nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def small_model(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(1000 + step))
    return inputs, inputs[:, :2].sin()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs), targets)


def train_step(model: nn.Module, optimizer: Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    return loss.item()


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(left: nn.Module, right: nn.Module, atol: float = 0.0) -> None:
    for (name, a), b in zip(left.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


class Pair:
    """The same model twice: wrapped, and with its bare optimizer."""

    def __init__(self, address: str, make: Callable[[list[nn.Parameter]], Optimizer], **options: Any) -> None:
        self.model = small_model()
        self.plain_model = copy.deepcopy(self.model)
        self.inner = make(list(self.model.parameters()))
        self.opt = diloco.DiLoCoOptimizer(self.inner, self.model, syncer=address, tokens=lambda: 16, **options)
        self.plain = make(list(self.plain_model.parameters()))

    def step(self, step: int) -> None:
        train_step(self.model, self.opt, step)
        train_step(self.plain_model, self.plain, step)


# Two learners that meet every 4 steps: plain synchronous DiLoCo.
LOCKSTEP: dict[str, Any] = {
    "mode": "lockstep",
    "sync_every": 4,
    "num_fragments": 1,
    "overlap_steps": 0,
    "min_quorum": 2,
    "grace": "none",
    "adopt": "overwrite",
    "merge": "mean",
    "weights": "equal",
    "wire_dtype": "f32",
    "downlink_dtype": "f32",
}


def alone(sync_every: int) -> diloco.Syncer:
    """A syncer whose rounds can be counted: a learner on its own has one every `sync_every` steps."""
    return diloco.Syncer(**{**LOCKSTEP, "min_quorum": 1, "sync_every": sync_every}, shutdown_s=0.1)


def train_together(
    address: str,
    models: list[nn.Module],
    steps: int,
    loss: Callable[[nn.Module, int], torch.Tensor] = loss_of,
    lr: float = 0.1,
) -> list[dict[str, Any]]:
    """One thread per model, SGD, each with its own data; learner i sees the batches 100 * i + step. Their stats."""
    # Wrapped one after the other, so that the first one's weights are the global ones.
    optimizers = [
        diloco.DiLoCoOptimizer(
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr),
            model,
            syncer=address,
            learner_id=f"learner-{index}",
            tokens=lambda: 16,
        )
        for index, model in enumerate(models)
    ]

    def train(index: int) -> dict[str, Any]:
        leaving = optimizers  # lockstep waits for all who are there: one that failed leaves nobody waiting
        try:
            for step in range(1, steps + 1):
                optimizers[index].zero_grad()
                loss(models[index], 100 * index + step).backward()
                optimizers[index].step()
            leaving = [optimizers[index]]
            return optimizers[index].stats()
        finally:
            for optimizer in leaving:
                optimizer.close()

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(train, range(len(models))))
