"""A learner written by hand on zmtp.RawPeer: it joins, adopts, reports and contributes, or breaks any rule."""

from __future__ import annotations

import itertools
import struct
from contextlib import suppress
from typing import Any

import torch
from zmtp import Message, RawPeer, pack

CONTRIBUTION, ANCHOR, IMAGE = 0, 1, 2
F32 = 0
_incarnations = itertools.count(0x7E57_0000)


def layout_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [{"name": name, "shape": list(p.shape), "dtype": F32, "aliases": []} for name, p in model.named_parameters()]


def hello_body(run_layout: list[dict[str, Any]], name: str, /, **changes: Any) -> dict[str, Any]:
    return {
        "learner_id": name, "run_id": "", "host": "raw", "pid": 1, "role": 0, "software": "raw test",
        "highest_epoch": 0, "layout": run_layout, "adopted": [], "merged_to": [], "settings": {}, "tokens": 0,
        "steps": 0, "clock": 0, "downlink_credit": 1 << 23,
    } | changes  # fmt: skip


def step_body(clock: int, steps: int, tokens: int, adopted: list[tuple[int, tuple[int, int]]] = ()) -> bytes:  # type: ignore[assignment]
    adoptions = b"".join(struct.pack("<IQQ", fragment, *version) for fragment, version in adopted)
    return struct.pack("<QQQQ", clock, steps, tokens, len(adopted)) + adoptions


class RawLearner:
    """Joined: control and bulk connection, every fragment's first image received but not adopted."""

    def __init__(self, endpoint: str, layout: list[dict[str, Any]], learner_id: str = "raw", **hello: Any) -> None:
        self.learner_id = learner_id
        self.incarnation = next(_incarnations)
        self.control = RawPeer(endpoint)
        self.control.send("hello", pack(hello_body(layout, learner_id, **hello)), incarnation=self.incarnation)
        welcome = self.control.expect("welcome")
        self.session, self.epoch, self.welcome = welcome.header["session"], welcome.header["epoch"], welcome.body()
        self.bulk = RawPeer(endpoint)
        self.say("lane", transfer=self.welcome["lane_token"], on=self.bulk)
        self.fragments = len(self.welcome["plan"])
        self.versions: dict[int, tuple[int, int]] = {}
        self.sizes: dict[int, int] = {}
        self.clock = self.steps = self.tokens = self.transfer = 0

    def say(self, kind: str | int, payload: bytes = b"", on: RawPeer | None = None, **fields: Any) -> None:
        fields = {"session": self.session, "epoch": self.epoch, "incarnation": self.incarnation} | fields
        (on or self.control).send(kind, payload, **fields)

    def image(self) -> tuple[dict[str, Any], bytes]:
        """The next image: its announcement and its bytes."""
        begin = self.bulk.expect("begin")
        data = b""
        while len(data) < begin.header["total"]:
            data += self.bulk.expect("chunk").payload
        body = begin.body()
        self.clock = max(self.clock, body["clock"])
        self.versions[body["fragment"]] = tuple(body["base"])
        self.sizes[body["fragment"]] = len(data)  # f32 both ways: contributions are as long
        return body, data

    def adopt_all(self) -> None:
        while len(self.versions) < self.fragments:
            self.image()

    def step(self, tokens: int = 8, steps: int = 1) -> None:
        """Reports a boundary that adopted whatever has arrived."""
        self.clock, self.steps, self.tokens = self.clock + steps, self.steps + steps, self.tokens + tokens
        self.say("step", step_body(self.clock, self.steps, self.tokens, list(self.versions.items())))

    def pulled(self) -> Message:
        """Works until it is asked for a contribution."""
        self.adopt_all()
        self.step()
        return self.control.expect("pull")

    def begin_body(self, pull: Message, **changes: Any) -> dict[str, Any]:
        asked = pull.body()
        fragment = asked["fragment"]
        return {
            "kind": CONTRIBUTION, "fragment": fragment, "round": asked["round"],
            "base": list(self.versions[fragment]), "from": asked["merged_to"], "to": self.tokens, "c_steps": self.steps,
            "clock": self.clock, "merged": [],
        } | changes  # fmt: skip

    def begin(self, body: dict[str, Any], total: int, **fields: Any) -> None:
        self.transfer += 1
        self.say("begin", pack(body), **{"on": self.bulk, "transfer": self.transfer, "total": total} | fields)

    def chunk(self, data: bytes, **fields: Any) -> None:
        self.say("chunk", data, **{"on": self.bulk, "transfer": self.transfer, "total": len(data)} | fields)

    def contribute(self, pull: Message, value: float = 0.0, **changes: Any) -> None:
        body = self.begin_body(pull, **changes)
        size = self.sizes[body["fragment"]]
        self.begin(body, size)
        self.chunk(struct.pack("<f", value) * (size // 4))

    def close(self) -> None:
        for peer in (self.control, self.bulk):
            with suppress(OSError):
                peer.close()

    def __enter__(self) -> RawLearner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
