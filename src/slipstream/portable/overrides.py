"""Settings that can still be changed when a trained model is used."""

from collections.abc import Collection

from slipstream import config as configs
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.portable.files import load_run_config
from slipstream.runs import Run

READING = (
    *("path", "time", "time_format", "decimal", "id", "missing", "unsorted", "gap_tolerance"),
    *("short", "labels", "label_rows", "na", "skip_rows", "encoding", "sheet", "variable"),
)
"""How rows are read, of `[data]`"""
SELECTING = ("where", "split", "stride", "period")
"""Which windows of the run's own data are scored, of `[data]`"""
WITH_TARGETS = ("stride",)
"""Which windows of new data are scored, of `[data]`"""


def load_changed_config(
    run: Run, overrides: Collection[str], *, own_data: bool = False, targets: bool = False
) -> Config:
    """Load a run's config with overrides; refuse those that a trained model cannot follow."""
    trained = load_run_config(run)
    if not overrides:
        return trained
    config = load_run_config(run, overrides)
    allowed = {*READING, *(SELECTING if own_data else WITH_TARGETS if targets else ())}
    for name in configs.list_differences(trained, config):
        section, _, key = name.partition(".")
        if section in ("engine", "predict", "out", "name") or (
            section == "data" and key in allowed
        ):
            continue
        if section == "data" and key in SELECTING:
            raise UserError(
                f"{name} has no effect on new data, of which every window counts; remove it"
            )
        raise UserError(
            f"{name} cannot be changed any more: the model was trained with "
            f"{name} = {configs.format_setting(trained, name)}; remove it, or train another model"
        )
    return config
