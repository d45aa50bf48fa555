"""Numbers for people."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if 0 < seconds < 0.001:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def bit_rate(bytes_per_s: float) -> str:
    """As networks are sold: decimal bits."""
    bits = 8 * bytes_per_s
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits < 999.5:  # 1000 when rounded
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Gbit/s"
