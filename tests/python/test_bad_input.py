"""What is wrong is refused with a message that says what was expected, what came, and what to do.

The wrapper's own refusals (wrapped twice, parameters that are not in the model, nothing to synchronise, step after
close) are in test_optimizer_parameters.py and test_optimizer_step.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import QUICK, dead_address, small_model, train_step

import diloco


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DILOCO_") and name != "DILOCO_SOAK":
            monkeypatch.delenv(name)


@pytest.fixture
def running() -> Iterator[Callable[..., diloco.Syncer]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(diloco.Syncer(**QUICK, shutdown_s=0.5, **options))


def join(address: str, model: torch.nn.Module | None = None, **options: Any) -> diloco.Learner:
    return diloco.Learner(model or small_model(), address, **options)


MAKERS: list[Callable[[str], Any]] = [join, diloco.status, lambda address: diloco.Syncer(address)]


# ---- addresses ----


@pytest.mark.parametrize("make", MAKERS, ids=["learner", "status", "syncer"])
@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1", "", "127.0.0.1:seven", "127.0.0.1:99999", "http://a:1/b"]
)
def test_malformed_endpoint(make: Callable[[str], Any], address: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT, for example 127\.0\.0\.1:29400; got '"):
        make(address)


@pytest.mark.parametrize("make", MAKERS[:2], ids=["learner", "status"])
def test_unresolvable_name(make: Callable[[str], Any]) -> None:
    with pytest.raises(ConnectionError, match=r"cannot resolve host name 'no-such-host\.invalid'.*check the spelling"):
        make("no-such-host.invalid:29400")


def test_unreachable_host_is_said_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with dead_address() as address, diloco.DiLoCoOptimizer(inner, model, syncer=address, tokens=lambda: 1) as opt:
        train_step(model, opt, 0)
    assert f"no syncer at {address}" in caplog.text
    assert "training goes on locally, and it is tried again by itself" in caplog.text


def test_port_in_use(running: Callable[..., diloco.Syncer]) -> None:
    taken = running().endpoint
    with pytest.raises(ConnectionError, match=f"port {taken.split(':')[1]} is already in use.*choose another port"):
        diloco.Syncer(bind=taken)


def test_bind_off_loopback_has_to_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"bind '0\.0\.0\.0:0' can be reached from other machines.*insecure=True"):
        diloco.Syncer(bind="0.0.0.0:0")
    with diloco.Syncer(bind="0.0.0.0:0", insecure=True) as syncer:
        assert syncer.endpoint.startswith("0.0.0.0:")


# ---- settings ----


@pytest.mark.parametrize("make", [lambda **s: join("127.0.0.1:1", **s), diloco.Syncer], ids=["learner", "syncer"])
def test_unknown_setting(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"unexpected argument 'sync_evry'; did you mean sync_every\?"):
        make(sync_evry=3)
    with pytest.raises(TypeError, match=r"unexpected argument 'zzzzzz'; docs/settings\.md lists the settings"):
        make(zzzzzz=3)


def test_misspelt_argument() -> None:
    with pytest.raises(TypeError, match=r"unexpected argument 'ledger_dri'; did you mean ledger_dir\?"):
        join("127.0.0.1:1", ledger_dri="x")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync_every": "often"}, 'sync_every must be a whole number .*, got "often"'),
        ({"sync_every": 0}, "sync_every must be at least 1, got 0"),
        ({"mode": "lockstpe"}, r"mode .*lockstep.*lockstpe"),
        ({"overlap_steps": 24}, "overlap_steps must be below sync_every, got overlap_steps 24 with sync_every 24"),
        ({"grace_gamma": 1.5}, "grace_gamma"),
    ],
)
def test_wrong_value(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        diloco.Syncer(**settings)


def test_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SYNC_EVRY", "3")
    for make in (diloco.Syncer, lambda: join("127.0.0.1:1")):
        with pytest.raises(
            ValueError, match=r"variable DILOCO_SYNC_EVRY is not a setting; did you mean DILOCO_SYNC_EVERY"
        ):
            make()


def test_wrong_value_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SYNC_EVERY", "often")
    with pytest.raises(ValueError, match=r"environment variable DILOCO_SYNC_EVERY: .*often"):
        diloco.Syncer()


def test_settings_of_the_learner_must_be_the_runs(running: Callable[..., diloco.Syncer]) -> None:
    address = running().endpoint
    with join(address, sync_every=4, wire_dtype="f32") as learner:
        assert learner.stats()["state"] == "training"
    with pytest.raises(ValueError, match="setting 'sync_every': this learner asks for 99, the run has 4"):
        join(address, sync_every=99)


# ---- who may join ----


def test_other_run_id(running: Callable[..., diloco.Syncer]) -> None:
    with pytest.raises(ValueError, match=r"\(run_id\): the run here is 'monday', learner 'a' belongs to run 'tuesday'"):
        join(running(run_id="monday").endpoint, learner_id="a", run_id="tuesday")


def test_second_learner_of_the_same_name(running: Callable[..., diloco.Syncer]) -> None:
    address = running().endpoint
    words = rf"learner_id 'a' is taken by a live learner \(host .*, pid {os.getpid()}\); give every learner its own"
    with join(address, learner_id="a"), pytest.raises(ValueError, match=words):
        join(address, learner_id="a")


def bigger_head() -> torch.nn.Module:
    model = small_model()
    model[2] = torch.nn.Linear(8, 3)
    return model


def frozen_bias() -> torch.nn.Module:
    model = small_model()
    model[0].bias.requires_grad_(False)
    return model


def half() -> torch.nn.Module:
    return small_model().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (bigger_head, r"parameter '2.weight': this learner has float32 \(3, 8\), the run has float32 \(2, 8\)"),
        (frozen_bias, r"parameter '0.bias': this learner has it not at all \(absent or not trainable\), the run has"),
        (half, r"parameter '0.weight': this learner has bfloat16 \(8, 6\), the run has float32 \(8, 6\)"),
    ],
)
def test_another_model(running: Callable[..., diloco.Syncer], model: Callable[[], torch.nn.Module], words: str) -> None:
    address = running().endpoint
    with join(address, learner_id="first"), pytest.raises(ValueError, match=words):
        join(address, model())


@pytest.mark.parametrize("learner_id", ["x" * 65, "ä" * 33])
def test_learner_id_too_long(learner_id: str) -> None:
    with pytest.raises(ValueError, match=r"learner_id: expected 1 to 64 bytes of text, got 6[56] bytes"):
        join("127.0.0.1:1", learner_id=learner_id)


def test_quorum_above_the_learners_there_are_waits_and_says_so(running: Callable[..., diloco.Syncer]) -> None:
    syncer = running(min_quorum=3)
    model = small_model()
    with join(syncer.endpoint, model, learner_id="a") as learner:
        for _ in range(20):
            learner.step()
        status = syncer.status()
        assert status["rounds_merged"] == 0
        assert "3" in status["waiting"]
        assert "1" in status["waiting"]


# ---- files ----


def test_unwritable_files(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=r"event log: cannot open '.*missing/log'.*name a file in a directory"):
        diloco.Syncer(event_log=missing / "log")
    with pytest.raises(ValueError, match=r"ledger_dir: cannot create '.*missing/.*'.*name a directory"):
        join("127.0.0.1:1", ledger_dir=missing)
