"""The test kit's hosts and links do what they say, measured with sockets of our own inside the namespaces."""

import os
import select
import socket
import subprocess
import sys
import threading
import time

import pytest

from diloco.testing import Host, LearnerProcess, child_environment, connect

pytestmark = pytest.mark.netns


def udp_pair(link, sender: Host, receiver: Host) -> tuple[socket.socket, socket.socket]:
    """(socket connected to the other one, socket bound on the receiver)."""
    inbox = receiver.socket()
    inbox.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: what arrives is not lost here
    inbox.bind((link.address(receiver), 0))
    inbox.settimeout(20)
    outbox = sender.socket()
    outbox.bind((link.address(sender), 0))
    outbox.connect(inbox.getsockname())
    outbox.settimeout(20)
    return outbox, inbox


def send_until_arrived(outbox: socket.socket, inbox: socket.socket, word: bytes, limit: int = 200) -> list[bytes]:
    """Everything that arrived up to and including `word`, which is sent again until it does."""
    arrived: list[bytes] = []
    inbox.settimeout(0.2)
    for _ in range(limit):
        outbox.send(word)
        try:
            while not arrived or arrived[-1] != word:
                arrived.append(inbox.recv(2048))
            return arrived
        except TimeoutError:
            continue
    raise AssertionError(f"{word!r} was sent {limit} times and never arrived")


def tcp_megabits(link, sender: Host, receiver: Host, megabytes: int) -> float:
    listener = receiver.socket(socket.SOCK_STREAM)
    listener.bind((link.address(receiver), 0))
    listener.listen()
    source = sender.socket(socket.SOCK_STREAM)
    source.connect(listener.getsockname())
    sink, _ = listener.accept()
    data = bytes(1 << 20)

    def push() -> None:
        for _ in range(megabytes):
            source.sendall(data)
        source.close()

    began = time.monotonic()
    thread = threading.Thread(target=push)
    thread.start()
    received = 0
    while part := sink.recv(1 << 20):
        received += len(part)
    thread.join()
    sink.close()
    listener.close()
    assert received == megabytes << 20
    return received * 8 / 1e6 / (time.monotonic() - began)


def test_hosts_have_their_own_network(host):
    a, b = host("a"), host("b")
    names = subprocess.run(a.command(["ip", "-o", "link"]), capture_output=True, text=True, check=True).stdout
    assert [line.split(": ")[1] for line in names.splitlines()] == ["lo"]
    with a.socket(socket.SOCK_STREAM) as one, b.socket(socket.SOCK_STREAM) as two:
        one.bind(("127.0.0.1", 29400))
        two.bind(("127.0.0.1", 29400))  # the same port, on another host


def test_a_plain_link_carries_packets(host, link):
    a, b = host("a"), host("b")
    cable = link(a, b)
    outbox, inbox = udp_pair(cable, a, b)
    assert send_until_arrived(outbox, inbox, b"hello") == [b"hello"]
    assert cable.stats() == {}


def test_delay_is_at_least_what_was_asked_for(host, link):
    a, b = host("a"), host("b")
    outbox, inbox = udp_pair(link(a, b, delay_ms=30), a, b)
    for _ in range(5):
        began = time.monotonic()
        outbox.send(b"ping")
        _, sender = inbox.recvfrom(100)
        inbox.sendto(b"pong", sender)
        outbox.recv(100)
        assert time.monotonic() - began >= 0.060


def test_delay_can_differ_by_direction_and_change(host, link):
    a, b = host("a"), host("b")
    cable = link(a, b, delay_ms=1)
    outbox, inbox = udp_pair(cable, a, b)
    cable.change(to=b, delay_ms=80)
    began = time.monotonic()
    outbox.send(b"slow")
    inbox.recv(100)
    assert time.monotonic() - began >= 0.080
    cable.change(to=b, delay_ms=1, jitter_ms=40)
    for number in range(50):
        outbox.send(b"%d" % number)
    assert [int(inbox.recv(100)) for _ in range(50)] == list(range(50))  # jitter alone keeps the order


def test_loss_is_as_asked_for(host, link):
    a, b = host("a"), host("b")
    cable = link(a, b, loss=0.1)
    outbox, inbox = udp_pair(cable, a, b)
    sent = 10_000
    for number in range(sent):
        outbox.send(b"%d" % number)
    arrived = len(set(send_until_arrived(outbox, inbox, b"end"))) - 1
    lost = (sent - arrived) / sent
    assert 0.08 < lost < 0.12, f"lost {lost:.3f}"  # more than six standard deviations
    cable.change(loss=0.0)
    for number in range(1000):
        outbox.send(b"again %d" % number)
    assert len(send_until_arrived(outbox, inbox, b"end again")) == 1001


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_the_rate_holds(host, link, delay_ms):
    a, b = host("a"), host("b")
    cable = link(a, b, rate_mbit=20, delay_ms=delay_ms)
    assert tcp_megabits(cable, a, b, 5) < 20.5


