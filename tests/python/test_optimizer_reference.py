"""The wrapper against plain torch: one learner equals its inner optimizer, two in lockstep equal synchronous DiLoCo."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from toys import LOCKSTEP, QUICK, Pair, assert_same, loss_of, small_model, train_together

import diloco

# One learner, K = 1, SGD lr 1, f32 wire: a merge computes anchor - (anchor - local), two roundings of at most 2^-23 for
# values below 2; 50 steps have at most 25 merges of a fragment, and training contracts what they leave.
# 6e-6; seen: 1.2e-7.
BOUND = 25 * 2 * 2.0**-23


def let_it_hear(syncer: diloco.Syncer, steps: int) -> None:
    """Until the syncer knows of the learner's last step: 50 steps of this model take less time than one round."""
    deadline = time.monotonic() + 20
    while syncer.status()["learners"][0]["step"] < steps:
        assert time.monotonic() < deadline, syncer.status()
        time.sleep(0.0005)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("mode", ["lockstep", "free"])
def test_one_learner_is_the_inner_optimizer(kind: str, mode: str) -> None:
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }[kind]
    settings: dict[str, Any] = {
        "lockstep": {"mode": "lockstep", "overlap_steps": 0},
        "free": {"adopt": "rebase", "max_carry_steps": 1000},
    }[mode]  # on a busy machine work may be carried for longer than the default allows
    with diloco.Syncer(**QUICK | settings, shutdown_s=0.5) as syncer:
        pair = Pair(syncer.endpoint, make)
        with pair.opt:
            for step in range(50):
                pair.step(step)
                if mode == "free":
                    let_it_hear(syncer, step + 1)
            stats = pair.opt.stats()
    assert stats["contributions_merged"] >= (24 if mode == "lockstep" else 5)
    assert max(p.abs().max() for p in pair.model.parameters()) < 2
    assert_same(pair.model, pair.plain_model, atol=BOUND)


def synchronous_diloco(models: list[torch.nn.Module], steps: int, every: int, outer: Any, lr: float) -> torch.nn.Module:
    """Classic DiLoCo in one process: every `every` steps the mean of (global - local) is the outer gradient."""
    server = copy.deepcopy(models[0])
    outer_optimizer = outer(server.parameters())
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model in models]
    for step in range(1, steps + 1):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, 100 * index + step).backward()
            optimizer.step()
        if step % every == 0:
            for parameter, *local in zip(server.parameters(), *(m.parameters() for m in models), strict=True):
                parameter.grad = torch.stack([(parameter - p).detach() for p in local]).mean(dim=0)
            outer_optimizer.step()
            for model in models:
                model.load_state_dict(server.state_dict())
    return server


@pytest.mark.parametrize(
    ("settings", "outer"),
    [
        ({}, lambda p: torch.optim.SGD(p, lr=1.0)),
        ({"outer_lr": 0.7}, lambda p: torch.optim.SGD(p, lr=0.7)),
        (
            {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9},
            lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
        ),
    ],
    ids=["sgd", "sgd_0.7", "nesterov"],
)
def test_two_learners_in_lockstep_are_synchronous_diloco(settings: dict[str, Any], outer: Any) -> None:
    models = [small_model(), small_model()]
    reference = synchronous_diloco([small_model(), small_model()], steps=20, every=4, outer=outer, lr=0.1)
    with diloco.Syncer(**LOCKSTEP | settings, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, steps=20)
        weights = syncer.weights()
    for name, parameter in reference.named_parameters():
        for model in models:
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-6, atol=1e-7)
