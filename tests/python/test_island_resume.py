"""Checkpoints of islands: what was saved goes on as if it had not ended, at any world size and sharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from island_programs import BATCH, CUT, STEPS
from island_ranks import Job
from lives import ALONE, syncer

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
            assert one["stats"]["total_steps"] == CUT
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
