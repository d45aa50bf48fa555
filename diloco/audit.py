"""Recomputes the token ledger of a run from what the processes left behind, without importing the package.

    python audit.py EVENTS.jsonl [MORE.jsonl ...] --ledger-dir DIR [--json FILE]

Inputs: the syncer's event log (`--event-log`, JSON lines; give several files in the order they were written) and the
learners' ledger files (`<learner>.<incarnation>.ledger`, written in place, so that they survive SIGKILL).

For every (incarnation, fragment), the intervals of tokens that were merged (event log) and discarded (ledger file)
must be pairwise disjoint, lie inside [0, tokens) and leave no hole but the tail, which is `outstanding` while the
incarnation lives or was closed, and `lost` once it is dead. A merge does not count if a restarted syncer went on from
an older version of the fragment (`recover`): those tokens are `lost`. A hole is also explained where the learner
declared the work sent and given up locally: `in_flight` while the syncer may still merge it, `lost` once the learner is
gone. Tokens from before a fragment's tensors were added to the model are `absent`: they do not count as processed
there. Any deviation is an error line and exit status 1.

Standard library only: this file can be copied next to the logs and run there.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"DLCOLED1"
HEADER = struct.Struct("<8sQQQQQQQ64s")
ENTRY = struct.Struct("<QQQQ")
REASONS = ("overwritten", "blended", "carry_limit", "lost", "stale", "nonfinite", "refused", "in_flight", "absent")


class AuditError(Exception):
    """An input that cannot be read at all; the message says which and why."""


@dataclass(frozen=True)
class Interval:
    start: int
    end: int
    what: str  # "merged" or a reason
    where: str  # for messages


@dataclass
class Ledger:
    """One ledger file: one incarnation's own account."""

    path: str
    learner: str
    incarnation: str
    tokens: int
    fragments: int
    closed: bool
    pid: int
    discards: list[tuple[int, int, int, str]] = field(default_factory=list)  # fragment, from, to, reason


@dataclass
class Log:
    """What the audit needs from the event log."""

    fragments: int = 0
    merges: list[dict[str, Any]] = field(default_factory=list)
    void: int = 0
    void_spans: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)  # (incarnation, fragment)
    refused: int = 0
    life: dict[str, str] = field(default_factory=dict)  # incarnation -> its last join/leave event
    order: dict[str, list[str]] = field(default_factory=dict)  # learner -> incarnations in the order they joined
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def read_ledger(path: Path) -> Ledger:
    """Reads one ledger file; raises AuditError if it is not one."""
    raw = path.read_bytes()
    if len(raw) < 128:
        raise AuditError(f"{path.name}: {len(raw)} bytes, a ledger file has at least 128")
    magic, incarnation, tokens, fragments, entries, state, pid, _, learner = HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise AuditError(f"{path.name}: starts with {magic!r}, expected {MAGIC!r}")
    if 128 + entries * ENTRY.size > len(raw):
        raise AuditError(f"{path.name}: promises {entries} entries but has {len(raw)} bytes")
    ledger = Ledger(
        path=path.name,
        learner=learner.rstrip(b"\0").decode("utf-8", "replace"),
        incarnation=f"{incarnation:016x}",
        tokens=tokens,
        fragments=fragments,
        closed=state == 1,
        pid=pid,
    )
    for i in range(entries):
        fragment, start, end, reason = ENTRY.unpack_from(raw, 128 + i * ENTRY.size)
        name = REASONS[reason] if reason < len(REASONS) else f"unknown {reason}"
        ledger.discards.append((fragment, start, end, name))
    return ledger


def read_ledgers(directory: Path) -> list[Ledger]:
    """All ledger files of a folder, sorted by name."""
    if not directory.is_dir():
        raise AuditError(f"{directory}: no such folder; give the learners' ledger_dir")
    return [read_ledger(p) for p in sorted(directory.glob("*.ledger"))]


