"""diloco.Syncer inside a Python process, and diloco.status()."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from toys import QUICK, dead_address, small_model

import diloco


def test_lives_as_long_as_its_context(tmp_path: Path) -> None:
    file = tmp_path / "endpoint"
    with diloco.Syncer(endpoint_file=file) as syncer:
        host, port = syncer.endpoint.split(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert syncer.endpoint in file.read_text()
        assert syncer.running
        assert repr(syncer) == f"<diloco.Syncer at {syncer.endpoint}>"
        assert syncer.weights() == {}
    assert not syncer.running
    syncer.stop()


def test_status_from_inside_and_outside() -> None:
    with diloco.Syncer(**QUICK, min_quorum=2) as syncer, diloco.Learner(small_model(), syncer.endpoint, learner_id="a"):
        inside, outside = syncer.status(), diloco.status(syncer.endpoint)
        assert inside.keys() == outside.keys()
        assert [learner["id"] for learner in outside["learners"]] == ["a"]
        assert outside["quorum"] == 2
        assert sum(fragment["numel"] for fragment in outside["fragments"]) == 74
        # A monitor takes no part.
        assert len(syncer.status()["learners"]) == 1


def test_weights_are_the_models() -> None:
    model = small_model()
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer, diloco.Learner(model, syncer.endpoint):
        weights = syncer.weights()
        assert weights.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert weights[name].dtype == torch.float32
            assert torch.equal(weights[name], tensor)
        model.load_state_dict(weights)


def test_weights_are_a_copy() -> None:
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer, diloco.Learner(small_model(), syncer.endpoint):
        syncer.weights()["0.bias"].fill_(7.0)
        assert not (syncer.weights()["0.bias"] == 7.0).any()


def test_event_log(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with (
        diloco.Syncer(**QUICK, event_log=log, shutdown_s=0.5) as syncer,
        diloco.Learner(small_model(), syncer.endpoint, learner_id="a") as learner,
    ):
        learner.close()
        while syncer.status()["learners"][0]["state"] != "gone":  # the goodbye is on its way; pytest's limit ends this
            pass
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "stop"
    assert {"join", "plan", "init", "leave"} <= set(kinds)


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_MIN_QUORUM", "3")
    monkeypatch.setenv("DILOCO_MODE", "lockstep")
    with diloco.Syncer(mode="decoupled") as syncer:
        status = syncer.status()
    assert (status["quorum"], status["mode"]) == (3, "decoupled")


def test_nobody_to_ask() -> None:
    with dead_address() as address, pytest.raises(ConnectionError, match=address):
        diloco.status(address, timeout_s=5)
