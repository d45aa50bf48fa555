"""`diloco bench merge`: the syncer's arithmetic beside what memory gives and beside the same merge in eager torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from diloco._native import _C
from diloco.bench.rows import Row
from diloco.bench.timing import Seconds, in_turn, ratios

MEMBERS = 8
_LR, _MOMENTUM = 0.7, 0.9
_SPIN_S = (
    0.05  # torch's threads stay on their cores for a while after their work; what is measured next must not see them
)
_TYPES = {False: torch.float32, True: torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """`millions`: elements of the fragment, in millions. `megabytes`: of each array of the yardstick."""

    millions: float = 16.0
    threads: int = 2
    turns: int = 9
    megabytes: int = 256

    @property
    def elements(self) -> int:
        return int(self.millions * 1e6)

    def memory_bytes(self) -> int:
        """At most, all shapes one after the other."""
        return 3 * self.megabytes * 10**6 + self.elements * (8 * MEMBERS + 80)


@dataclass(frozen=True)
class Shape:
    """Tensors of so many elements, and how many times as fast as torch's the merge must be."""

    tensor: int
    size: str  # in the names of rows
    bf16: bool
    torch_goal: float

    @property
    def dtype(self) -> str:
        return "bf16" if self.bf16 else "f32"

    @property
    def text(self) -> str:
        tensors = "one tensor" if self.size == "one" else f"tensors of {self.size.upper()}"
        return f"{tensors}, {self.dtype}"


def shapes(options: Options) -> list[Shape]:
    return [
        Shape(10**6, "1m", False, 2.0),
        Shape(10**6, "1m", True, 4.0),
        Shape(16 * 10**3, "16k", True, 10.0),
        Shape(options.elements, "one", True, 20.0),
    ]


class TorchMerge:
    """The same merge by in-place operations of eager torch: norms, RDA of each tensor, Nesterov, the outgoing copy."""

    def __init__(self, elements: int, shape: Shape) -> None:
        sizes = [min(shape.tensor, elements - at) for at in range(0, elements, shape.tensor)]
        dtype = _TYPES[shape.bf16]
        generator = torch.Generator().manual_seed(1)
        self.deltas = [
            [torch.empty(n).uniform_(-1e-3, 1e-3, generator=generator).to(dtype) for _ in range(MEMBERS)] for n in sizes
        ]
        self.thetas = [torch.zeros(n) for n in sizes]
        self.momenta = [torch.zeros(n) for n in sizes]
        self.images = [torch.empty(n, dtype=dtype) for n in sizes]

    @torch.no_grad()
    def run(self) -> float:
        start = time.perf_counter()
        for deltas, theta, momentum, image in zip(self.deltas, self.thetas, self.momenta, self.images, strict=True):
            merged = _rda(deltas)
            momentum.mul_(_MOMENTUM).add_(merged)
            theta.add_(merged, alpha=-_LR).add_(momentum, alpha=-_LR * _MOMENTUM)
            image.copy_(theta)
        took = time.perf_counter() - start
        time.sleep(_SPIN_S)
        return took


def _rda(deltas: list[Tensor]) -> Tensor:
    norms = torch.stack([torch.linalg.vector_norm(delta, dtype=torch.float32) for delta in deltas])
    factors = (1 / norms).tolist()
    direction: Tensor = deltas[0].float() * factors[0] if deltas[0].dtype != torch.float32 else deltas[0] * factors[0]
    for delta, factor in zip(deltas[1:], factors[1:], strict=True):
        direction.add_(delta, alpha=factor)
    direction.mul_(norms.mean() / torch.linalg.vector_norm(direction))
    return direction


def measure(options: Options, say: Callable[[str], None]) -> list[Row]:
    """The rows of the table. `say` hears what is being measured. Takes options.memory_bytes() of memory."""
    rows: list[Row] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        for shape in shapes(options):
            say(f"merge of {MEMBERS} contributions of {options.millions:g} M elements, {shape.text}")
            rows += _rows(options, shape)
    finally:
        torch.set_num_threads(threads)
    return rows


def _rows(options: Options, shape: Shape) -> Iterator[Row]:
    native = _C.Workloads(options.threads)
    native.add_memory(options.megabytes)
    native.add_merge(options.elements, shape.tensor, MEMBERS, shape.bf16)
    in_torch = TorchMerge(options.elements, shape)
    runs = {name: partial(native.run, name) for name in ("triad", "mean", "rda", "rda from memory")}
    seconds = in_turn({**runs, "torch": in_torch.run}, options.turns)
    size = native.bytes()
    if shape.size == "1m":
        text = f"mean + Nesterov, {shape.text}"
        yield _beside_triad(seconds, size, "mean", f"merge_mean_{shape.dtype}", text, 1.2)
    if shape.size == "1m" and shape.bf16:
        text = f"RDA + Nesterov from memory, {shape.text}"
        yield _beside_triad(seconds, size, "rda from memory", "merge_rda_bf16", text, 1.0)
        text = f"RDA from last byte to weights, {shape.text}"
        yield _times(seconds, "rda", "mean", "merge_rda_arrived_bf16", text, "<=", 1.5, "weighted mean")
    name, text = f"merge_rda_torch_{shape.size}_{shape.dtype}", f"RDA + Nesterov from memory, {shape.text}"
    yield _times(seconds, "torch", "rda from memory", name, text, ">=", shape.torch_goal, "eager torch in place")


def _beside_triad(seconds: Seconds, size: dict[str, int], what: str, name: str, text: str, goal: float) -> Row:
    """Bytes a second beside those of the triad."""
    least, middle, largest = ratios(seconds["triad"], seconds[what], size[what] / size["triad"])
    speed = {key: size[key] / statistics.median(seconds[key]) / 1e9 for key in (what, "triad")}
    return Row(name, text, speed[what], "GB/s", speed["triad"], "triad", middle, least, largest, ">=", goal)


def _times(
    seconds: Seconds, over: str, under: str, name: str, text: str, op: Literal[">=", "<="], goal: float, beside: str
) -> Row:
    """Time of `over` beside that of `under`; the yardstick is the one of both that is not ours."""
    least, middle, largest = ratios(seconds[over], seconds[under])
    ours, other = (under, over) if op == ">=" else (over, under)
    value, yardstick = (1e3 * statistics.median(seconds[key]) for key in (ours, other))
    return Row(name, text, value, "ms", yardstick, beside, middle, least, largest, op, goal)
