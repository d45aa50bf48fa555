"""What was looked at, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "skipped", "fail"]
SCHEMA = "diloco.doctor.1"


class Wrong(Exception):
    """A check failed. The text says what was expected, what came, and what to do; `next` is a command to type."""

    def __init__(self, text: str, next: str = "", **values: Any) -> None:
        super().__init__(text)
        self.next, self.values = next, values


@dataclass
class Check:
    """One thing looked at. `note`: nothing is wrong, but somebody should know."""

    name: str
    state: State
    text: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """All checks of one side in their order, the verdict, and the next command to type."""

    side: Literal["learner", "syncer"]
    next: str
    checks: list[Check] = field(default_factory=list)

    @property
    def first_wrong(self) -> Check | None:
        return next((check for check in self.checks if check.state == "fail"), None)

    @property
    def ready(self) -> bool:
        return self.first_wrong is None

    @property
    def verdict(self) -> str:
        wrong = self.first_wrong
        return "ready" if wrong is None else f"not ready: {wrong.name}: {wrong.text}"

    def add(self, name: str, state: State, text: str, **values: Any) -> None:
        self.checks.append(Check(name, state, text, values))

    def check(self, name: str, look: Callable[[], None]) -> bool:
        """Looks; True unless something is wrong, which is written down."""
        try:
            look()
        except Wrong as wrong:
            self.wrong(name, wrong)
            return False
        return True

    def wrong(self, name: str, why: Wrong) -> None:
        """The command is that of the first thing that is wrong: later ones may be its consequences."""
        if self.ready:
            self.next = why.next or f"mend that ({name}), then diloco doctor again"
        self.add(name, "fail", str(why), **why.values)

    def lines(self) -> Iterator[str]:
        width = max((len(check.name) for check in self.checks), default=0)
        for check in self.checks:
            mark = {"ok": "ok", "note": "note", "skipped": "-", "fail": "FAIL"}[check.state]
            yield f"{mark:<5} {check.name:<{width}}  {check.text}"
        yield self.verdict
        yield f"next: {self.next}"

    def values(self) -> dict[str, Any]:
        checks = [{"name": c.name, "state": c.state, "text": c.text, **c.values} for c in self.checks]
        return {
            "side": self.side,
            "ready": self.ready,
            "verdict": self.verdict,
            "next": self.next,
            "checks": checks,
        }
