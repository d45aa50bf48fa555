"""What a sync costs without a syncer: python benchmarks/python/collective_cost.py [--ranks 2] [--million 16]

Ranks are processes on this machine over Gloo. For each setting, in ms, medians over the syncs: the boundary that stages
and the one after it, which waits for what is left of the all_gather, merges, makes the outer step and adopts. Nobody
trains meanwhile, so the wait is the whole transfer. Then an all_reduce and an all_gather of as many values, alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import distributed, multiprocessing, nn

import diloco

SYNCS = 7
SETTINGS: dict[str, dict[str, Any]] = {
    "mean, f32": {"merge": "mean", "wire_dtype": "f32"},
    "mean, bf16": {"merge": "mean", "wire_dtype": "bf16"},
    "rda, f32": {"merge": "rda", "wire_dtype": "f32"},
    "rda, bf16": {"merge": "rda", "wire_dtype": "bf16"},
}


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def measure(settings: dict[str, Any], weight: nn.Parameter) -> tuple[float, ...]:
    learner = diloco.CollectiveLearner(
        [("weight", weight)], mode="lockstep", sync_every=3, num_fragments=1, overlap_steps=1,
        outer_optimizer="nesterov", outer_momentum=0.9, adopt="overwrite", **settings,
    )  # fmt: skip
    stage, wait, merge = [], [], []
    for _ in range(SYNCS):
        with torch.no_grad():
            weight.add_(torch.rand(1))
        learner.step()
        distributed.barrier()  # how far the ranks are apart is none of the sync's
        stage.append(timed(learner.step))
        before = learner.stats()["waited_s"]
        both = timed(learner.step)
        wait.append(1e3 * (learner.stats()["waited_s"] - before))
        merge.append(both - wait[-1])
    out = learner.stats()["bytes_out"] / SYNCS / 2**20
    learner.close()
    return out, *(statistics.median(times) for times in (stage, wait, merge))


def run(rank: int, ranks: int, million: int, store: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("diloco").setLevel(logging.ERROR)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    weight = nn.Parameter(torch.zeros(million, 1000 * 1000))
    for name, settings in SETTINGS.items():
        out, stage, wait, merge = measure(settings, weight)
        if rank == 0:
            print(f"{name:10}  out {out:6.1f} MiB  stage {stage:6.1f}  wait {wait:6.1f}  merge and adopt {merge:6.1f}")
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.zeros(weight.numel(), dtype=dtype)
        rows = [torch.zeros_like(values) for _ in range(ranks)]
        calls = {
            "all_reduce": lambda values=values: distributed.all_reduce(values),
            "all_gather": lambda values=values, rows=rows: distributed.all_gather(rows, values),
        }
        for name, call in calls.items():
            alone = statistics.median(timed(call) for _ in range(SYNCS))
            if rank == 0:
                print(f"{name} alone, {dtype}: {alone:7.1f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--million", type=int, default=16, help="parameters")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.ranks, given.million, f"{folder}/store")
        multiprocessing.spawn(run, arguments, nprocs=given.ranks)
