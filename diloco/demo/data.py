"""The demo's text: the source of Python's own standard library, as found on this machine, as bytes.

Every file belongs to exactly one part, chosen by a checksum of its path: one part is held out and never trained on, the
others are the learners' shards. Nothing is downloaded.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

HELD_OUT = -1
HELD_OUT_SHARE = 16  # one file in so many
LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
LEAST_BYTES = 200_000  # of one part


def library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[Path]:
    """Every *.py below `root` except tests and installed packages, relative to it, sorted."""
    found = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in LEFT_OUT_FOLDERS]
        found += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda p: p.as_posix())


def part_of(file: Path, shards: int) -> int:
    """HELD_OUT or the number of the shard the file belongs to."""
    number = zlib.crc32(file.as_posix().encode())
    return HELD_OUT if number % HELD_OUT_SHARE == 0 else number // HELD_OUT_SHARE % shards


def load_part(part: int, shards: int, root: Path | None = None) -> torch.Tensor:
    """The bytes of one part, one after the other, as a uint8 tensor."""
    root = root or library_folder()
    text = bytearray()
    for file in source_files(root):
        if part_of(file, shards) == part:
            text += (root / file).read_bytes()
    if len(text) < LEAST_BYTES:
        raise RuntimeError(
            f"the demo trains on the source of Python's standard library; expected {LEAST_BYTES} bytes or more for each"
            f" part, {root} gives {len(text)} for one; install the full standard library of this Python"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(text: torch.Tensor, seed: int, batch: int, context: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, next bytes), each (batch, context) int64, from random places of `text`."""
    generator = torch.Generator().manual_seed(seed)
    ahead = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        window = text[starts + ahead].long()
        yield window[:, :-1], window[:, 1:]


def held_out_windows(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """`count` evenly spaced windows of context + 1 bytes, int64: always the same ones."""
    starts = torch.linspace(0, len(text) - context - 1, count).long()[:, None]
    return text[starts + torch.arange(context + 1)].long()
