"""Metrics, where they go, and where the time went."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import LOCKSTEP, QUICK, Pair, alone, small_model, train_step, train_together

import diloco
from diloco import metrics
from diloco._goodput import goodput, lost_share
from diloco.console import Console

GROUPS = {"train", "outer", "sync", "goodput"}


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def parts(terms: dict[str, float]) -> float:
    return sum(value for name, value in terms.items() if name != "wall_s")


# ---- the flat dictionary ----


def test_keys_do_not_depend_on_what_is_in_use(nobody: str, tmp_path: Path) -> None:
    pair = Pair(nobody, sgd)
    keys = metrics.flatten(pair.opt.stats(), loss=1.0).keys()
    assert {key.split("/")[0] for key in keys} == GROUPS
    assert all(key.count("/") == 1 for key in keys)
    assert metrics.flatten(copy.deepcopy(pair.opt).stats(), loss=1.0).keys() == keys  # takes no part in a run
    assert metrics.flatten(pair.opt.learner.stats(), loss=1.0).keys() == keys
    pair.opt.close()
    assert metrics.flatten(pair.opt.stats(), loss=1.0).keys() == keys
    model = small_model()
    options: dict[str, Any] = {"ledger_dir": tmp_path, "tokens": lambda: 16}
    with diloco.Syncer(**{**QUICK, "adopt": "overwrite"}) as syncer:
        empty = metrics.flatten(pair.opt.stats(), syncer.status(), loss=1.0)
        with diloco.DiLoCoOptimizer(sgd(list(model.parameters())), model, syncer.endpoint, **options) as optimizer:
            for step in range(60):
                train_step(model, optimizer, step)
            stats = optimizer.stats()
            full = metrics.flatten(stats, syncer.status(), loss=1.0)
    assert metrics.flatten(stats, loss=1.0).keys() == keys
    assert full.keys() == empty.keys() > keys
    assert all(type(value) is float for value in full.values())
    assert full["outer/rounds_merged"] > 0
    assert full["train/tokens"] == 60 * 16
    assert full["sync/connected"] == 1.0


def test_tensorboard_gets_every_metric(nobody: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    values = metrics.flatten(Pair(nobody, sgd).opt.stats(), loss=2.5)
    with SummaryWriter(str(tmp_path)) as writer:
        metrics.to_tensorboard(writer, values, step=7)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert set(read.Tags()["scalars"]) == values.keys()
    (loss,) = read.Scalars("train/loss")
    assert (loss.step, loss.value) == (7, 2.5)


def wandb_records(file: Path) -> bytes:
    """What is in a .wandb file: a LevelDB log, cut into blocks of 32 KiB; each piece has a header of 7 bytes."""
    data, at, out = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        out += data[at + 7 : at + 7 + length]
        at += 7 + length
    return out


def test_wandb_gets_every_metric(nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    values = metrics.flatten(Pair(nobody, sgd).opt.stats(), loss=2.5)
    with wandb.init(project="diloco", dir=str(tmp_path)) as run:
        metrics.to_wandb(run, values, step=7)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # the file is another process's, which may still write when the run has ended
    while missing := [name for name in values if name.encode() not in wandb_records(file)]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.01)


def test_a_line_for_the_console(nobody: str) -> None:
    pair = Pair(nobody, sgd)
    console = Console()
    for step in range(20):
        pair.step(step)
    line = console.line(20, 2.3145, pair.opt.stats())
    pattern = r"step:   20  loss:  2\.3145  tps: [\d,]+  memory: +\d+\.\d\dGiB  merged:    0  goodput: \d+\.\d%"
    assert re.fullmatch(pattern, line), line


# ---- where the time went ----


def measured_twice(nobody: str) -> tuple[dict[str, float], dict[str, float]]:
    """The terms of one short life, and what this side's clock says of it."""
    model = small_model()
    began = time.perf_counter()
    optimizer = diloco.DiLoCoOptimizer(sgd(list(model.parameters())), model, nobody, tokens=lambda: 16)
    joined = time.perf_counter()
    outside = 0.0
    for step in range(40):
        start = time.perf_counter()
        while time.perf_counter() - start < 0.005:
            pass
        outside += time.perf_counter() - start
        train_step(model, optimizer, step)
    optimizer.close()
    wall = time.perf_counter() - began
    terms = optimizer.stats()["goodput"]
    assert optimizer.stats()["goodput"] == terms  # the wall ends with close()
    return terms, {"wall_s": wall, "catching_up_s": joined - began, "outside_s": outside}


