"""Parameters that are added while training and synchronised from then on (field case F014)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import LOCKSTEP, QUICK, loss_of, small_model, train_step

import diloco


class Body(nn.Module):
    """small_model() and, later, a head behind it."""

    def __init__(self, head: bool = False) -> None:
        super().__init__()
        self.body = small_model()
        if head:
            self.grow()

    def grow(self) -> list[nn.Parameter]:
        self.head = nn.Linear(2, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(2))
            self.head.bias.zero_()
        return list(self.head.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.head(x) if hasattr(self, "head") else x


HEAD = {"head.weight", "head.bias"}


class One:
    def __init__(self, address: str, name: str, saved: dict[str, Any] | None = None, **options: Any) -> None:
        self.model = Body(head=saved is not None)
        groups: list[dict[str, Any]] = [{"params": list(self.model.body.parameters())}]
        if saved:
            self.model.load_state_dict(saved["model"])
            groups.append({"params": list(self.model.head.parameters()), "lr": 0.05})
        inner = torch.optim.AdamW(groups, lr=0.01)
        self.opt = diloco.DiLoCoOptimizer(inner, self.model, address, learner_id=name, tokens=lambda: 16, **options)
        if saved:
            self.opt.load_state_dict(saved["optimizer"])
        self.made = int(self.opt.stats()["total_steps"])

    def step(self) -> None:
        self.made += 1
        train_step(self.model, self.opt, self.made)

    def add(self) -> None:
        self.opt.add_param_group({"params": self.model.grow(), "lr": 0.05})

    def merged(self, n: int, fragments: int) -> bool:
        versions = self.opt.stats()["versions"]
        return len(versions) == fragments and all(version[1] >= n for version in versions)


def train(ones: list[One], until: Callable[[], bool], steps: int = 4000) -> None:
    for _ in range(steps):
        if until():
            return
        for one in ones:
            one.step()
    raise AssertionError([one.opt.stats()["versions"] for one in ones])


def test_what_both_add_is_synchronised(tmp_path: Path, audit: Callable[..., dict[str, Any]]) -> None:
    log, ledgers = tmp_path / "events.jsonl", tmp_path / "ledgers"
    ledgers.mkdir()
    with diloco.Syncer(**QUICK, min_quorum=2, event_log=str(log), shutdown_s=0.5) as syncer:
        ones = [One(syncer.endpoint, name, ledger_dir=ledgers) for name in "ab"]
        train(ones, lambda: all(one.merged(1, 2) for one in ones))
        ones[0].add()
        for _ in range(20):
            ones[0].step(), ones[1].step()
        assert not HEAD & set(syncer.weights())
        ones[1].add()
        train(ones, lambda: all(one.merged(2, 3) for one in ones))
        assert set(syncer.weights()) >= HEAD
        # Saved and resumed: the next life has the head from the start, and goes on where this one was.
        steps, version = ones[1].made, ones[1].opt.stats()["versions"][-1]
        saved = copy.deepcopy({"model": ones[1].model.state_dict(), "optimizer": ones[1].opt.state_dict()})
        ones[1].opt.close()
        ones[1] = One(syncer.endpoint, "b", saved, ledger_dir=ledgers)
        assert ones[1].made == steps
        assert ones[1].opt.stats()["versions"][-1] >= version
        train(ones, lambda: all(one.merged(version[1] + 3, 3) for one in ones))
        for one in ones:
            one.opt.close()
            assert set(one.opt.learner.anchor_state_dict()) >= HEAD
        stats = ones[0].opt.stats()
        assert stats["tokens_absent"] > 0
        assert "refused" not in stats["discarded"]
    report = audit(log, ledgers=ledgers)
    # What went before the addition is not lost, it was never there.
    assert "absent" not in report["ledger"]["discarded"]
    tokens = sum(life["tokens"] for one in report["learners"].values() for life in one["incarnations"])
    assert 0 < 3 * tokens - report["ledger"]["processed"] < tokens


def test_what_one_adds_stays_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with diloco.Syncer(**QUICK, min_quorum=2, shutdown_s=0.5) as syncer:
        ones = [One(syncer.endpoint, name) for name in "ab"]
        train(ones, lambda: all(one.merged(1, 2) for one in ones))
        ones[0].add()
        train(ones, lambda: all(one.merged(4, 2) for one in ones))
        assert not HEAD & set(syncer.weights())
        assert not torch.equal(ones[0].model.head.weight, torch.eye(2))
        train(ones, lambda: "2 parameter(s) that were added while training ('head.weight' and others)" in caplog.text)
        # Its next life adds it again, and has it as it was.
        model, saved = copy.deepcopy(ones[0].model.state_dict()), copy.deepcopy(ones[0].opt.state_dict())
        ones[0].opt.close()
        ones[0] = One(syncer.endpoint, "a")
        ones[0].add()
        ones[0].model.load_state_dict(model)
        ones[0].opt.load_state_dict(saved)
        assert all(torch.equal(ones[0].model.state_dict()[name], model[name]) for name in HEAD)
        train(ones, lambda: all(one.merged(8, 2) for one in ones))
        for one in ones:
            one.opt.close()


def test_the_only_learner_names_them_with_the_group() -> None:
    """The model was given as pairs of name and tensor, which a later one cannot be in."""
    model, extra = small_model(), nn.Parameter(torch.ones(3))
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": 1}, shutdown_s=0.5) as syncer:
        inner = torch.optim.SGD(list(model.named_parameters()), lr=0.1)
        with diloco.DiLoCoOptimizer(inner, list(model.named_parameters()), syncer.endpoint, tokens=lambda: 1) as opt:
            opt.add_param_group({"params": [("extra", extra)]})
            for step in range(12):
                opt.zero_grad()
                (loss_of(model, step) + extra.square().sum()).backward()
                opt.step()
            torch.testing.assert_close(syncer.weights()["extra"], extra.detach())
            assert not torch.equal(extra, torch.ones(3))


def test_a_group_of_an_inner_optimizer_is_noticed_within_a_round() -> None:
    model = Body()
    inner = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body[0], model.body[2])]
    with (
        diloco.Syncer(**LOCKSTEP | {"min_quorum": 1}, shutdown_s=0.5) as syncer,
        diloco.DiLoCoOptimizer(inner, model, syncer.endpoint, tokens=lambda: 1) as opt,
    ):
        inner[1].add_param_group({"params": model.grow()})
        for step in range(16):
            train_step(model, opt, step)
        assert set(syncer.weights()) >= HEAD


def test_a_learner_of_a_plain_loop_adds_parameters() -> None:
    model = Body()
    with (
        diloco.Syncer(**LOCKSTEP | {"min_quorum": 1}, shutdown_s=0.5) as syncer,
        diloco.Learner(model, syncer.endpoint) as learner,
    ):
        learner.step()
        model.grow()
        learner.add_parameters(model)  # those it knows are passed over
        for _ in range(11):
            with torch.no_grad():
                model.head.bias += 1.0
            learner.step()
        torch.testing.assert_close(syncer.weights()["head.bias"], model.head.bias.detach())
        with pytest.raises(ValueError, match=r"'head\.weight' is listed twice"):
            learner.add_parameters({"head.weight": nn.Parameter(torch.ones(2))})
        learner.step()  # and nothing has changed
        assert len(learner.anchor_state_dict()) == 6
