"""join(trainer): a Hugging Face Trainer as a learner, from its first step to a resumed run; the global weights as its
library loads them (field cases F019, F021, F122)."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_learner import BATCH, WithLoss, rows
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from toys import alone
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import diloco
from diloco.integrations.transformers import DiLoCoCallback, join

FEATURES = 6  # numbers in one sample of the toy: what Trainer counts as its tokens


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    def make(model: torch.nn.Module | None = None, **arguments: Any) -> Trainer:
        extra = {name: arguments.pop(name) for name in ("optimizers", "callbacks") if name in arguments}
        defaults = {"max_steps": 20, "per_device_train_batch_size": BATCH, "learning_rate": 0.05, "logging_steps": 5}
        defaults |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        return Trainer(
            model=model or WithLoss(),
            args=TrainingArguments(str(tmp_path / "trainer"), **defaults | arguments),
            train_dataset=rows(1, 1000),
            **extra,
        )

    return make


def test_micro_batches_are_no_steps(make: Callable[..., Trainer]) -> None:
    """F019: accumulate 4, H = 10, 80 micro-batches: 20 steps, 2 rounds, and all 80 micro-batches are counted."""
    with alone(sync_every=10) as syncer:
        trainer = make(gradient_accumulation_steps=4)
        learner = join(trainer, syncer.endpoint, learner_id="a")
        trainer.train()
        assert syncer.status()["rounds_merged"] == 2
    stats = learner.optimizer.stats()
    assert (stats["state"], stats["steps"], stats["tokens"]) == ("closed", 20, 80 * BATCH * FEATURES)
    assert trainer.optimizer.optimizer is learner.optimizer
    assert type(learner.optimizer.inner).__name__ == "AdamW"  # the Trainer's own, with its groups and learning rate
    assert len(learner.optimizer.param_groups) == 2


def test_trains_as_a_bare_trainer_does(make: Callable[..., Trainer], nobody: str) -> None:
    """Without a syncer every loss, learning rate and gradient norm is that of a Trainer that was not joined."""
    bare = make(gradient_accumulation_steps=2, logging_steps=1)
    bare.train()
    joined = make(gradient_accumulation_steps=2, logging_steps=1)
    join(joined, nobody)
    joined.train()
    for name in ("loss", "learning_rate", "grad_norm"):
        assert [line.get(name) for line in joined.state.log_history] == [
            line.get(name) for line in bare.state.log_history
        ]


def test_our_metrics_are_in_its_logs_and_reports(make: Callable[..., Trainer], nobody: str) -> None:
    reported: list[dict[str, float]] = []

    class Reporter(TrainerCallback):  # as TensorBoard's and W&B's are: added before join()
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            reported.append(dict(logs))

    trainer = make(callbacks=[Reporter()])
    join(trainer, nobody)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["train/steps"] for line in lines] == [5, 10, 15, 20]
    assert all(line["goodput/wall_s"] > 0 for line in lines)
    assert [line["train/steps"] for line in reported if "loss" in line] == [5, 10, 15, 20]
    assert "train/steps" not in trainer.state.log_history[-1]  # the closing line, without a loss, is left alone


def test_save_and_resume(make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint has our part; the resumed life takes its weights before it joins, and goes on counting."""
    with alone(sync_every=5) as syncer, caplog.at_level(logging.WARNING, "diloco"):
        first = make(max_steps=12, save_strategy="steps", save_steps=6)
        join(first, syncer.endpoint, learner_id="a")
        first.train()
        saved = Path(first.args.output_dir) / "checkpoint-6"
        own = torch.load(saved / "optimizer.pt", weights_only=True)["diloco"]
        assert (own["steps"], own["tokens"]) == (6, 6 * BATCH * FEATURES)
    with alone(sync_every=5) as syncer:  # a run of its own: the first learner's weights are the run's
        second = make(max_steps=12)
        learner = join(second, syncer.endpoint, learner_id="a")
        started: list[dict[str, torch.Tensor]] = []

        class Start(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                started.append(learner.optimizer.learner.anchor_state_dict())

        second.add_callback(Start())
        second.train(resume_from_checkpoint=str(saved))
        stats = learner.optimizer.stats()
        assert syncer.status()["rounds_merged"] == 1
    assert (stats["steps"], stats["total_steps"]) == (6, 12)
    assert stats["total_tokens"] == 12 * BATCH * FEATURES
    from safetensors.torch import load_file

    for name, values in load_file(saved / "model.safetensors").items():
        assert torch.equal(started[0][name], values), name
    assert "weights were loaded into a model that is in a run" not in caplog.text


def test_train_may_be_called_again(make: Callable[..., Trainer]) -> None:
    with alone(sync_every=5) as syncer:
        trainer = make(max_steps=5)
        learner = join(trainer, syncer.endpoint, learner_id="a")
        trainer.train()
        first = learner.optimizer
        trainer.train()
        assert learner.optimizer is not first
        assert learner.optimizer.stats()["steps"] == 5
        assert syncer.status()["rounds_merged"] == 2
        assert syncer.status()["learners"][0]["lives"] == 2


def test_unwraps_and_saves(make: Callable[..., Trainer], tmp_path: Path) -> None:
    with alone(sync_every=5) as syncer:
        trainer = make()
        learner = join(trainer, syncer.endpoint)
        trainer.train()
        expected = syncer.weights()
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    assert type(unwrapped) is WithLoss
    unwrapped.load_state_dict(learner.optimizer.learner.anchor_state_dict(), strict=False)
    trainer.save_model(str(tmp_path / "model"))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], values) for name, values in expected.items())


