"""Which states a learner takes: forgotten, late, of another run or model, by torch.distributed.checkpoint (field cases
F120, F126, F130)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lives import ALONE, Life, same, syncer
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from toys import dead_address, small_model

import diloco

# ---- what users forget ----


def test_without_the_wrappers_state_a_fresh_window_starts_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with syncer(**ALONE) as running:
        first = Life(running.endpoint)
        first.train(1, 6)
        saved = first.save()
        first.opt.close()
        del saved["opt"]["diloco"]
        second = Life(running.endpoint, saved)
        same(second.weights(), running.weights())
        caplog.clear()
        second.train(7, 10)
        assert caplog.text.count("a fresh window starts from the global weights") == 1
        assert running.status()["rounds_merged"] == 2
        assert second.opt.stats()["total_steps"] == 4
        second.opt.close()
        caplog.set_level(logging.INFO, "diloco")
        third = Life(running.endpoint, {"model": saved["model"]})
        same(third.weights(), running.weights())
        assert "the run is under way: the model has its global weights now, in place of those it had" in caplog.text
        third.opt.close()


def test_the_model_may_be_loaded_after_wrapping_if_the_state_follows(caplog: pytest.LogCaptureFixture) -> None:
    """As frameworks do it: optimizers are made first, then everything is loaded."""
    with syncer(**ALONE) as running:
        first = Life(running.endpoint)
        first.train(1, 6)
        wanted, saved = first.weights(), first.save()
        first.opt.close()
        second = Life(running.endpoint, seed=9)
        second.model.load_state_dict(saved["model"])
        assert "unless the learner's saved state is loaded next" in caplog.text
        second.opt.load_state_dict(saved["opt"])
        same(second.weights(), wanted)
        second.train(7, 8)
        assert running.status()["rounds_merged"] == 2
        second.opt.close()


def test_a_state_ahead_of_the_syncer_rolls_back_to_it(caplog: pytest.LogCaptureFixture) -> None:
    with syncer(**ALONE) as running:
        first = Life(running.endpoint)
        first.train(1, 9)
        saved = first.save()
        first.opt.close()
    with syncer(**ALONE) as anew:
        other = Life(anew.endpoint, seed=5, learner_id="b")
        second = Life(anew.endpoint, saved)
        same(second.weights(), anew.weights())
        same(second.weights(), other.weights())
        assert "saved at epoch 1, version 2 and the syncer is at epoch 1, version 0" in caplog.text
        assert "starts from the syncer's weights" in caplog.text
        assert second.opt.stats()["total_steps"] == 9
        second.opt.close()
        # Loaded into a model that had joined, the weights would be work on weights they do not belong to.
        third = Life(anew.endpoint, learner_id="c")
        third.model.load_state_dict(saved["model"])
        with pytest.raises(ValueError, match=r"saved at .*load the model first, then wrap"):
            third.opt.load_state_dict(saved["opt"])
        third.opt.close()
        other.opt.close()


def test_back_to_an_earlier_state_in_the_same_life() -> None:
    with syncer(**ALONE) as running:
        life = Life(running.endpoint)
        life.train(1, 5)
        wanted, saved = life.weights(), life.save()
        life.train(6, 6)
        life.opt.load_state_dict(saved["opt"])
        same(life.weights(), wanted)
        assert (life.opt.stats()["steps"], life.opt.stats()["total_steps"]) == (6, 5)
        life.train(6, 8)
        again = life.save()
        rounds = running.status()["rounds_merged"]
        life.opt.close()
        second = Life(running.endpoint, again)
        same(second.weights(), {name: tensor for name, tensor in again["model"].items()})
        second.train(9, 12)
        assert running.status()["rounds_merged"] == rounds + 1
        second.opt.close()


def test_a_whole_run_starts_again_from_its_learners_models() -> None:
    with syncer(**ALONE) as running:
        first = Life(running.endpoint)
        first.train(1, 6)
        wanted, saved = first.weights(), first.save()
        first.opt.close()
    with syncer(**ALONE) as anew:
        second = Life(anew.endpoint, saved)
        same(second.weights(), wanted)
        same(anew.weights(), wanted)
        assert second.opt.stats()["total_steps"] == 6
        second.opt.close()


def test_loaded_without_a_syncer_it_goes_on_from_the_model(caplog: pytest.LogCaptureFixture) -> None:
    with syncer(**ALONE) as running:
        first = Life(running.endpoint)
        first.train(1, 6)
        wanted, saved = first.weights(), first.save()
        first.opt.close()
    with dead_address() as nobody:
        second = Life(nobody, saved)
        same(second.weights(), wanted)
        assert "loaded without a syncer (connecting)" in caplog.text
        assert second.opt.stats()["total_tokens"] == 96
        second.opt.close()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.nn.Linear(6, 8), r"parameter 'weight' is not there in it and float32 \(8, 6\) here"),
        (
            small_model().to(torch.bfloat16),
            r"parameter '0.weight' is float32 \(8, 6\) in it and bfloat16 \(8, 6\) here",
        ),
    ],
    ids=["names", "dtype"],
)
def test_the_state_of_another_model_is_refused_at_its_first_difference(
    nobody: str, other: torch.nn.Module, words: str
) -> None:
    with diloco.Learner(small_model(), nobody) as learner:
        saved = learner.state_dict()
    with diloco.Learner(other, nobody) as learner, pytest.raises(ValueError, match=words):
        learner.load_state_dict(saved)


# ---- torch.distributed.checkpoint ----


def test_distributed_checkpoint_has_the_outer_state_beside_the_optimizers(tmp_path: Path) -> None:
    """bf16 weights: in the optimizer's own state the f32 anchors would have been cast to bf16."""

    def start(address: str) -> tuple[torch.nn.Module, diloco.DiLoCoOptimizer]:
        model = small_model().to(torch.bfloat16)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, diloco.DiLoCoOptimizer(inner, model, address, learner_id="a", tokens=lambda: 16)

    def train(model: torch.nn.Module, opt: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            opt.zero_grad()
            inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            model(inputs).square().mean().backward()
            opt.step()

    settings = ALONE | {"outer_lr": 0.7, "adopt": "rebase"}
    with syncer(**settings) as running:
        model, opt = start(running.endpoint)
        train(model, opt, 1, 12)
        opt.close()
        wanted, wanted_local = running.weights(), [p.detach() for p in model.parameters()]
    with syncer(**settings) as running:
        model, opt = start(running.endpoint)
        train(model, opt, 1, 6)
        opt.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        dcp.save(
            {
                "model": get_model_state_dict(model),
                "optim": get_optimizer_state_dict(model, opt),
                "outer": opt.outer_state(),
            },
            checkpoint_id=tmp_path,
        )
        assert opt.stats()["steps"] == 6
        opt.close()
        model, opt = start(running.endpoint)
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, opt),
            "outer": opt.outer_state(),
        }
        dcp.load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(model, opt, state["optim"])
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert opt.stats()["total_steps"] == 6
        train(model, opt, 7, 12)
        opt.close()
        same(running.weights(), wanted)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), wanted_local, strict=True))


def test_the_outer_state_loaded_apart_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    with syncer(**ALONE) as running:
        first = Life(running.endpoint)
        first.train(1, 6)
        saved, outer = first.save(), first.opt.outer_state().state_dict()
        first.opt.close()
        del saved["opt"]["diloco"]
        second = Life(running.endpoint, saved)
        second.opt.outer_state().load_state_dict(outer)
        second.train(7, 8)
        assert "a fresh window starts" not in caplog.text
        assert running.status()["rounds_merged"] == 2
        assert second.opt.stats()["total_steps"] == 8
        second.opt.close()
