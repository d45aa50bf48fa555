"""The `diloco` command. Verbs with a grammar of their own (syncer, audit) get their arguments unparsed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.bench import app as bench_app
from diloco.cli.simulate import app as simulate_app
from diloco.cli.status import show_status

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Decoupled DiLoCo for PyTorch: learners that never wait, merged by a small native syncer.",
)
app.add_typer(simulate_app, name="simulate")
app.add_typer(bench_app, name="bench")
_UNPARSED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def version_text() -> str:
    import torch

    from diloco._native import _C, __version__

    return (
        f"diloco {__version__} (protocol {_C.PROTOCOL_VERSION}, torch {torch.__version__}, "
        f"libzmq {_C.ZMQ_VERSION}, pybind11 internals {_C.PYBIND11_INTERNALS_VERSION})"
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print all versions and exit.")
    ] = False,
) -> None:
    pass


@app.command("status")
def _status(
    syncer: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the syncer.")] = "127.0.0.1:29400",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the whole status as JSON; - for stdout.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="How long to wait for the answer, in s.")
    ] = 5.0,
) -> None:
    """Print how a running syncer is: learners, fragments, rounds and what they wait for, ledger, memory."""
    raise typer.Exit(show_status(syncer, json_file, timeout_s))


@app.command("doctor")
def _doctor(
    syncer: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Look at this machine as a learner's, for the syncer at that address."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION|FILE", help="What will be trained: a function that returns it, or its state_dict."
        ),
    ] = None,
    step_s: Annotated[
        float, typer.Option("--step-s", min=0.0, metavar="S", help="Length of one step; default the run's, else 1 s.")
    ] = 0.0,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Without --syncer: where diloco-syncer will listen; default 127.0.0.1:29400."
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="As diloco-syncer will be given it.")] = False,
    learners: Annotated[
        int, typer.Option(min=0, metavar="N", help="Learners expected at a time; default min_quorum.")
    ] = 0,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="As diloco-syncer will be given it; may be repeated.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="As diloco-syncer will be given it.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1.0, help="With --syncer: how long all questions to it may take, in s.")
    ] = 60.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for stdout.")
    ] = None,
) -> None:
    """Say whether this machine is ready: with --syncer, to be a learner of it; without, to be the syncer."""
    from diloco.cli.doctor import run_doctor

    raise typer.Exit(
        run_doctor(
            syncer=syncer,
            bind=bind,
            insecure=insecure,
            model=model or "",
            step_s=step_s,
            learners=learners,
            setting=setting or [],
            config=config,
            timeout_s=timeout_s,
            json_file=json_file,
        )
    )


@app.command("demo")
def _demo(
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
    picture: Annotated[
        str | None, typer.Option("--picture", metavar="FILE", help="Write the picture: loss curves and timeline.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model and the data order.")] = 0,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of the fastest learner; default as needed for the checks.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer steps and a shorter paired run; the same checks.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live table.")] = False,
    keep: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Keep logs and ledgers here; default a temporary folder.")
    ] = None,
    margin_seeds: Annotated[
        int, typer.Option(metavar="N", help="Only measure the margin over a single learner, with N seeds; 0 = no.")
    ] = 0,
) -> None:
    """Train a small model with 4 learners of unequal speed, kill one, see it come back, check everything."""
    from diloco.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        json=json_file,
        picture=picture,
        seed=seed,
        steps=steps,
        quick=quick,
        plain=plain,
        keep=keep,
        margin_seeds=margin_seeds,
    )
    raise typer.Exit(run_demo(options))


@app.command("evidence")
def _evidence(
    tables: Annotated[list[str] | None, typer.Argument(metavar="TABLE", help="Tables to make; default all.")] = None,
    seeds: Annotated[int, typer.Option(min=0, metavar="N", help="Seeds of each row; 0 = as many as the page has.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds: a look, no evidence.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Make one row of each table again and compare it with FOLDER/evidence.json.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Only write FOLDER/evidence.md again from FOLDER/evidence.json.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write FOLDER/evidence.md and FOLDER/evidence.json; else print the page.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON.")
    ] = None,
    folder: Annotated[str, typer.Option(metavar="FOLDER", help="Where the page and its numbers are.")] = "docs",
    workers: Annotated[int, typer.Option(metavar="N", help="Processes; 0 = one per core.")] = 0,
) -> None:
    """Try the papers' claims with small learners in simulated time; 20 to 40 minutes on 2 cores."""
    from diloco.evidence.command import EvidenceOptions, run_evidence

    options = EvidenceOptions(
        tables=tuple(tables or ()),
        seeds=seeds,
        quick=quick,
        check=check,
        page=page,
        write=write,
        json=json_file,
        folder=folder,
        workers=workers,
    )
    raise typer.Exit(run_evidence(options))


def _run_syncer(arguments: list[str]) -> int:
    from diloco._native import _C

    return _C.run_syncer_program(["diloco syncer", *arguments])


def _run_audit(arguments: list[str]) -> int:
    from diloco import audit

    return audit.main(arguments)


def _add_unparsed(name: str, run: Callable[[list[str]], int], help_text: str) -> None:
    def command(context: typer.Context) -> None:
        raise typer.Exit(run(context.args))

    app.command(name, context_settings=_UNPARSED, add_help_option=False, help=help_text)(command)


_add_unparsed("syncer", _run_syncer, "Run a syncer in this process until SIGTERM (see diloco syncer --help).")
_add_unparsed("audit", _run_audit, "Recompute the token ledger of a run from its files (diloco audit --help).")


def main() -> None:
    app(prog_name="diloco")
