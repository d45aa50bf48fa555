"""What one step is: closures, hooks, GradScaler, checkpoint tools, tokens (field cases F009, F015)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from toys import Pair, assert_same, loss_of, small_model, train_step

import diloco


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_alone_it_is_the_inner_optimizer(nobody: str, kind: str) -> None:
    pair = Pair(nobody, OPTIMIZERS[kind])
    with pair.opt:
        for step in range(20):
            pair.step(step)
        assert_same(pair.model, pair.plain_model)
        assert pair.opt.stats()["steps"] == 20
        assert pair.opt.stats()["tokens"] == 320


def test_it_is_an_optimizer(nobody: str) -> None:
    pair = Pair(nobody, sgd)
    with pair.opt:
        assert isinstance(pair.opt, torch.optim.Optimizer)
        assert "lr: 0.1" in repr(pair.opt)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_closure_gives_back_its_loss(nobody: str, by_keyword: bool) -> None:
    pair = Pair(nobody, sgd)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        pair.opt.zero_grad()
        loss = loss_of(pair.model, 0)
        loss.backward()
        losses.append(loss)
        return loss

    losses: list[torch.Tensor] = []
    with pair.opt:
        given = pair.opt.step(closure=closure) if by_keyword else pair.opt.step(closure)
        assert given is losses[0]
        assert pair.opt.stats()["steps"] == 1


def test_lbfgs_reaches_the_same_value(nobody: str) -> None:
    def minimise(make: Callable[[torch.optim.Optimizer, Any], torch.optim.Optimizer]) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.tensor([3.0, -2.0, 1.0]))
        optimizer = make(torch.optim.LBFGS([weight], lr=0.5, max_iter=5), {"weight": weight})

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight * torch.tensor([1.0, 4.0, 9.0]) * weight).sum()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return weight.detach()

    bare = minimise(lambda inner, _: inner)
    wrapped = minimise(lambda inner, named: diloco.DiLoCoOptimizer(inner, named, syncer=nobody, tokens=lambda: 1))
    assert torch.equal(bare, wrapped)


def test_optimizer_whose_step_takes_nothing(nobody: str) -> None:
    class Plainest(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)

    pair = Pair(nobody, Plainest)
    with pair.opt:
        pair.step(0)
        assert_same(pair.model, pair.plain_model)
        assert pair.opt.stats()["steps"] == 1


def test_hooks_fire_once_each(nobody: str) -> None:
    pair = Pair(nobody, sgd)
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name)

    pair.opt.register_step_pre_hook(note("wrapper pre"))
    pair.opt.register_step_post_hook(lambda opt, *_: seen.append(f"wrapper post {opt.stats()['steps']}"))
    pair.inner.register_step_pre_hook(note("inner pre"))
    pair.inner.register_step_post_hook(lambda *_: seen.append(f"inner post {pair.opt.stats()['steps']}"))
    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        with pair.opt:
            for step in range(3):
                seen.clear()
                train_step(pair.model, pair.opt, step)
                # The boundary comes after the inner post hooks.
                assert sorted(seen[:3]) == ["global pre", "inner pre", "wrapper pre"]
                assert sorted(seen[3:]) == ["global post", f"inner post {step}", f"wrapper post {step + 1}"]
                assert seen[0] == "wrapper pre"
                assert seen[-1] == f"wrapper post {step + 1}"
    finally:
        for handle in handles:
            handle.remove()


def test_pre_hook_may_change_the_closure(nobody: str) -> None:
    pair = Pair(nobody, sgd)
    with pair.opt:
        pair.opt.register_step_pre_hook(lambda opt, args, kwargs: (args, {"closure": lambda: 42.0}))
        assert pair.opt.step() == 42.0


def test_scaler_and_closure_are_refused_as_by_torch(nobody: str) -> None:
    pair = Pair(nobody, sgd)
    scaler = torch.amp.GradScaler("cpu")
    with pair.opt:
        for optimizer in (pair.plain, pair.opt):
            with pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"):
                scaler.step(optimizer, closure=lambda: 0.0)
        assert pair.opt.stats()["steps"] == 0


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused"])
def test_step_skipped_by_the_scaler_is_no_step(nobody: str, kind: str) -> None:
    pair = Pair(nobody, OPTIMIZERS[kind])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pair.opt:
        for step in range(5):
            pair.opt.zero_grad()
            scaler.scale(loss_of(pair.model, step)).backward()
            if step == 2:
                pair.model[0].weight.grad.fill_(float("inf"))
            else:
                train_step(pair.plain_model, pair.plain, step)
            scaler.unscale_(pair.opt)
            scaler.step(pair.opt)
            scaler.update()
        stats = pair.opt.stats()
        assert (stats["steps"], stats["tokens"]) == (4, 64)
        assert_same(pair.model, pair.plain_model, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_steps_of_checkpoint_tools_are_no_steps(nobody: str, kind: str) -> None:
    pair = Pair(nobody, OPTIMIZERS[kind])
    with pair.opt:
        for _ in range(3):
            get_optimizer_state_dict(pair.model, pair.opt)
        assert pair.opt.stats()["steps"] == 0
        for step in range(3):
            train_step(pair.model, pair.opt, step)
        pair.opt.zero_grad()
        saved = copy.deepcopy(get_optimizer_state_dict(pair.model, pair.opt))
        assert pair.opt.stats()["steps"] == 3
    fresh = Pair(nobody, OPTIMIZERS[kind])
    with fresh.opt:
        set_optimizer_state_dict(fresh.model, fresh.opt, saved)
        assert fresh.opt.stats()["steps"] == 0
        for old, new in zip(pair.inner.state.values(), fresh.inner.state.values(), strict=True):
            assert old.keys() == new.keys()
            for key in old:
                assert torch.equal(torch.as_tensor(old[key]), torch.as_tensor(new[key]))


def test_add_tokens_gathers_micro_batches(nobody: str) -> None:
    model = small_model()
    with diloco.DiLoCoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, syncer=nobody) as opt:
        for step in range(3):
            opt.add_tokens(10)
            opt.add_tokens(step)
            train_step(model, opt, step)
        assert opt.stats()["tokens"] == 33
        for wrong in (-1, 1.5):
            with pytest.raises(ValueError, match="whole number of tokens"):
                opt.add_tokens(wrong)  # type: ignore[arg-type]


def test_without_tokens_it_says_so_once(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    with diloco.DiLoCoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, syncer=nobody) as opt:
        for step in range(3):
            train_step(model, opt, step)
        assert opt.stats()["tokens"] == 3
    assert caplog.text.count("every step counts as one token") == 1


def test_the_syncers_absence_is_said_once_and_is_no_error(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "diloco")
    pair = Pair(nobody, sgd)
    with pair.opt:
        for step in range(30):
            pair.step(step)
        assert pair.opt.stats()["state"] in ("connecting", "away")
    about = [record.getMessage() for record in caplog.records if nobody in record.getMessage()]
    assert 1 <= len(about) <= 2, about
    assert_same(pair.model, pair.plain_model)


def test_no_step_after_close(nobody: str) -> None:
    pair = Pair(nobody, sgd)
    pair.opt.close()
    pair.opt.close()
    with pytest.raises(RuntimeError, match=r"is closed; expected no step after close\(\)"):
        pair.opt.step()
    assert pair.opt.stats()["state"] == "closed"
    with diloco.DiLoCoOptimizer(pair.inner, pair.model, syncer=nobody, tokens=lambda: 1) as again:
        train_step(pair.model, again, 0)


def test_a_profiler_shows_the_boundary(nobody: str) -> None:
    pair = Pair(nobody, sgd)
    with pair.opt, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(3):
            train_step(pair.model, pair.opt, step)
    counts = {entry.key: entry.count for entry in profile.key_averages()}
    assert counts["diloco::boundary"] == 3
    assert counts["Optimizer.step#SGD.step"] == 3


def test_compiled_training_step(nobody: str) -> None:
    pair = Pair(nobody, sgd)

    @torch.compile(backend="eager")
    def step(index: int) -> torch.Tensor:
        pair.opt.zero_grad()
        loss = loss_of(pair.model, index)
        loss.backward()
        pair.opt.step()
        return loss

    with pair.opt:
        step(0)
        step(1)
        assert pair.opt.stats()["steps"] == 2


@pytest.mark.parametrize("how", ["step", "loop"])
def test_compiled_optimizer_step(nobody: str, how: str) -> None:
    """torch.compile(opt.step), and a compiled model whose names carry a prefix."""
    pair = Pair(nobody, OPTIMIZERS["adamw"])
    compiled = torch.compile(pair.model, backend="eager") if how == "loop" else pair.model
    ours, plain = (
        torch.compile(one.step, backend="eager") if how == "step" else one.step for one in (pair.opt, pair.plain)
    )
    with pair.opt:
        for step in range(4):
            for model, optimizer, step_fn in ((compiled, pair.opt, ours), (pair.plain_model, pair.plain, plain)):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                step_fn()
        stats = pair.opt.stats()
        assert (stats["steps"], stats["stepped_directly"]) == (4, 0)
        assert_same(pair.model, pair.plain_model)


# ---- GradScaler (F006, F007) ----


def test_a_skipped_step_delays_the_round(nobody: str) -> None:
    """H = 4, infinity at the second of 5 iterations: 4 steps, the first round at iteration 5, with the weight of 4."""
    settings = {"mode": "lockstep", "sync_every": 4, "num_fragments": 1, "overlap_steps": 0, "wire_dtype": "f32"}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with diloco.Syncer(**settings, shutdown_s=0.5) as syncer:
        pair = Pair(syncer.endpoint, sgd)
        with pair.opt:
            for iteration in range(1, 6):
                assert syncer.status()["rounds_merged"] == 0
                pair.opt.zero_grad()
                scaler.scale(loss_of(pair.model, iteration)).backward()
                if iteration == 2:
                    pair.model[2].bias.grad.fill_(float("inf"))
                else:
                    train_step(pair.plain_model, pair.plain, iteration)
                scaler.step(pair.opt)
                scaler.update()
            stats = pair.opt.stats()
        assert syncer.status()["rounds_merged"] == 1
        assert (stats["steps"], stats["tokens"], stats["tokens_merged"]) == (4, 64, 64)
        assert_same(pair.model, pair.plain_model, atol=1e-6)


@pytest.mark.parametrize("both", [True, False], ids=["both_on_the_wrapper", "unscaled_on_the_inner"])
def test_gradients_are_never_divided_twice(nobody: str, both: bool) -> None:
    pair = Pair(nobody, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pair.opt:
        for step in range(3):
            pair.opt.zero_grad()
            scaler.scale(loss_of(pair.model, step)).backward()
            scaler.unscale_(pair.opt if both else pair.inner)
            torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1)
            if not both:
                grads = [p.grad.clone() for p in pair.model.parameters()]
                with pytest.raises(RuntimeError, match=r"divided by the scale twice.*DiLoCoOptimizer in both calls"):
                    scaler.step(pair.opt)
                assert all(torch.equal(p.grad, g) for p, g in zip(pair.model.parameters(), grads, strict=True))
                return
            scaler.step(pair.opt)
            scaler.update()
            pair.plain.zero_grad()
            loss_of(pair.plain_model, step).backward()
            torch.nn.utils.clip_grad_norm_(pair.plain_model.parameters(), 0.1)
            pair.plain.step()
        assert_same(pair.model, pair.plain_model, atol=1e-6)


# ---- accumulation, tokens ----


@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_are_not_steps(set_to_none: bool) -> None:
    """80 micro-batches, a step every 4th, H = 10: 20 steps, 2 rounds, the tokens of all 80 (F019)."""
    settings = {"mode": "lockstep", "sync_every": 10, "num_fragments": 1, "overlap_steps": 0, "wire_dtype": "f32"}
    model = small_model()
    with (
        diloco.Syncer(**settings, shutdown_s=0.5) as syncer,
        diloco.DiLoCoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, syncer.endpoint) as opt,
    ):
        for number in range(1, 81):
            (loss_of(model, number) / 4).backward()
            opt.add_tokens(16)
            if number % 4 == 0:
                opt.step()
                opt.zero_grad(set_to_none=set_to_none)
        stats = opt.stats()
        assert (stats["steps"], stats["tokens"], stats["tokens_merged"]) == (20, 80 * 16, 80 * 16)
        assert syncer.status()["rounds_merged"] == 2


@pytest.mark.parametrize("wrong", [-5, 1.5, float("nan"), float("inf"), None, "many", 1 << 63])
def test_token_counts_are_checked(nobody: str, wrong: Any) -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco.DiLoCoOptimizer(inner, model, nobody, tokens=lambda: wrong) as opt:
        with pytest.raises(ValueError, match=r"expected a whole number of tokens, at least 0, got "):
            train_step(model, opt, 0)
        assert opt.stats()["steps"] == 0


def test_a_step_of_no_tokens_is_a_step_without_weight() -> None:
    """It counts and moves the clock; what it changed is merged with the tokens of later steps."""
    settings = {"mode": "lockstep", "sync_every": 4, "num_fragments": 1, "overlap_steps": 0, "wire_dtype": "f32"}
    tokens = iter([16, 0, 0, 16])
    with diloco.Syncer(**settings, shutdown_s=0.5) as syncer:
        pair = Pair(syncer.endpoint, sgd)
        pair.opt._tokens = lambda: next(tokens)
        with pair.opt:
            for step in range(4):
                pair.step(step)
            stats = pair.opt.stats()
        assert (stats["steps"], stats["tokens"], stats["tokens_merged"]) == (4, 32, 32)
        weights = syncer.weights()
        for name, tensor in pair.plain_model.named_parameters():
            torch.testing.assert_close(weights[name], tensor.detach(), rtol=0, atol=1e-6)


# ---- who steps what (F021) ----


def test_a_step_of_the_inner_optimizer_alone_is_noticed(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(nobody, sgd)
    with pair.opt:
        train_step(pair.model, pair.opt, 0)
        assert "stepped directly" not in caplog.text
        for step in range(1, 4):
            train_step(pair.model, pair.inner, step)
        assert caplog.text.count("the inner optimizer was stepped directly") == 1
        stats = pair.opt.stats()
        assert (stats["steps"], stats["stepped_directly"]) == (1, 3)
    caplog.clear()
    train_step(pair.model, pair.inner, 4)  # after close() that is how to go on
    assert not caplog.records
    assert not pair.inner._optimizer_step_post_hooks


def test_stats_have_the_same_keys_whatever_happens(nobody: str) -> None:
    with diloco.Syncer(mode="lockstep", overlap_steps=0, shutdown_s=0.5) as syncer:
        alone, here = Pair(nobody, sgd), Pair(syncer.endpoint, sgd)
        keys = set(here.opt.stats())
        assert keys == set(alone.opt.stats()) == set(copy.deepcopy(here.opt).stats())
        copied = copy.deepcopy(here.opt)
        assert {key: type(value) for key, value in copied.stats().items()} == {
            key: type(value) for key, value in here.opt.stats().items()
        }
        for pair in (alone, here):
            pair.opt.close()
            assert set(pair.opt.stats()) == keys
