"""Islands of different kinds and single processes are learners like any other: they train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from island_programs import BATCH
from island_ranks import Job
from toys import LOCKSTEP

import diloco

Start = Callable[..., Job]


STEPS = 12


def trained(ranks: Start, hows: list[tuple[str, int]], **settings: Any) -> dict[str, torch.Tensor]:
    """Θ after some steps of learners of these kinds in lockstep."""
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": len(hows)} | settings, shutdown_s=0.5) as syncer:
        jobs = [
            ranks("train", size, how=how, syncer=syncer.endpoint, learner_id=f"learner-{n}", data=n, steps=STEPS)
            for n, (how, size) in enumerate(hows)
        ]
        for job in jobs:
            stats = [done["stats"] for done in job.finish()]
            assert stats[0]["tokens"] == BATCH * STEPS
            assert {one["adoptions"] for one in stats} == {stats[0]["adoptions"]}
            assert stats[0]["contributions_merged"] == STEPS // 4
        status = syncer.status()
        assert status["rounds_merged"] == STEPS // 4
        assert [row["ledger"]["processed"] for row in status["learners"]] == [BATCH * STEPS] * len(hows)
        return syncer.weights()


@pytest.mark.parametrize(
    ("settings", "rtol"),
    [({}, 1e-5), ({"merge": "rda"}, 1e-5), ({"wire_dtype": "bf16", "downlink_dtype": "bf16"}, 0.02)],
    ids=["mean", "rda", "bf16"],
)
def test_two_islands_and_a_process_are_three_processes(ranks: Start, settings: dict[str, Any], rtol: float) -> None:
    found = trained(ranks, [("fsdp", 2), ("ddp", 2), ("alone", 1)], **settings)
    wanted = trained(ranks, [("alone", 1)] * 3, **settings)
    for name, weights in wanted.items():
        scale = weights.abs().max().item()
        torch.testing.assert_close(found[name], weights, rtol=rtol, atol=rtol * scale)
