"""Timeouts: one table has all of them, and an order that cannot work is refused at start with the rule."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import diloco
from diloco._native import _C
from diloco.testing import ProcessError

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_one_table_has_every_timeout() -> None:
    """F085: settings in seconds, arguments in seconds, and their defaults."""
    section = OPERATIONS.read_text().split("## Timeouts\n")[1].split("\n## ")[0]
    settings = [info.name for info in _C.settings_table() if info.unit == "s"]
    arguments = [
        name
        for function in (diloco.Learner.__init__, diloco.Learner.close, diloco.Syncer.__init__)
        for name in inspect.signature(function).parameters
        if name.endswith("_s")
    ]
    assert {"heartbeat_timeout_s", "grace_cap_s"} <= set(settings)
    assert {"give_up_after_s", "flush_s", "shutdown_s"} <= set(arguments)
    for name in [*settings, *(name for name in arguments if name != "shutdown_s")]:
        assert name in section, name
    assert "--shutdown-s" in section
    for name in ("heartbeat_interval_s", "heartbeat_timeout_s"):
        default = next(info.default_value for info in _C.settings_table() if info.name == name)
        assert re.search(rf"^\| `{name}` \| {default} s \|", section, re.MULTILINE), name


@pytest.mark.parametrize(("interval", "timeout"), [(3, 5), (5, 5), (10, 1)])
def test_an_order_that_cannot_work_is_refused_with_the_rule(syncer: Any, interval: int, timeout: int) -> None:
    rule = f"heartbeat_timeout_s must be at least twice heartbeat_interval_s ({interval}), got {timeout}"
    with pytest.raises(ProcessError) as failure:
        syncer(heartbeat_interval_s=interval, heartbeat_timeout_s=timeout)
    assert "exited with status 2" in str(failure.value)
    assert rule in str(failure.value)
    with pytest.raises(ValueError, match=re.escape(rule)):
        diloco.Syncer(heartbeat_interval_s=interval, heartbeat_timeout_s=timeout)
