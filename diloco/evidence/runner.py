"""Runs the units of the tables, one seed of one setting each, in worker processes. Equal units are run once."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from diloco.evidence.table import Results, Runnable, Table
from diloco.evidence.train import Config, Result

SAY_EVERY_S = 10.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Unit:
    config: Runnable
    seed: int

    @property
    def cost(self) -> float:
        """Guess of its length, for the order and the estimate."""
        if not isinstance(self.config, Config):
            return 100.0
        return float(self.config.steps * len(self.config.speeds))


def seeds_of(table: Table, seeds: int) -> int:
    return min(seeds, table.seeds) if table.seeds else seeds


def units_of(tables: Iterable[Table], seeds: int) -> list[Unit]:
    """Long ones first, so that no worker is left alone with one at the end; then by seed."""
    units = {Unit(row.config, s): None for table in tables for row in table.rows for s in range(seeds_of(table, seeds))}
    return sorted(units, key=lambda unit: (-unit.cost, unit.seed))


def run_unit(unit: Unit) -> tuple[Unit, Result]:
    """On one thread: as fast for a model of this size, and the same numbers with any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return unit, unit.config.run(unit.seed)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}; in seed {unit.seed} of {unit.config}") from error
    finally:
        torch.set_num_threads(threads)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent leaves no worker that trains on for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _in_order(units: Sequence[Unit], workers: int) -> Iterator[Iterable[tuple[Unit, Result]]]:
    """Results as they come, of this process alone or of `workers` others."""
    if workers == 1 or len(units) < 2:
        yield map(run_unit, units)
        return
    # Not forked: torch's threads do not survive that.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(units)), mp_context=context, initializer=_start_worker)
    try:
        yield (done.result() for done in as_completed([pool.submit(run_unit, unit) for unit in units]))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C only what is running is waited for


def run_units(units: Sequence[Unit], workers: int, say: Say) -> dict[Unit, Result]:
    """Every unit's result. Says every 10 s how far it is and how long the rest will take."""
    results: dict[Unit, Result] = {}
    total = sum(unit.cost for unit in units)
    began = said = time.monotonic()
    done = 0.0
    with _in_order(units, workers) as finished:
        for unit, result in finished:
            results[unit] = result
            done += unit.cost
            now = time.monotonic()
            if now - said >= SAY_EVERY_S:
                said = now
                rest = (now - began) * (total - done) / done
                say(f"{len(results)} of {len(units)} runs, about {rest / 60:.1f} minutes to go")
    return results


def results_of(table: Table, results: dict[Unit, Result], seeds: int) -> Results:
    """The table's part, by row."""
    count = seeds_of(table, seeds)
    return {row.name: [results[Unit(row.config, seed)] for seed in range(count)] for row in table.rows}
