"""Islands of different kinds and single processes are learners like any other: they train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from island_ranks import Job
from island_task import BATCH
from toys import LOCKSTEP, QUICK

import diloco

Start = Callable[..., Job]


STEPS = 12


def trained(ranks: Start, hows: list[tuple[str, int]], **settings: Any) -> dict[str, torch.Tensor]:
    """Θ after some steps of learners of these kinds in lockstep."""
    fragments = settings.get("num_fragments", 1)
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": len(hows)} | settings, shutdown_s=0.5) as syncer:
        jobs = [
            ranks("train", size, how=how, syncer=syncer.endpoint, learner_id=f"learner-{n}", data=n, steps=STEPS)
            for n, (how, size) in enumerate(hows)
        ]
        for job in jobs:
            stats = [done["stats"] for done in job.finish()]
            assert stats[0]["tokens"] == BATCH * STEPS
            assert {one["adoptions"] for one in stats} == {stats[0]["adoptions"]}
            assert stats[0]["contributions_merged"] == fragments * STEPS // 4
        status = syncer.status()
        assert status["rounds_merged"] == fragments * STEPS // 4
        assert [row["ledger"]["processed"] for row in status["learners"]] == [fragments * BATCH * STEPS] * len(hows)
        return syncer.weights()


@pytest.mark.parametrize(
    ("settings", "rtol"),
    [
        ({}, 1e-5),
        ({"merge": "rda"}, 1e-5),
        ({"wire_dtype": "bf16", "downlink_dtype": "bf16"}, 0.02),
        ({"num_fragments": 2, "overlap_steps": 1, "adopt": "blend"}, 1e-5),
        ({"num_fragments": 2, "overlap_steps": 1, "adopt": "rebase", "anchor": "syncer"}, 1e-5),
    ],
    ids=["mean", "rda", "bf16", "blend", "rebase"],
)
def test_two_islands_and_a_process_are_three_processes(ranks: Start, settings: dict[str, Any], rtol: float) -> None:
    found = trained(ranks, [("fsdp", 2), ("ddp", 2), ("alone", 1)], **settings)
    wanted = trained(ranks, [("alone", 1)] * 3, **settings)
    for name, weights in wanted.items():
        scale = weights.abs().max().item()
        torch.testing.assert_close(found[name], weights, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize(("how", "size"), [("fsdp", 2), ("ddp", 2), ("hsdp", 4)])
def test_an_island_alone_in_a_run_is_its_inner_optimizer(ranks: Start, how: str, size: int) -> None:
    """Decoupled: every rank subtracts the very copy that was merged. Two roundings a merge, as for one process."""
    settings = QUICK | {"adopt": "rebase", "max_carry_steps": 1000}
    with diloco.Syncer(**settings, shutdown_s=0.5) as syncer:
        arguments = {"kind": "adamw", "syncer": syncer.endpoint, "steps": 60, "step_s": 0.005}
        reports = ranks("beside_the_bare_one", size, how=how, **arguments).finish()
    assert reports[0]["stats"]["contributions_merged"] >= 5
    for done in reports:
        assert done["apart"] < 25 * 2 * 2.0**-23


def test_shards_of_shards_are_put_together(ranks: Start) -> None:
    """FSDP2 over tensor parallelism: both cut the same rows. And tensor parallelism alone, beside a single process."""
    found = trained(ranks, [("2d", 4), ("tp", 2)])
    wanted = trained(ranks, [("whole34", 1)] * 2)
    for name, weights in wanted.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=2e-6)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2, 3], [1]]], ids=["2and2", "3and1"])
def test_two_islands_in_one_job(ranks: Start, groups: list[list[int]]) -> None:
    hows = ["fsdp", "alone" if len(groups[1]) == 1 else "ddp"]
    wanted = trained(ranks, [("fsdp", len(groups[0])), (hows[1], len(groups[1]))])
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        island_of = [next(n for n, members in enumerate(groups) if rank in members) for rank in range(4)]
        each = [{"how": hows[n], "data": n, "learner_id": f"learner-{n}"} for n in island_of]
        job = ranks("train", 4, each=each, groups=groups, steps=STEPS, syncer=syncer.endpoint)
        for done in job.finish():
            island = island_of[done["rank"]]
            assert done["stats"]["ranks"] == len(groups[island])
            assert done["stats"]["learner_id"] == f"learner-{island}"
            assert done["stats"]["total_tokens"] == BATCH * STEPS
        found = syncer.weights()
    for name, weights in wanted.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_accumulation_and_skipped_steps_are_those_of_the_bare_script(
    ranks: Start, nobody: str, how: str, scaled: bool
) -> None:
    for done in ranks("accumulate", 2, how=how, syncer=nobody, scaled=scaled).finish():
        assert done["same"] and done["finite"]
        assert done["stats"]["total_steps"] == (5 if scaled else 6)  # all ranks skip the same one
        assert done["stats"]["total_tokens"] == 6 * 2 * BATCH  # its tokens went to the next


def test_ranks_of_a_balanced_island_do_not_wait(ranks: Start, record_property: Callable[..., None]) -> None:
    """An exchange of one step ends behind the next one."""
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer:
        reports = ranks("train", 2, how="ddp", syncer=syncer.endpoint, steps=100, step_s=0.005).finish()
    for stats in (done["stats"] for done in reports):
        record_property(f"rank {stats['rank']}", f"{stats['rank_waits']} of {stats['rank_exchanges']} exchanges")
        assert stats["rank_exchanges"] >= 100
        assert stats["rank_waits"] < stats["rank_exchanges"] / 2
    assert reports[0]["stats"]["contributions_merged"] >= 4


def test_a_rank_that_is_a_step_behind_is_waited_for(ranks: Start, record_property: Callable[..., None]) -> None:
    """Ranks that have no collectives of their own, one of them slow: the others wait at their boundaries for it."""
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer:
        each = [{"step_s": 0.002}, {"step_s": 0.02}]
        job = ranks("train", 2, each=each, how="replicas", syncer=syncer.endpoint, steps=40)
        fast, slow = (done["stats"] for done in job.finish())
    for stats in (fast, slow):
        record_property(f"rank {stats['rank']}", f"{stats['rank_waits']} waits, {stats['rank_waits_s']:.3f} s")
    assert fast["rank_waits"] > fast["rank_exchanges"] / 2
    assert fast["rank_waits_s"] > 2 * slow["rank_waits_s"]
    assert fast["steps"] == slow["steps"] == 40
