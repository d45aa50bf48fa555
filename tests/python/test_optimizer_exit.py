"""Every way a training process can end (field cases F049, F052, F092): in time, with its own exit status, no abort."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from toys import QUICK, dead_address, small_model, train_step

import diloco
from diloco.testing import SyncerProcess

LIMIT_S = 40.0  # DiLoCo's own share is bounded by about 3 s; the machine may be busy

# Programs run in forks of a process that has imported everything and made nothing yet: starting Python and torch takes
# seconds. The fork then ends like any interpreter, by falling off the end of its main module.
ZYGOTE = """
import gc, json, os, select, signal, sys, threading
sys.path.insert(0, sys.argv[1])
import torch, diloco
from toys import small_model, train_step
torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
def make():
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, diloco.DiLoCoOptimizer(inner, model, syncer=os.environ["ADDRESS"], tokens=lambda: 16)
def train(model, opt, steps=30):
    for step in range(steps):
        train_step(model, opt, step)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    fd = os.pidfd_open(child)
    if not select.select([fd], [], [], job["limit_s"])[0]:
        os.kill(child, signal.SIGKILL)
    os.close(fd)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(os.open(job["stderr"], os.O_WRONLY | os.O_CREAT), 2)
os.environ["ADDRESS"] = job["address"]
exec(compile(job["program"], "<program>", "exec"))
"""

FORK = """
model, opt = make()
train(model, opt)
pid = os.fork()
if pid == 0:
    {}
_, status = os.waitpid(pid, 0)
train(model, opt)
sys.exit(os.waitstatus_to_exitcode(status))
"""

# name -> (program, exit status)
ENDINGS: dict[str, tuple[str, int]] = {
    "globals": ("model, opt = make(); train(model, opt)", 0),
    "local": ("def main(): train(*make())\nmain()", 0),
    "closed": ("model, opt = make(); train(model, opt); opt.close()", 0),
    "context": ("model, opt = make()\nwith opt: train(model, opt)", 0),
    "deleted": ("model, opt = make(); train(model, opt); del opt; gc.collect()", 0),
    "model_dies_first": ("model, opt = make(); train(model, opt); del model; gc.collect()", 0),
    "sys_exit": ("model, opt = make(); train(model, opt); sys.exit(7)", 7),
    "exception": ("model, opt = make(); train(model, opt); raise KeyError('mine')", 1),
    "os_exit": ("model, opt = make(); train(model, opt); os._exit(5)", 5),
    "cycle": ("model, opt = make(); train(model, opt); opt.me = [opt]; del opt, model", 0),
    "in_a_thread": ("t = threading.Thread(target=lambda: train(*make())); t.start(); t.join()", 0),
    "thread_still_running": ("t = threading.Thread(target=lambda: train(*make(), 200)); t.start()", 0),
    "two_of_them": ("a = make(); b = make(); train(*a); train(*b); a[1].close()", 0),
    "never_stepped": ("model, opt = make()", 0),
    "cycle_in_a_module": (
        """
import types
m = sys.modules['m'] = types.ModuleType('m')
m.model, m.opt = make()
m.me = m
train(m.model, m.opt)
""",
        0,
    ),
    "held_by_atexit": (
        """
import atexit
model, opt = make()
atexit.register(lambda: print(opt.stats()['state']))
train(model, opt)
""",
        0,
    ),
    "sys_exit_in_a_hook": (
        """
model, opt = make()
opt.register_step_post_hook(lambda *a: sys.exit(3))
train(model, opt)
""",
        3,
    ),
    "finalizer_uses_it": (
        """
class Late:
    def __del__(self): self.opt.stats()
model, late = None, Late()
model, late.opt = make()
train(model, late.opt)
""",
        0,
    ),
    "embedded_syncer": (
        """
syncer = diloco.Syncer(sync_every=4)
os.environ['ADDRESS'] = syncer.endpoint
model, opt = make()
train(model, opt)
""",
        0,
    ),
    "embedded_syncer_dies_first": (
        """
