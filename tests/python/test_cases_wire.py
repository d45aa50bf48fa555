"""What a peer may not say to a running syncer, said by hand: it costs the sender its connection and nobody else.

One native syncer and one real learner serve the whole file. After every case the learner has been merged again, has
not left, and no call of its training thread took long. Wire cases D1 (framing), D3 (handshake), D4 (push).
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from raw_learner import ANCHOR, IMAGE, RawLearner, hello_body, layout_of, step_body
from zmtp import Message, RawPeer, checksum, frame, header, pack

from diloco.testing import SyncerProcess, TinyLearner
from diloco.testing.tiny_learner import make_model

pytestmark = pytest.mark.timeout(60)

WIDTH, DEPTH = 8, 1
LAYOUT = layout_of(make_model(WIDTH, DEPTH, 0))
SETTINGS: dict[str, Any] = {
    "sync_every": 4, "num_fragments": 2, "wire_dtype": "f32", "run_id": "wire", "max_learners": 4,
    "heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 20, "chunk_bytes": 512, "credit_window_bytes": 512,
}  # fmt: skip


class Cluster:
    def __init__(self, stack: ExitStack) -> None:
        self.syncer = stack.enter_context(SyncerProcess(**SETTINGS))
        options = {"width": WIDTH, "depth": DEPTH, "run_id": "wire", "step_time_s": 0.004}
        self.steady = stack.enter_context(TinyLearner(self.syncer.endpoint, "steady", **options))
        self.syncer.wait_merges("steady", 2, start=0)

    def join(self, **hello: Any) -> RawLearner:
        return RawLearner(self.syncer.endpoint, LAYOUT, **{"run_id": "wire"} | hello)

    def peer(self) -> RawPeer:
        return RawPeer(self.syncer.endpoint)

    def left(self, learner_id: str, start: int) -> str:
        """Why the syncer thinks that this learner has left."""
        return self.syncer.wait_for("leave", lambda event: event["learner"] == learner_id, start=start)["why"]


@pytest.fixture(scope="module")
def whole() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture
def cluster(whole: Cluster) -> Iterator[Cluster]:
    """The running cluster; afterwards everybody else must have been left alone."""
    events, steps = whole.syncer.mark(), whole.steady.mark()
    yield whole
    whole.syncer.wait_merges("steady", 2)
    left = [event for event in whole.syncer.events[events:] if event["event"] == "leave"]
    assert "steady" not in {event["learner"] for event in left}
    made = [event for event in whole.steady.events[steps:] if event["event"] == "step"]
    assert made and {event["state"] for event in made} == {"training"}
    assert max(event["in_diloco_s"] for event in made) < 1.0
    assert all(event["held_out"] < 10 for event in made)  # nothing bad got into the weights
    assert not [line for line in whole.syncer.stderr_lines if "please report" in line]


def refusal(messages: list[Message]) -> dict[str, Any]:
    """The one REJECT among the last messages of a connection."""
    refused = [message.body() for message in messages if message.name == "reject"]
    assert len(refused) == 1, [message.name for message in messages]
    return refused[0]


# ---- D1: bytes that are no frames, frames that are no messages ----


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("greet", [False, True], ids=["raw", "greeted"])
def test_random_bytes(cluster: Cluster, greet: bool, sized: Any) -> None:
    for seed in range(sized("seeds", 20, 400)):
        with RawPeer(cluster.syncer.endpoint, greet=greet) as peer:
            with suppress(OSError):  # it may have been cut already
                peer.raw(noise(seed, 1 + 300 * (seed % 20)))
                peer.socket.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError, AssertionError, struct.error):
                while True:
                    peer._frame()


STEP = step_body(1, 1, 8)
# What the connection of a joined learner ends with: (bytes after the session's fields are known, why).
DAMAGED: dict[str, tuple[Callable[[dict[str, int]], bytes], str]] = {
    "bad_magic": (lambda s: frame(header("step", STEP, magic=b"HTTP", **s), True) + frame(STEP), "bad magic"),
    "no_header": (lambda s: frame(b"x"), "a header has 144 bytes, this one 1"),
    "empty_frame": (lambda s: frame(b""), "a header has 144 bytes, this one 0"),
    "header_cut_short": (lambda s: frame(header("step", STEP, **s)[:143], True) + frame(STEP), "this one 143"),
    "header_too_long": (lambda s: frame(header("step", STEP, **s) + b"1", True) + frame(STEP), "this one 145"),
    "header_damaged": (
        lambda s: frame(header("step", STEP, header_checksum=1, **s), True) + frame(STEP),
        "header checksum does not match",
    ),
    "payload_damaged": (
        lambda s: frame(header("step", STEP, checksum=checksum(STEP) ^ 1, **s), True) + frame(STEP),
        "STEP payload does not match its checksum",
    ),
    "payload_longer": (
        lambda s: frame(header("step", STEP, payload_bytes=99, **s), True) + frame(STEP),
        "STEP announces a payload of 99 bytes and has 32",
    ),
    "payload_missing": (lambda s: frame(header("step", STEP, **s)), "STEP announces a payload of 32 bytes and has 0"),
    "payload_of_2_to_the_64": (
        lambda s: frame(header("chunk", b"1", payload_bytes=2**64 - 1, **s), True) + frame(b"1"),
        "CHUNK announces a payload of 18446744073709551615 bytes",
    ),
    "three_frames": (lambda s: frame(header("step", STEP, **s), True) + frame(STEP, True) + frame(b""), ""),
    "over_the_limit_of_its_type": (
        lambda s: frame(header("credit", b"1", **s), True) + frame(b"1"),
        "CREDIT with a payload of 1 bytes, at most 0 are allowed",
    ),
    "unknown_type": (lambda s: frame(header(99, STEP, **s), True) + frame(STEP), "unknown message type 99"),
    "type_zero": (lambda s: frame(header(0, STEP, **s), True) + frame(STEP), "unknown message type 0"),
    "part_that_does_not_exist": (
        lambda s: frame(header("step", STEP, part=1, **s), True) + frame(STEP),
        "part 1 of 1 does not exist",
    ),
    "reserved_byte": (
        lambda s: frame(header("step", STEP, reserved1=1, **s), True) + frame(STEP),
        "reserved header bytes are not zero",
    ),
    "other_protocol_after_hello": (
        lambda s: frame(header("step", STEP, protocol=2, **s), True) + frame(STEP),
        "protocol version 2, expected 1",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_message_of_a_joined_learner(cluster: Cluster, case: str) -> None:
    make, why = DAMAGED[case]
    start = cluster.syncer.mark()
    with cluster.join() as raw:
        fields = {"session": raw.session, "epoch": raw.epoch, "incarnation": raw.incarnation}
        raw.control.raw(make(fields))
        raw.control.rest()
        raw.bulk.rest()  # both connections go
    assert why in cluster.left("raw", start)


def test_a_frame_announced_beyond_every_limit_ends_the_connection_unread(cluster: Cluster) -> None:
    before = cluster.syncer.memory_bytes()
    for size in (1 << 30, 1 << 62, 2**63, 2**64 - 1):
        with cluster.peer() as peer:
            peer.raw(struct.pack(">BQ", 2, size))
            assert peer.rest() == []
    assert cluster.syncer.memory_bytes() < before + (16 << 20)


def test_hello_cut_at_many_places_is_no_hello(cluster: Cluster, sized: Any) -> None:
    start = cluster.syncer.mark()
    body = pack(hello_body(LAYOUT, "torn", run_id="wire"))
    whole = frame(header("hello", body, incarnation=5), True) + frame(body)
    for size in range(0, len(whole), sized("bytes from one cut to the next", 61, 1)):
        with cluster.peer() as peer:
            peer.raw(whole[:size])
    with cluster.join(learner_id="after") as raw:  # the syncer has dealt with all of them
        raw.adopt_all()
    assert "torn" not in {event.get("learner") for event in cluster.syncer.events[start:]}


# ---- D1, D3: messages a learner does not send ----

RESERVED = {
    32: "MARKER", 33: "DONOR_OFFER", 34: "DONOR_REQUEST", 35: "DONOR_CHUNK", 36: "FINISH", 37: "FINISH_ACK", 38: "CTL",
}  # fmt: skip


@pytest.mark.parametrize("joined", [False, True], ids=["stranger", "joined"])
@pytest.mark.parametrize("kind", RESERVED)
def test_reserved_types_are_refused_by_name(cluster: Cluster, kind: int, joined: bool) -> None:
    with ExitStack() as stack:
        if joined:
            raw = stack.enter_context(cluster.join())
            raw.say(kind)
            messages = raw.control.rest()
        else:
            peer = stack.enter_context(cluster.peer())
            peer.send(kind)
            messages = peer.rest()
        refused = refusal(messages)
    assert refused["code"] == "malformed"
    assert f"message type {RESERVED[kind]} is reserved and not spoken yet" in refused["text"]


@pytest.mark.parametrize(
    "kind", ["welcome", "reject", "rehello", "arm", "pull", "verdict", "status_reply", "probe_reply"]
)
def test_the_syncers_own_messages_are_not_a_learners(cluster: Cluster, kind: str) -> None:
    start = cluster.syncer.mark()
    with cluster.join() as raw:
        raw.say(kind)
        refused = refusal(raw.control.rest())
    assert "protocol violation by 'raw'" in refused["text"] and "not a message a learner sends" in refused["text"]
    assert "not a message a learner sends" in cluster.left("raw", start)


BAD_BODIES: dict[str, tuple[str, bytes, str]] = {
    "step_cut_short": ("step", STEP[:31], "at least 32 are needed"),
    "step_that_lies": ("step", struct.pack("<QQQQ", 1, 1, 8, 2**60), "announces 1152921504606846976 adoptions"),
    "step_of_another_plan": ("step", step_body(1, 1, 8, [(7, (1, 1))]), "STEP adopts fragment 7"),
    "heartbeat_of_noise": ("heartbeat", noise(3, 60), "HEARTBEAT"),
    "heartbeat_without_keys": ("heartbeat", pack({}), "is missing"),
    "begin_of_noise": ("begin", noise(4, 60), "BEGIN"),
    "begin_nested_too_deep": ("begin", b"\x91" * 1000 + b"\x90", "BEGIN"),
    "begin_with_a_count_that_lies": ("begin", b"\xdf\xff\xff\xff\xff", "BEGIN"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_body(cluster: Cluster, case: str) -> None:
    kind, body, words = BAD_BODIES[case]
    with cluster.join() as raw:
        raw.say(kind, body)
        refused = refusal(raw.control.rest())
    assert refused["code"] == "malformed"
    assert words in refused["text"]


# ---- D3: who may join ----

MIB = 1 << 20


def tensors(**changes: Any) -> list[dict[str, Any]]:
    """The run's layout with the first tensor changed."""
    return [LAYOUT[0] | changes, *LAYOUT[1:]]


