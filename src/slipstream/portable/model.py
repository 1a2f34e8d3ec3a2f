"""Load what a run predicts with, without torch: config, columns, scaling and weights as arrays.

`load_portable` reads what `inference.trained.load_trained` reads, and refuses what that refuses.
Shapes: H predicted rows, C targets.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream import runs
from slipstream.checksums import compute_sha256, read_verified
from slipstream.config import Config, Signature
from slipstream.data.prepare.chain.replay import Limits
from slipstream.data.scaler import Scaler
from slipstream.errors import UserError
from slipstream.portable.files import (
    WEIGHTS_FILE,
    Weights,
    parse_description,
    parse_limits,
    parse_weights,
)
from slipstream.portable.lanes import (
    ENSEMBLE,
    LANES_FOLDER,
    MODEL,
    LevelReach,
    read_lanes,
    select_lane,
)
from slipstream.portable.mixture import MEMBERS, FoldMixture, read_mixture
from slipstream.portable.networks.shapes import verify_shapes
from slipstream.portable.overrides import load_changed_config
from slipstream.run_names import ENSEMBLE_FILE
from slipstream.runs import Run

Widths = dict[str, npt.NDArray[np.float64]]
"""By level, how far its interval reaches to either side of a prediction: [H, C], physical"""


@dataclass(frozen=True)
class PortableModel:
    """One trained network, and what it needs to predict."""

    config: Config
    signature: Signature
    scaler: Scaler
    weights: Weights
    """By the names of the safetensors file"""
    limits: dict[str, Limits] = field(default_factory=dict)
    """The ranges that outliers steps of `data.prepare` were fitted to, by the step's number"""


@dataclass(frozen=True)
class PortableMember:
    """A run: one network, or several of which the mean predicts."""

    name: str
    run: Run
    models: tuple[PortableModel, ...]
    """They share config, signature, scaler and limits"""
    description: str
    half_widths: Widths | None
    """Of the intervals around what this member predicts alone"""

    @property
    def first(self) -> PortableModel:
        return self.models[0]


@dataclass(frozen=True)
class PortableRun:
    """What a run predicts with: one member, or those of an ensemble with their weights."""

    run: Run
    owner: str
    """What the model is to the run; empty where it is the run's own"""
    members: tuple[PortableMember, ...]
    weights: tuple[float, ...]
    """One for each member; they add up to one"""
    half_widths: Widths | None
    """Of the intervals; None where the run has none"""
    reference: int
    """The member whose windows and scaling predictions have"""
    description: str
    hashes: dict[str, str]
    """SHA-256 of every file that was read, by its path within the run"""

    @property
    def is_ensemble(self) -> bool:
        """Whether several runs are its members; lanes of one run are no members."""
        return (self.run.folder / ENSEMBLE_FILE).exists()

    @property
    def first(self) -> PortableModel:
        """A network of the reference, with the config, signature and scaler of the predictions."""
        return self.members[self.reference].first

    @property
    def signature(self) -> Signature:
        """The reference's columns; quantiles and the output range where all members share them."""
        every = [member.first.signature for member in self.members]
        quantiles = {one.quantiles for one in every}
        ranges = {one.output_range for one in every}
        common = {
            "quantiles": quantiles.pop() if len(quantiles) == 1 else (),
            "output_range": ranges.pop() if len(ranges) == 1 else None,
        }
        return self.first.signature.model_copy(update=common)


def load_portable(
    run: str | Path, *, overrides: Collection[str] = (), ensemble: bool | None = None
) -> PortableRun:
    """Load a run; of repeats or an ensemble, `ensemble` chooses between the mean and the best."""
    opened = runs.open_run(run)
    content = read_mixture(opened)
    if content is None:
        opened, owner = runs.find_model_run(opened)
        member, hashes = _load_member(opened, opened.folder.name, overrides, ensemble)
        what = f"{owner}: {member.description}" if owner else member.description
        widths = member.half_widths
        return PortableRun(opened, owner, (member,), (1.0,), widths, 0, what, hashes)
    members = []
    hashes = {ENSEMBLE_FILE: compute_sha256(opened.folder / ENSEMBLE_FILE)}
    for number, one in enumerate(content["members"], start=1):
        inner = f"{MEMBERS}/{number}"
        member, files = _load_member(Run(opened.folder / inner), one["name"], overrides, None)
        members.append(member)
        hashes |= {f"{inner}/{name}": value for name, value in files.items()}
    mixture: FoldMixture = content["folds"][-1]
    reference: int = content["reference"]
    targets = members[reference].first.signature.targets
    weights, which = tuple(mixture.weights), "weighted mean"
    if ensemble is False:
        weights = tuple(float(number == mixture.best) for number in range(len(members)))
        which = "best"
    reach = mixture.reach[MODEL if ensemble is False else ENSEMBLE]
    return PortableRun(
        run=opened,
        owner="",
        members=tuple(members),
        weights=weights,
        half_widths=_to_arrays(reach, targets),
        reference=reference,
        description=f"the {which} of {len(members)} runs",
        hashes=hashes,
    )


def _load_member(
    run: Run, name: str, overrides: Collection[str], ensemble: bool | None
) -> tuple[PortableMember, dict[str, str]]:
    """Load a run, and the SHA-256 sums of its files."""
    config = load_changed_config(run, overrides)
    if config.model.spec.is_custom:
        raise UserError(
            f'{run.folder}: model.kind = "{config.model.kind}" is a class of yours, which runs in '
            "PyTorch only; use slipstream predict"
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
    every = parse_weights(lanes.weights, lanes.path)
    fold = lanes.folds[-1]
    models = tuple(make(select_lane(every, lane), lanes.path) for lane in fold.lanes)
    what = f"{lanes.description} of the last fold" if len(lanes.folds) > 1 else lanes.description
    return PortableMember(
        name, run, models, what, _to_arrays(fold.reach, signature.targets)
    ), hashes


def _to_arrays(reach: LevelReach, targets: Collection[str]) -> Widths:
    """Return half-widths [H, C] by level."""
    return {
        level: np.array([by_target[name] for name in targets], dtype=np.float64).T
        for level, by_target in reach.items()
    }
