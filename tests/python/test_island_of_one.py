"""A script for islands, started with one rank, is a learner by itself, also where fully_shard makes DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from toys import QUICK, snapshot

import diloco
from diloco._meeting import Meeting, gather


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_ranks_tell_each_other_nothing_that_could_be_executed(one_rank: None) -> None:
    talk = Meeting(distributed.group.WORLD).group("talk", [0])
    value = {"names": ["ä", "\ud800"], "numbers": [1, 0.1, -(2**70), float("inf")], "yes": True, "nothing": None}
    assert gather(talk, value) == [value]
    assert gather(talk, (1, (2, 3))) == [[1, [2, 3]]]
    with pytest.raises(TypeError, match="not JSON serializable"):
        gather(talk, Path)


def test_fsdp2_on_one_rank_is_a_learner(one_rank: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    fully_shard(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        diloco.Syncer(**QUICK | {"adopt": "overwrite", "mode": "lockstep", "overlap_steps": 0}) as syncer,
        diloco.DiLoCoOptimizer(inner, model, syncer.endpoint, tokens=lambda: 4) as opt,
    ):
        before = {name: tensor.full_tensor() for name, tensor in snapshot(model).items()}
        for _ in range(12):
            opt.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            opt.step()
        assert opt.stats()["ranks"] == 1
        assert opt.stats()["contributions_merged"] >= 4
        anchors = opt.learner.anchor_state_dict()
        weights = syncer.weights()
    for name, anchor in anchors.items():
        assert isinstance(anchor, DTensor)
        torch.testing.assert_close(anchor.full_tensor(), weights[name], rtol=0, atol=0)
        assert not torch.equal(weights[name], before[name])
