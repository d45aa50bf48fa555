"""What the ranks of islands run. A script: the nursery that forks them (island_ranks.py); under torchrun: one rank."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import diloco
from diloco._sharded import local

BATCH = 12  # samples of an island's step, split over its ranks
Programs = dict[str, Callable[..., None]]
PROGRAMS: Programs = {}


def program(function: Callable[..., None]) -> Callable[..., None]:
    PROGRAMS[function.__name__] = function
    return function


class Here:
    """This rank."""

    job = rank = step = 0
    ranks = 1
    store: Any = None


def say(event: str, **values: Any) -> None:
    line = json.dumps({"event": event, "job": Here.job, "rank": Here.rank, **values}) + "\n"
    os.write(1, line.encode())  # one call: lines of several ranks share the pipe


class SayWarnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("warning", step=Here.step, text=record.getMessage()[:1000])


# ---- the task ----


def make_model(how: str = "alone", seed: int = 0) -> nn.Sequential:
    """33 rows and 5 rows do not divide by 2, one row leaves a rank with nothing."""
    hidden = 34 if how == "tp" else 33  # torch computes in parallel on equal shards only
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(17, hidden), nn.Tanh(), nn.Linear(hidden, 5), nn.Tanh(), nn.Linear(5, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 17, generator=torch.Generator().manual_seed(1000 + number))
    return inputs, inputs[:, :1].sin()


def shard(model: nn.Module, how: str, group: dist.ProcessGroup | None = None) -> nn.Module:
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if how in ("alone", "replicas"):  # replicas that do not talk to each other: the same data makes them equal
        return model
    if how == "ddp":
        return DistributedDataParallel(model, process_group=group)
    if how == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if how == "fsdp_bf16" else {}
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    elif group is not None:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def backward(model: nn.Module, number: int, how: str, group: dist.ProcessGroup | None = None) -> None:
    """Of this rank's rows of the batch; of all of them where ranks compute together on the same data."""
    inputs, targets = batch(number)
    if how not in ("tp", "replicas", "alone"):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        inputs, targets = inputs[rank::ranks], targets[rank::ranks]
    nn.functional.mse_loss(model(inputs).float(), targets).backward()


def tokens_of_rank(how: str, group: dist.ProcessGroup | None = None) -> int:
    if how == "alone":
        return BATCH
    if how in ("tp", "replicas"):
        return BATCH if dist.get_rank(group) == 0 else 0
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return len(range(rank, BATCH, ranks))


