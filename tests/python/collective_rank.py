"""One rank of two, as a process: collective_rank.py STORE RANK no_python|for_ever. Says what happens as JSON lines."""

from __future__ import annotations

import datetime
import json
import sys
import time
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from toys import loss_of, small_model

import diloco

TIMEOUT_S = 5.0
COLLECTIVES = (
    "all",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "monitored",
    "recv",
    "reduce",
    "scatter",
    "send",
)


def say(event: str, **more: object) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a collective of Python was called")


def take_collectives_away() -> None:
    names = [name for name in dir(distributed) if name.split("_")[0] in COLLECTIVES]
    assert {"all_reduce", "broadcast", "all_gather", "barrier", "all_gather_object"} <= set(names)
    for name in names:
        setattr(distributed, name, refuse)
        setattr(distributed.distributed_c10d, name, refuse)


def main(store: str, rank: int, what: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group: Any = distributed.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    if what == "no_python":
        group = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["replicate"]
        take_collectives_away()
    model = small_model(rank)
    opt = diloco.CollectiveDiLoCoOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        group,
        mode="lockstep",
        sync_every=4,
        num_fragments=2,
        overlap_steps=1,
    )
    for step in range(1, 21 if what == "no_python" else 1_000_000):
        opt.zero_grad()
        loss_of(model, 100 * rank + step).backward()
        start = time.monotonic()
        try:
            opt.step()
        except ConnectionError as error:
            say("failed", text=str(error), after_s=time.monotonic() - start)
            try:
                opt.step()
            except ConnectionError as again:
                say("again", text=str(again))
            opt.close()
            sys.exit(3)
        if step == 8:
            say("running")
    weights = [values.flatten().tolist() for values in opt.learner.anchor_state_dict().values()]
    say("done", weights=weights, merges=opt.stats()["merges"], ranks=opt.stats()["ranks"])
    opt.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
