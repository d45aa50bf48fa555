"""Islands of several hosts, started by the recipe of docs/hosts.md, on network namespaces whose cables are pulled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.testing import Process, child_environment

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "hosts" / "node.sh"
TIMEOUT_S = 5.0  # of the island's own collectives


class Site:
    """The syncer's host; a1 and a2, an island with a network of its own; b, an island of one process. As on many a
    machine, each host's name resolves to a loopback address on it, where no other host would find a rank."""

    def __init__(self, run: Any, host: Callable[..., Any], link: Callable[..., Any], folder: Path) -> None:
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n127.0.1.1 trainer\n")
        self.hosts = {name: host(name, hostname="trainer", hosts_file=names) for name in ("a1", "a2", "b")}
        center = host("syncer")
        self.syncer = run.syncer(bind="0.0.0.0:0", insecure=True, place=center)
        self.up = {name: link(there, center) for name, there in self.hosts.items()}
        self.between = link(self.hosts["a1"], self.hosts["a2"])
        self.ledgers = run.ledgers

    def start(self, process: Callable[..., Any], name: str, island: str, **variables: str) -> Process:
        options = f"--timeout-s {TIMEOUT_S:g} --ledgers {self.ledgers}"
        env = {
            "SYNCER": f"{self.up[name].address(self.syncer.place)}:{self.syncer.port}",
            "ISLAND": island,
            "SCRIPT": str(Path(__file__).with_name("island_node.py")),
            "OPTIONS": options,
            "PYTHON": sys.executable,
            "PAUSE_S": "0.1",
        }
        place = self.hosts[name]
        new: Process = process(Process, ["bash", str(RECIPE)], name=name, env=env | variables, place=place)
        return new

    def node(self, process: Callable[..., Any], name: str, rank: int) -> Process:
        master, interface = self.between.address(self.hosts["a1"]), self.between.device(self.hosts[name])
        variables = {"NODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": master, "INTERFACE": interface}
        return self.start(process, name, "a", **variables)

    def cables_of_a2(self) -> list[Any]:
        return [self.up["a2"], self.between]


