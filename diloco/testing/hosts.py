"""Hosts as network namespaces, without names: each is an open file descriptor of this process.

Nothing is left behind whatever happens: the kernel removes a namespace, its interfaces and its rules with the last
descriptor and the last process in it, and every process started through diloco.testing dies with its parent. Needs
root on Linux and iproute2, iptables, util-linux; missing() says what is absent. netem is never used.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "iptables": "iptables", "nsenter": "util-linux", "setpriv": "util-linux"}


class HostError(RuntimeError):
    """A command that shapes the test network failed."""


def missing() -> str:
    """Why hosts cannot be made here, or "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = sorted({f"{tool} ({package})" for tool, package in _TOOLS.items() if not shutil.which(tool)})
    if absent:
        return "not installed: " + ", ".join(absent)
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun does not exist"
    try:
        Host("probe").close()
    except (OSError, HostError) as error:
        return f"namespaces cannot be made: {error}"
    return ""


def _in_thread(function: Callable[[], T]) -> T:
    """Runs `function` in a thread of its own: a thread's network namespace ends with it."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="in a host")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


class Host:
    """A machine of its own as far as the network goes: interfaces, addresses, ports, filters.

    hostname, hosts_file: what processes here see as host name and /etc/hosts (they see the real ones otherwise).
    """

    def __init__(self, name: str, *, hostname: str | None = None, hosts_file: str | os.PathLike[str] | None = None):
        self.name = name
        self.hostname = hostname
        self.hosts_file = hosts_file
        self._fd = _in_thread(_new_namespace)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"  # for nsenter and ip, from any process
        self._iptables = "iptables"
        try:
            self.run("ip", "link", "set", "lo", "up")
            # Only what a test sends is on its links: no IPv6 neighbour or router chatter takes part in loss and counts.
            switch = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
            self.run("sh", "-c", f"if [ -w {switch} ]; then echo 1 > {switch}; fi")
        except HostError:
            self.close()
            raise

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs in this host, in the same process (exec all the way, so signals arrive)."""
        inside = list(argv)
        if self.hostname or self.hosts_file:
            shell = 'if [ -n "$1" ]; then hostname "$1"; fi; if [ -n "$2" ]; then mount --bind "$2" /etc/hosts; fi'
            names = [self.hostname or "", os.path.abspath(self.hosts_file) if self.hosts_file else ""]
            shell = f'set -e; {shell}; shift 2; exec "$@"'
            inside = ["unshare", "--uts", "--mount", "--", "sh", "-c", shell, "sh", *names, *inside]
        return ["nsenter", "--net=" + self.path, "--", *inside]

    def run(self, *argv: str, timeout_s: float = 20.0) -> str:
        """Runs a short command here and returns its stdout; HostError with its stderr if it fails."""
        command = ["nsenter", "--net=" + self.path, "--", *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode != 0:
            raise HostError(
                f"host {self.name}: `{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout

    def run_quietly(self, *argv: str) -> bool:
        """run() whose failure is an answer."""
        try:
            self.run(*argv)
        except (HostError, OSError):
            return False
        return True

    @property
    def alive(self) -> bool:
        return self._fd >= 0

    def iptables(self, *argv: str) -> str:
        """iptables, by whichever of its two back ends this kernel offers."""
        try:
            return self.run(self._iptables, "-w", "5", *argv)
        except HostError:
            if self._iptables == "iptables-legacy" or not shutil.which("iptables-legacy"):
                raise
            text = self.run("iptables-legacy", "-w", "5", *argv)
            self._iptables = "iptables-legacy"
            return text

    def call(self, function: Callable[[], T]) -> T:
        """Calls `function` in a thread inside this host; sockets it makes stay inside, whoever uses them later."""

        def enter() -> T:
            _enter(self._fd)
            return function()

        return _in_thread(enter)

    def socket(self, kind: int = socket.SOCK_DGRAM) -> socket.socket:
        """A socket of this host, usable from any thread of the caller."""
        return self.call(lambda: socket.socket(socket.AF_INET, kind))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def _new_namespace() -> int:
    if _libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET): " + os.strerror(ctypes.get_errno()))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))
