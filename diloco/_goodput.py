"""Where a learner's wall time went: parts that do not overlap and add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lost_share(stats: Mapping[str, Any]) -> float:
    """The part of a learner's tokens that was discarded, 0 to 1. A token counts once on each fragment that was in the
    model; `in_flight` is not a discard: the syncer can still merge it."""
    processed = stats["tokens"] * len(stats["versions"]) - stats.get(
        "tokens_absent", 0
    )  # a model that cannot grow has none
    discarded = sum(tokens for reason, tokens in stats["discarded"].items() if reason != "in_flight")
    return min(1.0, discarded / processed) if processed else 0.0


def goodput(
    wall_s: float, catching_up_s: float, boundaries_s: float, hold_s: float, closing_s: float, lost: float
) -> dict[str, float]:
    """The terms, in seconds of the training thread; each moment is in exactly one of them.

    wall_s         from the making of the learner to now, or to the end of close(): the sum of all others
    compute_s      the script's own time, outside this package: data, forward, backward, the inner step, evaluation,
                   checkpoints. Less lost_s
    lost_s         of that time, the share whose tokens were discarded: time is taken as spread evenly over tokens
    staging_s      in step boundaries: copies for the wire, adoption, the account
    waiting_s      in lockstep's hold, for other ranks of an island, and in close() until what was sent has arrived
    catching_up_s  in the constructor: copying the first anchors, waiting for the global weights, taking them over.
                   Who was cut off and is back catches up between its steps, without waiting: that is staging
    """
    own_s = wall_s - catching_up_s - boundaries_s - closing_s
    return {
        "wall_s": wall_s,
        "compute_s": own_s * (1.0 - lost),
        "lost_s": own_s * lost,
        "staging_s": boundaries_s - hold_s,
        "waiting_s": hold_s + closing_s,
        "catching_up_s": catching_up_s,
    }


def describe(terms: Mapping[str, float]) -> str:
    """For the log: `12.3 s: 97.1 % compute, 0.0 % lost, 0.3 % staging, 0.5 % waiting, 2.1 % catching up`."""
    wall_s = terms["wall_s"]
    shares = (
        f"{100 * value / wall_s:.1f} % {name.removesuffix('_s').replace('_', ' ')}"
        for name, value in terms.items()
        if name != "wall_s"
    )
    return f"{wall_s:.1f} s: {', '.join(shares)}"
