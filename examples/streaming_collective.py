"""Streaming DiLoCo without a syncer: python examples/streaming_collective.py, or
torchrun --nproc-per-node 2 examples/streaming_collective.py

The ranks of one torchrun job are the learners, each with its own data. Fragments of the model travel to all ranks while
training goes on, and are merged one step later. Started without torchrun it starts torchrun on itself.
"""

import argparse
import os
import sys

import torch
from torch import distributed, nn

import diloco

BATCH, LENGTH, WORDS, WIDTH = 16, 32, 32, 32


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2, help="learners, when started without torchrun")
    return parser.parse_args()


def start_torchrun(ranks: int) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *sys.argv]
    os.execv(sys.executable, [sys.executable, *launch])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)[0]
        return x + self.shrink(torch.tanh(self.grow(x)))


class Model(nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(words)))


def sentences(generator: torch.Generator) -> torch.Tensor:
    """Every word follows from the one before by one of two rules, at random."""
    words = [torch.randint(WORDS, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        rule = torch.rand(BATCH, generator=generator) < 0.8
        words.append(torch.where(rule, words[-1] * 5 + 3, words[-1] + 7) % WORDS)
    return torch.stack(words, dim=1)


def train(steps: int) -> None:
    rank = distributed.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # other first weights on every rank: rank 0's are taken
    model = Model()
    data = torch.Generator().manual_seed(diloco.shard_seed(f"rank-{rank}"))
    optimizer = diloco.CollectiveDiLoCoOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        model,
        preset="streaming",  # one step of overlap, half of the local weights kept, layers dealt out in turn
        sync_every=15,
        num_fragments=3,
        outer_momentum=0.5,  # momentum 0.9 needs far more than a few syncs of each fragment
    )
    losses = []
    for step in range(1, steps + 1):
        words = sentences(data)
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.add_tokens(BATCH * LENGTH)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"rank {rank}: step {step}, loss {losses[-1]:.3f}", flush=True)
    stats = optimizer.stats()
    optimizer.close()
    first, last = sum(losses[:20]) / 20, sum(losses[-20:]) / 20
    mib = stats["bytes_out"] / 2**20
    print(
        f"rank {rank}: {stats['merges']} merges of {stats['ranks']} members, {mib:.2f} MiB sent, "
        f"{stats['blocked_s']:.3f} s inside diloco; loss of the first 20 steps {first:.3f}, of the last 20 {last:.3f}",
        flush=True,
    )
    assert stats["merges"] >= 5 and stats["ranks"] >= 2, stats
    assert last <= 0.9 * first, (first, last)


def main() -> None:
    given = options()
    if "RANK" not in os.environ:
        start_torchrun(given.ranks)
    distributed.init_process_group("gloo")
    try:
        train(given.steps)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
