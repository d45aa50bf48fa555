"""Two learners in each framework (field case F021): it is the wrapper's step that the framework calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import framework_learner
from toys import LOCKSTEP

# What one sample counts. Trainer counts the elements of the model's main input, here 6 numbers.
TOKENS = {"accelerate": 1, "trainer": 6, "lightning": 1}


def test_frameworks_step_the_wrapper(syncer: Callable[..., Any], program: Callable[..., Any]) -> None:
    """H = 5 and 20 steps of two micro-batches: 4 rounds of both learners, with 5 steps and all tokens in each."""
    syncers = {name: syncer(**{**LOCKSTEP, "sync_every": 5}, name=f"syncer of {name}") for name in TOKENS}
    script = Path(framework_learner.__file__)
    path = {"PYTHONPATH": f"{script.parent}:{script.parents[2]}"}
    runs = [f"{name}={s.endpoint}" for name, s in syncers.items()]
    learners = [program(name, *runs, script=script, name=name, env=path) for name in ("a", "b")]
    for framework, s in syncers.items():
        reports = [learner.wait_for(framework) for learner in learners]
        step = 2 * 8 * TOKENS[framework]
        for report in reports:
            stats = report["stats"]
            assert (stats["state"], stats["steps"], stats["tokens"]) == ("closed", 20, 20 * step), framework
            assert stats.get("stepped_directly", 0) == 0, framework
        assert s.stop() == 0
        s.wait_for("stop")
        merges = [event for event in s.events if event["event"] == "merge"]
        rounds = [{(m["learner"], m["steps"], m["to"] - m["from"]) for m in merge["members"]} for merge in merges]
        assert rounds == [{("a", 5, 5 * step), ("b", 5, 5 * step)}] * 4, framework
        assert reports[0]["weights"] == reports[1]["weights"], framework
    for learner in learners:
        assert learner.wait() == 0, learner.tail()
