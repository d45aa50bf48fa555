"""What a learner saves of itself, and how its next life takes it up.

A resumed learner is a new incarnation: the syncer gives it the global weights. What its last life had trained and not
had merged is put back on top of them, if it is certain that nothing of it is in them or on its way; work that may be
there already is dropped, so that nothing counts twice. docs/concepts.md says what is exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from diloco._errors import describe_tensor, logger, name_list
from diloco.status import status

if TYPE_CHECKING:
    from diloco.learner import Learner

FORMAT = 2
_SETTLE_S = 3.0  # for what the last life had under way to be merged, and to arrive here
_POLL_S = 0.005


class Counters:
    """Of the lives before this one."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        # What the syncer says of this learner's id: tokens summed over fragments, as a status has them.
        self.merged = self.processed = 0


@torch.no_grad()
def save(learner: Learner) -> dict[str, Any]:
    stats, before = learner.stats(), learner._before
    fragments = len(stats["versions"])
    anchors = {}
    for index, parameter in enumerate(learner._parameters):
        anchor, dtype = learner._c.anchor(index, parameter.real), parameter.real.dtype
        short = anchor.to(dtype) if dtype in (torch.bfloat16, torch.float16) else anchor
        anchors[parameter.name] = short if torch.equal(short.float(), anchor) else anchor
    return {
        "format": FORMAT,
        "learner_id": learner.learner_id,
        "steps": stats["total_steps"],
        "tokens": stats["total_tokens"],
        "merged": before.merged + stats["tokens_merged"],
        "processed": before.processed + stats["tokens"] * fragments,
        "closed": stats["state"] == "closed",
        "under_way": stats["sent_image_bytes"] > 0,
        "clock": stats["clock"],
        "versions": [list(version) for version in stats["versions"]],
        "window": _window(list(learner._recent), stats["tokens_outstanding"] // max(fragments, 1)),
        "anchors": anchors,
        "weights": {parameter.name: parameter.tensor.detach() for parameter in learner._parameters},
    }


def _window(recent: list[int], tokens: int) -> list[int]:
    """The token counts of the last steps, as many as it takes to have so many tokens."""
    first = len(recent)
    while first > 0 and tokens > 0:
        first -= 1
        tokens -= recent[first]
    return recent[first:]


def counters_only(steps: int, tokens: int) -> dict[str, Any]:
    """The state of a copy that takes no part in a run."""
    return {"format": FORMAT, "steps": steps, "tokens": tokens}


def check_format(state: Any) -> None:
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"this state_dict has diloco format {found!r}, expected {FORMAT}; "
            "load it with the version of diloco that saved it, or drop its 'diloco' entry"
        )


def check(learner: Learner, state: dict[str, Any]) -> None:
    """ValueError for a state of another format or another model, naming the first difference."""
    check_format(state)
    if "weights" not in state:
        return
    saved = {name: describe_tensor(tensor) for name, tensor in state["weights"].items()}
    ours = {parameter.name: describe_tensor(parameter.tensor) for parameter in learner._parameters}
    for name in [*ours, *saved]:
        if saved.get(name) != ours.get(name):
            raise ValueError(
                f"this state_dict is of another model: parameter '{name}' is {saved.get(name, 'not there')} in it and "
                f"{ours.get(name, 'not there')} here; load it into the model it was saved from"
            )


def load(learner: Learner, state: dict[str, Any]) -> None:
    check(learner, state)
    stats = learner.stats()
    replayed: list[int] = []
    if "weights" not in state:
        pass
    elif stats["state"] == "training" and stats["versions"] and all(epoch > 0 for epoch, _ in stats["versions"]):
        replayed = _take_up(learner, state, stats)
    else:
        logger.warning(
            "[%s] loaded without a syncer (%s): work that was not merged when the state was saved cannot be put on top "
            "of global weights now; training goes on from the weights the model has",
            learner.learner_id,
            stats["state"],
        )
    for tokens in replayed:
        learner._carried = learner._step(tokens, 0.0).reset
    now = learner._c.stats()
    learner._before.steps = int(state["steps"]) - now["steps"]
    learner._before.tokens = int(state["tokens"]) - now["tokens"]


def _take_up(learner: Learner, state: dict[str, Any], stats: dict[str, Any]) -> list[int]:
    """Puts unmerged work back. Returns the token counts of the steps that count again."""
    seen, certain = _settle(learner, state)
    stats = learner.stats()
    known = _account(seen, learner, state)
    merged, processed = known or (0, 0)
    learner._before.merged = merged - stats["tokens_merged"]
    learner._before.processed = processed - stats["tokens"] * len(stats["versions"])
    if _is_another_run(state, stats, known):
        if not _starts_from(learner, state):
            _roll_back(learner, state, stats)
        return []
    nothing_merged = known is not None and known[0] == state["merged"]
    dropped = _put_back(learner, state, certain=certain, nothing_merged=nothing_merged)
    window = [int(tokens) for tokens in state["window"]]
    if seen.get("mode") == "lockstep":  # the clock says which step comes next
        steps = max(0, int(state["clock"]) - int(stats["clock"]))
    else:  # the work counts with the steps it took
        steps = 0 if dropped else len(window)
    if dropped:
        logger.warning(
            "[%s] resumed: the work that was not merged when the state was saved is dropped for %d of %d tensors (%s): "
            "it has been merged since, or may be",
            learner.learner_id,
            len(dropped),
            len(learner._parameters),
            name_list(dropped),
        )
        return [0] * steps
    again = ([0] * steps + window)[-steps:] if steps else []
    logger.info(
        "[%s] resumed: the work of the last %d steps (%d tokens), not merged when the state was saved, is on top of "
        "the global weights and counts again in this life",
        learner.learner_id,
        len(again),
        sum(again),
    )
    return again


