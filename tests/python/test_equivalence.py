"""The whole product against plain torch, with derived bounds: one learner is its inner optimizer, two in lockstep are
synchronous DiLoCo, and the outer step goes in the right direction (F097).

test_optimizer_reference.py compares trained models within what was seen; here every bound is derived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import LOCKSTEP, QUICK, batch, small_model

import diloco

pytestmark = pytest.mark.timeout(90)

STEPS = 50
HALF_ULP = 2.0**-24  # relative error of one rounded f32 operation


def vector(parameters: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in parameters])


# ---- one learner, K = 1, outer SGD lr 1, f32 wire ----
#
# Gradients are given, so what the inner optimizer adds to a weight does not depend on the weight, and the difference to
# the bare optimizer is a plain sum of roundings. With W the largest weight seen and D <= 2 W the largest distance
# between two weights of a run, in units of 2^-24 and per element:
#   a step rounds one sum, in both runs:                                      2 W
#   a merge at the syncer: u = fl(anchor - local), Theta = fl(Theta - u):     D + W
#   its adoption by rebase: u', fl(u' - sent), fl(Theta - that):              D + D + W
# A merge of one contribution multiplies by the weight 1 and, for RDA, by norm/norm, which is exact (merge tests).
def bound(largest: float, steps: int, merges: int) -> float:
    return HALF_ULP * largest * (2 * steps + (3 * 2 + 2) * merges)


INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
RUNS: dict[str, dict[str, Any]] = {
    "lockstep": {"mode": "lockstep", "overlap_steps": 0, "adopt": "overwrite"},
    "lockstep_rebase": {"mode": "lockstep", "overlap_steps": 0, "adopt": "rebase"},
    "free_running": {"mode": "decoupled", "adopt": "rebase", "max_carry_steps": 1_000_000},
}


def given_gradients(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * index + step)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("run", RUNS)
def test_one_learner_is_the_bare_inner_optimizer_after_every_step(run: str, inner: str) -> None:
    model, plain = small_model(), small_model()
    bare = INNER[inner](plain.parameters())
    largest = step = merges = 0
    worst = 0.0
    breath = threading.Event()
    with (
        diloco.Syncer(**QUICK | RUNS[run], shutdown_s=0.5) as syncer,
        diloco.DiLoCoOptimizer(INNER[inner](model.parameters()), model, syncer.endpoint, tokens=lambda: 1) as opt,
    ):
        # Free-running, a busy machine may make 50 steps before it makes a round: then it makes some more.
        while step < STEPS or merges < 6:
            given_gradients(model, step)
            given_gradients(plain, step)
            opt.step()
            bare.step()
            step += 1
            merges = opt.stats()["contributions_merged"]  # of both fragments: more than any element has seen
            ours, theirs = vector(model.parameters()), vector(plain.parameters())
            worst = max(worst, float((ours - theirs).abs().max()))
            largest = max(largest, float(ours.abs().max()), float(theirs.abs().max()))
            breath.wait(0.001 if run == "free_running" else 0)
            assert worst <= bound(largest, step, merges), f"after step {step}"
        held = syncer.weights()
    if run.startswith("lockstep"):
        assert (step, merges) == (STEPS, STEPS // 2)  # two fragments, each every 4 steps, 2 apart
    assert set(held) == set(model.state_dict())


# ---- two learners in lockstep, overwrite, P = 1: synchronous DiLoCo in thirty lines of torch ----

INNER_LR, EVERY, OUTER_STEPS = 0.1, 4, 5
Outer = Callable[[Any], torch.optim.Optimizer]


def rda(deltas: list[Tensor]) -> Tensor:
    """Mean of the norms times the direction of the mean of the directions (papers: Radial-Directional Averaging)."""
    norms = [delta.norm() for delta in deltas]
    direction = sum(delta / norm for delta, norm in zip(deltas, norms, strict=True))
    return torch.stack(norms).mean() * direction / direction.norm()


def mean(deltas: list[Tensor]) -> Tensor:
    return torch.stack(deltas).mean(dim=0)


def reference(merge: str, outer: Outer, sign: float = 1.0) -> tuple[nn.Module, list[nn.Module]]:
    """Global model and learners after OUTER_STEPS rounds; merge and outer step in double precision."""
    learners: list[nn.Module] = [small_model(), small_model()]
    inner = [torch.optim.SGD(model.parameters(), lr=INNER_LR, momentum=0.9) for model in learners]
    server = small_model().double()
    outer_optimizer = outer(server.parameters())
    for step in range(1, OUTER_STEPS * EVERY + 1):
        for index, (model, optimizer) in enumerate(zip(learners, inner, strict=True)):
            inner_step(model, optimizer, index, step)
        if step % EVERY == 0:
            for theta, *local in zip(server.parameters(), *(m.parameters() for m in learners), strict=True):
                deltas = [sign * (theta.detach() - weight.detach().double()) for weight in local]
                theta.grad = rda(deltas) if merge == "rda" and theta.dim() >= 2 else mean(deltas)
            outer_optimizer.step()
            for model in learners:
                model.load_state_dict(server.state_dict())
    return server, learners


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, learner: int, step: int) -> None:
    inputs, targets = batch(1000 * learner + step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def product(settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[nn.Module], list[dict[str, Any]]]:
    """The same with two learners in threads and a real syncer."""
    models: list[nn.Module] = [small_model(), small_model(7)]  # the second adopts the first one's weights
    with diloco.Syncer(**LOCKSTEP | settings, shutdown_s=0.5) as syncer:
        optimizers = [
            diloco.DiLoCoOptimizer(
                torch.optim.SGD(model.parameters(), lr=INNER_LR, momentum=0.9),
                model,
                syncer.endpoint,
                learner_id=f"learner-{index}",
                tokens=lambda: 16,
            )
            for index, model in enumerate(models)
        ]

        def train(index: int) -> None:
            for step in range(1, OUTER_STEPS * EVERY + 1):
                inner_step(models[index], optimizers[index], index, step)

        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats, weights = [optimizer.stats() for optimizer in optimizers], syncer.weights()
        for optimizer in optimizers:
            optimizer.close()
    return weights, models, stats


OUTERS: dict[str, tuple[dict[str, Any], Outer]] = {
    "sgd": ({"outer_lr": 1.0}, lambda p: torch.optim.SGD(p, lr=1.0)),
    "sgd_0.7": ({"outer_lr": 0.7}, lambda p: torch.optim.SGD(p, lr=0.7)),
    "nesterov": (
        {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9},
        lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_two_learners_in_lockstep_are_synchronous_diloco(merge: str, outer: str) -> None:
    settings, make = OUTERS[outer]
    server, _ = reference(merge, make)
    weights, models, stats = product({"merge": merge, **settings})
    assert [one["contributions_merged"] for one in stats] == [OUTER_STEPS, OUTER_STEPS]
    wanted = vector(server.parameters())
    start = vector(small_model().parameters())
    assert (wanted - start).norm() > 0.1 * start.norm()  # it has moved: 1e-6 means something
    for found in (weights.values(), *(model.parameters() for model in models)):
        assert float((vector(found) - wanted).norm() / wanted.norm()) < 1e-6
    for name, theta in server.named_parameters():  # and tensor by tensor
        assert float((weights[name].double() - theta.detach()).norm() / theta.detach().norm()) < 1e-6


def test_the_reference_would_notice_another_merge() -> None:
    """RDA and mean differ by far more than the bound, so passing with one is failing with the other."""
    by_mean, by_rda = (reference(merge, OUTERS["sgd"][1])[0] for merge in ("mean", "rda"))
    difference = vector(by_mean.parameters()) - vector(by_rda.parameters())
    assert difference.norm() / vector(by_mean.parameters()).norm() > 1e-4


# ---- F097: the sign of the outer gradient ----


def global_is_local(theta: Tensor, local: Tensor) -> bool:
    return bool(torch.allclose(theta.double(), local.double(), rtol=1e-6, atol=1e-6))


def converges(losses: list[float]) -> bool:
    return losses[-1] < 0.01 * losses[0]


def bowl(weight: Tensor) -> Tensor:
    return (weight - torch.tensor([1.0, -2.0, 3.0])).square().sum()


def bowl_by_reference(sign: float, rounds: int, every: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(global weights, the learner's just before) after each round; sign -1 is the mistake."""
    theta = torch.zeros(3)
    for _ in range(rounds):
        local = theta.clone().requires_grad_()
        optimizer = torch.optim.SGD([local], lr=0.02)
        for _ in range(every):
            optimizer.zero_grad()
            bowl(local).backward()
            optimizer.step()
        theta = theta - sign * (theta - local.detach())
        yield theta, local.detach()


