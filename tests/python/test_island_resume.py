"""Checkpoints of islands: what was saved goes on as if it had not ended, at any world size and sharding."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from island_checkpoints import CUT, STEPS, Tied
from island_ranks import Job
from island_task import BATCH
from lives import ALONE, syncer
from safetensors.torch import load_model
from toys import QUICK

Start = Callable[..., Job]


def whole(ranks: Start, path: Path, how: str, size: int, kind: str, **settings: Any) -> tuple[Any, Any, Any]:
    """Weights, Θ, reports of the run that is not interrupted."""
    with syncer(**ALONE | settings) as running:
        reports = ranks("whole_run", size, how=how, kind=kind, syncer=running.endpoint, path=str(path)).finish()
        return torch.load(f"{path}.whole"), running.weights(), reports


def halves(
    ranks: Start, path: Path, saver: str, before: tuple[str, int], after: tuple[str, int], kind: str, **settings: Any
) -> tuple[Any, Any, Any]:
    """The same of a run in two lives."""
    with syncer(**ALONE | settings) as running:
        arguments = {"kind": kind, "syncer": running.endpoint, "path": str(path), "saver": saver}
        firsts = ranks("first_half", before[1], how=before[0], **arguments).finish()
        job = ranks("second_half", after[1], how=after[0], **arguments)
        reports = job.finish()
        for one in job.every("resumed"):
            assert (one["stats"]["total_steps"], one["stats"]["total_tokens"]) == (CUT, CUT * BATCH)
        assert {one["incarnation"] for one in reports} != {one["incarnation"] for one in firsts}
        status = running.status()
        assert status["learners"][0]["lives"] == 2
        assert status["rounds_merged"] == STEPS // 4
        reports = [one | {"rates": firsts[0]["rates"] + one["rates"]} for one in reports]
        return torch.load(f"{path}.second"), running.weights(), reports


@pytest.mark.parametrize(
    ("saver", "before", "after"),
    [
        ("dcp", ("fsdp", 2), ("fsdp", 2)),
        ("dcp", ("fsdp", 2), ("fsdp", 3)),
        ("dcp", ("fsdp", 3), ("ddp", 2)),
        ("dcp", ("ddp", 2), ("alone", 1)),
        ("dcp", ("alone", 1), ("fsdp", 2)),
        ("one_file", ("fsdp", 2), ("fsdp", 3)),
        ("one_file", ("fsdp", 2), ("alone", 1)),
        ("main_process", ("ddp", 2), ("ddp", 3)),
        ("main_process", ("ddp", 2), ("alone", 1)),
        ("file_each", ("fsdp", 2), ("fsdp", 2)),
        ("one_file", ("ddp", 2), ("fsdp", 2)),
        ("dcp", ("hsdp", 4), ("fsdp", 2)),
        ("dcp", ("tp", 2), ("tp", 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "{}{}".format(*value),
)
def test_a_resumed_island_is_the_uninterrupted_run(
    ranks: Start, tmp_path: Path, saver: str, before: tuple[str, int], after: tuple[str, int]
) -> None:
    weights, theta, reports = whole(ranks, tmp_path / "x", *before, "adamw")
    found, found_theta, found_reports = halves(ranks, tmp_path / "x", saver, before, after, "adamw")
    equal_ranks = before == after
    for name, tensor in weights.items():  # another world size adds the same numbers up in another order
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0 if equal_ranks else 2e-6)
    for name, tensor in theta.items():
        torch.testing.assert_close(found_theta[name], tensor, rtol=0, atol=0 if equal_ranks else 2e-6)
    for one in found_reports:
        assert one["rates"] == reports[0]["rates"]
        assert (one["stats"]["total_steps"], one["stats"]["total_tokens"]) == (STEPS, STEPS * BATCH)


def test_work_that_was_never_merged_is_put_back_and_counts_again(ranks: Start, tmp_path: Path) -> None:
    """Decoupled, and nobody to merge with: the last step's tokens are under way between the ranks when it is saved."""
    with syncer(**QUICK | {"min_quorum": 2}) as running:
        arguments = {"how": "fsdp", "kind": "adamw", "syncer": running.endpoint, "path": str(tmp_path / "x")}
        arguments |= {"saver": "dcp", "cut": 5}
        ranks("first_half", 2, **arguments).finish()
        job = ranks("second_half", 2, **arguments)
        for one in job.every("resumed"):
            assert (one["stats"]["total_steps"], one["stats"]["steps"]) == (5, 5)
        for one in job.finish():
            assert (one["stats"]["total_steps"], one["stats"]["total_tokens"]) == (STEPS, STEPS * BATCH)
            assert (one["stats"]["steps"], one["stats"]["tokens"]) == (STEPS, STEPS * BATCH)
        found = torch.load(tmp_path / "x.second")
    weights, _, _ = whole(ranks, tmp_path / "y", "fsdp", 2, "adamw", **QUICK | {"mode": "decoupled", "min_quorum": 2})
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name


