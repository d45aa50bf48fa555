"""diloco.Learner in loops without an optimizer object."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import LOCKSTEP, QUICK, dead_address, small_model

import diloco


@pytest.fixture
def syncer() -> Iterator[diloco.Syncer]:
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as running:
        yield running


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DILOCO_") and name != "DILOCO_SOAK":
            monkeypatch.delenv(name)


def descend(model: torch.nn.Module, learner: diloco.Learner, steps: int) -> None:
    """A training loop without an optimizer."""
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)
        learner.step(tokens=8)


def test_trains_without_an_optimizer(syncer: diloco.Syncer) -> None:
    model = small_model()
    with diloco.Learner(model, syncer.endpoint, learner_id="a") as learner:
        assert repr(learner) == f"<diloco.Learner 'a' of {syncer.endpoint}>"
        while learner.stats()["contributions_merged"] < 4:
            descend(model, learner, 10)
        stats = learner.stats()
        assert stats["tokens"] == 8 * stats["steps"]
        assert stats["blocked_calls"] == stats["steps"] + 1  # joining too
        assert 0 < stats["blocked_longest_s"] <= stats["blocked_s"]
        assert len(learner.take_blocked()) == stats["blocked_calls"]
        assert learner.take_blocked() == []
    assert learner.closed
    assert learner.stats()["state"] == "closed"


def test_second_learner_starts_from_the_global_weights(syncer: diloco.Syncer) -> None:
    first, second = small_model(1), small_model(2)
    with diloco.Learner(first, syncer.endpoint), diloco.Learner(second, syncer.endpoint) as learner:
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        weights = syncer.weights()
        for name, anchor in learner.anchor_state_dict().items():
            assert torch.equal(anchor, weights[name])


@pytest.mark.parametrize("form", ["pairs", "generator", "mapping"])
def test_takes_named_tensors(syncer: diloco.Syncer, form: str) -> None:
    model = small_model()
    given: Any = {
        "pairs": list(model.named_parameters()),
        "generator": model.named_parameters(),
        "mapping": dict(model.named_parameters()),
    }[form]
    with diloco.Learner(given, syncer.endpoint) as learner:
        assert list(learner.anchor_state_dict()) == [name for name, _ in model.named_parameters()]


def test_comes_back_by_itself() -> None:
    """The syncer is not there at first: the learner trains alone, and joins when it appears."""
    with dead_address() as address:
        model = small_model()
        learner = diloco.Learner(model, address, learner_id="a")
        descend(model, learner, 3)
        assert learner.stats()["state"] == "connecting"
    with diloco.Syncer(address, **QUICK, shutdown_s=0.5), learner:
        while learner.stats()["contributions_merged"] < 2:
            descend(model, learner, 1)
            threading.Event().wait(0.001)
        assert learner.stats()["state"] == "training"


def test_who_never_joined_says_so_at_the_end(syncer: diloco.Syncer, caplog: pytest.LogCaptureFixture) -> None:
    with dead_address() as address, diloco.Learner(small_model(), address, learner_id="alone") as learner:
        learner.step()
    expected = f"[alone] closed without ever having reached the syncer at {address}: 1 steps were made alone"
    assert [r.levelname for r in caplog.records if r.message.startswith(expected)] == ["WARNING"]
    caplog.clear()
    with diloco.Learner(small_model(), syncer.endpoint):
        pass
    assert "without ever" not in caplog.text


def test_lockstep_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    """On the syncer, and on the learner while its thread is held."""
    ended: list[Exception] = []

    def train(learner: diloco.Learner) -> None:
        try:
            while True:
                learner.step()
        except ConnectionError as error:
            ended.append(error)

    with diloco.Syncer(**LOCKSTEP | {"min_quorum": 2}, shutdown_s=0.5) as syncer:
        held = diloco.Learner(small_model(), syncer.endpoint, learner_id="a", give_up_after_s=0.2)
        thread = threading.Thread(target=train, args=[held])
        thread.start()
        deadline = time.monotonic() + 30
        while "[a] in lockstep, waiting for fragment " not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "fewer than min_quorum = 2 are here (`diloco status` says which)" in caplog.text
        waiting = "1 of 2 learners are here (min_quorum); no outer step until then, in lockstep they wait"
        assert syncer.status()["waiting"] == waiting
        assert not ended
    thread.join(30)
    held.close()
    assert len(ended) == 1


def test_gives_up_when_asked_to() -> None:
    with dead_address() as address:
        model = small_model()
        with (
            diloco.Learner(model, address, give_up_after_s=0.3) as learner,
            pytest.raises(ConnectionError, match=address),
        ):
            while True:
                learner.step()
                threading.Event().wait(0.01)


def test_arguments_come_from_the_environment(syncer: diloco.Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SYNCER", syncer.endpoint)
    monkeypatch.setenv("DILOCO_LEARNER_ID", "from-environment")
    with diloco.Learner(small_model()) as learner:
        assert learner.learner_id == "from-environment"
        assert learner.stats()["state"] == "training"
        assert syncer.status()["learners"][0]["id"] == "from-environment"
    with diloco.Learner(small_model(), syncer.endpoint, learner_id="from-argument") as learner:
        assert learner.learner_id == "from-argument"


def test_name_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-7")
    monkeypatch.setenv("RANK", "3")
    with dead_address() as address, diloco.Learner(small_model(), address) as learner:
        assert learner.learner_id.endswith("-run-7-3")


def test_random_name_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diloco")
    with dead_address() as address, diloco.Learner(small_model(), address) as learner:
        assert f"no learner_id was given: this learner is '{learner.learner_id}'" in caplog.text
        assert "MiB of host memory" in caplog.text


def test_ledger_file(syncer: diloco.Syncer, tmp_path: Path) -> None:
    model = small_model()
    with diloco.Learner(model, syncer.endpoint, learner_id="a", ledger_dir=tmp_path) as learner:
        descend(model, learner, 5)
        path = tmp_path / f"a.{learner.incarnation}.ledger"
        assert int.from_bytes(path.read_bytes()[16:24], "little") == 40
    assert int.from_bytes(path.read_bytes()[40:48], "little") == 1  # closed


def test_no_step_after_close(syncer: diloco.Syncer) -> None:
    learner = diloco.Learner(small_model(), syncer.endpoint)
    learner.close()
    learner.close()
    with pytest.raises(RuntimeError, match="closed"):
        learner.step()


def test_tokens_are_checked(syncer: diloco.Syncer) -> None:
    with diloco.Learner(small_model(), syncer.endpoint) as learner:
        for wrong in (-1, 0.5):
            with pytest.raises(ValueError, match="whole number of tokens"):
                learner.step(wrong)  # type: ignore[arg-type]
        learner.step(torch.tensor(3))  # type: ignore[arg-type]
        assert learner.stats()["tokens"] == 3
