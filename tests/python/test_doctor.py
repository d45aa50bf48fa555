"""diloco doctor: what it looks at, the words of everything that can be wrong, and the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from toys import QUICK, dead_address, small_model
from zmtp import RawPeer, pack

import diloco
from diloco._native import _C
from diloco.cli.units import bit_rate
from diloco.doctor import Check, LearnerSide, Report, SyncerSide, check_learner, check_syncer
from diloco.doctor.machine import Memory, interface_of, interfaces, memory
from diloco.doctor.model import fingerprint, load_specs
from diloco.doctor.report import Wrong
from diloco.parameters import specs

MODEL = "toys:small_model"


@pytest.fixture
def running() -> Iterator[diloco.Syncer]:
    with (
        diloco.Syncer(**QUICK, overlap_steps=1, max_learners=4, shutdown_s=0.5) as syncer,
        diloco.Learner(small_model(), syncer.endpoint, learner_id="learner-a"),
    ):
        yield syncer


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DILOCO_") and name != "DILOCO_SOAK"]:
        monkeypatch.delenv(name)


def found(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def wrong(report: Report, name: str) -> str:
    """The text of the first thing that is wrong, which must be `name`."""
    assert report.first_wrong is not None
    assert report.first_wrong.name == name, list(report.lines())
    assert report.verdict == f"not ready: {name}: {report.first_wrong.text}"
    return report.first_wrong.text


def learner(syncer: Any, **options: Any) -> Report:
    address = syncer if isinstance(syncer, str) else syncer.endpoint
    return check_learner(LearnerSide(address, **{"timeout_s": 30.0, **options}))


# -- a learner's machine ----------------------------------------------------------------------------------------------


def test_a_learner_that_is_ready(running: diloco.Syncer, tmp_path: Path) -> None:
    """From the command line, with the report: every check, measured numbers, verdict, next command, exit status 0."""
    file = tmp_path / "doctor.json"
    argv = [sys.executable, "-m", "diloco", "doctor", "--syncer", running.endpoint, "--model", MODEL, "--json", file]
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)])}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    address = running.endpoint.removeprefix("tcp://")
    assert lines[-2:] == ["ready", f"next: DILOCO_SYNCER={address} python train.py"]
    report = json.loads(file.read_text())
    assert report["schema"] == "diloco.doctor.1"
    assert {"command", "commit", "machine", "seed", "software"} <= report.keys()
    assert (report["side"], report["ready"], report["verdict"]) == ("learner", True, "ready")
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [
        "address", "connect", "syncer", "clock", "settings", "link", "model", "memory", "bandwidth",
    ]  # fmt: skip
    assert {check["state"] for check in checks.values()} == {"ok"}
    assert (checks["connect"]["local_address"], checks["connect"]["interface"]) == ("127.0.0.1", "lo")
    assert checks["syncer"]["learners"] == 1
    assert abs(checks["clock"]["ahead_s"]) < 1.0
    assert checks["link"]["up_bytes_per_s"] > 1e6
    assert checks["link"]["down_bytes_per_s"] > 1e6
    assert checks["link"]["round_trip_s"] > 0
    assert checks["model"]["fingerprint"] == fingerprint(specs(small_model()))
    plan = diloco.explain(small_model(), **QUICK)
    assert checks["bandwidth"]["up_bytes_per_sync"] == sum(f.up_bytes for f in plan.fragments)
    assert checks["bandwidth"]["sync_every"] == QUICK["sync_every"]
    assert [one["id"] for one in running.status()["learners"]] == ["learner-a"]  # nobody joined for it


def test_nobody_listens() -> None:
    with dead_address() as address:
        report = learner(address)
    assert "connection refused" in wrong(report, "connect")
    assert report.next == f"diloco-syncer --bind {address}"


def test_a_name_that_does_not_resolve() -> None:
    assert "'nobody.invalid', which does not resolve" in wrong(learner("nobody.invalid:29400"), "address")


def test_a_name_that_is_loopback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """F077: a line in /etc/hosts leads to this machine itself."""
    monkeypatch.setattr("diloco.doctor.machine.resolve", lambda host: ["127.0.1.1"])
    with dead_address() as address:
        report = learner("trainer:" + address.rsplit(":", 1)[1])
    assert found(report, "address").state == "note"
    assert "trainer is 127.0.1.1: loopback, this machine itself" in found(report, "address").text


@pytest.mark.parametrize("address", ["0.0.0.0:29400", "*:29400", "localhost", "127.0.0.1:0"])
def test_an_address_that_no_learner_can_dial(address: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        learner(address)


@pytest.fixture
def impostor() -> Iterator[Callable[..., str]]:
    """impostor(answer): the address of something that is no syncer of ours; `answer(socket)` for every connection."""
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[socket.socket], None]) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        accepted, _ = listener.accept()
                        with accepted, contextlib.suppress(OSError, AssertionError):
                            answer(accepted)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start


def test_not_a_syncer(impostor: Any) -> None:
    """A web server, say."""

    def answer(accepted: socket.socket) -> None:
        accepted.recv(100)
        accepted.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    report = learner(impostor(answer))
    assert "got something else that listens there" in wrong(report, "syncer")
    assert report.next.startswith("ss -ltnp")
    assert [check.name for check in report.checks] == ["address", "connect", "syncer", "model"]


def test_a_syncer_of_another_protocol(impostor: Any) -> None:
    """It understands no STATUS of ours, only a HELLO, and says so."""
    text = "this syncer speaks protocol 2, the learner speaks 1; install the same diloco version on both sides"

    def answer(accepted: socket.socket) -> None:
        with RawPeer(accepted) as peer:
            if peer.receive().name != "hello":
                return  # what it cannot read: it hangs up
            peer.send("reject", pack({"code": "protocol", "text": text}), protocol=2)
            peer.rest()

    report = learner(impostor(answer))
    said = wrong(report, "syncer")
    assert said.startswith("expected a syncer of protocol 1, got one of protocol 2: ")
    assert text in said
    assert report.next.startswith("diloco --version")


def test_a_full_run() -> None:
    with diloco.Syncer(max_learners=1) as syncer, diloco.Learner(small_model(), syncer.endpoint):
        assert "1 of at most 1 learners are here: expected room for one more" in wrong(learner(syncer), "syncer")


def test_another_model_is_named_as_the_refusal_would(running: diloco.Syncer, tmp_path: Path) -> None:
    other = small_model()
    other[2] = nn.Linear(8, 3)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    said = wrong(learner(running, model=str(tmp_path / "other.pt")), "model")
    with pytest.raises(ValueError) as refusal:
        diloco.Learner(other, running.endpoint, learner_id="b")
    difference = said.split("; every learner")[0]
    assert difference.startswith("parameter '2.weight': this learner has float32 (3, 8), the run has float32 (2, 8)")
    assert difference in str(refusal.value)


def test_a_model_before_anybody_has_joined() -> None:
    with diloco.Syncer(**QUICK) as syncer:
        report = learner(syncer, model=MODEL)
    assert report.ready
    assert "no learner has joined yet" in found(report, "model").text
    assert found(report, "bandwidth").state == "ok"


def test_without_a_model_the_runs_is_taken(running: diloco.Syncer) -> None:
    report = learner(running)
    assert report.ready
    assert found(report, "model").state == "skipped"
    assert f"fingerprint {fingerprint(specs(small_model()))}" in found(report, "model").text
    assert found(report, "bandwidth").state == "ok"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("DILOCO_SYNC_EVERY", "7", "sync_every: expected what the run has, '4', got '7'"),
        ("DILOCO_RUN_ID", "theirs", ""),  # a run without a name takes anybody
        ("DILOCO_SYNC_EVRY", "7", "did you mean DILOCO_SYNC_EVERY"),
    ],
)
def test_settings_of_the_environment(
    running: diloco.Syncer, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    report = learner(running)
    if words:
        assert words in wrong(report, "settings")
    else:
        assert report.ready


def test_the_run_has_a_name() -> None:
    with diloco.Syncer(run_id="ours") as syncer:
        report = learner(syncer)
    assert "run_id: expected what the run has, 'ours', got ''" in wrong(report, "settings")
    assert report.next == "export DILOCO_RUN_ID=ours"


def test_too_little_memory_for_a_learner(running: diloco.Syncer) -> None:
    report = learner(running, memory=lambda: Memory(1 << 20, "control group /sys/fs/cgroup/job"))
    said = wrong(report, "memory")
    assert "got 1.0 MiB" in said
    assert "bound by control group /sys/fs/cgroup/job" in said
    assert found(report, "bandwidth").state == "ok"


def test_a_link_that_is_too_slow(running: diloco.Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimpleNamespace(
        up_bytes_per_s=100.0, down_bytes_per_s=1e6, round_trip_s=0.01, up_bytes=1, down_bytes=1, waited_s=0.0
    )
    monkeypatch.setattr(_C, "probe_link", lambda endpoint, timeout_s: slow)
    plan = diloco.explain(small_model(), **QUICK)
    up = sum(f.up_bytes for f in plan.fragments)
    said = wrong(learner(running, step_s=0.1), "bandwidth")
    assert f"needs {bit_rate(up / 0.4)} up" in said
    assert "can have 800 bit/s up" in said
    assert f"sync_every of at least {-(-up // 10)}," in said
    # Fast enough on average, not within the overlap: nobody waits, so it is only told.
    report = learner(running, step_s=up / 100 / 4 * 1.01)
    assert report.ready
    assert "it is adopted later, nobody waits" in found(report, "bandwidth").text


def test_a_window_that_is_too_small_for_the_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    far = SimpleNamespace(
        up_bytes_per_s=1e9, down_bytes_per_s=1e9, round_trip_s=0.5, up_bytes=1, down_bytes=1, waited_s=0.0
    )
    monkeypatch.setattr(_C, "probe_link", lambda endpoint, timeout_s: far)
    with diloco.Syncer(chunk_bytes=64, credit_window_bytes=64, **QUICK) as syncer:
        said = wrong(learner(syncer, model=MODEL, step_s=0.1), "bandwidth")
    assert "give the syncer credit_window_bytes of at least" in said
    assert "(now 64)" in said


# -- the syncer's machine ----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def test_a_syncer_that_is_ready() -> None:
    port = free_port()
    report = check_syncer(SyncerSide(bind=f"127.0.0.1:{port}", settings={"min_quorum": "2"}, model=MODEL, learners=3))
    assert report.ready, list(report.lines())
    assert report.next == f"diloco-syncer --bind 127.0.0.1:{port} --min-quorum 2"
    assert found(report, "reach").values["loopback"] is True
    assert "only processes of this machine get there" in found(report, "reach").text
    budget = found(report, "memory")
    plan = diloco.explain(small_model(), min_quorum=2)
    largest = max(f.up_bytes for f in plan.fragments)
    assert budget.values["least_bytes"] == 2 * largest
    assert budget.values["comfortable_bytes"] == 6 * sum(f.up_bytes for f in plan.fragments) + 2 * largest
    assert [check.name for check in report.checks] == [
        "address", "reach", "port", "settings", "descriptors", "memory", "clock",
    ]  # fmt: skip


def test_off_loopback_needs_insecure_and_says_what_it_means() -> None:
    bind = f"0.0.0.0:{free_port()}"
    if all(one.name == "lo" for one in interfaces()):
        pytest.skip("this machine has loopback only")
    report = check_syncer(SyncerSide(bind=bind))
    assert "can be reached from other machines" in wrong(report, "reach")
    assert report.next == f"diloco doctor --bind {bind} --insecure"
    allowed = check_syncer(SyncerSide(bind=bind, insecure=True))
    assert allowed.ready
    assert "no encryption and no keys" in found(allowed, "reach").text
    for one in interfaces():
        assert one.address in found(allowed, "address").values["addresses"]


def test_a_name_that_is_loopback_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.doctor.machine.resolve", lambda host: ["127.0.1.1"])
    report = check_syncer(SyncerSide(bind=f"trainer:{free_port()}", insecure=True))
    assert found(report, "reach").state == "note"
    assert "the name 'trainer' leads to loopback" in found(report, "reach").text


def test_an_address_of_somebody_else() -> None:
    report = check_syncer(SyncerSide(bind="203.0.113.7:29400"))
    said = wrong(report, "address")
    assert "expected an address of this machine (127.0.0.1 (lo)" in said
    assert "got 203.0.113.7" in said


def test_a_port_that_is_taken() -> None:
    with diloco.Syncer() as syncer:
        report = check_syncer(SyncerSide(bind=syncer.endpoint))
    assert "a diloco syncer with 0 learners already listens there" in wrong(report, "port")
    with socket.create_server(("127.0.0.1", 0)) as other:
        report = check_syncer(SyncerSide(bind=f"127.0.0.1:{other.getsockname()[1]}"))
    assert "another program listens there" in wrong(report, "port")


def test_too_few_descriptors() -> None:
    report = check_syncer(SyncerSide(bind="127.0.0.1:0", open_files_limit=lambda: 256))
    said = wrong(report, "descriptors")
    assert "expected room for 640 open descriptors (max_learners = 256" in said
    assert "lower max_learners to 64" in said
    assert report.next == "ulimit -n 640"
    asked = SyncerSide(bind="127.0.0.1:0", open_files_limit=lambda: 256, settings={"max_learners": "64"})
    assert check_syncer(asked).ready


def test_too_little_memory_for_a_syncer() -> None:
    little = Memory(1000, "the machine")
    asked = SyncerSide(bind="127.0.0.1:0", model=MODEL, memory=lambda: little)
    assert "expected at least" in wrong(check_syncer(asked), "memory")
    asked = SyncerSide(bind="127.0.0.1:0", model=MODEL, settings={"payload_memory_bytes": "64"})
    assert "expected payload_memory_bytes of at least" in wrong(check_syncer(asked), "memory")
    bounded = Memory(1 << 20, "control group /sys/fs/cgroup/job (limit 1048576 bytes)")
    report = check_syncer(SyncerSide(bind="127.0.0.1:0", model=MODEL, memory=lambda: bounded))
    assert report.ready
    assert "set payload_memory_bytes = " in found(report, "memory").text


def test_settings_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text("sync_every = 12\nmin_quorm = 2\n")
    assert f"{file}:2" in wrong(check_syncer(SyncerSide(bind="127.0.0.1:0", config_file=str(file))), "settings")
    file.write_text("sync_every = 12\n")
    monkeypatch.setenv("DILOCO_OVERLAP_STEPS", "12")
    report = check_syncer(SyncerSide(bind="127.0.0.1:0", config_file=str(file)))
    assert "overlap_steps must be below sync_every" in wrong(report, "settings")
    asked = SyncerSide(bind="127.0.0.1:0", config_file=str(file), settings={"overlap_steps": "1"})
    assert found(check_syncer(asked), "settings").text == "overlap_steps = 1, sync_every = 12"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--syncer", "a:1", "--bind", "b:2"], "give either"),
        (["--step-s", "1"], "give --syncer"),
        (["--setting", "min_quorum"], "expected NAME=VALUE"),
        (["--json", "/nowhere/at/all.json"], "cannot write --json"),
        (["--syncer", "localhost"], "expected HOST:PORT"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from diloco.cli import app

    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr


def test_the_exit_status_and_the_report_on_stdout() -> None:
    from typer.testing import CliRunner

    from diloco.cli import app

    with dead_address() as address:
        done = CliRunner().invoke(app, ["doctor", "--syncer", address, "--json", "-"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["ready"] is False
    assert "not ready: connect" in done.stderr


# -- the pieces -------------------------------------------------------------------------------------------------------


def fake_root(folder: Path, cgroup: str, files: dict[str, str]) -> Path:
    meminfo = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    assert memory(fake_root(tmp_path / "0", "0::/\n", {})) == Memory(1_024_000, "the machine")
    top = "sys/fs/cgroup"
    nested = {
        f"{top}/a/memory.max": "500000\n",  # the parent's limit counts, too
        f"{top}/a/memory.current": "300000\n",
        f"{top}/a/memory.stat": "anon 1\ninactive_file 50000\n",
        f"{top}/a/b/memory.max": "max\n",
        f"{top}/a/b/memory.current": "300000\n",
    }
    two = memory(fake_root(tmp_path / "2", "0::/a/b\n", nested))
    assert two.available == 500000 - 300000 + 50000
    assert "sys/fs/cgroup/a (limit 500000 bytes)" in two.bound
    seen_from_inside = {f"{top}/memory.max": "400000\n", f"{top}/memory.current": "100000\n"}
    assert memory(fake_root(tmp_path / "in", "0::/../../job\n", seen_from_inside)).available == 300000
    one = {
        f"{top}/memory/job/memory.limit_in_bytes": "600000\n",
        f"{top}/memory/job/memory.usage_in_bytes": "700000\n",
    }
    text = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    assert memory(fake_root(tmp_path / "1", text, one)).available == 0


def test_memory_of_this_machine() -> None:
    assert 0 < memory().available <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_interfaces_of_this_machine() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


def test_models_from_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.save(Tied().state_dict(), tmp_path / "tied.pt")
    assert _C.layout_difference(load_specs(str(tmp_path / "tied.pt")), specs(Tied())) == ""
    safetensors.save_model(Tied(), tmp_path / "tied.safetensors")
    assert _C.layout_difference(load_specs(str(tmp_path / "tied.safetensors")), specs(Tied())) == ""
    filters = nn.ParameterDict({"filter": nn.Parameter(torch.ones(3, dtype=torch.complex64))})
    torch.save(filters.state_dict(), tmp_path / "complex.pt")
    safetensors.save_file(filters.state_dict(), tmp_path / "complex.safetensors")
    for name in ("complex.pt", "complex.safetensors"):
        assert load_specs(str(tmp_path / name)) == specs(filters) == [("filter", [3, 2], "float32", [])]
    safetensors.save_file(small_model().state_dict(), tmp_path / "small.safetensors")
    loaded = load_specs(str(tmp_path / "small.safetensors"))
    assert _C.layout_difference(loaded, specs(small_model())) == ""
    assert fingerprint(loaded) == fingerprint(load_specs(MODEL)) == fingerprint(load_specs(MODEL)[::-1])
    assert fingerprint(loaded) != fingerprint(specs(Tied()))


class Trap:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a file was unpickled",))


def test_models_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": small_model().state_dict()}, tmp_path / "nested.pt")
    torch.save({"trap": Trap()}, tmp_path / "trap.pt")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    torch.save({"count": torch.ones(2, dtype=torch.int64)}, tmp_path / "whole.pt")
    for text, words in {
        str(tmp_path / "nested.pt"): "expected a flat state_dict",
        str(tmp_path / "trap.pt"): "cannot be read safely",
        str(tmp_path / "junk.pt"): "cannot be read safely",
        str(tmp_path / "junk.safetensors"): "cannot be read",
        str(tmp_path / "whole.pt"): "no floating-point tensor",
        str(tmp_path / "missing.pt"): "neither and no file",
        "toys": "module:function",
        "no_such_module:make": "ModuleNotFoundError",
        "toys:no_such_function": "AttributeError",
        "toys:snapshot": "without arguments",
        "toys:dead_address": "expected a torch.nn.Module back",
    }.items():
        with pytest.raises(Wrong) as refusal:
            load_specs(text)
        assert words in str(refusal.value), text
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "no_main.py").write_text("raise SystemExit('usage: ...')")
    with pytest.raises(Wrong, match="under: if __name__ == '__main__'"):
        load_specs("no_main:make")
    with dead_address() as address:
        report = learner(address, model="no_main:make")
    assert report.next == f"diloco-syncer --bind {address}"  # of the first thing that is wrong
    report = Report("learner", "train")
    report.wrong("model", Wrong("not that"))
    assert report.next == "mend that (model), then diloco doctor again"
    frozen = small_model().requires_grad_(False)
    sys.modules["frozen_model"] = SimpleNamespace(make=lambda: frozen)  # type: ignore[assignment]
    try:
        with pytest.raises(Wrong, match="requires grad"):
            load_specs("frozen_model:make")
    finally:
        del sys.modules["frozen_model"]


@pytest.mark.parametrize(
    ("rate", "text"), [(0.0, "0 bit/s"), (124.9, "999 bit/s"), (125, "1 kbit/s"), (1.25e9, "10 Gbit/s")]
)
def test_bit_rates(rate: float, text: str) -> None:
    assert bit_rate(rate) == text