def swapped() -> list[dict[str, Any]]:
    """The same sizes in the same order under other names."""
    names = [one["name"] for one in LAYOUT]
    names[0], names[1] = names[1], names[0]
    return [one | {"name": name} for one, name in zip(LAYOUT, names, strict=True)]


HELLOS: dict[str, tuple[dict[str, Any], str, str]] = {
    "other_run": ({"run_id": "tuesday"}, "run_id", "the run here is 'wire', learner 'raw' belongs to run 'tuesday'"),
    "no_run": ({"run_id": ""}, "run_id", "belongs to run ''"),
    "operator": ({"role": 1}, "role", "only the role 'learner' is spoken"),
    "monitor": ({"role": 2}, "role", "only the role 'learner' is spoken"),
    "role_that_does_not_exist": ({"role": 3}, "malformed", "role is 3, at most 2 is allowed"),
    "no_name": ({"learner_id": ""}, "malformed", "learner_id is empty"),
    "long_name": ({"learner_id": "x" * 65}, "malformed", "learner_id has 65 bytes, at most 64 are allowed"),
    "name_with_control_characters": ({"learner_id": "a\nb"}, "malformed", "control characters"),
    "name_that_is_no_text": ({"learner_id": "\udcff\udcfe"}, "malformed", "UTF-8"),
    "other_setting": ({"settings": {"sync_every": "99"}}, "settings", "asks for 99, the run has 4"),
    "unknown_setting": ({"settings": {"sync_evry": "4"}}, "settings", "did you mean"),
    "no_tensors": ({"layout": []}, "malformed", "the layout has no tensors"),
    "other_shape": ({"layout": tensors(shape=[4, 16])}, "layout", "this learner has float32 (4, 16), the run has"),
    "other_dtype": ({"layout": tensors(dtype=1)}, "layout", "this learner has bfloat16"),
    "dtype_that_does_not_exist": ({"layout": tensors(dtype=9)}, "malformed", "dtype is 9, at most 3"),
    "one_tensor_less": ({"layout": LAYOUT[1:]}, "layout", "'0.weight': this learner has it not at all"),
    "same_sizes_other_names": ({"layout": swapped()}, "layout", "parameter '0.weight': this learner has float32 (8,)"),
    "one_tensor_twice": ({"layout": [*LAYOUT, LAYOUT[0]]}, "malformed", "tensor '0.weight' appears twice"),
    "more_elements_than_2_to_the_62": (
        {"layout": tensors(shape=[2**32, 2**32])},
        "malformed",
        "tensor '0.weight' has more than 2^62 elements",
    ),
    "negative_size": ({"layout": tensors(shape=[-1, 8])}, "malformed", "non-negative"),
    "more_versions_than_tensors": ({"adopted": [[1, 1]] * 50, "merged_to": [0] * 50}, "malformed", "more fragments"),
    "epoch_that_would_wrap": ({"highest_epoch": 2**64 - 1}, "malformed", "highest_epoch is 18446744073709551615"),
    "version_that_would_wrap": ({"adopted": [[1, 2**64 - 1]], "merged_to": [0]}, "malformed", "adopted[0] is 184467"),
    "accounts_that_do_not_match": ({"adopted": [[1, 1]], "merged_to": []}, "malformed", "merged_to has 0 entries"),
}


