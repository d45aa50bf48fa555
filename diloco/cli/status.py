"""`diloco status`: one picture of a running syncer, as tables on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco.cli import units


def show_status(syncer: str, json_file: Path | None, timeout_s: float) -> int:
    """Exit status: 0; 1 if nobody answers; 2 for a malformed address or a FILE that cannot be written."""
    to_stdout = json_file is not None and str(json_file) == "-"
    import diloco
    from diloco._report import why_unwritable

    # Refused before anything is asked.
    if json_file is not None and not to_stdout and (reason := why_unwritable(str(json_file))):
        return _fail(f"cannot write --json {json_file}: {reason}; choose a file in a folder you may write", 2)

    try:
        status = diloco.status(syncer, timeout_s)
    except ValueError as error:
        return _fail(str(error), 2)
    except ConnectionError as error:
        return _fail(str(error), 1)
    text = json.dumps(status, indent=1) + "\n"
    if to_stdout:
        sys.stdout.write(text)
        return 0
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
    render(syncer, status, Console())
    return 0


def _fail(text: str, code: int) -> int:
    print(f"diloco status: {text}", file=sys.stderr)
    return code


def render(syncer: str, status: dict[str, Any], console: Console) -> None:
    for line in headlines(syncer, status):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for title, columns, rows in (
        ("learners", LEARNER_COLUMNS, learner_rows(status)),
        ("fragments", FRAGMENT_COLUMNS, fragment_rows(status)),
        ("open rounds", ROUND_COLUMNS, round_rows(status)),
    ):
        if console.is_terminal:
            table = Table(*columns, title=f"{title} ({len(rows)})", title_justify="left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
        else:
            console.print(f"{title} ({len(rows)})", markup=False, highlight=False)
            for row in rows:
                pairs = (f"{column}={value}" for column, value in zip(columns, row, strict=True))
                console.print("  " + " ".join(pairs), markup=False, highlight=False, soft_wrap=True)


def headlines(syncer: str, status: dict[str, Any]) -> list[str]:
    ledger, timings, memory = status["ledger"], status["timings"], status["memory"]
    discarded = ", ".join(f"{reason} {tokens}" for reason, tokens in ledger["discarded"].items() if tokens) or "none"
    since = ", merged by this life of the syncer" if status["epoch"] > 1 else ""
    lines = [
        f"syncer {syncer}: epoch {status['epoch']}, {_kind(status['settings'])}, quorum {status['quorum']}, "
        f"up {units.duration(status['uptime_s'])}, {status['rounds_merged']} rounds merged",
        f"tokens, summed over fragments{since}: {ledger['processed']} processed = {ledger['merged']} merged "
        f"+ {ledger['in_flight']} in flight + {ledger['outstanding']} outstanding + discarded ({discarded})",
        f"times: step {units.duration(timings['step_s'])}, quorum {units.duration(timings['quorum_s'])}, "
        f"sync {units.duration(timings['sync_s'])}, round {units.duration(timings['round_s'])}; "
        f"effective H {status['effective']['sync_every']:.4g}, tau {status['effective']['overlap_steps']:.3g}",
        f"bytes: {units.size(status['bytes']['in'])} in, {units.size(status['bytes']['out'])} out; "
        f"memory: {units.size(memory['payload_bytes'])} of {units.size(memory['payload_limit_bytes'])} for "
        f"contributions, {units.size(memory['rss_bytes'])} in all",
    ]
    if status.get("waiting"):
        lines.append(f"waiting: {status['waiting']}")
    return lines


def _kind(settings: dict[str, str]) -> str:
    words = [settings["mode"]]
    if settings["preset"] != "none":
        words.insert(0, f"preset {settings['preset']}")
    if settings["trigger"] != "due":
        words.append(f"trigger {settings['trigger']}")
    return ", ".join(words)


LEARNER_COLUMNS = (
    "id",
    "state",
    "step",
    "clock",
    "tokens",
    "tokens/s",
    "merged",
    "contact",
    "bad",
    "lives",
    "host",
    "pid",
)


def learner_rows(status: dict[str, Any]) -> list[list[str]]:
    return [
        [
            learner["id"],
            learner["state"],
            str(learner["step"]),
            str(learner["clock"]),
            str(learner["tokens"]),
            f"{learner['tokens_per_s']:.0f}",
            f"{100 * learner['merged_fraction']:.0f}%",
            f"{units.duration(learner['last_contact_s'])} ago",
            str(learner["bad_payloads"]),
            str(learner["lives"]),
            learner["host"],
            str(learner["pid"]),
        ]
        for learner in status["learners"]
    ]


FRAGMENT_COLUMNS = ("fragment", "version", "parameters", "tensors", "due", "shard")


def fragment_rows(status: dict[str, Any]) -> list[list[str]]:
    by_arrival = status["settings"]["trigger"] == "arrival"
    return [
        [
            str(fragment["index"]),
            "{}.{}".format(*fragment["version"]),
            str(fragment["numel"]),
            _tensors(fragment["tensors"]),
            "-" if by_arrival else str(fragment["due"]),  # then every learner has due clocks of its own
            str(fragment["shard"]),
        ]
        for fragment in status["fragments"]
    ]


def _tensors(tensors: Any) -> str:
    if not isinstance(tensors, list):
        return str(tensors)
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} +{len(tensors) - 1}" if tensors else "-"


ROUND_COLUMNS = ("round", "fragment", "clock", "age", "complete", "pulled", "waiting for", "what")


def round_rows(status: dict[str, Any]) -> list[list[str]]:
    return [
        [
            str(round_["round"]),
            str(round_["fragment"]),
            str(round_["clock"]),
            units.duration(round_["age_s"]),
            _count(round_["complete"]),
            _count(round_["pulled"]),
            ",".join(round_["waiting_for"]) or "-",
            round_["text"],
        ]
        for round_ in status["rounds"]
    ]


def _count(value: Any) -> str:
    return str(len(value) if isinstance(value, list) else value)
