"""DiLoCoCallback in a Lightning Trainer: from an unchanged module's first step to a resumed run, and how it ends."""

from __future__ import annotations

import csv
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_learner import BATCH, data
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from toys import alone, small_model

import diloco
from diloco.integrations.lightning import DiLoCoCallback, count_tokens


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Ends(Callback):
    """Does something in the middle of a fit."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def fit(
    *callbacks: Callback, module: Module | None = None, ckpt_path: str | None = None, **options: Any
) -> tuple[Trainer, Module]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "max_steps": 20}
    module = module or Module()
    trainer = Trainer(callbacks=list(callbacks), **quiet | options)
    trainer.fit(module, DataLoader(data(1, 1000), batch_size=BATCH), ckpt_path=ckpt_path)
    return trainer, module


def test_wraps_counts_and_leaves() -> None:
    """H = 5, 20 steps of 4 micro-batches: 4 rounds; the scheduler was made on the inner optimizer and goes on."""
    with alone(sync_every=5) as syncer:
        callback = DiLoCoCallback(syncer.endpoint, learner_id="a")
        fit(callback, accumulate_grad_batches=4)
        assert syncer.status()["rounds_merged"] == 4
    stats = callback.optimizer.stats()
    assert (stats["state"], stats["steps"], stats["tokens"]) == ("closed", 20, 80 * BATCH)
    assert callback.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_trains_as_a_bare_trainer_does(nobody: str) -> None:
    _, bare = fit(gradient_clip_val=1.0)
    _, joined = fit(DiLoCoCallback(nobody), gradient_clip_val=1.0)
    assert joined.losses == bare.losses


def test_our_metrics_reach_its_loggers(nobody: str, tmp_path: Path) -> None:
    fit(DiLoCoCallback(nobody), logger=CSVLogger(tmp_path, name="run", version=0), log_every_n_steps=5)
    with open(tmp_path / "run" / "version_0" / "metrics.csv") as file:
        lines = [line for line in csv.DictReader(file) if line["train/steps"]]
    assert [float(line["train/steps"]) for line in lines] == [5, 10, 15, 20]
    assert [line["step"] for line in lines] == ["5", "10", "15", "20"]
    assert all(float(line["goodput/wall_s"]) > 0 for line in lines)


def test_save_and_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with alone(sync_every=5) as syncer, caplog.at_level(logging.WARNING, "diloco"):
        trainer, _ = fit(DiLoCoCallback(syncer.endpoint, learner_id="a"), max_steps=6)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
        assert saved["optimizer_states"][0]["diloco"]["steps"] == 6
    with alone(sync_every=5) as syncer:
        callback = DiLoCoCallback(syncer.endpoint, learner_id="a")
        started: list[dict[str, torch.Tensor]] = []

        class Start(Callback):
            def on_train_start(self, *_: Any) -> None:
                started.append(callback.optimizer.learner.anchor_state_dict())

        fit(callback, Start(), max_steps=12, ckpt_path=str(tmp_path / "saved.ckpt"))
        stats = callback.optimizer.stats()
        assert syncer.status()["rounds_merged"] == 1
    assert (stats["steps"], stats["total_steps"]) == (6, 12)
    assert all(torch.equal(started[0][name], values) for name, values in saved["state_dict"].items())
    assert "weights were loaded into a model that is in a run" not in caplog.text


def test_fit_may_be_called_again() -> None:
    with alone(sync_every=5) as syncer:
        callback = DiLoCoCallback(syncer.endpoint, learner_id="a")
        module = Module()
        for _ in range(2):
            fit(callback, module=module, max_steps=5)
            assert callback.optimizer.stats()["state"] == "closed"
        assert syncer.status()["rounds_merged"] == 2


def test_an_exception_ends_in_a_goodbye(syncer: Callable[..., Any]) -> None:
    s = syncer()
    callback = DiLoCoCallback(s.endpoint)

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(callback, Ends(3, fail))
    assert callback.optimizer.stats()["state"] == "closed"
    s.wait_for("leave")


def test_sigterm_ends_in_a_goodbye(syncer: Callable[..., Any]) -> None:
    """F082: Lightning has a handler of its own and ends fit() with an exception; the callback closes."""
    s = syncer()
    callback = DiLoCoCallback(s.endpoint)
    with pytest.raises(SystemExit):
        fit(callback, Ends(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert callback.optimizer.stats()["state"] == "closed"
    assert callback.optimizer.stats()["steps"] < 20
    s.wait_for("leave")


def test_several_optimizers_are_one_if_the_module_wraps_them(nobody: str) -> None:
    class Wrapped(Module):
        def configure_optimizers(self) -> Any:
            matrices, vectors = ([p for p in self.parameters() if p.dim() == n] for n in (2, 1))
            inner = [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(vectors, lr=0.01)]
            return diloco.DiLoCoOptimizer(inner, self, nobody)

    module = Wrapped()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    callback = DiLoCoCallback()
    fit(callback, module=module)
    assert callback.optimizer.stats()["steps"] == 20
    assert not any(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_refuses_what_cannot_be_one_learner(nobody: str) -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.net[0].parameters()]

        def training_step(self, *_: Any) -> None:
            pass

    module = Two()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="expected one optimizer from configure_optimizers"):
        fit(DiLoCoCallback(nobody), module=module)

    class Wrapped(Module):
        def configure_optimizers(self) -> Any:
            return diloco.DiLoCoOptimizer(torch.optim.SGD(self.parameters(), lr=0.1), self, nobody)

    with pytest.raises(ValueError, match="given learner_id; expected the options in one of the two places"):
        fit(DiLoCoCallback(learner_id="a"), module=Wrapped())
    with pytest.raises(RuntimeError, match="expected a call of fit"):
        _ = DiLoCoCallback().optimizer


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"labels": torch.zeros(3), "input_ids": torch.zeros(3, 5, dtype=torch.long)}, 15),
        ([torch.zeros(3, 5, dtype=torch.long), torch.zeros(3)], 15),
        ([torch.zeros(3, 5), torch.zeros(3)], 3),
        (((torch.zeros(3, 5),), "x"), 3),
        ({"image": torch.zeros(4, 3, 8, 8)}, 4),
        (torch.zeros(7, dtype=torch.long), 7),
        (torch.tensor(1.0), 1),
    ],
)
def test_counts_tokens_of_usual_batches(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens


def test_says_so_where_it_cannot_count() -> None:
    with pytest.raises(TypeError, match=r"begins with a str; expected a tensor. Give DiLoCoCallback\(tokens=...\)"):
        count_tokens(["text"])
