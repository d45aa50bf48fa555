"""Real processes die in every way and phase: the others never stop, the ledger stays exact, memory stays bounded.

Nothing here is timed: a learner "goes on" when it reports so many further steps before the (generous) deadline.
"""

import contextlib
import random
import signal
import socket
import sys
import time

import pytest

from diloco.testing import ProcessError, SyncerProcess, TinyLearner

pytestmark = pytest.mark.timeout(300)
# Whatever is freed goes back to the kernel, so that resident memory is what the syncer really holds.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
PHASES = ("before_hello", "mid_first_upload", "mid_upload", "mid_download", "idle")


def never_stopped(learner: TinyLearner, start: int, less_than_s: float = 1.0) -> float:
    """No call into DiLoCo since `start` took as long as it takes to notice that somebody is gone; the longest one."""
    steps = [event for event in learner.events[start:] if event["event"] == "step"]
    assert steps and max(event["in_diloco_s"] for event in steps) < less_than_s, learner.tail()
    assert {event["state"] for event in steps} == {"training"}
    return float(max(event["in_diloco_s"] for event in steps))


def until(learner: TinyLearner, condition, what: str, tries: int = 200):
    """Asks again after every few steps of a learner: what comes true while it trains on."""
    for _ in range(tries):
        if answer := condition():
            return answer
        learner.steps(3)
    raise AssertionError(f"{what} did not come true within {3 * tries} steps of {learner.name}")


def quiet_memory(syncer: SyncerProcess, *learners: TinyLearner) -> int:
    """Resident memory of the syncer while all learners make a pause and no round is open."""
    marks = [one.mark() for one in learners]
    for one in learners:
        one.tell("idle")
    for one, mark in zip(learners, marks, strict=True):
        one.wait_for("idle", start=mark)
    for _ in range(1000):  # each is a question and an answer
        status = syncer.status()
        if not status["rounds"]:
            break
    memory = syncer.memory_bytes()
    for one in learners:
        one.tell("go")
    return memory


def kill_in_phase(phase: str, run, syncer, tap) -> TinyLearner:
    """A learner "victim" that has just died by SIGKILL in this phase."""
    relay = tap(syncer)
    first = {"before_hello": ("up", "hello", 0), "mid_first_upload": ("up", "chunk", 200)}
    hold = relay.hold(first[phase][0], message=first[phase][1], at=first[phase][2]) if phase in first else None
    victim = run.learner(relay, "victim", seed=9)
    if hold is None:
        syncer.wait_merges("victim", start=0)
        if phase == "idle":
            victim.tell("idle")
            victim.wait_for("idle")
        else:
            hold = relay.hold("up" if phase == "mid_upload" else "down", message="chunk", at=200)
    connection = hold.wait() if hold else None
    assert victim.kill() == -signal.SIGKILL
    if connection:
        connection.cut()
    return victim


@pytest.mark.parametrize("phase", PHASES)
def test_a_learner_killed_in_any_phase_is_nobody_elses_business(phase, run, tap):
    syncer = run.syncer()
    if phase == "mid_first_upload":
        kill_in_phase(phase, run, syncer, tap)  # the one whose weights were to be everybody's first
        others = [run.learner(syncer, name, seed=i) for i, name in enumerate("ab")]
        starts = [0, 0]
    else:
        others = [run.learner(syncer, name, seed=i) for i, name in enumerate("ab")]
        for other in others:
            syncer.wait_merges(other.learner_id, start=0)
        starts = [other.mark() for other in others]
        kill_in_phase(phase, run, syncer, tap)
    after = syncer.mark()
    for other in others:
        other.steps(40)
        syncer.wait_merges(other.learner_id, 4, start=after)
        never_stopped(other, starts[others.index(other)])
    report = run.end(syncer, *others)
    lives = report["learners"].get("victim", {"incarnations": []})["incarnations"]
    if phase != "before_hello":
        assert [life["state"] for life in lives] == ["lost"]
    assert report["learners"]["a"]["fragments_merged"] == report["fragments"]


def test_memory_after_a_death_in_mid_upload_is_at_most_one_fragment_above_before(run, tap):
    syncer = run.syncer(env=EXACT_MEMORY)
    big = {"width": 1024, "depth": 4, "batch": 8}  # four fragments of about 1 Mi elements
    other = run.learner(syncer, "a", **big)
    relay = tap(syncer)
    victim = run.learner(relay, "victim", **big)
    for one in (other, victim):
        syncer.wait_merges(one.learner_id, 4, start=0)
    fragment = 4 * max(one["numel"] for one in syncer.status()["fragments"])
    before = quiet_memory(syncer, other, victim)
    connection = relay.hold("up", message="chunk", at=5000).wait()
    victim.kill()
    torn = quiet_memory(syncer, other)
    connection.cut()
    syncer.wait_merges("a", 4)
    after = quiet_memory(syncer, other)
    assert max(torn, after) <= before + fragment, f"{before=} {torn=} {after=} {fragment=}"
    run.end(syncer, other)


