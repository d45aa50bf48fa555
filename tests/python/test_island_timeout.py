"""A rank that goes silent: what the ranks of an island tell each other ends with the timeout of the island's group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diloco.testing import LearnerProcess

RANK = """
import datetime, json, sys, torch, torch.distributed as dist, diloco

rank, store, syncer = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
island = dist.new_group(timeout=datetime.timedelta(seconds=4))  # both are here now
model = torch.nn.Linear(4, 4)
learner = diloco.Learner(model, syncer=syncer, learner_id="a", island=island)
print(json.dumps({"event": "made"}), flush=True)
if rank == 1:
    sys.stdin.read()
    sys.exit()
try:
    for step in range(3):
        learner.step()
except ConnectionError as error:
    print(json.dumps({"event": "failed", "step": step, "text": str(error)}), flush=True)
"""


def test_a_silent_rank_is_an_error_after_the_timeout_of_the_group(
    program: Callable[..., LearnerProcess], nobody: str, tmp_path: Path
) -> None:
    ranks = [program(rank, tmp_path / "store", nobody, code=RANK, name=f"rank {rank}") for rank in range(2)]
    for rank in ranks:
        rank.wait_for("made")
    failed = ranks[0].wait_for("failed", timeout_s=60)  # torch's own default is half an hour
    assert failed["text"].startswith("island: rank 0 of 2: all_reduce failed, a rank of the group has ended or is late")
    # Gloo's words for it; which of them depends on what it looks at first, the wait or the pair that it has closed.
    assert "4000ms" in failed["text"] or "timeout" in failed["text"]
    assert failed["text"].endswith("end all ranks, start them again and resume from a checkpoint")
