"""`slipstream auto --refit`: the members of the tested answer, trained on the rows of all sets.

It is a second model for use, in retrained/refit: nothing is left to test it on, so it is marked as
untested and has the intervals of the tested answer. Everything that it needs is in the folder of
the answer, so that a resume can do it as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.events import RefitStart
from slipstream.inference import portable
from slipstream.models.files import load_run_config
from slipstream.runs import Run
from slipstream.runs.summary import ModelOrigin, RefitSummary
from slipstream.scoring.baselines import fit_baselines, list_baselines, make_network
from slipstream.scoring.batch import Baseline
from slipstream.search import ensemble
from slipstream.search.budget import MARGIN
from slipstream.search.candidates import (
    AutoSearch,
    FoldBaselines,
    parse_baseline,
    parse_name,
    replace_model,
)
from slipstream.search.packs import (
    NOT_STARTED,
    DatasetCache,
    PackCosts,
    PackScheduler,
    TrialData,
    TrialRun,
    TrialSource,
)
from slipstream.search.retraining import SEED_OFFSET
from slipstream.search.storage import OUT_OF_MINUTES
from slipstream.training.trained_lanes import LoadedData

FOLDER = "refit"
"""In retrained/"""
PACKS = "refit-packs"
"""The folder of what trains, until it is done; a resume starts it again"""
ALL_EPOCHS = "as many epochs as were best"


class AnswerMember(NamedTuple):
    """A model of the tested answer."""

    number: int
    """From 1, as its folder in members/"""
    name: str
    """That of its candidate"""
    config: Config
    weight: float
    epochs: float | None
    """After which it was best; None for baselines"""


def list_members(tested: Run, models: Sequence[ModelOrigin]) -> list[AnswerMember]:
    """Read the members of the tested answer; `models` are their origins."""
    content = portable.read_mixture(tested)
    if content is None:
        (origin,) = models
        config = load_run_config(tested)
        return [AnswerMember(1, origin["name"], config, 1.0, origin["epochs"])]
    weights = content["folds"][-1].weights
    members = []
    for number, (weight, origin) in enumerate(zip(weights, models, strict=True), start=1):
        config = load_run_config(Run(tested.folder / portable.MEMBERS / str(number)))
        members.append(AnswerMember(number, origin["name"], config, weight, origin["epochs"]))
    return members


def adapt_config(member: AnswerMember) -> Config:
    """Return the config that a network is trained on all rows with: to the epoch that was best, on
    the same schedule. A schedule that follows validation losses is replaced by a cosine."""
    assert member.epochs is not None
    config, count = member.config, max(round(member.epochs), 1)
    settings = {
        "seed": (config.seed + 2 * SEED_OFFSET + member.number) % 2**63,
        "train.validate_every": count,
        "train.patience": "off",
        "train.exploit_epochs": 0,
    }
    if config.train.schedule == "plateau" or config.train.exploit_epochs:
        settings |= {"train.schedule": "cosine", "train.epochs": count}
    return configs.replace_settings(config, settings)


class MemberRefit(TrialSource):
    """A source with one trial for each network, the heaviest first. A trial is validated once, at
    its end, since validation rows are training rows here: its weights are the last ones."""

    def __init__(self, members: Sequence[AnswerMember], is_late: Callable[[], bool]) -> None:
        self.pending = [
            TrialRun(-member.number, adapt_config(member))
            for member in sorted(members, key=lambda member: -member.weight)
        ]
        self.is_late = is_late
        self.weights: dict[int, dict[str, Tensor]] = {}
        """By member"""
        self.problems: list[str] = []

    def ask(self) -> TrialRun | None:
        return self.pending.pop(0) if self.pending and not self.is_late() else None

    def reopen(self, number: int) -> TrialRun:
        raise AssertionError("a refit starts again")  # its packs are removed first

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        return ALL_EPOCHS

    def finish(self, trial: TrialRun) -> None:
        (result,) = trial.fold_results.values()
        if OUT_OF_MINUTES in result.stopped:
            self.problems.append(OUT_OF_MINUTES)
        elif not math.isfinite(result.loss):
            self.problems.append(result.stopped)
        else:
            self.weights[-trial.number] = dict(trial.weights)

    def fail(self, trial: TrialRun, reason: str) -> None:
        self.problems.append(OUT_OF_MINUTES if reason == NOT_STARTED else reason)

    def is_over(self) -> bool:
        return self.is_late()

    def find_cut(self, costs: PackCosts | None = None) -> str:
        return OUT_OF_MINUTES if self.is_late() else ""


class RefitLimit(NamedTuple):
    """The time that a refit may take."""

    epoch_s: float
    """Of one model, on the training windows of the split"""
    get_left_s: Callable[[], float]

    def is_late(self) -> bool:
        return self.get_left_s() <= 0

    def select(self, members: Sequence[AnswerMember], growth: float) -> list[AnswerMember]:
        """Return the networks that there is time for, the heaviest first; `growth` is the number
        of windows relative to that of the split."""
        left_s, selected = self.get_left_s(), []
        for member in sorted(members, key=lambda member: -member.weight):
            needed_s = MARGIN * growth * self.epoch_s * (member.epochs or 1.0)
            if needed_s <= left_s:
                left_s -= needed_s
                selected.append(member)
        return selected


NO_LIMIT = RefitLimit(0.0, lambda: math.inf)


def refit_answer(
    search: AutoSearch, models: Sequence[ModelOrigin], limit: RefitLimit
) -> RefitSummary:
    """Train the members of retrained/best on all rows and write retrained/refit. Members that there
    is no time for stay as they were tested."""
    run = search.run
    tested = Run(run.folder / "retrained" / "best")
    folder = run.folder / "retrained" / FOLDER
    runs.remove(folder)
    runs.remove(run.folder / PACKS)
    members = list_members(tested, models)
    networks = [member for member in members if parse_name(member.name) is not None]
    datasets = DatasetCache(search.config, search.datasets.table, whole=True)
    longest = max(members, key=lambda member: int(member.config.data.context))
    windows = datasets.get(longest.config).dataset.num_windows["train"]
    before = search.datasets.get(longest.config).dataset.num_windows["train"]
    run.append(RefitStart(num_models=len(members), windows=windows))
    name = f"{search.config.name}-{FOLDER}"
    changed: dict[int, tuple[ensemble.NewMember, LoadedData]] = {}
    problems: list[str] = []

    def keep(member: AnswerMember, new: ensemble.NewMember | None) -> None:
        if new is not None:
            data = datasets.get(member.config)
            changed[member.number] = new, LoadedData(data.dataset, data.fingerprint, data.encoder)

    for member in members:
        if member not in networks and limit.is_late():
            problems.append(OUT_OF_MINUTES)
        elif member not in networks:
            keep(member, _refit_baseline(member, datasets.get(member.config), name))
    selected = limit.select(networks, windows / before)
    weights, network_problems = _train(search, selected, datasets, limit.is_late)
    for member in selected:
        if own := weights.get(member.number):
            config = configs.replace_settings(member.config, {"name": name})
            keep(member, ensemble.NewMember(member.name, config, own, member.weight))
    problems += network_problems
    if len(selected) < len(networks):
        problems.append(OUT_OF_MINUTES)
    why = "; ".join(dict.fromkeys(problems)) or None
    found: RefitSummary = {
        "state": "failed",
        "run": None,
        "why": why,
        "models": len(changed),
        "of": len(members),
        "windows": windows,
    }
    if not changed:
        return found
    expected = f"{run.folder.name}/retrained/best"
    ensemble.build_refit(folder, tested, changed, expected, watch=run.watch)
    return {**found, "state": "done", "run": str(folder)}


def _train(
    search: AutoSearch,
    members: Sequence[AnswerMember],
    datasets: DatasetCache,
    is_late: Callable[[], bool],
) -> tuple[Mapping[int, Mapping[str, Tensor]], list[str]]:
    """Train networks on all rows; return their weights by the member's number, and why others have
    none."""
    run, source = search.run, MemberRefit(members, is_late)
    if not members:
        return {}, []
    scheduler = PackScheduler(run, datasets, source, parallel=len(members))
    scheduler.folder = run.folder / PACKS
    try:
        scheduler.train()
    finally:
        scheduler.close()
        runs.remove(run.folder / PACKS)
    if source.pending:
        source.problems.append(OUT_OF_MINUTES)
    return source.weights, source.problems


def _refit_baseline(member: AnswerMember, data: TrialData, name: str) -> ensemble.NewMember | None:
    """Return a member that is a baseline, fitted to all rows; None where it stays as it was
    tested."""
    baseline = parse_baseline(member.name)
    fitted = fit_baseline(baseline, member.config, data)
    if fitted.predict is None:
        return None
    network = make_network(baseline, fitted.state, data.dataset.signature)
    if network is None:
        return None
    config = configs.replace_settings(replace_model(member.config, network.model), {"name": name})
    return ensemble.NewMember(member.name, config, network.weights, member.weight)


def fit_baseline(name: str, config: Config, data: TrialData) -> Baseline:
    """Fit a baseline to all rows but those of validation, by which it chooses its penalty, its
    season or its number of trees."""
    (starts,) = data.folds
    rest = starts["train"][~torch.isin(starts["train"], starts["val"])]
    device = data.series.values.device
    sets = {"train": rest.to(device), "val": starts["val"].to(device)}
    fold = FoldBaselines(config, data, 0, sets)
    others = [other for other in list_baselines(data.dataset) if other != name]
    return fit_baselines(fold.dataset, fold.load_chunks, without=others)[name]


def is_complete(folder: Path) -> bool:
    """Whether the folder of a search has a refit."""
    return (folder / "retrained" / FOLDER / "metrics.json").exists()
