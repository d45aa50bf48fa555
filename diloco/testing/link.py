"""A network link between two hosts, with rate, delay, jitter, reordering and loss.

    with Host("syncer") as s, Host("learner") as l, connect(s, l, rate_mbit=100, delay_ms=20, loss=0.01) as link:
        ... link.address(s) ...          # "10.x.y.1"
        link.unplug(); link.plug(); link.change(delay_ms=200)

Rate is the kernel's tbf on the sending side, loss the iptables statistic match on the receiving side. A link without
delay, jitter or reordering is a veth pair; otherwise it is a pair of TUN devices and a forwarder process of ours
(tun_forwarder.py). Every value is for one direction: a round trip takes twice delay_ms.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from diloco.testing.child import Process
from diloco.testing.hosts import Host

MTU = 1500
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Shape:
    """One direction of a link. rate_mbit None: as fast as it goes. loss, reorder: probabilities per packet."""

    rate_mbit: float | None = None
    queue_ms: float = 50.0  # how long a packet may wait for the rate before it is dropped
    delay_ms: float = 0.0
    jitter_ms: float = 0.0  # uniform extra delay in [0, jitter_ms]; order is kept
    reorder: float = 0.0
    reorder_ms: float = 5.0  # how much longer a reordered packet takes
    loss: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("reorder", "loss"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is a probability: expected [0, 1), got {getattr(self, name)}")
        for name in ("queue_ms", "delay_ms", "jitter_ms", "reorder_ms"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} expected >= 0, got {getattr(self, name)}")
        if self.rate_mbit is not None and self.rate_mbit <= 0.0:
            raise ValueError(f"rate_mbit expected > 0 or None, got {self.rate_mbit}")

    @property
    def wants_forwarder(self) -> bool:
        return bool(self.delay_ms or self.jitter_ms or self.reorder)


class _End:
    """One host's end of a link: its device there and the rules on it."""

    def __init__(self, host: Host, device: str, address: str) -> None:
        self.host, self.device, self.address = host, device, address
        self.loss = 0.0
        self.plugged = True
        self.rate_mbit: float | None = None

    def up(self, peer: str) -> None:
        self.host.run("ip", "address", "add", self.address, "peer", peer, "dev", self.device)
        # One packet is one packet: with segmentation offload a veth would lose or delay 64 KiB at a time.
        self.host.run("ip", "link", "set", self.device, "mtu", str(MTU), "gso_max_segs", "1", "up")

    def sends_at(self, rate_mbit: float | None, queue_ms: float) -> None:
        if rate_mbit is not None:
            burst = max(4 * MTU, int(rate_mbit * 1e6 / 8 * 0.004))
            words = ["rate", f"{int(rate_mbit * 1e6)}bit", "burst", str(burst), "latency", f"{queue_ms}ms"]
            self.host.run("tc", "qdisc", "replace", "dev", self.device, "root", "tbf", *words)
        elif self.rate_mbit is not None:
            self.host.run("tc", "qdisc", "delete", "dev", self.device, "root")
        self.rate_mbit = rate_mbit

    def receives(self, loss: float) -> None:
        if self.loss:
            self.host.iptables("-D", "INPUT", *self._loss_rule(self.loss))
        if loss:
            self.host.iptables("-A", "INPUT", *self._loss_rule(loss))
        self.loss = loss

    def _loss_rule(self, loss: float) -> list[str]:
        return ["-i", self.device, "-m", "statistic", "--mode", "random", "--probability", f"{loss:.9f}", "-j", "DROP"]

    def plug(self, plugged: bool) -> None:
        if plugged != self.plugged:
            self.host.iptables("-D" if plugged else "-I", "INPUT", "-i", self.device, "-j", "DROP")
            self.plugged = plugged


