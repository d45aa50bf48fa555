"""diloco doctor from one host about a syncer on another: the measured link is the link there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys

from diloco.doctor import Check, LearnerSide, Report, SyncerSide, check_learner, check_syncer
from diloco.testing import Host, Process
from diloco.testing.link import Shape

pytestmark = [pytest.mark.netns, pytest.mark.timeout(200)]


def found(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def learner(place: Host, address: str, **options: Any) -> Report:
    return place.call(lambda: check_learner(LearnerSide(address, **options)))


def test_the_measured_link_is_the_link_there_is(run: Any, host: Any, link: Any, record_property: Any) -> None:
    """20 Mbit/s up, 60 Mbit/s down, 10 ms each way; and the interface that leads there."""
    server, there, nowhere = host("server"), host("there"), host("nowhere")
    shape = {"delay_ms": 10.0, "queue_ms": 100.0}
    cable = link(there, server, rate_mbit=20, back=Shape(rate_mbit=60, **shape), **shape)
    syncer = run.syncer(bind="0.0.0.0:0", insecure=True, place=server)
    address = f"{cable.address(server)}:{syncer.port}"
    report = learner(there, address, model=f"{toys.__name__}:small_model", step_s=1e-9)
    measured = found(report, "link").values
    up, down = (measured[f"{way}_bytes_per_s"] * 8 / 1e6 for way in ("up", "down"))
    record_property("measured up, down Mbit/s", f"{up:.1f}, {down:.1f}")
    assert 20 * 0.6 < up < 20 * 1.3
    assert 60 * 0.6 < down < 60 * 1.3
    assert 0.020 <= measured["round_trip_s"] < 0.5
    assert found(report, "connect").values["local_address"] == cable.address(there)
    assert found(report, "connect").values["interface"] == cable.device(there)
    # No link carries a model with every nanosecond.
    assert report.verdict.startswith("not ready: bandwidth: expected that a link needs")
    # A host without any way there.
    assert "no way leads there from this machine" in learner(nowhere, address).verdict


def test_a_host_that_does_not_answer(host: Any, link: Any) -> None:
    """The cable is pulled, or a firewall drops everything: nothing comes back."""
    server, there = host("server"), host("there")
    cable = link(there, server)
    cable.unplug()
    report = learner(there, f"{cable.address(server)}:29400", timeout_s=1.0)
    assert report.verdict.startswith(
        f"not ready: connect: expected a syncer at {cable.address(server)}:29400, got no answer"
    )
    assert "a firewall drops the packets; only this port" in report.verdict
    assert report.next == f"ping -c 3 {cable.address(server)}"


def test_a_name_that_is_loopback(run: Any, host: Any, link: Any, tmp_path: Path) -> None:
    """F077: /etc/hosts leads the host's name to 127.0.1.1. The syncer warns, and nobody else gets there."""
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n127.0.1.1 trainer\n")
    server, other = host("server", hosts_file=hosts_file), host("other")
    cable = link(server, other)
    syncer = run.syncer(bind="trainer:0", insecure=True, place=server)
    assert syncer.endpoint.startswith("127.0.1.1:")
    syncer.wait_line("bind 'trainer:0' leads to a loopback address")
    report = learner(other, f"{cable.address(server)}:{syncer.port}")
    assert "connection refused" in report.verdict
    assert report.next.startswith("diloco doctor --bind 0.0.0.0:")
    bind = f"0.0.0.0:{syncer.port}"
    taken = server.call(lambda: check_syncer(SyncerSide(bind=bind, insecure=True)))
    assert taken.verdict.startswith("not ready: port")
    assert found(taken, "address").values["addresses"] == ["127.0.0.1", cable.address(server)]
    run.end(syncer)


def test_the_program_in_a_host(process: Any, host: Any) -> None:
    import sys

    argv = [sys.executable, "-m", "diloco", "doctor", "--syncer", "10.77.0.1:29400"]
    done = process(Process, argv, name="doctor", place=host("alone"))
    assert done.wait() == 1, done.tail()
    assert "not ready: connect: expected a syncer at 10.77.0.1:29400, got 'Network is unreachable'" in done.tail()
