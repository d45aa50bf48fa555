"""One rank of one of the islands that are compared: a process that trains some steps whenever it is told to.

Variants: "bare", the inner optimizer alone; "alone", wrapped, with nobody at the syncer's address; "joined", in a run.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco._sharded import local

VARIANTS = ("bare", "alone", "joined")
SHARDINGS = ("ddp", "fsdp2")
LAYERS, ROWS = 4, 16
TIMEOUT = timedelta(seconds=120)
PEAK = "peak"  # see main()
COUNTED = ("steps", "blocked_s", "rank_waits", "rank_waits_s", "rank_exchanges", "bytes_in", "bytes_out")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True)
class Job:
    """What a rank is told when it is made."""

    sharding: str
    variant: str
    rank: int
    ranks: int
    width: int  # of the square layers
    seed: int
    syncer: str
    store: str  # file over which the ranks of this island meet


def width_of(parameters: int) -> int:
    """Of square layers with so many parameters in all, at least 8."""
    return max(8, round(math.sqrt(parameters / LAYERS)))


def peak_memory() -> int:
    """Of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; expected a Linux kernel")


def keep_freed_memory(kept: bool) -> None:
    """Whether glibc keeps memory of some size that is freed, which is fast, or gives it back, so that a peak of the
    process is what was in use at once."""
    threshold = (32 if kept else 0.25) * 2**20
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, int(threshold))
    libc.mallopt(_M_TRIM_THRESHOLD, int(2 * threshold))


class Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        layers = [nn.Linear(job.width, job.width, bias=False) for _ in range(LAYERS)]
        self.model: nn.Module = nn.Sequential(*layers)
        net = self.model
        if job.sharding == "fsdp2":
            for layer in layers:
                fully_shard(layer)
            fully_shard(net)
        elif job.ranks > 1:
            self.model = DistributedDataParallel(net)
        self.held = sum(local(p).numel() for p in net.parameters())
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.wrapper: diloco.DiLoCoOptimizer | None = None
        if job.variant != "bare":
            self.wrapper = diloco.DiLoCoOptimizer(
                self.optimizer, net, job.syncer, learner_id=f"{job.sharding}-{job.ranks}", tokens=lambda: ROWS
            )
            self.optimizer = self.wrapper
        draw = torch.Generator().manual_seed(job.seed + 1 + job.rank)
        self.rows = torch.randn(ROWS, job.width, generator=draw)
        self.before = self.stats()

    def begin(self) -> None:
        """What is reported counts from here: joining is over, and steps are as fast as they can be."""
        keep_freed_memory(True)
        self.before = self.stats()

    def steps(self, count: int) -> float:
        """Seconds they took."""
        began = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.rows).square().mean().backward()
            self.optimizer.step()
        return time.perf_counter() - began

    def stats(self) -> dict[str, Any]:
        return self.wrapper.stats() if self.wrapper else {}

    def report(self) -> dict[str, Any]:
        """Of a wrapped one: what COUNTED has counted since begin(), and its memory now as it accounts for it."""
        out: dict[str, Any] = {"held_parameters": self.held}
        if self.wrapper:
            now = self.stats()
            out |= {name: now[name] - self.before[name] for name in COUNTED}
            out |= {name: now[name] for name in ("staged_bytes", "sent_image_bytes", "arriving_bytes")}
        return out


def main(job: Job, pipe: Connection) -> None:
    """Answers a number with the seconds that so many steps took; PEAK with the peak of memory so far, after which speed
    counts; None with the rank's report, after which it ends."""
    torch.set_num_threads(1)
    keep_freed_memory(False)
    logging.getLogger("diloco").setLevel(logging.ERROR)  # nobody at the syncer's address is what "alone" is for
    distributed.init_process_group(
        "gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.ranks, timeout=TIMEOUT
    )
    trainer = Trainer(job)
    pipe.send("ready")
    while (word := pipe.recv()) is not None:
        if word == PEAK:
            pipe.send(peak_memory())
            trainer.begin()
        else:
            pipe.send(trainer.steps(word))
    pipe.send(trainer.report())
    pipe.recv()  # all have measured: what closing takes is nobody's
    if trainer.wrapper:
        trainer.wrapper.close()
    distributed.destroy_process_group()
