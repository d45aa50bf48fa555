"""A learner's machine: can it reach the syncer, does its model fit the run, and can link and memory carry it?"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diloco import config
from diloco._native import _C
from diloco.cli.units import bit_rate, duration, size
from diloco.doctor import machine
from diloco.doctor.model import fingerprint, load_specs
from diloco.doctor.report import Report, Wrong
from diloco.parameters import Spec

_CONNECT_S = 5.0
_ASSUMED_STEP_S = 1.0


@dataclass
class LearnerSide:
    """What to look at. `model`: see diloco.doctor.model; `step_s`: of one optimizer step, 0 = not known."""

    syncer: str
    model: str = ""
    step_s: float = 0.0
    timeout_s: float = 60.0
    memory: Callable[[], machine.Memory] = field(default=machine.memory)


def check_learner(asked: LearnerSide) -> Report:
    """Every check in turn; one that needs what an earlier one did not get is skipped. ValueError: malformed
    address."""
    return _Learner(asked).run()


class _Learner:
    def __init__(self, asked: LearnerSide) -> None:
        self.asked = asked
        self.deadline = time.monotonic() + asked.timeout_s
        host, port = _C.parse_endpoint(asked.syncer).removeprefix("tcp://").rsplit(":", 1)
        if host in ("*", "0.0.0.0") or port == "0":
            raise ValueError(
                "--syncer: expected the address that learners connect to, such as 10.0.0.1:29400, got "
                f"'{asked.syncer}', one to listen on"
            )
        self.host, self.port = host, int(port)
        self.address = f"{host}:{port}"
        self.report = Report("learner", f"DILOCO_SYNCER={self.address} python train.py")
        self.status: dict[str, Any] = {}
        self.specs: list[Spec] = []
        self.link: _C.LinkProbe | None = None
        self.staging_bytes = 0

    def run(self) -> Report:
        there = self.report.check("address", self.check_address) and self.report.check("connect", self.check_connect)
        there = there and self.report.check("syncer", self.check_syncer)
        if there:
            self.report.check("clock", self.check_clock)
            self.report.check("settings", self.check_settings)
            self.report.check("link", self.check_link)
        self.report.check("model", self.check_model)
        if self.specs and self.status:
            self.report.check("memory", self.check_memory)
            if self.link:
                self.report.check("bandwidth", self.check_bandwidth)
        return self.report

    def left_s(self) -> float:
        return max(0.1, self.deadline - time.monotonic())

    def check_address(self) -> None:
        try:
            addresses = machine.resolve(self.host)
        except OSError as error:
            raise Wrong(
                f"expected the name or IPv4 address of the syncer's host, got '{self.host}', which does not resolve "
                f"({error.strerror}); check the spelling, or give its IPv4 address",
                next=f"getent ahostsv4 {self.host}",
            ) from None
        named = self.host not in (*addresses, "localhost")
        text = f"{self.host} is {', '.join(addresses)}" if named else self.host
        if named and all(machine.is_loopback(one) for one in addresses):
            self.report.add(
                "address",
                "note",
                f"{text}: loopback, this machine itself (a line in /etc/hosts?); a syncer on another host is not "
                "reached by that name, give its address",
                addresses=addresses,
            )
        else:
            self.report.add("address", "ok", text, addresses=addresses)

    def check_connect(self) -> None:
        start = time.monotonic()
        try:
            with socket.create_connection((self.host, self.port), timeout=min(_CONNECT_S, self.left_s())) as opened:
                took = time.monotonic() - start
                local, _ = opened.getsockname()
                remote, _ = opened.getpeername()
        except OSError as error:
            raise Wrong(*self._why_no_connection(error, time.monotonic() - start)) from None
        interface = machine.interface_of(local)
        self.report.add(
            "connect",
            "ok",
            f"{remote} port {self.port} answers in {duration(took)}; from here by {local} ({interface or 'unknown'})",
            local_address=local,
            interface=interface,
            connect_s=took,
        )

    def _why_no_connection(self, error: OSError, took: float) -> tuple[str, str]:
        """The text and the next command."""
        where = f"expected a syncer at {self.address}, got "
        if error.errno == errno.ECONNREFUSED:
            if machine.is_loopback(machine.resolve(self.host)[0]):
                return (
                    f"{where}'connection refused': nothing listens on that port of this machine; start diloco-syncer",
                    f"diloco-syncer --bind {self.address}",
                )
            return (
                f"{where}'connection refused': the host is there and nothing listens on the port (or only on its "
                "loopback); start diloco-syncer there, off loopback with --bind and --insecure",
                f"diloco doctor --bind 0.0.0.0:{self.port} --insecure   # on the syncer's machine",
            )
        if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
            return (
                f"{where}no answer within {duration(took)}: the host is down or a firewall drops the packets; only "
                "this port of the syncer's host has to be open, to TCP connections from here",
                f"ping -c 3 {self.host}",
            )
        return (
            f"{where}'{error.strerror or error}': no way leads there from this machine; check address, interface and "
            f"routes",
            f"ip route get {self.host}",
        )

    def check_syncer(self) -> None:
        try:
            self.status = json.loads(_C.query_status(self.address, min(10.0, self.left_s())))
        except ConnectionError as error:
            raise self._why_no_status(str(error)) from None
        learners = self.status["learners"]
        here = sum(one["state"] != "gone" for one in learners)
        most = int(self.status["settings"]["max_learners"])
        text = (
            f"a diloco syncer, protocol {_C.PROTOCOL_VERSION}, epoch {self.status['epoch']}, {self.status['mode']}; "
            f"{here} of at most {most} learners are here"
        )
        values = {"protocol": _C.PROTOCOL_VERSION, "learners": here}
        if here >= most:
            raise Wrong(
                f"{text}: expected room for one more; let one leave, or start the syncer with a larger max_learners"
            )
        self.report.add("syncer", "ok", text + (f"; it waits: {self.status['waiting']}" if here else ""), **values)

    def _why_no_status(self, said: str) -> Wrong:
        if "was closed by the other side" in said:  # a syncer of another protocol understands only a HELLO
            try:
                protocol, _, text = _C.ask_protocol(self.address, min(10.0, self.left_s()))
            except ConnectionError:
                pass
            else:
                if protocol != _C.PROTOCOL_VERSION:
                    return Wrong(
                        f"expected a syncer of protocol {_C.PROTOCOL_VERSION}, got one of protocol {protocol}: {text}",
                        next="diloco --version   # on both machines",
                        protocol=protocol,
                    )
        return Wrong(
            f"expected a diloco syncer at {self.address}, got something else that listens there: {said}",
            next=f"ss -ltnp 'sport = :{self.port}'   # on the syncer's machine",
        )

    def check_clock(self) -> None:
        before = time.time()
        try:
            now = json.loads(_C.query_status(self.address, min(10.0, self.left_s()))).get("time")
        except ConnectionError as error:
            raise Wrong(str(error)) from None
        after = time.time()
        if now is None:
            return self.report.add("clock", "note", "this syncer does not tell its time; nothing depends on it")
        ahead = now - (before + after) / 2
        text = f"the syncer's is {abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} this one"
        self.report.add(
            "clock",
            "ok" if abs(ahead) < 1.0 + (after - before) else "note",
            f"{text}, to {duration((after - before) / 2)}; it only matters to who compares time stamps in logs",
            ahead_s=ahead,
        )

    def check_settings(self) -> None:
        """What the environment says here must be what the run has, or the learner is refused."""
        try:
            ours = config.environment_settings()
        except ValueError as error:
            raise Wrong(str(error), next="env | grep DILOCO_") from None
        self.staging_bytes = int(ours.pop("staging_bytes", "0"))
        run_id = self.status["settings"]["run_id"]
        theirs = {**self.status["settings"], "run_id": run_id or ours.get("run_id", "")}
        for name, value in {"run_id": "", **ours}.items():
            if value != theirs[name]:
                raise Wrong(
                    f"{name}: expected what the run has, '{theirs[name]}', got '{value}' here; settings live on the "
                    f"syncer: {'set' if name == 'run_id' else 'unset'} DILOCO_{name.upper()}",
                    next=f"export DILOCO_RUN_ID={run_id}" if name == "run_id" else f"unset DILOCO_{name.upper()}",
                )
        named = ", ".join(sorted(ours)) or "none"
        self.report.add("settings", "ok", f"those of the run; named here by DILOCO_* variables: {named}")

    def check_link(self) -> None:
        try:
            link = self.link = _C.probe_link(self.address, self.left_s())
        except ConnectionError as error:
            raise Wrong(
                f"expected to measure the link, got: {error}. A syncer of an older version cannot be measured",
                next=f"diloco doctor --syncer {self.address} --timeout-s {2 * self.asked.timeout_s:g}",
            ) from None
        waited = f"; waited {duration(link.waited_s)} for a turn" if link.waited_s > 1 else ""
        self.report.add(
            "link",
            "ok",
            f"up {bit_rate(link.up_bytes_per_s)}, down {bit_rate(link.down_bytes_per_s)} over one connection, round "
            f"trip {duration(link.round_trip_s)}; measured with {size(link.up_bytes)} and "
            f"{size(link.down_bytes)}{waited}",
            up_bytes_per_s=link.up_bytes_per_s,
            down_bytes_per_s=link.down_bytes_per_s,
            round_trip_s=link.round_trip_s,
        )

    def check_model(self) -> None:
        runs: list[Spec] | None = None
        if self.status:
            try:
                runs = _C.run_layout(self.address, self.left_s())
            except ConnectionError as error:
                raise Wrong(f"expected the run's parameters from {self.address}, got: {error}") from None
        if not self.asked.model:
            self.specs = runs or []
            known = f"; the run's is {_describe(runs)}" if runs else ""
            return self.report.add("model", "skipped", f"give --model module:function to compare it{known}")
        self.specs = load_specs(self.asked.model)
        try:
            difference = _C.layout_difference(self.specs, runs) if runs else ""
        except ValueError as error:
            raise Wrong(f"--model {self.asked.model}: {error}") from None
        text = _describe(self.specs)
        if difference:
            from_file = os.path.isfile(self.asked.model)
            file = " (a file need not tell which tensors are trained or tied; a function does)" if from_file else ""
            raise Wrong(
                f"{difference}; every learner of a run trains the same model (for another model start another "
                f"syncer){file}",
                fingerprint=fingerprint(self.specs),
                run_fingerprint=fingerprint(runs or []),
            )
        rest = "the run has the same" if runs else "no learner has joined yet: the run will have this one"
        self.report.add("model", "ok", f"{text}; {rest}", fingerprint=fingerprint(self.specs))

    def check_memory(self) -> None:
        settings = self.status["settings"]
        budget, _ = _C.memory_budget(self.specs, settings, self.staging_bytes, 1)
        have = self.asked.memory()
        text = (
            f"{size(budget.usual())} of host memory most of the time (anchors {size(budget.anchors)}, staged and sent "
            f"copies {size(budget.copies)}, arriving {size(budget.arriving)}), at most {size(budget.most())}, beside "
            f"the model and its optimizer; {size(have.available)} are available, bound by {have.bound}"
        )
        values: dict[str, Any] = {
            "usual_bytes": budget.usual(),
            "most_bytes": budget.most(),
            "available_bytes": have.available,
        }
        least = budget.usual() - budget.copies
        if budget.usual() > have.available:
            bound = max(0, have.available - least)
            advice = f"set DILOCO_STAGING_BYTES={bound} or free memory" if bound else "free memory or raise that bound"
            raise Wrong(
                f"expected at least {size(budget.usual())} available, got {size(have.available)}: {text}; {advice}",
                **values,
            )
        self.report.add("memory", "ok" if budget.most() <= have.available else "note", text, **values)

    def check_bandwidth(self) -> None:
        assert self.link
        settings = self.status["settings"]
        step_s, whose = self.step_time()
        plan, _ = _C.explain_plan(self.specs, settings)
        every, tau = int(settings["sync_every"]), int(settings["overlap_steps"])
        window = int(settings["credit_window_bytes"])
        # Credit is the most that is under way: more than a window per round trip never flows.
        by_window = window / self.link.round_trip_s
        ways = {
            "up": (sum(f.up_bytes for f in plan.fragments), min(self.link.up_bytes_per_s, by_window)),
            "down": (sum(f.down_bytes for f in plan.fragments), min(self.link.down_bytes_per_s, by_window)),
        }
        values: dict[str, Any] = {"step_s": step_s, "sync_every": every}
        worst = 0.0
        for way, (each, rate) in ways.items():
            values |= {f"{way}_bytes_per_sync": each, f"{way}_needed_bytes_per_s": each / (every * step_s)}
            worst = max(worst, each / rate)
        need = " and ".join(
            f"{bit_rate(each / (every * step_s))} {way} ({size(each)} every {every} steps)"
            for way, (each, _) in ways.items()
        )
        have = " and ".join(f"{bit_rate(rate)} {way}" for way, (_, rate) in ways.items())
        text = f"needs {need} at {duration(step_s)} a step ({whose}); can have {have}"
        if worst > every * step_s:
            advice = f"sync_every of at least {math.ceil(worst / step_s)}, a narrower wire_dtype, or a faster link"
            fastest = max(each for each, _ in ways.values()) / (every * step_s)
            if by_window < fastest:
                advice = f"credit_window_bytes of at least {math.ceil(fastest * self.link.round_trip_s)} (now {window})"
            raise Wrong(f"expected that a link {text}; give the syncer {advice}", **values)
        largest = max(plan.fragments, key=lambda f: f.up_bytes + f.down_bytes)
        trip = largest.up_bytes / ways["up"][1] + largest.down_bytes / ways["down"][1] + self.link.round_trip_s
        values |= {"fragment_s": trip}
        if trip > tau * step_s:
            late = "learners wait for it" if settings["mode"] == "lockstep" else "it is adopted later, nobody waits"
            text += (
                f"; the largest fragment takes {duration(trip)} both ways, overlap_steps = {tau} leave "
                f"{duration(tau * step_s)}: {late}"
            )
            return self.report.add("bandwidth", "note", text, **values)
        self.report.add("bandwidth", "ok", text, **values)

    def step_time(self) -> tuple[float, str]:
        if self.asked.step_s > 0:
            return self.asked.step_s, "as given"
        if (measured := float(self.status["timings"]["step_s"])) > 0:
            return measured, "what the run's learners take"
        return _ASSUMED_STEP_S, "assumed; give --step-s"


def _describe(tensors: list[Spec]) -> str:
    count = sum(math.prod(shape) for _, shape, _, _ in tensors)
    return f"{len(tensors)} tensors, {count} parameters, fingerprint {fingerprint(tensors)}"
