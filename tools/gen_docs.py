"""Writes docs/settings.md and docs/cli.md from the code: the settings table, and what the programs say to --help.

python tools/gen_docs.py           writes both files
python tools/gen_docs.py --check   writes nothing; exit status 1, naming the file, if one is not what the code says
"""

import difflib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from diloco import _C
from diloco.cli import app

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- Written by tools/gen_docs.py from the code; change it there. -->"
HEADING_OF_SETTINGS = "Settings of the run"

SETTINGS_INTRO = """\
Settings live on the syncer and reach every learner when it joins. A learner may name some of its own; they must equal
the syncer's, or it is refused with both values. `staging_bytes` is the exception: it is the learner's own.

| where | form |
|---|---|
| program | `diloco-syncer --sync-every 24` (underscores become dashes) |
| Python | `diloco.Syncer(sync_every=24)`, `diloco.DiLoCoOptimizer(..., sync_every=24)` |
| environment | `DILOCO_SYNC_EVERY=24` |
| file | `sync_every = 24` in the TOML file of `diloco-syncer --config FILE.toml`; no sections |

An argument wins over the environment, the environment over the file. A name that is no setting, and a `DILOCO_*`
variable that is none, is an error that suggests the nearest one. Times end in `_s` and are seconds, sizes end in
`_bytes`. What the settings do together is told in [concepts.md](concepts.md).
"""

PRESETS_INTRO = """\
## Presets: which settings make which paper

All of them are one machine. `preset = NAME` (`diloco-syncer --preset streaming`, `diloco.Syncer(preset="streaming")`)
gives the settings of its column to every setting that is not given itself, wherever it comes from; an empty cell is the
default.
"""

CLI_INTRO = """\
`diloco` is the Python command, `diloco-syncer` the native syncer without Python (also installed by the package).
Exit statuses and messages: [operations.md](operations.md).
"""


def code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def allowed(info: _C.SettingInfo) -> str:
    if info.choices:
        return ", ".join(code(choice) for choice in info.choices)
    words = [word for word in (info.type if info.type == "text" else "", info.range) if word]
    return " ".join(words) + (f" ({info.unit})" if info.unit else "")


def settings_page() -> str:
    lines = [
        MARK,
        "",
        "# Settings",
        "",
        SETTINGS_INTRO,
        "| setting | default | allowed | what it does |",
        "|---|---|---|---|",
    ]
    for info in _C.settings_table():
        default = code(info.default_value) if info.default_value else "none"
        lines.append(f"| `{info.name}` | {default} | {allowed(info)} | {info.help.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, *presets_section()]) + "\n"


def presets_section() -> list[str]:
    presets = _C.presets()
    columns = {preset.name: dict(preset.values) for preset in presets}
    lines = ["", PRESETS_INTRO, "| setting | " + " | ".join(f"`{name}`" for name in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for info in _C.settings_table():
        cells = [code(values[info.name]) if info.name in values else "" for values in columns.values()]
        if any(cells):
            lines.append(f"| `{info.name}` | " + " | ".join(cells) + " |")
    lines += ["", "Where the numbers come from:", ""]
    lines += [f"* `{preset.name}`, {preset.source}. {preset.reason}" for preset in presets]
    return lines


def verb_rows(command: Any) -> list[str]:
    """One table row per option of a verb."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    for parameter in command.params:
        flag = bool(getattr(parameter, "is_flag", False))
        argument = parameter.param_type_name == "argument"
        value = parameter.metavar or parameter.name.upper()
        name = value if argument else parameter.opts[0] + ("" if flag else f" {value}")
        default = "off" if flag else "none" if parameter.default is None else code(str(parameter.default))
        rows.append(f"| {code(name)} | {default} | {parameter.help} |")
    return rows


def program_help(command: list[str]) -> str:
    """What a program prints for --help, in an environment without settings."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    env |= {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--help"], env=env, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def fenced(text: str) -> list[str]:
    return ["```", *(line.rstrip() for line in text.strip().splitlines()), "```"]


def verbs(group: Any) -> Iterator[tuple[str, Any]]:
    """Every command with its words; groups are only their commands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", found) for inner, found in verbs(command))
        else:
            yield name, command


def cli_page() -> str:
    lines = [MARK, "", "# Command line", "", CLI_INTRO]
    for name, command in verbs(typer.main.get_command(app)):
        lines += [f"## diloco {name}", "", command.help, ""]
        if name == "syncer":
            own, _, _ = program_help([sys.executable, "-m", "diloco", "syncer"]).partition(HEADING_OF_SETTINGS)
            lines += ["The same program as `diloco-syncer`.", "", *fenced(own), ""]
            lines += ["Each setting is an option too: [settings.md](settings.md)."]
        elif name == "audit":
            lines += fenced(program_help([sys.executable, str(ROOT / "diloco" / "audit.py")]))
        else:
            lines += verb_rows(command)
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = 0
    for name, text in (("docs/settings.md", settings_page()), ("docs/cli.md", cli_page())):
        path = ROOT / name
        if not arguments:
            path.write_text(text)
            print(f"{name} written")
            continue
        found = path.read_text() if path.exists() else ""
        if found != text:
            stale = 1
            print(f"{name} is not what the code says; run python tools/gen_docs.py and commit the result:")
            difference = difflib.unified_diff(
                found.splitlines(), text.splitlines(), name, "from the code", lineterm="", n=0
            )
            print("\n".join(list(difference)[:20]))
    if arguments and not stale:
        print("docs/settings.md and docs/cli.md are what the code says")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
