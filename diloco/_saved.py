"""What a learner saves of itself, and whether a state fits the learner that loads it (_resume.py).

The account (counters, versions, windows) is the leader's. Tensors are each rank's: plain ones whole, DTensors its part;
so a state says which rank saved it. One that all ranks saved together says none and is the same on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco._errors import describe_tensor
from diloco._sharded import is_sharded, like, local, whole
from diloco.island import box_of
from diloco.parameters import Parameter

if TYPE_CHECKING:
    from diloco.learner import Learner

FORMAT = 2
_TENSORS = ("anchors", "weights")


class Counters:
    """Of the lives before this one."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        # What the syncer says of this learner's id: tokens summed over fragments, as a status has them.
        self.merged = self.processed = 0


# ---- saving ----


def save(learner: Learner) -> dict[str, Any]:
    """This rank's."""
    account = _account(learner) if learner.rank == 0 else _counters(learner)
    own = {"format": FORMAT, "rank": learner.rank, "ranks": learner.ranks}
    return own | account | {"anchors": _anchors(learner, short=True), "weights": _weights(learner)}


def save_together(learner: Learner, pending_tokens: int, *, full: bool) -> dict[str, Any]:
    """The same on all ranks, which call this together; `full`: with whole tensors on the CPU. Tensors are copies."""
    account = learner._of_leader(lambda: _account(learner))
    pending = sum(learner._island.gather(pending_tokens)) if learner._island else pending_tokens
    own = {"format": FORMAT, "rank": None, "ranks": learner.ranks, "pending_tokens": pending}
    tensors = {"anchors": _anchors(learner, short=False), "weights": _weights(learner)}
    for group in tensors.values():
        for name, tensor in group.items():
            group[name] = whole(tensor) if full else tensor.clone()
    return own | account | tensors


def counters_only(steps: int, tokens: int) -> dict[str, Any]:
    """The state of a copy that takes no part in a run."""
    return {"format": FORMAT, "steps": steps, "tokens": tokens}


def _counters(learner: Learner) -> dict[str, Any]:
    stats = learner._c.stats()
    uncounted = learner._c.tokens_under_way(learner._write_log)
    return {
        "learner_id": learner.learner_id,
        "steps": stats["steps"] + learner._before.steps,
        "tokens": stats["tokens"] + uncounted + learner._before.tokens,
    }


def _account(learner: Learner) -> dict[str, Any]:
    uncounted = learner._c.tokens_under_way(learner._write_log)
    stats, before = learner._c.stats(), learner._before
    fragments = len(stats["versions"])
    recent = [*learner._recent, uncounted] if uncounted else list(learner._recent)
    return _counters(learner) | {
        "merged": before.merged + stats["tokens_merged"],
        "processed": before.processed + (stats["tokens"] + uncounted) * fragments,
        "closed": stats["state"] == "closed",
        "under_way": stats["sent_image_bytes"] > 0,
        "clock": stats["clock"],
        "versions": [list(version) for version in stats["versions"]],
        "window": _window(recent, stats["tokens_outstanding"] // max(fragments, 1) + uncounted),
    }


def _window(recent: list[int], tokens: int) -> list[int]:
    """The token counts of the last steps, as many as it takes to have so many tokens."""
    first = len(recent)
    while first > 0 and tokens > 0:
        first -= 1
        tokens -= recent[first]
    return recent[first:]


@torch.no_grad()
def _anchors(learner: Learner, *, short: bool) -> dict[str, Tensor]:
    """`short`: in the parameter's own dtype where that loses nothing; a DTensor has one dtype on all ranks."""
    out = {}
    for index, parameter in enumerate(learner._parameters):
        anchor, dtype = learner._c.anchor(index, parameter.real), parameter.real.dtype
        if short and dtype in (torch.bfloat16, torch.float16) and not is_sharded(parameter.tensor):
            own = anchor.to(dtype)
            anchor = own if torch.equal(own.float(), anchor) else anchor
        out[parameter.name] = like(
            torch.view_as_complex(anchor) if parameter.tensor.is_complex() else anchor, parameter.tensor
        )
    return out


def _weights(learner: Learner) -> dict[str, Tensor]:
    return {parameter.name: parameter.tensor.detach() for parameter in learner._parameters}


# ---- loading ----


def check_format(state: Any) -> None:
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"this state_dict has diloco format {found!r}, expected {FORMAT}; "
            "load it with the version of diloco that saved it, or drop its 'diloco' entry"
        )


