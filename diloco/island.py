"""Islands: several processes that train one copy of a model together and are one learner. Each holds some of the
elements of every parameter; ranks that hold the same are replicas, and the first of them exchanges for the others.

  DDP                       everything on every rank: rank 0 exchanges
  FSDP2, tensor parallel    DTensors with shards: every rank exchanges its own
  HSDP                      the first replica of every shard exchanges
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from diloco._errors import describe_tensor
from diloco._meeting import Meeting, gather
from diloco._native import _C
from diloco._process_groups import Group, group_of
from diloco._sharded import is_sharded, local
from diloco.parameters import Parameter

# A group of ranks; None: the default group, if there is one; False: this process alone.
Ranks: TypeAlias = Group | Literal[False] | None
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of what a rank holds


@dataclass(frozen=True)
class Island:
    """What this process is in its island."""

    rank: int
    ranks: int
    native: _C.Island
    learner_id: str  # rank 0's
    talk: ProcessGroup  # for what is said in Python, between two steps

    def from_leader(self, value: Any) -> Any:
        """Rank 0's value, on all ranks, as gather() gives it. Collective."""
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on all ranks: what JSON can say, tuples as lists. Collective."""
        with _all_come("save and load its state"):
            return gather(self.talk, value)


@contextmanager
def _all_come(what: str) -> Iterator[None]:
    """ConnectionError in place of what torch says when a rank has ended, or does not come in the group's timeout."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        raise ConnectionError(
            f"a rank of this island has ended, or did not come within the process group's timeout ({reason}). Expected "
            f"all ranks to {what} together; end all of them and start again"
        ) from error


def _group(ranks: Ranks) -> ProcessGroup | None:
    """None if this process is a learner by itself."""
    if ranks is False or (ranks is None and not dist.is_initialized()):
        return None
    group = group_of("island", ranks, "None or False")
    return group if dist.get_world_size(group) > 1 else None


def make_island(ranks: Ranks, parameters: list[Parameter], learner_id: str, settings: dict[str, str]) -> Island | None:
    """Collective over the island's ranks. ValueError on all of them, naming the first difference, if they disagree on
    the model or the settings, or if a parameter cannot be taken apart; ConnectionError if they do not all come."""
    group = _group(ranks)
    if group is None:
        for parameter in parameters:
            if is_sharded(parameter.tensor) and parameter.tensor.device_mesh.size() > 1:  # type: ignore[attr-defined]
                raise ValueError(
                    f"parameter '{parameter.name}' is a DTensor; expected torch.distributed with all its ranks. Start "
                    "the script under torchrun, and do not pass island=False"
                )
        return None
    with _all_come("make their learner"):
        return _agree(group, parameters, learner_id, settings)


def _agree(group: ProcessGroup, parameters: list[Parameter], learner_id: str, settings: dict[str, str]) -> Island:
    meeting = Meeting(group)
    rank, size = meeting.rank, meeting.size
    plan, talk = meeting.group("plan", range(size)), meeting.group("talk", range(size))
    fault: str | None = None
    boxes: list[Box] = []
    try:
        boxes = [box_of(parameter) for parameter in parameters]
    except ValueError as error:
        fault = str(error)  # told to all, or they would wait for this rank
    shapes = [list(parameter.tensor.shape) for parameter in parameters]
    tensors = [[parameter.name, describe_tensor(parameter.tensor)] for parameter in parameters]
    mine = _Description(fault, tensors, settings, tuple(boxes), learner_id)
    everybody = [_Description.of(sent) for sent in gather(talk, asdict(mine))]
    _check_agreement(everybody)

    kinds = list(dict.fromkeys(each.boxes for each in everybody))  # in rank order
    part_of = [kinds.index(each.boxes) for each in everybody]
    part = part_of[rank]
    replicas = [r for r in range(size) if part_of[r] == part]
    native = _C.Island(
        plan=plan,
        replicas=meeting.group(f"part {part}", replicas) if len(replicas) > 1 else None,
        any_replicas=len(kinds) < size,
        part=part,
        parts=len(kinds),
        replica=part_of.index(part) != rank,
        shapes=shapes,
        held=[(list(offset), list(shape)) for offset, shape in boxes] if len(kinds) > 1 else [],
    )
    return Island(rank, size, native, everybody[0].learner_id, talk)


@dataclass(frozen=True)
class _Description:
    """What a rank tells the others of itself."""

    fault: str | None
    tensors: list[list[str]]  # name, dtype and shape
    settings: dict[str, str]
    boxes: tuple[Box, ...]
    learner_id: str

    @classmethod
    def of(cls, sent: dict[str, Any]) -> _Description:
        """JSON has no tuples."""
        return cls(**sent | {"boxes": tuple((tuple(offset), tuple(shape)) for offset, shape in sent["boxes"])})


def box_of(parameter: Parameter) -> Box:
    """Offset and shape of what this process holds of a parameter."""
    tensor = parameter.tensor
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Replicate

    placements = tensor.placements  # type: ignore[attr-defined]
    for placement in placements:
        if not isinstance(placement, Shard | Replicate) and type(placement).__name__ != "_StridedShard":
            raise ValueError(
                f"parameter '{parameter.name}' has the placement {placement!r}; expected Shard or Replicate on every "
                "mesh dimension. Redistribute it before wrapping the optimizer"
            )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        placements,
    )
    held = tuple(local(tensor).shape)
    if held != tuple(shape):
        raise ValueError(
            f"parameter '{parameter.name}': this rank holds {held}, its placements {tuple(placements)} say "
            f"{tuple(shape)}"
        )
    if 0 in held:  # where an empty shard lies means nothing
        return (0,) * len(held), held
    return tuple(offset), held


def _check_agreement(everybody: list[_Description]) -> None:
    first = everybody[0]
    for rank, other in enumerate(everybody):
        if other.fault is not None:
            raise ValueError(f"rank {rank}: {other.fault}")
    for rank, other in enumerate(everybody):
        if other.settings != first.settings:
            names = sorted(first.settings.keys() | other.settings.keys())
            name = next(n for n in names if first.settings.get(n) != other.settings.get(n))
            raise ValueError(
                f"the ranks of this island disagree on setting '{name}': rank 0 has "
                f"{first.settings.get(name, 'none')}, rank {rank} has {other.settings.get(name, 'none')}; give all "
                "ranks the same"
            )
        if other.tensors == first.tensors:
            continue
        for mine, theirs in zip(first.tensors, other.tensors, strict=False):
            if mine != theirs:
                raise ValueError(
                    f"the ranks of this island disagree on the model: rank 0 has '{mine[0]}' ({mine[1]}) where "
                    f"rank {rank} has '{theirs[0]}' ({theirs[1]}); build the same model on all ranks"
                )
        raise ValueError(
            f"the ranks of this island disagree on the model: rank 0 synchronises {len(first.tensors)} parameters, "
            f"rank {rank} {len(other.tensors)}; build the same model on all ranks"
        )
