"""diloco.Syncer: the syncer inside a Python process, the same class as the native program."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import Tensor

from diloco import _exit, config
from diloco._native import _C

_ARGUMENTS = ("bind", "insecure", "event_log", "endpoint_file", "merge_threads", "shutdown_s")


class Syncer:
    """Holds the global weights, merges what learners send. Its threads never touch Python.

    Args:
        bind: "host:port"; port 0 lets the kernel choose, `endpoint` tells which.
        insecure: allow an address other than loopback. Anyone who reaches the port may then take part.
        event_log: file that gets one JSON line per event, appended.
        endpoint_file: file that gets the real endpoint once bound.
        merge_threads: threads that check and merge contributions.
        shutdown_s: how long stop() lets open rounds finish.
        settings: names of the settings table; DILOCO_<NAME> variables count where no argument is given.

    Raises ValueError (wrong setting), TypeError (unknown setting), ConnectionError (port in use).
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        insecure: bool = False,
        event_log: str | os.PathLike[str] | None = None,
        endpoint_file: str | os.PathLike[str] | None = None,
        merge_threads: int = 1,
        shutdown_s: float = 10.0,
        **settings: config.SettingValue,
    ) -> None:
        self._shutdown_s = float(shutdown_s)
        self._c = _C.Syncer(
            settings=config.environment_settings() | config.setting_texts(settings, "diloco.Syncer", _ARGUMENTS),
            bind=bind,
            insecure=insecure,
            merge_threads=merge_threads,
            event_log=os.fspath(event_log) if event_log is not None else "",
            endpoint_file=os.fspath(endpoint_file) if endpoint_file is not None else "",
            shutdown_s=self._shutdown_s,
        )
        _exit.close_syncer_at_exit(self)

    @property
    def endpoint(self) -> str:
        """Address as learners want it, "host:port"."""
        return self._c.endpoint().removeprefix("tcp://")

    @property
    def running(self) -> bool:
        return self._c.running()

    def status(self) -> dict[str, Any]:
        """What `diloco status` shows."""
        out: dict[str, Any] = json.loads(self._c.status_json())
        return out

    def weights(self) -> dict[str, Tensor]:
        """A float32 copy of the global weights by name, tied names included; empty until a learner has joined."""
        out: dict[str, Tensor] = {}
        for name, tensor, aliases in self._c.weights():
            out |= dict.fromkeys((name, *aliases), tensor)
        return out

    def stop(self, shutdown_s: float | None = None) -> None:
        """Finishes open rounds or gives up after `shutdown_s`; ends all threads. Idempotent."""
        self._c.stop(self._shutdown_s if shutdown_s is None else float(shutdown_s))

    def __enter__(self) -> Syncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<diloco.Syncer at {self.endpoint}>"

    def __getstate__(self) -> object:
        raise TypeError("a diloco.Syncer is a running server and cannot be copied or pickled")

    def _close_at_exit(self) -> None:
        self.stop(0.0)
