"""`diloco bench`: measurements on the machine it runs on."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


class Sharding(enum.StrEnum):
    DDP = "ddp"
    FSDP2 = "fsdp2"


_JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for stdout.")
]

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
    json_file: _JsonFile = None,
) -> None:
    """What the ranks of an island pay for being one learner: time and peak memory of each, beside an island without a
    syncer and one with the bare optimizer."""
    raise typer.Exit(run_islands(ranks, [one.value for one in sharding or ()], million, steps, seed, json_file))


@app.command("memory")
def _memory(
    threads: Annotated[
        list[int] | None, typer.Option(min=1, max=256, metavar="N", help="May be repeated. Default 1, and all cores.")
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, metavar="MB", help="Of each of three arrays.")] = 256,
    turns: Annotated[int, typer.Option(min=1, metavar="N", help="Timed runs of each.")] = 9,
    json_file: _JsonFile = None,
) -> None:
    """What memory gives: read, copy and triad as STREAM counts them. The yardstick of other benchmarks."""
    raise typer.Exit(run_memory(threads, megabytes, turns, json_file))


def run_memory(threads: list[int] | None, megabytes: int, turns: int, json_file: str | None) -> int:
    """0: measured; 2: an argument that cannot work."""
    from diloco.bench import memory
    from diloco.bench.report import cores, report

    if why := _why_not(json_file, 3 * megabytes * 10**6):
        return _fail("memory", why, 2)
    found = memory.measure(sorted(set(threads or (1, cores()))), megabytes, turns)
    lines = [f"{'GB/s, best (median)':<20}" + "".join(f"{f'{count} threads':>18}" for count in found)]
    for name in memory.NAMES:
        cells = [f"{one[name]['best']:.1f} ({one[name]['median']:.1f})" for one in found.values()]
        lines.append(f"{name:<20}" + "".join(f"{cell:>18}" for cell in cells))
    values = {str(count): one for count, one in found.items()}
    _give(report("memory", [], gigabytes_per_s=values, megabytes=megabytes, turns=turns), "\n".join(lines), json_file)
    return 0


@app.command("merge")
def _merge(
    millions: Annotated[
        float, typer.Option("--elements", min=0.02, metavar="M", help="Elements of the fragment, in millions.")
    ] = 16.0,
    threads: Annotated[int | None, typer.Option(min=1, max=256, metavar="N", help="Default: all cores.")] = None,
    megabytes: Annotated[int, typer.Option(min=1, metavar="MB", help="Of each array of the triad.")] = 256,
    turns: Annotated[int, typer.Option(min=1, metavar="N", help="Timed runs of each.")] = 9,
    json_file: _JsonFile = None,
) -> None:
    """Merge and outer step of one fragment of 8 learners: mean and RDA, beside memory's triad and beside eager torch,
    all in turn. Exit status 1 if a goal is missed. Bytes are those that must be moved, without what a plain store reads
    of its line first; the triad has plain stores."""
    raise typer.Exit(run_merge(millions, threads, megabytes, turns, json_file))


def run_merge(millions: float, threads: int | None, megabytes: int, turns: int, json_file: str | None) -> int:
    """0: every goal is reached; 1: one is not; 2: an argument that cannot work."""
    from diloco.bench.merge import Options, measure
    from diloco.bench.report import cores, report
    from diloco.bench.rows import table

    options = Options(millions=millions, threads=threads or cores(), turns=turns, megabytes=megabytes)
    if why := _why_not(json_file, options.memory_bytes()):
        return _fail("merge", why, 2)
    rows = measure(options, lambda text: typer.echo(f"measuring {text}", err=True))
    found = report("merge", rows, elements=options.elements, threads=options.threads, turns=turns)
    _give(found, table(rows), json_file)
    return 0 if found["ok"] else 1


def _why_not(json_file: str | None, needed_bytes: int) -> str:
    """Why it is not even begun, or ""."""
    from diloco._report import why_unwritable
    from diloco.cli.units import size
    from diloco.doctor.machine import memory

    if json_file and json_file != "-" and (reason := why_unwritable(json_file)):
        return f"--json {json_file} cannot be written: {reason}; choose another file"
    if (here := memory()).available < needed_bytes:
        return (
            f"this takes {size(needed_bytes)} of memory, and {here.bound} has {size(here.available)} left; ask for "
            "less, or measure on a larger machine"
        )
    return ""


def _give(found: dict[str, Any], screen: str, json_file: str | None) -> None:
    typer.echo(screen, err=json_file == "-")
    if json_file == "-":
        typer.echo(json.dumps(found, indent=2))
    elif json_file:
        Path(json_file).write_text(json.dumps(found, indent=2) + "\n")


def run_islands(
    ranks: list[int] | None, shardings: list[str], million: float, steps: int, seed: int, json_file: str | None
) -> int:
    """0: measured; 1: memory is not shared out as promised, or a rank failed; 2: an argument that cannot work."""
    from diloco.bench import island_report
    from diloco.bench.islands import BenchError, Options, measure_all

    if why := _why_not(json_file, 0):
        return _fail("islands", why, 2)
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
        return _fail("islands", str(error), 1)
    except KeyboardInterrupt:
        return _fail("islands", "interrupted", 130)
    report = island_report.build(options, measured, " ".join(["diloco", *sys.argv[1:]]))
    _give(report, island_report.screen(report), json_file)
    return 0 if report["ok"] else 1


def _fail(what: str, text: str, status: int) -> int:
    typer.echo(f"diloco bench {what}: {text}", err=True)
    return status
