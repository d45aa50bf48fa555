"""The paired run: the same step with and without DiLoCo, in turn, in one process.

`python -m diloco.demo.paired --config FILE`

Two equal models see the same batches; one optimizer is wrapped and connected to a live syncer, the other is bare. Which
one goes first alternates, so that drift of the machine cancels in the differences. Result: JSON on `out`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.demo.learner_process import step_optimizer
from diloco.demo.processes import die_with_parent

WARM_UP = 4


@dataclass(frozen=True)
class PairedConfig:
    syncer: str
    pairs: int
    seed: int
    shards: int
    out: str
    parent: int


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="JSON file, see PairedConfig")
    config = PairedConfig(**json.loads(Path(parser.parse_args().config).read_text()))
    die_with_parent(config.parent)
    result = measure(config)
    part = Path(config.out + ".part")
    part.write_text(json.dumps(result))
    os.replace(part, config.out)


def measure(config: PairedConfig) -> dict[str, list[float]]:
    import torch

    import diloco
    from diloco.demo import data
    from diloco.demo.model import BATCH, CONTEXT, LEARNING_RATE, ByteModel, loss_of
    from diloco.demo.timed import TimedAdamW

    torch.set_num_threads(1)
    batches = data.batches(data.load_part(0, config.shards), config.seed, BATCH, CONTEXT)
    models = [ByteModel(config.seed), ByteModel(config.seed)]
    inner = [TimedAdamW(model.parameters(), lr=LEARNING_RATE) for model in models]
    wrapped = diloco.DiLoCoOptimizer(inner[0], models[0], syncer=config.syncer, learner_id="paired")
    optimizers: list[Any] = [wrapped, inner[1]]
    times: list[list[float]] = [[], []]
    inside: list[float] = []
    for pair in range(config.pairs + WARM_UP):
        inputs, targets = next(batches)
        for which in (0, 1) if pair % 2 else (1, 0):
            start = time.perf_counter()
            loss = loss_of(models[which], inputs, targets)
            optimizers[which].zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            in_diloco = step_optimizer(optimizers[which], inner[which], inputs.numel())
            if pair >= WARM_UP:
                times[which].append(time.perf_counter() - start)
                if which == 0:
                    inside.append(in_diloco)
    wrapped.close()
    return {"wrapped_s": times[0], "bare_s": times[1], "inside_s": inside}


if __name__ == "__main__":
    main()
