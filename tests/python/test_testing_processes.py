"""The test kit's processes: waiting, signals, exit statuses, no orphans."""

import os
import select
import signal
import subprocess
import sys

import pytest

from diloco.testing import Process, ProcessError, child_environment, describe_exit

PRINTER = """
import json, sys, time
for line in sys.stdin:
    print(json.dumps({"event": "echo", "text": line.strip()}), flush=True)
print("no json {", file=sys.stderr)
sys.exit(7)
"""

UP = """print('{"event": "up"}', flush=True); input()"""


def gone(pid: int, timeout_s: float = 20.0) -> bool:
    """Blocks until the process has ended; it need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def test_events_and_exit_status(program):
    child = program(code=PRINTER)
    child.tell("one")
    child.tell("two")
    assert child.wait_for("echo", lambda event: event["text"] == "two")["text"] == "two"
    start = child.mark()
    child.tell("one")
    assert child.wait_for("echo", start=start)["text"] == "one"
    child.close_stdin()
    child.wait_line("no json")
    assert child.wait() == 7
    assert describe_exit(7) == "exited with status 7"


def test_waiting_for_a_dead_process_fails_at_once_with_its_output(program):
    child = program(code="import sys; print('last words', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ProcessError, match=r"exited with status 3(.|\n)*last words"):
        child.wait_for("never", timeout_s=600)


def test_waiting_has_a_deadline(program):
    child = program(code="input()")
    with pytest.raises(ProcessError, match=r"did not say it within 0.05 s"):
        child.wait_for("never", timeout_s=0.05)


def test_kill_reports_the_wait_status(program):
    child = program(code=UP)
    child.wait_for("up")
    assert child.kill() == -signal.SIGKILL
    assert not child.running
    assert "was killed by signal 9 (SIGKILL)" in child.tail()


def test_pause_and_resume(program):
    child = program(code=PRINTER)
    child.tell("before")
    child.wait_for("echo")
    child.pause()
    with open(f"/proc/{child.pid}/stat") as stat:
        assert stat.read().rsplit(")", 1)[1].split()[0] == "T"
    start = child.mark()
    child.tell("while stopped")
    child.resume()
    assert child.wait_for("echo", start=start)["text"] == "while stopped"


def test_a_chatty_child_never_blocks(program):
    child = program(code="import sys\nfor i in range(200000): print('x' * 40)\nprint('{\"event\": \"end\"}')")
    child.wait_for("end")
    assert child.wait() == 0
    assert len(child.stdout_lines) == 200001


def test_a_second_pipe_of_events(process, tmp_path):
    code = "import sys; f = open(sys.argv[1], 'a'); print('{\"event\": \"merge\"}', file=f, flush=True); input()"
    argv = [sys.executable, "-c", code, "{event_pipe}"]
    child = process(Process, argv, name="writer", event_copy=tmp_path / "log")
    child.wait_for("merge")
    child.kill()
    assert (tmp_path / "log").read_text() == '{"event": "merge"}\n'


def test_settings_of_the_caller_do_not_reach_children(monkeypatch):
    monkeypatch.setenv("DILOCO_MIN_QUORUM", "7")
    assert "DILOCO_MIN_QUORUM" not in child_environment()
    assert child_environment({"DILOCO_MIN_QUORUM": "2"})["DILOCO_MIN_QUORUM"] == "2"


def test_memory_is_read_from_the_kernel(program):
    child = program(code="x = bytearray(64 << 20)\n" + UP)
    child.wait_for("up")
    assert child.memory_bytes() > 64 << 20
    assert child.memory_bytes("VmHWM") >= child.memory_bytes()


def test_no_orphan_survives_its_parent():
    parent = """
import sys
from diloco.testing import LearnerProcess
child = LearnerProcess(code="import sys; sys.stdin.read()")
print(child.pid, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as process:
        pid = int(process.stdout.readline())
        assert not gone(pid, 0)
        process.kill()
        process.wait()
        assert gone(pid)
