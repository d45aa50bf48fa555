"""What a learner says at start that it takes, and what it takes."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

# Measured in a process of its own: 32 MiB of parameters, then every fragment synced three times.
CODE = """
import json, logging, re, sys, torch, diloco
from pathlib import Path

def status(field):
    return int(re.search(field + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("diloco").addHandler(handler)
logging.getLogger("diloco").setLevel("INFO")
model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1024, 1024)) for _ in range(8)])
diloco.Learner(torch.nn.Linear(2, 2), "127.0.0.1:9", join_timeout_s=0, learner_id="warm").close()
Path("/proc/self/clear_refs").write_text("5")  # the highest value so far begins again
before = status("VmRSS")
learner = diloco.Learner(model, sys.argv[1], learner_id="a")
fragments = len(learner.stats()["versions"])
while learner.stats()["contributions_merged"] < 3 * fragments:
    with torch.no_grad():
        for parameter in model:
            parameter.mul_(0.999)
    learner.step(8)
locked = [status("VmLck"), status("VmPin")]
grown = status("VmHWM") - before
print(json.dumps({"event": "measured", "grown": grown, "locked": locked, "lines": lines}), flush=True)
learner.close()
"""


def test_the_budget_is_printed_at_start_and_kept(syncer: Any, program: Any, record_property: Any) -> None:
    """F088, F089 on the CPU: anchors and copies live in host memory, at most as much as was said, none of it locked."""
    s = syncer(sync_every=4, num_fragments=4, heartbeat_timeout_s=30)
    measured = program(s.endpoint, code=CODE, env={"PYTHONPATH": os.pathsep.join(sys.path)}).wait_for("measured")
    said = next(line for line in measured["lines"] if "at most" in line)
    numbers = re.search(
        r"anchors ([0-9.]+) MiB .*; mostly ([0-9.]+) MiB in all, at most ([0-9.]+) MiB; 4 fragments", said
    )
    assert numbers, said
    anchors, usual, most = (float(number) for number in numbers.groups())
    # 8 Mi parameters: anchors of 4 bytes; 3 (at most 6) copies of 2 bytes; images of 4 bytes, one fragment twice;
    # credit; the largest tensor twice.
    assert (anchors, usual, most) == (32.0, 32 + 3 * 16 + 32 + 8 + 8 + 8, 32 + 6 * 16 + 32 + 8 + 8 + 8)
    grown = measured["grown"] / 2**20
    record_property("grown, usual, most MiB", f"{grown:.0f}, {usual:.0f}, {most:.0f}")
    assert anchors < grown < most + 16  # threads' stacks and allocators besides
    assert measured["locked"] == [0, 0]
