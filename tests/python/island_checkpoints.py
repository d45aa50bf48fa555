"""Islands that are saved and resumed, by every way of saving there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from island_task import OPTIMIZERS, Here, backward, full, held, make_model, program, same, say, shard, tokens_of_rank
from safetensors.torch import save_model
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import diloco

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


class FileEach(MainProcess):
    """Every rank a file of its own, with its shards."""

    def __init__(self, path: str) -> None:
        self.path = f"{path}.rank{Here.rank}.pt"

    def save(self, life: Life) -> None:
        state = {"model": life.module.state_dict(), "opt": life.opt.state_dict()}
        torch.save(state | {"schedule": life.schedule.state_dict()}, self.path)


SAVERS: dict[str, Any] = {
    "dcp": Distributed,
    "one_file": OneFile,
    "main_process": MainProcess,
    "file_each": FileEach,
}


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


class Tied(nn.Module):
    """7 rows and 5 columns do not divide by 2. It has a frozen tensor and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("runs", torch.ones(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(words))) * self.frozen)


@program
def exported(how: str, syncer: str, path: str) -> None:
    """All ranks train on the same words. The global weights as each rank has them, and whole in a file of rank 0's."""
    torch.manual_seed(0)
    model: Any = Tied()
    if how == "ddp":
        model = DistributedDataParallel(model)
    elif how == "fsdp":
        fully_shard(model)
    else:  # some tensors sharded, some not
        fully_shard(model.inner)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    with diloco.DiLoCoOptimizer(inner, model, syncer, learner_id="a", tokens=lambda: 7) as opt:
        for _ in range(6):
            opt.zero_grad()
            nn.functional.cross_entropy(model(torch.arange(7)), torch.arange(7).roll(1)).backward()
            opt.step()
        parts, whole = opt.learner.anchor_state_dict(), opt.learner.anchor_state_dict(full=True)
    torch.save(whole, f"{path}.{Here.rank}")
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    own = dcp_state.get_model_state_dict(model, options=options)
    if Here.rank == 0:
        plain = Tied()
        plain.load_state_dict(own | whole)
        save_model(plain, path)
    tied = [one["head.weight"] is one["embed.weight"] for one in (parts, whole)]
    say("done", kinds={name: type(tensor).__name__ for name, tensor in parts.items()}, tied=tied)
