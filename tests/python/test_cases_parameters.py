"""Kinds of parameters through a real syncer, against plain torch: complex, packed, adapters, experts, tied files
(field cases F017, F030, F031, F032, F041, F045, F097, F122)."""

from __future__ import annotations

import copy
import io
import json
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from toys import LOCKSTEP, Pair, batch, loss_of, small_model, train_step, train_together

import diloco

NESTEROV = {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
ALONE = LOCKSTEP | {"min_quorum": 1}


def wrap(model: nn.Module, address: str, parameters: Any = None, **options: Any) -> diloco.DiLoCoOptimizer:
    inner = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.1)
    return diloco.DiLoCoOptimizer(inner, model, address, tokens=lambda: 16, **options)


# ---- F031: complex ----


class Spectral(nn.Module):
    """A filter in frequency space; the same with its real view as parameter."""

    def __init__(self, complex_weight: bool, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        start = torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(start if complex_weight else torch.view_as_real(start).clone())
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype) if complex_weight else torch.tensor([0.5, 0.0]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, scale = (p if p.is_complex() else torch.view_as_complex(p) for p in (self.weight, self.scale))
        return (inputs.to(weight.dtype) @ weight.t() * scale).abs().square()


def spectral_loss(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    return (model(inputs)[:, :2] - targets).square().mean()


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_complex_weights_are_their_real_view(merge: str) -> None:
    found = []
    for is_complex in (True, False):
        models: list[nn.Module] = [Spectral(is_complex), Spectral(is_complex)]
        with diloco.Syncer(**LOCKSTEP | NESTEROV | {"merge": merge}, shutdown_s=0.5) as syncer:
            train_together(syncer.endpoint, models, 20, spectral_loss, lr=0.02)
            found.append((models, syncer.weights()))
    (models, weights), (real_models, real_weights) = found
    assert models[0].weight.dtype == torch.complex64 and models[0].weight.shape == (4, 6)
    for ours, theirs in zip(models, real_models, strict=True):
        for name in ("weight", "scale"):
            torch.testing.assert_close(
                torch.view_as_real(ours.get_parameter(name).detach()), theirs.get_parameter(name).detach()
            )
    assert not torch.equal(models[0].weight, Spectral(True).weight)
    for name in ("weight", "scale"):
        assert weights[name].shape == real_weights[name].shape
        torch.testing.assert_close(weights[name], real_weights[name])


def test_complex_weights_are_given_and_saved_in_their_own_dtype(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    for dtype in (torch.complex64, torch.complex128):
        model = Spectral(True, dtype)
        with wrap(model, nobody) as opt:
            anchors = opt.learner.anchor_state_dict()
            assert {name: a.dtype for name, a in anchors.items()} == {"weight": dtype, "scale": dtype}
            torch.testing.assert_close(anchors["weight"], model.weight.detach(), rtol=1e-6, atol=1e-6)
            assert anchors["scale"].shape == ()
            saved = copy.deepcopy(opt.state_dict())
            opt.load_state_dict(saved)
        model.load_state_dict(anchors)
    assert caplog.text.count("is complex128; it is synchronised with complex64 precision") == 2
    assert diloco.explain(Spectral(True)).numel == 2 * 25


def test_nan_in_one_part_of_a_complex_weight_is_refused() -> None:
    model = Spectral(True)
    with (
        diloco.Syncer(**ALONE, shutdown_s=0.5) as syncer,
        diloco.DiLoCoOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01), model, syncer.endpoint, tokens=lambda: 16
        ) as opt,
    ):
        for step in range(3):
            train_spectral(model, opt, step)
        with torch.no_grad():
            torch.view_as_real(model.weight)[1, 2, 1] = float("nan")
        for step in range(3, 9):
            train_spectral(model, opt, step)
        assert all(weights.isfinite().all() for weights in syncer.weights().values())
        assert torch.view_as_real(model.weight).isfinite().all()
        assert torch.view_as_real(opt.state[model.weight]["exp_avg"]).isfinite().all()


def train_spectral(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    opt.zero_grad()
    spectral_loss(model, step).backward()
    opt.step()


# ---- F030: every dtype, contiguous and not ----

GOOD = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
BAD = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int64, torch.bool)


def strided_forms(dtype: torch.dtype, seed: int) -> nn.ParameterDict:
    def values(*shape: int) -> torch.Tensor:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, dtype=wide, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return nn.ParameterDict(
        {
            "dense": nn.Parameter(values(4, 3)),
            "transposed": nn.Parameter(values(3, 4).t()),
            "slice": nn.Parameter(values(4, 9)[:, 2:7:2]),
            "scalar": nn.Parameter(values()),
            "empty": nn.Parameter(values(0, 2)),
        }
    )


@pytest.mark.parametrize("dtype", GOOD, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_form_of_a_dtype_arrives_to_the_bit(dtype: torch.dtype) -> None:
    first, second = strided_forms(dtype, 1), strided_forms(dtype, 2)
    layout = {name: (id(p), p.stride(), p.data_ptr()) for name, p in second.items()}
    with (
        diloco.Syncer(shutdown_s=0.5) as syncer,
        diloco.Learner(first, syncer.endpoint, learner_id="first"),
        diloco.Learner(second, syncer.endpoint, learner_id="second") as learner,
    ):
        for name, parameter in second.items():
            assert torch.equal(parameter, first[name]), name
            assert torch.equal(learner.anchor_state_dict()[name], first[name])
            assert layout[name] == (id(parameter), parameter.stride(), parameter.data_ptr())


@pytest.mark.parametrize("dtype", BAD, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_what_is_no_number_to_average_is_refused_by_name(nobody: str, dtype: torch.dtype) -> None:
    odd = nn.Parameter(torch.ones(2, 3).to(dtype), requires_grad=dtype.is_floating_point)
    model = nn.ParameterDict({"fine": nn.Parameter(torch.ones(2)), "odd": odd})
    text = rf"parameter 'odd' is {str(dtype).removeprefix('torch.')} \(2, 3\); expected .*Leave it out of the optimizer"
    with pytest.raises(ValueError, match=text):
        wrap(model, nobody)


# ---- F032, F041: adapters on a frozen base ----


class Adapted(nn.Module):
    """A packed integer base (no arithmetic makes sense on it) and a low-rank adapter in float."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.base = nn.Parameter(torch.randint(0, 255, (6, 2), dtype=torch.uint8, generator=generator), False)
        self.packed = nn.Parameter(torch.zeros(1 << 20, dtype=torch.uint8), False)
        self.down = nn.Parameter(torch.randn(6, rank, generator=generator) * 0.3)
        self.up = nn.Parameter(torch.randn(rank, 2, generator=generator) * 0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ ((self.base.float() - 127) / 127 + self.down @ self.up)


def test_only_adapters_travel_and_a_packed_base_stays() -> None:
    models: list[nn.Module] = [Adapted(), Adapted()]
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        stats = train_together(syncer.endpoint, models, 8)
        status = syncer.status()
        assert sum(fragment["numel"] for fragment in status["fragments"]) == 6 * 2 + 2 * 2
        assert set(syncer.weights()) == {"down", "up"}
    for model in models:
        assert torch.equal(model.base, Adapted().base)
        assert not torch.equal(model.down, Adapted().down)
    for one in stats:  # two rounds of 64 bytes of adapters, the first weights, and small messages; never the base
        assert one["tokens_merged"] > 0
        assert one["bytes_out"] < 1 << 14


def test_adapters_of_another_rank_are_refused_at_join() -> None:
    with (
        diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer,
        diloco.Learner(Adapted(2), syncer.endpoint, learner_id="two"),
        pytest.raises(ValueError, match=r"'down'.*\(6, (2|3)\).*\(6, (2|3)\)|down.*6.*2.*6.*3|down.*6.*3.*6.*2"),
    ):
        diloco.Learner(Adapted(3), syncer.endpoint, learner_id="three")


# ---- F045: experts ----


class Experts(nn.Module):
    """Eight experts and a router whose balance is a buffer, as in loss-free balancing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.router = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(6, 2) for _ in range(8))
        self.register_buffer("balance", torch.zeros(8))
        self.register_buffer("tokens_seen", torch.zeros(8, dtype=torch.int64))
        self.offset = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mine = slice(self.offset, self.offset + 4)  # this learner's data goes to four of the experts only
        scores = self.router(inputs)[:, mine] + self.balance[mine]
        chosen = scores.argmax(dim=1) + self.offset
        gate = scores.softmax(dim=1).max(dim=1).values
        out = torch.zeros(len(inputs), 2)
        for number in chosen.unique().tolist():
            where = chosen == number
            out[where] = gate[where, None] * self.experts[number](inputs[where])
        with torch.no_grad():
            counts = torch.bincount(chosen, minlength=8)
            self.tokens_seen += counts
            self.balance += 0.01 * (counts.float().mean() - counts).sign()
        return out


def test_experts_without_tokens_send_no_work_and_routers_balance_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Learner 0 routes to experts 0 to 3, learner 1 to 4 to 7. An idle expert counts as a displacement of zero with the
    learner's whole weight, so each moves by half of what its learner did; the router by the mean of both."""

    def pair() -> list[nn.Module]:
        models: list[nn.Module] = [Experts(), Experts()]
        models[1].offset = 4
        return models

    models, plain, start = pair(), pair(), Experts()
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, 12)
        weights = syncer.weights()
        assert syncer.status()["rounds_merged"] == 3
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    server = Experts()
    for step in range(1, 13):
        for index, (model, optimizer) in enumerate(zip(plain, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, 100 * index + step).backward()
            optimizer.step()
        if step == 4:
            for number, expert in enumerate(plain[0].experts):  # the layout is the same, moved or not
                assert torch.equal(expert.weight, start.experts[number].weight) == (number >= 4)
        if step % 4 == 0:
            with torch.no_grad():
                for theta, *local in zip(server.parameters(), *(m.parameters() for m in plain), strict=True):
                    theta.copy_(torch.stack([p.detach() for p in local]).mean(dim=0))
                    for p in local:
                        p.copy_(theta)
    for name, parameter in server.named_parameters():
        for model in models:
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    assert set(weights) == {name for name, _ in server.named_parameters()}
    for model, bare in zip(models, plain, strict=True):
        assert torch.equal(model.tokens_seen, bare.tokens_seen)
        torch.testing.assert_close(model.balance, bare.balance)
    assert models[0].tokens_seen[4:].sum() == 0 and models[1].tokens_seen[:4].sum() == 0
    assert not torch.equal(models[0].balance, models[1].balance)
    assert caplog.text.count("1 floating-point buffers stay local to each learner and are not merged: 'balance'") == 2


# ---- F097, and what an adoption leaves alone ----


def test_after_a_round_of_one_learner_the_global_weights_are_its_own() -> None:
    """Outer rate 1, no momentum; and the loss of a quadratic bowl falls. Uphill would fail both."""
    bowl = nn.ParameterDict({"x": nn.Parameter(torch.tensor([3.0, -2.0]))})
    with diloco.Syncer(**ALONE, shutdown_s=0.5) as syncer, wrap(bowl, syncer.endpoint) as opt:
        for _ in range(20 * 4):
            opt.zero_grad()
            bowl["x"].square().sum().backward()
            opt.step()
        assert syncer.status()["rounds_merged"] == 20
        torch.testing.assert_close(syncer.weights()["x"], bowl["x"].detach(), rtol=0, atol=1e-7)
        assert bowl["x"].detach().square().sum() < 1e-6


def test_moments_and_rates_survive_adoptions() -> None:
    with diloco.Syncer(**ALONE, shutdown_s=0.5) as syncer:
        pair = Pair(syncer.endpoint, lambda p: torch.optim.AdamW(p, lr=0.01))
        schedules = [torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=40) for one in (pair.opt, pair.plain)]
        with pair.opt:
            for step in range(12):
                pair.step(step)
                for schedule in schedules:
                    schedule.step()
                assert pair.opt.param_groups[0]["lr"] == pair.plain.param_groups[0]["lr"] > 0
                for ours, theirs in zip(pair.opt.state.values(), pair.plain.state.values(), strict=True):
                    assert ours["step"] == theirs["step"] == step + 1
                    for key in ("exp_avg", "exp_avg_sq"):
                        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-6)
            assert pair.opt.stats()["adoptions"] >= 3


