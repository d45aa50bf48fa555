"""One learner inside each framework in turn: 20 steps of two micro-batches of 8 samples.

python framework_learner.py ID FRAMEWORK=SYNCER ...   (prints {"event": FRAMEWORK, ...} after each)
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import batch, small_model

import diloco
from diloco import DiLoCoOptimizer

STEPS, ACCUMULATE, BATCH = 20, 2, 8


class WithLoss(nn.Module):
    """Of the form that Trainer expects."""

    main_input_name = "inputs"

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(inputs), targets)}


def data(seed: int, size: int = STEPS * ACCUMULATE * BATCH) -> TensorDataset:
    return TensorDataset(*batch(seed, size))


def rows(seed: int, size: int = STEPS * ACCUMULATE * BATCH) -> list[dict[str, torch.Tensor]]:
    return [{"inputs": inputs, "targets": targets} for inputs, targets in data(seed, size)]


def make(model: nn.Module, syncer: str, learner_id: str, **options: Any) -> DiLoCoOptimizer:
    return DiLoCoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, syncer, learner_id=learner_id, **options)


def trainer(syncer: str, learner_id: str) -> tuple[DiLoCoOptimizer, nn.Module]:
    """The way that Trainer documents: Trainer(optimizers=...)."""
    from transformers import Trainer, TrainingArguments

    from diloco.integrations.transformers import DiLoCoCallback

    model = WithLoss()
    optimizer = make(model.net, syncer, learner_id)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATE,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=rows(sum(map(ord, learner_id))),
            optimizers=(optimizer, None),
            callbacks=[DiLoCoCallback()],
        ).train()
    return optimizer, model.net


def lightning(syncer: str, learner_id: str) -> tuple[DiLoCoOptimizer, nn.Module]:
    """The optimizer comes wrapped from configure_optimizers()."""
    from lightning.pytorch import LightningModule, Trainer

    from diloco.integrations.lightning import DiLoCoCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> DiLoCoOptimizer:
            return make(self.net, syncer, learner_id)

    module, callback = Module(), DiLoCoCallback()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(
        max_steps=STEPS, accumulate_grad_batches=ACCUMULATE, callbacks=[callback], accelerator="cpu", devices=1, **quiet
    ).fit(module, DataLoader(data(sum(map(ord, learner_id))), batch_size=BATCH))
    return callback.optimizer, module.net


def accelerate(syncer: str, learner_id: str) -> tuple[DiLoCoOptimizer, nn.Module]:
    """prepare() gets the wrapper and steps it."""
    from accelerate import Accelerator

    model = small_model()
    wrapper = make(model, syncer, learner_id)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
    loader = DataLoader(data(sum(map(ord, learner_id))), batch_size=BATCH)
    prepared, optimizer, loader = accelerator.prepare(model, wrapper, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(prepared):
            wrapper.add_tokens(len(inputs))
            accelerator.backward(nn.functional.mse_loss(prepared(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    wrapper.close()
    return wrapper, accelerator.unwrap_model(prepared)


def main() -> None:
    torch.set_num_threads(1)
    learner_id, *runs = sys.argv[1:]
    diloco.logs.log_to_stderr()
    for run in runs:
        framework, syncer = run.split("=")
        train = {"trainer": trainer, "lightning": lightning, "accelerate": accelerate}[framework]
        optimizer, model = train(syncer, learner_id)
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        print(json.dumps({"event": framework, "stats": optimizer.stats(), "weights": weights}), flush=True)


if __name__ == "__main__":
    main()