@pytest.mark.parametrize("case", HELLOS)
def test_hello_that_is_refused(cluster: Cluster, case: str) -> None:
    changes, code, words = HELLOS[case]
    with cluster.peer() as peer:
        peer.send("hello", pack(hello_body(LAYOUT, "raw", **{"run_id": "wire"} | changes)), incarnation=5)
        refused = refusal(peer.rest())
    assert refused["code"] == code
    assert words in refused["text"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "HELLO"),
        (noise(8, 500), "HELLO"),
        (pack([1, 2]), "must be a map"),
        (pack(hello_body(LAYOUT, "raw"))[:-1], "HELLO"),
        (b"\x82" + pack("pid") + pack(1) + pack("pid") + pack(2), "HELLO"),
        (pack({"layout": 7}), "is missing"),
        (b"\xdd\xff\xff\xff\xff" * 100, "HELLO"),
    ],
    ids=["empty", "noise", "list", "cut", "same_key_twice", "keys_missing", "counts_that_lie"],
)
def test_hello_that_cannot_be_read(cluster: Cluster, body: bytes, words: str) -> None:
    before = cluster.syncer.memory_bytes()
    with cluster.peer() as peer:
        peer.send("hello", body, incarnation=5)
        refused = refusal(peer.rest())
    assert refused["code"] == "malformed"
    assert words in refused["text"]
    assert cluster.syncer.memory_bytes() < before + 16 * MIB


