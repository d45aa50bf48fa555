"""What the ranks of islands run, but for checkpoints (island_checkpoints.py)."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from island_task import (
    OPTIMIZERS,
    Here,
    backward,
    batch,
    held,
    make_model,
    program,
    same,
    say,
    shard,
    tokens_of_rank,
    wrap,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import diloco
from diloco._sharded import local


@program
def equality(variants: list[tuple[str, str]], syncer: str) -> None:
    """The bare and the wrapped script, bit by bit, without a syncer."""
    for how, kind in variants:
        found = []
        for wrapped in (False, True):
            model = shard(make_model(how), how)
            before = held(model)
            optimizer = OPTIMIZERS[kind](model.parameters())
            if wrapped:
                tokens = tokens_of_rank(how)
                optimizer = diloco.DiLoCoOptimizer(optimizer, model, syncer, tokens=lambda n=tokens: n)
            for step in range(6):
                optimizer.zero_grad()
                backward(model, step, how)
                optimizer.step()
            found.append(held(model))
            if wrapped:
                optimizer.close()
        stats = optimizer.stats()
        say("compared", how=how, kind=kind, same=same(*found), moved=not same(before, found[0]), stats=stats)
    say("done")


@program
def beside_the_bare_one(how: str, kind: str, syncer: str, steps: int, step_s: float) -> None:
    """The bare script, and the wrapped one as the only learner of a run that merges behind its back."""
    found = []
    for wrapped in (False, True):
        model = shard(make_model(how), how)
        optimizer: Any = OPTIMIZERS[kind](model.parameters())
        if wrapped:
            optimizer = wrap(model, how, kind, syncer)
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, step, how)
            optimizer.step()
            time.sleep(step_s if wrapped else 0.0)  # so that rounds come and go between the steps
        found.append(held(model))
    optimizer.close()
    apart = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True) if a.numel())
    say("done", apart=apart, stats=optimizer.stats())


class Commands:
    """What the test told rank 0, on all ranks at the same step."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._done = group, ""

    def take(self) -> str:
        """ "" if there is nothing new."""
        command = ""
        if dist.get_rank(self._group) == 0 if dist.is_initialized() else True:
            store = Here.store
            command = store.get("command").decode() if store.check(["command"]) else ""
        if dist.is_initialized():
            box = [command]
            dist.broadcast_object_list(box, group=self._group, group_src=0)
            command = box[0]
        if command == self._done:
            return ""
        self._done = command
        return command


@program
def train(
    how: str,
    syncer: str,
    data: int = 0,
    steps: int = 0,
    kind: str = "plain",
    step_s: float = 0.0,
    groups: list[list[int]] | None = None,
    **options: Any,
) -> None:
    """So many steps, or until told to stop. Learner `data` sees the batches 1000 * data + step. `groups`: the ranks of
    each island of this job; default: one island."""
    group = None
    for members in groups or ():
        made = dist.new_group(members)
        group = made if Here.rank in members else group
    if group is not None:
        options["island"] = group
    model = shard(make_model(how), how, group)
    opt = wrap(model, how, kind, syncer, **options)
    commands = None if steps else Commands(None)
    step = 0
    calls: list[tuple[float, float]] = []  # when, and how long it took, of each boundary
    opt.learner.take_blocked()
    while step < steps or not steps:
        command = commands.take() if commands else ""
        if command == "stop":
            break
        if command:
            told(command, model, opt)
        opt.zero_grad()
        Here.step = step + 1
        backward(model, 1000 * data + step + 1, how, group)
        opt.step()
        calls += [(time.monotonic(), seconds) for seconds in opt.learner.take_blocked()]
        step += 1
        time.sleep(step_s)  # the pace of a step, on a machine that others use too
    opt.close()
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in held(model))
    if Here.rank == 0:
        say_calls(calls)
    say("done", stats=opt.stats(), incarnation=opt.learner.incarnation, steps=step, finite=finite)


def say_calls(calls: list[tuple[float, float]]) -> None:
    """The longest call of each tenth of a second; a line at a time, which the pipe does not tear."""
    longest: dict[int, float] = {}
    for when, seconds in calls:
        longest[int(when * 10)] = max(longest.get(int(when * 10), 0.0), seconds)
    for tenth, seconds in longest.items():
        say("call", at=tenth / 10, longest_s=seconds)


