"""diloco.Learner in a loop that has no torch optimizer: hand it the tensors, call step() after each update.

Start a syncer first (`diloco syncer`), then as many of these as you like, each with a name of its own. A second
argument is a file that the learner is resumed from, if it is there, and saved to at the end:
python examples/without_optimizer.py first [first.pt]
"""

import sys
from pathlib import Path

import torch

import diloco

name = sys.argv[1] if len(sys.argv) > 1 else "first"
saved = Path(sys.argv[2]) if len(sys.argv) > 2 else None
torch.manual_seed(diloco.shard_seed(name))
weight = torch.zeros(16, 1, requires_grad=True)

with diloco.Learner({"weight": weight}, syncer="127.0.0.1:29400", learner_id=name) as learner:
    if saved is not None and saved.exists():
        learner.load_state_dict(torch.load(saved))
    for step in range(200):
        inputs = torch.randn(64, 16)
        loss = torch.nn.functional.mse_loss(inputs @ weight, inputs.sum(dim=1, keepdim=True))
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= 0.05 * gradient
        learner.step(tokens=len(inputs))
        if step % 50 == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    print(learner.stats())
if saved is not None:
    torch.save(learner.state_dict(), saved)
