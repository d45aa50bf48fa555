"""diloco.explain: the plan of a model, without starting anything."""

import pytest
import torch
from torch import nn

import diloco


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)


def test_it_prints_fragments_tensors_bytes_due_steps_and_the_peak() -> None:
    plan = diloco.explain(Tied(), num_fragments=4, sync_every=8)
    assert plan.numel == 16000 + 4 * (256 + 16)
    assert [fragment.due for fragment in plan.fragments] == [2, 4, 6, 8]
    assert sum(fragment.numel for fragment in plan.fragments) == plan.numel
    names = [name for fragment in plan.fragments for name in fragment.tensors]
    assert sorted(names) == sorted({"embed.weight", *(f"layers.{i}.{n}" for i in range(4) for n in ("weight", "bias"))})
    assert plan.oversized == ["embed.weight"]
    assert plan.peak_up_bytes == 32000
    assert plan.peak_up_bytes / plan.ideal_peak_up_bytes == pytest.approx(3.75, rel=0.01)
    for words in ("4 fragments (balanced)", "due step", "embed.weight", "peak: 31.2 KiB", "equal share"):
        assert words in str(plan)


def test_values_do_not_matter() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(3)))
    plan = diloco.explain(model.to(torch.bfloat16), num_fragments=3)
    assert plan.numel == 3 << 32
    assert {fragment.down_bytes for fragment in plan.fragments} == {2 << 32}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap_steps must be below sync_every"):
        diloco.explain(nn.Linear(2, 2), sync_every=1)
    with pytest.raises(TypeError, match="did you mean num_fragments"):
        diloco.explain(nn.Linear(2, 2), num_fragment=1)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, or its named_parameters.*got NoneType"):
        diloco.explain(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'odd': expected float32.*got float8_e4m3fn"):
        diloco.explain(nn.ParameterDict({"odd": nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn))}))