def _settle(learner: Learner, state: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The syncer's status, and whether it is certain that nothing of the last life is on its way into the weights:
    that life sent nothing, or the syncer holds no contribution and all its versions have arrived here.
    """
    deadline = time.monotonic() + _SETTLE_S
    seen: dict[str, Any] = {}
    while True:
        try:
            seen = status(learner._syncer, _SETTLE_S)
        except ConnectionError:
            return seen, False
        if _sent_nothing_since(seen, _account(seen, learner, state), state):
            return seen, True
        wanted = [tuple(fragment["version"]) for fragment in seen["fragments"]]
        while _older(learner._c.stats()["versions"], wanted) and time.monotonic() < deadline:
            learner._c.join(_POLL_S, learner._write_log)
            time.sleep(_POLL_S)
        if seen["ledger"]["in_flight"] == 0 and not _older(learner._c.stats()["versions"], wanted):
            return seen, True
        if time.monotonic() >= deadline:
            return seen, False
        time.sleep(_POLL_S)


def _sent_nothing_since(seen: dict[str, Any], known: tuple[int, int] | None, state: dict[str, Any]) -> bool:
    """That the last life made no step after the save is not enough where copies lie ready to be sent at any time."""
    settings = seen["settings"]
    on_demand = settings["mode"] != "lockstep" or settings["overlap_steps"] != "0"
    if state["under_way"] or (on_demand and not state["closed"]):
        return False
    return known is not None and known[1] == state["processed"]


def _older(versions: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return any(tuple(have) < tuple(want) for have, want in zip(versions, wanted, strict=True))


def _account(seen: dict[str, Any], learner: Learner, state: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens merged and processed in all lives of this id, as the syncer counts them. None if it does not know it, or
    the state was saved under another one."""
    for row in seen.get("learners", ()):
        if row["id"] == learner.learner_id == state["learner_id"]:
            return row["ledger"]["merged"], row["ledger"]["processed"]
    return None


def _is_another_run(state: dict[str, Any], stats: dict[str, Any], known: tuple[int, int] | None) -> bool:
    """The syncer's weights do not come after those that were saved: it was started anew, or went back."""
    saved, now = state["versions"], stats["versions"]
    if len(saved) != len(now) or any(a[0] != b[0] or a[1] > b[1] for a, b in zip(saved, now, strict=True)):
        return True
    return known is not None and known[0] < state["merged"]


def _starts_from(learner: Learner, state: dict[str, Any]) -> bool:
    """The syncer's weights are the ones that were saved: a whole run starts again with this learner."""
    return all(
        torch.equal(learner._c.anchor(index, parameter.real).to(parameter.real), parameter.real)
        and torch.equal(state["weights"][parameter.name].to(parameter.tensor), parameter.tensor)
        for index, parameter in enumerate(learner._parameters)
    )


def _both_versions(state: dict[str, Any], stats: dict[str, Any]) -> str:
    def newest(versions: Sequence[Any]) -> str:
        return "none" if not versions else "epoch {}, version {}".format(*max(tuple(v) for v in versions))

    return (
        f"the state was saved at {newest(state['versions'])} and the syncer is at {newest(stats['versions'])}, which "
        "does not come after it: the syncer was started anew, or went back"
    )


@torch.no_grad()
def _roll_back(learner: Learner, state: dict[str, Any], stats: dict[str, Any]) -> None:
    """To the syncer's weights."""
    for index, parameter in enumerate(learner._parameters):
        now = learner._c.anchor(index, parameter.real)
        if stats["steps"] == 0 and not torch.equal(now.to(parameter.real), parameter.real):
            raise ValueError(
                f"{_both_versions(state, stats)}. The model was loaded after this learner had joined, so its weights "
                "would count as work on weights they do not belong to; load the model first, then wrap the optimizer "
                "(or make the Learner), then load its state"
            )
        parameter.real.copy_(now)
    logger.warning(
        "[%s] %s; this learner starts from the syncer's weights, work that was not merged then is dropped",
        learner.learner_id,
        _both_versions(state, stats),
    )


@torch.no_grad()
def _put_back(learner: Learner, state: dict[str, Any], *, certain: bool, nothing_merged: bool) -> list[str]:
    """Global weights plus what was not merged. Returns the tensors whose work is dropped."""
    dropped = []
    for index, parameter in enumerate(learner._parameters):
        now = learner._c.anchor(index, parameter.real)  # on the CPU, f32
        anchor, local = state["anchors"][parameter.name].to(now), state["weights"][parameter.name].cpu()
        local = torch.view_as_real(local) if local.is_complex() else local
        if certain and torch.equal(now, anchor):
            value = local  # to the bit
        elif certain and nothing_merged:
            value = now + (local - anchor)
        else:
            value = now
            if not torch.equal(local, anchor.to(local.dtype)):
                dropped.append(parameter.name)
        parameter.real.copy_(value)
    return dropped
