"""diloco.status(): asks a running syncer how it is."""

from __future__ import annotations

import json
from typing import Any

from diloco._native import _C


def status(syncer: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """What `diloco status` shows, as a dictionary: learners, fragments, open rounds, ledger, bytes, memory.

    Raises ValueError (malformed address), ConnectionError (nobody there, or no answer within `timeout_s` seconds).
    """
    out: dict[str, Any] = json.loads(_C.query_status(syncer, float(timeout_s)))
    return out
