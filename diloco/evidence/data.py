"""The experiments' text: Markov chains of order two over a small alphabet, made up from a seed; nothing is downloaded.

A topic is one chain. All topics share most of their rules and differ in the rest, so a window has to be read to know
which topic it is from. Held-out windows come from all topics alike. A learner's share is iid (every topic alike) or not
(mostly topics of its own).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

VOCABULARY = 32
TOPICS = 8
CONTEXT = 32  # symbols of a window before its last
BATCH = 4
SUCCESSORS = 4  # symbols that may follow a pair
SHARED = 0.6  # share of the pairs that have the same successors in every topic
STRIPS, STRIP = 64, 1024  # a topic's text: so many independent chains of this length
OWN = 0.8  # non-iid: share of a learner's windows that come from its own topics
HELD_OUT = 256  # windows


@dataclass(frozen=True)
class Text:
    train: Tensor  # (TOPICS, STRIPS, STRIP)
    held_out: Tensor  # (HELD_OUT, CONTEXT + 1)


def _chains(rules: np.ndarray, odds: np.ndarray, count: int, length: int, random: np.random.Generator) -> np.ndarray:
    out = np.zeros((count, length), dtype=np.int64)
    out[:, 0] = random.integers(VOCABULARY, size=count)
    out[:, 1] = random.integers(VOCABULARY, size=count)
    edges = odds.cumsum()
    for t in range(2, length):
        choice = np.searchsorted(edges, random.random(count) * edges[-1], side="right")
        out[:, t] = rules[out[:, t - 2], out[:, t - 1], np.minimum(choice, SUCCESSORS - 1)]
    return out


@lru_cache(maxsize=4)
def text(seed: int) -> Text:
    """The same for every run with this seed."""
    random = np.random.default_rng(seed)
    shape = (VOCABULARY, VOCABULARY, SUCCESSORS)
    # The next symbol mostly depends on the last one; the one before it decides between four sets of successors.
    common = random.integers(VOCABULARY, size=(4, VOCABULARY, SUCCESSORS))[np.arange(VOCABULARY) % 4]
    odds = np.array([0.55, 0.25, 0.15, 0.05])
    train, held_out = [], []
    for _ in range(TOPICS):
        own = random.integers(VOCABULARY, size=(4, VOCABULARY, SUCCESSORS))[np.arange(VOCABULARY) % 4]
        same = random.random((1, VOCABULARY, 1)) < SHARED
        rules = np.where(same, common, own).reshape(shape)
        train.append(_chains(rules, odds, STRIPS, STRIP, random))
        held_out.append(_chains(rules, odds, HELD_OUT // TOPICS, CONTEXT + 1 + 8, random)[:, 8:])
    return Text(torch.from_numpy(np.stack(train)), torch.from_numpy(np.concatenate(held_out)))


class Stream:
    """A learner's endless windows of context + 1 symbols."""

    def __init__(self, seed: int, learner: int, learners: int, iid: bool) -> None:
        self.train = text(seed).train
        self.generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + learner)
        shares = torch.ones(TOPICS)
        if not iid:
            own = [topic for topic in range(TOPICS) if topic % min(learners, TOPICS) == learner % min(learners, TOPICS)]
            shares *= (1.0 - OWN) / TOPICS
            shares[own] += OWN / len(own)
        self.shares = shares / shares.sum()
        self.ahead = torch.arange(CONTEXT + 1)

    def next(self) -> Tensor:
        topics = torch.multinomial(self.shares, BATCH, replacement=True, generator=self.generator)
        strips = torch.randint(STRIPS, (BATCH,), generator=self.generator)
        starts = torch.randint(STRIP - CONTEXT, (BATCH, 1), generator=self.generator)
        return self.train[topics[:, None], strips[:, None], starts + self.ahead]
