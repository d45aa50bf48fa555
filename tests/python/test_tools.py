"""The tools CI leans on must themselves be able to fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