@pytest.mark.parametrize("protocol", [0, 2, 65535], ids=["older", "newer", "newest"])
def test_another_protocol_is_refused_naming_both(cluster: Cluster, protocol: int) -> None:
    with cluster.peer() as peer:
        peer.send("hello", b"whatever that version says", incarnation=5, protocol=protocol)
        refused = refusal(peer.rest())
    assert refused["code"] == "protocol"
    assert f"this syncer speaks protocol 1, the learner speaks {protocol}" in refused["text"]
    assert "install the same diloco version on both sides" in refused["text"]


def test_incarnation_zero_is_nobodys(cluster: Cluster) -> None:
    with cluster.peer() as peer:
        peer.send("hello", pack(hello_body(LAYOUT, "raw", run_id="wire")), incarnation=0)
        assert "the incarnation is 0" in refusal(peer.rest())["text"]


def test_the_name_of_a_live_learner_is_taken(cluster: Cluster) -> None:
    with cluster.peer() as peer:
        peer.send("hello", pack(hello_body(LAYOUT, "steady", run_id="wire")), incarnation=5)
        refused = refusal(peer.rest())
    assert refused["code"] == "duplicate_id"
    assert "'steady' is taken by a live learner" in refused["text"] and f"pid {cluster.steady.pid}" in refused["text"]


