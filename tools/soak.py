"""`make soak`: tests that are larger with DILOCO_SOAK=1, the demo's margin, mutations, evidence; with a report,
docs/soak/<date>-<commit>.md.

    tools/soak.py [cpp] [python] [margin] [mutations] [evidence]      without a name: all of them

mutations writes docs/mutations.md as well, evidence docs/evidence.md and docs/evidence.json.

Exit status 0 only if each part ran something and nothing failed.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from diloco._report import machine, software

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("DILOCO_BUILD_DIR", f"build/{sys.implementation.cache_tag}")
PART_LIMIT_S = 2 * 3600
MARGIN_SEEDS = 5
MESSAGE_SIZE = 300


@dataclass
class Row:
    name: str
    seconds: float
    outcome: str
    measured: dict[str, str] = field(default_factory=dict)


@dataclass
class Part:
    name: str
    rows: list[Row]
    status: int
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 0 and any(row.outcome == "passed" for row in self.rows)


def outcome(case: ET.Element) -> str:
    for tag in ("failure", "error", "skipped"):
        element = case.find(tag)
        if element is not None:
            message = (element.get("message") or "").replace(f"{ROOT}/", "")
            return " ".join([tag, *message.split()])[:MESSAGE_SIZE]
    return "passed"


def rows_of(xml: Path) -> list[Row]:
    """The tests of a JUnit file that recorded something or did not pass. A test that differs from the one before it
    only by a number at its end (`Seeds/RandomSchedule.KeepsTheInvariants/7`) is added to that one."""
    rows: list[Row] = []
    for case in ET.parse(xml).getroot().iter("testcase") if xml.exists() else []:
        measured = {str(p.get("name")): str(p.get("value")) for p in case.iter("property")}
        result = outcome(case)
        if result == "passed" and not measured:
            continue
        classname = case.get("classname", "").removeprefix("tests.python.")
        name = re.sub(r"/\d+$", "", f"{classname}::{case.get('name')}")
        row = Row(name, float(case.get("time", 0)), result, measured)
        if rows and rows[-1].name == row.name:
            add(rows[-1], row)
        else:
            rows.append(row)
    return rows


def add(row: Row, more: Row) -> None:
    row.seconds += more.seconds
    if row.outcome == "passed":
        row.outcome = more.outcome
    for name, value in more.measured.items():
        row.measured[name] = str(int(row.measured.get(name, 0)) + int(value))


def call(*command: str | Path, soak: bool = True) -> int:
    env = {**os.environ, "DILOCO_SOAK": "1"} if soak else None
    try:
        return subprocess.run([str(word) for word in command], cwd=ROOT, env=env, timeout=PART_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return 124


def cpp(folder: Path) -> Part:
    """All of them run, which takes little more than those with a soak size alone."""
    xml = folder / "cpp.xml"
    status = (
        call("cmake", "-S", ".", "-B", BUILD, "-DDILOCO_BUILD_TESTS=ON", soak=False)
        or call("cmake", "--build", BUILD, "--parallel", str(os.cpu_count()), soak=False)
        or call(BUILD / "tests/cpp/diloco_core_tests", "--gtest_brief=1", f"--gtest_output=xml:{xml}")
    )
    return Part("cpp", rows_of(xml), status)


def python(folder: Path) -> Part:
    xml = folder / "python.xml"
    status = call(sys.executable, "-m", "pytest", "-v", "-m", "soak", f"--junitxml={xml}")
    return Part("python", rows_of(xml), status)


def margin(folder: Path, seeds: int = MARGIN_SEEDS, *options: str) -> Part:
    """`diloco demo --margin-seeds`: fails if the margin over training alone is too small for its spread."""
    words = ["demo", "--margin-seeds", str(seeds), *options]
    file = folder / "margin.json"
    began = time.monotonic()
    status = call(sys.executable, "-m", "diloco", *words, "--plain", "--json", file, soak=False)
    values = json.loads(file.read_text()) if file.exists() else {}
    measured = {name: f"{values[name]:.4g}" for name in ("margin", "spread", "ratio") if name in values}
    result = "passed" if status == 0 else f"exit status {status}"
    row = Row(" ".join(["diloco", *words]), time.monotonic() - began, result, measured)
    return Part("margin", [row], status)


def evidence(folder: Path, *options: str) -> Part:
    """`diloco evidence`: writes the whole page. Verdicts are findings and fail nothing; a starved learner does."""
    words = ["evidence", "--write", *options]
    began = time.monotonic()
    status = call(sys.executable, "-m", "diloco", *words, soak=False)
    file = ROOT / "docs" / "evidence.json"
    verdicts: dict[str, int] = {}
    for table in json.loads(file.read_text())["tables"] if status in (0, 1) and file.exists() else []:
        for claim in table["claims"]:
            verdicts[claim["verdict"]] = verdicts.get(claim["verdict"], 0) + 1
    measured = {name: str(count) for name, count in sorted(verdicts.items())}
    result = "passed" if status == 0 else f"exit status {status}"
    row = Row(" ".join(["diloco", *words]), time.monotonic() - began, result, measured)
    return Part("evidence", [row], status)


def mutations(folder: Path) -> Part:
    """`tools/mutations.py`: every one of them; writes docs/mutations.md."""
    began = time.monotonic()
    status = call(sys.executable, ROOT / "tools" / "mutations.py", soak=False)
    result = "passed" if status == 0 else f"exit status {status}"
    return Part("mutations", [Row("tools/mutations.py", time.monotonic() - began, result)], status)


PARTS: dict[str, Callable[[Path], Part]] = {
    "cpp": cpp,
    "python": python,
    "margin": margin,
    "mutations": mutations,
    "evidence": evidence,
}


def commit() -> str:
    """The commit that is checked out, with "-dirty" if files differ from it; earlier soak reports do not count."""
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*"]
    name = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "uncommitted"
    command = ["git", "status", "--porcelain", "--", ".", ":!docs/soak"]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return f"{name}-dirty" if changed else name


def report(of: str, date: str, parts: list[Part]) -> str:
    here, versions = machine(), software()
    lines = [
        f"# Soak, {date}, commit {of}",
        "",
        f"Made by `make soak`. {'Everything passed' if all(part.ok for part in parts) else '**Something failed**'}.",
        "",
        f"* Machine: {here['cpu']}, {here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB, {here['os']}",
        f"* Software: Python {versions['python']}, torch {versions['torch']}, diloco {versions['diloco']}",
    ]
    for part in parts:
        failed = sum(not row.outcome.startswith(("passed", "skipped")) for row in part.rows)
        lines.append(
            f"* {part.name}: {len(part.rows)} rows, {failed} failed, exit status {part.status}, "
            f"{part.seconds / 60:.1f} minutes"
        )
    lines += ["", "| test | s | outcome | measured |", "|---|---|---|---|"]
    for part in parts:
        for row in part.rows:
            measured = ", ".join(f"{name} {value}" for name, value in row.measured.items())
            cells = (row.name, f"{row.seconds:.0f}", row.outcome, measured)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/soak.py", description="long proofs")
    parser.add_argument("part", nargs="*", help=f"{', '.join(PARTS)}; default: all")
    names = parser.parse_args(argv).part or list(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    of, date = commit(), datetime.date.today().isoformat()
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            began = time.monotonic()
            parts.append(PARTS[name](Path(folder)))
            parts[-1].seconds = time.monotonic() - began
    target = ROOT / "docs" / "soak" / ("-".join([date, of, *(names if names != list(PARTS) else [])]) + ".md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report(of, date, parts))
    print(f"soak: report in {target.relative_to(ROOT)}")
    return 0 if all(part.ok for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
