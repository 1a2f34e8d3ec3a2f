"""The command that searches, alone or with workers: tune."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream import terminal
from slipstream.cli.options import AllowCode, Json, Quiet, Set, asked
from slipstream.cli.output import answering, print_result
from slipstream.errors import UserError


def tune(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo's search.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with a search's folder, or with the last: last."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A database that several workers share; also from SLIPSTREAM_STORAGE.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Processes that search; auto: one for each GPU."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ray", help="Start the workers on a Ray cluster."),
    ] = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for better settings, many trials at once, and train the best again."""
    with answering(as_json):
        settings, resume = asked(config, resume, set_, demo="search")
        with terminal.SearchDisplay(quiet) as watching:
            watching.say("loading torch and the data ...")
            from slipstream.reporting import report
            from slipstream.tuning import tune as run_search

            _warn_of_password(storage)
            found = run_search(
                settings,
                overrides=() if settings else tuple(set_ or ()),
                watch=watching.show,
                resume=resume,
                storage=storage,
                workers=_workers(workers),
                on=_cluster(on),
                allow_code=allow_code,
            )
            watching.say("drawing the report ...")
            path = report(found.run)
        print_result(found.summary | {"report": str(path)}, as_json, quiet, terminal.print_search)


def _warn_of_password(storage: str | None) -> None:
    from slipstream.tuning.storage.url import holds_secret

    if storage is not None and holds_secret(storage):
        terminal.SafeStream(sys.stderr).write(
            "slipstream: warning: --storage holds a password, which everyone on this machine can "
            "see in the list of processes; give the URL in SLIPSTREAM_STORAGE, or the password in "
            "PGPASSWORD or ~/.pgpass\n"
        )


def _workers(asked: str | None) -> int | Literal["auto"] | None:
    if asked is None:
        return None
    if asked == "auto":
        return "auto"
    if not asked.isdecimal():
        raise UserError(f"--workers is {asked}; give a number from 1, or auto")
    return int(asked)


def _cluster(asked: str | None) -> Literal["ray"] | None:
    if asked not in (None, "ray"):
        raise UserError(f"--on is {asked}; a search runs here, or on ray")
    return "ray" if asked else None