def test_the_incarnation_of_another_learner_is_taken(cluster: Cluster) -> None:
    theirs = int(cluster.syncer.wait_for("join", lambda event: event["learner"] == "steady")["incarnation"], 16)
    with cluster.peer() as peer:
        peer.send("hello", pack(hello_body(LAYOUT, "thief", run_id="wire")), incarnation=theirs)
        refused = refusal(peer.rest())
    assert refused["code"] == "learner_id"
    assert "belongs to learner 'steady', not 'thief'" in refused["text"]


def test_too_many_learners(cluster: Cluster) -> None:
    with ExitStack() as stack:
        for number in range(3):  # with the steady one: max_learners
            stack.enter_context(cluster.join(learner_id=f"raw-{number}"))
        peer = stack.enter_context(cluster.peer())
        peer.send("hello", pack(hello_body(LAYOUT, "raw-3", run_id="wire")), incarnation=5)
        refused = refusal(peer.rest())
    assert refused["code"] == "full"
    assert "max_learners = 4 learners are here already" in refused["text"]


def test_a_second_hello_begins_a_new_session_and_the_old_one_is_void(cluster: Cluster) -> None:
    with cluster.join() as raw:
        old = raw.session
        raw.say("hello", pack(hello_body(LAYOUT, "raw", run_id="wire")))
        raw.session = raw.control.expect("welcome").header["session"]
        assert raw.session != old
        raw.say("chunk", b"late", on=raw.bulk, session=old, transfer=1, total=4)
        raw.bulk.expect("rehello")
        raw.say("step", STEP, session=old)
        raw.control.expect("rehello")
        raw.say("step", STEP)  # the new one is alive
        raw.say("heartbeat", pack({"probe": True, "discarded": {}, "lr": 0}))
        assert raw.control.expect("heartbeat").header["session"] == raw.session


def test_a_frame_of_an_unknown_session_is_answered_with_rehello(cluster: Cluster) -> None:
    """What a DEALER queued for a syncer that was restarted; nothing of it counts, and HELLO is welcome after it."""
    with cluster.peer() as peer:
        for kind, body in {"step": STEP, "chunk": b"x", "credit": b"", "goodbye": b"", "begin": b""}.items():
            peer.send(kind, body, session=12345, incarnation=5)
            assert peer.receive().name == "rehello"
        peer.send("hello", pack(hello_body(LAYOUT, "raw", run_id="wire")), incarnation=5)
        peer.expect("welcome")


def test_a_session_belongs_to_its_connection(cluster: Cluster) -> None:
    """Knowing another learner's session number is of no use."""
    start = cluster.syncer.mark()
    with cluster.join(learner_id="owner") as owner, cluster.join(learner_id="thief") as thief:
        for kind in ("goodbye", "step"):
            thief.say(kind, STEP if kind == "step" else b"", session=owner.session, incarnation=owner.incarnation)
            thief.control.expect("rehello")
        owner.say("heartbeat", pack({"probe": True, "discarded": {}, "lr": 0}))
        owner.control.expect("heartbeat")
        assert not [event for event in cluster.syncer.events[start:] if event["event"] == "leave"]


@pytest.mark.parametrize("wrong", ["token", "session", "second"])
def test_lane_that_is_not_the_sessions(cluster: Cluster, wrong: str) -> None:
    with cluster.join() as raw, cluster.peer() as lane:
        token = raw.welcome["lane_token"]
        session = raw.session + (wrong == "session")
        lane.send("lane", session=session, transfer=token ^ (wrong == "token"), incarnation=raw.incarnation)
        assert [message.name for message in lane.rest()] == ["rehello"]
        raw.adopt_all()  # its own lane goes on