def test_a_dead_syncer_ends_training_only_if_asked_to() -> None:
    syncer = diloco.Syncer(shutdown_s=0.0, heartbeat_interval_s=0.1, heartbeat_timeout_s=0.5)
    patient, other = small_model(), small_model()
    with (
        wrap(patient, syncer.endpoint, learner_id="patient") as opt,
        wrap(other, syncer.endpoint, learner_id="other", give_up_after_s=0.3) as giving_up,
    ):
        train_step(patient, opt, 0)
        train_step(other, giving_up, 0)
        syncer.stop()
        with pytest.raises(ConnectionError, match=syncer.endpoint.rpartition(":")[2]):
            while True:
                train_step(other, giving_up, 1)
                threading.Event().wait(0.01)
        train_step(patient, opt, 1)
        assert opt.stats()["state"] == "away"


# ---- F017: where step counters live ----


@pytest.mark.parametrize(
    "flags",
    [
        {"fused": True},
        {"foreach": True},
        {"foreach": False},
        pytest.param(
            {"capturable": True},
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="Adam(capturable=True) needs CUDA"),
        ),
    ],
    ids=lambda flags: "-".join(f"{key}_{value}" for key, value in flags.items()),
)
def test_loaded_state_goes_where_the_bare_optimizer_puts_it(nobody: str, flags: dict[str, bool]) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, **flags)

    first = Pair(nobody, make)
    with first.opt:
        for step in range(3):
            first.step(step)
        file = io.BytesIO()
        torch.save({"ours": first.opt.state_dict(), "plain": first.plain.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    second = Pair(nobody, make)
    with second.opt:
        second.opt.load_state_dict(loaded["ours"])
        second.plain.load_state_dict(loaded["plain"])
        for ours, theirs in zip(second.inner.state.values(), second.plain.state.values(), strict=True):
            for key, value in theirs.items():
                assert (ours[key].device, ours[key].dtype) == (value.device, value.dtype)
                assert torch.equal(ours[key], value)
        second.step(3)
        for ours, theirs in zip(second.model.parameters(), second.plain_model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


# ---- F122: files of the global weights ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.shared = nn.Linear(8, 8)
        self.again = self.shared  # one module at two places
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(torch.tanh(self.shared(self.embed(words)))))


def test_global_weights_of_tied_models_go_into_safetensors(tmp_path: Path) -> None:
    model = torch.compile(Tied(), backend="eager")
    words = torch.arange(50)
    with diloco.Syncer(**ALONE, shutdown_s=0.5) as syncer, wrap(model, syncer.endpoint) as opt:
        for _ in range(4):
            opt.zero_grad()
            model(words).square().mean().backward()
            opt.step()
        learner = opt.learner
        every = learner.anchor_state_dict()
        assert set(every) == set(Tied().state_dict())
        assert every["head.weight"] is every["embed.weight"] and every["again.weight"] is every["shared.weight"]
        save_file(learner.anchor_state_dict(aliases=False), tmp_path / "global.safetensors")
        torch.save(every, tmp_path / "global.pt")
    unique = 4 * (50 * 8 + 8 * 8 + 8)
    blob = (tmp_path / "global.safetensors").read_bytes()
    header = struct.unpack("<Q", blob[:8])[0]
    assert len(blob) == 8 + header + unique
    assert set(json.loads(blob[8 : 8 + header])) == {"embed.weight", "shared.weight", "shared.bias"}
    assert (tmp_path / "global.pt").stat().st_size < unique + 8192
    fresh = Tied()
    missing = fresh.load_state_dict(load_file(tmp_path / "global.safetensors"), strict=False)
    assert missing.missing_keys == ["again.weight", "again.bias", "head.weight"] and not missing.unexpected_keys
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, every[name])
    Tied().load_state_dict(torch.load(tmp_path / "global.pt"))
