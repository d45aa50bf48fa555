"""Models with a catch, trained by two learners through a real syncer, against plain torch (field cases F026, F035,
F037, F039, F100, F110). The other kinds of parameters are in test_optimizer_parameters.py."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import LOCKSTEP, batch, loss_of, small_model, train_together

import diloco

pytestmark = pytest.mark.timeout(120)

NESTEROV = {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


def outer_rounds(
    models: list[nn.Module], rounds: int, loss: Any, outer: Any, every: int = 4, lr: float = 0.1
) -> nn.Module:
    """Synchronous DiLoCo by name in plain torch: what LOCKSTEP asks for. Each parameter once, ties included."""
    server = type(models[0])()
    server.load_state_dict(models[0].state_dict())
    trained = [name for name, p in models[0].named_parameters() if p.requires_grad]
    outer_optimizer = outer([server.get_parameter(name) for name in trained])
    optimizers = [torch.optim.SGD([m.get_parameter(n) for n in trained], lr=lr) for m in models]
    for step in range(1, rounds * every + 1):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, 100 * index + step).backward()
            optimizer.step()
        if step % every == 0:
            with torch.no_grad():
                for name in trained:
                    theta = server.get_parameter(name)
                    theta.grad = torch.stack([theta - m.get_parameter(name) for m in models]).mean(dim=0)
                outer_optimizer.step()
                for model in models:
                    for name in trained:
                        model.get_parameter(name).copy_(server.get_parameter(name))
    return server


def assert_close(model: nn.Module, wanted: nn.Module) -> None:
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name), parameter, rtol=1e-5, atol=1e-6, msg=lambda t, n=name: n + t
        )


def seeded(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


# ---- F026: scalars ----


def test_scalars_make_the_outer_step_computed_by_hand() -> None:
    """Learner 0 has gradient 1, learner 1 gradient 3, inner rate 0.1, H = 4: each round moves both by 4 * 0.1 * 2."""

    def model() -> nn.ParameterDict:
        return nn.ParameterDict({"temperature": nn.Parameter(torch.tensor(5.0)), "scale": nn.Parameter(torch.ones(1))})

    models: list[nn.Module] = [model(), model()]
    gradient = {0: 1.0, 1: 3.0}
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        train_together(
            syncer.endpoint, models, 20, lambda m, s: gradient[s // 100] * (m["temperature"] - 2 * m["scale"].sum())
        )
        weights = syncer.weights()
    for trained in models:
        assert trained["temperature"].item() == pytest.approx(5.0 - 5 * 4 * 0.1 * 2, abs=1e-5)
        assert trained["scale"].item() == pytest.approx(1.0 + 5 * 4 * 0.1 * 2 * 2, abs=1e-5)
        assert trained["temperature"].shape == () and trained["scale"].shape == (1,)
    assert weights["temperature"].shape == () and weights["scale"].shape == (1,)


# ---- F035: running statistics ----


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        seeded(self.lines, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lines(inputs))


def shifted_loss(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs + step // 100)[:, :2], targets)  # learner 1's data is shifted by 1


def test_running_statistics_stay_each_learners_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "diloco")
    models: list[nn.Module] = [Normalised(), Normalised()]
    plain: list[nn.Module] = [Normalised(), Normalised()]
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, 40, shifted_loss)
        weights = syncer.weights()
    outer_rounds(plain, 10, shifted_loss, lambda p: torch.optim.SGD(p, lr=1.0))
    for model, wanted in zip(models, plain, strict=True):
        assert_close(model, wanted)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(model.norm, name), getattr(wanted.norm, name), rtol=1e-4, atol=1e-5)
        assert model.norm.num_batches_tracked.item() == 40
        assert model.norm.num_batches_tracked.dtype == torch.int64
    assert (models[0].norm.running_mean - models[1].norm.running_mean).abs().max() > 0.05
    assert set(weights) == {name for name, _ in models[0].named_parameters()}  # no buffer is on the wire
    assert caplog.text.count("2 floating-point buffers stay local to each learner and are not merged") == 2  # one each


# ---- F037: tied embeddings ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        seeded(self, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


def token_loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(0, 7, (2, 16), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens[0]), tokens[1])


def test_tied_weights_travel_once_and_get_one_momentum() -> None:
    models: list[nn.Module] = [Tied(), Tied()]
    wanted = outer_rounds(
        [Tied(), Tied()], 5, token_loss, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)
    )
    with diloco.Syncer(**LOCKSTEP | NESTEROV, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, 20, token_loss)
        status, weights = syncer.status(), syncer.weights()
    for model in models:
        assert model.head.weight is model.embed.weight
        assert_close(model, wanted)
    assert sum(fragment["numel"] for fragment in status["fragments"]) == 7 * 5 + 5 * 5 + 5
    assert weights["head.weight"] is weights["embed.weight"]


def test_a_learner_whose_head_is_not_tied_is_refused() -> None:
    apart = Tied()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    with (
        diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer,
        diloco.Learner(Tied(), syncer.endpoint, learner_id="tied"),
        pytest.raises(ValueError, match=r"(embed|head)\.weight"),
    ):
        diloco.Learner(apart, syncer.endpoint, learner_id="apart")


# ---- F039: frozen layers of equal shape ----


class Frozen(nn.Module):
    """Four equal layers; those with an even number are frozen."""

    frozen: tuple[int, ...] = (0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        seeded(self, 3)
        for number in self.frozen:
            self.layers[number].requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs[:, :2]


class OthersFrozen(Frozen):
    frozen = (1, 2)


def test_frozen_layers_stay_and_the_others_are_paired_by_name() -> None:
    models: list[nn.Module] = [Frozen(), Frozen()]
    wanted = outer_rounds([Frozen(), Frozen()], 3, loss_of, lambda p: torch.optim.SGD(p, lr=1.0))
    start = Frozen()
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, 12)
        weights = syncer.weights()
    for model in models:
        assert_close(model, wanted)
        for number in range(4):
            same = torch.equal(model.layers[number].weight, start.layers[number].weight)
            assert same == (number in Frozen.frozen)
    assert set(weights) == {f"layers.{number}.{kind}" for number in (1, 3) for kind in ("weight", "bias")}


def test_another_frozen_set_is_refused_with_the_names() -> None:
    with (
        diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer,
        diloco.Learner(Frozen(), syncer.endpoint, learner_id="first"),
        pytest.raises(ValueError) as refused,
    ):
        diloco.Learner(OthersFrozen(), syncer.endpoint, learner_id="second")
    text = str(refused.value)
    assert "this learner has it not at all (absent or not trainable)" in text
    for name in ("layers.1.bias", "layers.1.weight", "layers.0.bias", "layers.0.weight"):
        assert name in text


# ---- F100: nobody to average with ----


def mean_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(loss_of(model, 5000 + number).item() for number in range(20)) / 20


def merges_in(log: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event for event in events if event["event"] == "merge"]


@pytest.mark.parametrize("leaves", [False, True], ids=["alone_from_the_start", "the_other_one_leaves"])
def test_a_lone_learner_goes_on_learning(tmp_path: Path, leaves: bool) -> None:
    """Its outer gradient is its own displacement, never zero, and the global loss falls."""
    log = tmp_path / "events"
    model = small_model()
    with diloco.Syncer(**LOCKSTEP | {"min_quorum": 1}, event_log=log, shutdown_s=0.5) as syncer:
        if leaves:
            train_together(syncer.endpoint, [model, small_model()], 20)  # both close; one comes back
        before, known = mean_loss(model), syncer.status()["rounds_merged"]
        train_together(syncer.endpoint, [model], 80)
        found = small_model()
        found.load_state_dict(syncer.weights())
        assert syncer.status()["rounds_merged"] == known + 20
    assert torch.equal(found[0].weight, model[0].weight)
    assert mean_loss(found) < 0.8 * before
    alone = merges_in(log)[known:]
    assert all(len(merge["members"]) == 1 and merge["delta_norm"] > 0 for merge in alone)
    assert all(merge["members"][0]["weight"] == 1.0 for merge in alone)


def test_the_other_one_leaves_in_mid_round(tmp_path: Path) -> None:
    """Lockstep waits for everybody who is there, and not for one who has just left."""
    log = tmp_path / "events"
    models: list[nn.Module] = [small_model(), small_model()]

    settings = LOCKSTEP | {"min_quorum": 1, "heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 1.0}
    with diloco.Syncer(**settings, event_log=log, shutdown_s=0.5) as syncer, Together(syncer.endpoint, models) as both:
        for index in (1, 0):  # who has not made a step yet has no work, and is not waited for
            both.train(1, loss_of, only=index)
        both.train(7, loss_of)
        before = mean_loss(models[0])
        both.train(2, loss_of, only=1)
        both.close(1)
        both.train(40, loss_of, only=0)
    merges = merges_in(log)
    assert [len(merge["members"]) for merge in merges] == [2, 2] + [1] * 10
    assert all(merge["delta_norm"] > 0 for merge in merges)
    assert mean_loss(models[0]) < before


class Together:
    """Two wrapped models whose training can be stopped and gone on with."""

    def __init__(self, address: str, models: list[nn.Module]) -> None:
        self.models = models
        self.optimizers = [
            diloco.DiLoCoOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model,
                address,
                learner_id=f"learner-{index}",
                tokens=lambda: 16,
            )
            for index, model in enumerate(models)
        ]

    def train(self, steps: int, loss: Any, only: int | None = None) -> None:
        def go(index: int) -> None:
            for step in range(1, steps + 1):
                self.optimizers[index].zero_grad()
                loss(self.models[index], 100 * index + step).backward()
                self.optimizers[index].step()

        chosen = range(len(self.models)) if only is None else [only]
        with ThreadPoolExecutor(len(self.models)) as pool:
            list(pool.map(go, chosen))

    def close(self, index: int) -> None:
        self.optimizers[index].close()

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        for optimizer in self.optimizers:
            optimizer.close()


def test_below_the_quorum_it_trains_on_alone_and_nothing_is_merged(capfd: pytest.CaptureFixture[str]) -> None:
    """That the syncer says so without being asked: test_crash.py."""
    model, plain = small_model(), small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        diloco.Syncer(**LOCKSTEP | {"mode": "decoupled"}, shutdown_s=0.5) as syncer,
        diloco.DiLoCoOptimizer(inner, model, syncer.endpoint, tokens=lambda: 16) as opt,
    ):
        bare = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(30):
            for trained, optimizer in ((model, opt), (plain, bare)):
                optimizer.zero_grad()
                loss_of(trained, step).backward()
                optimizer.step()
        status = syncer.status()
        while status["learners"][0]["step"] < 30:
            status = syncer.status()
        assert status["rounds_merged"] == 0
        assert "1 of 2 learners are here (min_quorum); no outer step until then" in status["waiting"]
        assert opt.stats()["state"] == "training"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# ---- F110: everybody draws the same data ----

SAME = "do they train on the same data"


def test_equal_contributions_are_noticed_once(capfd: pytest.CaptureFixture[str]) -> None:
    models: list[nn.Module] = [small_model(), small_model()]
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, 20, lambda m, step: loss_of(m, step % 100))
    said = [line for line in capfd.readouterr().err.splitlines() if SAME in line]
    assert len(said) == 1
    assert "'learner-0' and 'learner-1'" in said[0]


def test_shards_by_the_helper_are_not_the_same_data(capfd: pytest.CaptureFixture[str]) -> None:
    """The cure: one seed in the configuration of all, and shard_seed() makes it each learner's own; dropout too."""
    dropout = nn.Dropout(0.5)
    generators = [torch.Generator().manual_seed(diloco.shard_seed(f"learner-{i}", seed=1)) for i in range(2)]
    models: list[nn.Module] = [small_model(), small_model(5)]
    start = [p.detach().clone() for p in models[0].parameters()]

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        inputs = torch.randn(16, 6, generator=generators[step // 100])
        return nn.functional.mse_loss(model(inputs), inputs[:, :2].sin())

    masks = []
    for index in range(2):
        torch.manual_seed(diloco.shard_seed(f"learner-{index}", seed=1))
        masks.append(dropout(torch.ones(64)))
    assert not torch.equal(*masks)
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        with Together(syncer.endpoint, models) as both:
            for model in models:  # equal first weights although they were made with other seeds
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
            both.train(20, loss)
        assert syncer.status()["rounds_merged"] == 5
    assert SAME not in capfd.readouterr().err
