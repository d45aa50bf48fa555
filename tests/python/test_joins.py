"""Over real connections: those who crash while joining block nobody, and every life has a number of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import pytest
from raw_learner import RawLearner, hello_body, layout_of
from toys import QUICK, small_model
from zmtp import RawPeer, pack

import diloco

# Steps until it is told to end.
STAY = """
import json, select, sys, toys, diloco
said = False
with diloco.Learner(toys.small_model(), sys.argv[1], learner_id=sys.argv[2]) as learner:
    while not select.select([sys.stdin], [], [], 0.002)[0]:
        learner.step(8)
        if not said and learner.stats()["contributions_merged"] >= 8:
            said = True
            print(json.dumps({"event": "merged"}), flush=True)
"""


def test_crashed_joins_block_no_quorum(process: Any, syncer: Any, program: Any, sized: Any) -> None:
    """F084: one alone that dies while it waits; then many that die joining, by turns without a sound, after WELCOME and
    before it; then two that stay. The dead ones expire, and the counts in the log agree."""
    crashes = sized("crashed joins", 100, 300)
    s = syncer(min_quorum=2, sync_every=4, num_fragments=2, heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)
    layout = layout_of(small_model())
    silent = 0
    with ExitStack() as held:
        RawLearner(s.endpoint, layout, "first").close()
        for i in range(crashes):
            name = f"crash-{i}"
            if i % 3 == 0:
                held.enter_context(RawLearner(s.endpoint, layout, name))  # open, and never a word
                silent += 1
            elif i % 3 == 1:
                RawLearner(s.endpoint, layout, name).close()
            else:
                with RawPeer(s.endpoint) as peer:  # not even a WELCOME is read
                    peer.send("hello", pack(hello_body(layout, name)), incarnation=1 << 40 | i)
        env = {"PYTHONPATH": os.pathsep.join(sys.path)}
        stay = [program(s.endpoint, name, code=STAY, name=name, env=env) for name in ("a", "b")]
        for one in stay:
            one.wait_for("merged")
        deadline = time.monotonic() + 20  # the last of the silent ones have joined less than a heartbeat timeout ago
        while (left := sorted(one["id"] for one in s.status()["learners"] if one["state"] != "gone")) != ["a", "b"]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
        for one in stay:
            one.close_stdin()
            assert one.wait() == 0, one.tail()
        assert s.stop() == 0
    merges = [event for event in s.events if event["event"] == "merge"]
    assert {m["learner"] for merge in merges for m in merge["members"]} == {"a", "b"}
    assert all(len(merge["members"]) == 2 for merge in merges)
    joins = [event["learner"] for event in s.events if event["event"] == "join"]
    leaves = [event for event in s.events if event["event"] == "leave"]
    assert sorted(joins) == sorted(event["learner"] for event in leaves)
    assert sum(event["why"].startswith("silent for") for event in leaves) >= silent


def test_a_life_is_numbered_at_random_and_not_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """F079: the launcher's restart count is no part of it, whether it differs or, as after a lost node, does not."""
    seen = set()
    with diloco.Syncer(**QUICK, shutdown_s=0.2) as syncer:
        for count in ("0", "0", "3"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
            monkeypatch.setenv("RANK", "0")
            with diloco.Learner(small_model(), syncer.endpoint) as learner:
                seen.add(learner.incarnation)
                assert learner.learner_id.endswith("-job-0")
        learners = syncer.status()["learners"]
    assert len(seen) == 3
    assert [one["lives"] for one in learners] == [3]
    code = "import diloco, toys; print(diloco.Learner(toys.small_model(), '127.0.0.1:9', join_timeout_s=0).incarnation)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    assert other.stdout.strip() not in seen  # another process of the same name, rank and count


def test_frames_of_a_dead_life_are_refused() -> None:
    """F079: a later life of the same name has taken over; what the earlier one still says counts for nothing."""
    layout = layout_of(small_model())
    with (
        diloco.Syncer(**QUICK | {"heartbeat_timeout_s": 30.0}, shutdown_s=0.2) as syncer,
        RawLearner(syncer.endpoint, layout, "a") as dead,
        # A newcomer of its name: it is asked for a sign of life, gives none for 2 s, and is replaced.
        diloco.Learner(small_model(), syncer.endpoint, learner_id="a", join_timeout_s=20.0) as later,
    ):
        assert reject_of(dead)["code"] == "superseded"
        with RawPeer(syncer.endpoint) as peer:  # a frame of its session, on a new connection
            beat = pack({"probe": False, "discarded": {}, "lr": 0})
            peer.send("heartbeat", beat, session=dead.session, incarnation=dead.incarnation)
            assert peer.receive().name == "rehello"
        with RawPeer(syncer.endpoint) as peer:  # and its HELLO
            peer.send("hello", pack(hello_body(layout, "a")), incarnation=dead.incarnation)
            refusal = peer.receive()
            assert (refusal.name, refusal.body()["code"]) == ("reject", "superseded")
        for _ in range(20):
            later.step(8)
        assert later.stats()["reconnects"] == 0
        assert [(one["id"], one["lives"]) for one in syncer.status()["learners"]] == [("a", 2)]


def reject_of(raw: RawLearner) -> dict[str, Any]:
    """What it is told on its control connection, everything else passed over."""
    while (message := raw.control.receive()).name != "reject":
        pass
    body: dict[str, Any] = message.body()
    return body
