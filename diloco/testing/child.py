"""One real process under test: started, watched, stopped by signal, never left behind.

Every process dies with the process that started it (PR_SET_PDEATHSIG through setpriv) and with its ``with`` block. Its
output is drained by threads, so a chatty child never blocks on a full pipe, and waiting means blocking on that output
with a deadline, never sleeping. A failed wait raises ProcessError with the tail of what the process said.

PDEATHSIG follows the *thread* that called start(): start processes from a thread that outlives them.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, TypeVar

T = TypeVar("T")
Event = dict[str, Any]
DEADLINE_S = 90.0  # of a wait: far above what anything takes, because a loaded machine must not fail a test
_F_SETPIPE_SZ = 1031
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ProcessError(AssertionError):
    """A process ended, or did not say in time what was waited for."""


class Place(Protocol):
    """Where a process runs: something that turns a command into one run there (hosts.Host)."""

    def command(self, argv: Sequence[str]) -> list[str]: ...


def describe_exit(returncode: int | None) -> str:
    if returncode is None:
        return "is running"
    if returncode < 0:
        return f"was killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"exited with status {returncode}"


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment without DILOCO_* (settings must not leak into tests), one thread per library."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), env.get("PYTHONPATH")]))
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(extra or {})
    return env


class Process:
    """One child process. `events`: the JSON objects it printed on stdout, one a line, in order.

    An `event_pipe` is a second source of events: the write end of a pipe whose path (/dev/fd/N) replaces the text
    "{event_pipe}" in argv; its lines are also appended to `event_copy`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        place: Place | None = None,
        event_copy: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.events: list[Event] = []
        self.stdout_lines: list[str] = []
        self.stderr_lines: list[str] = []
        self._changed = threading.Condition()
        self._open_streams = 0
        self._threads: list[threading.Thread] = []

        pipe: tuple[int, int] | None = None
        if any("{event_pipe}" in word for word in self.argv):
            pipe = os.pipe()
            fcntl.fcntl(pipe[1], _F_SETPIPE_SZ, 1 << 20)
            self.argv = [word.replace("{event_pipe}", f"/dev/fd/{pipe[1]}") for word in self.argv]
        command = place.command(self.argv) if place else self.argv
        self._popen = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(env),
            cwd=cwd,
            text=True,
            encoding="utf-8",
            errors="replace",
            pass_fds=(pipe[1],) if pipe else (),
            start_new_session=True,
        )
        self.pid = self._popen.pid
        assert self._popen.stdout and self._popen.stderr
        self._drain(self._popen.stdout, self.stdout_lines, parse=True)
        self._drain(self._popen.stderr, self.stderr_lines, parse=False)
        if pipe:
            os.close(pipe[1])
            copy = open(event_copy, "a", encoding="utf-8") if event_copy else None  # noqa: SIM115
            self._drain(os.fdopen(pipe[0], encoding="utf-8"), [], parse=True, copy=copy)

    # -- what it says ------------------------------------------------------------------------------------------------

    def _drain(self, pipe: IO[str], lines: list[str], *, parse: bool, copy: IO[str] | None = None) -> None:
        def read() -> None:
            with pipe:
                for line in pipe:
                    if copy:
                        copy.write(line)
                        copy.flush()
                    event = _parse(line) if parse else None
                    with self._changed:
                        lines.append(line.rstrip("\n"))
                        if event is not None:
                            self.events.append(event)
                        self._changed.notify_all()
            if copy:
                copy.close()
            with self._changed:
                self._open_streams -= 1
                self._changed.notify_all()

        self._open_streams += 1
        thread = threading.Thread(target=read, name=f"drain {self.name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def mark(self) -> int:
        """Position after the last event so far, for wait_for(start=...)."""
        with self._changed:
            return len(self.events)

    def wait_for(
        self,
        event: str,
        where: Callable[[Event], bool] | None = None,
        *,
        timeout_s: float = DEADLINE_S,
        start: int = 0,
    ) -> Event:
        """The first event of this name, from position `start` on, for which `where` holds; blocks until it is there."""
        what = f"event {event!r}" + (" with the asked condition" if where else "")

        def matches(found: Event) -> bool:
            return found.get("event") == event and (where is None or where(found))

        return self._wait(self.events, matches, what, timeout_s, start)

    def wait_line(self, text: str, *, stream: str = "stderr", timeout_s: float = DEADLINE_S, start: int = 0) -> str:
        """The first line that contains `text`."""
        lines = self.stderr_lines if stream == "stderr" else self.stdout_lines
        return self._wait(lines, lambda line: text in line, f"{text!r} on {stream}", timeout_s, start)

    def _wait(self, items: list[T], matches: Callable[[T], bool], what: str, timeout_s: float, start: int) -> T:
        deadline = time.monotonic() + timeout_s
        at = start
        with self._changed:
            while True:
                while at < len(items):
                    if matches(items[at]):
                        return items[at]
                    at += 1
                if self._open_streams == 0:
                    problem = "closed its output"
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    problem = f"did not say it within {timeout_s:g} s"
                    break
                self._changed.wait(left)
        if self._open_streams == 0:
            with suppress(subprocess.TimeoutExpired):
                problem = describe_exit(self._popen.wait(2.0))
        raise ProcessError(f"waited for {what} from {self.name}, which {problem}\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """The last lines of its output, for failure messages."""
        with self._changed:
            parts = [f"--- {self.name} (pid {self.pid}) {describe_exit(self._popen.poll())}: {' '.join(self.argv)}"]
            for stream, text, count in (
                ("stdout", self.stdout_lines, lines // 4),
                ("stderr", self.stderr_lines, lines),
            ):
                parts += [f"--- {stream}, last {min(count, len(text))} of {len(text)} lines", *text[-count:]]
        return "\n".join(parts)

    # -- what is done to it ------------------------------------------------------------------------------------------

    def tell(self, line: str) -> None:
        """Writes one line to its stdin."""
        assert self._popen.stdin
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()

    def close_stdin(self) -> None:
        assert self._popen.stdin
        self._popen.stdin.close()

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Exit status, or minus the signal's number. Its output is complete once this returns."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{self.name} did not end within {timeout_s:g} s\n{self.tail()}") from None
        for thread in self._threads:  # bounded: a grandchild may hold the pipes open
            thread.join(5.0)
        return code

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> int:
        """SIGKILL; returns the wait status as subprocess gives it (-9)."""
        self._popen.kill()
        return self.wait()

    def terminate(self) -> None:
        self._popen.terminate()

    def pause(self) -> None:
        """SIGSTOP; returns once the process has really stopped."""
        self._popen.send_signal(signal.SIGSTOP)
        info = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if info is None or info.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
            raise ProcessError(f"{self.name} ended while it was being paused\n{self.tail()}")

    def resume(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it and whatever it started, at once. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        for thread in self._threads:
            thread.join(5.0)
        if self._popen.stdin:
            with suppress(BrokenPipeError):
                self._popen.stdin.close()

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """Resident memory; field "VmHWM" for its highest value so far."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise ProcessError(f"{self.name} has no {field}: it {describe_exit(self.returncode)}")

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None:
            error.add_note(self.tail())


def _parse(line: str) -> Event | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