def check(learner: Learner, state: dict[str, Any] | None) -> None:
    """ValueError for a state of another format, another model or another rank, naming the first difference; in an
    island, whose ranks call this together, on all of them. None: there is none, which must be so on all ranks."""
    fault = ""
    try:
        if state is not None:
            _check_own(learner, state)
    except ValueError as error:
        if learner._island is None:
            raise
        fault = str(error)
    if learner._island is None:
        return
    seen = learner._island.gather((fault, state is not None, state is not None and "weights" in state))
    for rank, (text, _, _) in enumerate(seen):
        if text:
            raise ValueError(f"rank {rank}: {text}")
    for rank, (_, *kind) in enumerate(seen):
        if kind != [*seen[0][1:]]:
            words = ("no 'diloco' entry", "one without weights", "one with weights")
            raise ValueError(
                f"the ranks of this island load different states: rank 0 {words[sum(seen[0][1:])]}, rank {rank} "
                f"{words[sum(kind)]}; load what was saved together on all ranks"
            )


def _check_own(learner: Learner, state: dict[str, Any]) -> None:
    check_format(state)
    if "weights" not in state:
        return
    saver = state.get("rank", 0)
    if learner.rank == 0 and "window" not in state:
        raise ValueError(
            f"this is what rank {saver} of {state['ranks']} saved, and only rank 0 has the account; load rank 0's "
            "state on rank 0"
        )
    saved = {name: describe_tensor(tensor) for name, tensor in state["weights"].items()}
    ours = {parameter.name: describe_tensor(parameter.tensor) for parameter in learner._parameters}
    for name in [*ours, *saved]:
        if saved.get(name) != ours.get(name):
            raise ValueError(
                f"this state_dict is of another model: parameter '{name}' is {saved.get(name, 'not there')} in it and "
                f"{ours.get(name, 'not there')} here; load it into the model it was saved from"
            )
    for parameter in learner._parameters:
        for kind in _TENSORS:
            _check_part(learner, parameter, state[kind][parameter.name], saver, int(state.get("ranks", 1)))


def _check_part(learner: Learner, parameter: Parameter, saved: Tensor, saver: int | None, savers: int) -> None:
    """Of a DTensor every rank has its own part, which no other one can use."""
    if not is_sharded(saved):
        return
    here, place = parameter.tensor, f"parameter '{parameter.name}'"
    advice = "save with torch.distributed.checkpoint, or outer_state(full=True), which load at any world size"
    if saver is not None and (saver, savers) != (learner.rank, learner.ranks):
        raise ValueError(
            f"this is what rank {saver} of {savers} saved: its own parts of DTensors ({place}). Expected those of rank "
            f"{learner.rank} of {learner.ranks}; {advice}"
        )
    if not is_sharded(here) or local(here).shape != local(saved).shape or here.placements != saved.placements:  # type: ignore[attr-defined]
        raise ValueError(f"{place} was saved as a DTensor that is laid out otherwise than here; {advice}")


def part_of(saved: Tensor, parameter: Parameter) -> Tensor:
    """What this process holds of a saved tensor, on the CPU, complex numbers as their real view."""
    if is_sharded(saved):
        saved = local(saved)
    elif is_sharded(parameter.tensor):
        for dimension, (start, length) in enumerate(zip(*box_of(parameter), strict=True)):
            saved = saved.narrow(dimension, start, length)
    saved = saved.cpu()
    return torch.view_as_real(saved) if saved.is_complex() else saved
