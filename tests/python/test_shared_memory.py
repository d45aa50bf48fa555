"""F091: a container gives 64 MiB of shared memory; neither learner nor syncer uses any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, pathlib, sys, torch, diloco
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1024))
data = TensorDataset(torch.randn(320, 16), torch.zeros(320, 1024))
optimizer = diloco.DiLoCoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sys.argv[1])
for inputs, targets in DataLoader(data, batch_size=4, num_workers=2):
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.add_tokens(len(inputs))
    optimizer.step()
    optimizer.zero_grad()
mapped = {line.split()[5] for line in open("/proc/self/maps") if "/dev/shm" in line}
stats = optimizer.stats()
print(json.dumps({"event": "done", "merged": stats["contributions_merged"], "mapped": sorted(mapped),
                  "bytes": sum(p.numel() * 4 for p in model.parameters())}), flush=True)
optimizer.close()
"""


class SmallContainer:
    """A place whose /dev/shm holds 4 MiB, half of the model."""

    def command(self, argv: Sequence[str]) -> list[str]:
        mount = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, "sh", *argv]


@pytest.mark.netns
def test_no_shared_memory_is_needed(syncer: Callable[..., Any], program: Callable[..., Any]) -> None:
    """A model larger than /dev/shm, DataLoader workers that use it, learner and syncer: no SIGBUS, nothing of ours."""
    place = SmallContainer()
    s = syncer(place=place, sync_every=8, num_fragments=2)
    learner = program(s.endpoint, code=PROGRAM, place=place)
    report = learner.wait_for("done")
    assert learner.wait() == 0, learner.tail()
    assert report["bytes"] > 4 << 20
    assert report["merged"] > 0
    # DataLoader's tensors, and the semaphores of Python's multiprocessing.
    assert all(Path(name).name.startswith(("torch_", "sem.")) for name in report["mapped"]), report["mapped"]
    maps = Path(f"/proc/{s.pid}/maps").read_text()
    assert "diloco-syncer" in maps  # it is the syncer's own, not the shell's
    assert "/dev/shm" not in maps
    assert s.stop() == 0
