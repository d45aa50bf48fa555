"""Without a syncer on GPUs. Not part of a plain pytest run: pytest tests/gpu, on a machine that has them.

Each test says what it lacks when it is skipped. The numbers are compared with those of a Gloo group on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import diloco  # noqa: F401  (registers the operators that are asked for below)
from diloco.testing import LearnerProcess

pytestmark = pytest.mark.timeout(300)

GPUS = torch.cuda.device_count()
OPERATORS = ("fragment_diff", "fragment_adopt", "mean_merge", "rda_merge", "outer_step")
KERNELS = all(torch._C._dispatch_has_kernel_for_dispatch_key(f"diloco::{name}", "CUDA") for name in OPERATORS)
NO_NCCL = "this torch is built without NCCL"
needs_nccl = pytest.mark.skipif(not distributed.is_nccl_available(), reason=NO_NCCL)
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, found {GPUS}")
needs_a_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none")
needs_kernels = pytest.mark.skipif(not KERNELS, reason="this build of diloco has no CUDA kernels")

RUNS: dict[str, dict[str, Any]] = {
    "diloco": {"preset": "diloco", "sync_every": 5},
    "streaming": {"preset": "streaming", "sync_every": 6, "num_fragments": 2, "overlap_steps": 2},
    "rda": {"mode": "lockstep", "sync_every": 4, "num_fragments": 2, "overlap_steps": 1, "wire_dtype": "f32"},
}


class Pair:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack, self._runs = folder, stack, 0

    def __call__(self, event: str, backend: str, devices: tuple[str, str], settings: dict[str, Any]) -> list[Any]:
        """What both ranks said."""
        self._runs += 1
        script = Path(__file__).with_name("rank.py")
        ranks = []
        for rank, device in enumerate(devices):
            arguments = (self._folder / f"store{self._runs}", rank, backend, device, json.dumps(settings))
            ranks.append(self._stack.enter_context(LearnerProcess(*arguments, script=script, name=f"rank {rank}")))
        return [rank.wait_for(event, timeout_s=120) for rank in ranks]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


def flat(weights: list[list[float]]) -> torch.Tensor:
    return torch.cat([torch.tensor(values, dtype=torch.float64) for values in weights])


def assert_as_on_the_cpu(pair: Pair, done: list[Any], settings: dict[str, Any]) -> None:
    wanted = flat(pair("done", "gloo", ("cpu", "cpu"), settings)[0]["weights"])
    assert done[0]["weights"] == done[1]["weights"]  # bit for bit
    assert done[0]["merges"] >= 5
    assert float((flat(done[0]["weights"]) - wanted).norm() / wanted.norm()) <= 1e-5


@needs_nccl
@needs_two_gpus
@needs_kernels
@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_over_nccl(run: str, pair: Pair) -> None:
    done = pair("done", "nccl", ("cuda:0", "cuda:1"), RUNS[run])
    assert [one["waited_s"] for one in done] == [0.0, 0.0]
    assert_as_on_the_cpu(pair, done, RUNS[run])


@needs_nccl
@needs_two_gpus
@pytest.mark.skipif(KERNELS, reason="this build of diloco has CUDA kernels")
def test_nccl_without_kernels_is_refused_in_one_sentence(pair: Pair) -> None:
    refused = pair("refused", "nccl", ("cuda:0", "cuda:1"), RUNS["diloco"])
    for one in refused:
        assert "has no kernel of diloco::fragment_diff" in one["text"] and "use a gloo group" in one["text"]


@needs_a_gpu
@pytest.mark.parametrize("run", RUNS)
def test_gloo_with_the_model_on_a_gpu_goes_through_host_memory(run: str, pair: Pair) -> None:
    done = pair("done", "gloo", ("cuda:0", f"cuda:{GPUS - 1}"), RUNS[run])
    assert_as_on_the_cpu(pair, done, RUNS[run])


@needs_nccl
@needs_a_gpu
def test_a_model_on_the_cpu_over_nccl_is_refused(pair: Pair) -> None:
    if GPUS < 2:
        pytest.skip("NCCL wants a GPU for each of two ranks, found one")
    for one in pair("refused", "nccl", ("cpu", "cpu"), RUNS["diloco"]):
        assert "cannot move tensors that are on cpu" in one["text"]


def test_the_ranks_of_these_tests_on_the_cpu(pair: Pair) -> None:
    """Runs everywhere, so that the rest does not rot unseen."""
    for settings in RUNS.values():
        done = pair("done", "gloo", ("cpu", "cpu"), settings)
        assert done[0]["weights"] == done[1]["weights"] and done[0]["merges"] >= 5