syncer = diloco.Syncer(sync_every=4)
os.environ['ADDRESS'] = syncer.endpoint
model, opt = make()
train(model, opt)
syncer.stop(0)
del syncer
train(model, opt)
""",
        0,
    ),
    "forked_child_exits": (FORK.format("sys.exit(6)"), 6),
    "forked_child_closes": (FORK.format("opt.close(); del opt; gc.collect(); sys.exit(6)"), 6),
    "forked_child_steps": (
        FORK.format(
            """
    try:
        train(model, opt, 1)
    except RuntimeError as error:
        sys.exit(9 if 'fork' in str(error) else 8)
    sys.exit(7)"""
        ),
        9,
    ),
}


@dataclass
class Ended:
    status: int
    stderr: str


@pytest.fixture(scope="module")
def zygote() -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    with subprocess.Popen(
        [sys.executable, "-P", "-X", "faulthandler", "-c", ZYGOTE, str(Path(__file__).parent)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def run(zygote: subprocess.Popen[str], tmp_path: Path) -> Callable[[str, str], Ended]:
    def start(program: str, address: str) -> Ended:
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        stderr = tmp_path / "stderr"
        job = {"program": program, "address": address, "stderr": str(stderr), "limit_s": LIMIT_S}
        print(json.dumps(job), file=zygote.stdin, flush=True)
        status = int(zygote.stdout.readline())
        return Ended(status, stderr.read_text())

    return start


Run = Callable[[str, str], Ended]


def assert_clean(done: Ended, status: int) -> None:
    assert done.status == status, done.stderr
    for word in ("Fatal Python error", "terminate called", "Aborted", "Exception ignored", "please report"):
        assert word not in done.stderr, done.stderr


# The ways that most programs end; the others are repeated less often.
COMMON = ("globals", "sys_exit", "exception", "os_exit", "cycle", "thread_still_running")


@pytest.mark.parametrize("ending", ENDINGS)
def test_ends_cleanly_with_a_syncer(run: Run, ending: str, sized: Callable[[str, int, int], int]) -> None:
    program, status = ENDINGS[ending]
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer:
        assert_clean(run(program, syncer.endpoint), status)
        for _ in range(sized("repetitions", 0, 200 if ending in COMMON else 10)):
            # What was imported is left out of the last garbage collection, which takes most of the time.
            assert_clean(run("gc.freeze()\n" + program, syncer.endpoint), status)


def test_stats_when_the_modules_have_been_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the interpreter leaves them to finalizers at its end: every global is None."""
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer:
        model = small_model()
        with diloco.DiLoCoOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, syncer.endpoint) as optimizer:
            train_step(model, optimizer, 0)
    for name in ("optimizer", "learner", "_goodput"):
        module = sys.modules[f"diloco.{name}"]
        for word in [word for word in vars(module) if not word.startswith("__")]:
            monkeypatch.setattr(module, word, None)
    assert optimizer.stats()["steps"] == 1


@pytest.mark.parametrize("ending", ["globals", "cycle", "sys_exit", "exception", "os_exit", "forked_child_exits"])
def test_ends_cleanly_without_a_syncer(run: Run, ending: str) -> None:
    with dead_address() as address:
        assert_clean(run(ENDINGS[ending][0], address), ENDINGS[ending][1])


