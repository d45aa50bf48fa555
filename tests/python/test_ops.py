"""The dispatcher operators: schemas, fake kernels, golden values, words of refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

import diloco

OPS = torch.ops.diloco
NESTEROV = "outer_optimizer=nesterov outer_lr=0.7 outer_momentum=0.9"


def table(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


SHAPES = ((3, 4), (5,), ())


def diff_arguments() -> tuple[Any, ...]:
    return table(*SHAPES), table(*SHAPES), torch.zeros(192, dtype=torch.uint8), [0, 64, 128], [True, False, False]


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fragment_diff": (OPS.fragment_diff, diff_arguments()),
    "fragment_adopt_rebase": (
        OPS.fragment_adopt,
        (table(*SHAPES), table(*SHAPES), table(*SHAPES), table(*SHAPES), "rebase", 0.0),
    ),
    "fragment_adopt_blend": (OPS.fragment_adopt, (table(*SHAPES), table(*SHAPES), table(*SHAPES), None, "blend", 0.25)),
    "mean_merge": (OPS.mean_merge, (table((3, 4), (3, 4)), torch.tensor([1.0, 3.0], dtype=torch.float64))),
    "rda_merge": (OPS.rda_merge, (table((3, 4), (3, 4)), torch.tensor([1.0, 3.0], dtype=torch.float64))),
    "outer_step_sgd": (OPS.outer_step, (torch.ones(4), torch.zeros(4), None, "outer_lr=0.5", 0)),
    "outer_step_nesterov": (OPS.outer_step, (torch.ones(4), torch.zeros(4), torch.zeros(4), NESTEROV, 0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    op, arguments = CALLS[name]
    opcheck(op.default, arguments)


def test_diff_then_adopt_meets_the_global_values() -> None:
    params, anchors, out, offsets, bf16 = diff_arguments()
    OPS.fragment_diff(params, anchors, out, offsets, bf16)
    assert torch.equal(out[64:84].view(torch.float32), anchors[1] - params[1])
    assert torch.equal(out[:24].view(torch.bfloat16).view(3, 4), (anchors[0] - params[0]).bfloat16())

    sent = [anchor - param for anchor, param in zip(anchors, params, strict=True)]
    following = [anchor - delta for anchor, delta in zip(anchors, sent, strict=True)]
    OPS.fragment_adopt(params, anchors, following, sent, "rebase", 0.0)
    for param, anchor, value in zip(params, anchors, following, strict=True):
        assert torch.equal(anchor, value)
        torch.testing.assert_close(param, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    base = torch.zeros(4, 10, dtype=dtype)
    param = base[:, 2:6].t()
    anchor, following = torch.zeros(4, 4), torch.arange(16.0).reshape(4, 4)
    OPS.fragment_adopt([param], [anchor], [following], None, "overwrite", 0.0)
    assert torch.equal(param.float(), following)
    assert torch.equal(base[:, 2:6].t().float(), following)
    assert not base[:, :2].any()
    assert not base[:, 6:].any()


def test_parameters_that_require_grad() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    OPS.fragment_adopt([param], [torch.zeros(3)], [torch.ones(3)], None, "overwrite", 0.0)
    assert param.tolist() == [1.0, 1.0, 1.0]
    assert param.grad_fn is None


@pytest.mark.parametrize(
    ("weights", "mean", "rda"),
    [([1.0, 1.0], [1.5, 2.0], [2.474874, 2.474874]), ([1.0, 3.0], [0.75, 3.0], [1.185854, 3.557562])],
)
def test_published_values(weights: list[float], mean: list[float], rda: list[float]) -> None:
    deltas = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    given = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(OPS.mean_merge(deltas, given), torch.tensor(mean))
    torch.testing.assert_close(OPS.rda_merge(deltas, given), torch.tensor(rda))


@pytest.mark.parametrize(
    ("settings", "floats", "inner"),
    [
        ("outer_lr=0.7", 0, lambda p: torch.optim.SGD(p, lr=0.7)),
        (NESTEROV, 1, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
        (
            "outer_optimizer=adam outer_lr=0.3 outer_momentum=0.9 outer_beta2=0.95 outer_epsilon=0.1",
            2,
            lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.9, 0.95), eps=0.1),
        ),
        (
            "outer_optimizer=adam outer_lr=0.3 outer_beta2=0.999 outer_epsilon=1e-8",
            2,
            lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.0, 0.999), eps=1e-8),
        ),
    ],
)
def test_outer_step_is_torchs(settings: str, floats: int, inner: Any) -> None:
    theta, state = torch.ones(8), torch.zeros(floats * 8) if floats else None
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = inner([parameter])
    for step in range(50):
        gradient = torch.randn(8, generator=torch.Generator().manual_seed(step))
        OPS.outer_step(gradient, theta, state, settings, step)
        parameter.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(theta, parameter.detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: OPS.mean_merge([], torch.ones(0, dtype=torch.float64)), "at least one delta"),
        (lambda: OPS.mean_merge([torch.ones(2)], torch.ones(1)), "1-D float64"),
        (lambda: OPS.rda_merge([torch.ones(2), torch.ones(3)], torch.ones(2, dtype=torch.float64)), "delta 1 to have"),
        (lambda: OPS.mean_merge([torch.ones(2)], torch.zeros(1, dtype=torch.float64)), "positive weight"),
        (lambda: OPS.mean_merge([torch.full((2,), torch.nan)], torch.ones(1, dtype=torch.float64)), "number 0 has inf"),
        (lambda: OPS.outer_step(torch.ones(2), torch.ones(2), None, "outer_optimizer=adan", 0), "did you mean adam"),
        (lambda: OPS.outer_step(torch.ones(2), torch.ones(2), None, NESTEROV, 0), "needs `state`"),
        (lambda: OPS.outer_step(torch.ones(2), torch.ones(2), torch.ones(3), "outer_optimizer=adam", 0), "4 values"),
        (lambda: OPS.outer_step(torch.ones(2), torch.ones(2), None, "sync_every=3", 0), "expected settings like"),
        (lambda: OPS.outer_step(torch.ones(2), torch.ones(2), None, "", -1), "expected step >= 0"),
        (lambda: OPS.outer_step(torch.ones(3), torch.ones(2), None, "", 0), "2 values in gradient, got 3"),
    ],
)
def test_refusals(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_a_real_process_group_is_taken(tmp_path: Any) -> None:
    """Tensors work with the wrong copy of pybind11 too; only a ProcessGroup shows the difference."""
    from torch import distributed

    from diloco import _C

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert _C.rank_size(distributed.group.WORLD) == (0, 1)
    finally:
        distributed.destroy_process_group()
    assert torch.compiled_with_cxx11_abi()
    assert diloco.__version__ == _C.__version__
