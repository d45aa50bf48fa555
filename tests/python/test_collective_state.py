"""Checkpoints of a run without a syncer: exact with as many ranks, from the global weights with another number."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankOptimizer, errors_of_all, gloo_groups, on_all, recording_groups
from torch import nn
from toys import loss_of, small_model

pytestmark = pytest.mark.timeout(60)

# A step is between the staging and the adoption of a fragment more often than not.
SETTINGS: dict[str, Any] = {
    "mode": "lockstep",
    "sync_every": 6,
    "num_fragments": 3,
    "overlap_steps": 4,
    "outer_optimizer": "nesterov",
    "outer_lr": 0.5,
    "outer_momentum": 0.9,
}
ADOPTS: dict[str, dict[str, Any]] = {
    "rebase": {},
    "blend": {"adopt": "blend"},
    "overwrite": {"adopt": "overwrite", "merge": "mean"},
    "adam_bf16": {"outer_optimizer": "adam", "outer_lr": 0.01, "downlink_dtype": "bf16"},
}


def start(models: list[nn.Module], settings: dict[str, Any], on_device: bool = False) -> list[RankOptimizer]:
    groups = recording_groups(len(models)) if on_device else gloo_groups(len(models))

    def wrap(rank: int) -> RankOptimizer:
        inner = torch.optim.AdamW(models[rank].parameters(), lr=0.01)
        return RankOptimizer(inner, models[rank], groups[rank], on_device=on_device, **settings)

    return on_all(len(models), wrap)


def train(models: list[nn.Module], optimizers: list[RankOptimizer], first: int, last: int) -> None:
    def work(rank: int) -> None:
        for step in range(first, last + 1):
            optimizers[rank].zero_grad()
            loss_of(models[rank], 100 * rank + step).backward()
            optimizers[rank].add_tokens(10 + rank)
            optimizers[rank].step()

    on_all(len(models), work)


Run = tuple[list[Path], list[nn.Module], list[dict[str, Any]]]


def saved_run(folder: Path, settings: dict[str, Any], steps: int, on_device: bool = False) -> Run:
    """Files of two ranks after `steps`; then the same run, six steps further: models and statistics."""
    models: list[nn.Module] = [small_model(), small_model()]
    optimizers = start(models, settings, on_device)
    train(models, optimizers, 1, steps)
    files = []
    for rank in range(2):
        files.append(folder / f"rank{rank}.pt")
        torch.save({"model": models[rank].state_dict(), "optimizer": optimizers[rank].state_dict()}, files[-1])
    train(models, optimizers, steps + 1, steps + 6)
    stats = [optimizer.stats() for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.close()
    return files, models, stats


def resumed(
    files: list[Path], settings: dict[str, Any], on_device: bool = False
) -> tuple[list[nn.Module], list[RankOptimizer]]:
    """As the quick start says: the model first, then wrap, then the optimizer's state."""
    saved = [torch.load(file, weights_only=True) for file in files]
    models: list[nn.Module] = [small_model(50 + rank) for rank in range(len(files))]
    for model, one in zip(models, saved, strict=True):
        model.load_state_dict(one["model"])
    optimizers = start(models, settings, on_device)
    on_all(len(files), lambda rank: optimizers[rank].load_state_dict(saved[rank]["optimizer"]))
    return models, optimizers


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("adopt", ADOPTS)
@pytest.mark.parametrize("steps", [7, 8])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, adopt: str, steps: int, on_device: bool) -> None:
    settings = SETTINGS | ADOPTS[adopt]
    files, wanted, wanted_stats = saved_run(tmp_path, settings, steps, on_device)
    models, optimizers = resumed(files, settings, on_device)
    messages = [account["message"] for account in optimizers[0].state_dict()["diloco"]["collective"]["accounts"]]
    assert any(message is not None for message in messages)  # something was under way
    train(models, optimizers, steps + 1, steps + 6)
    for found, model in zip(models, wanted, strict=True):
        for (name, a), b in zip(found.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b), name
    for optimizer, theirs in zip(optimizers, wanted_stats, strict=True):
        stats = optimizer.stats()
        assert (stats["steps"], stats["total_steps"]) == (6, steps + 6)
        same = ["clock", "merges", "versions", "total_tokens", "tokens_merged", "tokens_outstanding", "discarded"]
        same += ["contributions_sent", "contributions_merged"]
        assert {key: stats[key] for key in same} == {key: theirs[key] for key in same}
        optimizer.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_from_the_global_weights(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    files, _, _ = saved_run(tmp_path, SETTINGS, 8)
    state = torch.load(files[0], weights_only=True)["optimizer"]["diloco"]["collective"]
    models, optimizers = resumed([files[rank % 2] for rank in range(ranks)], SETTINGS)
    assert "training goes on from the global weights of step 8" in caplog.text
    theta = torch.cat([fragment["theta"] for fragment in state["fragments"]]).sort().values
    for model, optimizer in zip(models, optimizers, strict=True):
        held = torch.cat([p.detach().flatten() for p in model.parameters()]).sort().values
        assert torch.equal(held, theta)
        assert optimizer.stats()["versions"] == [(1, fragment["n"]) for fragment in state["fragments"]]
        assert optimizer.stats()["clock"] == 8
    before = optimizers[0].stats()["merges"]
    train(models, optimizers, 9, 21)
    for rank in range(ranks):
        assert optimizers[rank].stats()["merges"] >= before + 4
        anchors = optimizers[rank].learner.anchor_state_dict()
        assert all(
            torch.equal(anchors[name], values) for name, values in optimizers[0].learner.anchor_state_dict().items()
        )
        optimizers[rank].close()


def test_the_state_holds_the_global_weights_and_their_optimizer(tmp_path: Path) -> None:
    files, _, _ = saved_run(tmp_path, SETTINGS, 12)
    states = [torch.load(file, weights_only=True)["optimizer"]["diloco"]["collective"] for file in files]
    for a, b in zip(states[0]["fragments"], states[1]["fragments"], strict=True):  # equal on all ranks
        assert torch.equal(a["theta"], b["theta"]) and torch.equal(a["outer"], b["outer"])
        assert a["n"] == b["n"] == a["outer_steps"] >= 1
        assert a["outer"].abs().max() > 0
    names = [name for fragment in states[0]["plan"] for name in fragment]
    assert sorted(names) == sorted(name for name, _ in small_model().named_parameters())


def refused(models: list[nn.Module], states: list[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    optimizers = start(models, settings)
    errors = errors_of_all(len(models), lambda rank: optimizers[rank].load_state_dict(states[rank]))
    assert all(isinstance(error, ValueError) for error in errors), errors
    return [str(error) for error in errors]


def test_states_that_do_not_belong_together_are_refused_on_all_ranks(tmp_path: Path) -> None:
    files, _, _ = saved_run(tmp_path, SETTINGS, 8)
    states = [torch.load(file, weights_only=True)["optimizer"] for file in files]
    models: list[nn.Module] = [small_model(), small_model()]

    other = copy.deepcopy(states)
    other[1]["diloco"]["collective"]["fragments"][0]["theta"][0] += 1
    texts = refused(models, other, SETTINGS)
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "rank 1 loads other global weights (step 8) than rank 0 (step 8); load what all ranks saved"
    )

    assert (
        "rank 0: the state is of other fragments (3 of them, here 2)"
        in refused(models, states, SETTINGS | {"num_fragments": 2})[1]
    )
    assert (
        "saved with outer_optimizer = nesterov, here it is sgd"
        in refused(models, states, SETTINGS | {"outer_optimizer": "sgd", "outer_momentum": 0})[0]
    )

    other = copy.deepcopy(states)
    del other[0]["diloco"]["collective"], other[1]["diloco"]["collective"]
    assert "was not saved by a learner without a syncer" in refused(models, other, SETTINGS)[0]


def test_a_rank_that_is_a_step_behind_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GradScaler skips a step on one rank: the ranks still meet, and their checkpoints still belong together."""
    models: list[nn.Module] = [small_model(), small_model()]
    optimizers = start(models, SETTINGS)

    def work(rank: int) -> None:
        for step in range(1, 16):  # merges are at even steps
            optimizers[rank].zero_grad()
            loss_of(models[rank], 100 * rank + step).backward()
            if (rank, step) != (1, 3):
                optimizers[rank].step()

    on_all(2, work)
    states = [optimizer.state_dict() for optimizer in optimizers]
    clocks = [state["diloco"]["collective"]["clock"] for state in states]
    assert clocks == [15, 14]
    anchors = [optimizer.learner.anchor_state_dict() for optimizer in optimizers]
    assert all(torch.equal(values, anchors[1][name]) for name, values in anchors[0].items())
    on_all(2, lambda rank: optimizers[rank].load_state_dict(states[rank]))
    assert "rank 1 goes on from its step 14, rank 0 from step 15" in caplog.text
    assert [optimizer.stats()["clock"] for optimizer in optimizers] == [15, 14]
    for optimizer in optimizers:
        optimizer.close()


def test_a_copy_takes_no_part() -> None:
    models: list[nn.Module] = [small_model()]
    (optimizer,) = start(models, SETTINGS)
    train(models, [optimizer], 1, 3)
    twin = copy.deepcopy(optimizer)
    assert twin.stats()["state"] == "disconnected"
    assert twin.stats()["total_steps"] == 3
    assert "collective" not in twin.state_dict()["diloco"]
    twin.load_state_dict(optimizer.state_dict())
    optimizer.close()
