"""What metrics.json and the summary of a probe hold, as types: the JSON itself stays plain dicts.

`runs.read_metrics` reads them and `runs.write_metrics` writes them. Keys that are not required are
missing in some kinds of runs, or in runs of older versions. Numbers that are not finite are null in
JSON, so a metric that was read back may be None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from slipstream.base.statistics import Difference, Spread

Metrics = Mapping[str, float | None]
"""Metrics of one set of windows, by name"""
SetMetrics = Mapping[str, Metrics]
"""Metrics by set: train, val, test"""
Section = Literal["metrics", "scaled"]
SCALED = "scaled_"
"""Start of the names of errors in standardised units, as in scaled_mse"""
ByStep = Literal["mae_by_step", "log_loss_by_step"]
"""Where a baseline has the headline metric of every predicted row: of numbers, of classes"""


class Scores(TypedDict, total=False):
    """The overall metrics of a predictor."""

    metrics: SetMetrics | None
    """In the data's units; None of a lane or a test run without a model"""
    scaled: SetMetrics | None
    """In standardised units; missing for classes"""


class IntervalScores(TypedDict, total=False):
    """The scores of the prediction intervals on the test set, means over the targets; empty where
    a run has no intervals. Those of predicted quantiles are metrics."""

    coverage: Mapping[str, float]
    """The share of true values inside the interval of each level"""
    width: Mapping[str, float]
    """The mean width of the interval of each level, in the data's units"""
    crps: float | None
    """The weighted quantile loss of the intervals' ends and of the prediction as the median"""


class AgainstBaselines(TypedDict, total=False):
    """The comparison of a predictor with the baselines on the same windows."""

    verdict: str
    metric: str
    """The metric that decides"""
    level: float
    how: str
    """How the intervals were computed, or why there are none"""
    differences: Mapping[str, Mapping[str, Difference]]
    """By metric and baseline"""


class BaselineScores(Scores, total=False):
    """A baseline of a run, or of one of its folds."""

    what: str
    per_target: Mapping[str, Metrics]
    mae_by_step: Sequence[float | None]
    log_loss_by_step: Sequence[float | None]


Baselines = Mapping[str, BaselineScores | None]
"""Baselines by name; None where one is not meaningful"""


class ComparedScores(Scores, IntervalScores, total=False):
    """The metrics of a predictor and how they compare with the baselines."""

    baselines: Baselines
    judged_by: str
    """The metric by which models are compared"""
    beaten_by: list[str]
    against_baselines: AgainstBaselines
    """Missing in runs of version 0.1"""
    spread: Mapping[str, Spread] | None
    """The test metrics over the repeats"""
    scaled_spread: Mapping[str, Spread] | None


class LaneSummary(Scores):
    """One model of a run with repeats or folds."""

    lane: int
    seed: int
    fold: int | None
    label: str | None
    best: bool
    val_loss: float | None
    best_epoch: float
    epochs: float
    steps: int
    stopped: str


class FoldSummary(Scores, IntervalScores, total=False):
    """One fold of a run or of an ensemble of runs."""

    fold: int
    label: str | None
    windows: Mapping[str, int] | None
    ensemble: Scores | None
    baselines: Baselines
    weights: Mapping[str, float]
    """The weights of an ensemble's members"""


class MemberDescription(TypedDict):
    """What a member of an ensemble of runs is."""

    name: str
    run: str
    kind: str
    what: str
    context: int
    inputs: int


class MemberSummary(MemberDescription, Scores):
    weight: float


class SetDetail(TypedDict, total=False):
    """The metrics of one set in detail."""

    overall: Metrics
    scaled: Metrics
    per_target: Mapping[str, Metrics]
    per_step: Sequence[Metrics]
    per_series: Mapping[str, Metrics]
    confusion: Sequence[Sequence[int]]
    per_class: Mapping[str, Mapping[str, Any]]
    reliability: Sequence[Mapping[str, Any]]
    worst: Sequence[Mapping[str, Any]]
    per_column: Mapping[str, Metrics]
    by_distance: Sequence[Mapping[str, Any]]


class ClassIntervals(TypedDict):
    """The intervals of the metrics of classes."""

    test: Mapping[str, Sequence[float] | None]
    level: float
    how: str


class ClassComparison(TypedDict, total=False):
    """What only runs that predict classes report."""

    classes: list[str]
    intervals: ClassIntervals
    against_majority: Mapping[str, Mapping[str, Difference]]
    """By predictor and metric"""


class FilterSummary(TypedDict, total=False):
    """The filter of predictions, and the metrics without it."""

    filter: Mapping[str, Any]
    unfiltered: Scores


class LatentSummary(TypedDict):
    """The latent units of a pre-trained encoder."""

    std: Sequence[float]
    mean_std: float
    collapsed: int
    units: int


