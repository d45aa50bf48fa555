"""A script: the nursery that forks the ranks of islands (island_ranks.py); under torchrun: one rank."""

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
import traceback
from datetime import timedelta
from typing import Any, NoReturn

import island_checkpoints  # noqa: F401  # its programs
import island_programs  # noqa: F401
import torch
import torch._dynamo  # which the first optimizer step would load
import torch.distributed as dist
from island_task import PROGRAMS, Here, SayWarnings, say


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
