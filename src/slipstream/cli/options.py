"""Options that several commands share, and the application they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from slipstream.base.storage import is_url

if TYPE_CHECKING:
    from slipstream.config import Config

LONGEST_SUMMARY = 1_000
"""The largest number of characters in a command's first sentence"""


def parse_path(text: str) -> Path:
    """Parse a path; an empty text would mean the working folder."""
    if not text:
        raise typer.BadParameter("is empty; name a file or a folder")
    return Path(text)


def parse_output(text: str) -> Path:
    """Parse the path of a file or folder to write, which is on this machine."""
    path = parse_path(text)
    if is_url(path):
        raise typer.BadParameter(
            "object storage is written by `slipstream copy RUN URL` only; name a local path"
        )
    return path


def folder_option(help_: str, default: str, name: str = "--out") -> Any:
    """Create the option of a folder to write to."""
    return typer.Option(
        name, parser=parse_output, metavar="FOLDER", help=help_, show_default=default
    )


RUN_HELP = "a run folder, the beginning of its name, or `last`."
RunFolder = Annotated[
    Path, typer.Argument(parser=parse_path, metavar="RUN", help=RUN_HELP.capitalize())
]


def parse_set(text: str) -> str:
    """Parse a `--set`; messages about it name the option."""
    from slipstream.config import OptionText

    return OptionText(text)


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        parser=parse_set,
        metavar="SECTION.KEY=VALUE",
        help="Override a setting, as in train.lr=0.001; repeatable.",
    ),
]
Out = Annotated[Path | None, folder_option("The folder to create the run in.", "the setting out")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print neither progress nor a summary.")]
Resample = Annotated[
    bool, typer.Option("--resample", help="Resample rows to the time step of the training data.")
]
Ensemble = Annotated[
    bool | None,
    typer.Option(
        "--ensemble/--single",
        help="For runs with train.repeats and ensembles: the mean of all models, or the best.",
        show_default="whichever was better on the validation set",
    ),
]
Resume = Annotated[str | None, typer.Option(metavar="RUN", help=f"The run to resume: {RUN_HELP}")]
Folder = Annotated[
    Path | None,
    folder_option(
        "The run's own folder: a run that was stopped there resumes, else one begins there.",
        "a new one in --out",
        "--folder",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Resume although settings have changed.")]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Let the run's config import the network class it names."),
]

Joins = Annotated[
    list[str] | None,
    typer.Option(
        "--join",
        metavar="NAME=FILE",
        help="Join this file instead of the one that data.prepare names, as in "
        "weather.csv=weather-new.csv; repeatable.",
    ),
]

DATA_HELP = "A file or folder with the columns that the model was trained on."


def parse_joins(joins: Sequence[str] | None) -> dict[str, str]:
    """Return the files of --join, by the name of the file that each replaces."""
    from slipstream.base.errors import UserError

    result = {}
    for text in joins or ():
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UserError(f'--join: "{text}" is not of the form NAME=FILE')
        result[name] = path
    return result


def list_overrides(set_: Sequence[str] | None, out: Path | None) -> tuple[str, ...]:
    """Return the settings of --set, with the folder of --out."""
    from slipstream.config import OptionText
    from slipstream.runs import to_json

    folder = () if out is None else (OptionText(f"out={to_json(str(out))}", "--out"),)
    return (*(set_ or ()), *folder)


def refuse_several_folders(folder: Path | None, resume: str | None, out: Path | None) -> None:
    """Raise a UserError where `--folder` is combined with further folders."""
    from slipstream.base.errors import UserError

    for name, value in (("--resume", resume), ("--out", out)):
        if folder is not None and value is not None:
            raise UserError(f"--folder and {name} both name the place of the run; pass one of them")


def load_job(
    config: Path | None,
    resume: str | None,
    overrides: Sequence[str],
    always: Sequence[str] = (),
    *,
    demo: str,
    kinds: Sequence[str],
) -> tuple[Config | None, Path | None]:
    """Return the config, None for a run that resumes with its own, and the folder to resume.

    `always` holds settings of the command itself; they override all others. Of several runs that
    `resume` may mean, those of `kinds` come first.
    """
    from slipstream import config as configs
    from slipstream import runs

    loaded = None
    if config or not resume:
        loaded = configs.load(config or configs.load_demo(demo), (*overrides, *always))
    if not resume:
        return loaded, None
    where = loaded or configs.load({}, [text for text in overrides if text.startswith("out=")])
    if resume == "last" and loaded:
        return loaded, runs.find_last(where.out, loaded.name, kinds)
    return loaded, runs.find_run(resume, out=where.out, kinds=kinds)


class CommandGroup(TyperGroup):
    """A group whose help wraps the summaries of commands instead of cutting them off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for command in self.commands.values():
            command.short_help = command.get_short_help_str(LONGEST_SUMMARY)
        super().format_commands(ctx, formatter)


def create_app() -> typer.Typer:
    """Return the application before it has commands."""
    return typer.Typer(
        name="slipstream",
        cls=CommandGroup,
        help="Train sequence models on time series as fast as the hardware allows.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        invoke_without_command=True,
        callback=_print_version,
    )


def _print_version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from slipstream import __version__

        print(__version__)
        raise typer.Exit
