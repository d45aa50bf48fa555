"""The command behind `diloco evidence`."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from diloco._report import why_unwritable
from diloco.evidence.check import check
from diloco.evidence.page import page
from diloco.evidence.report import build, write
from diloco.evidence.runner import results_of, run_units, units_of
from diloco.evidence.table import Table
from diloco.evidence.tables import TABLES
from diloco.evidence.tables.starvation import starved

SEEDS = 8
QUICK_SEEDS = 2


@dataclass(frozen=True)
class EvidenceOptions:
    tables: tuple[str, ...] = ()
    seeds: int = 0
    quick: bool = False
    check: bool = False
    page: bool = False
    write: bool = False
    json: str | None = None
    folder: str = "docs"
    workers: int = 0


def say(text: str) -> None:
    print(f"evidence: {text}", file=sys.stderr, flush=True)


def chosen_tables(names: tuple[str, ...]) -> tuple[Table, ...]:
    known = {table.name: table for table in TABLES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no table {', '.join(unknown)}; expected {', '.join(known)}")
    return tuple(known[name] for name in names) if names else TABLES


def run_evidence(options: EvidenceOptions) -> int:
    """0: done, whatever the verdicts. 1: --check found a difference, or a learner was starved. 2: wrong arguments."""
    try:
        tables = chosen_tables(options.tables)
        if options.write and options.tables:
            raise ValueError("--write writes the whole page; it expects no names of tables")
        folder = Path(options.folder)
        if options.write and not folder.is_dir():
            raise ValueError(f"--write: {folder} is no folder")
        if (options.check or options.page) and not (folder / "evidence.json").is_file():
            raise ValueError(f"{folder / 'evidence.json'} is missing; `diloco evidence --write` makes it")
        if options.json and (reason := why_unwritable(options.json)):
            raise ValueError(f"--json {options.json} cannot be written: {reason}; choose another file")
    except (ValueError, OSError) as error:
        say(str(error))
        return 2
    workers = options.workers or len(os.sched_getaffinity(0))
    if options.page:
        report = json.loads((folder / "evidence.json").read_text())
        (folder / "evidence.md").write_text(page(report, TABLES))
        return 0
    if options.check:
        return run_check(tables, folder, workers)
    return run_tables(tables, options, folder, workers)


def run_check(tables: tuple[Table, ...], folder: Path, workers: int) -> int:
    found = check(tables, folder, workers, say, TABLES)
    for sentence in found:
        say(sentence)
    say("differs" if found else f"one row of each of {len(tables)} tables is as recorded")
    return 1 if found else 0


def run_tables(tables: tuple[Table, ...], options: EvidenceOptions, folder: Path, workers: int) -> int:
    seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    units = units_of(tables, seeds)
    say(f"{len(units)} runs of {len(tables)} tables with {seeds} seeds in {workers} processes")
    began = time.monotonic()
    results = run_units(units, workers, say)
    parts = [(table, results_of(table, results, seeds)) for table in tables]
    names = " ".join(["diloco evidence", *options.tables, f"--seeds {seeds}"])
    report = build(parts, seeds, time.monotonic() - began, names)
    text = page(report, TABLES)
    if options.write:
        write(report, folder / "evidence.json")
        (folder / "evidence.md").write_text(text)
        say(f"{folder / 'evidence.md'} and {folder / 'evidence.json'} written")
    else:
        print(text)
    if options.json:
        write(report, Path(options.json))
    hungry = [sentence for table, part in parts if table.name == "starvation" for sentence in starved(part)]
    for sentence in hungry:
        say(f"starved: {sentence}")
    return 1 if hungry else 0
