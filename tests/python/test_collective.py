"""CollectiveDiLoCoOptimizer and CollectiveLearner: arguments, agreement, accounts. Ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RankOptimizer, errors_of_all, gloo_groups, on_all, sgd, wrap_all
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from toys import assert_same, loss_of, small_model, train_step

import diloco
from diloco._process_groups import merges_on_device

pytestmark = pytest.mark.timeout(60)

QUICK: dict[str, Any] = {"mode": "lockstep", "sync_every": 4, "num_fragments": 2, "overlap_steps": 1}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with this process as the only rank."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def wrapped(*arguments: Any, **settings: Any) -> diloco.CollectiveDiLoCoOptimizer:
    model = small_model()
    return diloco.CollectiveDiLoCoOptimizer(sgd(model), model, *arguments, **settings)


# ---- which group ----


def test_without_a_job_the_message_says_how_to_start_one() -> None:
    with pytest.raises(ValueError, match=r"start the script with torchrun and call .*init_process_group"):
        wrapped()


def test_groups_that_are_taken(job: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    for given in ((), (distributed.group.WORLD,), (mesh["replicate"],), (distributed.new_group([0]),)):
        with wrapped(*given, **QUICK) as opt:
            assert (opt.learner.rank, opt.learner.ranks) == (0, 1)
    with wrapped(backend="gloo", **QUICK) as opt:
        assert opt.stats()["ranks"] == 1


def test_groups_that_are_refused(job: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"one dimension of a device mesh, got all 2 .*mesh\[\"replicate\"\]"):
        wrapped(mesh)
    with pytest.raises(ValueError, match="group: this process is not in the group that was passed"):
        wrapped(distributed.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(TypeError, match=r"group: expected a process group, one dimension of .* or None; got str"):
        wrapped("gloo")
    with pytest.raises(ValueError, match="got both"):
        wrapped(distributed.group.WORLD, backend="gloo")
    with pytest.raises(ValueError, match="backend must be gloo or nccl, got 'mpi'"):
        wrapped(backend="mpi")


@pytest.mark.skipif(distributed.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_on_a_build_without_it_is_refused_in_one_sentence(job: None) -> None:
    with pytest.raises(ValueError, match=r"backend = nccl was asked for and this torch \(.*\) is built without NCCL"):
        wrapped(backend="nccl")


def test_where_the_numbers_are_merged() -> None:
    class Group:
        def __init__(self, **names: str) -> None:
            self._device_types = [torch.device(device) for device in names]
            self._get_backend = lambda device: SimpleNamespace(name=lambda: names[device.type])

    def merged_on_device(group: Group, *devices: str) -> bool:
        tensors: Any = [SimpleNamespace(device=torch.device(device)) for device in devices]
        return merges_on_device(group, tensors)  # type: ignore[arg-type]

    assert not merged_on_device(Group(cpu="gloo"), "cpu")
    assert not merged_on_device(Group(cpu="gloo", cuda="gloo"), "cuda")  # by way of host memory
    assert not merged_on_device(Group(cpu="gloo", cuda="nccl"), "cpu", "cuda")
    assert merged_on_device(Group(cpu="gloo", cuda="nccl"), "cuda")
    assert merged_on_device(Group(cuda="nccl"), "cuda")
    with pytest.raises(ValueError, match=r"backend \(nccl\) cannot move tensors that are on cpu"):
        merged_on_device(Group(cuda="nccl"), "cpu")


# ---- settings ----


def test_settings_come_from_arguments_environment_and_presets(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_OVERLAP_STEPS", "3")
    with wrapped(preset="streaming", sync_every=10) as opt:
        text = opt.learner._native.describe()
    assert "one sync of each per 10 steps, 3 steps under way" in text and "adopt blend" in text


def test_settings_that_mean_nothing_here_are_refused_by_name(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"min_quorum": 2, "grace": "none", "trigger": "arrival", "heartbeat_timeout_s": 5.0}.items():
        with pytest.raises(ValueError, match=f"{name} means nothing without a syncer"):
            wrapped(**{name: value})
    with pytest.raises(ValueError, match="got preset = decoupled"):
        wrapped(preset="decoupled")
    with pytest.raises(TypeError, match=r"'sync_evry'; did you mean sync_every\?"):
        wrapped(sync_evry=3)
    monkeypatch.setenv("DILOCO_MIN_QUORUM", "2")
    with pytest.raises(ValueError, match=r"min_quorum means nothing .* as an argument and as DILOCO_MIN_QUORUM"):
        wrapped(**QUICK)


def test_what_is_not_trained_takes_no_part(job: None) -> None:
    model = small_model()
    mixed = [("a", model[0].weight), ("b", nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False))]
    with diloco.CollectiveLearner(mixed, **QUICK) as learner:
        assert list(learner.anchor_state_dict()) == ["a"]
    with pytest.raises(ValueError, match="no parameter requires grad"):
        diloco.CollectiveLearner([mixed[1]])


# ---- ranks that do not agree ----


def test_ranks_that_disagree_are_all_refused_before_the_first_step() -> None:
    groups = gloo_groups(2)
    models: list[nn.Module] = [small_model(), small_model()]
    errors = errors_of_all(
        2, lambda r: RankOptimizer(sgd(models[r]), models[r], groups[r], **QUICK | {"sync_every": 4 + r})
    )
    assert [type(error) for error in errors] == [ValueError] * 2
    assert str(errors[0]) == str(errors[1])
    assert str(errors[0]).startswith("rank 1 has sync_every = 5, rank 0 has 4; give every rank")

    wider = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    models = [small_model(), wider]
    errors = errors_of_all(2, lambda r: RankOptimizer(sgd(models[r]), models[r], groups[r], **QUICK))
    assert str(errors[0]) == str(errors[1])
    assert "parameter '0.weight': rank 1 has float32 (9, 6), rank 0 has float32 (8, 6)" in str(errors[0])


# ---- the run ----


def test_a_single_rank_is_its_inner_optimizer() -> None:
    model, plain = small_model(), small_model()
    (opt,) = wrap_all([model], **QUICK | {"overlap_steps": 0, "wire_dtype": "f32"})
    bare = sgd(plain)
    for step in range(20):
        train_step(model, opt, step)
        train_step(plain, bare, step)
    # A merge of one is anchor - (anchor - local): two roundings of values below 2, and training contracts them.
    assert_same(model, plain, atol=5 * 2 * 2.0**-23)
    assert opt.stats()["contributions_merged"] == 10
    opt.close()


def test_different_first_weights_become_those_of_rank_0() -> None:
    models: list[nn.Module] = [small_model(seed) for seed in (3, 4, 5)]
    for opt in wrap_all(models, **QUICK | {"adopt": "blend"}):
        opt.close()
    for model in models:
        assert_same(model, small_model(3))


@pytest.mark.parametrize("ranks", [2, 5])
def test_all_ranks_have_the_same_bits_after_every_adoption(ranks: int) -> None:
    models: list[nn.Module] = [small_model() for _ in range(ranks)]
    settings = QUICK | {"num_fragments": 1, "overlap_steps": 0, "adopt": "overwrite", "outer_lr": 0.7}
    optimizers = wrap_all(models, **settings)

    def work(rank: int) -> list[list[torch.Tensor]]:
        seen = []
        for step in range(1, 13):
            optimizers[rank].zero_grad()
            loss_of(models[rank], 100 * rank + step).backward()
            optimizers[rank].add_tokens(3 + rank)
            optimizers[rank].step()
            if step % 4 == 0:
                seen.append([p.detach().clone() for p in models[rank].parameters()])
        return seen

    seen = on_all(ranks, work)
    for other in seen[1:]:
        assert all(
            torch.equal(a, b)
            for ours, theirs in zip(seen[0], other, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
    assert not torch.equal(seen[0][0][0], seen[0][1][0])
    for opt in optimizers:
        opt.close()


def test_every_token_is_accounted_for_and_time_and_bytes_are_measured() -> None:
    models: list[nn.Module] = [small_model(), small_model()]
    optimizers = wrap_all(models, **QUICK | {"adopt": "overwrite", "overlap_steps": 2})

    def work(rank: int) -> dict[str, Any]:
        for step in range(1, 18):
            optimizers[rank].add_tokens(7)
            train_step(models[rank], optimizers[rank], 100 * rank + step)
        stats: dict[str, Any] = optimizers[rank].stats()
        return stats

    for rank, stats in enumerate(on_all(2, work)):
        assert (stats["steps"], stats["tokens"], stats["clock"]) == (17, 17 * 7, 17)
        assert stats["tokens_merged"] + sum(stats["discarded"].values()) + stats["tokens_outstanding"] == 2 * 17 * 7
        assert stats["discarded"]["overwritten"] > 0
        assert stats["merges"] == stats["contributions_merged"] == sum(n for _, n in stats["versions"]) == 7
        assert stats["contributions_sent"] == 8 and stats["under_way_bytes"] > 0
        assert stats["bytes_out"] == stats["bytes_in"] > 0
        assert stats["blocked_calls"] == 18 and stats["blocked_s"] >= stats["waited_s"] >= 0
        assert stats["blocked_longest_s"] <= stats["blocked_s"]
        assert len(optimizers[rank].learner.take_blocked()) == 18
    for opt in optimizers:
        opt.close()
        opt.close()
        assert opt.stats()["state"] == "closed"
        with pytest.raises(RuntimeError, match="is closed"):
            opt.step()


def test_a_rank_with_nan_starts_again_from_the_global_weights_with_fresh_inner_state() -> None:
    models: list[nn.Module] = [small_model(), small_model()]
    optimizers = wrap_all(models, lambda model: torch.optim.Adam(model.parameters(), lr=0.01), **QUICK)

    def work(rank: int) -> None:
        for step in range(1, 13):
            optimizers[rank].zero_grad()
            loss_of(models[rank], 100 * rank + step).backward()
            if rank == 1 and step == 4:
                models[1][0].weight.grad.fill_(float("nan"))  # type: ignore[index, union-attr]
            optimizers[rank].step()

    on_all(2, work)
    for rank in range(2):
        assert all(torch.isfinite(p).all() for p in models[rank].parameters())
        anchors = optimizers[rank].learner.anchor_state_dict()
        assert all(torch.isfinite(values).all() for values in anchors.values())
    assert optimizers[1].stats()["discarded"]["nonfinite"] > 0
    assert "nonfinite" not in optimizers[0].stats()["discarded"]
    steps = [{float(state["step"]) for state in opt.inner.state.values()} for opt in optimizers]
    assert steps[0] == {12.0} and max(steps[1]) < 12.0  # its moments began anew
    for opt in optimizers:
        opt.close()


def test_a_profiler_shows_the_boundary(job: None) -> None:
    from torch.profiler import ProfilerActivity, profile

    model = small_model()
    with (
        diloco.CollectiveDiLoCoOptimizer(sgd(model), model, **QUICK) as opt,
        profile(activities=[ProfilerActivity.CPU]) as seen,
    ):
        for step in range(3):
            train_step(model, opt, step)
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts["diloco::boundary"] == 3


def test_a_learner_without_an_optimizer_object(job: None) -> None:
    model = small_model()
    with diloco.CollectiveLearner(model, **QUICK | {"overlap_steps": 0, "adopt": "overwrite"}) as learner:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        adopted = [learner.step(tokens=5).adopted for _ in range(4)]
        assert adopted == [0, 1, 0, 1]
        assert "rank 0 of 1" in repr(learner)
        for name, values in learner.anchor_state_dict().items():
            torch.testing.assert_close(values, model.get_parameter(name).detach())
