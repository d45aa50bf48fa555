"""A resumed learner goes on where it was: the account, the schedule and the bits (field cases F023, F127, F130)."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import ALONE, H, Life, same, syncer
from toys import LOCKSTEP, QUICK, small_model

import diloco
from diloco import _resume


def interrupted(
    settings: dict[str, Any], cut: int, steps: int, merged: int = 0
) -> tuple[Life, dict[str, Any], dict[str, torch.Tensor]]:
    """A run of `steps` steps that ends and is taken up again after `cut` of them, and after `merged` rounds."""
    with syncer(**settings) as running:
        first = Life(running.endpoint)
        first.train(1, cut)
        deadline = time.monotonic() + 20
        while running.status()["rounds_merged"] < merged:
            assert time.monotonic() < deadline
        saved = first.save()
        first.opt.close()
        second = Life(running.endpoint, saved)
        second.train(cut + 1, steps)
        second.rates = first.rates + second.rates
        second.opt.close()
        return second, running.status(), running.weights()


VARIANTS: dict[str, dict[str, Any]] = {
    "overwrite": {},
    "rebase_bf16_nesterov": {
        "adopt": "rebase",
        "wire_dtype": "bf16",
        "outer_optimizer": "nesterov",
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    },
    "staggered_rda": {"num_fragments": 2, "merge": "rda", "weights": "tokens_per_step"},
    "overlap": {"overlap_steps": 1, "adopt": "rebase"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_at_every_step_is_the_uninterrupted_run(variant: str) -> None:
    settings, steps = ALONE | VARIANTS[variant], 3 * H
    with syncer(**settings) as running:
        whole = Life(running.endpoint)
        whole.train(1, steps)
        whole.opt.close()
        wanted, rounds = running.weights(), running.status()["rounds_merged"]
    for cut in range(1, 2 * H + 1):
        in_flight = settings["overlap_steps"] == 1 and cut % H == H - 1  # sent at this step, adopted at the next
        life, done, found = interrupted(settings, cut, steps, merged=(cut + 1) // H if in_flight else 0)
        assert life.opt.stats()["total_steps"] == steps, cut
        assert life.opt.stats()["total_tokens"] == 16 * steps, cut
        assert life.rates == whole.rates, cut
        assert done["rounds_merged"] == rounds, cut
        # What was merged while it was away is adopted at once, one step before its time: the same up to rounding.
        same(life.weights(), whole.weights(), atol=2e-6 if in_flight else 0.0)
        same(found, wanted, atol=2e-6 if in_flight else 0.0)


def test_one_of_two_in_lockstep_resumes_in_mid_window() -> None:
    """The other one stays; both end where they would have without it."""

    def go(lives: list[Life], first: int, last: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda k: lives[k].train(1000 * k + first, 1000 * k + last), range(2)))

    def run(cuts: list[int]) -> list[dict[str, torch.Tensor]]:
        with syncer(**LOCKSTEP | {"weights": "tokens_per_step"}) as running:
            lives, step = [Life(running.endpoint), Life(running.endpoint, learner_id="b")], 1
            for cut in cuts:
                go(lives, step, cut)
                saved, step = lives[0].save(), cut + 1
                lives[0].opt.close()
                lives[0] = Life(running.endpoint, saved)
            go(lives, step, 12)
            found = [life.weights() for life in lives] + [running.weights()]
            assert running.status()["rounds_merged"] == 3
            for life in lives:
                life.opt.close()
            return found

    for wanted, found in zip(run([]), run([2, 5, 8]), strict=True):
        same(found, wanted)


# ---- decoupled: others go on, work is merged meanwhile ----

FREE = QUICK | {"num_fragments": 1, "overlap_steps": 0}


def until_merged(life: Life, rounds: int, running: diloco.Syncer, first: int) -> int:
    """Trains until so many rounds are merged. The next step's number."""
    deadline, step = time.monotonic() + 30, first
    while running.status()["rounds_merged"] < rounds:
        assert time.monotonic() < deadline, running.status()
        life.train(step, step)
        step += 1
    return step


