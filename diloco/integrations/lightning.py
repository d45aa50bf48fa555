"""The Trainer of Lightning as a learner.

trainer = Trainer(callbacks=[diloco.integrations.lightning.DiLoCoCallback(syncer="127.0.0.1:29400", learner_id="a")])
trainer.fit(module, data)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from diloco.integrations._missing import missing
from diloco.metrics import flatten
from diloco.optimizer import DiLoCoOptimizer

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise missing("lightning", error) from None


def count_tokens(batch: Any) -> int:
    """Elements of `input_ids` if the batch has that name, or of its first tensor if that holds token ids (integers,
    two dimensions or more); else the number of samples, the first dimension."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return int(batch["input_ids"].numel())
    while isinstance(batch, (Mapping, list, tuple)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    if not isinstance(batch, torch.Tensor):
        raise TypeError(
            f"cannot tell how many tokens are in a batch that begins with a {type(batch).__name__}; expected a tensor. "
            "Give DiLoCoCallback(tokens=...) a function of the batch"
        )
    if batch.dim() >= 2 and not batch.is_floating_point():
        return batch.numel()
    return len(batch) if batch.dim() else 1


class DiLoCoCallback(Callback):
    """Wraps the optimizer that configure_optimizers() made, counts tokens, logs our metrics, and leaves the run when
    fit() ends, however it ends.

    Args:
        syncer, options: those of DiLoCoOptimizer. The module needs no change; if configure_optimizers() returns a
            DiLoCoOptimizer itself, that one is used and no option may be given here.
        tokens: gives the number of tokens (or samples) of a batch; default `count_tokens`.

    Lightning loads a checkpoint's weights before the optimizer is wrapped and the optimizer's state after it, which is
    the right order. Our metrics (diloco.metrics) go to every logger of the Trainer, each `log_every_n_steps` steps.
    """

    def __init__(
        self, syncer: str | None = None, *, tokens: Callable[[Any], int] = count_tokens, **options: Any
    ) -> None:
        self._options = options if syncer is None else {"syncer": syncer, **options}
        self._tokens = tokens
        self._optimizer: DiLoCoOptimizer | None = None
        self._logged = 0

    @property
    def optimizer(self) -> DiLoCoOptimizer:
        """The wrapper that steps; there from the beginning of fit() on, and after its end."""
        if self._optimizer is None:
            raise RuntimeError("the Trainer has no DiLoCoOptimizer yet; expected a call of fit() before")
        return self._optimizer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"expected one optimizer from configure_optimizers(), got {len(trainer.optimizers)}; give all "
                "parameters to one, as parameter groups, or return a DiLoCoOptimizer over a list of them"
            )
        made = trainer.optimizers[0]
        if isinstance(made, DiLoCoOptimizer):
            if self._options:
                raise ValueError(
                    "configure_optimizers() returned a DiLoCoOptimizer and DiLoCoCallback was given "
                    f"{', '.join(sorted(self._options))}; expected the options in one of the two places"
                )
            self._optimizer = made
        else:
            self._optimizer = DiLoCoOptimizer(made, pl_module, **self._options)
            trainer.optimizers = [self._optimizer]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.optimizer.add_tokens(self._tokens(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, every = trainer.global_step, getattr(trainer, "log_every_n_steps", 0)
        if not every or step == self._logged or step % every:
            return
        self._logged = step
        for logger in trainer.loggers:
            logger.log_metrics(flatten(self.optimizer.stats()), step=step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.optimizer.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._optimizer is not None:
            self._optimizer.close()
