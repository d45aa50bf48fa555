"""Delay and reordering between two network namespaces, in user space: the kernel need not have netem.

One process holds a TUN device in each namespace and carries IP packets from one to the other through a queue ordered by
due time. Run by diloco.testing.link as a plain script (no torch, no package import):

    tun_forwarder.py NETNS_PATH_A DEVICE_A NETNS_PATH_B DEVICE_B MTU

stdin: JSON lines, one shape per direction, {"a": {...}, "b": {...}}: packets *leaving* a, leaving b. Keys: delay_s;
jitter_s (uniform extra delay; order is kept); reorder (probability that a packet is held back by reorder_s more, so
that later ones overtake it); queue_bytes (more than that under way is dropped). Each line is answered on stdout by
{"event": "stats", "a": {...}, "b": {...}}. End of stdin ends the process, and with it the devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from typing import Any

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_BATCH = 64  # packets read from one device before the other one gets its turn


class Direction:
    """One way: packets read from `source` are written to `target` when they are due."""

    def __init__(self, source: int, target: int, seed: int, mtu: int) -> None:
        self.source, self.target, self.mtu = source, target, mtu
        self.random = random.Random(seed)
        self.delay_s = self.jitter_s = self.reorder = self.reorder_s = 0.0
        self.queue_bytes = 8 << 20
        self.queue: list[tuple[float, int, bytes]] = []
        self.queued_bytes = self.count = 0
        self.last_due = 0.0
        self.stats = {"packets": 0, "bytes": 0, "reordered": 0, "dropped": 0}

    def shape(self, values: dict[str, Any]) -> None:
        for name in ("delay_s", "jitter_s", "reorder", "reorder_s", "queue_bytes"):
            setattr(self, name, values.get(name, getattr(self, name)))
        if "seed" in values:
            self.random.seed(values["seed"])

    def take(self, now: float) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, self.mtu)
            except BlockingIOError:
                return
            if self.queued_bytes + len(packet) > self.queue_bytes:
                self.stats["dropped"] += 1
                continue
            due = now + self.delay_s
            if self.jitter_s:
                due += self.random.random() * self.jitter_s
            due = self.last_due = max(due, self.last_due)
            if self.reorder and self.random.random() < self.reorder:
                due += self.reorder_s
                self.stats["reordered"] += 1
            self.count += 1  # keeps the order of packets that are due at the same time
            self.queued_bytes += len(packet)
            heapq.heappush(self.queue, (due, self.count, packet))

    def give(self, now: float) -> None:
        queue = self.queue
        while queue and queue[0][0] <= now:
            packet = heapq.heappop(queue)[2]
            self.queued_bytes -= len(packet)
            try:
                os.write(self.target, packet)
            except OSError:  # the device is down, or its host has no room: the packet is lost, as on a real wire
                self.stats["dropped"] += 1
                continue
            self.stats["packets"] += 1
            self.stats["bytes"] += len(packet)


def open_tun(namespace: str, device: str) -> int:
    """Creates the device in that namespace; it lives as long as the descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(namespace, os.O_RDONLY)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns({namespace}): {os.strerror(ctypes.get_errno())}")
    os.close(fd)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


def forward(ways: dict[str, Direction]) -> None:
    both = list(ways.values())
    by_source = {way.source: way for way in both}
    control = b""
    while True:
        now = time.monotonic()
        next_due = min((way.queue[0][0] for way in both if way.queue), default=None)
        timeout = None if next_due is None else max(0.0, next_due - now)
        ready, _, _ = select.select([*by_source, 0], [], [], timeout)
        now = time.monotonic()
        for fd in ready:
            if fd in by_source:
                by_source[fd].take(now)
                continue
            data = os.read(0, 65536)
            if not data:
                return
            *lines, control = (control + data).split(b"\n")
            for line in lines:
                for name, values in json.loads(line).items():
                    ways[name].shape(values)
                print(json.dumps({"event": "stats"} | {name: way.stats for name, way in ways.items()}), flush=True)
        for way in both:
            way.give(now)


def main(argv: list[str]) -> int:
    a_path, a_device, b_path, b_device, mtu = argv
    a, b = open_tun(a_path, a_device), open_tun(b_path, b_device)
    print(json.dumps({"event": "ready"}), flush=True)
    forward({"a": Direction(a, b, 1, int(mtu) + 4), "b": Direction(b, a, 2, int(mtu) + 4)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
