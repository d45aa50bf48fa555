"""Islands whose ranks die: another incarnation comes back, of the same size or another; nobody else notices (F079)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from island_ranks import Job, TorchrunJob
from zmtp import RawPeer, pack

Start = Callable[..., Job]
STEP_S = 0.004


def lives(syncer: Any, learner_id: str) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in syncer.status()["learners"] if row["id"] == learner_id)
    return row


def longest_call(job: Job, first: float, last: float) -> float:
    return max(one["longest_s"] for one in job.events("call") if first <= one["at"] < last)


def test_torchrun_restarts_an_island_whose_rank_was_killed(run: Any, ranks: Start, process: Any) -> None:
    syncer = run.syncer()
    common = {"syncer": syncer.endpoint, "ledger_dir": str(run.ledgers), "step_s": STEP_S}
    other = ranks("train", 1, how="alone", data=1, learner_id="other", **common)
    island = process(TorchrunJob, "train", 2, how="fsdp", learner_id="island", **common)
    for name in ("island", "other"):
        syncer.wait_merges(name, 4, start=0)
    first = [one["incarnation"] for one in island.every("joined")]
    assert first[0] == first[1] == lives(syncer, "island")["incarnation"]

    start, killed = island.mark(), time.monotonic()
    os.kill(island.pid(1), signal.SIGKILL)
    again = [one["incarnation"] for one in island.every("joined", start=start, errors=False)]
    assert again[0] == again[1] != first[0]
    syncer.wait_merges("island", 4)
    syncer.wait_merges("other", 4)
    row = lives(syncer, "island")
    assert (row["lives"], row["incarnation"], row["state"]) == (2, again[0], "live")
    back = time.monotonic()

    island.tell("stop")
    other.tell("stop")
    for done in island.every("done", start=start, errors=False):
        assert (done["stats"]["state"], done["incarnation"]) == ("closed", again[0])
    assert island.process.wait() == 0
    (report,) = other.finish()
    assert report["stats"]["state"] == "closed"
    assert report["stats"]["reconnects"] == 0
    assert longest_call(other, killed, back) < max(1.0, 2 * longest_call(other, 0.0, killed))
    run.end(syncer)  # exact: what the dead incarnation had under way was not merged twice


def test_an_island_comes_back_with_another_number_of_ranks(run: Any, ranks: Start) -> None:
    """2 ranks, killed; 1; 3. An island of another kind is there all along."""
    syncer = run.syncer()
    common = {"syncer": syncer.endpoint, "ledger_dir": str(run.ledgers), "step_s": STEP_S}
    other = ranks("train", 2, how="ddp", data=1, learner_id="other", **common)
    seen: list[str] = []
    for how, size in (("fsdp", 2), ("alone", 1), ("fsdp", 3)):
        start = syncer.mark()
        island = ranks("train", size, how=how, learner_id="island", **common)
        seen.append(island.wait("joined")["incarnation"])
        for name in ("island", "other"):
            syncer.wait_merges(name, 4, start=start)
        row = lives(syncer, "island")
        assert (row["lives"], row["incarnation"], row["state"]) == (len(seen), seen[-1], "live")
        if size < 3:
            island.end()
    assert len(set(seen)) == 3
    for job in (island, other):
        job.tell("stop")
        for done in job.finish():
            assert done["finite"]
            assert done["stats"]["ranks"] == job.ranks
    run.end(syncer)


def test_a_rank_that_outlives_its_island_is_not_heard(run: Any, ranks: Start, tap: Any) -> None:
    """It stands still in mid-upload while the others die and the island comes back without it; then it goes on."""
    syncer = run.syncer()
    relay = tap(syncer)
    common = {"ledger_dir": str(run.ledgers), "step_s": STEP_S, "learner_id": "island"}
    first = ranks("train", 2, each=[{"syncer": syncer.endpoint}, {"syncer": relay.endpoint}], how="fsdp", **common)
    syncer.wait_merges("island", 2, start=0)
    old = first.wait("joined")["incarnation"]
    held = relay.hold("up", message="chunk", at=200).wait()  # of rank 1: nobody else goes through the relay
    os.kill(first.pid(1), signal.SIGSTOP)
    first.kill(0)
    start = syncer.mark()
    held.release()
    second = ranks("train", 2, how="fsdp", syncer=syncer.endpoint, **common)
    new = second.wait("joined")["incarnation"]
    syncer.wait_merges("island", 2, start=start)
    os.kill(first.pid(1), signal.SIGCONT)
    assert first.wait("exited", 1)["status"] == 1
    assert first.events("error", 1)
    syncer.wait_merges("island", 4)
    assert not [e for e in syncer.events[start:] if e["event"] == "merge" and old in str(e)]
    assert (lives(syncer, "island")["lives"], lives(syncer, "island")["incarnation"]) == (2, new)
    # Nor can anybody speak for it: its number is taken, and its session is over.
    with RawPeer(syncer.endpoint) as peer:
        peer.send("lane", pack({"part": []}), incarnation=int(old, 16), session=1, part=1, parts=2, transfer=1)
        assert "rehello" in [message.name for message in peer.rest()]
    second.tell("stop")
    second.finish()
    run.end(syncer)
