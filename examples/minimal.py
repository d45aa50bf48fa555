"""A small training script; minimal_plain.py and minimal.py show it without and with diloco. Argument: a seed."""

import sys

import torch

import diloco

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = diloco.DiLoCoOptimizer(optimizer, model, syncer="127.0.0.1:29400", tokens=lambda: 64)

for step in range(2000):
    x = torch.randn(64, 16)
    y = torch.sin(x[:, :4]).sum(dim=1, keepdim=True)
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 400 == 0:
        print(f"step {step:4d}  loss {loss.item():.4f}")