def bowl_by_product(rounds: int, every: int) -> Iterator[tuple[Tensor, Tensor]]:
    weight = nn.Parameter(torch.zeros(3))
    before = torch.zeros(3)
    settings = LOCKSTEP | {"min_quorum": 1, "sync_every": every}
    inner = torch.optim.SGD([weight], lr=0.02)
    inner.register_step_post_hook(lambda *_: before.copy_(weight.detach()))  # before the boundary adopts anything
    with (
        diloco.Syncer(**settings, shutdown_s=0.5) as syncer,
        diloco.DiLoCoOptimizer(inner, {"w": weight}, syncer.endpoint, tokens=lambda: 1) as opt,
    ):
        for _ in range(rounds):
            for _ in range(every):
                opt.zero_grad()
                bowl(weight).backward()
                opt.step()
            yield syncer.weights()["w"], before.clone()
            assert torch.equal(weight.detach(), syncer.weights()["w"])


@pytest.mark.parametrize("who", ["product", "reference", "reference_flipped"])
def test_sign_of_the_outer_gradient(who: str) -> None:
    rounds, every = 20, 5
    run = {
        "product": lambda: bowl_by_product(rounds, every),
        "reference": lambda: bowl_by_reference(1.0, rounds, every),
        "reference_flipped": lambda: bowl_by_reference(-1.0, rounds, every),
    }[who]()
    states = list(run)
    equal = [global_is_local(theta, local) for theta, local in states]
    falls = converges([bowl(torch.zeros(3)).item()] + [bowl(theta).item() for theta, _ in states])
    right = who != "reference_flipped"
    assert all(equal) == right
    assert any(equal) == right
    assert falls == right
