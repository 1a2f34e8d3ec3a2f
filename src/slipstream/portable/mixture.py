"""The file ensemble.json: the members of an ensemble of runs, and their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.errors import UserError
from slipstream.portable.lanes import Reach
from slipstream.run_names import ENSEMBLE_FILE
from slipstream.runs import Run

MEMBERS = "members"


class FoldMixture(NamedTuple):
    """The weights of one fold, or of a run without folds."""

    label: str | None
    weights: list[float]
    best: int
    """The member with the lowest validation error"""
    reach: Reach
    """Of the ensemble, and of that member alone"""


def save_mixture(
    run: Run, reference: int, members: Sequence[Mapping[str, Any]], folds: Any
) -> None:
    """Write ensemble.json."""
    content = {
        "reference": reference,
        "members": list(members),
        "folds": [one._asdict() for one in folds],
    }
    runs.write_json(run.folder / ENSEMBLE_FILE, content)


def read_mixture(run: Run) -> dict[str, Any] | None:
    """Read ensemble.json, its folds as `FoldMixture`; None where a run is no ensemble."""
    path = run.folder / ENSEMBLE_FILE
    if not path.exists():
        return None
    runs.verify_files(run.folder, ENSEMBLE_FILE)
    content = runs.read_json(path)
    try:
        folds = [FoldMixture(**one) for one in content["folds"]]
        return {**content, "folds": folds}
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error!r}); restore it from a copy") from None
