"""Saving, loading and copying the wrapper."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from toys import QUICK, Pair, assert_same, small_model, snapshot, train_step

import diloco
from diloco._inner_state import reset_inner_state


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def test_safe_loader_reads_it(nobody: str) -> None:
    pair = Pair(nobody, adamw)
    with pair.opt:
        for step in range(3):
            pair.step(step)
        file = io.BytesIO()
        schedule = lr_scheduler.StepLR(pair.opt, 3)
        others = {"scaler": torch.amp.GradScaler("cpu").state_dict(), "schedule": schedule.state_dict()}
        torch.save({"opt": pair.opt.state_dict(), **others}, file)
    file.seek(0)
    loaded = torch.load(file)["opt"]  # weights_only is the default
    assert [loaded["diloco"][key] for key in ("format", "steps", "tokens")] == [2, 3, 48]
    lr_scheduler.StepLR(pair.plain, 3)
    assert loaded["param_groups"] == pair.plain.state_dict()["param_groups"]

    fresh = Pair(nobody, adamw)
    with fresh.opt:
        fresh.opt.load_state_dict(loaded)
        fresh.plain.load_state_dict(pair.plain.state_dict())
        for step in range(3):
            fresh.step(step)
        assert_same(fresh.model, fresh.plain_model)
        stats = fresh.opt.stats()
        assert (stats["steps"], stats["total_steps"], stats["total_tokens"]) == (3, 6, 96)


def test_state_dict_of_the_bare_optimizer_loads(nobody: str) -> None:
    pair = Pair(nobody, adamw)
    with pair.opt:
        train_step(pair.plain_model, pair.plain, 0)
        pair.opt.load_state_dict(pair.plain.state_dict())
        assert len(pair.inner.state) == 4


def test_other_format_is_refused(nobody: str) -> None:
    pair = Pair(nobody, adamw)
    with pair.opt:
        state = pair.opt.state_dict()
        state["diloco"]["format"] = 99
        with pytest.raises(ValueError, match="diloco format 99, expected 2"):
            pair.opt.load_state_dict(state)


def test_state_dict_hooks(nobody: str) -> None:
    pair = Pair(nobody, adamw)
    seen: list[str] = []
    pair.opt.register_state_dict_pre_hook(lambda opt: seen.append("save pre"))
    pair.opt.register_state_dict_post_hook(lambda opt, state: state | {"mine": 1})
    pair.opt.register_load_state_dict_pre_hook(lambda opt, state: {k: v for k, v in state.items() if k != "mine"})
    pair.opt.register_load_state_dict_post_hook(lambda opt: seen.append("load post"))
    with pair.opt:
        state = pair.opt.state_dict()
        assert state["mine"] == 1
        pair.opt.load_state_dict(state)
        assert seen == ["save pre", "load post"]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_copy_is_disconnected_and_complete(how: str, scheduled: bool) -> None:
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer:
        pair = Pair(syncer.endpoint, adamw)
        with pair.opt:
            if scheduled:
                lr_scheduler.StepLR(pair.opt, 3)
            for step in range(5):
                train_step(pair.model, pair.opt, step)
            copied = copy.deepcopy(pair.opt) if how == "deepcopy" else pickle.loads(pickle.dumps(pair.opt))
            assert copied.stats()["state"] == "disconnected"
            assert copied.stats()["total_steps"] == 5
            assert len(copied.state) == 4
            assert copied.param_groups[0]["lr"] == 0.01
            with pytest.raises(RuntimeError, match="takes no part in a run"):
                _ = copied.learner
            parameter, ours = copied.param_groups[0]["params"][0], pair.inner.param_groups[0]["params"][0]
            kept = ours.detach().clone()
            parameter.grad = torch.ones_like(parameter)
            copied.step()
            assert torch.equal(ours, kept)
            assert not torch.equal(parameter, kept)
            copied.close()
            train_step(pair.model, pair.opt, 5)
            assert pair.opt.stats()["steps"] == 6


def test_learner_and_syncer_refuse_to_be_copied(nobody: str) -> None:
    with diloco.Learner(small_model(), nobody) as learner, pytest.raises(TypeError, match="live connection"):
        pickle.dumps(learner)
    with diloco.Syncer() as syncer, pytest.raises(TypeError, match="running server"):
        copy.deepcopy(syncer)


OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    lambda p: torch.optim.NAdam(p, lr=0.01),
    lambda p: torch.optim.LBFGS(p, lr=0.01),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_reset_state_trains_on_from_zero(make: Any) -> None:
    model = small_model()
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(float("nan"))
    reset_inner_state(optimizer, model.parameters())
    optimizer.step(closure)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_reset_leaves_other_parameters_alone() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(model, optimizer, 0)
    before = optimizer.state[model[2].weight]["exp_avg"].clone()
    reset_inner_state(optimizer, [model[0].weight])
    assert not optimizer.state[model[0].weight]["exp_avg"].any()
    assert optimizer.state[model[0].weight]["step"] == 0
    assert torch.equal(optimizer.state[model[2].weight]["exp_avg"], before)


def test_loading_the_model_after_wrapping_is_warned_of(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    saved = snapshot(model)
    with diloco.DiLoCoOptimizer(adamw(list(model.parameters())), model, syncer=nobody, tokens=lambda: 1):
        caplog.clear()
        twin = copy.deepcopy(model)
        twin.load_state_dict(saved)  # a copy is nobody's learner
        pickle.loads(pickle.dumps(model)).load_state_dict(saved)
        assert not caplog.records
        model.load_state_dict(saved)
        assert "Load the model first, then wrap" in caplog.text
    caplog.clear()
    model.load_state_dict(saved)
    assert "Load the model first" not in caplog.text
