"""`diloco bench`: measurements on the machine it runs on."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated

import typer


class Sharding(enum.StrEnum):
    DDP = "ddp"
    FSDP2 = "fsdp2"


app = typer.Typer(no_args_is_help=True, help="Measurements on this machine.")


@app.callback()
def _group() -> None:
    pass


@app.command("islands")
def _islands(
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, metavar="R", help="Ranks of an island; may be repeated. Default 1, 2, 4.")
    ] = None,
    sharding: Annotated[
        list[Sharding] | None, typer.Option(help="Kind of island; may be repeated. Default both.")
    ] = None,
    million: Annotated[float, typer.Option(min=0.001, metavar="M", help="Parameters of the model, in millions.")] = 1.5,
    steps: Annotated[int, typer.Option(min=6, metavar="N", help="Timed steps of each island.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Of the model and its data.")] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for stdout.")
    ] = None,
) -> None:
    """What the ranks of an island pay for being one learner: time and peak memory of each, beside an island without a
    syncer and one with the bare optimizer."""
    raise typer.Exit(run_islands(ranks, [one.value for one in sharding or ()], million, steps, seed, json_file))


def run_islands(
    ranks: list[int] | None, shardings: list[str], million: float, steps: int, seed: int, json_file: str | None
) -> int:
    """0: measured; 1: memory is not shared out as promised, or a rank failed; 2: an argument that cannot work."""
    from diloco._report import why_unwritable
    from diloco.bench import island_report
    from diloco.bench.islands import BenchError, Options, measure_all

    if json_file and json_file != "-" and (reason := why_unwritable(json_file)):
        return _fail(f"--json {json_file} cannot be written: {reason}; choose another file", 2)
    default = Options()
    options = Options(
        shardings=tuple(dict.fromkeys(shardings)) or default.shardings,
        ranks=tuple(dict.fromkeys(ranks or ())) or default.ranks,
        parameters=int(million * 1e6),
        steps=steps,
        seed=seed,
    )
    try:
        measured = measure_all(options, lambda text: typer.echo(f"measuring {text}", err=True))
    except BenchError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    report = island_report.build(options, measured, " ".join(["diloco", *sys.argv[1:]]))
    typer.echo(island_report.screen(report), err=json_file == "-")
    if json_file == "-":
        typer.echo(json.dumps(report, indent=2))
    elif json_file:
        Path(json_file).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["ok"] else 1


def _fail(text: str, status: int) -> int:
    typer.echo(f"diloco bench islands: {text}", err=True)
    return status