# ---- D4: contributions ----


def test_chunk_without_begin(cluster: Cluster) -> None:
    with cluster.join() as raw:
        raw.chunk(b"1234", transfer=1)
        assert "CHUNK without BEGIN" in refusal(raw.control.rest())["text"]


def test_contribution_without_a_pull(cluster: Cluster) -> None:
    with cluster.join() as raw:
        raw.adopt_all()
        asked = {"fragment": 0, "round": 1, "merged_to": 0}
        raw.begin(raw.begin_body(Message("pull", {}, pack(asked))) | {"to": 8, "c_steps": 1}, raw.sizes[0])
        assert "contribution to fragment 0 without a PULL" in refusal(raw.control.rest())["text"]


# What BEGIN may not say when a contribution was asked for: (changes of the body, added to the announced size, words).
BEGINS: dict[str, tuple[dict[str, Any], int, str]] = {
    "fragment_that_does_not_exist": ({"fragment": 9}, 0, "BEGIN for fragment 9; the plan has 2"),
    "image": ({"kind": IMAGE}, 0, "a learner may not send images"),
    "kind_that_does_not_exist": ({"kind": 3}, 0, "kind is 3, at most 2"),
    "no_steps": ({"c_steps": 0}, 0, "contribution of 0 steps"),
    "no_tokens": ({"from": 8, "to": 8}, 0, "over tokens [8, 8)"),
    "backwards": ({"from": 9, "to": 3}, 0, "interval [9, 3) is backwards"),
    "base_in_the_future": ({"base": [1, 1 << 40]}, 0, "is in the future"),
    "base_of_a_later_epoch": ({"base": [1 << 40, 0]}, 0, "is in the future"),
    "one_byte_more": ({}, 1, "the plan says"),
    "one_byte_less": ({}, -1, "the plan says"),
    "nothing": ({}, -(1 << 60), "BEGIN announces 0 bytes"),
    "ten_times": ({}, 9 * 600, "the plan says"),
    "2_to_the_64": ({}, 1 << 70, "BEGIN announces 18446744073709551615 bytes"),
    "anchor_of_another_size": ({"kind": ANCHOR}, 4, "the plan says"),
    "incarnation_twice": ({"merged": [[7, 1], [7, 2]]}, 0, "repeats an incarnation"),
}


@pytest.mark.parametrize("case", BEGINS)
def test_begin_that_is_refused(cluster: Cluster, case: str) -> None:
    changes, more, words = BEGINS[case]
    before = cluster.syncer.memory_bytes()
    with cluster.join() as raw:
        pull = raw.pulled()
        total = raw.sizes[pull.body()["fragment"]] + more
        raw.begin(raw.begin_body(pull, **changes), max(0, min(total, 2**64 - 1)))
        refused = refusal(raw.control.rest())
    assert refused["code"] == "malformed"
    assert words in refused["text"]
    assert cluster.syncer.memory_bytes() < before + 16 * MIB


# What a chunk may not be after a good BEGIN of `size` bytes: (its bytes, its header's fields, words).
CHUNKS: dict[str, tuple[Callable[[int], tuple[bytes, dict[str, int]]], str]] = {
    "not_at_the_start": (lambda size: (b"12345678", {"offset": 8}), "CHUNK at byte 8; expected 0"),
    "of_another_transfer": (lambda size: (b"12345678", {"transfer": 77}), "CHUNK of transfer 77 inside transfer 1"),
    "another_total": (lambda size: (b"12345678", {"total": size + 4}), "CHUNK changes the total"),
    "empty": (lambda size: (b"", {}), "empty CHUNK"),
    "over_the_end": (lambda size: (bytes(size + 4), {}), "runs over the end"),
}


@pytest.mark.parametrize("case", CHUNKS)
def test_chunk_that_is_refused(cluster: Cluster, case: str) -> None:
    make, words = CHUNKS[case]
    with cluster.join() as raw:
        pull = raw.pulled()
        size = raw.sizes[pull.body()["fragment"]]
        raw.begin(raw.begin_body(pull), size)
        data, fields = make(size)
        raw.chunk(data, **{"total": size} | fields)
        assert words in refusal(raw.control.rest())["text"]