def test_the_forwarder_is_fast_enough_for_tests(host, link):
    a, b = host("a"), host("b")
    cable = link(a, b, delay_ms=1)
    assert tcp_megabits(cable, a, b, 30) > 50


def test_reordering_is_seen_counted_and_seeded(host, link):
    a, b = host("a"), host("b")

    def run(seed: int) -> tuple[list[int], int]:
        with connect(a, b, delay_ms=1, reorder=0.05, reorder_ms=40, seed=seed) as cable:
            outbox, inbox = udp_pair(cable, a, b)
            for number in range(400):
                outbox.send(b"%d" % number)
            order = [int(inbox.recv(100)) for _ in range(400)]
            return order, cable.stats()["a"]["reordered"]

    order, reordered = run(1)
    assert sorted(order) == list(range(400))
    late = {number for place, number in enumerate(order) if any(other > number for other in order[:place])}
    assert 5 <= reordered <= 50
    assert late and len(late) <= reordered
    assert run(1)[1] == reordered  # the same packets are chosen again


def test_tcp_survives_everything_at_once(host, link):
    a, b = host("a"), host("b")
    cable = link(a, b, rate_mbit=50, delay_ms=5, jitter_ms=2, reorder=0.01, loss=0.005)
    assert tcp_megabits(cable, a, b, 2) > 0.5


@pytest.mark.parametrize("delay_ms", [0, 2])
def test_unplug_stops_traffic_and_plug_resumes_it(host, link, delay_ms):
    a, b = host("a"), host("b")
    cable = link(a, b, delay_ms=delay_ms)
    outbox, inbox = udp_pair(cable, a, b)
    send_until_arrived(outbox, inbox, b"before")
    cable.unplug()
    for number in range(20):
        outbox.send(b"lost %d" % number)  # no error: it just vanishes
    inbox.settimeout(0.1)
    with pytest.raises(TimeoutError):
        while inbox.recv(100) == b"before":
            pass  # it is sent again until one has arrived
    cable.plug()
    assert send_until_arrived(outbox, inbox, b"after") == [b"after"]


def test_a_link_can_fail_in_one_direction(host, link):
    a, b = host("a"), host("b")
    cable = link(a, b)
    outbox, inbox = udp_pair(cable, a, b)
    send_until_arrived(outbox, inbox, b"before")
    sender = outbox.getsockname()
    cable.unplug(to=a)
    assert send_until_arrived(outbox, inbox, b"still arrives")[-1] == b"still arrives"
    inbox.sendto(b"answer", sender)
    outbox.settimeout(0.1)
    with pytest.raises(TimeoutError):
        outbox.recv(100)


def test_one_host_can_have_several_links(host, link):
    middle, a, b = host("middle"), host("a"), host("b")
    for other in (a, b):
        outbox, inbox = udp_pair(link(other, middle), other, middle)
        assert send_until_arrived(outbox, inbox, b"x") == [b"x"]


def test_processes_run_in_a_host_with_its_own_names(host, process, tmp_path):
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.1.1 trainer\n")
    a = host("a", hostname="trainer", hosts_file=hosts_file)
    code = "import json, socket as s; n = s.gethostname(); "
    code += "print(json.dumps({'event': 'name', 'name': n, 'address': s.gethostbyname(n)}), flush=True); input()"
    child = process(LearnerProcess, code=code, place=a)
    event = child.wait_for("name")
    assert (event["name"], event["address"]) == ("trainer", "127.0.1.1")
    assert os.readlink(f"/proc/{child.pid}/ns/net") == f"net:[{os.stat(a.path).st_ino}]"
    assert child.kill() == -9  # the process itself, not a wrapper around it


def test_nothing_is_left_after_a_killed_test_run():
    run = """
import os, sys
from diloco.testing import Host, LearnerProcess, connect
a, b = Host("a"), Host("b")
cable = connect(a, b, delay_ms=1)
child = LearnerProcess(code="import sys; sys.stdin.read()", place=a)
print(child.pid, cable._forwarder.pid, os.stat(a.path).st_ino, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as parent:
        *pids, namespace = (int(word) for word in parent.stdout.readline().split())
        fds = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    for fd in fds:
        assert select.select([fd], [], [], 20)[0]
        os.close(fd)
    users = [path for path in os.listdir("/proc") if path.isdigit() and _netns(path) == f"net:[{namespace}]"]
    assert users == []


def _netns(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def test_wrong_shapes_are_refused(host):
    a, b = host("a"), host("b")
    with pytest.raises(ValueError, match=r"loss is a probability: expected \[0, 1\), got 5"):
        connect(a, b, loss=5)
    with pytest.raises(ValueError, match="rate_mbit expected > 0 or None, got 0"):
        connect(a, b, rate_mbit=0)
    with connect(a, b) as cable, pytest.raises(ValueError, match="make it with a small delay_ms"):
        cable.change(delay_ms=5)
