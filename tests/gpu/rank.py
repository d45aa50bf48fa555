"""One rank of two: rank.py STORE RANK BACKEND DEVICE SETTINGS. Prints its global weights, or how it was refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import distributed, nn

import diloco

STEPS = 26


def say(event: str, **more: object) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def small_model(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))


def give_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Made on the CPU, so that every device and backend trains on the same numbers."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + index)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


def main(store: str, rank: int, backend: str, device: str, settings: dict[str, Any]) -> None:
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    model = small_model(rank).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    try:
        opt = diloco.CollectiveDiLoCoOptimizer(inner, model, **settings)
    except ValueError as error:
        say("refused", text=str(error))
        return
    queued = backend == "nccl"
    for step in range(1, STEPS + 1):
        give_gradients(model, rank, step)
        opt.add_tokens(16 + 8 * rank)
        if queued:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")  # whatever makes the host wait for the device raises
        opt.step()
        if queued:
            torch.cuda.set_sync_debug_mode("default")
    if queued:
        torch.cuda.synchronize()
    weights = [values.flatten().tolist() for values in opt.learner.anchor_state_dict().values()]
    say("done", weights=weights, merges=opt.stats()["merges"], waited_s=opt.stats()["waited_s"])
    opt.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], json.loads(sys.argv[5]))