def test_ends_in_time_when_the_syncer_was_killed(run: Run) -> None:
    """SIGKILL of the syncer in mid-run; the learner leaves main with work queued."""
    syncer = subprocess.Popen(
        [sys.executable, "-P", "-m", "diloco", "syncer", "--bind", "127.0.0.1:0", "--sync-every", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert syncer.stdout is not None
    address = syncer.stdout.readline().split("tcp://")[1].strip()
    program = f"model, opt = make(); train(model, opt); os.kill({syncer.pid}, 9); train(model, opt); sys.exit(4)"
    assert_clean(run(program, address), 4)
    syncer.wait()


def test_ctrl_c_in_the_wait_for_the_first_weights(run: Run) -> None:
    """Joining waits for weights that do not come; Ctrl-C ends it at once."""
    program = """
import socket, time
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
os.environ["ADDRESS"] = "127.0.0.1:%d" % listener.getsockname()[1]
def interrupt():   # somebody connects, and is never answered
    connection = listener.accept()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(30)
threading.Thread(target=interrupt, daemon=True).start()
began = time.monotonic()
try:
    make()
except KeyboardInterrupt:
    sys.exit(11 if time.monotonic() - began < 5 else 12)
"""
    assert_clean(run(program, "unused"), 11)


def test_ctrl_c_while_lockstep_holds(run: Run) -> None:
    program = """
model, opt = make()
def interrupt():
    while opt.stats()["steps"] < 4:   # nobody else is there: the round waits for a second learner
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    train(model, opt, 100)
except KeyboardInterrupt:
    sys.exit(11)
"""
    with diloco.Syncer(mode="lockstep", overlap_steps=0, sync_every=4, num_fragments=1, min_quorum=2) as syncer:
        assert_clean(run(program, syncer.endpoint), 11)


def test_data_loader_workers_by_fork(run: Run) -> None:
    """F052: four forked workers inherit the wrapper; the parent's syncs go on."""
    program = """
from torch.utils.data import DataLoader, TensorDataset
model, opt = make()
merged = [opt.stats()["contributions_merged"]]
for epoch in range(2):
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 2))
    for inputs, targets in DataLoader(data, batch_size=2, num_workers=4, multiprocessing_context="fork"):
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        opt.step()
    train(model, opt, 20)
    merged.append(opt.stats()["contributions_merged"])
assert merged[0] < merged[1] < merged[2], merged
assert opt.stats()["reconnects"] == 0
"""
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer:
        assert_clean(run(program, syncer.endpoint), 0)
        assert syncer.status()["ledger"]["processed"] == 16 * (64 + 40) * 2


# The clock is the machine's, so the parent can compare.
LEAVING = """
import time
os.environ["DILOCO_LEDGER_DIR"] = os.path.dirname(job["stderr"])
diloco.leave_on_sigterm()
model, opt = make()
train(model, opt, 30)
def terminate(*_):
    print("sent", time.monotonic(), file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def assert_left_politely(done: Ended, syncer: SyncerProcess, folder: Path) -> None:
    """Killed by SIGTERM as ever, within five seconds, but closed before, as its ledger says; the syncer knows."""
    ended = time.monotonic()
    assert_clean(done, -signal.SIGTERM)
    (sent,) = [line for line in done.stderr.splitlines() if line.startswith("sent")]
    assert ended - float(sent.split()[1]) < 5.0
    (ledger,) = folder.glob("*.ledger")
    assert int.from_bytes(ledger.read_bytes()[40:48], "little") == 1
    syncer.wait_for("leave")


@pytest.mark.parametrize(
    "ending",
    [
        "train(model, opt, 2); terminate(); train(model, opt, 100000)",  # in mid-window
        "opt.register_step_post_hook(terminate); train(model, opt, 100000)",
        "threading.Thread(target=train, args=(model, opt, 10**9), daemon=True).start(); terminate(); time.sleep(60)",
    ],
)
def test_sigterm_in_mid_window_is_a_goodbye(
    run: Run, ending: str, syncer: Callable[..., SyncerProcess], tmp_path: Path
) -> None:
    """F082: with leave_on_sigterm() a learner leaves in good order and the process ends as it would have."""
    s = syncer(**QUICK)
    assert_left_politely(run(LEAVING + ending, s.endpoint), s, tmp_path)


def test_sigterm_while_lockstep_holds_is_a_goodbye(
    run: Run, syncer: Callable[..., SyncerProcess], tmp_path: Path
) -> None:
    program = """
import time
os.environ["DILOCO_LEDGER_DIR"] = os.path.dirname(job["stderr"])
diloco.leave_on_sigterm()
model, opt = make()
def terminate():
    while opt.stats()["steps"] < 4:   # nobody else is there: the round waits for a second learner
        threading.Event().wait(0.01)
    print("sent", time.monotonic(), file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=terminate, daemon=True).start()
train(model, opt, 100)
"""
    s = syncer(mode="lockstep", overlap_steps=0, sync_every=4, num_fragments=1, min_quorum=2)
    assert_left_politely(run(program, s.endpoint), s, tmp_path)


def test_leave_on_sigterm_steals_no_handler(run: Run) -> None:
    """Children are no learners and end as they always do; another's handler stays, and so does the rule of threads."""
    program = """
diloco.leave_on_sigterm()
diloco.leave_on_sigterm(1.0)   # again: no harm
model, opt = make()
here, there = os.pipe()
child = os.fork()
if child == 0:
    os.write(there, b"x")   # Python forgets a signal that comes before the fork is complete
    threading.Event().wait(60)
os.read(here, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
train(model, opt)              # the parent's learner knows nothing of it
refused = []
def refuse():
    try:
        diloco.leave_on_sigterm()
    except RuntimeError as error:
        refused.append(str(error))
thread = threading.Thread(target=refuse)
thread.start()
thread.join()
mine = lambda *_: None
signal.signal(signal.SIGTERM, mine)
refuse()
assert signal.getsignal(signal.SIGTERM) is mine
assert "in the main thread" in refused[0] and "has a handler already" in refused[1], refused
sys.exit(9)
"""
    with diloco.Syncer(**QUICK, shutdown_s=0.5) as syncer:
        assert_clean(run(program, syncer.endpoint), 9)


def test_sigterm_keeps_its_meaning(run: Run) -> None:
    program = "import signal; model, opt = make(); train(model, opt); os.kill(os.getpid(), signal.SIGTERM)"
    with dead_address() as address:
        assert run(program, address).status == -signal.SIGTERM
