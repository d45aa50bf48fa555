"""Real processes that stop, stall or start all at once (field cases F053, F057, F067), and a syncer that speaks another
protocol. Kills, restarts, duplicate ids and orphans are in test_crash.py; hosts and links in test_network.py."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toys import small_model
from zmtp import RawPeer, pack

import diloco
from diloco.testing import child_environment, syncer_program

pytestmark = pytest.mark.timeout(120)

# Whatever is freed goes back to the kernel, so that resident memory is what the process really holds.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
BIG = {"width": 512, "depth": 4, "batch": 8}  # four fragments of about a quarter Mi elements


def test_a_stopped_syncer_does_not_fill_the_learners_memory(run: Any, sized: Any, record_property: Any) -> None:
    """F053: 20 windows without an answer. The bound is two fragments above before: what was under way."""
    syncer = run.syncer(sync_every=4)
    shape = BIG | {"width": sized("width", 512, 8192), "lr": 1e-5}  # 4 MiB; 1 GiB
    learner = run.learner(syncer, "a", env=EXACT_MEMORY, step_time_s=0.004, **shape)
    syncer.wait_merges("a", 12, start=0)
    fragment = 4 * max(one["numel"] for one in syncer.status()["fragments"])
    before, longest = learner.memory_bytes(), learner.last()["longest_call_s"]
    start = learner.mark()
    syncer.pause()
    for _ in range(20):
        learner.steps(4)
    after = learner.memory_bytes()
    record_property("memory above before MiB", round((after - before) / 2**20, 2))
    record_property("bound MiB", round(2 * fragment / 2**20, 2))
    assert after <= before + 2 * fragment, f"{before=} {after=} {fragment=}"
    assert max(e["in_diloco_s"] for e in learner.events[start:] if e["event"] == "step") < max(1.0, 2 * longest)
    syncer.resume()
    syncer.wait_merges("a", 4)
    report = run.end(syncer, learner)  # exact: nothing was merged twice, what was dropped is counted with its reason
    assert report["learners"]["a"]["fragments_merged"] == report["fragments"]


def test_a_stopped_learner_costs_the_syncer_no_memory_and_nobody_time(run: Any) -> None:
    """F057: 100 updates while one learner stands still; then it catches up to the newest of every fragment."""
    syncer = run.syncer(env=EXACT_MEMORY, heartbeat_timeout_s=60, sync_every=4)
    steady = run.learner(syncer, "a", step_time_s=0.004, **BIG)
    sleeper = run.learner(syncer, "b", seed=1, step_time_s=0.004, **BIG)
    for one in (steady, sleeper):
        syncer.wait_merges(one.learner_id, 4, start=0)
    fragments = syncer.status()["fragments"]
    model = 4 * sum(one["numel"] for one in fragments)
    before = syncer.memory_bytes()
    start, events = steady.mark(), syncer.mark()
    sleeper.pause()
    syncer.wait_merges("a", 100)
    after = syncer.memory_bytes()
    newest = [tuple(one["version"]) for one in syncer.status()["fragments"]]
    # Per fragment: the version being sent and the newest; not one for each of the 100.
    assert after <= before + 3 * model, f"{before=} {after=} {model=}"
    assert max(e["in_diloco_s"] for e in steady.events[start:] if e["event"] == "step") < 1.0
    sleeper.resume()

    def caught_up() -> bool:
        (found,) = (one for one in syncer.status()["learners"] if one["id"] == "b")
        return all(tuple(have) >= want for have, want in zip(found["versions"], newest, strict=True))

    for _ in range(200):
        if caught_up():
            break
        sleeper.steps(2)
    assert caught_up()
    assert not [event for event in syncer.events[events:] if event["event"] == "leave"]
    syncer.wait_merges("b", 1)
    run.end(syncer, steady, sleeper)


def test_32_syncers_started_at_once_bind_first_and_then_say_where(tmp_path: Path, sized: Any) -> None:
    """F067: none fails, no two share a port, and stdout and the endpoint file name the same one."""
    for round_number in range(sized("rounds", 3, 100)):
        with contextlib.ExitStack() as stack:
            started = []
            for number in range(32):
                file = tmp_path / f"endpoint-{round_number}-{number}"
                argv = [syncer_program(), "--bind", "127.0.0.1:0", "--endpoint-file", str(file)]
                child = stack.enter_context(
                    subprocess.Popen(
                        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=child_environment()
                    )
                )
                stack.callback(child.kill)
                started.append((child, file))
            endpoints = []
            for child, file in started:
                assert child.stdout is not None
                said = re.fullmatch(r"listening on tcp://(127\.0\.0\.1:\d+)\n", child.stdout.readline())
                assert said
                assert said[1] in file.read_text()
                endpoints.append(said[1])
            assert len(set(endpoints)) == 32
            assert diloco.status(endpoints[-1], timeout_s=30)["learners"] == []


@pytest.fixture
def other_syncer() -> Iterator[Callable[..., str]]:
    """other_syncer(answer): the address of something that greets a learner and answers its HELLO by `answer(peer)`."""
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[RawPeer], None]) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        accepted, _ = listener.accept()
                        with RawPeer(accepted) as peer, contextlib.suppress(ConnectionError, AssertionError):
                            peer.expect("hello")
                            answer(peer)
                            peer.rest()

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start


@pytest.mark.parametrize("protocol", [0, 2], ids=["older", "newer"])
def test_a_syncer_of_another_protocol_is_an_error_that_says_so(other_syncer: Any, protocol: int) -> None:
    text = (
        f"this syncer speaks protocol {protocol}, the learner speaks 1; install the same diloco version on both sides"
    )
    address = other_syncer(
        lambda peer: peer.send("reject", pack({"code": "protocol", "text": text}), protocol=protocol)
    )
    with pytest.raises(ValueError, match=rf"\(protocol\): {re.escape(text)}"):
        diloco.Learner(small_model(), address, learner_id="a")


@pytest.mark.parametrize("answer", ["reject", "welcome"])
def test_an_answer_that_cannot_be_read_is_an_error_that_says_so(other_syncer: Any, answer: str) -> None:
    address = other_syncer(lambda peer: peer.send(answer, pack({"no": "sense"}), session=1, epoch=1))
    with pytest.raises(ValueError, match=r"\(malformed\)"):
        diloco.Learner(small_model(), address, learner_id="a")
