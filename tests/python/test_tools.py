"""The tools CI leans on must themselves be able to fail."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "python").mkdir(parents=True)
    (tmp_path / "tests" / "cpp" / "merge").mkdir(parents=True)
    (tmp_path / "tests" / "python" / "test_a.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "tests" / "cpp" / "merge" / "m_test.cpp").write_text("TEST_P(Merge,\n       Mean) {}\n")
    (tmp_path / "Makefile").write_text("demo: setup\n\tx\n")
    return tmp_path


def test_guarantees_with_proofs_pass(checkout: Path) -> None:
    text = """# Guarantees
- Kept. `test_a.py::test_one`
- Kept too, over
  two lines: `Merge.Mean`
| promise | proof |
|---|---|
| seen | `make demo` |
## Not promised
- Anything else.
"""
    assert load("check_guarantees").faults(text, checkout) == []


@pytest.mark.parametrize(
    "text",
    [
        "- No proof.",
        "- Proof of another kind: `x > 0`",
        "- `test_a.py::test_two`",
        "- `test_b.py::test_one`",
        "- `Merge.Median`",
        "- `make tea`",
        "- Good `Merge.Mean` and gone `Merge.Median`",
        "| a | b |\n|---|---|\n| promise | none |",
        "Nothing is promised at all.",
    ],
)
def test_guarantees_without_proof_fail(checkout: Path, text: str) -> None:
    assert load("check_guarantees").faults(text, checkout)


def report(path: Path, attributes: str) -> str:
    path.write_text(f"<testsuites><testsuite {attributes}/></testsuites>")
    return f"X={path}"


def test_totals_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argument = report(tmp_path / "r.xml", 'tests="5" failures="0" errors="0" skipped="2"')
    assert load("test_totals").main([argument]) == 0
    assert capsys.readouterr().out == "X tests: 3 passed, 0 failed, 2 skipped\n"


@pytest.mark.parametrize(
    "attributes",
    [
        'tests="0" failures="0" errors="0" skipped="0"',
        'tests="2" skipped="2"',
        'tests="2" failures="1"',
        'tests="2" errors="1"',
    ],
)
def test_totals_fail_on_failures_and_on_zero_tests(tmp_path: Path, attributes: str) -> None:
    assert load("test_totals").main([report(tmp_path / "r.xml", attributes)]) == 1


def test_totals_fail_without_a_report(tmp_path: Path) -> None:
    assert load("test_totals").main([f"X={tmp_path / 'none.xml'}"]) == 1
    assert load("test_totals").main([]) == 1


SOAK_XML = """<testsuites><testsuite>
<testcase classname="tests.python.test_a" name="test_kills" time="61.2">
  <properties><property name="kills" value="100"/><property name="memory above before MiB" value="0.5"/></properties>
</testcase>
<testcase classname="tests.python.test_a" name="test_small" time="1"/>
<testcase classname="Seeds/R" name="Keeps/0" time="2"><properties><property name="seeds" value="20"/></properties>
</testcase>
<testcase classname="Seeds/R" name="Keeps/1" time="3"><properties><property name="seeds" value="20"/></properties>
  {}
