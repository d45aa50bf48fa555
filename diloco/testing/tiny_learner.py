"""A learner small enough to be killed by the dozen: a tiny regression on CPU that reports every step as a JSON line.

    python -m diloco.testing.tiny_learner --syncer 127.0.0.1:29400 --id a --steps 200

stdout, one object a line:
  start {pid}; joined {state, epoch, versions, join_s, held_out, fingerprint};
  step {step, loss, held_out, tokens, in_diloco_s, longest_call_s, gap_s, longest_gap_s, state, epoch, clock, adoptions,
        merged, t}; idle; error {type, text};
  done {stats, steps, tokens, in_diloco_s, longest_call_s, longest_gap_s, elapsed_s, fingerprint}.
stdin: "idle" stops stepping until "go"; end of file ends the run at the next step boundary. Without --steps it runs
until then. The task is the same for all learners (a fixed teacher); the samples differ with the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from typing import Any

import torch

import diloco
from diloco.logs import log_to_stderr


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tiny learner for tests", allow_abbrev=False)
    parser.add_argument("--syncer", required=True, help="HOST:PORT")
    parser.add_argument("--id", required=True, help="learner id")
    parser.add_argument("--run-id", default=None)
    parser.add_argument("--steps", type=int, default=0, help="0: until stdin ends")
    parser.add_argument("--step-time-s", type=float, default=0.01, help="least time from one step to the next")
    parser.add_argument("--dir", default=None, help="where the ledger file goes")
    parser.add_argument("--die-at", default="", help="SIGKILL to itself: before-join, after-join or step:N")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--init-seed", type=int, default=0, help="of the first parameters")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2, help="hidden layers")
    parser.add_argument("--batch", type=int, default=32, help="samples a step; one sample is one token")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--join-timeout-s", type=float, default=10.0)
    parser.add_argument("--give-up-after-s", type=float, default=0.0)
    parser.add_argument("--flush-s", type=float, default=5.0)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON object of settings to insist on")
    return parser.parse_args(argv)


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def make_model(width: int, depth: int, seed: int) -> torch.nn.Module:
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = [torch.nn.Linear(8, width), torch.nn.Tanh()]
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 4))
    torch.set_rng_state(generator_state)
    return model


class Task:
    """Samples of a fixed teacher; `held_out` are never trained on."""

    def __init__(self, seed: int, batch: int) -> None:
        self.teacher = make_model(16, 1, seed=12345).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.mul_(4.0)  # far from linear, so that the loss falls for some hundred steps
        self.batch = batch
        self.random = torch.Generator().manual_seed(seed + 1)
        inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(999))
        self.held_out = inputs, self.teacher(inputs)

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(self.batch, 8, generator=self.random)
        return inputs, self.teacher(inputs)


def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(data[0]), data[1])


def held_out_loss(model: torch.nn.Module, task: Task) -> float:
    with torch.no_grad():
        return loss_of(model, task.held_out).item()


def fingerprint(model: torch.nn.Module) -> float:
    """A number that differs if any parameter does (as far as doubles go)."""
    with torch.no_grad():
        return sum(
            float((p.double().flatten() * torch.arange(1, p.numel() + 1, dtype=torch.float64)).sum())
            for p in model.parameters()
        )


class InnerClock:
    """Time inside the inner optimizer's own step, to tell it from DiLoCo's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds = self._began = 0.0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began


class Commands:
    """Lines on stdin."""

    def __init__(self) -> None:
        self.ended = False
        self._data = b""

    def wait(self, seconds: float) -> None:
        """Takes commands for at most `seconds`; "idle" lasts until "go"."""
        deadline = time.perf_counter() + seconds
        while not self.ended:
            left = deadline - time.perf_counter()
            line = self._line(max(0.0, left))
            if line is None:
                return
            if line == "idle":
                say("idle")
                while not self.ended and self._line(None) != "go":
                    pass

    def _line(self, timeout_s: float | None) -> str | None:
        while b"\n" not in self._data:
            if not select.select([0], [], [], timeout_s)[0]:
                return None
            data = os.read(0, 4096)
            if not data:
                self.ended = True
                return None
            self._data += data
        line, self._data = self._data.split(b"\n", 1)
        return line.decode()


def die(here: str, wanted: str) -> None:
    if here == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    log_to_stderr()
    say("start", pid=os.getpid())
    model = make_model(options.width, options.depth, options.init_seed)
    task = Task(options.seed, options.batch)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[options.optimizer]
    inner = kind(model.parameters(), lr=options.lr)
    inner_clock = InnerClock(inner)
    commands = Commands()
    die("before-join", options.die_at)

    began = time.perf_counter()
    opt = diloco.DiLoCoOptimizer(
        inner,
        model,
        syncer=options.syncer,
        learner_id=options.id,
        run_id=options.run_id,
        ledger_dir=options.dir,
        join_timeout_s=options.join_timeout_s,
        give_up_after_s=options.give_up_after_s,
        **options.settings,
    )
    stats = opt.stats()
    join_s = time.perf_counter() - began
    marks = {"held_out": held_out_loss(model, task), "fingerprint": fingerprint(model)}
    say("joined", state=stats["state"], epoch=stats["epoch"], versions=stats["versions"], join_s=join_s, **marks)
    die("after-join", options.die_at)

    step = 0
    in_diloco = longest_call = longest_gap = gap = 0.0
    last_end = began = time.perf_counter()
    while not commands.ended and (options.steps == 0 or step < options.steps):
        loss = loss_of(model, task.sample())
        opt.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        opt.add_tokens(options.batch)
        inner_before, call_began = inner_clock.seconds, time.perf_counter()
        opt.step()
        end = time.perf_counter()
        call = (end - call_began) - (inner_clock.seconds - inner_before)
        in_diloco += call
        longest_call = max(longest_call, call)
        if step:
            gap = end - last_end
            longest_gap = max(longest_gap, gap)
        last_end = end
        step += 1
        stats = opt.stats()
        say(
            "step",
            step=step,
            loss=loss.item(),
            held_out=held_out_loss(model, task),
            tokens=stats["tokens"],
            in_diloco_s=call,
            longest_call_s=longest_call,
            gap_s=gap,
            longest_gap_s=longest_gap,
            state=stats["state"],
            epoch=stats["epoch"],
            clock=stats["clock"],
            adoptions=stats["adoptions"],
            merged=stats["contributions_merged"],
            t=time.monotonic(),
        )
        die(f"step:{step}", options.die_at)
        commands.wait(options.step_time_s - (time.perf_counter() - end))
    elapsed = time.perf_counter() - began
    opt.close(options.flush_s)
    say(
        "done",
        stats=opt.stats(),
        steps=step,
        tokens=step * options.batch,
        in_diloco_s=in_diloco,
        longest_call_s=longest_call,
        longest_gap_s=longest_gap,
        elapsed_s=elapsed,
        fingerprint=fingerprint(model),
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        run(options)
    except Exception as error:
        say("error", type=type(error).__name__, text=str(error))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
