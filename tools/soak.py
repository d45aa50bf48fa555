"""`make soak`: runs the tests marked `soak` and writes docs/soak/<date>-<commit>.md. Arguments go to pytest."""

import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "uncommitted"


def outcome(case: ET.Element) -> str:
    for tag in ("failure", "error", "skipped"):
        element = case.find(tag)
        if element is not None:
            return f"{tag}: {(element.get('message') or '').splitlines()[0] if element.get('message') else ''}"
    return "passed"


def report(cases: list[ET.Element], seconds: float, status: int) -> str:
    import torch

    lines = [
        f"# Soak, {datetime.date.today().isoformat()}, commit {commit()}",
        "",
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}. {len(cases)} tests in {seconds / 60:.1f} minutes, pytest status {status}. "
        "Made by `make soak`.",
        "",
        "| test | s | outcome | measured |",
        "|---|---|---|---|",
    ]
    for case in cases:
        # What a test leaves by record_property("name", value).
        properties = ", ".join(f"{p.get('name')} {p.get('value')}" for p in case.iter("property"))
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        lines.append(f"| {name} | {float(case.get('time', 0)):.0f} | {outcome(case)} | {properties} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "soak.xml"
        command = [sys.executable, "-m", "pytest", "-m", "soak", "--timeout=7200", f"--junitxml={xml}", *sys.argv[1:]]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, "DILOCO_SOAK": "1"}).returncode
        cases = list(ET.parse(xml).getroot().iter("testcase")) if xml.exists() else []
    target = ROOT / "docs" / "soak" / f"{datetime.date.today().isoformat()}-{commit()}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report(cases, time.monotonic() - started, status))
    print(f"soak: report in {target.relative_to(ROOT)}")
    return 1 if status != 0 or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