def test_time_adds_up_and_is_where_it_was_spent(nobody: str) -> None:
    """Within 1 % of the wall time as measured from outside, in a try that the machine did not interrupt."""
    for _ in range(10):
        terms, ours = measured_twice(nobody)
        assert parts(terms) == pytest.approx(terms["wall_s"], rel=1e-9)
        assert min(terms.values()) >= 0.0
        assert ours["outside_s"] <= terms["compute_s"]
        wall = ours["wall_s"]
        if max(abs(terms[name] - ours[name]) for name in ("wall_s", "catching_up_s")) <= 0.01 * wall:
            return
    pytest.fail(f"none of ten tries is within 1 %: {terms} against {ours}")


def test_the_log_says_where_the_time_went(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diloco"), Pair(nobody, sgd, learner_id="a").opt:
        pass
    line = caplog.messages[-1]
    share = r"(\d+\.\d) % "
    names = ("compute", "lost", "staging", "waiting", "catching up")
    found = re.fullmatch(r"\[a\] \d+\.\d s: " + ", ".join(share + name for name in names), line)
    assert found, line
    assert sum(map(float, found.groups())) == pytest.approx(100.0, abs=0.3)


def test_waiting_is_lockstep_s_hold() -> None:
    """One of two learners is slower by 30 ms a step; the other waits for it at every round."""
    with diloco.Syncer(**LOCKSTEP) as syncer:

        def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
            if step < 100:
                time.sleep(0.03)
            return (model(torch.ones(1, 6)) ** 2).sum()

        slow, fast = train_together(syncer.endpoint, [small_model(), small_model()], steps=12, loss=loss)
    assert slow["hold_s"] < fast["hold_s"]
    assert fast["goodput"]["waiting_s"] > 0.5 * 12 * 0.03
    assert slow["goodput"]["compute_s"] > 12 * 0.03
    for stats in (slow, fast):
        assert parts(stats["goodput"]) == pytest.approx(stats["goodput"]["wall_s"], rel=1e-9)
        assert stats["hold_s"] <= stats["goodput"]["waiting_s"]
        assert stats["stage_s"] > 0.0
        assert stats["adopt_s"] > 0.0


def test_lost_is_the_share_that_was_discarded() -> None:
    discarded = {"overwritten": 30, "lost": 20, "in_flight": 99}
    stats = {"tokens": 100, "versions": [(1, 1), (1, 2)], "tokens_absent": 0, "discarded": discarded}
    assert lost_share(stats) == 0.25
    assert lost_share(stats | {"tokens_absent": 100}) == 0.5
    assert lost_share({"tokens": 0, "versions": [], "tokens_absent": 0, "discarded": {}}) == 0.0
    terms = goodput(wall_s=10.0, catching_up_s=1.0, boundaries_s=2.0, hold_s=1.5, closing_s=0.5, lost=0.25)
    assert terms == {
        "wall_s": 10.0,
        "compute_s": 6.5 * 0.75,
        "lost_s": 6.5 * 0.25,
        "staging_s": 0.5,
        "waiting_s": 2.0,
        "catching_up_s": 1.0,
    }


def test_a_profiler_shows_the_phases() -> None:
    """Staging and adoption under stable names, inside the boundary they belong to."""
    with alone(sync_every=4) as syncer:
        model = small_model()
        with diloco.DiLoCoOptimizer(
            sgd(list(model.parameters())), model, syncer.endpoint, tokens=lambda: 16
        ) as optimizer:
            train_step(model, optimizer, 0)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                for step in range(1, 8):
                    train_step(model, optimizer, step)
    ranges: dict[str, list[Any]] = {}
    for event in profile.events():
        ranges.setdefault(event.name, []).append(event)
    assert len(ranges["diloco::boundary"]) == 7
    assert len(ranges["diloco::stage"]) == 2
    assert len(ranges["diloco::adopt"]) == 2
    assert ranges["diloco::hold"]  # lockstep waits for the fragment
    for name in ("diloco::stage", "diloco::adopt", "diloco::hold"):
        assert all(event.cpu_parent.name == "diloco::boundary" for event in ranges[name])


def test_nothing_optional_is_imported(program: Callable[..., Any]) -> None:
    libraries = ["transformers", "lightning", "accelerate", "peft", "tensorboard", "wandb", "safetensors"]
    code = f"import diloco, diloco.metrics, sys; print([name for name in {libraries} if name in sys.modules])"
    process = program(code=code)
    assert process.wait() == 0, process.tail()
    assert process.stdout_lines == ["[]"]
