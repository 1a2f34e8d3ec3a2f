"""Commands that measure the machine: doctor, profile, and those of bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream import terminal
from slipstream.cli.options import Json, Quiet, Set, named
from slipstream.cli.output import answering, print_result
from slipstream.errors import UserError
from slipstream.terminal import TrainingDisplay


def doctor(set_: Set = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Show what is here, try what works, say what is wrong and how to fix it."""
    with answering(as_json):
        if set_:
            raise UserError("doctor looks at the machine; --set has nothing to change here")
        with TrainingDisplay(quiet) as watching:
            watching.say("loading torch ...")
            from slipstream.doctor import examine

            found = examine(watching.say)
        print_result(found, as_json, quiet, terminal.print_doctor)


def profile(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo's step.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, max=200, help="Steps to record.")] = 30,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=named,
            metavar="FOLDER",
            help="Where to make the folder.",
            show_default="profiles",
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also a trace for TensorBoard.")
    ] = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say where a training step's time goes and what would help, tried where it can be."""
    with answering(as_json), TrainingDisplay(quiet) as watching:
        watching.say("loading torch and the data ...")
        from slipstream import config as configs
        from slipstream.profiling import profile as run_profile

        found = run_profile(
            config or configs.load_demo(),
            overrides=tuple(set_ or ()),
            steps=steps,
            out=out,
            tensorboard=tensorboard,
            tell=watching.say,
        )
        print_result(found, as_json, quiet, terminal.print_profile)


bench_app = typer.Typer(
    name="bench",
    help="Measure on this machine: what techniques bring, that accuracy held, how others do.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Job = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="A TOML file; without one, standard cases.")
]
Minutes = Annotated[
    float | None, typer.Option(min=0.05, help="Time that it may take in all.", show_default=False)
]
Out = Annotated[
    Path | None,
    typer.Option(
        parser=named,
        metavar="FOLDER",
        help="Folder for the results.",
        show_default="bench/<kind>-<time>",
    ),
]
Cases = Annotated[
    str, typer.Option(help="Some of the standard cases: A, B, C, D, GRU, MLP, Transformer.")
]


@bench_app.command()
def ladder(
    config: Job = None,
    cases: Cases = "",
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """From the naive loop upward, one technique added at a time."""
    given = {"cases": _names(cases), "minutes": minutes, "out": out}
    _bench("ladder", as_json, quiet, config, set_, **given)


@bench_app.command()
def parity(
    config: Job = None,
    seeds: Annotated[int, typer.Option(help="Seeds that both ways train with.")] = 3,
    margin: Annotated[float, typer.Option(help="Loss that is not one, in per cent.")] = 0.5,
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Whether auto is as accurate as the naive loop: whole trainings, seed by seed."""
    given = {"seeds": seeds, "margin": margin / 100, "minutes": minutes, "out": out}
    _bench("parity", as_json, quiet, config, set_, **given)


@bench_app.command()
def peers(
    config: Job = None,
    cases: Cases = "",
    jobs: Annotated[
        bool, typer.Option("--jobs/--no-jobs", help="Also whole jobs to a validation loss.")
    ] = True,
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Beside Lightning and a plain PyTorch loop: the same work, step by step and as a whole."""
    given = {"cases": _names(cases), "jobs": jobs, "minutes": minutes, "out": out}
    _bench("peers", as_json, quiet, config, set_, **given)


@bench_app.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A folder of earlier results.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A folder of later ones.")],
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What moved beyond the spread from one result folder to another."""
    with answering(as_json):
        from slipstream.bench import commands

        found = commands.compare(old, new, out=out)
        print_result(found, as_json, quiet, terminal.print_bench)


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def _bench(
    what: str, as_json: bool, quiet: bool, config: Path | None, set_: Set, **given: Any
) -> None:
    with answering(as_json):
        with terminal.ProgressMeter(quiet) as meter:
            meter.say("loading torch and the data ...")
            from slipstream.bench import commands

            run = getattr(commands, what)
            given = {name: value for name, value in given.items() if value is not None}
            found = run(config, overrides=tuple(set_ or ()), watch=meter.show, **given)
        print_result(found, as_json, quiet, terminal.print_bench)
