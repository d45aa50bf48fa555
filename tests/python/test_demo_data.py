"""The demo's text and model: parts are disjoint and complete, the same seed gives the same batches and weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.demo import data
from diloco.demo.model import CONTEXT, ByteModel, held_out_loss, loss_of

SHARDS = 4


def test_every_file_is_in_exactly_one_part_and_none_is_empty() -> None:
    files = data.source_files(data.library_folder())
    parts = {part: [f for f in files if data.part_of(f, SHARDS) == part] for part in range(data.HELD_OUT, SHARDS)}
    assert sum(map(len, parts.values())) == len(files) == len(set(files))
    assert all(len(data.load_part(part, SHARDS)) >= data.LEAST_BYTES for part in parts)


def test_the_held_out_part_does_not_depend_on_the_number_of_shards() -> None:
    for file in data.source_files(data.library_folder()):
        assert len({data.part_of(file, shards) == data.HELD_OUT for shards in (1, 2, 4, 7)}) == 1


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "json/b.py", "test/c.py", "site-packages/d.py", "x/tests/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    assert [f.as_posix() for f in data.source_files(tmp_path)] == ["a.py", "json/b.py"]


def test_a_stripped_library_is_refused_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass")
    with pytest.raises(RuntimeError, match=str(tmp_path)):
        data.load_part(0, SHARDS, tmp_path)


def test_batches_depend_on_the_seed_alone() -> None:
    text = torch.arange(10_000, dtype=torch.int64).remainder(251).to(torch.uint8)
    first, again, other = (next(data.batches(text, seed, 8, CONTEXT)) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert first[0].shape == first[1].shape == (8, CONTEXT)
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_windows_reach_both_ends() -> None:
    text = torch.arange(1000, dtype=torch.int64).remainder(256).to(torch.uint8)
    windows = data.held_out_windows(text, 5, CONTEXT)
    assert windows.shape == (5, CONTEXT + 1)
    assert windows[0, 0] == text[0] and windows[-1, -1] == text[-1]


def test_the_model_is_the_promised_size_and_learns() -> None:
    model, twin = ByteModel(3), ByteModel(3)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.87e6, rel=0.02)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    inputs, targets = next(data.batches(data.load_part(0, SHARDS), 0, 2, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = loss_of(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.6, abs=0.3)  # about log(256): nothing is known yet
    assert losses[-1] < losses[0]


def test_held_out_loss_is_the_mean_over_windows() -> None:
    model = ByteModel(0)
    windows = data.held_out_windows(data.load_part(data.HELD_OUT, SHARDS), 5, 32)
    singly = [held_out_loss(model, window[None]) for window in windows]
    assert held_out_loss(model, windows, batch=2) == pytest.approx(sum(singly) / 5, rel=1e-5)


def test_the_model_does_not_look_ahead() -> None:
    model = ByteModel(0)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-5)
    assert not torch.allclose(before[0, 10:], after[0, 10:], atol=1e-5)
