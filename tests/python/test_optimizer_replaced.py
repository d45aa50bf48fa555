"""Parameters that change after wrapping: replaced, frozen, unfrozen, added, materialised (field cases F014, F040, F043,
F044)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from toys import LOCKSTEP, QUICK, loss_of, small_model, snapshot, train_step

import diloco
from diloco._replaced import Watch
from diloco.parameters import collect

NESTEROV = {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


def wrap(model: nn.Module, address: str, **options: Any) -> diloco.DiLoCoOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return diloco.DiLoCoOptimizer(inner, model, address, tokens=lambda: 16, **options)


# ---- replaced ----


def renew(model: nn.Module, module: str = "0") -> None:
    target = model.get_submodule(module)
    target.weight = nn.Parameter(target.weight.detach().clone())


def shard(model: nn.Module) -> None:
    """What fully_shard does to a module: other Parameter objects under the same names."""
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, key)
            module.register_parameter(key, nn.Parameter(parameter.detach().clone()))


def swap_module(model: nn.Module) -> None:
    model[2] = copy.deepcopy(model[2])


@pytest.mark.parametrize("replace", [renew, shard, swap_module])
@pytest.mark.parametrize("functional", [False, True], ids=["wrapper", "learner"])
def test_it_is_noticed_within_a_few_steps(nobody: str, replace: Callable[[nn.Module], None], functional: bool) -> None:
    model = small_model()
    if functional:
        learner: Any = diloco.Learner(model, nobody)
        step = learner.step
    else:
        learner = wrap(model, nobody)
        step = lambda: train_step(model, learner, 0)  # noqa: E731
    with learner:
        step()
        replace(model)
        with pytest.raises(ValueError, match=r"parameter\(s\) of the model were replaced .*'\d\.weight'.*wrap it"):
            for _ in range(3):
                step()
        with pytest.raises(ValueError, match="were replaced"):  # and it stays refused
            for _ in range(3):
                step()


class Around(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inside, inputs, use_reentrant=False)


def test_modules_put_around_others_are_followed(nobody: str) -> None:
    """Activation checkpointing and parametrizations move parameters to other places: the same objects."""
    model = small_model()
    with wrap(model, nobody) as opt:
        train_step(model, opt, 0)
        model[0] = Around(model[0])
        torch.nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Identity())
        for step in range(1, 4):
            train_step(model, opt, step)
        assert opt.stats()["steps"] == 4
        model[0].inside.weight = nn.Parameter(torch.zeros(8, 6))
        with pytest.raises(ValueError, match=r"'0\.weight'"):
            for step in range(3):
                train_step(model, opt, step)


def test_a_tie_that_is_cut_is_noticed(nobody: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with diloco.Learner(model, nobody) as learner:
        learner.step()
        model[1].weight = nn.Parameter(model[0].weight.detach().clone())
        with pytest.raises(ValueError, match=r"1 parameter\(s\) of the model were replaced .*'0\.weight'"):
            for _ in range(3):
                learner.step()


def test_assigned_by_load_state_dict_is_noticed_at_once(nobody: str) -> None:
    model = small_model()
    with (
        wrap(model, nobody),
        pytest.raises(ValueError, match=r"4 parameter\(s\) of the model were .*'0.weight'"),
    ):
        model.load_state_dict(snapshot(model), assign=True)


def test_a_conversion_that_swaps_is_refused_by_torch(nobody: str) -> None:
    """With swapped tensors the learner would hold the old ones; torch does not swap what others hold."""
    model = small_model()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with wrap(model, nobody), pytest.raises(RuntimeError, match="Couldn't swap"):
            model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_parameters_taken_out_of_the_optimizer_are_noticed_at_an_adoption() -> None:
    model = small_model()
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer, wrap(model, syncer.endpoint) as opt:
        opt.param_groups[0]["params"] = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        with pytest.raises(
            ValueError, match=r"4 synchronised parameter\(s\) are no longer in the optimizer \('0.weight'"
        ):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                opt.step()


def test_replaced_memory_is_followed() -> None:
    """`p.data = ...` and in-place loads keep the Parameter: for real and for complex ones."""
    model = nn.ParameterDict(
        {"real": nn.Parameter(torch.ones(3)), "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64))}
    )
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": 1}, shutdown_s=0.5) as syncer, wrap(model, syncer.endpoint) as opt:
        for parameter in model.values():
            parameter.data = torch.full_like(parameter, 2.0)
        for _ in range(4):
            opt.zero_grad()
            (model["real"].sum() + model["complex"].real.sum()).backward()
            opt.step()
        assert syncer.status()["rounds_merged"] == 1
        torch.testing.assert_close(syncer.weights()["real"], torch.full((3,), 1.6))
        torch.testing.assert_close(syncer.weights()["complex"], torch.tensor([[1.6, 0.0], [1.6, 0.0]]))
        torch.testing.assert_close(model["complex"].detach(), torch.full((2,), 1.6, dtype=torch.complex64))


def test_looking_costs_next_to_nothing() -> None:
    """At every step: far below 0.3 % of a millisecond, whatever the size of the model."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(200)))
    watch = Watch(model, collect(model))
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            watch.look()
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 3e-6, best


# ---- frozen and unfrozen ----


