"""The Trainer of Hugging Face transformers as a learner.

trainer = Trainer(model=model, args=args, train_dataset=data)
diloco.integrations.transformers.join(trainer, syncer="127.0.0.1:29400", learner_id="a")
trainer.train()
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from diloco.integrations._missing import missing
from diloco.metrics import flatten
from diloco.optimizer import DiLoCoOptimizer

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise missing("transformers", error) from None


def join(trainer: Trainer, syncer: str | None = None, **options: Any) -> DiLoCoCallback:
    """Makes `trainer` a learner from its next train() on; returns the callback that was added to it.

    The optimizer, the Trainer's own or one that was handed to it, is wrapped when train() has loaded the checkpoint it
    resumes from: weights that are loaded after wrapping would count as this learner's work. train() may be called
    again; it then joins again. `syncer` and `options` are those of DiLoCoOptimizer.
    """
    make = trainer.create_optimizer

    def create_optimizer(model: Any = None) -> Any:
        made = _unwrapped(make(model))
        if isinstance(made, DiLoCoOptimizer):
            if not made.learner.closed:
                return trainer.optimizer
            made = made.inner
        trainer.optimizer = DiLoCoOptimizer(made, trainer.model if model is None else model, syncer, **options)
        return trainer.optimizer

    trainer.create_optimizer = create_optimizer
    callback = DiLoCoCallback()
    trainer.callback_handler.callbacks.insert(0, callback)  # before those that report what is logged
    return callback


class DiLoCoCallback(TrainerCallback):
    """Counts tokens, puts our metrics into the Trainer's logs, and leaves the run when training ends.

    `join` adds it. By hand it serves a Trainer(optimizers=(DiLoCoOptimizer(...), None), callbacks=[DiLoCoCallback()])
    that does not resume; callbacks that report, such as TensorBoard's, then come first and do not see our metrics.

    Tokens are counted by the Trainer: `include_num_input_tokens_seen` becomes "all" if it was off ("non_padding" leaves
    padding out). Metrics are those of diloco.metrics, with every line that has the training loss.
    """

    def __init__(self) -> None:
        self._optimizer: DiLoCoOptimizer | None = None
        self._counted = 0

    @property
    def optimizer(self) -> DiLoCoOptimizer:
        """The wrapper that steps; there from the beginning of train() on, and after its end."""
        if self._optimizer is None:
            raise RuntimeError("the Trainer has no DiLoCoOptimizer yet; expected a call of train() before")
        return self._optimizer

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        **_: Any,
    ) -> None:
        found = _unwrapped(optimizer)
        if not isinstance(found, DiLoCoOptimizer):
            raise TypeError(
                f"expected the Trainer's optimizer to be a DiLoCoOptimizer, got {type(found).__name__}; use "
                "diloco.integrations.transformers.join(trainer, ...) instead of adding DiLoCoCallback by hand"
            )
        self._optimizer = found
        if args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "all"
        self._counted = state.num_input_tokens_seen

    def _count(self, state: TrainerState) -> None:
        self.optimizer.add_tokens(state.num_input_tokens_seen - self._counted)
        self._counted = state.num_input_tokens_seen

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._count(state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._count(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs is None or "loss" not in logs or self._optimizer is None:
            return
        metrics = flatten(self._optimizer.stats())
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.optimizer.close()


def _unwrapped(optimizer: Any) -> Any:
    """Without accelerate's AcceleratedOptimizer around it."""
    return getattr(optimizer, "optimizer", optimizer)