def read_events(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Events of all files in order, and notes. A torn last line of a file is tolerated; any other bad line is not."""
    events: list[dict[str, Any]] = []
    notes: list[str] = []
    for path in paths:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise AuditError(f"{path}: {error.strerror}; give the syncer's --event-log file") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            event = parse_event(line)
            if event is not None:
                events.append(event)
                continue
            # A killed syncer leaves half a line; the next one goes on behind it.
            restart = parse_event(line[max(line.rfind(b'{"event"'), 0) :])
            last = not any(later.strip() for later in lines[number:])
            if restart is not None:
                events.append(restart)
            elif not last and not any(b'"start"' in later for later in lines[number : number + 1]):
                raise AuditError(f"{path.name} line {number}: not an event: {line[:60]!r}")
            notes.append(f"{path.name} line {number} is torn and was left out")
    return events, notes


def parse_event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def version_of(event: dict[str, Any], key: str = "version") -> tuple[int, int]:
    epoch, n = event[key]
    return int(epoch), int(n)


def digest(events: list[dict[str, Any]], notes: list[str]) -> Log:
    """Sorts the events out and drops the merges that a restarted syncer did not continue from."""
    log = Log(notes=list(notes))
    last: dict[int, tuple[int, int]] = {}
    void_since: dict[int, int] = {}
    for event in events:
        kind = event["event"]
        if kind == "plan":
            log.fragments = len(event["fragments"])
        elif kind == "merge":
            fragment, version = int(event["fragment"]), version_of(event)
            if fragment in last and version <= last[fragment]:
                log.errors.append(f"fragment {fragment}: version {list(version)} follows {list(last[fragment])}")
            last[fragment] = version
            check_members(event, log)
            log.merges.append(event)
        elif kind == "recover":
            kept = version_of(event, "from_version")
            settle_origin(log.merges, void_since, int(event["fragment"]), kept, version_of(event))
        elif kind == "init" and event.get("from") != "recovered":
            settle_origin(log.merges, void_since, int(event["fragment"]), (0, 0), version_of(event))
        elif kind == "refuse":
            log.refused += 1
        elif kind in ("join", "leave"):
            incarnation, learner = str(event["incarnation"]), str(event["learner"])
            log.life[incarnation] = kind
            lives = log.order.setdefault(learner, [])
            if kind == "join" and incarnation not in lives:
                lives.append(incarnation)
    drop_void(log, void_since)
    return log


def check_members(event: dict[str, Any], log: Log) -> None:
    members = event["members"]
    where = f"round {event.get('round')}, fragment {event['fragment']}"
    if not members:
        log.errors.append(f"{where}: merged without members")
    elif abs(sum(float(m.get("weight", 1 / len(members))) for m in members) - 1.0) > 1e-5:
        log.errors.append(f"{where}: weights add up to {sum(float(m['weight']) for m in members):.6f}, not to 1")


def settle_origin(
    merges: list[dict[str, Any]],
    void_since: dict[int, int],
    fragment: int,
    kept: tuple[int, int],
    version: tuple[int, int],
) -> None:
    """A life of the syncer begins `fragment` at `version`, from what had been `kept`: later merges of earlier epochs
    never reached it. The last beginning of a life counts. `void_since`: index of a merge -> epoch that voided it."""
    epoch = version[0]
    for index, merge in enumerate(merges):
        if int(merge["fragment"]) != fragment or version_of(merge)[0] >= epoch:
            continue
        if void_since.get(index) == epoch:
            del void_since[index]
        if version_of(merge) > kept and index not in void_since:
            void_since[index] = epoch


def drop_void(log: Log, void_since: dict[int, int]) -> None:
    log.void = len(void_since)
    for index in void_since:
        merge = log.merges[index]
        for member in merge["members"]:
            spans = log.void_spans.setdefault((str(member["incarnation"]), int(merge["fragment"])), [])
            spans.append((int(member["from"]), int(member["to"])))
    log.merges = [merge for index, merge in enumerate(log.merges) if index not in void_since]


def inside(spans: list[tuple[int, int]], start: int, end: int) -> bool:
    """Whether the spans together cover [start, end)."""
    for low, high in sorted(spans):
        if low <= start:
            start = max(start, high)
    return start >= end


def partition(
    label: str, intervals: list[Interval], tokens: int, explained: list[tuple[int, int]]
) -> tuple[int, list[tuple[int, int]], list[str]]:
    """The end of what is covered, the holes before it that are explained, and one message per deviation."""
    errors: list[str] = []
    holes: list[tuple[int, int]] = []
    covered = 0
    for i in sorted(intervals, key=lambda i: (i.start, i.end)):
        text = f"[{i.start}, {i.end}) {i.what} ({i.where})"
        if i.start >= i.end:
            errors.append(f"{label}: empty or reversed interval {text}")
            continue
        if i.end > tokens:
            errors.append(f"{label}: {text} reaches past the {tokens} tokens processed")
        if i.start < covered:
            twice = min(covered, i.end) - i.start
            errors.append(f"{label}: {text} overlaps what ends at {covered}: {twice} tokens twice")
        elif i.start > covered and inside(explained, covered, i.start):
            holes.append((covered, i.start))
        elif i.start > covered:
            errors.append(f"{label}: gap [{covered}, {i.start}) before {text}: {i.start - covered} tokens unaccounted")
        covered = max(covered, i.end)
    return covered, holes, errors


def is_lost(ledger: Ledger, log: Log) -> bool:
    """Dead: not closed, and the syncer saw it leave or a later life of the same learner join."""
    if ledger.closed:
        return False
    lives = log.order.get(ledger.learner, [])
    replaced = ledger.incarnation in lives and lives[-1] != ledger.incarnation
    return replaced or log.life.get(ledger.incarnation) == "leave"


def audit(events: list[dict[str, Any]], ledgers: list[Ledger], notes: Iterable[str] = ()) -> dict[str, Any]:
    """The whole audit as a report: ok, errors, ledger (summed over fragments), learners, rounds."""
    log = digest(events, list(notes))
    errors = log.errors
    merged: dict[tuple[str, int], list[Interval]] = {}
    owners: dict[str, str] = {}
    for event in log.merges:
        for m in event["members"]:
            owners[str(m["incarnation"])] = str(m["learner"])
            where = f"round {event.get('round')}, version {list(version_of(event))}"
            merged.setdefault((str(m["incarnation"]), int(event["fragment"])), []).append(
                Interval(int(m["from"]), int(m["to"]), "merged", where)
            )
    known = {ledger.incarnation for ledger in ledgers}
    for incarnation in sorted(owners.keys() - known):
        errors.append(f"learner {owners[incarnation]}: no ledger file for its incarnation {incarnation}")
    total = {"processed": 0, "merged": 0, "outstanding": 0, "in_flight": 0}
    discarded: dict[str, int] = {}
    learners: dict[str, dict[str, Any]] = {}
    for ledger in ledgers:
        one = account(ledger, log, merged, errors)
        for key in ("processed", "merged", "outstanding", "in_flight"):
            total[key] += one[key]
        for reason, tokens in one["discarded"].items():
            discarded[reason] = discarded.get(reason, 0) + tokens
        learners.setdefault(ledger.learner, {"incarnations": []})["incarnations"].append(one)
    position = {incarnation: n for n, incarnation in enumerate(i for lives in log.order.values() for i in lives)}
    for one_learner in learners.values():
        lives = one_learner["incarnations"]
        lives.sort(key=lambda life: position.get(life["incarnation"], len(position)))
        processed = sum(life["processed"] for life in lives)
        one_learner["merged_fraction"] = sum(life["merged"] for life in lives) / processed if processed else 0.0
        one_learner["fragments_merged"] = len({f for life in lives for f in life["fragments_merged"]})
    accounted = total["merged"] + total["outstanding"] + total["in_flight"] + sum(discarded.values())
    if not errors and accounted != total["processed"]:
        errors.append(f"{accounted} tokens accounted for, {total['processed']} processed")
    return {
        "ok": not errors,
        "errors": errors,
        "notes": log.notes,
        "ledger": {**total, "discarded": discarded},
        "learners": learners,
        "fragments": log.fragments,
        "rounds": len(log.merges),
        "void_merges": log.void,
        "refused": log.refused,
    }


def account(
    ledger: Ledger, log: Log, merged: dict[tuple[str, int], list[Interval]], errors: list[str]
) -> dict[str, Any]:
    """One incarnation: sums over its fragments; deviations are appended to `errors`."""
    fragments = ledger.fragments or log.fragments
    lost = is_lost(ledger, log)
    one: dict[str, Any] = {
        "incarnation": ledger.incarnation,
        "tokens": ledger.tokens,
        "pid": ledger.pid,
        "state": "closed" if ledger.closed else "lost" if lost else "running",
        "processed": ledger.tokens * fragments,
        "merged": 0,
        "outstanding": 0,
        "in_flight": 0,
        "discarded": {},
        "fragments_merged": [],
    }
    strays = {f for i, f in merged if i == ledger.incarnation} | {f for f, *_ in ledger.discards}
    for fragment in sorted(f for f in strays if f >= fragments):
        errors.append(f"learner {ledger.learner}: fragment {fragment} is accounted for, but there are {fragments}")
    for fragment in range(fragments):
        intervals = list(merged.get((ledger.incarnation, fragment), ()))
        if intervals:
            one["fragments_merged"].append(fragment)
        one["merged"] += sum(i.end - i.start for i in intervals)
        void = log.void_spans.get((ledger.incarnation, fragment), [])
        sent = [(start, end) for f, start, end, reason in ledger.discards if f == fragment and reason == "in_flight"]
        for f, start, end, reason in ledger.discards:
            if f != fragment or reason == "in_flight":
                continue
            intervals.append(Interval(start, end, reason, ledger.path))
            if reason == "absent":
                one["processed"] -= end - start
            else:
                one["discarded"][reason] = one["discarded"].get(reason, 0) + end - start
        label = f"learner {ledger.learner} ({ledger.incarnation}), fragment {fragment}"
        covered, holes, problems = partition(label, intervals, ledger.tokens, void + sent)
        errors.extend(problems)
        for start, end in holes:
            if one["state"] == "running" and not inside(void, start, end):
                one["in_flight"] += end - start
            else:
                one["discarded"]["lost"] = one["discarded"].get("lost", 0) + end - start
        tail = max(0, ledger.tokens - covered)
        if lost and tail:
            one["discarded"]["lost"] = one["discarded"].get("lost", 0) + tail
        elif not lost:
            one["outstanding"] += tail
    return one


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    ledger = report["ledger"]
    lines = [f"ERROR {error}" for error in report["errors"]] + [f"note: {note}" for note in report["notes"]]
    for name, one in sorted(report["learners"].items()):
        states = ", ".join(f"{life['tokens']} tokens ({life['state']})" for life in one["incarnations"])
        lines.append(f"learner {name}: {states}; {one['merged_fraction']:.1%} merged")
    processed = ledger["processed"] or 1
    lines.append(f"{report['rounds']} rounds; {ledger['processed']} tokens summed over {report['fragments']} fragments")
    parts = {"merged": ledger["merged"], "outstanding": ledger["outstanding"], "in_flight": ledger["in_flight"]}
    parts |= ledger["discarded"]
    lines += [f"  {name:<12}{tokens:>14}  {tokens / processed:7.2%}" for name, tokens in parts.items()]
    if report["void_merges"]:
        lines.append(f"{report['void_merges']} merges are void: a restarted syncer went on from older versions")
    lines.append("exact: the intervals partition every token" if report["ok"] else "NOT exact")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="diloco audit", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "events", nargs="+", type=Path, metavar="EVENTS", help="event log(s) of the syncer, oldest first"
    )
    parser.add_argument("--ledger-dir", type=Path, required=True, help="folder with the learners' *.ledger files")
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON ('-': only that, to stdout)")
    args = parser.parse_args(argv)
    try:
        if args.json and args.json != "-":
            with open(args.json, "a", encoding="utf-8"):
                pass
        events, notes = read_events(args.events)
        report = audit(events, read_ledgers(args.ledger_dir), notes)
    except OSError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    except AuditError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1
    if args.json:
        text = json.dumps(report, indent=1)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + os.linesep, encoding="utf-8")
    if args.json != "-":
        print(render(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
