"""A trained model without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Command, UserError
from slipstream.base.run_names import ENSEMBLE_FILE
from slipstream.base.storage import compute_sha256, read_verified
from slipstream.config import Config, Signature
from slipstream.data.scaler import Scaler
from slipstream.models.files import (
    WEIGHTS_FILE,
    load_run_config,
    parse_description,
    parse_limits,
    parse_weights,
)
from slipstream.models.numpy_layers import Weights
from slipstream.models.shapes import verify_shapes
from slipstream.runs import Run
from slipstream.runs.lanes import (
    ENSEMBLE,
    LANES_FOLDER,
    MODEL,
    LevelReach,
    Reach,
    read_lanes,
    select_lane,
)

if TYPE_CHECKING:
    from slipstream.data.prepare.steps import Limits

MEMBERS = "members"


class FoldMixture(NamedTuple):
    """The members' weights in one fold, or in a run without folds."""

    label: str | None
    weights: list[float]
    best: int
    """The member with the lowest validation error"""
    reach: Reach
    """Half-widths of the intervals of the ensemble, and of the best member alone"""


def save_mixture(
    run: Run, reference: int, members: Sequence[Mapping[str, Any]], folds: Any
) -> None:
    """Write ensemble.json."""
    content = {
        "reference": reference,
        "members": list(members),
        "folds": [fold._asdict() for fold in folds],
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
        folds = [FoldMixture(**fold) for fold in content["folds"]]
        return {**content, "folds": folds}
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error!r}); restore it from a copy") from None


READING = (
    *("path", "time", "time_format", "decimal", "id", "missing", "unsorted", "duplicates"),
    *(
        "gap_tolerance",
        "short",
        "labels",
        "label_rows",
        "na",
        "skip_rows",
        "names",
        "encoding",
        "sheet",
        "variable",
    ),
)
"""Settings of `[data]` that say how rows are read"""
SELECTING = ("where", "split", "stride", "period")
"""Settings of `[data]` that select windows of the run's own data for scoring"""
WITH_TARGETS = ("stride",)
"""Settings of `[data]` that select windows of new data for scoring"""


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


Widths = dict[str, npt.NDArray[np.float64]]
"""By level, the half-width [H, C] of the interval around a prediction, in physical units"""


@dataclass(frozen=True)
class PortableModel:
    """One trained network with its config, signature, scaler and fitted steps."""

    config: Config
    signature: Signature
    scaler: Scaler
    weights: Weights
    """Arrays by their names in the safetensors file"""
    limits: dict[str, Limits] = field(default_factory=dict)
    """The ranges that outliers steps of `data.prepare` were fitted to, by the step's number"""


@dataclass(frozen=True)
class PortableMember:
    """A run: one network, or several whose mean is the prediction."""

    name: str
    run: Run
    models: tuple[PortableModel, ...]
    """Networks with the same config, signature, scaler and limits"""
    description: str
    half_widths: Widths | None
    """Half-widths of the intervals around this member's own predictions"""

    @property
    def first(self) -> PortableModel:
        return self.models[0]


@dataclass(frozen=True)
class PortableRun:
    """A run that predicts: one member, or the weighted members of an ensemble."""

    run: Run
    owner: str
    """The relation of the model to the run, such as a search's best trial; "" for its own model"""
    members: tuple[PortableMember, ...]
    weights: tuple[float, ...]
    """The share of each member in the mean; they add up to 1"""
    half_widths: Widths | None
    """Half-widths of the intervals; None where the run has none"""
    reference: int
    """The member that defines the windows and the scaling of the predictions"""
    description: str
    hashes: dict[str, str]
    """SHA-256 of every file that was read, by its path within the run"""

    @property
    def is_ensemble(self) -> bool:
        """Whether the run is an ensemble of several runs; the lanes of one run are no ensemble."""
        return (self.run.folder / ENSEMBLE_FILE).exists()

    @property
    def first(self) -> PortableModel:
        """A network of the reference, with the config, signature and scaler of the predictions."""
        return self.members[self.reference].first

    @property
    def signature(self) -> Signature:
        """The reference's columns; quantiles and the output range where all members share them."""
        signatures = [member.first.signature for member in self.members]
        quantiles = {signature.quantiles for signature in signatures}
        ranges = {signature.output_range for signature in signatures}
        common = {
            "quantiles": quantiles.pop() if len(quantiles) == 1 else (),
            "output_range": ranges.pop() if len(ranges) == 1 else None,
        }
        return self.first.signature.model_copy(update=common)