# ---- F122: a model of transformers with tied embeddings ----

UNIQUE = 97 * 8 + 16 * 8 + (12 * 8 * 8 + 13 * 8) + 2 * 8  # elements, the tied ones once


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=97, n_positions=16, n_embd=8, n_layer=1, n_head=2, **ends)
    model = GPT2LMHeadModel(config)
    model.transformer.wpe.weight.requires_grad_(False)  # only this learner has it
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def into_one_buffer(model: torch.nn.Module) -> torch.Tensor:
    """Every parameter is a view of it from now on."""
    parameters = list(model.parameters())
    buffer = torch.cat([p.detach().reshape(-1) for p in parameters])
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    return buffer


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def names_and_bytes(path: Path) -> tuple[set[str], int]:
    blob = path.read_bytes()
    length = struct.unpack("<Q", blob[:8])[0]
    return set(json.loads(blob[8 : 8 + length])) - {"__metadata__"}, len(blob) - 8 - length


@pytest.mark.parametrize("how", ["plain", "views of one buffer", "wrapped"])
def test_global_weights_are_a_file_of_transformers(
    how: str, tmp_path: Path, one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """In mid-run, from a model that goes on: what was merged, with the learner's own frozen tensor."""
    model = gpt2()
    own = set(model.state_dict())
    buffer = into_one_buffer(model) if how == "views of one buffer" else None
    given: Any = model
    if how == "wrapped":
        given = torch.compile(DistributedDataParallel(model))
    words = torch.arange(32).reshape(2, 16)
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with alone(sync_every=4) as syncer, diloco.DiLoCoOptimizer(inner, given, syncer.endpoint, tokens=lambda: 32) as opt:
        for _ in range(6):
            opt.zero_grad()
            model(input_ids=words, labels=words).loss.backward()
            opt.step()
        received = opt.learner.anchor_state_dict()
        model.save_pretrained(tmp_path / "learner", state_dict=model.state_dict() | received)
        merged = syncer.weights()
        model.save_pretrained(tmp_path / "syncer", state_dict=model.state_dict() | merged)
        trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        opt.step()
        assert opt.stats()["contributions_merged"] == 1
    assert "weights were loaded into a model that is in a run" not in caplog.text
    assert set(received) == set(merged) == own - {"transformer.wpe.weight"}
    for source in ("learner", "syncer"):
        file = tmp_path / source / "model.safetensors"
        assert names_and_bytes(file) == (own - {"lm_head.weight"}, 4 * UNIQUE)
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / source)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, merged.get(name, trained[name])), name
    assert not torch.equal(merged["lm_head.weight"], trained["lm_head.weight"])  # two steps since the merge
    if buffer is not None:
        assert buffer.numel() == UNIQUE
        assert all(p.untyped_storage().data_ptr() == buffer.data_ptr() for p in model.parameters())


def test_optimizers_argument_and_callback_by_hand(
    make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    """The way that Trainer documents; resuming that way is warned of, as the weights come after the wrapping."""
    with alone(sync_every=5) as syncer:
        model = WithLoss()
        optimizer = diloco.DiLoCoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, syncer.endpoint)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        callback = DiLoCoCallback()
        with pytest.raises(RuntimeError, match="expected a call of train"):
            _ = callback.optimizer
        trainer = make(
            model, optimizers=(optimizer, scheduler), callbacks=[callback], save_strategy="steps", save_steps=20
        )
        trainer.train()
        assert callback.optimizer is optimizer
        assert syncer.status()["rounds_merged"] == 4
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
        again = WithLoss()
        optimizer = diloco.DiLoCoOptimizer(torch.optim.SGD(again.parameters(), lr=0.1), again, syncer.endpoint)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        trainer = make(again, optimizers=(optimizer, scheduler), callbacks=[DiLoCoCallback()], max_steps=21)
        with caplog.at_level(logging.WARNING, "diloco"):
            trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-20"))
    assert "weights were loaded into a model that is in a run" in caplog.text


def test_a_callback_without_a_wrapper_says_what_to_do(make: Callable[..., Trainer]) -> None:
    with pytest.raises(TypeError, match=r"got AdamW; use diloco.integrations.transformers.join\(trainer"):
        make(callbacks=[DiLoCoCallback()]).train()


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"diloco.integrations.{library}", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"which is not installed; run: pip install {library}"):
        __import__(f"diloco.integrations.{library}")
