"""Test kit: real processes, hosts as network namespaces, links with faults. Used by this package's own tests and free
for yours. Nothing here is imported by `import diloco`."""

from diloco.testing.child import Process, ProcessError, child_environment, describe_exit
from diloco.testing.hosts import Host, HostError, missing
from diloco.testing.link import Link, Shape, connect
from diloco.testing.processes import LearnerProcess, SyncerProcess, TinyLearner, syncer_program
from diloco.testing.tap import Tap, TapConnection

__all__ = [
    "Host",
    "HostError",
    "LearnerProcess",
    "Link",
    "Process",
    "ProcessError",
    "Shape",
    "SyncerProcess",
    "Tap",
    "TapConnection",
    "TinyLearner",
    "child_environment",
    "connect",
    "describe_exit",
    "missing",
    "syncer_program",
]
