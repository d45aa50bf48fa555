"""Without a syncer the same numbers: ranks of a job against learners in lockstep with a real syncer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from ranks import on_all, wrap_all
from torch import nn
from toys import loss_of, small_model

import diloco

pytestmark = pytest.mark.timeout(60)

STEPS = 26
RUNS: dict[str, dict[str, Any]] = {
    "diloco": {"preset": "diloco", "sync_every": 5},
    "streaming": {"preset": "streaming", "sync_every": 6, "num_fragments": 3, "wire_dtype": "f32"},
    "streaming_bf16_wire": {"preset": "streaming", "sync_every": 6, "num_fragments": 2, "overlap_steps": 2},
    "rda": {"mode": "lockstep", "sync_every": 4, "num_fragments": 2, "overlap_steps": 1},
    "rda_nesterov": {
        "mode": "lockstep",
        "sync_every": 6,
        "num_fragments": 2,
        "overlap_steps": 3,
        "offsets": "streaming",
        "fragmenter": "layer",
        "outer_optimizer": "nesterov",
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "wire_dtype": "f32",
    },
    "adam_blend": {
        "mode": "lockstep",
        "sync_every": 4,
        "num_fragments": 2,
        "overlap_steps": 2,
        "outer_optimizer": "adam",
        "outer_lr": 0.05,
        "outer_momentum": 0.9,
        "adopt": "blend",
    },
}
# Weights come down as bf16 then, and theta is more than what the learners hold.
BF16 = {
    "bf16_parameters": {"mode": "lockstep", "sync_every": 4, "num_fragments": 2, "overlap_steps": 1, "outer_lr": 0.7}
}
TOKENS = (16, 40)  # learners of unequal weight


def give_gradients(model: nn.Module, step: int) -> None:
    if next(model.parameters()).dtype == torch.float32:
        loss_of(model, step).backward()
        return
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * index + step)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(model: nn.Module, opt: Any, index: int) -> dict[str, Any]:
    for step in range(1, STEPS + 1):
        opt.zero_grad()
        give_gradients(model, 100 * index + step)
        opt.add_tokens(TOKENS[index])
        opt.step()
    stats: dict[str, Any] = opt.stats()
    return stats


Result = tuple[list[nn.Module], list[dict[str, Any]], list[dict[str, torch.Tensor]]]


def with_syncer(settings: dict[str, Any], dtype: torch.dtype) -> Result:
    models: list[nn.Module] = [small_model().to(dtype), small_model().to(dtype)]
    with diloco.Syncer(**settings, min_quorum=2, grace="none", shutdown_s=0.5) as syncer:
        optimizers = [
            diloco.DiLoCoOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                model,
                syncer.endpoint,
                learner_id=f"learner-{index}",
            )
            for index, model in enumerate(models)
        ]
        stats = on_all(2, lambda index: train(models[index], optimizers[index], index))
        weights = [opt.learner.anchor_state_dict() for opt in optimizers]
        closing = [threading.Thread(target=opt.close) for opt in optimizers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
    return models, stats, weights


def without_syncer(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Result:
    models: list[nn.Module] = [small_model().to(dtype), small_model().to(dtype)]
    optimizers = wrap_all(models, **settings)
    stats = on_all(2, lambda index: train(models[index], optimizers[index], index))
    weights = [opt.learner.anchor_state_dict() for opt in optimizers]
    for opt in optimizers:
        opt.close()
    return models, stats, weights


@pytest.mark.parametrize("run", [*RUNS, *BF16])
def test_equal_to_lockstep_with_a_syncer(run: str) -> None:
    settings, dtype = (BF16[run], torch.bfloat16) if run in BF16 else (RUNS[run], torch.float32)
    theirs, their_stats, their_weights = with_syncer(settings, dtype)
    ours, our_stats, our_weights = without_syncer(settings, dtype)
    merged = [stats["contributions_merged"] for stats in our_stats]
    assert merged == [stats["contributions_merged"] for stats in their_stats]
    assert min(merged) >= 4
    assert [stats["tokens_merged"] for stats in our_stats] == [stats["tokens_merged"] for stats in their_stats]
    assert [stats["discarded"] for stats in our_stats] == [stats["discarded"] for stats in their_stats]
    with torch.no_grad():
        for index in range(2):
            for (name, wanted), found in zip(theirs[index].named_parameters(), ours[index].parameters(), strict=True):
                assert float((found - wanted).norm() / wanted.norm()) <= 1e-5, name  # promised
                assert torch.equal(found, wanted), name  # and, as both call the same functions in the same order
                assert torch.equal(our_weights[index][name], their_weights[index][name]), name


def test_the_comparison_would_notice_another_merge() -> None:
    mean, rda = (without_syncer(RUNS["rda_nesterov"] | {"merge": merge})[0] for merge in ("mean", "rda"))
    with torch.no_grad():
        found, other = next(mean[0].parameters()), next(rda[0].parameters())
        assert float((found - other).norm() / other.norm()) > 1e-3
