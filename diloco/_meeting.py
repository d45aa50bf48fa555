"""Process groups that ranks make for themselves, on the CPU: their collectives mix with nobody else's, and only members
make them. torch's new_group() wants every process of the job, or the same number of groups known to each member.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from diloco._errors import logger

_POLL_S = 0.005
_PATIENCE_S = 10.0  # then it is said who is missing


class Meeting:
    """The ranks of `group`, met in the job's store, each in this call and no earlier one. Collective. RuntimeError if
    one does not come in the group's timeout."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = _timeout_of(group)
        members = dist.get_process_group_ranks(group)
        self._store = PrefixStore("diloco/" + "_".join(map(str, members)), _job_store())
        name = self._call() if self.rank == 0 else self._answer()
        self._store = PrefixStore(name, self._store)

    def _call(self) -> str:
        name = uuid.uuid4().hex
        self._store.set("call", name)
        answers = {}
        patience = self._patience()
        for rank in range(1, self.size):
            while not self._store.check([f"{name}/{rank}"]):
                patience.wait(rank)
            answers[str(rank)] = self._store.get(f"{name}/{rank}").decode()
        self._store.set(f"{name}/go", json.dumps(answers))
        return name

    def _answer(self) -> str:
        """What lies in the store may be of an earlier call: the leader repeats in its own what it was answered."""
        mine, patience = uuid.uuid4().hex, self._patience()
        while True:
            name = self._store.get("call").decode() if self._store.check(["call"]) else ""
            if name:
                self._store.set(f"{name}/{self.rank}", mine)
            if name and self._store.check([f"{name}/go"]):
                answers = json.loads(self._store.get(f"{name}/go"))
                if answers.get(str(self.rank)) == mine:
                    return name
            patience.wait(0)

    def _patience(self) -> _Patience:
        return _Patience(self._timeout.total_seconds())

    def group(self, name: str, members: Sequence[int]) -> ProcessGroup:
        """Of those of the ranks, which alone call this, with the timeout of the group they met for."""
        store, rank = PrefixStore(name, self._store), list(members).index(self.rank)
        made = ProcessGroup(store, rank, len(members))
        backend = dist.ProcessGroupGloo(store, rank, len(members), self._timeout)
        backend._set_sequence_number_for_group()
        made._set_default_backend(ProcessGroup.BackendType.GLOO)
        made._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        return made


class _Patience:
    def __init__(self, timeout_s: float) -> None:
        self._begun, self._timeout_s, self._said = time.monotonic(), timeout_s, False

    def wait(self, rank: int) -> None:
        """A moment; RuntimeError if it has been too long."""
        waited = time.monotonic() - self._begun
        if waited >= self._timeout_s:
            raise RuntimeError(f"rank {rank} was not there after {self._timeout_s:g} s")
        if waited >= _PATIENCE_S and not self._said:
            self._said = True
            logger.warning("waiting for rank %d to make its learner too, for %g s at most", rank, self._timeout_s)
        time.sleep(_POLL_S)


def gather(group: ProcessGroup, value: Any) -> list[Any]:
    """Every rank's value, by rank: what JSON can say, in which there is no code. Tuples arrive as lists. Collective;
    RuntimeError if a rank is gone."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in _all_gather(group, torch.tensor([len(data)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = _all_gather(group, padded)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _all_gather(group: ProcessGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([rows], [tensor]).wait()
    return rows


def _job_store() -> Store:
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _timeout_of(group: ProcessGroup) -> timedelta:
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return dist.default_pg_timeout
