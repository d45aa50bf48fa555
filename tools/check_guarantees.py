"""Checks docs/guarantees.md: every promise names its proof, and every proof named exists.

A promise is a list item ("- ...") or a table row. Its proofs stand in backticks, in one of these forms:
  `test_file.py::test_name`   a Python test (the file's name, or its path from the root)
  `Suite.Name`                a C++ test: TEST, TEST_F or TEST_P (Suite, Name)
  `make target`               a target of the Makefile
  `.ci/run`                   a gate of the CI script
Sections headed "Not promised" are left out. Exit status 1 with one line per fault.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_TEST = re.compile(r"^(?:tests/python/)?(\w+\.py)::(?:\w+::)*(\w+)")
CPP_TEST = re.compile(r"^(?:\w+/)?([A-Z]\w+)\.([A-Z]\w*)")


def python_tests(root: Path) -> set[tuple[str, str]]:
    found = set()
    for file in (root / "tests" / "python").rglob("test_*.py"):
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE):
            found.add((file.name, name))
    return found


def cpp_tests(root: Path) -> set[tuple[str, str]]:
    found = set()
    for file in (root / "tests" / "cpp").rglob("*_test.cpp"):
        found.update(re.findall(r"\b(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)", file.read_text()))
    return found


def make_targets(root: Path) -> set[str]:
    return set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.MULTILINE))


def promises(text: str) -> list[tuple[int, str]]:
    """Line number and text of every list item (with its continuation lines) and table row."""
    found: list[tuple[int, str]] = []
    skipping, open_item = False, False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            skipping, open_item = line.lstrip("# ").lower().startswith("not promised"), False
        elif skipping:
            continue
        elif re.match(r"^(-|\*|\d+\.) ", line):
            found.append((number, line))
            open_item = True
        elif re.match(r"^\|(?![\s:|-]+$)", line):
            found.append((number, line))
            open_item = False
        elif open_item and line.startswith("  "):
            found[-1] = (found[-1][0], found[-1][1] + "\n" + line)
        else:
            open_item = False
    header_rows = {n for n, line in enumerate(text.splitlines(), start=1) if re.match(r"^\|[\s:|-]+$", line)}
    return [(n, t) for n, t in found if n + 1 not in header_rows]


def faults(text: str, root: Path) -> list[str]:
    python, cpp, targets = python_tests(root), cpp_tests(root), make_targets(root)
    out: list[str] = []
    found = promises(text)
    for number, promise in found:
        proofs = 0
        for token in re.findall(r"`([^`]+)`", promise):
            if match := PYTHON_TEST.match(token):
                known = match.groups() in python
            elif match := CPP_TEST.match(token):
                known = match.groups() in cpp
            elif token.startswith("make "):
                known = token.split()[1] in targets
            elif token == ".ci/run":
                known = (root / ".ci" / "run").exists()
            else:
                continue
            proofs += known
            if not known:
                out.append(f"docs/guarantees.md:{number}: `{token}` does not exist")
        if proofs == 0:
            out.append(f"docs/guarantees.md:{number}: no existing proof is named: {promise.splitlines()[0][:80]}")
    if not found:
        out.append("docs/guarantees.md: no promise found (list items or table rows)")
    return out


def main() -> int:
    problems = faults((ROOT / "docs" / "guarantees.md").read_text(), ROOT)
    for problem in problems:
        print(problem)
    if not problems:
        print("docs/guarantees.md: every promise names a proof that exists")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