@pytest.mark.parametrize("second", ["begin", "transfer_again", "same_range"])
def test_what_was_begun_is_begun_once(cluster: Cluster, second: str) -> None:
    with cluster.join() as raw:
        pull = raw.pulled()
        size = raw.sizes[pull.body()["fragment"]]
        raw.begin(raw.begin_body(pull), size)
        if second == "begin":
            raw.begin(raw.begin_body(pull), size)
            words = f"BEGIN of transfer 2 while transfer 1 is at byte 0 of {size}"
        elif second == "same_range":
            raw.chunk(bytes(16), total=size)
            raw.chunk(bytes(16), total=size)
            words = "CHUNK at byte 0; expected 16"
        else:
            raw.chunk(bytes(size))
            raw.begin(raw.begin_body(raw.pulled()), size, transfer=1)
            words = "BEGIN repeats transfer 1"
        assert words in refusal(raw.control.rest())["text"]


def test_a_torn_upload_leaves_nothing_behind(cluster: Cluster, sized: Any) -> None:
    start = cluster.syncer.mark()
    places = dict.fromkeys([0, 1, 100, 143, 144, 145, 200, 400, *range(450)])
    for cut in list(places)[: sized("cuts", 8, 450)]:  # bytes of the chunk's two frames that still arrive
        with cluster.join(learner_id=f"torn-{cut}") as raw:
            pull = raw.pulled()
            size = raw.sizes[pull.body()["fragment"]]
            raw.begin(raw.begin_body(pull), size)
            fields = {"session": raw.session, "incarnation": raw.incarnation, "transfer": 1, "total": size}
            data = bytes(size)
            raw.bulk.raw((frame(header("chunk", data, **fields), True) + frame(data))[:cut])
        assert "connection" in cluster.left(f"torn-{cut}", start)
    merged = [event for event in cluster.syncer.events[start:] if event["event"] == "merge"]
    assert {member["learner"] for event in merged for member in event["members"]} <= {"steady"}
    assert cluster.syncer.status()["memory"]["payload_bytes"] <= 2 * 1000  # one round of the steady one at most


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_contribution_that_is_not_finite_is_refused_and_told(cluster: Cluster, value: float) -> None:
    start = cluster.syncer.mark()
    with cluster.join() as raw:
        for number in range(1, 4):  # max_bad_payloads
            raw.contribute(raw.pulled(), value)
            verdict = raw.control.expect("verdict").body()
            assert (verdict["reason"], verdict["readopt"]) == (5, True)  # nonfinite
            assert "NaN or Inf" in verdict["text"]
            raw.step()
            assert number <= 3
        refused = refusal(raw.control.rest())
    assert refused["code"] == "ejected"
    assert "sent 3 contributions that were not finite (max_bad_payloads)" in refused["text"]
    events = [event for event in cluster.syncer.events[start:] if event["event"] in ("merge", "refuse")]
    assert [event["reason"] for event in events if event["event"] == "refuse"] == ["nonfinite"] * 3
    assert "raw" not in {m["learner"] for event in events if event["event"] == "merge" for m in event["members"]}


def test_a_base_of_an_earlier_epoch_is_stale(cluster: Cluster) -> None:
    """F063: what was computed against the weights of an earlier life of the syncer is not applied."""
    start = cluster.syncer.mark()
    with cluster.join() as raw:
        raw.contribute(raw.pulled(), 1.0, base=[0, 3])
        verdict = raw.control.expect("verdict").body()
        assert (verdict["reason"], verdict["readopt"]) == (4, False)  # stale
        assert "is of another epoch" in verdict["text"]
    merged = [event for event in cluster.syncer.events[start:] if event["event"] == "merge"]
    assert "raw" not in {member["learner"] for event in merged for member in event["members"]}