def test_unmerged_work_is_put_on_top_of_what_others_made_meanwhile(
    tmp_path: Path,
    audit: Callable[..., dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "diloco")
    monkeypatch.setenv("DILOCO_LEDGER_DIR", str(tmp_path))
    log = tmp_path / "events"
    with syncer(**FREE, event_log=log) as running:
        first = Life(running.endpoint)
        first.train(1, 2)
        anchor = first.opt.learner.anchor_state_dict()
        first.opt.close()
        saved = first.save()
        other = Life(running.endpoint, learner_id="b")
        until_merged(other, 2, running, 100)
        other.opt.close()
        second = Life(running.endpoint, saved)
        theta = second.opt.learner.anchor_state_dict()
        for name, local in second.weights().items():
            assert not torch.equal(theta[name], anchor[name])
            torch.testing.assert_close(local, theta[name] + (saved["model"][name] - anchor[name]), rtol=0, atol=0)
        stats = second.opt.stats()
        assert (stats["tokens"], stats["total_steps"], stats["total_tokens"]) == (32, 2, 32)
        assert stats["tokens_outstanding"] == 32
        until_merged(second, 4, running, 3)
        assert second.opt.stats()["contributions_merged"] >= 1
        second.opt.close()
    assert "the work of the last 2 steps (32 tokens), not merged when the state was saved, is on top" in caplog.text
    audit(log, ledgers=tmp_path)


def test_work_that_was_merged_after_the_save_is_not_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """A crash: the life that saved trained on, and its work went into the global weights."""
    with syncer(**FREE) as running:
        first = Life(running.endpoint)
        first.train(1, 2)
        saved = first.save()
        until_merged(first, 2, running, 3)
        first.opt.close()
        second = Life(running.endpoint, saved)
        same(second.weights(), second.opt.learner.anchor_state_dict())
        same(second.weights(), running.weights())
        assert second.opt.stats()["total_steps"] == 2
        assert second.opt.stats()["tokens_outstanding"] == 0
        second.opt.close()
    assert "is dropped for 4 of 4 tensors" in caplog.text


def test_a_fragment_under_way_is_applied_once(caplog: pytest.LogCaptureFixture) -> None:
    """H = 8, two steps of overlap: sent at step 6, saved at step 7, to be adopted at step 8; merged in between."""
    with syncer(**ALONE | {"sync_every": 8, "overlap_steps": 2, "adopt": "rebase"}) as running:
        first = Life(running.endpoint)
        start = first.opt.learner.anchor_state_dict()
        first.train(1, 6)
        sent = first.weights()
        deadline = time.monotonic() + 20
        while running.status()["rounds_merged"] < 1:
            assert time.monotonic() < deadline
        first.train(7, 7)
        assert first.opt.stats()["sent_image_bytes"] > 0
        saved = first.save()
        first.opt.close()
        second = Life(running.endpoint, saved)
        for name, tensor in second.weights().items():  # once: the step made while it was under way is dropped
            assert torch.equal(tensor, running.weights()[name])
            torch.testing.assert_close(tensor, start[name] - (start[name] - sent[name]), rtol=0, atol=1e-6)
        assert second.opt.stats()["clock"] == 7
        second.train(8, 16)
        second.opt.close()
        assert running.status()["rounds_merged"] == 2
    assert "is dropped for 4 of 4 tensors" in caplog.text


def test_work_that_the_syncer_may_still_merge_is_not_put_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A quorum of 2: the contribution of the last life lies there and waits for another learner's."""
    monkeypatch.setattr(_resume, "_SETTLE_S", 0.3)
    with syncer(**FREE | {"min_quorum": 2, "weights": "equal", "merge": "mean"}) as running:
        first = Life(running.endpoint)
        start = first.weights()
        other_model = small_model()
        other = diloco.Learner(other_model, running.endpoint, learner_id="b")
        deadline, step = time.monotonic() + 30, 1
        while running.status()["ledger"]["in_flight"] == 0:
            assert time.monotonic() < deadline
            first.train(step, step)
            other.step(tokens=0)  # its clock goes on, it has no work to contribute
            step += 1
        saved = first.save()
        held = running.status()["ledger"]["in_flight"] // 16  # steps of it
        first.opt.close()
        second = Life(running.endpoint, saved)
        same(second.weights(), start)
        assert "is dropped for 4 of 4 tensors" in caplog.text
        while running.status()["rounds_merged"] == 0:  # now the other one has work, and the round closes
            assert time.monotonic() < deadline
            with torch.no_grad():
                other_model[2].bias += 0.01
            other.step(tokens=16)
        assert held >= 1
        moved = running.weights()["0.weight"] - start["0.weight"]
        assert moved.abs().max() > 0  # half of what the last life had sent, once
        second.opt.close()
        other.close()


# ---- another process, and loops without an optimizer ----


def test_resumes_in_a_new_process(tmp_path: Path) -> None:
    """Saved by this process, taken up by another one: the first round after it equals the uninterrupted run's."""
    with syncer(**ALONE) as running:
        whole = Life(running.endpoint)
        whole.train(1, 8)
        wanted = running.weights()
        whole.opt.close()
    with syncer(**ALONE) as running:
        first = Life(running.endpoint)
        first.train(1, 6)
        torch.save(first.save(), tmp_path / "saved")
        first.opt.close()
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import torch; from lives import Life\n"
            f"life = Life({running.endpoint!r}, torch.load({str(tmp_path / 'saved')!r})); life.train(7, 8)\n"
            "life.opt.close()"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        same(running.weights(), wanted)


def test_a_learner_without_an_optimizer_resumes_too() -> None:
    def descend(weight: torch.Tensor, learner: diloco.Learner, first: int, last: int) -> None:
        for step in range(first, last + 1):
            inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
            (gradient,) = torch.autograd.grad((inputs @ weight - inputs.sum(1)).square().mean(), weight)
            with torch.no_grad():
                weight -= 0.05 * gradient
            learner.step(tokens=8)

    def run(cut: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.zeros(5, requires_grad=True)
        with syncer(**ALONE) as running:
            learner = diloco.Learner({"weight": weight}, running.endpoint, learner_id="a")
            descend(weight, learner, 1, cut)
            saved = learner.state_dict()
            learner.close()
            weight = torch.full((5,), 7.0, requires_grad=True)
            learner = diloco.Learner({"weight": weight}, running.endpoint, learner_id="a")
            learner.load_state_dict(saved)
            descend(weight, learner, cut + 1, 10)
            assert learner.stats()["total_tokens"] == 80
            learner.close()
            return weight.detach(), running.weights()["weight"]

    wanted = run(10)
    for cut in (3, 4, 5):
        found = run(cut)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
