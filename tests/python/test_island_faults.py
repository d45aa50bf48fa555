"""Islands and what goes wrong around them: poison in one rank, a rank's connection cut, a syncer that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from island_ranks import Job
from toys import QUICK

import diloco

Start = Callable[..., Job]
STEP_S = 0.004


def is_reset(event: dict[str, Any]) -> bool:
    return "inner optimizer's state is reset for" in event["text"]


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_poison_in_one_rank_resets_all_of_them_together(run: Any, ranks: Start, how: str) -> None:
    syncer = run.syncer()
    common = {"syncer": syncer.endpoint, "ledger_dir": str(run.ledgers), "step_s": STEP_S}
    island = ranks("train", 2, how=how, learner_id="island", kind="adamw", **common)
    other = ranks("train", 1, how="alone", data=1, learner_id="other", **common)
    for name in ("island", "other"):
        syncer.wait_merges(name, 2, start=0)
    island.tell("poison:1")
    first = island.every("warning", is_reset)
    assert first[0]["text"] == first[1]["text"]
    assert "and 1 more" in first[0]["text"]  # five are named: everything at once, or the rest would poison it again
    for name in ("island", "other"):
        syncer.wait_merges(name, 4)
    for job in (island, other):
        job.tell("stop")
    for done in (*island.finish(), *other.finish()):
        assert done["finite"]
    lost = island.events("done")[0]["stats"]["discarded"]
    assert lost["nonfinite"] > 0
    resets = [[one["step"] for one in island.events("warning", rank) if is_reset(one)] for rank in range(2)]
    assert resets[0] == resets[1]
    run.end(syncer)


def test_a_rank_without_its_connection_keeps_the_island_out_until_it_is_back(run: Any, ranks: Start, tap: Any) -> None:
    syncer = run.syncer(min_quorum=1)
    relay = tap(syncer)
    common = {"ledger_dir": str(run.ledgers), "step_s": STEP_S}
    each = [{"syncer": syncer.endpoint}, {"syncer": relay.endpoint}]
    island = ranks("train", 2, each=each, how="fsdp", learner_id="island", **common)
    other = ranks("train", 1, how="alone", data=1, learner_id="other", syncer=syncer.endpoint, **common)
    for name in ("island", "other"):
        syncer.wait_merges(name, 2, start=0)
    start = syncer.mark()
    held = relay.hold("up")  # rank 1's next connection, before its first byte
    relay.cut_all()
    connection = held.wait()
    cut = syncer.wait_for("leave", lambda event: event["learner"] == "island", start=start)
    assert cut["why"]
    syncer.wait_for("join", lambda event: event["learner"] == "island", start=start)
    back = syncer.mark()
    syncer.wait_merges("other", 8)
    merged = [event for event in syncer.events[back:] if event["event"] == "merge"]
    connection.release()
    syncer.wait_merges("island", 2)
    assert not [m for m in merged if "island" in {member["learner"] for member in m["members"]}]
    for job in (island, other):
        job.tell("stop")
    reports = island.finish()
    other.finish()
    assert reports[0]["stats"]["reconnects"] >= 1
    assert reports[0]["incarnation"] == island.wait("joined")["incarnation"]
    row = next(row for row in syncer.status()["learners"] if row["id"] == "island")
    assert row["lives"] == 1
    run.end(syncer)


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_a_syncer_without_state_takes_the_weights_from_the_parts(ranks: Start, how: str) -> None:
    """What the island stands still at (learning rate 0) is what the new syncer has, to rounding."""
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as first:
        address = first.endpoint
        island = ranks("train", 2, how=how, learner_id="island", syncer=address, step_s=STEP_S)
        until(lambda: first.status()["rounds_merged"] >= 6)
        begin = first.weights()
        until(lambda: first.status()["rounds_merged"] >= 10)
        assert any(not torch.equal(first.weights()[name], tensor) for name, tensor in begin.items())
        island.tell("freeze")
        island.wait("told")
        settled = first.status()["rounds_merged"] + 6
        until(lambda: first.status()["rounds_merged"] >= settled)
        weights = first.weights()
    with diloco.Syncer(address, **QUICK, shutdown_s=0.5) as second:
        until(lambda: second.status()["rounds_merged"] >= 4)
        status = second.status()
        assert status["epoch"] == 2
        assert [row["id"] for row in status["learners"] if row["state"] == "live"] == ["island"]
        for name, tensor in second.weights().items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)
        island.tell("stop")
        for done in island.finish():
            assert done["finite"]


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_ranks_give_up_together(ranks: Start, nobody: str) -> None:
    job = ranks("train", 2, how="fsdp", syncer=nobody, give_up_after_s=0.5, learner_id="island")
    errors = job.every("error")
    assert {error["type"] for error in errors} == {"ConnectionError"}
    assert errors[0]["text"] == errors[1]["text"]
    assert "(give_up_after_s); start it, or raise the limit" in errors[0]["text"]


def test_all_ranks_are_refused_together(ranks: Start) -> None:
    with diloco.Syncer(run_id="one", shutdown_s=0.5) as syncer:
        job = ranks("train", 2, how="fsdp", syncer=syncer.endpoint, run_id="another", learner_id="island")
        errors = job.every("error")
    assert {error["type"] for error in errors} == {"ValueError"}
    assert errors[0]["text"] == errors[1]["text"]
    assert "refused learner 'island'" in errors[0]["text"]
