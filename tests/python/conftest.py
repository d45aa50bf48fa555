"""Fixtures every Python test may use: factories for real processes and for hosts.

    def test_x(syncer, learner): s = syncer(min_quorum=2); a = learner(s, "a", steps=100); ...
    @pytest.mark.netns
    def test_y(host): a, b = host("a"), host("b"); ...
    def test_z(sized): for _ in range(sized("kills", 6, 100)): ...

What a factory made is ended after the test, newest first; if the test failed, its output is part of the report.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Models this small are slower with more threads, on a busy machine many times: OpenMP's threads spin while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from toys import dead_address

import diloco.testing
from diloco.testing import Host, LearnerProcess, Link, Process, SyncerProcess, Tap, TinyLearner, connect, missing

# Started in the background of a shell, pytest inherits an ignored SIGINT, and would hand it on to every child.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SOAK = os.environ.get("DILOCO_SOAK") == "1"
SOAK_LIMIT_S = 1800
_processes = pytest.StashKey[list[Process]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "netns: needs network namespaces (root); with CI=true a skip is a failure")
    config.addinivalue_line("markers", "soak: uses the fixture `sized`; nobody writes this mark")


# Slowest first, so that no worker is left with one of them at the end while the others have nothing to do.
LONG = ("crash", "examples", "optimizer_exit", "stub", "demo_run", "network", "examples_islands", "cli")
LONG += ("collective_processes", "simulate", "hosts", "tools", "island_resume", "island_together", "island_restart")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-m soak` selects the tests that are larger with DILOCO_SOAK=1; their time limit is then larger too."""
    if "sized" in getattr(item, "fixturenames", ()):
        item.add_marker("soak")
        if SOAK:
            item.add_marker(pytest.mark.timeout(SOAK_LIMIT_S), append=False)


@functools.cache
def _why_no_hosts() -> str:
    return missing()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("netns") and (why := _why_no_hosts()):
        if os.environ.get("CI") == "true":
            pytest.fail(f"network tests must run in CI: {why}", pytrace=False)
        pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" and report.failed:
        for process in item.stash.get(_processes, []):
            report.sections.append((f"output of {process.name}", process.tail()))
    return report


@pytest.fixture
def sized(record_property: Callable[[str, object], None]) -> Callable[[str, int, int], int]:
    """sized("kills", 6, 100): how many; the second with DILOCO_SOAK=1. It is part of the soak report."""

    def choose(what: str, ci: int, soak: int) -> int:
        size = soak if SOAK else ci
        record_property(what, size)
        return size

    return choose


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where connecting is refused."""
    with dead_address() as address:
        yield address


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def process(request: pytest.FixtureRequest, cleanup: ExitStack) -> Callable[..., Any]:
    """process(SyncerProcess, ...): starts one, and ends it after the test."""
    started = request.node.stash.setdefault(_processes, [])

    def start(kind: Callable[..., Any], *arguments: Any, **options: Any) -> Process:
        new: Process = kind(*arguments, **options)
        started.append(new)
        cleanup.callback(new.close)
        return new

    return start


@pytest.fixture
def syncer(process: Callable[..., Any]) -> Callable[..., SyncerProcess]:
    """syncer(min_quorum=2, ...): a running native syncer on a port the kernel chose."""
    return functools.partial(process, SyncerProcess)


@pytest.fixture
def learner(process: Callable[..., Any]) -> Callable[..., TinyLearner]:
    """learner(syncer or endpoint, "a", steps=100, ...): a running diloco.testing.tiny_learner."""

    def start(at: SyncerProcess | Tap | str, learner_id: str, **options: Any) -> TinyLearner:
        endpoint = at if isinstance(at, str) else at.endpoint
        new: TinyLearner = process(TinyLearner, endpoint, learner_id, **options)
        return new

    return start


@pytest.fixture
def program(process: Callable[..., Any]) -> Callable[..., LearnerProcess]:
    """program(code="...") or program(script=path) or program(module=name): any Python program."""
    return functools.partial(process, LearnerProcess)


@pytest.fixture
def tap(cleanup: ExitStack) -> Callable[[SyncerProcess | str], Tap]:
    """tap(syncer): a relay in front of it that can freeze a connection at a chosen byte."""

    def start(target: SyncerProcess | str) -> Tap:
        return cleanup.enter_context(Tap(target if isinstance(target, str) else target.endpoint))

    return start


@pytest.fixture
def audit(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """audit(log, ..., ledgers=dir): the report of diloco/audit.py over what a run left; fails if it is not exact."""

    def run(*logs: Path, ledgers: Path) -> dict[str, Any]:
        report = tmp_path / "audit.json"
        script = Path(diloco.testing.__file__).parents[1] / "audit.py"
        argv = [sys.executable, script, *logs, "--ledger-dir", ledgers, "--json", report]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"the audit found errors:\n{done.stdout}\n{done.stderr}"
        result: dict[str, Any] = json.loads(report.read_text())
        return result

    return run


class Run:
    """A whole run in one folder: event logs of every life of the syncer, ledger files of every learner."""

    def __init__(self, folder: Path, process: Callable[..., Any], audit: Callable[..., dict[str, Any]]) -> None:
        self.ledgers = folder / "ledgers"
        self.ledgers.mkdir()
        self.logs: list[Path] = []
        self._folder, self._process, self._audit = folder, process, audit

    def _next_log(self) -> Path:
        self.logs.append(self._folder / f"events-{len(self.logs)}.jsonl")
        return self.logs[-1]

    def syncer(self, **options: Any) -> SyncerProcess:
        """Short heartbeats and a round every few steps, so that tests are quick."""
        quick = {"sync_every": 8, "num_fragments": 4, "heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 1.5}
        new: SyncerProcess = self._process(SyncerProcess, event_log=self._next_log(), **quick | options)
        return new

    def restart(self, old: SyncerProcess) -> SyncerProcess:
        """A syncer without any state on the port of the old one."""
        new: SyncerProcess = self._process(old.restart, event_log=self._next_log())
        return new

    def learner(self, at: SyncerProcess | Tap | str, learner_id: str, **options: Any) -> TinyLearner:
        endpoint = at if isinstance(at, str) else at.endpoint
        options = {"dir": self.ledgers, "width": 64, **options}
        new: TinyLearner = self._process(TinyLearner, endpoint, learner_id, **options)
        return new

    def end(self, syncer: SyncerProcess, *learners: TinyLearner) -> dict[str, Any]:
        """Lets everybody leave in good order; the audit's report, which must be exact."""
        for one in learners:
            one.close_stdin()
        for one in learners:
            one.finish()
        assert syncer.stop() == 0, syncer.tail()
        return self._audit(*self.logs, ledgers=self.ledgers)


@pytest.fixture
def run(tmp_path: Path, process: Callable[..., Any], audit: Callable[..., dict[str, Any]]) -> Run:
    return Run(tmp_path, process, audit)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Any]]:
    """ranks("train", 2, how="fsdp", ...): a job of so many processes that run an island_*.py program."""
    from island_ranks import nursery

    with nursery() as start:
        yield start


@pytest.fixture
def host(cleanup: ExitStack) -> Callable[..., Host]:
    """host("a"): a new network namespace. Tests that use it carry the marker `netns`."""
    return lambda *arguments, **options: cleanup.enter_context(Host(*arguments, **options))


@pytest.fixture
def link(cleanup: ExitStack) -> Callable[..., Link]:
    """link(a, b, delay_ms=20, ...): a connection between two hosts."""
    return lambda *arguments, **options: cleanup.enter_context(connect(*arguments, **options))