def of(learner: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda event: event["learner"] == learner


def steps(process: Process, start: int) -> list[dict[str, Any]]:
    return [event for event in process.events[start:] if event["event"] == "step"]


def lines(*nodes: Process) -> dict[Process, int]:
    """How many each has written to stderr so far."""
    return {node: len(node.stderr_lines) for node in nodes}


def undisturbed(process: Process, start: int) -> None:
    """Its steps since then waited neither for the syncer nor for another island's timeout."""
    made = steps(process, start)
    assert len(made) >= 20
    assert made[-1]["longest_call_s"] < 1.0
    assert max(step["gap_s"] for step in made) < TIMEOUT_S / 2


@pytest.mark.netns
@pytest.mark.timeout(300)
def test_hosts_are_lost_and_come_back(run, host, link, process, tmp_path, record_property) -> None:
    site = Site(run, host, link, tmp_path)
    syncer = site.syncer
    a1, a2 = site.node(process, "a1", 0), site.node(process, "a2", 1)
    b = site.start(process, "b", "b")
    for island in ("a", "b"):
        syncer.wait_merges(island, 2, start=0)
    first = syncer.wait_for("join", of("a"))["incarnation"]

    # b, an island of one: silence is noticed, it trains on alone, the island of two goes on, and b comes back.
    event, step, of_a = syncer.mark(), b.mark(), a1.mark()
    site.up["b"].unplug()
    syncer.wait_for("leave", of("b"), start=event)
    b.wait_for("step", lambda made: made["state"] == "away", start=step)
    alone = b.mark()
    syncer.wait_merges("a", 4)
    b.wait_for("step", lambda made: made["step"] >= steps(b, step)[0]["step"] + 20, start=alone)
    site.up["b"].plug()
    syncer.wait_for("join", of("b"), start=event)
    syncer.wait_merges("b", 2)
    undisturbed(b, step)
    undisturbed(a1, of_a)

    # a2 cannot reach the syncer: the island trains on as one, away from the run, and comes back with the same life.
    event, of_a = syncer.mark(), a1.mark()
    site.up["a2"].unplug()
    assert syncer.wait_for("leave", of("a"), start=event)["why"].startswith("part 1 silent")
    syncer.wait_merges("b", 4)
    for _ in range(20):
        a1.wait_for("step", start=a1.mark())
    site.up["a2"].plug()
    syncer.wait_merges("a", 2, start=event)
    undisturbed(a1, of_a)
    lives = {seen["incarnation"] for seen in syncer.events if seen["event"] == "join" and seen["learner"] == "a"}
    assert lives == {first}

    # a2 is gone altogether: its island stands still until its own timeout, ends, waits for the host; nobody else does.
    event, of_b, said = syncer.mark(), b.mark(), lines(a1, a2)
    for cable in site.cables_of_a2():
        cable.unplug()
    syncer.wait_for("leave", of("a"), start=event)
    for node, start in said.items():
        node.wait_line(f"Timed out waiting {TIMEOUT_S * 1000:.0f}ms", start=start)
        node.wait_line("ended with an error (try", start=start)
    syncer.wait_merges("b", 4)
    undisturbed(b, of_b)
    for cable in site.cables_of_a2():
        cable.plug()
    syncer.wait_for("join", lambda seen: seen["learner"] == "a" and seen["incarnation"] != first, start=event)
    syncer.wait_merges("a", 2)

    # The process on a2 is killed: that is no silence, the others of its island fail at once.
    event, said = syncer.mark(), lines(a1, a2)
    worker = [seen for seen in a2.events if seen["event"] == "start"][-1]
    os.kill(worker["pid"], signal.SIGKILL)
    syncer.wait_for("leave", of("a"), start=event)
    for node, start in said.items():
        node.wait_line("ended with an error (try", start=start)
    syncer.wait_for("join", of("a"), start=event)
    syncer.wait_merges("a", 2)
    undisturbed(b, of_b)
    gaps = [made["gap_s"] for made in steps(b, of_b)]
    record_property("longest step of the other island meanwhile s", round(max(gaps), 4))

    for node in (a1, b):
        node.close_stdin()
    for node in (a1, a2, b):
        assert node.wait() == 0, node.tail()
    report = run.end(syncer)
    assert len(report["learners"]["a"]["incarnations"]) == 3
    assert len(report["learners"]["b"]["incarnations"]) == 1


# ---- the recipe ----


def recipe(**variables: str) -> subprocess.CompletedProcess[str]:
    env = child_environment(variables)
    return subprocess.run([RECIPE], capture_output=True, text=True, timeout=60, check=False, env=env, cwd=ROOT)


def test_the_recipe_in_the_docs_is_the_script() -> None:
    assert f"```bash\n{RECIPE.read_text()}```\n" in (ROOT / "docs" / "hosts.md").read_text()


def test_the_recipe_is_clean() -> None:
    checker = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    done = subprocess.run([*checker, RECIPE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_recipe_says_what_is_missing() -> None:
    assert "SYNCER: expected host:port of the syncer" in recipe().stderr
    done = recipe(SYNCER="127.0.0.1:1")
    assert done.returncode != 0
    assert "ISLAND: expected a name for the island" in done.stderr


def test_the_recipe_starts_again_and_gives_up() -> None:
    done = recipe(SYNCER="127.0.0.1:1", ISLAND="a", PYTHON="false", RESTARTS="2", PAUSE_S="0")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"island a, host 0: ended with an error (try {n} of 3)" for n in (1, 2, 3)]


def test_the_recipe_passes_on_what_it_is_given(tmp_path: Path) -> None:
    said = tmp_path / "said"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $*" >{said}\n')
    python.chmod(0o755)
    given = {"SYNCER": "s:1", "ISLAND": "a", "INTERFACE": "eth7", "OPTIONS": "--steps 5", "PYTHON": str(python)}
    given |= {"NODES": "3", "NODE_RANK": "2", "RANKS": "8", "MASTER_ADDR": "10.1.0.1", "SCRIPT": "train.py"}
    assert recipe(**given).returncode == 0
    launch = "--nnodes 3 --node-rank 2 --nproc-per-node 8 --master-addr 10.1.0.1 --master-port 29500"
    wanted = f"eth7 eth7 -m torch.distributed.run {launch} --rdzv-conf timeout=600 --max-restarts 0"
    assert said.read_text() == f"{wanted} train.py --syncer s:1 --learner-id a --steps 5\n"


def test_the_recipe_ends_with_what_it_started(process: Callable[..., Any], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"event": "start", "pid": \'$$\'}\'\nexec cat\n')
    python.chmod(0o755)
    env = {"SYNCER": "s:1", "ISLAND": "a", "PYTHON": str(python)}
    node = process(Process, ["bash", str(RECIPE)], name="node", env=env)
    child = node.wait_for("start")["pid"]
    node.terminate()
    assert node.wait() == 128 + signal.SIGTERM  # with its output complete: the child has closed it, and so has ended
    assert not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text()
