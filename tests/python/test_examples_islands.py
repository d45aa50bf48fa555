"""The examples of islands, run as their heads say: a syncer, two islands of two ranks, and checks of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.testing import child_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_islands(name: str, sized: Callable[[str, int, int], int]) -> None:
    """Five merged rounds of both, and losses that fall by a tenth: it looks at that itself."""
    argv = [sys.executable, f"examples/{name}_island.py", "--steps", str(sized("steps", 60, 200))]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT, env=child_environment()
    )
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert done.stdout.count("ok: ") == 3, output
    assert "FAILED" not in output
    # Of a DDP island rank 0 sends the model, of an FSDP2 island each rank its half.
    found = re.findall(r"\[([ab])\] rank ([01]) of 2 sent ([0-9.]+) MiB", done.stdout)
    sent = {(island, rank): float(mib) for island, rank, mib in found}
    assert len(sent) == len(found) == 4, output
    for island in "ab":
        assert sent[island, "0"] > 0.1
        share = sent[island, "1"] / sent[island, "0"]
        assert share == 0 if name == "ddp" else 0.9 < share < 1.1
