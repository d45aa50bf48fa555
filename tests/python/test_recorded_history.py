"""Streaming DiLoCo as an independent implementation computed it: two replicas, two scalar fragments that start at 1,
gradient 2 everywhere, inner SGD with lr 1, outer SGD with lr 2, each fragment every 6 steps, in turn every 3."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import diloco

SETTINGS: dict[str, Any] = {
    "mode": "lockstep",
    "offsets": "staggered",
    "sync_every": 6,
    "num_fragments": 2,
    "min_quorum": 2,
    "grace": "none",
    "merge": "mean",
    "weights": "equal",
    "outer_lr": 2.0,
    "wire_dtype": "f32",
    "downlink_dtype": "f32",
}
STEPS = 15


class Scalars(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.tensor(1.0))
        self.second = torch.nn.Parameter(torch.tensor(1.0))


def history(address: str, learner_id: str, model: Scalars) -> list[tuple[float, float, float, float]]:
    """Local values of both fragments after each step, then their anchors."""
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with diloco.DiLoCoOptimizer(inner, model, address, learner_id=learner_id, tokens=lambda: 1) as optimizer:
        for _ in range(STEPS):
            for parameter in model.parameters():
                parameter.grad = torch.tensor(2.0)
            optimizer.step()
            anchors = optimizer.learner.anchor_state_dict()
            values = (model.first, model.second, anchors["first"], anchors["second"])
            seen.append(tuple(value.item() for value in values))
    return seen  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("tau", "adoption", "first", "second", "anchors"),
    [
        (0, {"adopt": "overwrite"}, (-11, -35, -59), (-23, -47), None),
        (0, {"adopt": "blend", "blend_alpha": 0.5}, (-8, -24.5, -40.25), (-17, -32), ((-11, -29), (-23, -35))),
        (1, {"adopt": "overwrite"}, (-7, -27, -47), (-19, -39), None),
    ],
)
def test_the_recorded_history(
    tau: int,
    adoption: dict[str, Any],
    first: tuple[float, ...],
    second: tuple[float, ...],
    anchors: tuple[tuple[float, ...], tuple[float, ...]] | None,
) -> None:
    with diloco.Syncer(**SETTINGS, **adoption, overlap_steps=tau, shutdown_s=0.5) as syncer:
        models = {"a": Scalars(), "b": Scalars()}
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(history, syncer.endpoint, name, model) for name, model in models.items()]
            for run in runs:
                seen = [None, *run.result()]  # seen[i]: after step i
                assert tuple(seen[step][0] for step in (3, 9, 15)) == first
                assert tuple(seen[step][1] for step in (6, 12)) == second
                if anchors:
                    assert tuple(seen[step][2] for step in (3, 9)) == anchors[0]
                    assert tuple(seen[step][3] for step in (6, 12)) == anchors[1]
