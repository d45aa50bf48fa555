"""The demo's picture: loss of the global weights over time and over tokens, and a timeline of learners and rounds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from diloco.demo.record import Life, LossPoint, Record

COLOURS = ("#2a6fbb", "#d1495b", "#3a9e78", "#8d6ab8", "#c98b2b", "#5a6672")
GLOBAL, ALONE, FEWER, MARK = "#1b263b", "#9aa5b1", "#c98b2b", "#d1495b"


def available() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def why_unknown(path: str) -> str:
    """Why no picture can be written under this name, or ""."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".").lower()
    if not ending or ending in kinds:
        return ""
    return f"'.{ending}' is no kind of picture; use one of {', '.join(sorted(kinds))}"


def draw(record: Record, path: str) -> None:
    """Writes the picture; the format follows the name's ending (png if it has none)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#8d99a6",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "xtick.color": "#5a6672",
        "ytick.color": "#5a6672",
    }
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(12, 7.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1))
        over_time(figure.add_subplot(grid[0, 0]), record)
        over_tokens(figure.add_subplot(grid[0, 1]), record)
        timeline(figure.add_subplot(grid[1, :]), record)
        figure.suptitle(title(record), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130, format=None if "." in path.rsplit("/", 1)[-1] else "png")
        pyplot.close(figure)


def title(record: Record) -> str:
    count = len(record.learners())
    return f"{count} learners that never wait, {len(record.rounds)} rounds, one SIGKILL: seed {record.seed}"


def mark_kill(axis: Any, record: Record, x_killed: float, x_back: float) -> None:
    kill = record.kill
    if kill is None:
        return
    axis.axvspan(x_killed, x_back, color=MARK, alpha=0.09, lw=0)
    low, high = axis.get_ylim()
    for x, text, align in ((x_killed, f"{kill.learner} killed ", "right"), (x_back, f" {kill.learner} back", "left")):
        axis.axvline(x, color=MARK, lw=1, ls=(0, (3, 2)))
        axis.text(x, low + 0.03 * (high - low), text, color=MARK, ha=align, va="bottom", fontsize=9)


def loss_lines(axis: Any, record: Record, xs: list[float], alone_xs: list[float], alone_label: str) -> None:
    losses = record.losses
    axis.plot(alone_xs, [p.loss for p in losses.alone_curve], color=ALONE, lw=1.6, label=alone_label)
    axis.plot(xs, [p.loss for p in losses.curve], color=GLOBAL, lw=2.2, label="global weights")
    values = [p.loss for p in (*losses.curve, *losses.alone_curve)]
    if values:
        low, high = min(values), max(values)
        # The first steps fall from log(256); what matters is below.
        axis.set_ylim(low - 0.08, min(high, low + 1.2) + 0.04)
    axis.set_ylabel("held-out loss, nats per byte")
    axis.grid(axis="y", color="#e3e7eb", lw=0.8)
    axis.legend(frameon=False, loc="upper right")


def over_time(axis: Any, record: Record) -> None:
    axis.set_title("Loss over time")
    curve, alone = record.losses.curve, record.losses.alone_curve
    alone_xs = [time_of_step(record, p.step) for p in alone]
    loss_lines(axis, record, [p.t for p in curve], alone_xs, "one learner alone, at the fastest learner's steps")
    if record.kill:
        mark_kill(axis, record, record.kill.at_s, record.kill.back_at_s)
    axis.set_xlabel("seconds")


def time_of_step(record: Record, step: int) -> float:
    """When the fastest learner had made `step` steps: the scale on which the single learner is compared."""
    steps = [s for life in record.lives_of(record.reference) for s in life.steps]
    if not steps or step <= 0:
        return record.losses.curve[0].t if record.losses.curve else 0.0
    return steps[min(step, len(steps)) - 1].t


def over_tokens(axis: Any, record: Record) -> None:
    axis.set_title("Loss over tokens")
    curve, alone = record.losses.curve, record.losses.alone_curve
    loss_lines(axis, record, [p.tokens / 1e6 for p in curve], [p.tokens / 1e6 for p in alone], "one learner alone")
    if record.kill:
        at = [tokens_near(curve, t) / 1e6 for t in (record.kill.at_s, record.kill.back_at_s)]
        mark_kill(axis, record, at[0], at[1])
    axis.set_xlabel("million tokens, all learners together")


def tokens_near(curve: list[LossPoint], t: float) -> float:
    """Tokens at time t, between the two points around it."""
    for left, right in itertools.pairwise(curve):
        if left.t <= t <= right.t and right.t > left.t:
            return left.tokens + (right.tokens - left.tokens) * (t - left.t) / (right.t - left.t)
    return float(curve[-1].tokens if curve and t > curve[-1].t else curve[0].tokens if curve else 0)


def timeline(axis: Any, record: Record) -> None:
    """A bar per life of a learner, a dot per contribution merged, and all rounds on the syncer's line."""
    names = record.learners()
    axis.set_title("Learners and rounds: each dot is a contribution that was merged")
    for row, name in enumerate(names):
        colour = COLOURS[row % len(COLOURS)]
        for life in record.lives_of(name):
            end = life_end(life)
            begin = life.joined_s if life.joined_s is not None else end
            axis.barh(row, end - life.started_s, left=life.started_s, height=0.56, color=colour, alpha=0.08, lw=0)
            axis.barh(row, end - begin, left=begin, height=0.56, color=colour, alpha=0.22, lw=0)
        dots = [(r.t, spread(r.fragment, record)) for r in record.rounds if any(m.learner == name for m in r.members)]
        axis.scatter([t for t, _ in dots], [row + dy for _, dy in dots], s=5, color=colour, lw=0)
    syncer = len(names)
    axis.scatter(
        [r.t for r in record.rounds],
        [syncer + spread(r.fragment, record) for r in record.rounds],
        s=7,
        color=[GLOBAL if len(r.members) == len(names) else FEWER for r in record.rounds],
        lw=0,
    )
    kill_marks(axis, record, names)
    axis.set_yticks(range(len(names) + 1), [label_of(record, name) for name in names] + ["syncer: rounds"])
    axis.set_ylim(len(names) + 0.55, -0.6)
    axis.set_xlim(0, max((r.t for r in record.rounds), default=1.0) * 1.01)
    axis.set_xlabel(
        "seconds; height inside a line: the fragment; syncer: dark = merged from all learners, orange = from fewer"
    )
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)


def kill_marks(axis: Any, record: Record, names: list[str]) -> None:
    kill = record.kill
    if kill is None:
        return
    row = names.index(kill.learner)
    axis.plot([kill.at_s], [row], marker="X", ms=11, color=MARK, mec="white", mew=1, clip_on=False)
    axis.plot([kill.back_at_s], [row], marker=">", ms=10, color=MARK, mec="white", mew=1)
    middle = (kill.at_s + kill.back_at_s) / 2
    axis.text(middle, row, f"SIGKILL, {kill.back_at_s - kill.at_s:.0f} s away", color=MARK, ha="center", va="center")


def label_of(record: Record, name: str) -> str:
    slowdown = record.lives_of(name)[0].slowdown
    return name if slowdown == 1 else f"{name} ({slowdown:g}x slower)"


def life_end(life: Life) -> float:
    if life.ended_s is not None:
        return life.ended_s
    return life.steps[-1].t if life.steps else life.started_s


def spread(fragment: int, record: Record) -> float:
    return (fragment / max(1, record.fragments - 1) - 0.5) * 0.46
