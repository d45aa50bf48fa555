"""Starting and ending the demo's processes so that none is left behind, however the demo ends.

Children get a session of their own (a Ctrl-C in the terminal reaches only the parent, which then ends them) and ask the
kernel to be killed when the parent dies, which also covers a SIGKILL of the parent.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Called by a child first thing: SIGKILL to itself when the thread that started it ends. Linux; else a no-op."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def child_environment() -> dict[str, str]:
    """One thread per process; no DILOCO_* settings of the user: the demo is a fixed experiment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def syncer_command() -> list[str]:
    """The native program shipped in the package, else the same thing embedded in Python."""
    native = Path(__file__).resolve().parents[1] / "bin" / "diloco-syncer"
    if native.is_file() and os.access(native, os.X_OK):
        return [str(native)]
    found = shutil.which("diloco-syncer")
    return [found] if found else [sys.executable, "-m", "diloco", "syncer"]


class Children:
    """The processes of one run. Start them from the main thread only (PR_SET_PDEATHSIG follows the thread)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[subprocess.Popen[bytes]] = []
        self.logs: dict[int, Path] = {}

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Output goes to NAME.log in the run's folder."""
        path = self._folder / f"{name}.log"
        with path.open("ab") as log:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
            )
        self._all.append(child)
        self.logs[child.pid] = path
        return child

    def kill(self, child: subprocess.Popen[bytes]) -> int:
        """SIGKILL; returns the wait status as the kernel gives it."""
        os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        return status

    def last_words(self, child: subprocess.Popen[bytes], lines: int = 12) -> str:
        path = self.logs[child.pid]
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def end_all(self, patience_s: float = 2.0) -> None:
        """SIGTERM, a short wait, SIGKILL, and every one reaped. Safe to call twice."""
        alive = [child for child in self._all if child.poll() is None]
        for child in alive:
            child.terminate()
        deadline = time.monotonic() + patience_s
        for child in alive:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