def test_tokens_are_merged_once(cluster: Cluster) -> None:
    """A contribution that repeats tokens already merged is refused as stale, with the token named."""
    start = cluster.syncer.mark()
    with cluster.join(learner_id="again") as raw:
        pull = raw.pulled()
        fragment = pull.body()["fragment"]
        raw.contribute(pull)
        cluster.syncer.wait_merges("again", start=start)
        while raw.image()[0]["fragment"] != fragment or not merged_from(raw, cluster, fragment, start):
            pass
        while (again := raw.pulled()).body()["fragment"] != fragment:
            raw.contribute(again)
        raw.contribute(again, **{"from": 0})
        while (verdict := raw.control.expect("verdict").body())["fragment"] != fragment:
            pass
    assert "are merged already" in verdict["text"]
    merged = [event for event in cluster.syncer.events[start:] if event["event"] == "merge"]
    spans = [(m["from"], m["to"]) for e in merged for m in e["members"] if m["learner"] == "again"]
    assert sorted(spans) == sorted(set(spans))


def merged_from(raw: RawLearner, cluster: Cluster, fragment: int, start: int) -> bool:
    """Whether the adopted version is the one that its first contribution went into, or a later one."""
    rounds = [
        event["version"]
        for event in cluster.syncer.events[start:]
        if event["event"] == "merge"
        and event["fragment"] == fragment
        and "again" in {member["learner"] for member in event["members"]}
    ]
    return bool(rounds) and tuple(rounds[0]) <= raw.versions[fragment]


# ---- slow and silent readers ----


def test_a_learner_that_stops_reading_gets_the_newest_version_next(cluster: Cluster) -> None:
    """F057: 100 updates go by while it has no credit; it then gets what was begun, and the newest of each fragment."""
    with cluster.join(learner_id="sleeper", downlink_credit=64) as raw:
        first = raw.bulk.expect("begin")
        held = cluster.syncer.status()["memory"]["payload_bytes"]
        cluster.syncer.wait_merges("steady", 100)
        assert cluster.syncer.status()["memory"]["payload_bytes"] <= held + 2000
        newest = [tuple(one["version"]) for one in cluster.syncer.status()["fragments"]]
        raw.say("credit", offset=1 << 20)
        data = b""
        while len(data) < first.header["total"]:
            data += raw.bulk.expect("chunk").payload
        for _ in range(raw.fragments):
            raw.image()
        assert raw.versions.keys() == set(range(raw.fragments))
        assert all(raw.versions[p] >= newest[p] for p in raw.versions)
        assert raw.versions[0][1] > first.body()["base"][1] + 20


def test_a_monitor_asks_without_joining(cluster: Cluster) -> None:
    with cluster.peer() as peer:
        for _ in range(3):
            peer.send("status")
            assert b'"rounds_merged"' in peer.expect("status_reply").payload
        peer.send("status", bytes(5000))
        assert peer.rest() == []  # over the limit of its type


def test_a_monitor_measures_without_joining(cluster: Cluster) -> None:
    """PROBE: bytes for bytes, within its bounds, and what a WELCOME says of the run without anything to join it by."""
    limit = 256 << 10
    with cluster.peer() as peer:
        peer.send("probe", bytes(limit), transfer=7)
        reply = peer.expect("probe_reply")
        assert (reply.header["transfer"], reply.header["flags"], reply.payload) == (7, 0, b"")
        peer.send("probe", total=limit)
        assert len(peer.expect("probe_reply").payload) == limit
        for wrong, words in (({"total": limit + 1}, b"at most 262144 bytes"), ({"flags": 4}, b"flags")):
            peer.send("probe", **wrong)
            reply = peer.expect("probe_reply")
            assert reply.header["flags"] == 2
            assert words in reply.payload
        peer.send("probe", flags=1)
        reply = peer.expect("probe_reply")
        run = reply.body()
        assert (reply.header["flags"], reply.header["session"], run["lane_token"]) == (1, 0, 0)
        assert run["layout"]
        with cluster.peer() as other:  # one at a time
            other.send("probe")
            reply = other.expect("probe_reply")
            assert reply.header["flags"] == 2
            assert b"somebody else is measuring" in reply.payload
            assert 0 < reply.header["offset"] <= 2000
        peer.send("probe", bytes(limit + 1))
        assert peer.rest() == []  # over the limit of its type