def held(model: nn.Module) -> list[torch.Tensor]:
    return [local(p).detach().clone() for p in model.parameters()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- programs ----


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


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def wrap(model: nn.Module, how: str, kind: str, syncer: str, **options: Any) -> diloco.DiLoCoOptimizer:
    tokens = tokens_of_rank(how, options.get("island"))
    inner = OPTIMIZERS[kind](model.parameters())
    opt = diloco.DiLoCoOptimizer(inner, model, syncer, tokens=lambda: tokens, **options)
    say("joined", incarnation=opt.learner.incarnation, stats=opt.stats(), how=how)
    return opt


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
        compute(step_s)
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
    """Each of them is refused; a good learner is made afterwards."""
    mesh = init_device_mesh("cpu", (Here.ranks,))
    for case in cases:
        options: dict[str, Any] = {}
        named: Any = odd_model(case, mesh)
        if case == "setting":
            options = {"sync_every": 4 + Here.rank}
        elif case == "nonsense":
            options = {"island": "all"}
        elif case == "mesh":
            options = {"island": mesh}
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
    with diloco.Learner(make_model(), syncer) as learner:
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
            compute(0.002)
    except ConnectionError as error:
        say("raised", text=str(error), at=time.monotonic())
    opt.close()
    say("done")


# ---- checkpoints ----

STEPS, CUT = 12, 6  # of a whole run; when it is saved


class Life:
    """One life of an island: model, optimizer, schedule; what a checkpoint of it has."""

    def __init__(self, how: str, kind: str, syncer: str, load: Callable[[Life], None] | None = None) -> None:
        self.how, self.rates = how, []
        self.model = shard(make_model(how), how)
        self.module = self.model.module if how == "ddp" else self.model
        self.inner = OPTIMIZERS[kind](self.model.parameters())
        self.load = load
        if load:
            load(self)  # the model
        tokens = tokens_of_rank(how)
        self.opt = diloco.DiLoCoOptimizer(self.inner, self.model, syncer, learner_id="a", tokens=lambda: tokens)
        self.schedule = lr_scheduler.CosineAnnealingLR(self.opt, 50)
        if load:
            load(self)  # all else

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.rates.append(self.opt.param_groups[0]["lr"])
            self.opt.zero_grad()
            backward(self.model, step, self.how)
            self.opt.step()
            self.schedule.step()

    def report(self, event: str, path: str) -> None:
        """Whole weights into a file, the rest as an event."""
        whole = {name: full(tensor) for name, tensor in self.module.named_parameters()}
        if Here.rank == 0:
            torch.save(whole, path)
        self.opt.close()
        stats = self.opt.stats()
        say(event, stats=stats, rates=self.rates, incarnation=self.opt.learner.incarnation)


class Distributed:
    """By torch.distributed.checkpoint."""

    def __init__(self, path: str) -> None:
        self.path = path

    def save(self, life: Life) -> None:
        model, optimizer = dcp_state.get_state_dict(life.model, life.opt)
        state = {"model": model, "optim": optimizer, "outer": life.opt.outer_state(), "schedule": life.schedule}
        dcp.save(state, checkpoint_id=self.path)

    def load(self, life: Life) -> None:
        if not hasattr(life, "opt"):
            model = dcp_state.get_model_state_dict(life.model)
            dcp.load({"model": model}, checkpoint_id=self.path)
            dcp_state.set_model_state_dict(life.model, model)
            return
        optimizer = dcp_state.get_optimizer_state_dict(life.model, life.opt)
        state = {"optim": optimizer, "outer": life.opt.outer_state(), "schedule": life.schedule}
        dcp.load(state, checkpoint_id=self.path)
        dcp_state.set_optimizer_state_dict(life.model, life.opt, optim_state_dict=optimizer)


class OneFile:
    """A file that rank 0 writes and all ranks read: whole tensors."""

    def __init__(self, path: str) -> None:
        self.path = path + ".pt"

    def save(self, life: Life) -> None:
        options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = dcp_state.get_state_dict(life.model, life.opt, options=options)
        outer = life.opt.outer_state(full=True).state_dict()
        if Here.rank == 0:
            state = {"model": model, "optim": optimizer, "outer": outer, "schedule": life.schedule.state_dict()}
            torch.save(state, self.path)
        if dist.is_initialized():
            dist.barrier()

    def load(self, life: Life) -> None:
        state = torch.load(self.path, weights_only=True)
        options = dcp_state.StateDictOptions(full_state_dict=True)
        if not hasattr(life, "opt"):
            dcp_state.set_model_state_dict(life.model, state["model"], options=options)
            return
        dcp_state.set_optimizer_state_dict(life.model, life.opt, optim_state_dict=state["optim"], options=options)
        life.opt.outer_state().load_state_dict(state["outer"])
        life.schedule.load_state_dict(state["schedule"])


class MainProcess:
    """As users of DDP do: `if rank == 0: torch.save(...)`, and every rank loads that file."""

    def __init__(self, path: str) -> None:
        self.path = path + ".main.pt"

    def save(self, life: Life) -> None:
        if Here.rank == 0:
            schedule = life.schedule.state_dict()
            torch.save(
                {"model": life.module.state_dict(), "opt": life.opt.state_dict(), "schedule": schedule}, self.path
            )
        if dist.is_initialized():
            dist.barrier()

    def load(self, life: Life) -> None:
        state = torch.load(self.path, weights_only=True)
        if not hasattr(life, "opt"):
            life.module.load_state_dict(state["model"])
            return
        life.opt.load_state_dict(state["opt"])
        life.schedule.load_state_dict(state["schedule"])


SAVERS: dict[str, Any] = {"dcp": Distributed, "one_file": OneFile, "main_process": MainProcess}


@program
def whole_run(how: str, kind: str, syncer: str, path: str) -> None:
    life = Life(how, kind, syncer)
    life.train(1, STEPS)
    life.report("done", path + ".whole")


@program
def first_half(how: str, kind: str, syncer: str, path: str, saver: str, cut: int = CUT) -> None:
    life = Life(how, kind, syncer)
    life.train(1, cut)
    SAVERS[saver](path).save(life)
    life.report("done", path + ".first")


@program
def second_half(how: str, kind: str, syncer: str, path: str, saver: str, cut: int = CUT) -> None:
    life = Life(how, kind, syncer, SAVERS[saver](path).load)
    say("resumed", stats=life.opt.stats())
    life.train(cut + 1, STEPS)
    life.report("done", path + ".second")


@program
def loads(path: str, syncer: str) -> None:
    """Every rank saves a file of its own; who may load which."""
    model = shard(make_model(), "fsdp")
    opt = diloco.DiLoCoOptimizer(OPTIMIZERS["adamw"](model.parameters()), model, syncer, learner_id="a")
    for step in range(3):
        opt.zero_grad()
        backward(model, step, "fsdp")
        opt.add_tokens(6)
        opt.step()
    opt.add_tokens(10 + Here.rank)  # of a micro-batch, for a step to come
    together = opt.outer_state().state_dict()
    whole = opt.outer_state(full=True).state_dict()
    before = held(model)
    torch.save(opt.state_dict(), f"{path}.{Here.rank}")
    dist.barrier()
    own, first = (torch.load(f"{path}.{rank}", weights_only=False) for rank in (Here.rank, 0))
    say("saved", together={k: v for k, v in together.items() if k not in ("anchors", "weights")}, stats=opt.stats())

    other = own | {"diloco": own["diloco"] | {"weights": own["diloco"]["weights"] | {"0.weight": torch.zeros(2)}}}
    cases: dict[str, Any] = {
        "rank 0's on all": first,
        "rank 1's on rank 0": torch.load(f"{path}.1", weights_only=False),
        "none on rank 1": own if Here.rank == 0 else {k: v for k, v in own.items() if k != "diloco"},
        "other model on rank 1": own if Here.rank == 0 else other,
    }
    for case, state in cases.items():
        try:
            opt.load_state_dict(state)
        except ValueError as error:
            say("refused", case=case, text=str(error), untouched=same(held(model), before))
    for case, load in (
        ("own", lambda: opt.load_state_dict(own)),
        ("together", lambda: opt.outer_state().load_state_dict(together)),
        ("whole", lambda: opt.outer_state().load_state_dict(whole)),
    ):
        load()
        say("loaded", case=case, same=same(held(model), before), pending=opt._pending_tokens, stats=opt.stats())
    if Here.rank == 1:
        os.unlink(f"{path}.1")
    say("losing", file=f"{path}.{Here.rank}")
    try:
        opt.load_state_dict(torch.load(f"{path}.{Here.rank}", weights_only=False))
    except ConnectionError as error:
        say("alone", text=str(error))
        os._exit(0)


# ---- running them ----


def run(name: str, arguments: dict[str, Any]) -> None:
    logging.getLogger("diloco").addHandler(SayWarnings(logging.WARNING))
    try:
        PROGRAMS[name](**arguments)
    except BaseException as error:
        say("error", type=type(error).__name__, text=str(error)[:1500], trace=traceback.format_exc()[-1500:])
        raise SystemExit(1) from None


def become(order: dict[str, Any]) -> NoReturn:
    """In the forked child."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: it ends with the nursery
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    Here.job, Here.rank, Here.ranks = order["job"], order["rank"], order["ranks"]
    arguments = order["arguments"]
    timeout_s = arguments.pop("timeout_s", 60.0)
    Here.store = dist.TCPStore("127.0.0.1", order["port"], is_master=False)
    if order["ranks"] > 1:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("ranks", Here.store),
            rank=order["rank"],
            world_size=order["ranks"],
            timeout=timedelta(seconds=timeout_s),
        )
    status = 0
    try:
        run(order["program"], arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as left:
        status = int(left.code or 0)
    atexit._run_exitfuncs()  # as an interpreter that ends; taking down the modules, which are shared, takes seconds
    os._exit(status)


def reap(children: dict[int, dict[str, Any]]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        order = children.pop(pid)
        Here.job, Here.rank = order["job"], order["rank"]
        say("exited", status=os.waitstatus_to_exitcode(status))


def under_torchrun(order: dict[str, Any]) -> None:
    """One rank that torchrun started, and may start again."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    Here.job, Here.rank, Here.ranks = order["job"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say("forked", pid=os.getpid())
    Here.store = dist.TCPStore("127.0.0.1", order["port"], is_master=False)
    dist.init_process_group("gloo")
    run(order["program"], order["arguments"])
    dist.destroy_process_group()


def nursery() -> None:
    """Forks a rank for each line on stdin."""
    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1, "fork needs a process of one thread"
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, dict[str, Any]] = {}
    gc.collect()
    gc.freeze()
    say("ready")
    data = b""
    while True:
        ready = select.select([0, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            reap(children)
        if 0 not in ready:
            continue
        more = os.read(0, 1 << 16)
        if not more:
            return
        *lines, data = (data + more).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os.close(0)
                os.open(os.devnull, os.O_RDONLY)
                become(order)
            children[pid] = order
            Here.job, Here.rank = order["job"], order["rank"]
            say("forked", pid=pid)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        under_torchrun(json.loads(sys.argv[1]))
    else:
        nursery()