class Link:
    """Made by connect(); see the module. `a` and `b` are the hosts in the order given there."""

    def __init__(self, a: Host, b: Host, shape: Shape, back: Shape) -> None:
        self.a, self.b = a, b
        self._shapes = {"a": shape, "b": back}
        number = next(_numbers)
        subnet = f"10.{77 + number // 16384}.{number // 64 % 256}."
        base = number % 64 * 4
        device = f"dl{number}"
        self._a, self._b = (_End(h, device, f"{subnet}{base + i}") for i, h in ((1, a), (2, b)))
        self._forwarder: Process | None = None
        self.closed = False
        try:
            self._make(device)
            self._a.up(self._b.address)
            self._b.up(self._a.address)
            self._apply()
        except BaseException:
            self.close()
            raise

    def _make(self, device: str) -> None:
        if not any(shape.wants_forwarder for shape in self._shapes.values()):
            self.a.run("ip", "link", "add", device, "type", "veth", "peer", "name", device, "netns", self.b.path)
            return
        script = str(Path(__file__).with_name("tun_forwarder.py"))
        argv = [sys.executable, "-I", "-S", script, self.a.path, device, self.b.path, device, str(MTU)]
        self._forwarder = Process(argv, name=f"forwarder {device}")
        self._forwarder.wait_for("ready", timeout_s=30)

    def _apply(self) -> None:
        for sender, receiver, shape in ((self._a, self._b, self._shapes["a"]), (self._b, self._a, self._shapes["b"])):
            sender.sends_at(shape.rate_mbit, shape.queue_ms)
            receiver.receives(shape.loss)
        if self._forwarder:
            self.stats({name: _forwarder_values(shape) for name, shape in self._shapes.items()})
        elif any(shape.wants_forwarder for shape in self._shapes.values()):
            raise ValueError("this link was made without delay, jitter or reordering; make it with a small delay_ms")

    def address(self, host: Host) -> str:
        """This host's address on the link."""
        return self._end(host).address

    def device(self, host: Host) -> str:
        return self._end(host).device

    def _end(self, host: Host) -> _End:
        for end in (self._a, self._b):
            if end.host is host:
                return end
        raise ValueError(f"host {host.name} is not at either end of this link")

    def change(self, *, to: Host | None = None, **values: Any) -> None:
        """New values (names of Shape) from now on, for what travels towards host `to`, or for both directions."""
        for name, receiver in (("a", self.b), ("b", self.a)):
            if to is None or to is receiver:
                self._shapes[name] = replace(self._shapes[name], **values)
        self._apply()

    def unplug(self, *, to: Host | None = None) -> None:
        """Everything arriving at host `to` (default: at either end) vanishes without a trace: a pulled cable."""
        for end in (self._a, self._b):
            if to is None or to is end.host:
                end.plug(False)

    def plug(self) -> None:
        for end in (self._a, self._b):
            end.plug(True)

    def stats(self, shapes: dict[str, Any] | None = None) -> dict[str, Any]:
        """The forwarder's counters of what left a and b: packets, bytes, reordered, dropped. {} on a plain veth."""
        if not self._forwarder:
            return {}
        start = self._forwarder.mark()
        self._forwarder.tell(json.dumps(shapes or {}))
        return self._forwarder.wait_for("stats", start=start, timeout_s=30)

    def close(self) -> None:
        """Removes the link. Idempotent; the hosts stay."""
        if self.closed:
            return
        self.closed = True
        if self._forwarder:
            self._forwarder.close()
        elif self.a.alive:
            self.a.run_quietly("ip", "link", "delete", self._a.device)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _forwarder_values(shape: Shape) -> dict[str, float]:
    return {
        "delay_s": shape.delay_ms / 1e3,
        "jitter_s": shape.jitter_ms / 1e3,
        "reorder": shape.reorder,
        "reorder_s": shape.reorder_ms / 1e3,
        "seed": shape.seed,
    }


def connect(a: Host, b: Host, *, back: Shape | None = None, **shape: Any) -> Link:
    """A link between two hosts. Keywords are those of Shape, for both directions; `back`: another shape for b to a."""
    forth = Shape(**shape)
    return Link(a, b, forth, back or forth)
