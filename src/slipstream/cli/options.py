"""Options that several commands have, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slipstream.config import Config


def named(text: str) -> Path:
    """A file or a folder; an empty text would be the working folder."""
    if not text:
        raise typer.BadParameter("is empty; name a file or a folder")
    return Path(text)


RunFolder = Annotated[Path, typer.Argument(parser=named, metavar="RUN", help="A run's folder.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no summary.")]
Resample = Annotated[
    bool, typer.Option("--resample", help="Bring rows to the step that the model was trained on.")
]
Ensemble = Annotated[
    bool | None,
    typer.Option(
        "--ensemble/--single",
        help="Runs with train.repeats: the mean of all models, or the best one alone.",
        show_default="what was better on the validation set",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Go on with a run's folder, or with the last one: last."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Resume even though settings or data have changed.")
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Let the run's config import a network that is not Slipstream's."
    ),
]


DATA_HELP = "A file or folder with the columns that the model was trained on."


def asked(
    config: Path | None,
    resume: str | None,
    set_: Sequence[str] | None,
    always: Sequence[str] = (),
    *,
    demo: str,
) -> tuple[Config | None, str | None]:
    """The settings, none where a run goes on with its own; and that run's folder, if one does.

    What the command itself sets comes last.
    """
    from slipstream import config as configs
    from slipstream import runs

    settings = None
    if config or not resume:
        settings = configs.load(config or configs.load_demo(demo), (*(set_ or ()), *always))
    if resume == "last":
        where = [text for text in set_ or () if text.startswith("out=")]
        out = (settings or configs.load({}, where)).out
        resume = str(runs.find_last(out, settings.name if settings else None))
    return settings, resume
