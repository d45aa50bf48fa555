"""What this machine has: memory, addresses, descriptors. Linux; the files are read below `root`."""

from __future__ import annotations

import array
import fcntl
import resource
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s16s8x")  # struct ifreq on 64-bit Linux: name, sockaddr, rest of the union
_CGROUP = Path("sys/fs/cgroup")


class Memory(NamedTuple):
    """Bytes that can still be had, and what bounds them."""

    available: int
    bound: str  # "the machine" or the control group's folder


class Interface(NamedTuple):
    """One IPv4 address of this machine."""

    name: str
    address: str


def memory(root: Path = Path("/")) -> Memory:
    """The least of what the kernel says is available and of what every control group around us leaves."""
    best = Memory(_meminfo(root)["MemAvailable"], "the machine")
    for folder, limit, used in _groups(root):
        left = max(0, limit - used)
        if left < best.available:
            best = Memory(left, f"control group {folder} (limit {limit} bytes)")
    return best


def machine_memory(root: Path = Path("/")) -> int:
    """All there is, which the syncer's default for payload_memory_bytes goes by."""
    return _meminfo(root)["MemTotal"]


def _meminfo(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def _groups(root: Path) -> list[tuple[Path, int, int]]:
    """Folder, limit and use of the control groups with a limit that this process is in; version 2 and version 1.

    Page cache that can be given back at once is not in use.
    """
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version_1 = bool(controllers)
        top = root / _CGROUP / ("memory" if version_1 else "")
        limit_file, used_file, cache = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if version_1
            else ("memory.max", "memory.current", "inactive_file")
        )
        here = top / path.lstrip("/")
        # In a container the path may be that of the host, and the group the one that is mounted.
        folders = [here, *here.parents] if here.is_dir() else [top]
        for folder in folders:
            limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(pair.split() for pair in _read(folder / "memory.stat").splitlines())
                found.append((folder, int(limit), int(used) - int(stat.get(cache, 0))))
            if folder == top:
                break
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def interfaces() -> list[Interface]:
    """Every IPv4 address of this machine, of interfaces that are up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        size = 1 << 14
        while True:
            buffer = array.array("B", bytes(size))
            asked = struct.pack("iL", size, buffer.buffer_info()[0])
            length = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, asked))[0]
            if length < size:
                break
            size *= 2
    found = []
    for at in range(0, length, _IFREQ.size):
        name, address = _IFREQ.unpack_from(buffer, at)
        family = struct.unpack_from("=H", address)[0]
        if family == socket.AF_INET:
            found.append(Interface(name.split(b"\0")[0].decode(), socket.inet_ntoa(address[4:8])))
    return found


def interface_of(address: str) -> str:
    """Name of the interface that has this address, or ""."""
    return next((one.name for one in interfaces() if one.address == address), "")


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def open_files_limit() -> int:
    """How many descriptors a process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft


def resolve(host: str) -> list[str]:
    """IPv4 addresses of a name. OSError whose text says why there are none."""
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
