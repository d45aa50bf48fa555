"""Every kind of parameter: what is synchronised, what is refused, what stays as it is (field cases F024 to F041)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import LOCKSTEP, small_model, train_together

import diloco


def wrap(model: Any, address: str, parameters: Any = None, **options: Any) -> diloco.DiLoCoOptimizer:
    inner = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.1)
    return diloco.DiLoCoOptimizer(inner, model, syncer=address, tokens=lambda: 1, **options)


class Mixed(nn.Module):
    """0-d, one-element, empty, transposed, sliced, tied, frozen, bf16 and f32 parameters in one fragment."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.3

        self.embed = nn.Parameter(random(6, 5))
        self.head = self.embed  # tied
        self.transposed = nn.Parameter(random(4, 5).t())
        self.storage = torch.full((4, 12), 7.0)
        self.storage[:, 4:9] = random(4, 5)
        self.sliced = nn.Parameter(self.storage[:, 4:9])
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.nothing = nn.Parameter(torch.zeros(0, 8))
        self.frozen = nn.Parameter(random(5, 4), requires_grad=False)
        self.same_shape = nn.Parameter(random(5, 4))
        self.short = nn.Parameter(random(4, 5).to(torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs @ self.embed  # (n, 5)
        hidden = hidden @ (self.transposed + self.frozen + self.same_shape)  # (n, 4)
        hidden = torch.tanh(hidden @ (self.sliced + self.short.float()))  # (n, 5)
        empty = nn.functional.linear(torch.ones(1, 8), self.nothing).sum()
        return (hidden @ self.head.t()) * self.temperature * self.scale + empty  # (n, 6)


def mixed_loss(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(inputs), inputs.sin())


def averaged(models: list[nn.Module], steps: int, loss: Callable[[nn.Module, int], torch.Tensor]) -> None:
    """Plain synchronous averaging every 4 steps, tensor by tensor in f32: what LOCKSTEP asks for."""
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in models]
    for step in range(1, steps + 1):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, 100 * index + step).backward()
            optimizer.step()
        if step % 4 == 0:
            with torch.no_grad():
                for group in zip(*(m.parameters() for m in models), strict=True):
                    mean = torch.stack([p.float() for p in group]).mean(dim=0)
                    for parameter in group:
                        parameter.copy_(mean)


def layout_of(model: nn.Module) -> dict[str, Any]:
    return {n: (id(p), p.shape, p.dtype, p.stride(), p.data_ptr()) for n, p in model.named_parameters()}


def test_mixed_model_equals_plain_averaging() -> None:
    models: list[nn.Module] = [Mixed(), Mixed()]
    reference: list[nn.Module] = [Mixed(), Mixed()]
    before = [layout_of(model) for model in models]
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, steps=12, loss=mixed_loss)
        status, weights = syncer.status(), syncer.weights()
    averaged(reference, steps=12, loss=mixed_loss)
    for model, plain, layout in zip(models, reference, before, strict=True):
        assert layout_of(model) == layout
        assert model.head is model.embed
        assert torch.equal(model.frozen, Mixed().frozen)
        assert (model.storage[:, :4] == 7.0).all()
        assert (model.storage[:, 9:] == 7.0).all()
        for name, parameter in plain.named_parameters():
            tolerance = 0.02 if name == "short" else 2e-6
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=tolerance, atol=tolerance)
    assert models[0].temperature.item() != 0.5
    # One entry for the tied pair, none for the frozen tensor.
    assert sum(fragment["numel"] for fragment in status["fragments"]) == 30 + 20 + 20 + 1 + 1 + 0 + 20 + 20
    assert set(weights) == {name for name, p in models[0].named_parameters(remove_duplicate=False) if p.requires_grad}
    assert weights["head"] is weights["embed"]


def test_fragment_of_empty_tensors_only_does_not_stall() -> None:
    def model() -> nn.Module:
        return nn.ParameterDict({"empty": nn.Parameter(torch.zeros(0, 8)), "weight": nn.Parameter(torch.ones(3))})

    models = [model(), model()]
    with diloco.Syncer(**LOCKSTEP | {"num_fragments": 2}, shutdown_s=0.5) as syncer:
        stats = train_together(
            syncer.endpoint, models, 12, lambda m, step: (m["weight"].square() * step).mean() + m["empty"].sum()
        )
    assert all(s["contributions_merged"] >= 4 for s in stats)
    assert models[0]["empty"].shape == (0, 8)


def test_channels_last_and_contiguous_learners_agree() -> None:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2))
    models = [copy.deepcopy(conv).to(memory_format=torch.channels_last), copy.deepcopy(conv)]
    reference = [copy.deepcopy(conv), copy.deepcopy(conv)]

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))).square().mean()

    strides = models[0][0].weight.stride()
    assert strides != models[1][0].weight.stride()
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, 12, loss)
    averaged(reference, 12, loss)
    assert models[0][0].weight.stride() == strides
    for model, plain in zip(models, reference, strict=True):
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6)


