"""Several inner optimizers as one learner (field cases F018, F034): Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler
from toys import LOCKSTEP, assert_same, loss_of, small_model, train_step

import diloco


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def wrap(model: nn.Module, address: str, **options: Any) -> diloco.DiLoCoOptimizer:
    return diloco.DiLoCoOptimizer(halves(model), model, address, tokens=lambda: 16, **options)


def test_one_boundary_a_step_and_each_has_its_schedule() -> None:
    """H = 5, 20 steps: 4 rounds, not 8; every tensor synchronised once."""
    settings = LOCKSTEP | {"min_quorum": 1, "sync_every": 5}
    with diloco.Syncer(**settings, shutdown_s=0.5) as syncer:
        model, plain_model = small_model(), small_model()
        muon, adamw = halves(model)
        plain = halves(plain_model)
        with diloco.DiLoCoOptimizer([muon, adamw], model, syncer.endpoint, tokens=lambda: 16) as opt:
            schedules = [lr_scheduler.StepLR(muon, 7, 0.5), lr_scheduler.CosineAnnealingLR(adamw, 20)]
            plain_schedules = [lr_scheduler.StepLR(plain[0], 7, 0.5), lr_scheduler.CosineAnnealingLR(plain[1], 20)]
            for step in range(20):
                train_step(model, opt, step)
                for one in plain:
                    one.zero_grad()
                loss_of(plain_model, step).backward()
                for one in (*plain, *plain_schedules, *schedules):
                    one.step()
                assert [g["lr"] for g in opt.param_groups] == [one.param_groups[0]["lr"] for one in plain]
            stats = opt.stats()
            assert (stats["steps"], stats["tokens"], stats["stepped_directly"]) == (20, 320, 0)
        status = syncer.status()
        assert status["rounds_merged"] == 4
        assert sum(f["numel"] for f in status["fragments"]) == sum(p.numel() for p in model.parameters())
        assert_same(model, plain_model, atol=1e-5)


def test_groups_state_and_state_dict_are_those_of_all(nobody: str) -> None:
    model = small_model()
    muon, adamw = inner = halves(model)
    with diloco.DiLoCoOptimizer(inner, model, nobody, tokens=lambda: 1) as opt:
        assert opt.param_groups == [*muon.param_groups, *adamw.param_groups]
        assert all(a is b for a, b in zip(opt.param_groups, [*muon.param_groups, *adamw.param_groups], strict=True))
        schedule = lr_scheduler.ExponentialLR(opt, 0.5)  # on the wrapper it reaches both
        train_step(model, opt, 0)
        schedule.step()
        assert [one.param_groups[0]["lr"] for one in inner] == [0.01, 0.005]
        assert len(opt.state) == 4
        assert opt.state[model[0].weight] is muon.state[model[0].weight]
        assert "Parameter Group 1" in repr(opt)
        saved = copy.deepcopy(opt.state_dict())
        assert sorted(saved["state"]) == [0, 1, 2, 3]
        assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2, 3]]
        portable = copy.deepcopy(get_optimizer_state_dict(model, opt))
        assert set(portable["state"]) == set(dict(model.named_parameters()))

        copied = pickle.loads(pickle.dumps(opt))
        assert copied.stats()["state"] == "disconnected"
        assert len(copied.state) == 4

    fresh = small_model()
    with wrap(fresh, nobody) as again:
        again.load_state_dict(saved)
        assert [g["lr"] for g in again.param_groups] == [0.01, 0.005]
        for name in ("0.weight", "2.bias"):
            ours, theirs = again.state[fresh.get_parameter(name)], opt.state[model.get_parameter(name)]
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours)
        train_step(fresh, again, 1)
        with pytest.raises(ValueError, match="2 optimizers with 2 parameter groups, got 1 groups"):
            again.load_state_dict({"state": {}, "param_groups": saved["param_groups"][:1]})
    third = small_model()
    with wrap(third, nobody) as from_portable:
        set_optimizer_state_dict(third, from_portable, portable)
        assert len(from_portable.state) == 4
        assert from_portable.stats()["steps"] == 0


def test_a_closure_is_called_once_and_its_loss_comes_back(nobody: str) -> None:
    model, plain_model = small_model(), small_model()
    plain = halves(plain_model)
    calls = []
    with wrap(model, nobody) as opt:

        def closure() -> torch.Tensor:
            assert torch.is_grad_enabled()
            opt.zero_grad()
            loss = loss_of(model, len(calls))
            loss.backward()
            calls.append(loss)
            return loss

        for step in range(3):
            assert opt.step(closure) is calls[-1]
            for one in plain:
                one.zero_grad()
            loss_of(plain_model, step).backward()
            for one in plain:
                one.step()
        assert len(calls) == 3
    assert_same(model, plain_model)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words))


def test_sparse_gradients_beside_dense_ones() -> None:
    """Rows that no learner used get a displacement of exactly zero."""

    def words(step: int) -> torch.Tensor:
        return torch.randint(0, 5, (16,), generator=torch.Generator().manual_seed(step))  # never 5 to 9

    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(Words())
    start = copy.deepcopy(models[0])
    plain = copy.deepcopy(models[0])

    def inner(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SparseAdam(list(model.embed.parameters()), lr=0.05),
            torch.optim.AdamW(model.head.parameters(), lr=0.05),
        ]

    bare = inner(plain)
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": 1}, shutdown_s=0.5) as syncer:
        model = models[0]
        with diloco.DiLoCoOptimizer(inner(model), model, syncer.endpoint, tokens=lambda: 16) as opt:
            for step in range(8):
                for trained, optimizers in ((model, [opt]), (plain, bare)):
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    trained(words(step)).square().mean().backward()
                    for optimizer in optimizers:
                        optimizer.step()
        weights = syncer.weights()
        assert syncer.status()["rounds_merged"] == 2
    assert_same(model, plain, atol=1e-6)
    assert torch.equal(weights["embed.weight"][5:], start.embed.weight[5:])
    assert not torch.equal(weights["embed.weight"][:5], start.embed.weight[:5])


def test_what_cannot_be_together_is_refused(nobody: str) -> None:
    model = small_model()
    with pytest.raises(ValueError, match="expected one or more optimizers, got none"):
        diloco.DiLoCoOptimizer([], model, nobody)
    with pytest.raises(ValueError, match=r"\(float32 \(8, 6\)\) belongs to SGD and to AdamW"):
        diloco.DiLoCoOptimizer(
            [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())], model, nobody
        )
    with pytest.raises(ValueError, match="LBFGS calls its closure several times"):
        diloco.DiLoCoOptimizer([torch.optim.LBFGS(model.parameters())], model, nobody)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got list"):
        diloco.DiLoCoOptimizer([list(model.parameters())], model, nobody)  # type: ignore[list-item]
    with wrap(model, nobody) as opt:
        with pytest.raises(ValueError, match=r"got all of them; call its own"):
            opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(ValueError, match="wrapped already"):
            diloco.DiLoCoOptimizer(opt.inner._optimizers[0], model, nobody)  # type: ignore[attr-defined]
    diloco.DiLoCoOptimizer(opt.inner._optimizers, model, nobody).close()  # type: ignore[attr-defined]
