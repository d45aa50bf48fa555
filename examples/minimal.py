"""A small training script with diloco in it: the three marked lines. Without them it is an ordinary one.

python examples/minimal.py                                          a syncer and two learners, checked at the end
python examples/minimal.py --syncer 127.0.0.1:29400 --learner-id a  one learner of the run at that address
"""

import common

run = common.start(sync_every=8, num_fragments=4)  # where the syncer is, and how long to train

import torch

import diloco  # <- diloco

torch.manual_seed(run.seed)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = diloco.DiLoCoOptimizer(optimizer, model, run.syncer, learner_id=run.learner_id)  # <- diloco
run.wait_for_others()

for _ in range(run.steps):
    x = torch.randn(256, 16)
    y = torch.sin(x[:, :4]).sum(dim=1, keepdim=True)
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.add_tokens(len(x))  # <- diloco
    optimizer.step()
    run.report(loss.item())