def test_frozen_for_a_while_after_wrapping() -> None:
    """While frozen it does not move, whatever the others' momentum; then it takes part, its momentum from zero."""
    model = small_model()
    with (
        diloco.Syncer(**LOCKSTEP | {"min_quorum": 1} | NESTEROV, shutdown_s=0.5) as syncer,
        wrap(model, syncer.endpoint) as opt,
    ):
        model[0].requires_grad_(False)
        frozen, trained = model[0].weight.detach().clone(), model[2].weight.detach().clone()
        for step in range(8):
            train_step(model, opt, step)
        assert torch.equal(syncer.weights()["0.weight"], frozen)
        assert not torch.equal(syncer.weights()["2.weight"], trained)
        saved = opt.state_dict()
        opt.load_state_dict(saved)
        assert not model[0].weight.requires_grad
        model[0].requires_grad_(True)
        plain = copy.deepcopy(model)
        bare = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(8, 12):
            train_step(model, opt, step)
            train_step(plain, bare, step)
        moved = syncer.weights()["0.weight"] - frozen
        torch.testing.assert_close(moved, 0.7 * 1.9 * (plain[0].weight - frozen), rtol=0, atol=1e-5)
        assert moved.abs().max() > 1e-3


def test_unfrozen_after_wrapping_is_taken_into_the_run() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": 1}, shutdown_s=0.5) as syncer, wrap(model, syncer.endpoint) as opt:
        for step in range(8):
            train_step(model, opt, step)
        assert set(syncer.weights()) == set(opt.learner.anchor_state_dict()) == {"2.weight", "2.bias"}
        model[0].requires_grad_(True)
        for step in range(8, 20):
            train_step(model, opt, step)
        assert set(syncer.weights()) == set(opt.learner.anchor_state_dict()) == set(model.state_dict())
        assert opt.stats()["versions"][-1][1] >= 1


# ---- added groups ----


def test_saved_and_resumed_after_a_group_was_added() -> None:
    """A group without names is trained by this learner alone; saving and resuming keep it, and the others' window."""
    settings = LOCKSTEP | {"min_quorum": 1}

    def start(address: str) -> tuple[nn.Module, nn.Linear, diloco.DiLoCoOptimizer]:
        model = small_model()
        torch.manual_seed(3)
        head = nn.Linear(2, 2)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        opt = diloco.DiLoCoOptimizer(inner, model, address, learner_id="a", tokens=lambda: 16)
        opt.add_param_group({"params": list(head.parameters()), "lr": 0.05})
        return model, head, opt

    def train(model: nn.Module, head: nn.Module, opt: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            opt.zero_grad()
            loss_of(nn.Sequential(model, head), step).backward()
            opt.step()

    def run(cut: int | None) -> list[torch.Tensor]:
        with diloco.Syncer(**settings, shutdown_s=0.5) as syncer:
            model, head, opt = start(syncer.endpoint)
            train(model, head, opt, 1, cut or 10)
            if cut:
                saved = copy.deepcopy((opt.state_dict(), head.state_dict()))
                opt.close()
                model, head, opt = start(syncer.endpoint)
                head.load_state_dict(saved[1])
                opt.load_state_dict(saved[0])
                train(model, head, opt, cut + 1, 10)
            assert opt.stats()["total_steps"] == 10
            assert len(opt.param_groups) == 2
            opt.close()
            return [p.detach() for p in (*model.parameters(), *head.parameters())] + list(syncer.weights().values())

    wanted = run(None)
    for cut in (4, 6):
        assert all(torch.equal(a, b) for a, b in zip(run(cut), wanted, strict=True))


# ---- meta and lazy ----


@contextmanager
def running() -> Iterator[diloco.Syncer]:
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": 1, "adopt": "rebase"}, shutdown_s=0.5) as syncer:
        yield syncer


def test_a_model_without_values_is_filled_by_the_syncer() -> None:
    first = small_model()
    with running() as syncer, wrap(first, syncer.endpoint, learner_id="first"):
        with torch.device("meta"):
            second = small_meta()
        with pytest.raises(ValueError, match=r"'0.weight' is on the meta device and has no values"):
            wrap(second, syncer.endpoint)
        second = second.to_empty(device="cpu")
        with torch.no_grad():
            for parameter, value in zip(second.parameters(), (float("nan"), float("inf"), 3e38, -1.0), strict=True):
                parameter.fill_(value)  # whatever the memory held
        with wrap(second, syncer.endpoint, learner_id="second"):
            assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def small_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def test_lazy_layers_are_wrapped_after_a_forward_pass() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2))
    with running() as syncer:
        with pytest.raises(ValueError, match=r"'0.weight' has no shape yet; run one forward pass"):
            wrap(model, syncer.endpoint)
        loss_of(model, 0)
        with wrap(model, syncer.endpoint) as opt:
            for step in range(4):
                train_step(model, opt, step)
            assert syncer.status()["rounds_merged"] == 1


def test_averages_of_weights_are_other_models(nobody: str) -> None:
    """swa_utils.AveragedModel copies the model: it is nobody's learner."""
    model = small_model()
    with wrap(model, nobody) as opt:
        averaged = swa_utils.AveragedModel(model)
        for step in range(3):
            train_step(model, opt, step)
            averaged.update_parameters(model)
        assert opt.stats()["steps"] == 3
        assert not torch.equal(averaged.module[0].weight, model[0].weight)
