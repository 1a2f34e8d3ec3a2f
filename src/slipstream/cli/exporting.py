"""The command that writes a model for use outside of Slipstream: export."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import (
    DATA_HELP,
    AllowCode,
    Ensemble,
    Json,
    Quiet,
    RunFolder,
    Set,
    parse_output,
    parse_path,
)
from slipstream.cli.output import handle_errors, print_result
from slipstream.cli.startup import import_modules
from slipstream.terminal.results import print_export


def export(
    run: RunFolder,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="onnx, c, torch, hub, triton or ray.")
    ],
    out: Annotated[
        Path, typer.Option(parser=parse_output, metavar="FOLDER", help="The folder to create.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            parser=parse_path,
            metavar="DATA",
            help=f"Verify on these rows, not on the run's test set. {DATA_HELP}",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="For c: weights of 8 bits, if the test error allows it.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="For c: the prefix of its names (slip)."),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="For c, what a step does: carried goes on with the state of the row before "
            "(default, where the model can), windows predicts the window of the last rows.",
        ),
    ] = None,
    after_prepare: Annotated[
        bool,
        typer.Option("--after-prepare", help="For c: leave data.prepare to the caller."),
    ] = False,
    ensemble: Ensemble = None,
    license_: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="NAME",
            help="For hub: the licence in the model card, as in apache-2.0.",
        ),
    ] = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model as files for other programs, verified.

    Every window of the test set is run through the files and compared with the model; where they
    differ, nothing is written.
    """
    with handle_errors(as_json, quiet):
        from slipstream import runs

        with import_modules():
            from slipstream.exporting.api import ExportOptions, export_run

        own = {"int8": int8, "name": name, "state": state, "after_prepare": after_prepare}
        own["license"] = license_
        options = ExportOptions(
            data=data,
            force=force,
            ensemble=ensemble,
            allow_code=allow_code,
            overrides=tuple(set_ or ()),
            settings={key: value for key, value in own.items() if value},
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes on the data were printed by training
            result = export_run(runs.find_run(run), to, out, options)
        print_result(result, as_json, quiet, print_export)
