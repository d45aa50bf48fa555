"""Two Lightning Trainers that train one network. The LightningModule knows nothing of diloco.

python examples/lightning.py                                          a syncer and two learners, checked at the end
python examples/lightning.py --syncer 127.0.0.1:29400 --learner-id a  one learner of the run at that address

Needs: pip install lightning
"""

import common

run = common.start(sync_every=8, num_fragments=4)

import logging

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from diloco.integrations.lightning import DiLoCoCallback

LENGTH, WIDTH = 16, 512
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class NextByte(LightningModule):
    """The next byte from the 16 before it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Embedding(128, 32),
            torch.nn.Flatten(),
            torch.nn.Linear(LENGTH * 32, WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(WIDTH, 128),
        )

    def training_step(self, batch, _):
        (rows,) = batch
        return torch.nn.functional.cross_entropy(self.net(rows[:, :-1]), rows[:, -1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Report(Callback):
    def on_train_start(self, *_):
        run.wait_for_others()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        run.report(outputs["loss"].item(), learner.optimizer.stats())


torch.manual_seed(run.seed)
rows = common.text(run.seed).unfold(0, LENGTH + 1, 1)
data = DataLoader(TensorDataset(rows), batch_size=256, shuffle=True)
learner = DiLoCoCallback(run.syncer, learner_id=run.learner_id)
trainer = Trainer(
    max_steps=run.steps,
    gradient_clip_val=1.0,
    callbacks=[learner, Report()],
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(NextByte(), data)
