"""Ranks of one job as threads of one process: Gloo groups over a store in memory, and an optimizer on each rank."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed, nn

import diloco
from diloco import config

T = TypeVar("T")
TIMEOUT_S = 20.0


class Groups(NamedTuple):
    data: distributed.ProcessGroup
    control: distributed.ProcessGroup


def on_all(ranks: int, work: Callable[[int], T]) -> list[T]:
    """work(rank) on a thread each; the results, or the first error once all have ended."""
    with ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(work, rank) for rank in range(ranks)]]


def errors_of_all(ranks: int, work: Callable[[int], object]) -> list[BaseException | None]:
    """What each rank raised."""
    with ThreadPoolExecutor(ranks) as pool:
        return [future.exception() for future in [pool.submit(work, rank) for rank in range(ranks)]]


def gloo_groups(ranks: int, timeout_s: float = TIMEOUT_S) -> list[Groups]:
    """For each rank a group for the numbers and one for agreeing, as torch makes them for a job."""
    store = distributed.HashStore()

    def make(rank: int) -> Groups:
        made = []
        for name in ("data", "control"):
            prefixed = distributed.PrefixStore(name, store)
            limit = datetime.timedelta(seconds=timeout_s)
            backend = distributed.ProcessGroupGloo(prefixed, rank, ranks, limit)
            group = distributed.ProcessGroup(prefixed, rank, ranks)
            group._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, backend)
            made.append(group)
        return Groups(*made)

    return on_all(ranks, make)


class RankOptimizer(diloco.CollectiveDiLoCoOptimizer):
    """CollectiveDiLoCoOptimizer over given groups, which the job of this process knows nothing of."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        groups: Groups,
        *,
        on_device: bool = False,
        tokens: Callable[[], int] | None = None,
        **settings: Any,
    ) -> None:
        def connect(parameters: Any) -> diloco.CollectiveLearner:
            learner = diloco.CollectiveLearner.__new__(diloco.CollectiveLearner)
            texts = config.setting_texts(settings, "a test", ())
            learner._connect(parameters, groups.data, groups.control, on_device, texts)
            return learner

        self._wrap(optimizer, model, tokens, connect)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def wrap_all(
    models: list[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **options: Any
) -> list[Any]:
    """A RankOptimizer over each model, one rank each."""
    groups = gloo_groups(len(models))
    return on_all(len(models), lambda rank: RankOptimizer(make(models[rank]), models[rank], groups[rank], **options))
