"""Words for error messages and notices: every one says what was expected, what came, and what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

logger = logging.getLogger("diloco")


def describe_tensor(tensor: torch.Tensor) -> str:
    """For example ``float32 (10, 64)``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
        return f"uninitialised {dtype}"
    return f"{dtype} {tuple(tensor.shape)}"


def name_list(names: Iterable[str], most: int = 5) -> str:
    """The first few names, quoted, and how many more there are."""
    every = list(names)
    text = ", ".join(f"'{name}'" for name in every[:most])
    return text if len(every) <= most else f"{text} and {len(every) - most} more"
