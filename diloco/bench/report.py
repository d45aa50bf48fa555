"""The report of a benchmark: the keys every report of the package has, and `results`, one for each row."""

from __future__ import annotations

import os
import sys
from typing import Any

from diloco._report import common
from diloco.bench.rows import Row


def report(what: str, rows: list[Row], **values: Any) -> dict[str, Any]:
    """`ok`: every goal is reached."""
    return {
        **common(f"diloco.bench.{what}.1", " ".join(["diloco", *sys.argv[1:]]), 0),
        "ok": all(row.reached for row in rows),
        **values,
        "results": [row.values() for row in rows],
    }


def cores() -> int:
    return len(os.sched_getaffinity(0))
