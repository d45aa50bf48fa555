"""Every optimizer of the installed torch: wrapped, with no syncer there, it does what it does bare, bit for bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer
from toys import loss_of, small_model, train_step

import diloco

# How each is made here; what is missing fails test_the_table_has_every_optimizer.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.05, "t0": 5},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.02, "amsgrad": True},
    "AdamW": {"lr": 0.02},
    "Adamax": {"lr": 0.02},
    "LBFGS": {"lr": 0.3, "max_iter": 3},
    "Muon": {"lr": 0.02},
    "NAdam": {"lr": 0.02},
    "RAdam": {"lr": 0.02},
    "RMSprop": {"lr": 0.02, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.02},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {"lr": 0.05},
}


def classes() -> dict[str, type[Optimizer]]:
    return {
        name: value
        for name, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }


def test_the_table_has_every_optimizer() -> None:
    assert set(classes()) == set(ARGUMENTS)
    assert set(classes()) <= set(optim.__all__)


def variants() -> list[Any]:
    """As it is by default, and with each of torch's ways to run it that it has an argument for."""
    out = []
    for name, kind in classes().items():
        known = inspect.signature(kind).parameters
        flags: list[dict[str, bool]] = [{}]
        flags += [{flag: value} for flag in ("foreach",) if flag in known for value in (True, False)]
        flags += [{flag: True} for flag in ("fused", "capturable") if flag in known]
        for flag in flags:
            text = "".join(f"-{key}" if value else f"-no_{key}" for key, value in flag.items())
            out.append(pytest.param(name, flag, id=name + text))
    return out


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 2, sparse=True)
        with torch.no_grad():
            self.embed.weight.copy_(torch.arange(40.0).reshape(20, 2) / 40)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.embed((inputs.abs()[:, 0] * 5).long().clamp(max=19))


def model_for(name: str) -> nn.Module:
    if name == "SparseAdam":
        return Sparse()
    model = small_model()
    if name == "Muon":  # matrices only
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: int, closures: bool) -> list[float]:
    losses = []
    for step in range(steps):
        if not closures:
            losses.append(train_step(model, optimizer, step))
            continue

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def skip_unless_torch_can(name: str, flags: dict[str, bool], make: Callable[[nn.Module], Optimizer]) -> None:
    model = model_for(name)
    try:
        train(model, make(model), 1, name == "LBFGS")
    except (AssertionError, RuntimeError) as error:
        assert "capturable" in flags, error
        pytest.skip(f"{name}(capturable=True) needs CUDA in torch itself: {str(error).splitlines()[0]}")


@pytest.mark.parametrize(("name", "flags"), variants())
def test_alone_it_is_the_bare_optimizer(nobody: str, name: str, flags: dict[str, bool]) -> None:
    def make(model: nn.Module) -> Optimizer:
        return classes()[name]([p for p in model.parameters() if p.requires_grad], **ARGUMENTS[name], **flags)

    skip_unless_torch_can(name, flags, make)
    model = model_for(name)
    plain = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    inner, bare = make(model), make(plain)
    with diloco.DiLoCoOptimizer(inner, model, syncer=nobody, tokens=lambda: 16) as opt:
        assert train(model, opt, 20, name == "LBFGS") == train(plain, bare, 20, name == "LBFGS")
        assert opt.stats()["steps"] == 20
        saved = opt.state_dict()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
    assert any(not torch.equal(tensor, start[key]) for key, tensor in model.state_dict().items())
    same_state(saved, bare.state_dict())
    # And the state goes on in a bare optimizer.
    again = make(model)
    again.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    assert train(model, again, 3, name == "LBFGS") == train(plain, bare, 3, name == "LBFGS")


def same_state(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert saved["param_groups"] == wanted["param_groups"]
    assert saved["state"].keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        assert state.keys() == saved["state"][number].keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, saved["state"][number][key])
