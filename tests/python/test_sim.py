"""diloco.sim: torch learners in the virtual cluster."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import batch, small_model

from diloco.sim import LearnerSpec, VirtualCluster

LAYOUT = {"layer.0.weight": (3, 4), "layer.0.bias": (4,), "layer.1.weight": (3, 4)}


class Training:
    """Learners that train `small_model`, each with batches of its own."""

    def __init__(self, learners: int = 3, seed: int = 1, **options: Any) -> None:
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.modules: dict[int, nn.Module] = {}
        self.count = 0
        self.fail_at = 0
        given: dict[str, Any] = {"sync_every": 8, "num_fragments": 4, **options}
        self.cluster = VirtualCluster(
            [LearnerSpec(f"l{i}", step_s=1.0 + 0.1 * i, jitter=0.1) for i in range(learners)],
            model=lambda learner: small_model(),
            begin=self.begin,
            step=self.step,
            seed=seed,
            **given,
        )

    def begin(self, learner: int, module: nn.Module) -> None:
        self.modules[learner] = module
        self.optimizers[learner] = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def step(self, learner: int, module: nn.Module) -> int:
        self.count += 1
        if self.count == self.fail_at:
            raise ArithmeticError("no data left")
        inputs, targets = batch(1000 * learner + self.count)
        self.optimizers[learner].zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        self.optimizers[learner].step()
        return 16

    def loss(self) -> float:
        module = small_model()
        module.load_state_dict(self.cluster.global_parameters())
        inputs, targets = batch(0, 256)
        return nn.functional.mse_loss(module(inputs), targets).item()


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def test_the_same_seed_gives_the_same_bits_and_training_trains() -> None:
    runs = [Training(seed=seed) for seed in (1, 1, 2)]
    before = None
    for run in runs:
        run.cluster.run_until(20.0)
        before = run.loss()
        run.cluster.run_until(200.0)
        assert run.cluster.check() == []
    first, again, other = (flat(run.cluster.global_parameters()) for run in runs)
    assert torch.equal(first, again) and runs[0].cluster.records() == runs[1].cluster.records()
    assert not torch.equal(first, other)
    assert before is not None and runs[0].loss() < 0.5 * before


def test_the_modules_parameters_are_the_clusters_arrays() -> None:
    run = Training()
    run.cluster.run_until(30.0)
    for learner, module in run.modules.items():
        held = run.cluster.parameters(learner)
        assert list(held) == [name for name, _ in module.named_parameters()]
        for name, parameter in module.named_parameters():
            assert torch.equal(held[name], parameter)
    with torch.no_grad():
        run.modules[0].get_parameter("0.bias").fill_(7.0)
    assert torch.equal(run.cluster.parameters(0)["0.bias"], torch.full((8,), 7.0))


def test_what_a_callback_raises_comes_out() -> None:
    run = Training()
    run.fail_at = 30
    with pytest.raises(ArithmeticError, match="no data left"):
        run.cluster.run_until(1000.0)
    assert run.cluster.now < 20.0


def test_a_dead_learners_module_keeps_its_values() -> None:
    run = Training()
    run.cluster.run_until(30.0)
    module = run.modules[1]
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    run.cluster.kill_learner(1)
    assert not run.cluster.alive(1) and run.cluster.parameters(1) == {}
    run.cluster.run_until(40.0)
    run.cluster.start_learner(1)
    run.cluster.run_until(80.0)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, values[name])
    assert run.modules[1] is not module and run.cluster.steps(1) > 20
    with pytest.raises(ValueError, match="alive"):
        run.cluster.start_learner(1)
    assert run.cluster.check() == []


def test_the_ledger_adds_up_over_lives() -> None:
    run = Training(adopt="overwrite")
    run.cluster.run_until(100.0)
    run.cluster.kill_learner(1)
    run.cluster.run_until(130.0)
    run.cluster.start_learner(1)
    run.cluster.run_until(200.0)
    for learner in range(3):
        ledger = run.cluster.ledger(learner)
        assert ledger == run.cluster.ledger(f"l{learner}")
        assert ledger.merged + ledger.open + sum(ledger.discarded.values()) == ledger.processed
        assert ledger.discarded["overwritten"] > 0 and 0.5 < ledger.merged_fraction < 1.0
        assert ledger.merged_fraction == pytest.approx(run.cluster.merged_fraction(f"l{learner}"))


def test_merges_tell_who_took_part() -> None:
    run = Training(min_quorum=3)
    run.cluster.run_until(60.0)
    merges = run.cluster.merges()
    assert len(merges) > 20 and all(len(merge.members) == 3 and merge.delta_norm > 0 for merge in merges)
    assert sum(member.weight for member in merges[0].members) == pytest.approx(1.0)
    assert [names for names, _ in run.cluster.fragments()] == [["0.weight"], ["2.weight"], ["0.bias"], ["2.bias"]]


def test_without_a_model_the_parameters_walk() -> None:
    cluster = VirtualCluster([LearnerSpec("a"), LearnerSpec("b")], layout=LAYOUT, num_fragments=2)
    assert cluster.global_parameters() == {}
    cluster.run_until(300.0)
    assert abs(flat(cluster.global_parameters()).mean().item() - 1.0) < 0.1


def test_the_syncer_dies_and_comes_back() -> None:
    run = Training()
    run.cluster.run_until(60.0)
    run.cluster.kill_syncer()
    assert run.cluster.status() is None and not run.cluster.syncer_alive
    run.cluster.run_until(70.0)
    run.cluster.start_syncer()
    run.cluster.run_until(120.0)
    status = run.cluster.status()
    assert status is not None and status["epoch"] == 2
    assert run.cluster.check() == []


def test_frozen_partitioned_and_poisoned() -> None:
    run = Training()
    run.cluster.run_until(30.0)
    run.cluster.freeze_learner(0)
    run.cluster.partition_learner(1)
    run.cluster.run_until(60.0)
    assert run.cluster.steps(0) < 35 < run.cluster.steps(1)
    run.cluster.freeze_learner(0, False)
    run.cluster.partition_learner(1, False)
    run.cluster.poison(2)
    run.cluster.run_until(120.0)
    assert run.cluster.steps(0) > 80
    assert torch.isfinite(flat(run.cluster.global_parameters())).all()


def test_wrong_arguments() -> None:
    one = [LearnerSpec("a")]
    with pytest.raises(TypeError, match="did you mean sync_every"):
        VirtualCluster(one, layout=LAYOUT, sync_evry=3)
    with pytest.raises(ValueError, match="outer_lr"):
        VirtualCluster(one, layout=LAYOUT, outer_lr=-1)
    with pytest.raises(TypeError, match="either model or layout"):
        VirtualCluster(one)
    with pytest.raises(TypeError, match="step"):
        VirtualCluster(one, model=lambda learner: small_model())
    with pytest.raises(ValueError, match="ids of their own"):
        VirtualCluster([*one, *one], layout=LAYOUT)
    with pytest.raises(ValueError, match="float32"):
        VirtualCluster(one, model=lambda learner: small_model().double(), step=lambda learner, module: 1)
    with pytest.raises(IndexError, match="learner 4 of 1"):
        VirtualCluster(one, layout=LAYOUT).kill_learner(4)
    for wrong in ({"step_s": 0.0}, {"step_s": float("nan")}, {"start_s": -1.0}, {"jitter": 1.0}):
        with pytest.raises(ValueError, match=f"learner 'a': {next(iter(wrong))} must be"):
            VirtualCluster([LearnerSpec("a", **wrong)], layout=LAYOUT)
    with pytest.raises(ValueError, match="delay_s, bytes_per_s and merge_s must be at least 0"):
        VirtualCluster(one, layout=LAYOUT, delay_s=-1.0)
    for time in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a finite time"):
            VirtualCluster(one, layout=LAYOUT).run_until(time)


def test_callbacks_may_look_and_not_touch() -> None:
    def step(learner: int, parameters: Any) -> int:
        seen.append(cluster.now)
        cluster.kill_learner(learner)
        return 1

    seen: list[float] = []
    cluster = VirtualCluster([LearnerSpec("a")], layout=LAYOUT, step=step)
    with pytest.raises(RuntimeError, match="may read the cluster, but not run or change it"):
        cluster.run_until(5.0)
    assert len(seen) == 1


def test_nothing_is_left_of_a_cluster() -> None:
    run = Training()
    run.cluster.run_until(30.0)
    parameter = weakref.ref(run.modules[0])
    run.modules.clear()
    run.optimizers.clear()
    del run
    gc.collect()
    assert parameter() is None