def test_random_kills_under_load(run, sized, record_property):
    """Four learners at full speed, two of them die again and again: nobody else stops, and a dead one's payloads are
    not kept."""
    syncer = run.syncer(env=EXACT_MEMORY)
    # Fragments of a quarter Mi elements. Merged one by one at such a pace, four learners at lr 0.1 can diverge.
    big = {"width": 512, "depth": 4, "batch": 8, "lr": 0.01, "step_time_s": 0}
    steady = [run.learner(syncer, name, seed=i, **big) for i, name in enumerate("ab")]
    victims = {name: run.learner(syncer, name, seed=ord(name), **big) for name in "xy"}
    for name in "abxy":
        syncer.wait_merges(name, 2, start=0)
    fragment = 4 * max(one["numel"] for one in syncer.status()["fragments"])
    before = quiet_memory(syncer, *steady, *victims.values())
    starts = [one.mark() for one in steady]
    dice = random.Random(20)
    kills = sized("kills", 6, 100)
    for number in range(kills):
        name = "xy"[number % 2]
        victims[name].steps(dice.randint(1, 40))
        victims[name].kill()
        victims[name] = run.learner(syncer, name, seed=number, **big)
    for name, one in victims.items():
        one.wait_for("joined", lambda event: event["state"] == "training")
        syncer.wait_merges(name)
    calls = [never_stopped(one, start) for one, start in zip(steady, starts, strict=True)]
    record_property("longest call s", round(max(calls), 4))
    after = quiet_memory(syncer, *steady, *victims.values())
    record_property("memory above before MiB", round((after - before) / 2**20, 2))
    assert after <= before + fragment, f"{before=} {after=} {fragment=}"
    report = run.end(syncer, *steady, *victims.values())
    for name in "xy":
        states = [life["state"] for life in report["learners"][name]["incarnations"]]
        assert sorted(states) == ["closed"] + ["lost"] * (kills // 2)


def test_a_killed_learner_comes_back_and_adopts_the_global_weights(run):
    syncer = run.syncer()
    steady = run.learner(syncer, "a")
    victim = run.learner(syncer, "b", seed=1)
    syncer.wait_merges("b", 4, start=0)
    steady.steps(100)
    victim.kill()
    steady.steps(20)
    back = run.learner(syncer, "b", seed=1, init_seed=77)  # other first weights: only adoption can make it good
    joined = back.wait_for("joined")
    assert joined["state"] == "training"
    assert all(version[1] > 0 for version in joined["versions"])
    assert joined["held_out"] < 0.7 * steady.wait_for("joined")["held_out"]
    syncer.wait_merges("b")
    run.end(syncer, steady, back)


@pytest.mark.parametrize("moment", ["any", "mid_upload"])
def test_a_killed_syncer_restarted_without_state_costs_nobody_anything(moment, run, tap, sized):
    """Also F063: nothing of the old epoch is applied, and no learner needs a hand."""
    old = run.syncer()
    relay = tap(old)
    learners = [run.learner(at, name, seed=i) for i, (name, at) in enumerate({"a": old, "b": relay}.items())]
    first_loss = learners[0].wait_for("joined")["held_out"]
    for _ in range(sized("restarts", 1, 10)):
        old = kill_and_restart(run, old, learners, first_loss, relay if moment == "mid_upload" else None)
    report = run.end(old, *learners)
    assert set(report["learners"]) == {"a", "b"}
    assert all(len(one["incarnations"]) == 1 for one in report["learners"].values())


def kill_and_restart(run, old, learners, first_loss: float, relay) -> SyncerProcess:
    """The new syncer, once everybody trains with it as before; with a relay, the old one dies in mid-upload there."""
    for one in learners:
        old.wait_merges(one.learner_id, 8)
        one.wait_for("step", lambda event: event["held_out"] < 0.4 * first_loss, start=one.mark(), timeout_s=60)
        one.steps(50)
    epoch = old.status()["epoch"]
    starts = [one.mark() for one in learners]
    held = relay.hold("up", message="chunk", at=200).wait() if relay else None
    assert old.kill() == -signal.SIGKILL
    before = max(event["held_out"] for one in learners for event in one.events[one.mark() - 50 :])
    assert 1.3 * before < first_loss  # or it could not be told from fresh weights
    if held:
        held.cut()
    for one, start in zip(learners, starts, strict=True):
        one.wait_for("step", lambda event: event["state"] == "away", start=start)
        one.steps(20)

    new = run.restart(old)
    for one in learners:
        one.wait_for("step", lambda event: event["state"] == "training" and event["epoch"] > epoch, start=one.mark())
    for fragment in range(len(new.wait_for("plan")["fragments"])):
        new.wait_for("recover", lambda event, fragment=fragment: event["fragment"] == fragment)
    for one, start in zip(learners, starts, strict=True):
        new.wait_merges(one.learner_id, 4)
        one.steps(20)
        steps = [event for event in one.events[start:] if event["event"] == "step"]
        worst = max(event["held_out"] for event in steps[-20:])
        assert worst < 1.3 * before, f"loss {before:.3f} before the syncer died, {worst:.3f} after it came back"
        assert max(event["in_diloco_s"] for event in steps) < 1.0
    assert all(event["version"][0] > epoch for event in new.events if event["event"] == "merge")
    return new


def test_a_paused_learner_stalls_nobody_and_is_counted_once(run, sized, record_property):
    """F081: one killed, one stopped; the third does not wait; the stopped one catches up."""
    syncer = run.syncer()
    a, b, c = (run.learner(syncer, name, seed=i) for i, name in enumerate("abc"))
    for one in (a, b, c):
        syncer.wait_merges(one.learner_id, 2, start=0)
    start = c.mark()
    a.kill()
    b.pause()
    after = syncer.mark()
    syncer.wait_for("leave", lambda event: event["learner"] == "b", start=after)
    syncer.wait_merges("c", 8)
    end = time.monotonic() + sized("seconds stopped", 0, 120)
    while time.monotonic() < end:
        c.steps(50)
    record_property("longest call s", round(never_stopped(c, start), 4))
    b.resume()
    back = syncer.wait_for("join", lambda event: event["learner"] == "b", start=after)
    syncer.wait_merges("b", 4)
    report = run.end(syncer, b, c)
    lives = report["learners"]["b"]["incarnations"]
    assert [life["incarnation"] for life in lives] == [back["incarnation"]]
    assert lives[0]["merged"] > 0


def test_a_duplicate_id_is_refused_and_the_first_is_not_disturbed(run):
    """F055."""
    syncer = run.syncer()
    first = run.learner(syncer, "twin")
    syncer.wait_merges("twin", 2, start=0)
    start = first.mark()
    second = run.learner(syncer, "twin", seed=1)
    assert second.wait() == 1
    error = second.wait_for("error")
    assert error["type"] == "ValueError"
    assert "'twin' is taken" in error["text"] and f"pid {first.pid}" in error["text"]
    assert f"host {socket.gethostname()}" in error["text"]
    syncer.wait_merges("twin", 4)
    never_stopped(first, start)
    assert not [event for event in syncer.events if event["event"] == "leave"]
    run.end(syncer, first)


def test_a_quorum_above_the_learners_there_are_waits_and_says_so(run):
    syncer = run.syncer(min_quorum=2)
    alone = run.learner(syncer, "a")
    alone.steps(12)
    text = until(alone, lambda: syncer.status()["waiting"], "status says what it waits for")
    assert "1 of 2 learners" in text and "min_quorum" in text
    syncer.wait_line("min_quorum", timeout_s=20)  # and its log says it without being asked
    alone.steps(30)  # it trains on meanwhile
    assert not [event for event in syncer.events if event["event"] == "merge"]
    second = run.learner(syncer, "b", seed=1)
    merge = syncer.wait_for("merge")
    assert {member["learner"] for member in merge["members"]} == {"a", "b"}
    until(alone, lambda: not syncer.status()["waiting"], "nothing is stuck any more")
    run.end(syncer, alone, second)


def test_sigterm_ends_the_syncer_in_good_order_and_learners_train_on(run):
    syncer = run.syncer()
    learners = [run.learner(syncer, name, seed=i) for i, name in enumerate("ab")]
    for one in learners:
        syncer.wait_merges(one.learner_id, start=0)
    assert syncer.stop() == 0
    assert syncer.wait_for("stop")["text"]
    syncer.wait_line("SIGTERM")
    for one in learners:
        one.steps(20)
        one.finish()
    lines = "\n".join(learners[0].stderr_lines)
    assert lines.count("train") >= 1


def test_sigterm_gives_up_on_a_round_that_cannot_close(run):
    syncer = run.syncer(min_quorum=2, options=["--shutdown-s", "0.5"])
    a, b = (run.learner(syncer, name, seed=i) for i, name in enumerate("ab"))
    syncer.wait_merges("a", start=0)
    b.kill()
    a.steps(30)
    assert syncer.stop(timeout_s=20) == 0
    assert syncer.wait_for("stop")["text"]
    a.finish()


JOINER = """
import json, random, sys, time
import torch, diloco
from diloco.testing.tiny_learner import make_model
torch.set_num_threads(1)
dice = random.Random(3)
for number in range(int(sys.argv[2])):
    time.sleep(dice.random() * 0.03)  # the random moment is the point of this test
    model = make_model(64, 2, number)
    began = time.monotonic()
    with diloco.Learner(model, syncer=sys.argv[1], learner_id=f"visitor-{number}", join_timeout_s=30) as learner:
        joined = time.monotonic() - began
        stats = learner.stats()
        print(json.dumps({"event": "visit", "number": number, "state": stats["state"], "versions": stats["versions"],
                          "join_s": joined}), flush=True)
print(json.dumps({"event": "end"}), flush=True)
"""


def test_joining_at_a_random_moment_never_sticks(run, program, sized, record_property):
    """F076: the welcome carries the versions and the weights follow, whatever is published meanwhile."""
    syncer = run.syncer(sync_every=4)
    steady = run.learner(syncer, "a", step_time_s=0.004)
    syncer.wait_merges("a", 4, start=0)
    visits = sized("joins", 50, 1000)
    joiner = program(syncer.endpoint, visits, code=JOINER, name="joiner")
    for number in range(visits):
        joiner.wait_for("visit", lambda event, number=number: event["number"] == number)
    joiner.wait_for("end")
    found = [event for event in joiner.events if event["event"] == "visit"]
    assert [event["state"] for event in found] == ["training"] * visits
    assert all(version[1] > 0 for event in found for version in event["versions"])
    record_property("longest join s", round(max(event["join_s"] for event in found), 3))
    assert joiner.wait() == 0
    run.end(syncer, steady)


EMBEDDED = """
import diloco, json, sys
syncer = diloco.Syncer(bind=sys.argv[1])
print(f"listening on tcp://{syncer.endpoint}", flush=True)
sys.stdin.read()
"""
WAYS = {
    "native": None,
    "cli": [sys.executable, "-m", "diloco", "syncer"],
    "script": [sys.executable, "-c", "import diloco_commands; diloco_commands.diloco_syncer()"],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_syncer_frees_its_port_at_once(way, process, learner):
    """F095: whichever way it was started, no child keeps the port."""
    first = process(SyncerProcess, program=WAYS[way])
    trainer = learner(first, "a")
    first.wait_for("init")
    first.kill()
    second = process(first.restart, program=None)  # the native one: the port is the question
    assert second.endpoint == first.endpoint
    trainer.wait_for("step", lambda event: event["epoch"] >= 2, start=trainer.mark())


def test_a_killed_python_parent_takes_its_embedded_syncer_along(program):
    """F095."""
    first = program("127.0.0.1:0", code=EMBEDDED, name="embedded")
    endpoint = first.wait_line("listening on", stream="stdout").split("//")[1]
    first.kill()
    second = program(endpoint, code=EMBEDDED, name="embedded again")
    assert second.wait_line("listening on", stream="stdout").endswith(endpoint)


def test_a_port_in_use_is_said_at_once(syncer):
    taken = syncer()
    with pytest.raises(ProcessError) as failure:
        syncer(bind=taken.endpoint)
    assert "exited with status 1" in str(failure.value)
    assert str(taken.port) in str(failure.value)


def test_many_syncers_started_together_get_a_port_each(process):
    """F067."""
    syncers = [process(SyncerProcess) for _ in range(16)]
    assert len({one.endpoint for one in syncers}) == len(syncers)


def test_an_unreachable_syncer_is_said_once_and_found_later(run):
    with socket.socket() as probe:  # bound, not listening: nobody else gets the port, connections are refused
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        early = run.learner(endpoint, "early")
        joined = early.wait_for("joined")
        assert joined["state"] != "training"
        early.steps(50)
    syncer = run.syncer(bind=endpoint)
    early.wait_for("step", lambda event: event["state"] == "training", start=early.mark())
    syncer.wait_merges("early")
    report = run.end(syncer, early)
    assert report["learners"]["early"]["merged_fraction"] > 0
    said = [line for line in early.stderr_lines if "no syncer at" in line]
    assert len(said) == 1


def test_junk_costs_the_sender_the_connection_and_nobody_else(run):
    syncer = run.syncer()
    steady = run.learner(syncer, "a")
    syncer.wait_merges("a", start=0)
    start, dice = steady.mark(), random.Random(5)
    host, port = syncer.endpoint.split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", dice.randbytes(100), dice.randbytes(70000), greeting, greeting[:30]):
        with socket.create_connection((host, int(port)), timeout=30) as peer:
            peer.sendall(junk)
            with contextlib.suppress(OSError):  # it may have been cut already
                peer.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(4096):  # until the syncer ends it
                    pass
    syncer.wait_merges("a", 2)
    never_stopped(steady, start)
    assert [one["id"] for one in syncer.status()["learners"]] == ["a"]
    run.end(syncer, steady)
