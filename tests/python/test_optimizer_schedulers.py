"""Learning-rate schedulers on the wrapper and on the inner optimizer (field cases F001, F002, F004, F005, F013)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.swa_utils import SWALR
from toys import QUICK, Pair, assert_same, dead_address, small_model, train_step

import diloco

# Every scheduler of the installed torch, and how it is made here.
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 9], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=7),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=7), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=4, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 15, 2.0),
    "SWALR": lambda o: SWALR(o, swa_lr=0.001, anneal_epochs=6),
    "warmup_from_zero": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, epoch / 5)),
}
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.fixture(params=["away", "live"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Nobody there, or a real syncer."""
    if request.param == "away":
        with dead_address() as nobody:
            yield nobody
    else:
        with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer:
            yield syncer.endpoint


def advance(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def test_the_table_has_every_scheduler() -> None:
    bases = {lr_scheduler.LRScheduler}
    there = {
        value.__name__
        for module in (lr_scheduler, swa_utils)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and value.__name__[0] != "_"
    } - {base.__name__ for base in bases}
    assert there | set(lr_scheduler.__all__) - {"LRScheduler"} == set(SCHEDULERS) - {"warmup_from_zero"}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_curve_equals_the_bare_optimizers(address: str, kind: str, name: str) -> None:
    pair = Pair(address, OPTIMIZERS[kind])
    with pair.opt:
        ours, plain = SCHEDULERS[name](pair.opt), SCHEDULERS[name](pair.plain)
        for step in range(20):
            pair.step(step)
            advance(ours, loss=1.0)
            advance(plain, loss=1.0)
            rates = [group["lr"] for group in pair.opt.param_groups]
            assert rates == [group["lr"] for group in pair.inner.param_groups]
            assert rates == [group["lr"] for group in pair.plain.param_groups]
        assert pair.opt.stats()["steps"] == 20
        if pair.opt.stats()["state"] == "connecting":
            assert_same(pair.model, pair.plain_model)


def test_steps_with_rate_zero_are_steps() -> None:
    with dead_address() as nobody:
        pair = Pair(nobody, OPTIMIZERS["sgd"])
        with pair.opt:
            scheduler = SCHEDULERS["warmup_from_zero"](pair.opt)
            for step in range(3):
                pair.step(step)
                scheduler.step()
            assert pair.opt.stats()["steps"] == 3


def test_groups_are_shared_before_and_after_a_load() -> None:
    with dead_address() as nobody:
        first = Pair(nobody, OPTIMIZERS["sgd"])
        scheduler = lr_scheduler.StepLR(first.opt, 8, 0.1)
        for step in range(5):
            first.step(step)
            scheduler.step()
        saved = first.opt.state_dict(), scheduler.state_dict(), first.model.state_dict()
        plain_saved = copy.deepcopy({key: saved[0][key] for key in ("state", "param_groups")})
        first.opt.close()

        second = Pair(nobody, OPTIMIZERS["sgd"])
        scheduler = lr_scheduler.StepLR(second.opt, 8, 0.1)
        assert second.opt.param_groups is second.inner.param_groups
        second.model.load_state_dict(saved[2])
        second.plain_model.load_state_dict(saved[2])
        second.opt.load_state_dict(saved[0])
        second.plain.load_state_dict(plain_saved)
        scheduler.load_state_dict(saved[1])
        assert second.opt.param_groups is second.inner.param_groups
        assert second.opt.state is second.inner.state
        plain_scheduler = lr_scheduler.StepLR(second.plain, 8, 0.1)
        plain_scheduler.load_state_dict(saved[1])
        for step in range(5, 12):
            second.step(step)
            scheduler.step()
            plain_scheduler.step()
        assert second.inner.param_groups[0]["lr"] == pytest.approx(0.005)
        assert_same(second.model, second.plain_model)
        second.opt.close()


@pytest.mark.parametrize("on_inner", [True, False], ids=["made_before_wrapping", "made_on_the_wrapper"])
def test_schedule_reaches_the_weights(on_inner: bool) -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    before = lr_scheduler.CosineAnnealingLR(inner, 10) if on_inner else None
    with dead_address() as nobody, diloco.DiLoCoOptimizer(inner, model, syncer=nobody, tokens=lambda: 1) as opt:
        scheduler = before or lr_scheduler.CosineAnnealingLR(opt, 10)
        weight = model[0].weight
        for step in range(10):
            weight.grad = torch.ones_like(weight)
            old = weight.detach().clone()
            rate = opt.param_groups[0]["lr"]
            assert rate == pytest.approx((1 + torch.cos(torch.tensor(torch.pi * step / 10)).item()) / 2, abs=1e-6)
            opt.step()
            scheduler.step()
            torch.testing.assert_close(old - weight.detach(), torch.full_like(weight, rate))


@pytest.mark.parametrize("on_inner", [True, False], ids=["on_inner", "on_wrapper"])
def test_no_false_warning_and_no_lost_one(on_inner: bool) -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with dead_address() as nobody, diloco.DiLoCoOptimizer(inner, model, syncer=nobody, tokens=lambda: 1) as opt:
        scheduler = lr_scheduler.StepLR(inner if on_inner else opt, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(10):
                train_step(model, opt, step)
                scheduler.step()
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with dead_address() as nobody, diloco.DiLoCoOptimizer(inner, model, syncer=nobody, tokens=lambda: 1) as opt:
        scheduler = lr_scheduler.StepLR(inner if on_inner else opt, 3)
        with pytest.warns(UserWarning, match="lr_scheduler.step"):
            scheduler.step()


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.1)],
    ids=["sgd", "adam"],
)
def test_momentum_cycles_in_the_inner_groups(make: Callable[[Any], Optimizer]) -> None:
    model = small_model()
    inner = make(model.parameters())
    key = "momentum" if "momentum" in inner.defaults else "betas"
    with dead_address() as nobody, diloco.DiLoCoOptimizer(inner, model, syncer=nobody, tokens=lambda: 1) as opt:
        assert opt.defaults is inner.defaults
        scheduler = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)
        seen = set()
        for step in range(10):
            train_step(model, opt, step)
            scheduler.step()
            seen.add(inner.param_groups[0][key])
        assert len(seen) > 5


def test_added_group_takes_the_inner_defaults(caplog: pytest.LogCaptureFixture) -> None:
    model, head = small_model(), torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with dead_address() as nobody, diloco.DiLoCoOptimizer(inner, model, syncer=nobody, tokens=lambda: 1) as opt:
        opt.add_param_group({"params": head.parameters()})
        assert inner.param_groups[1]["lr"] == 0.05
        assert inner.param_groups[1]["momentum"] == 0.9
        assert "2 parameter(s) that were added or unfrozen are trained by this process alone" in caplog.text
        before = head.weight.detach().clone()
        opt.zero_grad()
        head(model(torch.randn(4, 6))).sum().backward()
        opt.step()
        assert not torch.equal(before, head.weight)


def test_a_schedule_for_another_optimizer_is_warned_of_by_torch() -> None:
    """Neither the wrapper nor its inner optimizer: nobody here can see it, but torch sees that its optimizer is not
    stepped, at the scheduler's first step."""
    model = small_model()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with dead_address() as nobody, diloco.DiLoCoOptimizer(inner, model, syncer=nobody, tokens=lambda: 1) as opt:
        scheduler = lr_scheduler.StepLR(other, 1, 0.5)
        train_step(model, opt, 0)
        with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\).* before .*optimizer.step\(\)"):
            scheduler.step()
        assert opt.param_groups[0]["lr"] == 0.1