def test_order_of_registration_does_not_matter() -> None:
    def model(names: str) -> nn.ParameterDict:
        values = {"a": 1.0, "b": 2.0, "c": 3.0}
        return nn.ParameterDict({name: nn.Parameter(torch.full((4,), values[name])) for name in names})

    models = [model("abc"), model("cab")]
    with diloco.Syncer(**LOCKSTEP, shutdown_s=0.5) as syncer:
        train_together(syncer.endpoint, models, 8, lambda m, _: sum(p.sum() * 0 for p in m.values()))
    for trained in models:
        assert [trained[name][0].item() for name in "abc"] == [1.0, 2.0, 3.0]


def test_names_lose_the_prefixes_of_wrappers(nobody: str) -> None:
    model = small_model()
    compiled = torch.compile(model, backend="eager")
    holder = nn.Module()
    holder.module = compiled  # as DDP holds it
    for wrapped in (compiled, holder):
        with wrap(wrapped, nobody) as opt:
            assert list(opt.learner.anchor_state_dict()) == list(model.state_dict())


def test_anchor_is_what_was_received(nobody: str) -> None:
    model = Mixed()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with wrap(model, nobody) as opt:
        mixed_loss(model, 0).backward()
        opt.step()
        anchors = opt.learner.anchor_state_dict()
        assert set(anchors) == set(start) - {"frozen"}
        for name, anchor in anchors.items():
            assert torch.equal(anchor, start[name])
            assert anchor.dtype == start[name].dtype


# ---- refused at wrap time, with the name ----


def test_wrapped_twice(nobody: str) -> None:
    model = small_model()
    with wrap(model, nobody, learner_id="first") as opt:
        with pytest.raises(ValueError, match="got a DiLoCoOptimizer: this one is wrapped already"):
            diloco.DiLoCoOptimizer(opt, model, syncer=nobody)
        with pytest.raises(ValueError, match=r"wrapped already, by learner 'first'.*or close\(\) it first"):
            diloco.DiLoCoOptimizer(opt.inner, model, syncer=nobody)


def test_not_an_optimizer(nobody: str) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Sequential"):
        diloco.DiLoCoOptimizer(small_model(), small_model(), syncer=nobody)  # type: ignore[arg-type]
    model = small_model()
    with pytest.raises(TypeError, match="pairs of name and tensor"):
        wrap(list(model.parameters()), nobody, model.parameters())


def test_parameters_that_are_not_in_the_model(nobody: str) -> None:
    other = small_model(1)
    with pytest.raises(
        ValueError, match=r"4 parameter\(s\) that are not in the model .*number 0 of group 0: float32 \(8, 6\)"
    ):
        wrap(small_model(), nobody, other.parameters())
    with pytest.raises(ValueError, match=r"not in the model \('2.bias: float32 \(2,\)'"):
        model = small_model()
        stray = [("2.bias", other[2].bias)]
        wrap(model, nobody, [*list(model.named_parameters())[:3], *stray])


def test_nothing_to_synchronise(nobody: str) -> None:
    model = small_model().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to synchronise: none of the optimizer's 4 parameters requires grad"):
        wrap(model, nobody)
    with pytest.raises(ValueError, match="nothing to synchronise"):
        diloco.Learner(model, nobody)


def one(tensor: torch.Tensor, requires_grad: bool = True) -> nn.ParameterDict:
    return nn.ParameterDict({"fine": nn.Parameter(torch.ones(2)), "odd": nn.Parameter(tensor, requires_grad)})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (one(torch.ones(2).to(torch.float8_e4m3fn)), r"'odd' is float8_e4m3fn \(2,\); expected"),
        (one(torch.ones(2, dtype=torch.complex64).conj()), "'odd' is a conjugated view"),
        (one(torch.ones(2, dtype=torch.uint8), False), r"'odd' is uint8 \(2,\); expected"),
        (one(torch.ones(2, device="meta")), "'odd' is on the meta device"),
        (one(torch.ones(1).expand(3)), "'odd' is an expanded tensor"),
        (nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), "'0.weight' has no shape yet"),
    ],
    ids=["float8", "conjugated", "integer", "meta", "expanded", "lazy"],
)
def test_cannot_travel(nobody: str, model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrap(model, nobody)


# ---- said once ----


def test_notices(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1).double())
    with wrap(model, nobody, [*model[0].parameters(), model[2].weight]):
        pass
    assert caplog.text.count("2 floating-point buffers stay local") == 1
    assert "'1.running_mean', '1.running_var'" in caplog.text
    assert "3 trainable parameter(s) of the model are not in this optimizer and stay local: '1.weight'" in caplog.text
    assert "'2.weight' is float64; it is synchronised with float32 precision" in caplog.text


def test_changed_parameter_is_refused_by_name() -> None:
    model = small_model()
    with diloco.Syncer(shutdown_s=0.5, sync_every=1, overlap_steps=0) as syncer, wrap(model, syncer.endpoint) as opt:
        model.to(torch.bfloat16)
        with pytest.raises(ValueError, match=r"parameter '0.*' was float32 .* and is bfloat16 .* now"):
            for _ in range(200):
                opt.zero_grad()
                model(torch.ones(1, 6, dtype=torch.bfloat16)).sum().backward()
                opt.step()


def test_shard_seed_differs_by_learner_and_not_by_life() -> None:
    seeds = {diloco.shard_seed(name, seed) for name in ("a", "b", "c") for seed in (0, 1)}
    assert len(seeds) == 6
    assert diloco.shard_seed("a", 1) == diloco.shard_seed("a", 1)
    torch.manual_seed(diloco.shard_seed("a"))
