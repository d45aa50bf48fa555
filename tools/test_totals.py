"""Prints the totals of JUnit reports, one line each: `python tools/test_totals.py NAME=FILE...`.

Exit status 1 if one is missing, ran no test, or has a failure.
"""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def totals(path: Path) -> dict[str, int]:
    root = ET.parse(path).getroot()
    suites = [root] if root.tag == "testsuite" else root.findall("testsuite")
    counts = {key: sum(int(s.get(key) or 0) for s in suites) for key in ("tests", "failures", "errors", "skipped")}
    counts["skipped"] += sum(int(s.get("disabled") or 0) for s in suites)
    return counts


def main(arguments: list[str]) -> int:
    bad = False
    for argument in arguments:
        name, _, file = argument.partition("=")
        if not Path(file).exists():
            print(f"{name} tests: no report at {file}; they did not run to their end")
            bad = True
            continue
        count = totals(Path(file))
        failed = count["failures"] + count["errors"]
        passed = count["tests"] - failed - count["skipped"]
        print(f"{name} tests: {passed} passed, {failed} failed, {count['skipped']} skipped")
        bad |= failed > 0 or passed == 0
    return 1 if bad or not arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
