"""Two Hugging Face Trainers that train one language model: a config object and text made on the spot, no download.

python examples/hf_trainer.py                                          a syncer and two learners, checked at the end
python examples/hf_trainer.py --syncer 127.0.0.1:29400 --learner-id a  one learner of the run at that address

Needs: pip install transformers accelerate
"""

import common

run = common.start(sync_every=8, num_fragments=4)

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import diloco
from diloco.integrations.transformers import join

LENGTH = 64
diloco.leave_on_sigterm()  # a job that is ended early says goodbye

torch.manual_seed(run.seed)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
model = LlamaForCausalLM(config)
rows = common.text(run.seed).unfold(0, LENGTH, 16)
data = [{"input_ids": row, "labels": row} for row in rows]


class Report(TrainerCallback):
    def on_train_begin(self, *_, **__):
        run.wait_for_others()

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            run.report(logs["loss"], learner.optimizer.stats())


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=run.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Report()])
    trainer.remove_callback(PrinterCallback)
    learner = join(trainer, run.syncer, learner_id=run.learner_id)
    trainer.train()

    # What a run is for: the global weights, as this learner last received them, in a folder of the usual form.
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    weights = unwrapped.state_dict() | learner.optimizer.learner.anchor_state_dict()
    unwrapped.save_pretrained(folder, state_dict=weights)