def load_portable(
    run: str | Path, *, overrides: Collection[str] = (), ensemble: bool | None = None
) -> PortableRun:
    """Load a run; `ensemble` chooses between the mean and the best of repeats or members."""
    opened, owner = runs.find_model_run(runs.open_run(run))
    content = read_mixture(opened)
    if content is None:
        member, hashes = _load_member(opened, opened.folder.name, overrides, ensemble)
        description = runs.describe_model(member.description, owner)
        widths = member.half_widths
        return PortableRun(opened, owner, (member,), (1.0,), widths, 0, description, hashes)
    members = []
    hashes = {ENSEMBLE_FILE: compute_sha256(opened.folder / ENSEMBLE_FILE)}
    for number, described in enumerate(content["members"], start=1):
        inner = f"{MEMBERS}/{number}"
        folder = Run(opened.folder / inner)
        member, files = _load_member(folder, described["name"], overrides, None)
        members.append(member)
        hashes |= {f"{inner}/{name}": value for name, value in files.items()}
    mixture: FoldMixture = content["folds"][-1]
    reference: int = content["reference"]
    targets = members[reference].first.signature.targets
    weights, rule = tuple(mixture.weights), "weighted mean"
    if ensemble is False:
        weights = tuple(float(number == mixture.best) for number in range(len(members)))
        rule = "best"
    reach = mixture.reach[MODEL if ensemble is False else ENSEMBLE]
    return PortableRun(
        run=opened,
        owner=owner,
        members=tuple(members),
        weights=weights,
        half_widths=_to_arrays(reach, targets),
        reference=reference,
        description=runs.describe_model(
            f"the {rule} of {len(members)} models", runs.describe_untested(opened.folder)
        ),
        hashes=hashes,
    )


def _load_member(
    run: Run, name: str, overrides: Collection[str], ensemble: bool | None
) -> tuple[PortableMember, dict[str, str]]:
    """Return a run and the SHA-256 sums of its files."""
    config = load_changed_config(run, overrides)
    if config.model.spec.is_custom:
        raise UserError(
            f'{run.folder}: model.kind = "{config.model.kind}" is a class of yours, which '
            "runs in PyTorch only; use " + Command("predict")
        )
    files = read_verified(run.model)
    signature, scaler = parse_description(files)
    limits = parse_limits(files)
    lanes = read_lanes(run, signature, ensemble=ensemble)
    hashes = {"config.toml": compute_sha256(run.folder / "config.toml")}
    hashes |= {f"model/{file}": compute_sha256(run.model / file) for file in sorted(files)}

    def make(weights: Weights, path: Path) -> PortableModel:
        verify_shapes(weights, config.model, signature, path)
        return PortableModel(config, signature, scaler, weights, limits)

    if lanes is None:
        path = run.model / WEIGHTS_FILE
        model = make(parse_weights(files[WEIGHTS_FILE], path), path)
        return PortableMember(name, run, (model,), "the model", None), hashes
    folder = run.folder / LANES_FOLDER
    hashes |= {
        f"{LANES_FOLDER}/{path.name}": compute_sha256(path) for path in sorted(folder.iterdir())
    }
    stacked = parse_weights(lanes.weights, lanes.path)
    fold = lanes.folds[-1]
    models = tuple(make(select_lane(stacked, lane), lanes.path) for lane in fold.lanes)
    description = (
        f"{lanes.description} of the last fold" if len(lanes.folds) > 1 else lanes.description
    )
    return PortableMember(
        name, run, models, description, _to_arrays(fold.reach, signature.targets)
    ), hashes


def _to_arrays(reach: LevelReach, targets: Collection[str]) -> Widths:
    """Return half-widths [H, C] by level."""
    return {
        level: np.array([by_target[name] for name in targets], dtype=np.float64).T
        for level, by_target in reach.items()
    }
