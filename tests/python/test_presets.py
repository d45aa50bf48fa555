"""Presets and algorithms through the public API, on real sockets: every paper is a setting of one machine."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import LOCKSTEP, QUICK, loss_of, small_model, train_step, train_together

import diloco
from diloco import _C, audit


def merges_in(log: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event for event in events if event["event"] == "merge"]


def test_what_is_given_wins_over_the_preset_and_the_preset_over_the_default() -> None:
    with diloco.Syncer(preset="streaming", sync_every=30, shutdown_s=0.1) as syncer:
        settings = syncer.status()["settings"]
    assert settings["sync_every"] == "30"
    assert (settings["fragmenter"], settings["adopt"], settings["outer_lr"]) == ("strided", "blend", "0.4")
    assert settings["wire_dtype"] == "bf16"


def test_the_environment_names_a_preset_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_PRESET", "diloco")
    monkeypatch.setenv("DILOCO_OUTER_LR", "0.5")
    with diloco.Syncer(outer_momentum=0.8, shutdown_s=0.1) as syncer:
        settings = syncer.status()["settings"]
    assert [settings[name] for name in ("outer_lr", "outer_momentum", "sync_every")] == ["0.5", "0.8", "500"]


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="preset must be one of none, decoupled, streaming, diloco, async, finetune"):
        diloco.Syncer(preset="gossip")


def test_a_learner_with_another_preset_is_refused_naming_both() -> None:
    with diloco.Syncer(preset="finetune", shutdown_s=0.1) as syncer:
        model = small_model()
        with pytest.raises(ValueError, match=r"(?s)preset.*async.*finetune|preset.*finetune.*async"):
            diloco.Learner(model, syncer.endpoint, preset="async")


def test_gains_are_said_at_start_and_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    with diloco.Syncer(preset="diloco", sync_every=4, shutdown_s=0.1):
        pass
    said = capfd.readouterr().err
    assert "the first outer step is 1.33 x the merged change, in the long run 7 x" in said
    assert "WARNING" in said
    assert "multiplies those by up to 7: known to overshoot" in said


def test_a_merge_rule_that_matches_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    # A comma does not separate rules: this is one, with a comma in it.
    with diloco.Syncer(merge_overrides="0.weight=mean,2.weight=rda;bias=mean", shutdown_s=0.1) as syncer:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.DiLoCoOptimizer(optimizer, model, syncer.endpoint, tokens=lambda: 1):
            pass
    said = capfd.readouterr().err
    assert (
        "merge_overrides: \"0.weight=mean,2.weight=rda\" matches no parameter of this model, such as '0.weight'" in said
    )
    assert "separated by semicolons" in said
    assert '"bias=mean"' not in said


def test_a_learner_in_lockstep_whose_syncer_goes_says_that_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": 1}, shutdown_s=0.1) as syncer, ThreadPoolExecutor(1) as pool:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = diloco.DiLoCoOptimizer(inner, model, syncer.endpoint, tokens=lambda: 1)
        train_step(model, optimizer, 0)
        syncer.stop()
        steps = pool.submit(lambda: [train_step(model, optimizer, step) for step in range(1, 8)])
        deadline = time.monotonic() + 30
        while "in lockstep training waits for it" not in caplog.text:
            assert time.monotonic() < deadline and not steps.done(), caplog.text
            time.sleep(0.01)
        optimizer.close(0.0)  # ends the wait
        with pytest.raises(RuntimeError, match="closed"):
            steps.result(30)


@pytest.mark.parametrize("preset", [preset.name for preset in _C.presets()])
def test_every_preset_trains_and_its_account_is_exact(preset: str, tmp_path: Path) -> None:
    models: list[nn.Module] = [small_model(), small_model()]
    before = sum(loss_of(models[0], 5000 + i).item() for i in range(10))
    overlap = 0 if preset in ("diloco", "async") else 1
    settings: dict[str, Any] = {"sync_every": 4, "overlap_steps": overlap, "heartbeat_interval_s": 0.2}
    with diloco.Syncer(preset=preset, **settings, event_log=tmp_path / "events", shutdown_s=2) as syncer:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda i: train(syncer.endpoint, models[i], f"learner-{i}", tmp_path), range(2)))
        found = small_model()
        found.load_state_dict(syncer.weights())
    merges = merges_in(tmp_path / "events")
    assert len(merges) >= 5
    if preset == "async":
        assert {len(merge["members"]) for merge in merges} == {1}
        assert {merge["reason"] for merge in merges} == {"arrival"}
    merged = Counter(member["learner"] for merge in merges for member in merge["members"])
    assert set(merged) == {"learner-0", "learner-1"}
    assert all(torch.isfinite(parameter).all() for parameter in found.parameters())
    assert sum(loss_of(found, 5000 + i).item() for i in range(10)) < before
    assert audit.main([str(tmp_path / "events"), "--ledger-dir", str(tmp_path)]) == 0


def train(address: str, model: nn.Module, learner_id: str, folder: Path) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    with diloco.DiLoCoOptimizer(
        inner, model, address, learner_id=learner_id, tokens=lambda: 16, ledger_dir=folder
    ) as optimizer:
        for step in range(120):
            train_step(model, optimizer, step + 1000 * int(learner_id[-1]))
            time.sleep(0.002)  # so that rounds find their way between the steps


def test_sync_every_1_is_large_batch_sgd() -> None:
    """Local SGD that loses accuracy against data parallelism counts or averages wrongly."""
    models: list[nn.Module] = [small_model(), small_model()]
    with diloco.Syncer(**LOCKSTEP | {"sync_every": 1}, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, steps=100)
    plain = small_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(1, 101):
        optimizer.zero_grad()
        (sum(loss_of(plain, 100 * index + step) for index in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    for model in models:
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_last_partial_window_is_left_out_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """H = 30 and 100 steps: three rounds, and ten steps that the global weights do not have."""
    caplog.set_level("INFO", "diloco")
    settings = LOCKSTEP | {"sync_every": 30, "min_quorum": 1}
    model, plain = small_model(), small_model()
    with diloco.Syncer(**settings, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, [model], 100)
        assert syncer.status()["rounds_merged"] == 3
        weights = syncer.weights()
    assert f"the last {10 * 16} tokens (summed over fragments) are not merged" in caplog.text
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(1, 91):
        optimizer.zero_grad()
        loss_of(plain, step).backward()
        optimizer.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_learning_rate_far_from_the_others_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """A joiner whose schedule begins anew is at its peak when the rest have decayed; it is told how far they are."""
    with diloco.Syncer(**QUICK | {"heartbeat_interval_s": 0.05}, shutdown_s=0.5) as syncer:
        first, second = small_model(), small_model()
        with diloco.DiLoCoOptimizer(
            torch.optim.SGD(first.parameters(), lr=1e-3), first, syncer.endpoint, learner_id="old", tokens=lambda: 16
        ) as old:
            for step in range(40):
                train_step(first, old, step)
            wait_for(lambda: syncer.status()["learners"][0]["step"] == 40)
            with diloco.DiLoCoOptimizer(
                torch.optim.SGD(second.parameters(), lr=1e-1), second, syncer.endpoint, learner_id="new"
            ) as new:
                stats = new.stats()
                assert (stats["run_clock"], stats["run_tokens"]) == (40, 640)
                train_step(second, new, 0)
                train_step(first, old, 40)
                heard = ""

                def told() -> bool:
                    nonlocal heard
                    heard += capfd.readouterr().err
                    return "learner 'new' trains with learning rate 0.1, the others with 0.001" in heard

                wait_for(told)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nan_of_one_learner_in_lockstep_stops_nobody(tmp_path: Path) -> None:
    """What it sent is refused while all stand still; it goes on from clean weights, and the round waits for that."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return loss_of(model, number) * (float("nan") if number == 107 else 1.0)

    models: list[nn.Module] = [small_model(), small_model()]
    with diloco.Syncer(**LOCKSTEP, event_log=tmp_path / "events", shutdown_s=0.5) as syncer:
        stats = train_together(syncer.endpoint, models, 20, loss)
        status = syncer.status()
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    refused = [event for event in events if event["event"] == "refuse"]
    assert [(event["learner"], event["reason"]) for event in refused] == [("learner-1", "nonfinite")]
    merges = merges_in(tmp_path / "events")
    assert [merge["clock"] for merge in merges] == [4, 8, 12, 16, 20]
    assert all(len(merge["members"]) == 2 for merge in merges)
    assert merges[1]["members"][1]["steps"] == 1  # what it did from the clean weights
    assert all(parameter.isfinite().all() for model in models for parameter in model.parameters())
    assert [one["steps"] for one in stats] == [20, 20]
    assert {learner["bad_payloads"] for learner in status["learners"]} == {0, 1}
