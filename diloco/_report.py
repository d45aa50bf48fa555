"""What every report of the package has in common, and whether its file can be written."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def why_unwritable(path: str) -> str:
    """The reason, or "". Leaves no file behind and an existing one as it is."""
    if path == "-":
        return "standard output has the progress"
    existed = Path(path).exists()
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        return str(error.strerror)
    if not existed:
        Path(path).unlink()
    return ""


def common(schema: str, command: str, seed: int) -> dict[str, Any]:
    """The keys of every report: schema, command, commit, machine, seed, software."""
    return {
        "schema": schema,
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "seed": seed,
        "software": software(),
    }


def commit() -> str:
    """Of the checkout the package runs from; "" when it is installed from a wheel."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        return ""
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {"cpu": cpu, "cores": cores, "memory_bytes": memory, "os": f"{platform.system()} {platform.release()}"}


def software() -> dict[str, str]:
    import torch

    import diloco

    return {"diloco": diloco.__version__, "python": platform.python_version(), "torch": torch.__version__}
