"""One learner of the demo: a plain training loop. `python -m diloco.demo.learner_process --config FILE`

With a syncer it is wrapped in DiLoCoOptimizer; without one it is the single learner that `better_than_alone` compares
with: the same loop, seed, data and thread count.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from diloco.demo.processes import die_with_parent
from diloco.demo.record import LearnerConfig


class Progress:
    """One JSON line per event, flushed at once; the parent tails it. `t` is the machine's monotonic clock."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 (open for the process' life)

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": kind, "t": time.monotonic(), **values}) + "\n")


def save_weights(weights: dict[str, Any], folder: str, step: int, tokens: int) -> None:
    """Written under another name first, so that the reader never sees half a file."""
    import torch

    path = Path(folder) / f"{step:08d}.pt"
    torch.save({"step": step, "tokens": tokens, "t": time.monotonic(), "weights": weights}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def train(config: LearnerConfig) -> None:
    import torch

    import diloco
    from diloco.demo import data
    from diloco.demo.model import BATCH, CONTEXT, LEARNING_RATE, ByteModel, loss_of
    from diloco.demo.timed import TimedAdamW

    torch.set_num_threads(1)
    progress = Progress(config.progress)
    text = data.load_part(config.shard, config.shards)
    batches = data.batches(text, 1000 * config.seed + config.life, BATCH, CONTEXT)
    model = ByteModel(config.seed)
    inner = TimedAdamW(model.parameters(), lr=LEARNING_RATE)
    began = time.perf_counter()
    opt: Any = inner
    if config.syncer:
        opt = diloco.DiLoCoOptimizer(
            inner, model, syncer=config.syncer, learner_id=config.learner, ledger_dir=config.ledger_dir
        )
    progress.write("joined", took_s=time.perf_counter() - began, pid=os.getpid(), state=state_of(opt))

    def weights() -> dict[str, Any]:
        copies = opt.learner.anchor_state_dict() if config.syncer else model.state_dict()
        return {name: tensor.detach().clone() for name, tensor in copies.items()}

    step = tokens = 0
    if config.weights:
        save_weights(weights(), config.weights, step, tokens)
    ended = time.perf_counter()
    while not os.path.exists(config.stop) and (not config.max_steps or step < config.max_steps):
        start = time.perf_counter()
        inputs, targets = next(batches)
        loss = loss_of(model, inputs, targets)
        opt.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        inside = step_optimizer(opt, inner, inputs.numel())
        step, tokens = step + 1, tokens + inputs.numel()
        now = time.perf_counter()
        busy = now - start
        progress.write(
            "step", step=step, tokens=tokens, loss=loss.item(), busy_s=busy, inside_s=inside, gap_s=now - ended
        )
        if config.slowdown > 1:
            time.sleep(max(0.0, config.slowdown * full_speed(config, busy) - busy))
        if config.weights and step % config.weights_every == 0:
            save_weights(weights(), config.weights, step, tokens)
        if step % 16 == 1:
            progress.write("state", state=state_of(opt))
        ended = time.perf_counter()  # gaps leave out the deliberate sleep and the demo's own copies
    if config.weights:
        save_weights(weights(), config.weights, step, tokens)
    if config.syncer:
        opt.close()
        progress.write("closed", stats=opt.stats())
    else:
        progress.write("closed", stats={})


def full_speed(config: LearnerConfig, busy: float) -> float:
    """Seconds a step takes at full speed beside the others; this learner's own until the parent has said."""
    try:
        return float(Path(config.pace).read_text())
    except (OSError, ValueError):
        return busy


def step_optimizer(opt: Any, inner: Any, tokens: int) -> float:
    """Makes the optimizer's step; seconds of it that were not the inner optimizer's."""
    start = time.perf_counter()
    if opt is not inner:
        opt.add_tokens(tokens)
    opt.step()
    return time.perf_counter() - start - float(inner.seconds)


def state_of(opt: Any) -> str:
    stats = getattr(opt, "stats", None)
    return str(stats()["state"]) if stats else "alone"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="JSON file, see record.LearnerConfig")
    config = LearnerConfig(**json.loads(Path(parser.parse_args().config).read_text()))
    die_with_parent(config.parent)
    train(config)


if __name__ == "__main__":
    main()
