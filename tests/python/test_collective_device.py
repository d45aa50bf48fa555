"""The body for device tensors (NCCL), driven over a process group that records what is asked of it. On the CPU, where
the operators have kernels: what is proved is the order, the devices, that the host never waits, and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Groups, RankOptimizer, on_all, recording_groups, sgd
from test_collective_equivalence import RUNS, TOKENS, without_syncer
from torch import nn
from toys import loss_of, small_model

pytestmark = pytest.mark.timeout(60)


def train(model: nn.Module, opt: Any, index: int, steps: int) -> dict[str, Any]:
    for step in range(1, steps + 1):
        opt.zero_grad()
        loss_of(model, 100 * index + step).backward()
        opt.add_tokens(TOKENS[index])
        opt.step()
    stats: dict[str, Any] = opt.stats()
    return stats


def run(settings: dict[str, Any], on_device: bool, steps: int = 26) -> tuple[list[nn.Module], list[Groups], list[Any]]:
    models: list[nn.Module] = [small_model(), small_model()]
    groups = recording_groups(2)

    def work(rank: int) -> dict[str, Any]:
        with RankOptimizer(sgd(models[rank]), models[rank], groups[rank], on_device=on_device, **settings) as opt:
            return train(models[rank], opt, rank, steps)

    return models, groups, on_all(2, work)


@pytest.mark.parametrize("name", RUNS)
def test_the_device_body_gives_the_bits_of_the_host_body(name: str) -> None:
    settings = RUNS[name]
    wanted, their_stats, _ = without_syncer(settings)
    found, groups, stats = run(settings, on_device=True)
    for ours, theirs in zip(found, wanted, strict=True):
        for (tensor, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), tensor
    assert [s["tokens_merged"] for s in stats] == [s["tokens_merged"] for s in their_stats]
    assert all("host wait" not in group.data.record for group in groups)  # type: ignore[attr-defined]


def test_order_and_devices() -> None:
    settings = {"mode": "lockstep", "sync_every": 4, "num_fragments": 2, "overlap_steps": 1, "wire_dtype": "f32"}
    _, groups, stats = run(settings, on_device=True, steps=9)
    records = [group.data.record for group in groups]  # type: ignore[attr-defined]
    assert records[0] == records[1]
    calls = [entry[0] for entry in records[0]]
    assert calls[:2] == ["broadcast"] * 2  # rank 0's weights, fragment by fragment
    assert calls[2:] == ["all_gather"] * 5  # at steps 1, 3, 5, 7, 9: adoption is at 2 and 4, 6 and 8, 10
    assert {entry[1:3] for entry in records[0]} == {("cpu", torch.uint8)}
    assert records[0][2] == records[0][4] == records[0][6] and records[0][3] == records[0][5]  # fragments in turn
    assert sum(entry[3] for entry in records[0][2:]) == stats[0]["bytes_out"]
    assert stats[0]["merges"] == 4  # the fifth is under way


def test_the_host_body_does_wait_on_the_host() -> None:
    """Else the test above could not fail."""
    settings = {"mode": "lockstep", "sync_every": 4, "num_fragments": 2, "overlap_steps": 1}
    _, groups, _ = run(settings, on_device=False, steps=4)
    assert "host wait" in groups[0].data.record  # type: ignore[attr-defined]


def test_poison_is_kept_out_without_asking_the_host() -> None:
    settings = {"mode": "lockstep", "sync_every": 2, "num_fragments": 1, "overlap_steps": 1, "adopt": "blend"}
    models: list[nn.Module] = [small_model(), small_model()]
    groups = recording_groups(2)
    poisoned = 3  # between staging at 1, 3, 5 and adoption at 2, 4, 6

    def work(rank: int) -> dict[str, torch.Tensor]:
        opt = RankOptimizer(
            torch.optim.SGD(models[rank].parameters(), lr=0.1), models[rank], groups[rank], on_device=True, **settings
        )
        for step in range(1, 8):
            opt.zero_grad()
            loss_of(models[rank], step).backward()
            if step == poisoned and rank == 1:
                next(models[rank].parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
            opt.step()
        weights = opt.learner.anchor_state_dict()
        opt.close()
        return weights

    weights = on_all(2, work)
    for name, values in weights[0].items():
        assert torch.isfinite(values).all(), name
        assert torch.equal(values, weights[1][name]), name
    for model in models:
        assert all(torch.isfinite(p).all() for p in model.parameters())
