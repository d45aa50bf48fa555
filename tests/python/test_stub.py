"""diloco/_C.pyi says what the built module has, and the package is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import diloco

ROOT = Path(__file__).parents[2]


def test_stub_matches_the_module() -> None:
    allowed = ROOT / "tools" / "stubtest_allowlist.txt"
    command = [sys.executable, "-m", "mypy.stubtest", "diloco._C", "--allowlist", str(allowed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_typed() -> None:
    assert (Path(diloco.__file__).parent / "py.typed").exists()
