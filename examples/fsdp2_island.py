"""Two islands: each is an FSDP2 job of two ranks that hold half of a model each, and one learner of the run.

python examples/fsdp2_island.py    a syncer and two islands, checked at the end
torchrun --nproc-per-node 2 examples/fsdp2_island.py --syncer 127.0.0.1:29400 --learner-id a
                                   one island of the run at that address

To an FSDP2 script two things are added: the wrapper around the optimizer, and the tokens of this rank's batch. Every
rank sends and receives its own half. An island may have any number of ranks, on one host or several (docs/hosts.md),
and the islands of a run need not be alike.
"""

import datetime
import sys

import common
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import diloco

RANKS, BATCH, LENGTH, WIDTH = 2, 8, 32, 64
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))


class Net(nn.Module):
    """A small language model over bytes: the loss of rows of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embed(rows[:, :-1]), mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def sharded(net: Net) -> Net:
    for layer in net.layers.layers:
        fully_shard(layer)
    fully_shard(net)
    return net


def train(run: common.Run) -> None:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    net = sharded(Net())
    rows = common.text(run.seed + rank).unfold(0, LENGTH + 1, 1)  # other data on every rank
    draw = torch.Generator().manual_seed(run.seed + rank)
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3)
    # After fully_shard, on all ranks.
    with diloco.DiLoCoOptimizer(inner, net, run.syncer, learner_id=run.learner_id) as optimizer:
        run.wait_for_others()
        for _ in range(run.steps):
            batch = rows[torch.randint(len(rows), (BATCH,), generator=draw)]
            loss = net(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.add_tokens(BATCH * LENGTH)  # of this rank; those of all ranks are added up
            optimizer.step()
            if rank == 0:
                run.report(loss.item(), optimizer.stats())
        weights = optimizer.learner.anchor_state_dict(full=True)  # what a run is for; made by all ranks together
        sent = optimizer.stats()["bytes_out"] / 2**20
    whole = Net()
    whole.load_state_dict(weights)
    print(
        f"[{run.learner_id}] rank {rank} of {distributed.get_world_size()} sent {sent:.2f} MiB; loss of the global "
        f"weights on its last batch: {whole(batch).item():.3f}",
        flush=True,
    )


def main() -> None:
    run = common.start(launch=LAUNCH, sync_every=8, num_fragments=4)
    # The timeout is how long an island stands still when one of its ranks is lost, before it ends.
    distributed.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    try:
        train(run)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
