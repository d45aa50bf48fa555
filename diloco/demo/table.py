"""What the demo shows while it runs: a live table (rich) on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from diloco.demo.record import Life, Record

ROUNDS_SHOWN = 8
PLAIN_EVERY_S = 5.0
RATE_OVER_STEPS = 16


@dataclass(frozen=True)
class Phase:
    """Where the demo is; `done` of `of` in units of work, `rest_s` the estimate of what is left, None = unknown."""

    text: str
    done: float
    of: float
    rest_s: float | None = None


def tokens_per_s(life: Life) -> float:
    recent = life.steps[-RATE_OVER_STEPS - 1 :]
    if len(recent) < 2 or recent[-1].t <= recent[0].t:
        return 0.0
    return (recent[-1].tokens - recent[0].tokens) / (recent[-1].t - recent[0].t)


def shown_state(life: Life, status: dict[str, Any]) -> str:
    """The process' own word, and the syncer's if it is another one."""
    if life.returncode is not None and life.returncode < 0:
        return f"killed (signal {-life.returncode})"
    for seen in status.get("learners", ()):
        if seen["incarnation"] == life.incarnation and seen["state"] == "stalled":
            return "stalled"
    return life.state


def progress_text(phase: Phase) -> str:
    if not phase.of:
        return phase.text
    share = min(1.0, phase.done / phase.of)
    rest = "" if phase.rest_s is None else f", about {phase.rest_s:.0f} s left"
    return f"{phase.text}: {phase.done:.0f} of {phase.of:.0f} ({share:.0%}){rest}"


def latest_loss(record: Record) -> str:
    curve = record.losses.curve
    return f"{curve[-1].loss:.3f}" if curve else "-"


class PlainScreen:
    """One line every few seconds, and one per event."""

    def __init__(self) -> None:
        self._last = 0.0

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, record: Record, phase: Phase) -> None:
        if time.monotonic() - self._last < PLAIN_EVERY_S:
            return
        self._last = time.monotonic()
        text = progress_text(phase)
        if not record.trained_s:
            steps = " ".join(f"{n}:{sum(len(life.steps) for life in record.lives_of(n))}" for n in record.learners())
            text += f"; held-out loss {latest_loss(record)}; rounds {len(record.rounds)}; steps {steps}"
        print(text, flush=True)


class RichScreen:
    """A table per learner and one of the latest rounds, redrawn in place."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(refresh_per_second=4, transient=True)

    def __enter__(self) -> RichScreen:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.__exit__(kind, error, tb)

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False)

    def show(self, record: Record, phase: Phase) -> None:
        from rich.console import Group

        self._live.update(Group(header(record, phase), learner_table(record), round_table(record)))


def header(record: Record, phase: Phase) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    loss = Text.assemble("held-out loss of the global weights ", (latest_loss(record), "bold cyan"))
    grid.add_row(Text(progress_text(phase), style="bold"), loss)
    grid.add_row(ProgressBar(total=phase.of or 1, completed=phase.done, width=44), Text(f"{len(record.rounds)} rounds"))
    return grid


def learner_table(record: Record) -> Any:
    from rich.table import Table

    table = Table(expand=False, title_justify="left")
    for column, justify in (
        ("learner", "left"),
        ("speed", "right"),
        ("state", "left"),
        ("step", "right"),
        ("tokens/s", "right"),
        ("loss", "right"),
        ("merged rounds", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for life in record.lives:
        last = life.steps[-1] if life.steps else None
        merged = sum(any(m.incarnation == life.incarnation for m in r.members) for r in record.rounds)
        state = shown_state(life, record.status)
        style = "red" if state.startswith("killed") else "yellow" if state in ("stalled", "away") else None
        table.add_row(
            life.learner,
            "full" if life.slowdown == 1 else f"1/{life.slowdown:g}",
            state,
            str(last.step) if last else "-",
            f"{tokens_per_s(life):.0f}" if life.returncode is None else "-",
            f"{last.loss:.3f}" if last else "-",
            str(merged),
            style=style,
        )
    return table


def round_table(record: Record) -> Any:
    from rich.table import Table

    table = Table(expand=False)
    for column in ("round", "fragment", "version", "members (weight)", "waited"):
        table.add_column(column, justify="left" if column.startswith("members") else "right")
    for r in record.rounds[-ROUNDS_SHOWN:]:
        members = "  ".join(f"{m.learner} {m.weight:.2f}" for m in r.members)
        table.add_row(
            str(r.number), str(r.fragment), f"{r.version[0]}.{r.version[1]}", members, f"{r.wait_s * 1e3:.0f} ms"
        )
    return table


def make_screen(plain: bool) -> PlainScreen | RichScreen:
    """Rich on a terminal if it is installed."""
    if plain or not sys.stdout.isatty():
        return PlainScreen()
    try:
        return RichScreen()
    except ImportError:
        return PlainScreen()
