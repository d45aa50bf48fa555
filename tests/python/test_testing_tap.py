"""The test kit's relay: it passes everything on, sees messages, freezes at the asked byte, cuts."""

import contextlib
import socket
import threading

import pytest

from diloco.testing import Tap
from diloco.testing.tap import MESSAGES


def message(name: str, payload: bytes) -> bytes:
    """Something that begins as a frame header does (csrc/diloco/wire/header.h)."""
    return b"\x02\x90" + b"DLCo\x01\x00" + bytes([MESSAGES[name]]) + bytes(137) + payload


@pytest.fixture
def ends():
    """(client socket, server socket, tap) joined through a tap."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        tap = stack.enter_context(Tap(f"tcp://127.0.0.1:{listener.getsockname()[1]}"))
        host, port = tap.endpoint.split(":")
        client = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        server, _ = listener.accept()
        stack.enter_context(server)
        server.settimeout(20)
        yield client, server, tap


def receive(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := source.recv(size - len(data))):
        data += part
    return data


def nothing_comes(source: socket.socket) -> bool:
    source.settimeout(0.1)
    try:
        return source.recv(1) == b""
    except TimeoutError:
        return True
    finally:
        source.settimeout(20)


def test_it_passes_bytes_both_ways_unchanged(ends):
    client, server, _ = ends
    data = bytes(range(256)) * 20000
    thread = threading.Thread(target=client.sendall, args=(data,))
    thread.start()
    assert receive(server, len(data)) == data
    thread.join()
    server.sendall(b"answer")
    assert receive(client, 6) == b"answer"


def test_it_freezes_inside_the_named_message_and_goes_on(ends):
    client, server, tap = ends
    hold = tap.hold("up", message="chunk", at=200)
    first, second = message("step", b"s" * 50), message("chunk", b"c" * 500)
    client.sendall(first + second)
    connection = hold.wait(20)
    assert connection is tap.connections[0]
    passed = len(first) + 2 + 200  # two bytes of framing stand before the header
    assert receive(server, passed) == (first + second)[:passed]
    assert nothing_comes(server)
    server.sendall(b"the other direction goes on")
    assert receive(client, 27) == b"the other direction goes on"
    connection.release()
    assert receive(server, len(second) - 202) == second[202:]
    assert (connection.count("up", "step"), connection.count("up", "chunk")) == (1, 1)


def test_it_sees_a_header_that_arrives_in_pieces(ends):
    client, server, tap = ends
    hold = tap.hold("up", message="begin", at=20)
    data = message("begin", b"p" * 100)
    for byte in data[:-100]:
        client.sendall(bytes([byte]))
    hold.wait(20)
    assert receive(server, 22) == data[:22]
    assert nothing_comes(server)


def test_it_can_hold_a_new_connection_at_a_byte(ends):
    client, server, tap = ends
    tap.hold("up", at=3)
    client.sendall(b"an old connection is not meant")
    assert receive(server, 30) == b"an old connection is not meant"


def test_cut_loses_what_was_held(ends):
    client, server, tap = ends
    hold = tap.hold("up", message="chunk", at=10)
    client.sendall(message("chunk", b"c" * 500))
    hold.wait(20).cut()
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := server.recv(1000):
            received += part
    assert len(received) <= 12
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""


def test_a_hold_that_never_strikes_says_so(ends):
    with pytest.raises(TimeoutError, match="no message of the held kind"):
        ends[2].hold("down", message="welcome").wait(0.05)
