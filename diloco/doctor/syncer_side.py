"""The syncer's machine: would diloco-syncer start with these options, who could reach it, is there room for a run?"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco import config
from diloco._native import _C
from diloco.cli.units import size
from diloco.doctor import machine
from diloco.doctor.model import fingerprint, load_specs
from diloco.doctor.report import Report, Wrong

_OTHER_DESCRIPTORS = 64  # event log, pipes, libzmq's own, libraries
_QUESTION_S = 1.0  # to whoever has the port: a syncer of this machine answers in milliseconds


@dataclass
class SyncerSide:
    """What to look at: the options diloco-syncer is going to be started with.

    settings: name and text, beside DILOCO_* variables and `config_file`. `learners`: how many are expected at a time,
    0 = min_quorum.
    """

    bind: str = "127.0.0.1:29400"
    insecure: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    config_file: str = ""
    model: str = ""
    learners: int = 0
    memory: Callable[[], machine.Memory] = field(default=machine.memory)
    open_files_limit: Callable[[], int] = field(default=machine.open_files_limit)


def check_syncer(asked: SyncerSide) -> Report:
    """Every check in turn. Nothing is started; the port is tried and given back. ValueError: malformed address."""
    return _Syncer(asked).run()


class _Syncer:
    def __init__(self, asked: SyncerSide) -> None:
        self.asked = asked
        host, port = _C.parse_endpoint(asked.bind).removeprefix("tcp://").rsplit(":", 1)
        self.host, self.port = host, int(port)
        self.everywhere = host in ("*", "0.0.0.0")
        self.addresses: list[str] = []  # it would listen on
        self.settings: dict[str, str] = {}
        self.report = Report("syncer", self.command())

    def command(self) -> str:
        """As it is going to be started."""
        words = ["diloco-syncer", "--bind", f"{self.host}:{self.port}"]
        words += ["--insecure"] if self.asked.insecure else []
        words += ["--config", self.asked.config_file] if self.asked.config_file else []
        for name, value in self.asked.settings.items():
            words += [f"--{name.replace('_', '-')}", value]
        return " ".join(words)

    def run(self) -> Report:
        if self.report.check("address", self.check_address):
            self.report.check("reach", self.check_reach)
            self.report.check("port", self.check_port)
        if self.report.check("settings", self.check_settings):
            self.report.check("descriptors", self.check_descriptors)
            self.report.check("memory", self.check_memory)
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self.report.add(
            "clock",
            "ok",
            f"{now}; it is used in time stamps of logs only, never to tell who is alive",
            time=time.time(),
        )
        return self.report

    def check_address(self) -> None:
        ours = machine.interfaces()
        listed = ", ".join(f"{one.address} ({one.name})" for one in ours)
        if self.everywhere:
            self.addresses = [one.address for one in ours]
            return self.report.add(
                "address", "ok", f"every address of this machine: {listed}", addresses=self.addresses
            )
        try:
            address = machine.resolve(self.host)[0]
        except OSError as error:
            raise Wrong(
                f"--bind: expected an address of this machine ({listed}), got '{self.host}', which does not resolve "
                f"({error.strerror}); give one of them, or 0.0.0.0 for all"
            ) from None
        interface = machine.interface_of(address)
        if not interface and not machine.is_loopback(address):
            raise Wrong(
                f"--bind: expected an address of this machine ({listed}), got {address}; give one of them, or 0.0.0.0 "
                "for all"
            )
        self.addresses = [address]
        name = "" if self.host == address else f"{self.host} is "
        self.report.add(
            "address", "ok", f"{name}{address} ({interface or 'lo'}), of {listed}", addresses=self.addresses
        )

    def check_reach(self) -> None:
        if all(machine.is_loopback(address) for address in self.addresses):
            text = (
                "loopback: only processes of this machine get there; learners on other hosts need an SSH tunnel, or "
                f"--bind 0.0.0.0:{self.port} --insecure"
            )
            if not self.host.startswith(("127.", "localhost")):
                text = (
                    f"the name '{self.host}' leads to {text}. Perhaps a line in /etc/hosts is meant for something else"
                )
            return self.report.add("reach", "note", text, loopback=True)
        others = [address for address in self.addresses if not machine.is_loopback(address)]
        where = ", ".join(f"{address}:{self.port}" for address in others)
        if not self.asked.insecure:
            raise Wrong(
                f"{where} can be reached from other machines, and connections carry no keys yet: expected a loopback "
                "address, or --insecure if everybody who can reach that port is trusted",
                next=f"diloco doctor --bind {self.host}:{self.port} --insecure",
            )
        self.report.add(
            "reach",
            "note",
            f"learners dial {where}: open that TCP port, and no other, in the firewall. --insecure means no "
            "encryption and no keys: whoever reaches it can read the weights and take part",
            loopback=False,
        )

    def check_port(self) -> None:
        host = "" if self.everywhere else self.addresses[0]
        try:
            with socket.socket() as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((host, self.port))
                tried.listen()
        except OSError as error:
            raise self._why_not_bound(error) from None
        self.report.add("port", "ok", f"{self.port} is free" if self.port else "0: the kernel will choose one")

    def _why_not_bound(self, error: OSError) -> Wrong:
        expected = f"expected that port {self.port} can be listened on, got '{error.strerror}'"
        if error.errno == errno.EACCES:
            return Wrong(f"{expected}; choose a port above 1023")
        if error.errno != errno.EADDRINUSE:
            return Wrong(expected)
        try:
            host = "127.0.0.1" if self.everywhere else self.addresses[0]
            status = json.loads(_C.query_status(f"{host}:{self.port}", _QUESTION_S))
            whose = f"a diloco syncer with {len(status['learners'])} learners already listens there"
        except ConnectionError:
            whose = "another program listens there"
        return Wrong(
            f"{expected}: {whose}; end it, or choose another port",
            next=f"ss -ltnp 'sport = :{self.port}'",
        )

    def check_settings(self) -> None:
        try:
            given = _C.settings_from_file(self.asked.config_file) if self.asked.config_file else {}
            given |= config.environment_settings()
            given |= config.setting_texts(self.asked.settings, "--setting", ())
            self.settings = _C.complete_settings(given)
        except (ValueError, TypeError) as error:
            raise Wrong(str(error), next="diloco-syncer --help") from None
        named = ", ".join(f"{name} = {self.settings[name]}" for name in sorted(given)) or "all as by default"
        self.report.add("settings", "ok", named)

    def check_descriptors(self) -> None:
        learners, limit = int(self.settings["max_learners"]), self.asked.open_files_limit()
        needed = 2 * learners + 64 + _OTHER_DESCRIPTORS
        if limit < needed:
            raise Wrong(
                f"expected room for {needed} open descriptors (max_learners = {learners}: 2 connections each, and "
                f"others), got a limit of {limit}; raise it, or lower max_learners to "
                f"{max(1, (limit - 64 - _OTHER_DESCRIPTORS) // 2)}",
                next=f"ulimit -n {needed}",
                needed=needed,
                limit=limit,
            )
        self.report.add(
            "descriptors",
            "ok",
            f"{needed} needed for max_learners = {learners}, the limit is {limit}",
            needed=needed,
            limit=limit,
        )

    def check_memory(self) -> None:
        have = self.asked.memory()
        asked = int(self.settings["payload_memory_bytes"])
        payload = asked or machine.machine_memory() // 2
        whose = "as given" if asked else "half of the machine's memory"
        text = (
            f"contributions may take {size(payload)} (payload_memory_bytes, {whose}), {size(have.available)} are "
            f"available, bound by {have.bound}"
        )
        values: dict[str, Any] = {"payload_limit_bytes": payload, "available_bytes": have.available}
        if not self.asked.model:
            enough = payload <= have.available
            text += "" if enough else "; set payload_memory_bytes below that, or the syncer may be killed for it"
            return self.report.add(
                "memory", "ok" if enough else "note", f"{text}. Give --model for what a run takes", **values
            )
        specs = load_specs(self.asked.model)
        learners = self.asked.learners or int(self.settings["min_quorum"])
        _, budget = _C.memory_budget(specs, self.settings, 0, learners)
        base = budget.weights + budget.merging + budget.retained
        values |= {
            "fingerprint": fingerprint(specs),
            "learners": learners,
            "base_bytes": base,
            "least_bytes": budget.least,
            "comfortable_bytes": budget.comfortable,
        }
        text = (
            f"{size(base)} for weights, outer state and merging, and contributions of {learners} learners: at least "
            f"{size(budget.least)}, {size(budget.comfortable)} so that nobody waits for a turn; {text}"
        )
        if budget.least > payload:
            raise Wrong(
                f"expected payload_memory_bytes of at least {budget.least}, got {payload}: learners would be refused; "
                f"raise it or num_fragments. {text}",
                **values,
            )
        if base + budget.least > have.available:
            raise Wrong(
                f"expected at least {size(base + budget.least)} available, got {size(have.available)}: {text}; free "
                "memory, raise that bound, or take another machine",
                **values,
            )
        tight = budget.comfortable > payload or base + min(payload, budget.comfortable) > have.available
        if base + payload > have.available and not asked:
            bound = max(budget.least, have.available - base)
            text += f"; set payload_memory_bytes = {bound}, or the syncer may be killed before it reaches its own bound"
            tight = True
        self.report.add("memory", "note" if tight else "ok", text, **values)
