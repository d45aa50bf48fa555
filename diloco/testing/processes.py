"""The processes of a run: a native syncer, any Python program, a tiny learner. All of them are a child.Process."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.testing.child import DEADLINE_S, Event, Place, Process, ProcessError, describe_exit

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def syncer_program() -> str:
    """The native program that belongs to the imported package, else the one on PATH."""
    inside = _PACKAGE_ROOT / "diloco" / "bin" / "diloco-syncer"
    found = str(inside) if inside.exists() else shutil.which("diloco-syncer")
    if found is None:
        raise FileNotFoundError(f"no diloco-syncer: expected {inside} or one on PATH; run `make setup` first")
    return found


class SyncerProcess(Process):
    """A real `diloco-syncer`. `events` are the lines of its event log, as they are written.

    settings: names of Settings, for example min_quorum=2. `program`: another command line in front of the options.
    """

    def __init__(
        self,
        *,
        bind: str = "127.0.0.1:0",
        insecure: bool = False,
        event_log: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
        program: Sequence[str] | None = None,
        name: str = "syncer",
        env: Mapping[str, str] | None = None,
        place: Place | None = None,
        timeout_s: float = DEADLINE_S,
        **settings: object,
    ) -> None:
        self.place = place
        argv = [*(program or [syncer_program()]), "--bind", bind, "--event-log", "{event_pipe}"]
        if insecure:
            argv.append("--insecure")
        for setting, value in settings.items():
            argv += ["--" + setting.replace("_", "-"), str(value)]
        argv += options
        super().__init__(argv, name=name, env=env, place=place, event_copy=event_log)
        self._again: dict[str, Any] = {"insecure": insecure, "event_log": event_log, "options": options}
        self._again |= {"program": program, "name": name, "env": env, "place": place}
        self._again |= {"timeout_s": timeout_s, **settings}
        try:
            line = self.wait_line("listening on ", stream="stdout", timeout_s=timeout_s)
        except ProcessError:
            self.close()
            raise
        self.endpoint = line.split("listening on ")[1].strip().removeprefix("tcp://")

    @property
    def port(self) -> int:
        return int(self.endpoint.rsplit(":", 1)[1])

    def status(self, timeout_s: float = 30.0) -> Event:
        """What `diloco status` shows."""
        import diloco

        # From inside its host: the address may mean nothing outside.
        call: Callable[..., Any] = getattr(self.place, "call", lambda function: function())
        status: Event = call(lambda: diloco.status(self.endpoint, timeout_s=timeout_s))
        return status

    def wait_merges(
        self, learner_id: str, count: int = 1, *, start: int | None = None, timeout_s: float = DEADLINE_S
    ) -> None:
        """Blocks until `count` rounds with this learner have been merged, counted from position `start` of the events
        (default: from now). The deadline is for each of them."""

        def has_learner(event: Event) -> bool:
            return any(member["learner"] == learner_id for member in event["members"])

        at = self.mark() if start is None else start
        for _ in range(count):
            found = self.wait_for("merge", has_learner, start=at, timeout_s=timeout_s)
            at = next(i for i in range(at, len(self.events)) if self.events[i] is found) + 1

    def stop(self, timeout_s: float = DEADLINE_S) -> int:
        """SIGTERM; returns the exit status."""
        self.terminate()
        return self.wait(timeout_s)

    def restart(self, **changes: Any) -> SyncerProcess:
        """A new syncer on the same port, without any state of the old one, which must have ended."""
        if self.running:
            raise ProcessError(f"{self.name} is still running: kill() or stop() it before restart()")
        return SyncerProcess(bind=self.endpoint, **{**self._again, **changes})


class LearnerProcess(Process):
    """A Python program (a file, a module, or program text) that prints JSON lines on stdout."""

    def __init__(
        self,
        *arguments: object,
        module: str | None = None,
        script: str | os.PathLike[str] | None = None,
        code: str | None = None,
        name: str = "learner",
        env: Mapping[str, str] | None = None,
        place: Place | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        if sum(source is not None for source in (module, script, code)) != 1:
            raise ValueError("expected exactly one of module=, script=, code=")
        run = ["-m", module] if module else [str(script)] if script else ["-c", code or ""]
        argv = [sys.executable, *run, *(str(argument) for argument in arguments)]
        super().__init__(argv, name=name, env=env, place=place, cwd=cwd)


class TinyLearner(LearnerProcess):
    """diloco.testing.tiny_learner as a process; see its --help for the options."""

    def __init__(
        self,
        syncer: str,
        learner_id: str,
        *,
        env: Mapping[str, str] | None = None,
        place: Place | None = None,
        **options: object,
    ) -> None:
        arguments: list[object] = ["--syncer", syncer, "--id", learner_id]
        for option, value in options.items():
            text = json.dumps(value) if isinstance(value, Mapping) else value
            arguments += ["--" + option.replace("_", "-"), text]
        module = "diloco.testing.tiny_learner"
        super().__init__(*arguments, module=module, name=f"learner {learner_id}", env=env, place=place)
        self.learner_id = learner_id

    def steps(self, count: int, *, timeout_s: float = DEADLINE_S) -> Event:
        """Blocks until `count` more steps than now have been made; the event of the last of them."""
        start = self.mark()
        done = max((event["step"] for event in self.events[:start] if event.get("event") == "step"), default=0)
        return self.wait_for("step", lambda event: event["step"] >= done + count, timeout_s=timeout_s, start=start)

    def last(self, event: str = "step") -> Event:
        """The newest event of this name."""
        with self._changed:
            return next(found for found in reversed(self.events) if found.get("event") == event)

    def finish(self, timeout_s: float = DEADLINE_S) -> Event:
        """Lets it end at its next step boundary; its closing report."""
        self.close_stdin()
        report = self.wait_for("done", timeout_s=timeout_s)
        code = self.wait(timeout_s)
        if code != 0:
            raise ProcessError(f"{self.name} {describe_exit(code)} after its report\n{self.tail()}")
        return report
