"""Where options come from: argument, then DILOCO_<NAME> in the environment, then the default."""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

from diloco._native import _C

SettingValue: TypeAlias = str | int | float | bool | enum.Enum

DEFAULT_SYNCER = "127.0.0.1:29400"
# Variables that are no settings: the arguments of a learner, and what the build and the tests read.
_OTHER_VARIABLES = (
    "DILOCO_SYNCER",
    "DILOCO_LEARNER_ID",
    "DILOCO_LEDGER_DIR",
    "DILOCO_LOG_LEVEL",
    "DILOCO_BUILD_DIR",
    "DILOCO_SANITIZE",
    "DILOCO_SOAK",
)


@cache
def setting_names() -> tuple[str, ...]:
    return tuple(info.name for info in _C.settings_table())


def setting_texts(given: Mapping[str, SettingValue], function: str, arguments: tuple[str, ...]) -> dict[str, str]:
    """Checked settings as canonical text. An unknown name is a TypeError, as for any keyword, with the nearest one."""
    for name in given:
        if name not in setting_names():
            near = _C.suggest(name, [*setting_names(), *arguments])
            advice = f"did you mean {near}?" if near else "docs/settings.md lists the settings"
            raise TypeError(f"{function} got an unexpected argument '{name}'; {advice}")
    return _C.check_settings({name: _text(value) for name, value in given.items()})


def environment_settings() -> dict[str, str]:
    """Settings named by DILOCO_* variables. ValueError for an unknown variable, with the nearest known one."""
    return _C.settings_from_environment(
        {name: value for name, value in os.environ.items() if name.startswith("DILOCO_")}, list(_OTHER_VARIABLES)
    )


def argument(value: str | None, variable: str, default: str) -> str:
    return value if value is not None else os.environ.get(variable, default)


def default_learner_id() -> str:
    """Host, launcher's run and rank under torchrun, so that a restarted process keeps its name; else "" (random)."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run == "none":
        return ""
    return f"{socket.gethostname()}-{run}-{os.environ.get('RANK', '0')}"[-64:]


def _text(value: SettingValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    return repr(value) if isinstance(value, float) else str(value)
