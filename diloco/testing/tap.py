"""A TCP relay on loopback that looks at DiLoCo's frames and can freeze a connection at a chosen byte of one of them.

    tap = Tap(syncer.endpoint)
    learner = TinyLearner(tap.endpoint, "a")
    hold = tap.hold("up", message="chunk", at=200)   # 200 bytes after the start of the next chunk's header
    hold.wait()                                      # the syncer now has a part of that chunk and nothing more
    learner.kill(); hold.connection.cut()            # ... and never gets the rest

Directions: "up" is towards the target. One thread relays everything; no method but wait() blocks.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

# csrc/diloco/wire/header.h: every message begins with this magic; its type is the byte at offset 6.
_MAGIC = b"DLCo"
_TYPE_AT = 6
MESSAGES = {
    "hello": 1, "welcome": 2, "reject": 3, "rehello": 4, "step": 5, "heartbeat": 6, "arm": 7, "pull": 8, "credit": 9,
    "begin": 10, "chunk": 11, "lane": 12, "verdict": 13, "goodbye": 14, "status": 15, "status_reply": 16,
    "miss": 17, "probe": 18, "probe_reply": 19,
}  # fmt: skip


@dataclass
class Hold:
    """One order to freeze; `connection` is set once it has struck."""

    direction: str
    message: int | None
    at: int
    first_index: int = 0  # without a message: only connections accepted from this one on
    connection: TapConnection | None = None
    struck: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float = 90.0) -> TapConnection:
        if not self.struck.wait(timeout_s) or self.connection is None:
            raise TimeoutError(f"no message of the held kind came by within {timeout_s:g} s")
        return self.connection


class _Way:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.forwarded = 0  # bytes passed on
        self.seen: dict[int, int] = {}  # message type -> how many headers began
        self.tail = b""  # last bytes passed on, in case a header is cut in two
        self.waiting = b""  # read, not passed on
        self.held = False
        self.ended = False

    def headers(self, data: bytes) -> list[tuple[int, int]]:
        """(offset relative to the start of `data`, type) of the headers that become recognisable with `data`."""
        known = len(self.tail)
        text = self.tail + data
        found = []
        at = text.find(_MAGIC)
        while at >= 0 and at + _TYPE_AT < len(text):
            if at + _TYPE_AT >= known and 1 <= text[at + _TYPE_AT] <= 64:
                found.append((at - known, text[at + _TYPE_AT]))
            at = text.find(_MAGIC, at + 1)
        return found


class TapConnection:
    """One connection through the tap, in the order they were accepted."""

    def __init__(self, tap: Tap, index: int, inner: socket.socket, outer: socket.socket) -> None:
        self._tap = tap
        self.index = index
        self.up = _Way(inner, outer)
        self.down = _Way(outer, inner)
        self.closed = False

    def release(self) -> None:
        """Lets what was held go on."""
        self._tap._do(lambda: self._tap._release(self))

    def cut(self) -> None:
        """Ends both sides at once; what was held is lost."""
        self._tap._do(lambda: self._tap._cut(self))

    def count(self, direction: str, message: str) -> int:
        """How many messages of this kind have begun to pass."""
        way = self.up if direction == "up" else self.down
        return way.seen.get(MESSAGES[message], 0)


class Tap:
    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self.target = (host, int(port))
        self.connections: list[TapConnection] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._holds: list[Hold] = []
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._closing = False
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_in, selectors.EVENT_READ, lambda: self._wake_in.recv(4096))
        self._thread = threading.Thread(target=self._relay, name="tap", daemon=True)
        self._thread.start()

    def hold(self, direction: str, message: str | None = None, at: int = 0) -> Hold:
        """Freezes the first connection in whose `direction` a message of this kind begins from now on, `at` bytes after
        the start of its header. Without `message`: the next connection made, at its byte `at`."""
        with self._lock:
            hold = Hold(direction, MESSAGES[message] if message else None, at, len(self.connections))
            self._holds.append(hold)
        return hold

    def cut_all(self) -> None:
        def cut() -> None:
            for connection in self.connections:
                self._cut(connection)

        self._do(cut)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._wake_out.send(b"x")
            self._thread.join()

    def __enter__(self) -> Tap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the relay thread; everything under the lock ----------------------------------------------------------------

    def _do(self, action: Callable[[], None]) -> None:
        with self._lock:
            action()
        self._wake_out.send(b"x")

    def _relay(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                with self._lock, suppress(OSError):
                    key.data()
        with self._lock:
            for connection in self.connections:
                self._cut(connection)
            self._selector.close()
            for item in (self._listener, self._wake_in, self._wake_out):
                item.close()

    def _accept(self) -> None:
        inner, _ = self._listener.accept()
        try:
            outer = socket.create_connection(self.target, timeout=5)
        except OSError:
            inner.close()
            return
        for item in (inner, outer):
            item.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            item.settimeout(5)  # a blocked receiver slows the whole tap: it is a test, not a product
        connection = TapConnection(self, len(self.connections), inner, outer)
        self.connections.append(connection)
        for way in (connection.up, connection.down):
            self._selector.register(way.source, selectors.EVENT_READ, lambda way=way: self._pass_on(connection, way))

    def _pass_on(self, connection: TapConnection, way: _Way) -> None:
        if connection.closed or way.held:
            return
        try:
            data = way.source.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._cut(connection)
            return
        direction = "up" if way is connection.up else "down"
        limit = self._limit(connection, direction, way, data)
        if limit is not None:
            way.held = True
            self._selector.unregister(way.source)
            way.waiting = data[limit:]
            data = data[:limit]
        self._send(connection, way, data)
        if limit is not None:
            for hold in [hold for hold in self._holds if hold.connection is connection and hold.direction == direction]:
                self._holds.remove(hold)
                hold.struck.set()

    def _limit(self, connection: TapConnection, direction: str, way: _Way, data: bytes) -> int | None:
        """How much of `data` may pass before a hold strikes; None: all of it."""
        limit = None
        headers = way.headers(data)
        for _, kind in headers:
            way.seen[kind] = way.seen.get(kind, 0) + 1
        for hold in self._holds:
            if hold.direction != direction or hold.connection not in (None, connection):
                continue
            if hold.connection is connection:  # claimed earlier, its byte is still to come
                start = hold.at
            elif hold.message is None:
                if connection.index < hold.first_index or way.forwarded + len(data) <= hold.at:
                    continue
                start = hold.at
            else:
                begins = [at for at, kind in headers if kind == hold.message]
                if not begins:
                    continue
                start = way.forwarded + begins[0] + hold.at
            hold.connection, hold.at = connection, start
            if start < way.forwarded + len(data):
                limit = max(0, start - way.forwarded)
                break
        return limit

    def _send(self, connection: TapConnection, way: _Way, data: bytes) -> None:
        try:
            way.target.sendall(data)
        except OSError:
            self._cut(connection)
            return
        way.forwarded += len(data)
        way.tail = (way.tail + data)[-_TYPE_AT - len(_MAGIC) :]

    def _release(self, connection: TapConnection) -> None:
        for way in (connection.up, connection.down):
            if way.held and not connection.closed:
                way.held = False
                waiting, way.waiting = way.waiting, b""
                self._send(connection, way, waiting)
                if not connection.closed:
                    self._selector.register(
                        way.source, selectors.EVENT_READ, lambda way=way: self._pass_on(connection, way)
                    )

    def _cut(self, connection: TapConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        for way in (connection.up, connection.down):
            if not way.held:
                self._selector.unregister(way.source)
            way.source.close()
