"""How a learner's next life takes up what its last one saved (_saved.py).

A resumed learner is a new incarnation: the syncer gives it the global weights. What its last life had trained and not
had merged is put back on top of them, if it is certain that nothing of it is in them or on its way; work that may be
there already is dropped, so that nothing counts twice. docs/concepts.md says what is exact.

In an island the leader decides, and all ranks do it together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from diloco._errors import logger, name_list
from diloco._saved import check, part_of
from diloco.status import status

if TYPE_CHECKING:
    from diloco.learner import Learner

_SETTLE_S = 3.0  # for what the last life had under way to be merged, and to arrive here
_POLL_S = 0.005


def load(learner: Learner, state: dict[str, Any]) -> None:
    check(learner, state)
    stats = learner._of_leader(learner._c.stats)
    own = ("anchors", "weights", "collective")  # each rank's: tensors. All else is what rank 0 has loaded
    state = state | learner._of_leader(lambda: {k: v for k, v in state.items() if k not in own})
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
        learner._carried = learner._step(tokens if learner.rank == 0 else 0, 0.0).reset
    uncounted = learner._c.tokens_under_way(learner._write_log)
    now = learner._c.stats()
    learner._before.steps = int(state["steps"]) - now["steps"]
    learner._before.tokens = int(state["tokens"]) - now["tokens"] - uncounted


def _take_up(learner: Learner, state: dict[str, Any], stats: dict[str, Any]) -> list[int]:
    """Puts unmerged work back. Returns the token counts of the steps that count again."""
    seen, certain = _settle(learner, state)
    stats = learner._of_leader(learner._c.stats)
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
    settling = _Settling(learner, state)
    while (found := learner._of_leader(settling.look)) is None:
        learner._c.join(_POLL_S, learner._write_log)
        time.sleep(_POLL_S)
    return found


class _Settling:
    def __init__(self, learner: Learner, state: dict[str, Any]) -> None:
        self._learner, self._state = learner, state
        self._deadline = time.monotonic() + _SETTLE_S
        self._seen: dict[str, Any] = {}

    def look(self) -> tuple[dict[str, Any], bool] | None:
        """None: not known yet."""
        if not self._seen or not self._behind():
            try:
                self._seen = status(self._learner._syncer, _SETTLE_S)
            except ConnectionError:
                return self._seen, False
            known = _account(self._seen, self._learner, self._state)
            if _sent_nothing_since(self._seen, known, self._state):
                return self._seen, True
        if not self._behind() and self._seen["ledger"]["in_flight"] == 0:
            return self._seen, True
        return (self._seen, False) if time.monotonic() >= self._deadline else None

    def _behind(self) -> bool:
        wanted = [tuple(fragment["version"]) for fragment in self._seen["fragments"]]
        return _older(self._learner._c.stats()["versions"], wanted)


def _sent_nothing_since(seen: dict[str, Any], known: tuple[int, int] | None, state: dict[str, Any]) -> bool:
    """That the last life made no step after the save is not enough where copies lie ready to be sent at any time."""
    settings = seen["settings"]
    on_demand = settings["mode"] != "lockstep" or settings["overlap_steps"] != "0"
    if state["under_way"] or (on_demand and not state["closed"]):
        return False
    return known is not None and known[1] == state["processed"]


def _older(versions: Sequence[Any], wanted: Sequence[Any]) -> bool:
    # A run that has grown has fragments that a learner may not have.
    return any(tuple(have) < tuple(want) for have, want in zip(versions, wanted, strict=False))


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
    here = all(
        torch.equal(learner._c.anchor(index, parameter.real).to(parameter.real), parameter.real)
        and torch.equal(part_of(state["weights"][parameter.name], parameter).to(parameter.real), parameter.real)
        for index, parameter in enumerate(learner._parameters)
    )
    return learner._on_all_ranks([here])[0]


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
    anchors = [learner._c.anchor(index, parameter.real) for index, parameter in enumerate(learner._parameters)]
    untouched = all(
        torch.equal(anchor.to(parameter.real), parameter.real)
        for anchor, parameter in zip(anchors, learner._parameters, strict=True)
    )
    if not learner._on_all_ranks([untouched])[0] and stats["steps"] == 0:
        raise ValueError(
            f"{_both_versions(state, stats)}. The model was loaded after this learner had joined, so its weights "
            "would count as work on weights they do not belong to; load the model first, then wrap the optimizer "
            "(or make the Learner), then load its state"
        )
    for anchor, parameter in zip(anchors, learner._parameters, strict=True):
        parameter.real.copy_(anchor)
    logger.warning(
        "[%s] %s; this learner starts from the syncer's weights, work that was not merged then is dropped",
        learner.learner_id,
        _both_versions(state, stats),
    )


@torch.no_grad()
def _put_back(learner: Learner, state: dict[str, Any], *, certain: bool, nothing_merged: bool) -> list[str]:
    """Global weights plus what was not merged. Returns the tensors whose work is dropped."""
    now = [learner._c.anchor(index, parameter.real) for index, parameter in enumerate(learner._parameters)]  # CPU, f32
    anchors = [
        part_of(state["anchors"][parameter.name], parameter).to(torch.float32) for parameter in learner._parameters
    ]
    weights = [part_of(state["weights"][parameter.name], parameter) for parameter in learner._parameters]
    still = learner._on_all_ranks([torch.equal(a, b) for a, b in zip(now, anchors, strict=True)])
    idle = learner._on_all_ranks([torch.equal(a.to(b), b) for a, b in zip(anchors, weights, strict=True)])
    dropped = []
    own = set(learner._c.beyond_run())  # nobody merges them
    for index, parameter in enumerate(learner._parameters):
        if index in own or (certain and still[index]):
            value = weights[index]  # to the bit
        elif certain and nothing_merged:
            value = now[index] + (weights[index] - anchors[index])
        else:
            value = now[index]
            if not idle[index]:
                dropped.append(parameter.name)
        parameter.real.copy_(value)
    return dropped