class MonitorSummary(TypedDict, total=False):
    """The use of the machine; None is what it does not measure."""

    samples: int
    seconds: float
    energy_wh: float | None
    power_mean_w: float | None
    gpu_utilisation_mean: float | None
    gpu_memory_peak_bytes: float | None
    temperature_max_c: float | None
    clock_mean_mhz: float | None
    throttled: Mapping[str, float]
    cpu_percent_mean: float | None
    rss_peak_bytes: float | None


class EstimateSummary(TypedDict, total=False):
    """The estimated duration of training and the actual one."""

    before_s: float | None
    before_is: str | None
    after_ten_steps_s: float | None
    took_s: float
    before_ratio: float | None
    after_ten_steps_ratio: float | None
    planned_steps: int | None


class ColumnSummary(TypedDict, total=False):
    """A column of the data."""

    roles: list[str]
    missing: float | None
    unit: str
    range: list[float] | None
    training_range: list[float]


class Timeline(TypedDict):
    """The sets of a series or a fold in time."""

    name: str
    parts: Sequence[Sequence[Any]]
    """[set, first, last] of every stretch of rows"""


class DataSummary(TypedDict, total=False):
    """The data of a run."""

    series: int
    rows: int
    gaps: int
    time: str | None
    dates: bool
    step: float | None
    range: list[float] | None
    columns: Mapping[str, ColumnSummary]
    num_files: int
    files: Sequence[Mapping[str, Any]]
    prepare: Mapping[str, Any]
    rows_by_set: Mapping[str, int] | None
    timelines: Sequence[Timeline]


class RunOrigin(TypedDict, total=False):
    """When a summary was made, and by which command."""

    finished_at: str
    command: str | None


class QuantileLevels(TypedDict, total=False):
    """The levels of predicted quantiles."""

    quantiles: list[float]


class LanesSummary(ComparedScores, total=False):
    """What a run with repeats or folds reports of its models, folds and their mean."""

    lanes: list[LaneSummary]
    folds: list[FoldSummary] | None
    """None without folds"""
    ensemble: ComparedScores | None
    """The mean of the lanes; None where a fold has one lane"""
    uses: str
    """What predict uses: model or ensemble"""


class TrainingSummary(TypedDict, total=False):
    """The training itself; an ensemble of runs has only `parameters` and `plan`."""

    steps: int
    repeated_steps: int
    epochs: float
    best_epoch: float
    stopped: str
    parameters: int
    windows_per_s: float
    plan: dict[str, Any]
    """`engine.plan.Plan`, of the version that wrote it: `upgrade_plan` first"""
    monitor: MonitorSummary | None
    estimate: EstimateSummary
    pack: Mapping[str, Any]
    workers: Any
    init_from: Mapping[str, Any]


class RunSummary(
    LanesSummary,
    ClassComparison,
    FilterSummary,
    QuantileLevels,
    TrainingSummary,
    RunOrigin,
    total=False,
):
    """The summary of a run: of training, pre-training, or an ensemble of runs.

    It is metrics.json, and without `detail` what `slipstream train --json` prints.
    """

    run: str
    name: str
    failed: str
    """Why a test run of a search has no model; everything but `run` is missing then"""
    untested: str
    """Of a run that was trained on all rows: whose error it is expected to have; it has no
    metrics"""
    objective: str
    """masked: a pre-trained encoder"""
    windows: Mapping[str, int]
    windows_without_target: Mapping[str, int]
    notes: list[str]
    detail: Mapping[str, SetDetail]
    """By set; of a pre-trained encoder by predictor"""
    latent: LatentSummary

    members: list[MemberSummary]
    """Of an ensemble of runs"""
    advice: Mapping[str, Any]
    seconds: float
    seconds_before_resume: float
    seconds_by_phase: Mapping[str, float]
    time: Mapping[str, float]
    """Seconds by part, such as train_s, and their sum, wall_s"""
    data: DataSummary


class SearchTest(ComparedScores, total=False):
    """A test run in the summary of a search; where it failed, the rest is null."""

    run: str
    failed: str | None


class ChosenSettings(TypedDict, total=False):
    """The best trial of a search, or settings that were retrained from other seeds."""

    trial: int | None
    """None: the config without a search"""
    params: Mapping[str, Any] | None
    value: float | None
    """The trial's score; the further keys are of retrained settings"""
    what: str
    losses: Sequence[float | None]
    mean: float | None
    sd: float | None
    chosen: bool


class SearchComparison(TypedDict):
    """The chosen settings of a search against the default."""

    metric: str | None
    scaled: bool
    default: Spread | None
    chosen: Spread | None
    gain: float | None
    gain_percent: float | None
    low: float | None
    high: float | None
    level: float
    verdict: str


class DeploymentCosts(TypedDict):
    """What a candidate costs where it runs; None where it was not measured."""

    parameters: int | None
    predict_us: float | None
    """Microseconds of one prediction, in PyTorch on the machine of the search: a median"""
    flash_bytes: int | None
    """Constants of its code in C, without instructions; None where a kind has no such code"""
    ram_bytes: int | None
    """Memory of its code in C, for one series"""


