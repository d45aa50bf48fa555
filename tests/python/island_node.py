"""A rank of an island, for test_hosts.py: FSDP2 over all ranks of the job. Trains until rank 0's stdin ends.

stdout, one object a line, each with the rank: start {pid}; joined {state}; step {step, state, longest_call_s, gap_s,
merged}; done {steps}.

    torchrun --nproc-per-node 2 tests/python/island_node.py --syncer 127.0.0.1:29400 --learner-id a
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import select
import signal
import time
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import diloco
from diloco.logs import log_to_stderr
from diloco.testing.tiny_learner import Task, loss_of, make_model


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, "rank": dist.get_rank(), **values}), flush=True)


def stdin_ended(at_most_s: float) -> bool:
    """Waits that long, or until there is no more stdin."""
    return bool(select.select([0], [], [], max(0.0, at_most_s))[0]) and not os.read(0, 4096)


def train(model: torch.nn.Module, task: Task, opt: diloco.DiLoCoOptimizer, step_s: float) -> int:
    over = torch.zeros(1)
    step, last = 0, time.perf_counter()
    while not over.item():
        loss = loss_of(model, task.sample())
        opt.zero_grad()
        loss.backward()
        opt.add_tokens(task.batch)
        opt.step()
        now = time.perf_counter()
        stats = opt.stats()
        merged, call = stats["contributions_merged"], stats["blocked_longest_s"]
        say("step", step=step, state=stats["state"], merged=merged, longest_call_s=call, gap_s=now - last)
        step, last = step + 1, now
        if dist.get_rank() == 0:
            over[0] = stdin_ended(step_s - (time.perf_counter() - now))
        dist.all_reduce(over)  # all ranks leave at the same step
    return step


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--syncer", required=True)
    parser.add_argument("--learner-id", required=True)
    parser.add_argument("--timeout-s", type=float, required=True, help="of the island's collectives")
    parser.add_argument("--ledgers", required=True)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: torchrun gives its workers sessions of their own
    torch.set_num_threads(1)
    log_to_stderr()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout_s))
    say("start", pid=os.getpid())
    model = make_model(64, 2, seed=0)
    for layer in model.children():
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    task = Task(seed=100 * dist.get_rank() + len(options.learner_id), batch=32)
    with diloco.DiLoCoOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        syncer=options.syncer,
        learner_id=options.learner_id,
        ledger_dir=options.ledgers,
    ) as opt:
        say("joined", state=opt.stats()["state"])
        steps = train(model, task, opt, step_s=0.02)
    say("done", steps=steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
