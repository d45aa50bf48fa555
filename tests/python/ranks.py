"""Ranks of one job as threads of one process: Gloo groups over a store in memory, and an optimizer on each rank."""

from __future__ import annotations

import datetime
import threading
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


class RecordedWork(distributed._Work):
    """Done when it is handed out, like work queued on a stream; a host-side wait is written down."""

    def __init__(self, record: list[Any]) -> None:
        super().__init__()
        self._record = record

    def wait(self, *_: Any) -> bool:
        self._record.append("host wait")
        return True


class Room:
    """Where the ranks' n-th calls meet."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.inputs: list[torch.Tensor] = [torch.empty(0)] * ranks


class RecordingGroup(distributed.ProcessGroup):
    """A group of threads. `record` has, in order, (call, device type, dtype, numel) and "host wait"."""

    def __init__(self, room: Room, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.room, self.me, self.record = room, rank, []  # type: ignore[var-annotated]

    def _meet(self, call: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.record.append((call, tensor.device.type, tensor.dtype, tensor.numel()))
        self.room.barrier.wait()
        self.room.inputs[self.me] = tensor.clone()
        self.room.barrier.wait()
        return list(self.room.inputs)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> RecordedWork:
        for row, found in zip(outputs[0], self._meet("all_gather", inputs[0]), strict=True):
            row.copy_(found)
        return RecordedWork(self.record)

    def broadcast(self, tensors: Any, options: Any = None) -> RecordedWork:
        tensors[0].copy_(self._meet("broadcast", tensors[0])[options.rootRank])
        return RecordedWork(self.record)


def recording_groups(ranks: int) -> list[Groups]:
    room = Room(ranks)
    controls = gloo_groups(ranks)
    return [Groups(RecordingGroup(room, rank, ranks), controls[rank].control) for rank in range(ranks)]


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
        def connect(model: Any, parameters: Any) -> diloco.CollectiveLearner:
            learner = diloco.CollectiveLearner.__new__(diloco.CollectiveLearner)
            texts = config.setting_texts(settings, "a test", ())
            learner._connect(model, parameters, groups.data, groups.control, on_device, texts)
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
