"""What a sync takes of the accelerator: `pytest tests/gpu` on a machine with CUDA; elsewhere it is skipped."""

from __future__ import annotations

import pytest
import torch

import diloco

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SETTINGS = {"sync_every": 4, "num_fragments": 4, "wire_dtype": "bf16"}


def filled_model(share: float) -> tuple[torch.nn.ParameterList, list[torch.Tensor]]:
    """Parameters, and ballast that leaves free only a share of the device's memory."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4096, 4096, device="cuda")) for _ in range(8)])
    free, _ = torch.cuda.mem_get_info()
    _, total = torch.cuda.mem_get_info()
    ballast = max(0, free - int((1 - share) * total))
    return model, [torch.empty(ballast, dtype=torch.uint8, device="cuda")]


def sync_three_times(model: torch.nn.ParameterList, learner: diloco.Learner) -> None:
    fragments = len(learner.stats()["versions"])
    for _ in range(10_000):
        if learner.stats()["contributions_merged"] >= 3 * fragments:
            return
        with torch.no_grad():
            for parameter in model:
                parameter.mul_(0.999)
        learner.step(8)
    pytest.fail("three syncs of every fragment did not come in 10000 steps")


def test_a_sync_takes_at_most_one_fragment_of_device_memory() -> None:
    """F088: a model that fills 90 % of the device trains across three syncs."""
    model, ballast = filled_model(0.9)
    largest = max(fragment.numel for fragment in diloco.explain(model, **SETTINGS).fragments)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with diloco.Syncer(**SETTINGS) as syncer, diloco.Learner(model, syncer.endpoint, learner_id="a") as learner:
        sync_three_times(model, learner)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 4 * largest, f"{extra} bytes of device memory beside the model, one fragment has {4 * largest}"
    del ballast


def test_nothing_large_is_page_locked() -> None:
    """F089: one tensor of 2 GiB syncs with little page-locked memory, whatever `ulimit -l` says."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2**29, device="cuda"))])
    with diloco.Syncer(**SETTINGS) as syncer, diloco.Learner(model, syncer.endpoint, learner_id="a") as learner:
        sync_three_times(model, learner)
        locked = [line for line in open("/proc/self/status") if line.startswith(("VmLck", "VmPin"))]  # noqa: SIM115
    assert sum(int(line.split()[1]) for line in locked) * 1024 <= 1 << 30, locked
