"""What a rank of an island in the tests is: what it says, its model, its data. island_programs.py has what it does."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco._sharded import local

BATCH = 12  # samples of an island's step, split over its ranks
PROGRAMS: dict[str, Callable[..., None]] = {}


def program(function: Callable[..., None]) -> Callable[..., None]:
    PROGRAMS[function.__name__] = function
    return function


class Here:
    """This rank."""

    job = rank = step = 0
    ranks = 1
    store: Any = None


def say(event: str, **values: Any) -> None:
    line = json.dumps({"event": event, "job": Here.job, "rank": Here.rank, **values}) + "\n"
    os.write(1, line.encode())  # one call: lines of several ranks share the pipe


class SayWarnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("warning", step=Here.step, text=record.getMessage()[:1000])


# ---- the task ----


def make_model(how: str = "alone", seed: int = 0) -> nn.Sequential:
    """33 rows and 5 rows do not divide by 2, one row leaves a rank with nothing."""
    hidden = 34 if how in ("tp", "2d", "whole34") else 33  # torch computes in parallel on equal shards only
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(17, hidden), nn.Tanh(), nn.Linear(hidden, 5), nn.Tanh(), nn.Linear(5, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 17, generator=torch.Generator().manual_seed(1000 + number))
    return inputs, inputs[:, :1].sin()


def shard(model: nn.Module, how: str, group: dist.ProcessGroup | None = None) -> nn.Module:
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if how in (
        "alone",
        "whole34",
        "replicas",
    ):  # replicas that do not talk to each other: the same data makes them equal
        return model
    if how == "ddp":
        return DistributedDataParallel(model, process_group=group)
    if how == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    if how == "2d":
        grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))
        model = parallelize_module(model, grid["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in model:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=grid["data"])
        return fully_shard(model, mesh=grid["data"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if how == "fsdp_bf16" else {}
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    elif group is not None:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def backward(model: nn.Module, number: int, how: str, group: dist.ProcessGroup | None = None) -> None:
    """Of this rank's rows of the batch; of all of them where ranks compute together on the same data."""
    inputs, targets = batch(number)
    if how not in ("tp", "replicas", "alone", "whole34"):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if how == "2d":
            rank, ranks = rank // 2, 2
        inputs, targets = inputs[rank::ranks], targets[rank::ranks]
    nn.functional.mse_loss(model(inputs).float(), targets).backward()


def tokens_of_rank(how: str, group: dist.ProcessGroup | None = None) -> int:
    if how in ("alone", "whole34"):
        return BATCH
    if how == "2d":
        return BATCH // 2 if dist.get_rank(group) % 2 == 0 else 0
    if how in ("tp", "replicas"):
        return BATCH if dist.get_rank(group) == 0 else 0
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return len(range(rank, BATCH, ranks))


def held(model: nn.Module) -> list[torch.Tensor]:
    return [local(p).detach().clone() for p in model.parameters()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def wrap(model: nn.Module, how: str, kind: str, syncer: str, **options: Any) -> diloco.DiLoCoOptimizer:
    tokens = tokens_of_rank(how, options.get("island"))
    inner = OPTIMIZERS[kind](model.parameters())
    opt = diloco.DiLoCoOptimizer(inner, model, syncer, tokens=lambda: tokens, **options)
    say("joined", incarnation=opt.learner.incarnation, stats=opt.stats(), how=how)
    return opt
