"""`diloco doctor`: the words of diloco.doctor on the screen, and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def run_doctor(
    *,
    syncer: str | None,
    bind: str | None,
    insecure: bool,
    model: str,
    step_s: float,
    learners: int,
    setting: list[str],
    config: Path | None,
    timeout_s: float,
    json_file: str | None,
) -> int:
    """Exit status: 0 ready; 1 not; 2 bad arguments or a FILE that cannot be written."""
    from diloco._report import common, why_unwritable
    from diloco.doctor import LearnerSide, SyncerSide, check_learner, check_syncer
    from diloco.doctor.report import SCHEMA

    if json_file and json_file != "-" and (reason := why_unwritable(json_file)):
        return _fail(f"cannot write --json {json_file}: {reason}; choose a file in a folder you may write")
    if syncer is not None and (bind is not None or insecure or setting or config or learners):
        return _fail(
            "--syncer looks at a learner's machine; --bind, --insecure, --setting, --config and --learners belong to "
            "the syncer's machine: give either"
        )
    if syncer is None and step_s:
        return _fail("--step-s is about a learner: give --syncer HOST:PORT too")
    try:
        pairs = dict(_pair(text) for text in setting)
        if syncer is not None:
            report = check_learner(LearnerSide(syncer, model, step_s, timeout_s))
        else:
            side = SyncerSide(settings=pairs, config_file=str(config or ""), model=model, learners=learners)
            side.bind, side.insecure = bind or side.bind, insecure
            report = check_syncer(side)
    except ValueError as error:
        return _fail(str(error))
    print("\n".join(report.lines()), file=sys.stderr if json_file == "-" else sys.stdout)
    if json_file:
        values = {**common(SCHEMA, " ".join(["diloco", *sys.argv[1:]]), 0), **report.values()}
        text = json.dumps(values, indent=1) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text, encoding="utf-8")
    return 0 if report.ready else 1


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--setting: expected NAME=VALUE, such as min_quorum=2, got '{text}'")
    return name.strip().replace("-", "_"), value.strip()


def _fail(text: str) -> int:
    print(f"diloco doctor: {text}", file=sys.stderr)
    return 2