def told(command: str, model: nn.Module, opt: diloco.DiLoCoOptimizer) -> None:
    what, _, rank = command.partition(":")
    if what == "poison" and Here.rank == int(rank):
        with torch.no_grad():
            local(next(model.parameters())).view(-1)[0] = float("nan")
    if what == "freeze":
        opt.param_groups[0]["lr"] = 0.0
    say("told", command=command)


@program
def accumulate(how: str, syncer: str, scaled: bool) -> None:
    """Two micro-batches a step, the first without a reduction; with `scaled`, step 3 has an infinite gradient and a
    GradScaler skips it. Bare and wrapped."""
    found = []
    for wrapped in (False, True):
        model = shard(make_model(), how)
        optimizer: Any = OPTIMIZERS["adamw"](model.parameters())
        if wrapped:
            optimizer = diloco.DiLoCoOptimizer(optimizer, model, syncer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for step in range(6):
            for micro in range(2):
                first = micro == 0
                if how == "fsdp":
                    model.set_requires_gradient_sync(not first)  # type: ignore[operator]
                with model.no_sync() if how == "ddp" and first else nullcontext():  # type: ignore[operator]
                    inputs, targets = (part[Here.rank :: Here.ranks] for part in batch(2 * step + micro))
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    scaler.scale(loss * float("inf") if scaled and step == 3 else loss).backward()
                if wrapped:
                    optimizer.add_tokens(len(inputs))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(held(model))
        if wrapped:
            optimizer.close()
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in found[1])
    say("done", same=same(*found), finite=finite, stats=optimizer.stats())


# ---- refusals ----


def odd_model(case: str, mesh: Any) -> list[tuple[str, nn.Parameter]]:
    """What rank 1 has in place of the others' model."""
    named = list(make_model().named_parameters())
    if case == "partial":
        return [("w", nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()])))]
    if Here.rank == 0:
        return named
    name, tensor = named[2]
    return {
        "shape": [*named[:2], (name, nn.Parameter(torch.zeros(5, 34))), *named[3:]],
        "name": [*named[:2], ("other", tensor), *named[3:]],
        "dtype": [*named[:2], (name, nn.Parameter(tensor.detach().bfloat16())), *named[3:]],
        "count": named[:5],
    }.get(case, named)


@program
def refusals(cases: list[str], syncer: str) -> None:
    """Each of them is refused; a good learner is made afterwards, of the ranks of a mesh."""
    mesh = init_device_mesh("cpu", (Here.ranks,))
    for case in cases:
        options: dict[str, Any] = {}
        named: Any = odd_model(case, mesh)
        if case == "setting":
            options = {"sync_every": 4 + Here.rank}
        elif case == "nonsense":
            options = {"island": "all"}
        elif case == "mesh":
            options = {"island": init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))}
        elif case == "true":
            options = {"island": True}
        elif case == "stranger":
            options = {"island": dist.new_group([0])}
        elif case == "dtensor_alone":
            named, options = shard(make_model(), "fsdp"), {"island": False}
        try:
            diloco.Learner(named, syncer, **options).close()
        except Exception as error:
            say("refused", case=case, type=type(error).__name__, text=str(error))
        else:
            say("refused", case=case, type="nothing", text="")
    with diloco.Learner(make_model(), syncer, island=mesh) as learner:
        learner.step(1)
        say("done", stats=learner.stats())


@program
def one_forgets(syncer: str) -> None:
    if Here.rank == 0:
        try:
            diloco.Learner(make_model(), syncer)
        except ConnectionError as error:
            say("gave_up", text=str(error))
    Here.store.wait(["command"], timedelta(seconds=60))
    say("done")


@program
def one_dies(syncer: str, how: str = "replicas") -> None:
    """Rank 1 is killed between two steps; nothing but the learner talks to it."""
    opt = wrap(shard(make_model(how), how), how, "plain", syncer)
    step = 0
    try:
        while True:
            opt.zero_grad()
            step += 1
            opt.step()
            if step == 5:
                say("under_way")
            time.sleep(0.002)
    except ConnectionError as error:
        say("raised", text=str(error), at=time.monotonic())
    opt.close()
    say("done")