def test_what_each_rank_must_load(ranks: Start, tmp_path: Path, nobody: str) -> None:
    """F125: a state with DTensors is one rank's; what all save together is everybody's; a missing file is named."""
    job = ranks("loads", 2, path=str(tmp_path / "x"), syncer=nobody)
    saved = job.every("saved")
    assert saved[0]["together"] == saved[1]["together"]
    assert saved[0]["together"]["pending_tokens"] == 21
    assert saved[0]["together"]["tokens"] == 36
    words = {
        "rank 0's on all": r"rank 1: this is what rank 0 of 2 saved: its own parts of DTensors .*"
        r"Expected those of rank 1 of 2; save with torch.distributed.checkpoint, or outer_state\(full=True\)",
        "rank 1's on rank 0": r"rank 0: this is what rank 1 of 2 saved, and only rank 0 has the account",
        "none on rank 1": r"ranks of this island load different states: rank 0 one with weights, rank 1 no 'diloco'",
        "other model on rank 1": r"rank 1: this state_dict is of another model: parameter '0.weight' is float32 \(2,\)",
    }
    for case, text in words.items():
        for refused in job.every("refused", lambda event, case=case: event["case"] == case):
            assert re.search(text, refused["text"]), refused["text"]
            assert refused["untouched"]
    for case in ("own", "together", "whole"):
        for loaded in job.every("loaded", lambda event, case=case: event["case"] == case, errors=False):
            assert loaded["same"]
            assert loaded["pending"] == (10 + loaded["rank"] if case == "own" else 21 if loaded["rank"] == 0 else 0)
            counted = 36 - 12  # of the last step, which the next boundary counts
            assert (loaded["stats"]["total_steps"], loaded["stats"]["total_tokens"]) == (3, counted)
    error = job.wait("error", 1)
    assert error["type"] == "FileNotFoundError"
    assert str(tmp_path / "x.1") in error["text"]
    assert "a rank of this island has ended" in job.wait("alone", errors=False)["text"]


@pytest.mark.parametrize("how", ["ddp", "fsdp", "mixture"])
def test_global_weights_of_an_island_are_whole_in_a_file(ranks: Start, tmp_path: Path, how: str) -> None:
    """F122: DTensors as the model has them, or whole on all ranks, ties kept; one file for any loader."""
    path = str(tmp_path / "x")
    with syncer(**ALONE) as running:
        reports = ranks("exported", 2, how=how, syncer=running.endpoint, path=path).finish()
        merged = running.weights()
        assert running.status()["rounds_merged"] == 1
    sharded = {"ddp": (), "fsdp": merged.keys(), "mixture": ("inner.weight", "inner.bias")}[how]
    for rank, done in enumerate(reports):
        assert done["tied"] == [True, True]
        assert done["kinds"] == {name: "DTensor" if name in sharded else "Tensor" for name in merged}
        whole = torch.load(f"{path}.{rank}", weights_only=True)
        assert whole.keys() == merged.keys()
        assert all(torch.equal(whole[name], tensor) for name, tensor in merged.items())
    fresh = Tied()
    load_model(fresh, path)
    assert fresh.head.weight is fresh.embed.weight
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, merged.get(name, torch.ones_like(tensor))), name
    unique = 4 * (7 * 5 + 5 * 5 + 5 + 5 + 3)
    assert unique < Path(path).stat().st_size < unique + 1024
