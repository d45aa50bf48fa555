"""Two learners that fine-tune one model with LoRA (peft): only the adapters travel, the base model never does.

python examples/finetune_lora.py                                          a syncer and two learners, checked
python examples/finetune_lora.py --syncer 127.0.0.1:29400 --learner-id a  one learner of the run at that address

The base must be the same on all learners; here it is random numbers from one seed, yours comes from_pretrained().
Needs: pip install transformers peft
"""

import common

run = common.start(sync_every=8, num_fragments=4)

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import diloco

LENGTH, BATCH = 64, 8
diloco.leave_on_sigterm()  # a job that is ended early says goodbye


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,  # random features that adapters can use
    )
    return LlamaForCausalLM(config)


model = get_peft_model(make_base(), LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = diloco.DiLoCoOptimizer(
    torch.optim.AdamW(trained, lr=1e-2), model, run.syncer, learner_id=run.learner_id, tokens=lambda: BATCH * LENGTH
)
run.wait_for_others()

torch.manual_seed(run.seed)
rows = common.text(run.seed).unfold(0, LENGTH, 16)
for _ in range(run.steps):
    batch = rows[torch.randint(len(rows), (BATCH,))]
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    run.report(loss.item(), optimizer.stats())
optimizer.close()

# The global adapters, as this learner last received them, in peft's own form.
travelled = optimizer.learner.anchor_state_dict()
every = sum(parameter.numel() for parameter in model.parameters())
print(f"[{run.learner_id}] {sum(map(torch.numel, travelled.values())):,} of {every:,} parameters travelled")
model.load_state_dict(travelled, strict=False)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = PeftModel.from_pretrained(make_base(), folder).state_dict()
    assert all(torch.equal(values, again[name]) for name, values in travelled.items())