class LeaderboardRow(DeploymentCosts):
    """Something that `slipstream auto` has tried."""

    name: str
    kind: str
    what: str
    """Its settings in a few words"""
    val: float | None
    """The mean over the validation blocks, in the search's metric; None where it has failed"""
    val_sd: float | None
    """The standard deviation over the blocks"""
    test: float | None
    """The metric that models are compared by, on the test set; of members and baselines"""
    train_s: float | None
    weight: float
    """In the ensemble; 0 for others"""
    state: str
    stopped: str | None
    """Why its training ended"""


class MemberWeight(TypedDict):
    name: str
    weight: float


class ModelOrigin(TypedDict):
    """A model of the answer of `slipstream auto`."""

    name: str
    """That of its candidate"""
    epochs: float | None
    """After which its validation loss was lowest; None for baselines"""


class RefitSummary(TypedDict):
    """The second model of `slipstream auto --refit`, trained on all rows and untested."""

    state: Literal["pending", "done", "interrupted", "failed"]
    run: str | None
    """Its folder"""
    why: str | None
    """Why models, or all of them, are not trained on all rows"""
    models: int
    """Models that were trained on all rows"""
    of: int
    """Models of the answer"""
    windows: int
    """The training windows"""


class SearchSummary(RunOrigin, IntervalScores, total=False):
    """The summary of a search: its metrics.json."""

    run: str
    name: str
    metric: str
    trials: Mapping[str, int]
    """The number of trials by state"""
    given: int | None
    """The trial with the given config, where the space has it"""
    best: ChosenSettings
    best_config: str
    search_s: float
    trials_per_hour: float
    optuna_s: float
    optuna_share: float
    packs: int | None
    retrained: list[ChosenSettings]
    test: Mapping[str, SearchTest]
    """best and default"""
    comparison: SearchComparison | None
    findings: list[str]
    space: Mapping[str, Any]
    importances: Any
    retraining: Mapping[str, Any]
    pending: str | None
    """What the search has yet to do"""
    seconds: float
    time: Mapping[str, float]
    prefer: str
    """Of `slipstream auto`, as all that follow"""
    leaderboard: list[LeaderboardRow]
    weights: list[MemberWeight]
    """Of the ensemble's candidates; of one model, itself"""
    ranked_by: str | None
    """The metric that the candidates are ranked by, where it is not the scaled `metric`"""
    verdict: str
    models: list[ModelOrigin]
    """Every model of the answer, a candidate's from several seeds too"""
    refit: RefitSummary | None
    """None where it was not asked for"""
    interrupted: bool
    """Whether a signal ended the search before its time"""


class SeedMetrics(TypedDict):
    mean: float
    sd: float | None
    by_seed: Sequence[float]


class SeedDifference(TypedDict):
    """The mean of the seeds' differences from training from scratch, with its interval."""

    difference: float
    low: float
    high: float
    level: float
    n: int
    verdict: str


class ProbeStrategy(TypedDict):
    what: str
    run: str
    metrics: Mapping[str, SeedMetrics]
    seconds: float


class ProbeSummary(RunOrigin, total=False):
    """The summary of a probe: its summary.json."""

    run: str
    name: str
    objective: str
    seeds: list[int]
    judged_by: str
    scaled: bool
    windows: Mapping[str, int]
    encoder: Mapping[str, Any]
    ways: Mapping[str, ProbeStrategy]
    baselines: Mapping[str, Metrics]
    against_scratch: Mapping[str, Mapping[str, SeedDifference]]
    beat_majority: list[str] | None
    notes: list[str]
    helped: str
    verdict: str
    seconds: float
    time: Mapping[str, float]


Summary = RunSummary | SearchSummary | ProbeSummary


def get_metrics(scores: Scores, section: Section = "metrics") -> SetMetrics:
    """Return the metrics by set; a LookupError where there are none."""
    metrics = scores[section]
    if metrics is None:
        raise LookupError(section)
    return metrics


def read_metric(scores: Scores | None, subset: str, metric: str) -> float | None:
    """Return a metric of one set, with the prefix `SCALED` in standardised units; None where it is
    undefined, or where the scores lack it."""
    section: Section = "scaled" if metric.startswith(SCALED) else "metrics"
    by_set = (scores or {}).get(section) or {}
    value = (by_set.get(subset) or {}).get(metric.removeprefix(SCALED))
    return None if value is None else float(value)


def list_interval_scores(scores: IntervalScores) -> dict[str, float]:
    """Return the scores of intervals by flat names: interval_crps, coverage_80, width_80 and so
    on; empty without intervals."""
    found: dict[str, float | None] = {"interval_crps": scores.get("crps")}
    widths = scores.get("width") or {}
    for level, share in (scores.get("coverage") or {}).items():
        found |= {f"coverage_{level}": share, f"width_{level}": widths.get(level)}
    return {name: value for name, value in found.items() if value is not None}
