"""A peer below the product: ZMTP 3.0 (NULL mechanism) over a plain socket, and DiLoCo's header, written out by hand.

    peer = RawPeer(syncer.endpoint)
    peer.send("hello", pack({...}), incarnation=7)
    header, body = peer.expect("welcome")

It can say what no well-behaved peer says: every header field, every checksum and every byte is the caller's.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from typing import Any, NamedTuple

from diloco.testing.tap import MESSAGES

NAMES = {number: name for name, number in MESSAGES.items()}
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

# csrc/diloco/wire/header.h, docs/protocol.md: 144 bytes, little-endian.
_HEADER = struct.Struct("<4sHBBQQQIIQQHHHBBIIQQQQQ24s")
_FIELDS = (
    "magic", "protocol", "type", "flags", "session", "epoch", "incarnation", "fragment", "shard", "version_epoch",
    "version_n", "lane", "part", "parts", "codec", "reserved1", "colour", "reserved2", "transfer", "offset", "total",
    "payload_bytes", "checksum", "reserved3",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = dict.fromkeys(_FIELDS, 0) | {
    "magic": b"DLCo",
    "protocol": 1,
    "parts": 1,
    "reserved3": bytes(24),
}

_xxh = ctypes.CDLL("libxxhash.so.0").XXH3_64bits  # the native program links it
_xxh.argtypes, _xxh.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_uint64


def checksum(data: bytes) -> int:
    return int(_xxh(data, len(data)))


def header(kind: str | int, payload: bytes = b"", header_checksum: int | None = None, **fields: Any) -> bytes:
    """The header of a message with this payload; any field can be made to lie."""
    values = _DEFAULTS | {"type": MESSAGES[kind] if isinstance(kind, str) else kind}
    values |= {"payload_bytes": len(payload), "checksum": checksum(payload)} | fields
    packed = _HEADER.pack(*(values[name] for name in _FIELDS))
    return packed + struct.pack("<Q", checksum(packed) if header_checksum is None else header_checksum)


def frame(data: bytes, more: bool = False) -> bytes:
    return struct.pack(">BQ", 2 | more, len(data)) + data


class Message(NamedTuple):
    name: str
    header: dict[str, Any]
    payload: bytes

    def body(self) -> Any:
        return unpack(self.payload)


class RawPeer:
    """One connection; a DEALER, or a ROUTER when made from an accepted socket."""

    def __init__(self, at: str | socket.socket, *, greet: bool = True, timeout_s: float = 30.0) -> None:
        self._buffer = b""
        if isinstance(at, str):
            host, port = at.rsplit(":", 1)
            self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        else:
            self.socket = at
            self.socket.settimeout(timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if greet:
            kind = b"DEALER" if isinstance(at, str) else b"ROUTER"
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
            self.raw(_GREETING + bytes([4, len(ready)]) + ready)
            self._take(64)
            assert self._frame()[1] == "command"

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, kind: str | int, payload: bytes = b"", **fields: Any) -> None:
        head = header(kind, payload, **fields)
        self.raw(frame(head, more=True) + frame(payload) if payload else frame(head))

    def receive(self) -> Message:
        """The next message; ConnectionError at the end of the connection."""
        while True:
            head, what = self._frame()
            if what == "command":
                continue
            payload = self._frame()[0] if what == "more" else b""
            fields = dict(zip(_FIELDS, _HEADER.unpack(head[:136]), strict=True))
            return Message(NAMES.get(fields["type"], str(fields["type"])), fields, payload)

    def expect(self, name: str) -> Message:
        """The next message of this kind; others are passed over, a refusal is an error."""
        while True:
            message = self.receive()
            if message.name == name:
                return message
            assert message.name != "reject", message.body()

    def rest(self) -> list[Message]:
        """What still comes until the other side has closed the connection; it must, in time."""
        found = []
        try:
            while True:
                found.append(self.receive())
        except ConnectionError:
            return found

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("closed by the other side")
            self._buffer += data
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _frame(self) -> tuple[bytes, str]:
        flags = self._take(1)[0]
        size = struct.unpack(">Q", self._take(8))[0] if flags & 2 else self._take(1)[0]
        data = self._take(size)
        return data, "command" if flags & 4 else "more" if flags & 1 else "last"


# ---- MessagePack, as much of it as the protocol uses ----


def pack(value: Any) -> bytes:
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">BQ", 0xCF, value) if value >= 0 else struct.pack(">Bq", 0xD3, value)
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogateescape")
        return struct.pack(">BI", 0xDB, len(data)) + data
    if isinstance(value, dict):
        return struct.pack(">BI", 0xDF, len(value)) + b"".join(pack(k) + pack(v) for k, v in value.items())
    return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(pack, value))


def unpack(data: bytes) -> Any:
    value, end = _unpack(data, 0)
    assert end == len(data)
    return value


_SIZED = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q", 0xCB: "d"}
_COUNTED = {0xD9: ("B", "text"), 0xDA: ("H", "text"), 0xDB: ("I", "text"), 0xDC: ("H", "list"), 0xDD: ("I", "list")}
_COUNTED |= {0xDE: ("H", "map"), 0xDF: ("I", "map")}


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    tag, at = data[at], at + 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in _SIZED:
        size = struct.calcsize(_SIZED[tag])
        return struct.unpack_from(">" + _SIZED[tag], data, at)[0], at + size
    if tag in _COUNTED:
        form, kind = _COUNTED[tag]
        count = struct.unpack_from(">" + form, data, at)[0]
        at += struct.calcsize(form)
    else:
        kind, count = ("map", tag & 15) if tag < 0x90 else ("list", tag & 15) if tag < 0xA0 else ("text", tag & 31)
    if kind == "text":
        return data[at : at + count].decode(), at + count
    items = []
    for _ in range(count * (2 if kind == "map" else 1)):
        item, at = _unpack(data, at)
        items.append(item)
    return (items if kind == "list" else dict(zip(items[::2], items[1::2], strict=True))), at
