"""What ranks of an island must agree on; what happens when one does not come, or dies: words on all ranks, no hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from island_ranks import Job
from toys import QUICK, dead_address

from diloco.testing import SyncerProcess

Start = Callable[..., Job]

# type and words on every rank; {here}: this rank
REFUSED: dict[str, tuple[str, str]] = {
    "partial": ("ValueError", r"rank 0: parameter 'w' has the placement Partial.*expected Shard or Replicate"),
    "shape": ("ValueError", r"disagree on the model: rank 0 has '2.weight' \(float32 \(5, 33\)\) where rank 1 has"
              r" '2.weight' \(float32 \(5, 34\)\); build the same model on all ranks"),
    "name": ("ValueError", r"rank 0 has '2.weight' .* where rank 1 has 'other'"),
    "dtype": ("ValueError", r"rank 0 has '2.weight' \(float32 .* where rank 1 has '2.weight' \(bfloat16"),
    "count": ("ValueError", r"rank 0 synchronises 6 parameters, rank 1 5; build the same model on all ranks"),
    "setting": ("ValueError", r"disagree on setting 'sync_every': rank 0 has 4, rank 1 has 5; give all ranks the same"),
    "nonsense": ("TypeError", r"island: expected a process group, one dimension of .* mesh, None or False; got str"),
    "true": ("TypeError", r"island: expected a process group, .* None or False; got bool"),
    "mesh": ("ValueError", r"island: expected one dimension of a device mesh, got all 2 \(\('data', 'model'\)\); name"),
    "dtensor_alone": ("ValueError", r"parameter '0.weight' is a DTensor; .*do not pass island=False"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(ranks: Start) -> Iterator[Job]:
    with dead_address() as address:
        job = ranks("refusals", 2, cases=[*REFUSED, "stranger"], syncer=address)
        yield job
        found = [(one["stats"]["ranks"], one["stats"]["steps"]) for one in job.finish()]
        assert found == [(2, 1), (2, 1)]  # the ranks are still together


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_do_not_agree_are_refused_on_all_of_them(refusals: Job, case: str) -> None:
    for refused in refusals.every("refused", lambda event: event["case"] == case):
        kind, words = REFUSED[case]
        assert refused["type"] == kind, refused
        assert pytest.raises(Exception, match=words).matches(Exception(refused["text"])), refused["text"]


def test_a_group_without_this_process_is_refused(refusals: Job) -> None:
    refused = refusals.wait("refused", 1, lambda event: event["case"] == "stranger")
    assert refused["type"] == "ValueError"
    assert "this process is not in the group that was passed" in refused["text"]


def test_a_rank_that_makes_no_learner_is_waited_for_until_the_groups_timeout(ranks: Start, nobody: str) -> None:
    job = ranks("one_forgets", 2, syncer=nobody, timeout_s=2.0)
    text = job.wait("gave_up", timeout_s=30)["text"]
    assert "a rank of this island has ended, or did not come within the process group's timeout" in text
    assert "(rank 1 was not there after 2 s)" in text
    assert "Expected all ranks to make their learner together" in text
    job.tell("over")
    job.finish()


@pytest.mark.parametrize("with_syncer", [False, True], ids=["alone", "in_a_run"])
def test_when_a_rank_dies_the_other_says_so_within_seconds(
    ranks: Start, nobody: str, syncer: Callable[..., SyncerProcess], with_syncer: bool
) -> None:
    job = ranks("one_dies", 2, syncer=syncer(**QUICK).endpoint if with_syncer else nobody)
    job.every("under_way")
    killed = time.monotonic()
    job.kill(1)
    raised = job.wait("raised", timeout_s=30)
    assert raised["at"] - killed < 10
    assert "a rank of the group has ended or is late" in raised["text"]
    assert "end all ranks, start them again and resume from a checkpoint" in raised["text"]
    assert "\n" not in raised["text"]
    job.wait("done")
    assert job.wait("exited")["status"] == 0
