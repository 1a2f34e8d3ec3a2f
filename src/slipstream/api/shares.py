"""`slipstream.train_share`: a part of a run's models, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.api.arguments import prepare_job
from slipstream.api.messages import speak_python
from slipstream.api.progress import show_progress
from slipstream.errors import UserError
from slipstream.events import Event

if TYPE_CHECKING:
    from slipstream.config import Config


@speak_python
def train_share(
    config: Config | str | os.PathLike[str] | Mapping[str, Any],
    folder: str | os.PathLike[str],
    share: tuple[int, int],
    *,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    quiet: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Train one share of a run's folds and repeats, as in a task of an array job.

    The first call, on any machine, creates the run in `folder`; a stopped share continues with the
    same call. When all shares are trained, `train` with the same `config` and `folder` joins them,
    scores the models and returns the result.

    Args:
        config: A TOML file, a mapping of sections, or a `Config`, the same for all shares. The data
            must come from `data.path`.
        folder: The folder of the whole run, on a drive that all machines share.
        share: Which share of how many, from 1: (3, 8).
        overrides: Settings that override `config`, as for `train`.
        quiet: Show no progress.
        on_event: A function that is called with every event of the share, as for `train`.

    Returns:
        A dict: `run`, `share`, `of`, and `lanes`, the numbers of its models; none where the run is
        finished or has fewer models than shares.

    Raises:
        UserError: A setting, the data or an argument is wrong, or the run is divided otherwise.
        Interrupted: Ctrl-C, SIGTERM or SIGUSR1 stopped the share, after it saved a checkpoint.

    Example:
        for number in (1, 2):
            slipstream.train_share("job.toml", "runs/job", (number, 2))
        result = slipstream.train("job.toml", folder="runs/job")
    """
    job = prepare_job("train_share", config, None, overrides=overrides)
    number, of = _check_share(share)
    with show_progress("training", quiet, on_event) as show:
        from slipstream import config as configs
        from slipstream.training.shares.batch import ShareNumber, train_share_of

        loaded = configs.load(job.config, job.overrides)
        return train_share_of(loaded, Path(folder), ShareNumber(number, of), watch=show)


def _check_share(share: Any) -> tuple[int, int]:
    match share:
        case (int(number), int(of)) if 0 < number <= of:
            return number, of
    raise UserError(f"share is {share!r}; give (I, N) with I from 1 to N, as in (3, 8)")
