"""Without a syncer, the wrapped script of an island is the bare one, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from island_ranks import Job
from toys import dead_address

TWO = [
    ("ddp", "sgd"),
    ("ddp", "fused"),
    ("fsdp", "sgd"),
    ("fsdp", "fused"),
    ("fsdp_bf16", "adamw"),
    ("tp", "adamw"),
]


@pytest.fixture(scope="module")
def compared(ranks: Callable[..., Job]) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """compared("ddp", "sgd"): what each rank found."""
    with dead_address() as address:
        jobs: list[Job] = [
            ranks("equality", 2, variants=TWO, syncer=address),
            ranks("equality", 4, variants=[("hsdp", "sgd")], syncer=address),
        ]

        def find(how: str, kind: str) -> list[dict[str, Any]]:
            job = jobs[how == "hsdp"]
            return job.every("compared", lambda event: (event["how"], event["kind"]) == (how, kind))

        yield find
        for job in jobs:
            job.finish()


@pytest.mark.parametrize(("how", "kind"), [*TWO, ("hsdp", "sgd")], ids=lambda name: name)
def test_the_wrapped_script_is_the_bare_one(compared: Callable[..., list[dict[str, Any]]], how: str, kind: str) -> None:
    for event in compared(how, kind):
        assert event["moved"]
        assert event["same"]
        stats = event["stats"]
        assert (stats["ranks"], stats["rank"]) == (4 if how == "hsdp" else 2, event["rank"])
        assert stats["steps"] == 6
        assert stats["rank_exchanges"] >= 6
