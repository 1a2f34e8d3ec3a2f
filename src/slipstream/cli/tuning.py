"""The command that searches: tune."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream import terminal
from slipstream.cli.options import AllowCode, Json, Quiet, Set, load_job
from slipstream.cli.output import handle_errors, print_result
from slipstream.errors import UserError


def tune(
    config: Annotated[
        Path | None,
        typer.Argument(help="A TOML file; without one, a small search on embedded data."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Resume a search: its folder, or `last`."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A database that workers share; default: SLIPSTREAM_STORAGE.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="The number of processes; auto: one per GPU."),
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
    """Search hyper-parameters, many trials at once, and retrain the best settings."""
    with handle_errors(as_json):
        loaded, resume = load_job(config, resume, set_, demo="search")
        with terminal.SearchDisplay(quiet) as display:
            display.say("loading torch and the data ...")
            from slipstream.reporting import report
            from slipstream.tuning import tune as run_search

            _warn_about_password(storage)
            study = run_search(
                loaded,
                overrides=() if loaded else tuple(set_ or ()),
                watch=display.show,
                resume=resume,
                storage=storage,
                workers=_parse_workers(workers),
                on=_parse_cluster(on),
                allow_code=allow_code,
            )
            display.say("writing the report ...")
            path = report(study.run)
        print_result(study.summary | {"report": str(path)}, as_json, quiet, terminal.print_search)


def _warn_about_password(storage: str | None) -> None:
    from slipstream.tuning.storage.url import holds_secret

    if storage is not None and holds_secret(storage):
        terminal.SafeStream(sys.stderr).write(
            "slipstream: warning: --storage contains a password, which every user of this machine "
            "can see in the process list; set the URL in SLIPSTREAM_STORAGE, or the password in "
            "PGPASSWORD or ~/.pgpass\n"
        )


def _parse_workers(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise UserError(f"--workers is {text}; expected a number from 1, or auto")
    return int(text)


def _parse_cluster(text: str | None) -> Literal["ray"] | None:
    if text not in (None, "ray"):
        raise UserError(f"--on is {text}; expected ray")
    return "ray" if text else None
