"""Runs across hosts (network namespaces): bad links, pulled cables, addresses that mean something else elsewhere."""

import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from diloco.testing import Host, Link, Process, ProcessError, SyncerProcess, TinyLearner, syncer_program

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]


class Site(NamedTuple):
    """A learner on a host of its own, and its link to the syncer's host."""

    host: Host
    link: Link
    learner: TinyLearner


@pytest.fixture
def central(run, host) -> SyncerProcess:
    """A syncer on a host of its own that other hosts can reach."""
    return run.syncer(bind="0.0.0.0:0", insecure=True, place=host("syncer"))


@pytest.fixture
def site(run, host, link):
    def make(syncer: SyncerProcess, name: str, *, seed: int = 0, options=None, **shape) -> Site:
        there = host(name)
        cable = link(there, syncer.place, **shape)
        address = f"{cable.address(syncer.place)}:{syncer.port}"
        return Site(there, cable, run.learner(address, name, place=there, seed=seed, **(options or {})))

    return make


def test_a_run_over_bad_links_is_exact(run, central, site, sized, record_property):
    """Delay, jitter, reordering, loss and a narrow link; everybody contributes to every fragment."""
    a = site(central, "a", delay_ms=20, jitter_ms=5, reorder=0.02, loss=0.01, rate_mbit=50)
    b = site(central, "b", seed=1, delay_ms=2, reorder=0.01, loss=0.005)
    merges = sized("merges", 12, 240)
    for one in (a, b):
        central.wait_merges(one.learner.learner_id, merges, start=0)
        one.learner.steps(20)
        longest = one.learner.last()["longest_call_s"]
        record_property(f"longest call of {one.learner.learner_id} s", round(longest, 4))
        assert longest < 1.0  # the network is not the training thread's business
    report = run.end(central, a.learner, b.learner)
    for name in ("a", "b"):
        assert report["learners"][name]["fragments_merged"] == report["fragments"]
    assert a.link.stats()["a"]["reordered"] > 0


def test_a_pulled_cable_is_noticed_and_survived(run, central, site, sized, record_property):
    """Nothing says goodbye, no connection breaks: only silence. The other learner goes on; the cut one trains on."""
    a, b = site(central, "a"), site(central, "b", seed=1)
    for one in (a, b):
        central.wait_merges(one.learner.learner_id, 2, start=0)
    start, after = a.learner.mark(), central.mark()
    a.link.unplug()
    central.wait_for("leave", lambda event: event["learner"] == "a", start=after)
    central.wait_merges("b", 4)
    a.learner.wait_for("step", lambda event: event["state"] == "away", start=start)
    a.learner.steps(20)
    end = time.monotonic() + sized("seconds unplugged", 0, 120)
    while time.monotonic() < end:
        a.learner.steps(20)
        central.wait_merges("b", 4)
    a.link.plug()
    back = central.wait_for("join", lambda event: event["learner"] == "a", start=after)
    central.wait_merges("a", 4)
    for one in (a, b):
        longest = one.learner.last()["longest_call_s"]
        record_property(f"longest call of {one.learner.learner_id} s", round(longest, 4))
        assert longest < 1.0
    report = run.end(central, a.learner, b.learner)
    lives = report["learners"]["a"]["incarnations"]
    assert [life["incarnation"] for life in lives] == [back["incarnation"]]  # the same life, not a second one


@pytest.mark.parametrize("deaf", ["learner", "syncer"])
def test_a_link_that_fails_one_way_is_noticed(run, central, site, deaf):
    a, b = site(central, "a"), site(central, "b", seed=1)
    central.wait_merges("a", 2, start=0)
    after = central.mark()
    a.link.unplug(to=a.host if deaf == "learner" else central.place)
    central.wait_for("leave", lambda event: event["learner"] == "a", start=after)
    central.wait_merges("b", 4)
    a.link.plug()
    central.wait_merges("a", 2)
    run.end(central, a.learner, b.learner)


def test_a_slow_downlink_slows_nobody_else(run, central, site):
    """One learner behind 1 Mbit/s; the others' rounds do not wait for it beyond the grace window."""
    big = {"width": 256}
    fast = site(central, "fast", options=big)
    slow = site(central, "slow", seed=1, options=big, rate_mbit=1, queue_ms=200)
    central.wait_merges("slow", 2, start=0)
    central.wait_merges("fast", 20)
    steps = [event for event in fast.learner.events if event["event"] == "step"]
    assert max(event["in_diloco_s"] for event in steps) < 1.0
    run.end(central, fast.learner, slow.learner)


def test_the_default_is_loopback_which_no_other_host_can_reach(run, host, link, tmp_path):
    """F077: the host name resolves to 127.0.1.1; the syncer neither binds nor advertises what a name resolves to."""
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n127.0.1.1 trainer\n")
    server, other = host("server", hostname="trainer", hosts_file=hosts_file), host("other")
    cable = link(server, other)
    syncer = run.syncer(place=server)
    assert syncer.endpoint.startswith("127.0.0.1:")
    assert not [line for line in syncer.stdout_lines + syncer.stderr_lines if "127.0.1.1" in line]
    here = run.learner(syncer, "here", place=server)
    syncer.wait_merges("here", 1, start=0)
    there = run.learner(f"{cable.address(server)}:{syncer.port}", "there", place=other)
    assert there.wait_for("joined")["state"] != "training"
    there.steps(20)  # alone, and it has said so
    assert [line for line in there.stderr_lines if cable.address(server) in line]
    assert [one["id"] for one in syncer.status()["learners"]] == ["here"]
    there.close()
    run.end(syncer, here)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "10.77.0.1:0", "*:0"])
def test_an_address_others_can_reach_needs_insecure(syncer, host, bind):
    with pytest.raises(ProcessError) as failure:
        syncer(bind=bind, place=host("a"))
    assert "exited with status 2" in str(failure.value)
    assert "--insecure" in str(failure.value)


def test_learners_on_two_hosts_have_their_hosts_names(run, host, link):
    server, other = host("server"), host("other", hostname="far-away")
    cable = link(server, other)
    syncer = run.syncer(bind="0.0.0.0:0", insecure=True, place=server)
    far = run.learner(f"{cable.address(server)}:{syncer.port}", "far", place=other)
    join = syncer.wait_for("join")
    assert (join["learner"], join["host"], join["pid"]) == ("far", "far-away", far.pid)
    run.end(syncer, far)


def test_the_status_program_works_from_another_host(run, central, site, process):
    a = site(central, "a", delay_ms=5)
    central.wait_merges("a", 1, start=0)
    address = f"{a.link.address(central.place)}:{central.port}"
    code = f"import diloco, json; print(json.dumps({{'event': 'status', **diloco.status('{address}')}}), flush=True)"
    asked = process(Process, [sys.executable, "-c", code], name="monitor", place=a.host).wait_for("status")
    assert [one["id"] for one in asked["learners"]] == ["a"]
    run.end(central, a.learner)


def test_the_program_is_the_one_of_the_package():
    done = subprocess.run([syncer_program(), "--version"], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.startswith("diloco ")