</testcase>
</testsuite></testsuites>"""


def soak_rows(tmp_path: Path, inside: str = "") -> tuple[ModuleType, list[Any]]:
    (tmp_path / "soak.xml").write_text(SOAK_XML.format(inside))
    soak = load("soak")
    return soak, soak.rows_of(tmp_path / "soak.xml")


def test_soak_report_has_machine_commit_and_what_was_measured(tmp_path: Path) -> None:
    soak, rows = soak_rows(tmp_path)
    text = soak.report("abc1234-dirty", "2030-01-02", [soak.Part("python", rows, 0, 66.0)])
    assert text.startswith("# Soak, 2030-01-02, commit abc1234-dirty\n")
    for words in (
        "Everything passed",
        " cores, ",
        " GiB, ",
        "torch ",
        "* python: 2 rows, 0 failed, exit status 0, 1.1 min",
    ):
        assert words in text
    assert text.splitlines()[-2:] == [
        "| test_a::test_kills | 61 | passed | kills 100, memory above before MiB 0.5 |",
        "| Seeds/R::Keeps | 5 | passed | seeds 40 |",
    ]


def test_soak_report_names_what_failed(tmp_path: Path) -> None:
    soak, rows = soak_rows(tmp_path, '<failure message="seed 101 | starved&#10;more"/>')
    text = soak.report("abc1234", "2030-01-02", [soak.Part("cpp", rows, 1, 5.0)])
    assert "**Something failed**" in text
    assert text.splitlines()[-1] == "| Seeds/R::Keeps | 5 | failure seed 101 \\| starved more | seeds 40 |"


@pytest.mark.parametrize("case", ["passed", "failed", "skipped", "nothing", "no_report"])
def test_soak_part_is_good_only_if_something_ran_and_all_passed(tmp_path: Path, case: str) -> None:
    soak, rows = soak_rows(tmp_path)
    if case == "skipped":
        rows = [soak.Row("a", 0.0, "skipped no root")]
    if case == "nothing":
        rows = []
    if case == "no_report":
        rows = soak.rows_of(tmp_path / "none.xml")
    assert soak.Part("x", rows, int(case == "failed")).ok == (case == "passed")


def test_soak_selects_exactly_the_sized_tests(tmp_path: Path) -> None:
    conftest = ROOT / "tests" / "python" / "conftest.py"
    (tmp_path / "test_s.py").write_text(
        "def test_one(): pass\ndef test_two(sized): assert sized('kills', 6, 100) == 100\n"
    )
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-m", "soak", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    paths = os.pathsep.join([str(conftest.parent), str(ROOT)])
    env = {**os.environ, "DILOCO_SOAK": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert "1 passed, 1 deselected" in done.stdout, done.stdout


def test_setup_without_root_prints_the_line_to_run_and_stops(tmp_path: Path) -> None:
    for name, text in {"dpkg-query": "exit 1", "id": "echo 1000"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "tools" / "setup.sh"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(r"^  apt-get update && apt-get install -y g\+\+ cmake .*libzmq3-dev", done.stderr, re.MULTILINE)
    assert done.stdout == ""  # nothing was begun


def test_setup_is_quick_when_nothing_changed() -> None:
    for _ in range(2):  # the first only makes sure that nothing has changed
        done = subprocess.run([ROOT / "tools" / "setup.sh"], capture_output=True, text=True, timeout=110, check=True)
    assert "setup: ready" in done.stdout
    assert "installing" not in done.stdout and "downloading" not in done.stdout


def test_setup_tells_the_size_before_it_downloads_torch(tmp_path: Path) -> None:
    """With an interpreter that has no torch, and whose pip says what it is asked for and fails."""
    for folder in ("tools", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tools" / "setup.sh").write_text((ROOT / "tools" / "setup.sh").read_text())
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -m ] || exit 0\necho "$@"\nexit 1\n')
    python.chmod(0o755)
    command = ["bash", tmp_path / "tools" / "setup.sh"]
    done = subprocess.run(command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    size, small, warning, large = (line for line in done.stdout.splitlines() if "torch" in line or "several GB" in line)
    assert "about 200 MB" in size and small.endswith("install -q torch==2.13.0+cpu")
    assert "several GB" in warning and large.endswith("install -q torch==2.13.0")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("DILOCO_USE_CUDA=ON", "there are no CUDA kernels yet"),
        ("DILOCO_BUILD_FUZZERS=ON", "needs clang with libFuzzer"),
        ("DILOCO_SANITIZE=memory", "must be address or thread"),
    ],
)
def test_an_option_that_cannot_be_served_stops_the_configure_step(option: str, words: str, tmp_path: Path) -> None:
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DDILOCO_BUILD_PYTHON=OFF", "-DCMAKE_CXX_COMPILER=g++"]
    done = subprocess.run([*command, f"-D{option}"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())


# ---- mutations ----


def test_every_mutation_has_its_line_once_and_there_are_enough() -> None:
    tool = load("mutations")
    for mutation in tool.MUTATIONS:
        text = (ROOT / "csrc" / "diloco" / mutation.source).read_text()
        assert text.count(mutation.old) == 1, mutation.name
        changed = len(mutation.new.splitlines()) if mutation.new else mutation.old.count("\n")
        assert changed <= 3, mutation.name
    caught = [mutation for mutation in tool.MUTATIONS if mutation.caught_by]
    assert len(caught) >= 20
    assert len(tool.MUTATIONS) - len(caught) == 2
    asked = "quorum grace counters versions ledger credit mailbox supersede eligibility arming sign"
    assert {mutation.kind for mutation in caught} >= set(asked.split())
    quick = [mutation for mutation in tool.MUTATIONS if mutation.quick]
    assert sum(bool(mutation.caught_by) for mutation in quick) == 4


@pytest.mark.parametrize(
    ("expected", "status", "violations", "problem"),
    [
        (("quorum",), 1, ["quorum"], ""),
        ((), 0, [], ""),
        (("quorum",), 0, [], "survived"),
        (("quorum",), 1, ["credit"], "caught by credit"),
        (("quorum",), -11, [], "ended with status -11"),
        ((), 1, ["quorum"], "a control was caught"),
    ],
)
def test_a_mutation_is_judged_by_the_invariant_it_was_caught_by(
    monkeypatch: pytest.MonkeyPatch, expected: tuple[str, ...], status: int, violations: list[str], problem: str
) -> None:
    tool = load("mutations")
    found = [{"invariant": name, "event": 7} for name in violations]
    monkeypatch.setattr(tool, "build", lambda mutation, folder: folder)
    monkeypatch.setattr(tool, "run", lambda program, folder: (status, found))
    result = tool.judge(tool.Mutation("m", "kind", "source", "old", "new", expected))
    assert result.problem.startswith(problem)
    assert bool(result.problem) == bool(problem)
