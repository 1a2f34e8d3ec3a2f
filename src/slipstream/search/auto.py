"""`slipstream.auto`: the best model that a few minutes can buy.

The search of `tune`, with a portfolio of candidates, several validation blocks and a combination
on top. `run_auto` runs the trials of an `AutoSearch`, selects the ensemble, retrains its members
from fresh seeds, tests it once and writes the leaderboard.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from optuna.trial import FrozenTrial
from safetensors.torch import load_file
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base import statistics
from slipstream.base.errors import Interrupted, Option, ResumableError, UserError
from slipstream.base.phases import EARLIER, SEARCH_PARTS, PhaseTimer
from slipstream.config import Config
from slipstream.config import search_space as spaces
from slipstream.events import End, RetrainingStart, SearchEnd
from slipstream.reporting import wording
from slipstream.runs import Run
from slipstream.runs.summary import (
    DeploymentCosts,
    LeaderboardRow,
    RefitSummary,
    RunSummary,
    Scores,
    SearchSummary,
    read_metric,
)
from slipstream.scoring.batch import Baseline
from slipstream.search import ensemble, portfolio, refit, retraining, sharing
from slipstream.search import summary as summaries
from slipstream.search.budget import MARGIN, ModelCosts
from slipstream.search.candidates import (
    AutoSearch,
    BaselineCandidate,
    BaselineFits,
    name_trial,
    parse_baseline,
    parse_name,
)
from slipstream.search.deployment import NOT_MEASURED, measure_network
from slipstream.search.library import (
    MAX_MEMBERS,
    TRIVIAL,
    Combination,
    Library,
)
from slipstream.search.packs import PackScheduler, TrialRun
from slipstream.search.portfolio import Prefer
from slipstream.search.refit import NO_LIMIT, RefitLimit
from slipstream.search.retraining import DEFAULT, Retraining
from slipstream.search.storage import CUT_OFF, NOTES, OUT_OF_MINUTES, STATE_NAMES
from slipstream.search.study import (
    GIVEN,
    TimedStudy,
    compute_importances,
    describe_trial,
    get_score,
    get_state,
    rank_trials,
)
from slipstream.search.summary import FinishedSearch
from slipstream.search.workers import Launcher
from slipstream.training.trained_lanes import LoadedData

HEDGE_WINDOWS, MIN_HEDGE = 200, 0.1
"""The share of baselines in an ensemble of classifiers is that of so many windows among these and
the windows of all validation blocks; a smaller share than the second number is none"""
MAX_NOISE, MAX_WORSE = 2.0, 3.0
"""Standard errors of the difference up to which one candidate counts as good as another, and above
which a baseline is clearly worse than a network that looks better than it is"""
MAX_CHANCE_LOSS, MAX_CHANCE_NOISE = 1.05, 2.5
"""How much worse than the best network a baseline may be that is taken instead of it, and by how
many standard errors: the best of many networks is that much better by chance"""
MAX_RIVAL_GAIN = 0.02
"""How much better than a baseline an ensemble may be, within noise, that shares its weight with
it"""
MAX_TRIVIAL_NOISE = 4.0
"""The noise where that baseline has learnt nothing: of thirty candidates, by the differences in
eight parts, one in twenty is that much better by chance"""
RIVAL_SHARE, TRIVIAL_SHARE = 0.5, 0.8
"""The share of a baseline in an ensemble that is hardly better than it, and not beyond its noise;
of one that has learned nothing"""
MIN_SHARE = 0.02
"""The least share of a member beside a baseline's: less changes no prediction, but costs as much"""
MAX_SAVED = 16
"""Candidates whose weights are kept, so that a search that is resumed with more minutes has them"""
MAX_MEASURED = 10
"""The best candidates that are measured beside the members and the baselines"""
MAX_CUT_LOSS = 1.02
"""How much worse than the search's own model one may be whose training was cut off"""
MAX_FASTER_LOSS = 1.02
"""How much worse an answer may be that leaves out a network which there is no time to test"""
SAME_GAIN = 5e-4
"""Below which a gain is none, in sentences with one decimal"""


def run_auto(
    search: AutoSearch,
    scheduler: PackScheduler,
    launcher: Launcher,
    result: SearchEnd | None,
    timer: PhaseTimer,
    *,
    resumed: bool,
) -> FinishedSearch:
    """Fit the baselines, run the trials and conclude; a signal ends the trials, and the answer is
    what they have found so far."""
    earlier = _read_finished(search) if result is not None else None
    if earlier is not None:
        if search.plan.refit and not refit.is_complete(search.run.folder):
            return add_refit(search, earlier, timer)
        return earlier
    fits = search.fits = BaselineFits(search)
    search.choose_now = lambda: choose(
        search.library,
        search.plan.prefer,
        sharing.select_counted(search.study.get_trials()),
        fits.candidates,
    )
    interrupted = False
    if result is None:
        try:
            result = launcher.run(search, scheduler, resumed=resumed)
        except Interrupted:
            if not search.library.rank():
                raise
            interrupted = True
            seconds = time.perf_counter() - search.started_at
            result = SearchEnd(
                seconds=seconds, optuna_s=search.study.spent_s, packs=scheduler.num_packs, limits={}
            )
            scheduler.close()
    search.restore_candidates()
    baselines = fits.finish()
    timer.end("searching")
    return finish_auto(search, scheduler, result, timer, baselines, interrupted=interrupted)


def _read_finished(search: AutoSearch) -> FinishedSearch | None:
    """Return the answer of a search that has used its time; None where it has none yet."""
    folder = search.run.folder
    if not (folder / "metrics.json").exists():
        return None
    summary = cast(SearchSummary, runs.read_metrics(folder))
    if "leaderboard" not in summary or summary["interrupted"]:
        return None
    return FinishedSearch(folder, configs.load(folder / "best.toml"), summary, search.study.study)


class MemberTraining(Retraining):
    """Trains the members of an ensemble from fresh seeds: some candidates more than once, the given
    config only where it is a member."""

    late_reason = OUT_OF_MINUTES

    def __init__(
        self, run: Run, config: Config, study: TimedStudy, seeds: Mapping[int, int]
    ) -> None:
        self.num_seeds = dict(seeds)
        """By trial"""
        self.weights: dict[tuple[int, int], dict[str, Tensor]] = {}
        """By trial and seed, of what this process has trained"""
        super().__init__(run, config, study)

    def _add(self, trial: int, config: Config) -> None:
        if trial == DEFAULT:
            return
        super()._add(trial, config)
        count, kept = self.num_seeds.get(trial, 0), []
        for number in self.pending:
            owner, seed = self._parse(number)
            if owner != trial or self.seeds.index(seed) < count:
                kept.append(number)
        self.pending = kept

    def is_worth_validating(self, train_s: float, validate_s: float) -> bool:
        return train_s >= validate_s

    def finish(self, trial: TrialRun) -> None:
        self.weights[self._parse(trial.number)] = dict(trial.weights)
        super().finish(trial)


class AutoMember(NamedTuple):
    """A model of the answer."""

    name: str
    """That of its candidate"""
    config: Config
    weight: float
    weights: Mapping[str, Tensor]
    epochs: float | None = None
    """After which a network was best"""


def finish_auto(
    search: AutoSearch,
    scheduler: PackScheduler,
    search_result: SearchEnd,
    timer: PhaseTimer,
    baselines: Mapping[str, BaselineCandidate],
    *,
    interrupted: bool = False,
) -> FinishedSearch:
    """Select what predicts best, retrain it, test it once, and write the leaderboard."""
    run, study, plan, budget = search.run, search.study, search.plan, search.budget
    trials = sharing.select_counted(study.get_trials())
    runs.remove_manifest(run)
    runs.write_json(run.folder / "trials.json", [describe_trial(trial) for trial in trials])
    if not rank_trials(trials) and not search.library.rank():
        raise summaries.make_no_result_error(run, trials)
    choose_from = partial(choose, search.library, plan.prefer, baselines=baselines)
    choice = choose_in_time(choose_from, trials, search.estimate_tests, budget.left_s)
    kinds = {trial.number: get_kind(search.config, trial) for trial in trials}
    seeds: dict[int, int] = {}
    if not interrupted:
        left_s = budget.left_s - search.estimate_tests(choice.weights)
        seeds = plan_seeds(choice.weights, kinds, search.estimate_members(), left_s, plan.prefer)
    if seeds:
        run.append(RetrainingStart(num_trials=len(seeds), num_seeds=max(seeds.values())))
    members = train_members(search, scheduler, choice, seeds, baselines)
    timer.end("retraining")
    result = build_answer(search, members)
    timer.end("scoring")
    chosen = find_trainable(search, trials, members)
    summary = summarize(search, trials, search_result, choice, members, result, baselines)
    runs.write_text(run.folder / "best.toml", configs.to_toml(chosen, only_set=True))
    summary["interrupted"] = interrupted
    summary |= _measure_time(search, timer)
    runs.write_metrics(run, summary)
    if not interrupted:
        search.drop_weights(search.library.rank()[:MAX_SAVED])
    runs.remove(run.folder / retraining.LANES)
    finished = FinishedSearch(run.folder, chosen, summary, study.study)
    if plan.refit and not interrupted:
        costs = search.costs.estimate_model() or ModelCosts(0.0)
        limit = RefitLimit(costs.score_s, lambda: budget.left_s)
        finished = add_refit(search, finished, timer, limit)
    else:
        run.append(End(seconds=summary["seconds"]))
    return finished


def _measure_time(search: AutoSearch, timer: PhaseTimer) -> SearchSummary:
    """Return the entries of the summary on the time that has passed."""
    budget = search.budget
    before = {EARLIER: budget.spent_s} if budget.spent_s else {}
    return {
        "seconds": budget.elapsed_s,
        "time": timer.summarize(SEARCH_PARTS, before=before),
    }


def add_refit(
    search: AutoSearch,
    finished: FinishedSearch,
    timer: PhaseTimer,
    limit: RefitLimit = NO_LIMIT,
) -> FinishedSearch:
    """Train the answer on all rows as well, and say in its summary what became of it; a resume has
    the time that it takes. A signal leaves the tested answer, and a resume then does the rest."""
    run, models = search.run, finished.summary["models"]
    try:
        found = refit.refit_answer(search, models, limit)
    except (Interrupted, KeyboardInterrupt):
        found = make_refit_summary("interrupted", len(models))
    except UserError as error:
        found = make_refit_summary("failed", len(models), str(error))
    timer.end("retraining")
    entries = {"refit": found, **_measure_time(search, timer)}
    summary = cast(SearchSummary, runs.update_metrics(run.folder, **entries))
    run.append(End(seconds=summary["seconds"]))
    return replace(finished, summary=summary)


def make_refit_summary(
    state: Literal["pending", "interrupted", "failed"], num_models: int, why: str | None = None
) -> RefitSummary:
    """Return the summary of a refit that is not there."""
    return {"state": state, "run": None, "why": why, "models": 0, "of": num_models, "windows": 0}


def choose_in_time(
    choose_from: Callable[[Sequence[FrozenTrial]], Combination],
    trials: Sequence[FrozenTrial],
    estimate_tests: Callable[[Mapping[str, float]], float],
    left_s: float,
) -> Combination:
    """Return what predicts best; where the time is too short to test it, without the slowest
    networks, as long as that costs little."""
    kept, choice = list(trials), choose_from(trials)
    most = MAX_FASTER_LOSS * choice.loss
    while estimate_tests(choice.weights) > left_s:
        networks = [name for name in choice.weights if parse_name(name) is not None]
        slowest = max(networks, key=lambda name: estimate_tests({name: 1.0}), default=None)
        kept = [trial for trial in kept if name_trial(trial.number) != slowest]
        faster = choose_from(kept) if kept else choice
        if slowest is None or faster is choice or faster.loss > most:
            break
        choice = faster
    return choice


def choose(
    library: Library,
    prefer: Prefer,
    trials: Sequence[FrozenTrial],
    baselines: Mapping[str, BaselineCandidate],
) -> Combination:
    """Return the ensemble, or the one model where it is not better or not wanted."""
    usable = {name_trial(trial.number) for trial in trials}
    for name, candidate in baselines.items():
        if prefer != "small" or not candidate.config.model.spec.is_fitted:
            usable.add(name)
    found = library.combine([name for name in library.rank() if name in usable])
    if found is None:
        raise ResumableError(
            "no model has trained in this time; give it more", fix="raise " + Option("minutes")
        )
    if prefer == "best":
        hedged = _hedge(library, found, [name for name in usable if name in baselines])
        is_hedged = library.metric == "classes" and hedged is not found
        if found.is_better or is_hedged:
            return hedged
    names = [name for name in library.rank() if name in usable]
    single = choose_single(library, names, trials, baselines)
    loss = library.compute_loss(single)
    return Combination({single: 1.0}, loss, loss, found.gain)


def find_trainable(
    search: AutoSearch, trials: Sequence[FrozenTrial], members: Sequence[AutoMember]
) -> Config:
    """Return the config that best.toml has: of the heaviest member that is no fitted baseline, or
    of the best trial."""
    for member in members:
        if not member.config.model.spec.is_fitted:
            return member.config
    for trial in rank_trials(trials)[:1]:
        return spaces.apply_params(search.config, search.study.space, trial.params)
    return search.config


def _compute_hedge(library: Library) -> float:
    """Return the share of an ensemble that belongs to baselines. Networks stop early on the windows
    that judge them, and the best of many is partly lucky, so that they look better than baselines
    where few windows judge."""
    count = sum(len(block.anchors) for block in library.blocks)
    share = HEDGE_WINDOWS / (HEDGE_WINDOWS + count)
    return share if library.metric == "classes" and share >= MIN_HEDGE else 0.0


def _hedge(library: Library, found: Combination, baselines: Sequence[str]) -> Combination:
    """Return the combination with a share for baselines that the ensemble is hardly better than;
    unchanged where baselines have as much."""
    if library.metric == "classes":
        return _hedge_classes(library, found, baselines)
    rivals = [name for name in library.rank() if name in baselines and _is_rival(found, name)]
    trivial = [name for name in rivals if parse_baseline(name) in TRIVIAL]
    preferred = [*trivial, *rivals][:1]
    share = TRIVIAL_SHARE if trivial else RIVAL_SHARE
    own = sum(weight for name, weight in found.weights.items() if name in (trivial or rivals))
    if not rivals or own >= share:
        return found
    hedged = _add_share(found, preferred, (share - own) / (1 - own))
    return hedged._replace(rival=preferred[0])


def _is_rival(found: Combination, name: str) -> bool:
    """Whether an ensemble is hardly better than a baseline, and not beyond its noise; of one that
    has learnt nothing, as far as the best of many networks may be by chance."""
    if name not in found.advantages:
        return False
    gain, certainty = found.advantages[name]
    if parse_baseline(name) in TRIVIAL:
        return gain <= MAX_CHANCE_LOSS - 1 and certainty <= MAX_TRIVIAL_NOISE
    return gain <= MAX_RIVAL_GAIN and certainty <= MAX_NOISE


def _hedge_classes(library: Library, found: Combination, baselines: Sequence[str]) -> Combination:
    """Return the combination with a share for those baselines of a classifier that are as good as
    the best of them, by their wrong answers; unchanged where baselines have as much, or are
    clearly worse than the heaviest member."""
    rivals = library.list_close([*baselines, next(iter(found.weights))], MAX_WORSE)
    close = [name for name in library.list_close(baselines, MAX_NOISE) if name in rivals]
    share = _compute_hedge(library)
    own = sum(weight for name, weight in found.weights.items() if name in baselines)
    if not close or own >= share:
        return found
    return _add_share(found, close, share)


def _add_share(found: Combination, names: Sequence[str], share: float) -> Combination:
    """Return the combination with a share divided among these candidates, at most as many members
    as an ensemble may have, and none with next to no weight."""
    weights = {name: (1 - share) * weight for name, weight in found.weights.items()}
    for name in names:
        weights[name] = weights.get(name, 0.0) + share / len(names)
    ordered = dict(sorted(weights.items(), key=lambda pair: -pair[1])[:MAX_MEMBERS])
    ordered = {name: weight for name, weight in ordered.items() if weight >= MIN_SHARE}
    total = sum(ordered.values())
    return found._replace(weights={name: weight / total for name, weight in ordered.items()})


def choose_single(
    library: Library,
    names: Sequence[str],
    trials: Sequence[FrozenTrial],
    baselines: Collection[str] = (),
) -> str:
    """Return the best candidate; where no other is better beyond its noise, the given config, and
    rather than that a baseline, one that has learned nothing first."""
    best = names[0]
    given = next((trial for trial in trials if trial.user_attrs.get(GIVEN)), None)
    name = None if given is None else name_trial(given.number)
    if name is not None and name in names and _is_as_good(library, name, best, 1.0):
        best = name
    limit = MAX_CHANCE_LOSS * library.compute_loss(names[0])
    close = [
        name
        for name in names
        if name in baselines
        and library.compute_loss(name) <= limit
        and _is_as_good(library, name, names[0], MAX_CHANCE_NOISE)
    ]
    trivial = [name for name in close if parse_baseline(name) in TRIVIAL]
    return next(iter([*trivial, *close]), best)


def _is_as_good(library: Library, name: str, best: str, most: float) -> bool:
    """Whether a candidate is not worse than the best by more than so many standard errors."""
    if name not in library.errors:
        return False
    loss = library.compute_loss(name) - library.compute_loss(best)
    return loss <= most * library.compute_noise(name, best)


def plan_seeds(
    weights: Mapping[str, float],
    kinds: Mapping[int, str],
    train_s: Mapping[int, float],
    left_s: float,
    prefer: Prefer,
) -> dict[int, int]:
    """Return how many fresh models of each candidate there is time for, the heaviest first: eight
    models in all, of one candidate alone too, unless a single model is wanted. A linear model is
    the same from every seed. `train_s` is what a model of each trial takes."""
    shares = {
        number: share
        for name, share in weights.items()
        if share > 0 and (number := parse_name(name)) is not None and kinds[number] != "linear"
    }
    fixed = len(weights) - len(shares)
    most = 1 if prefer != "best" else MAX_MEMBERS - fixed
    seeds: dict[int, int] = {}
    for number in sorted(shares, key=lambda number: -shares[number]):
        # one that turns out to take longer is cut off
        if train_s[number] <= MARGIN * left_s and len(seeds) < most:
            seeds[number], left_s = 1, left_s - train_s[number]
    while len(seeds) == len(shares) and sum(seeds.values()) < most:
        fitting = [number for number in seeds if train_s[number] <= left_s]
        if not fitting:
            break
        number = max(fitting, key=lambda trial: shares[trial] / seeds[trial])
        seeds[number], left_s = seeds[number] + 1, left_s - train_s[number]
    return seeds


def train_members(
    search: AutoSearch,
    scheduler: PackScheduler,
    choice: Combination,
    seeds: Mapping[int, int],
    baselines: Mapping[str, BaselineCandidate],
) -> list[AutoMember]:
    """Return the models of the answer: retrained ones, and those of the search where there was no
    time, the heaviest first."""
    run, config, study, budget = search.run, search.config, search.study, search.budget
    trials = {trial.number: trial for trial in study.get_trials()}
    again: MemberTraining | None = None
    if seeds:
        most = max(2, *seeds.values())  # a config has two at least
        update = {"retrain": len(seeds), "retrain_seeds": most, "folds": None}
        limited = config.model_copy(update={"tune": config.tune.model_copy(update=update)})
        again = MemberTraining(run, limited, study, seeds)
        costs = search.costs.estimate_model() or ModelCosts(0.0)
        again_s = search.end_costs.estimate_refit(
            [name_trial(number) for number, count in seeds.items() for _ in range(count)],
            costs.train_s,
        )
        later_s = search.estimate_tests(choice.weights) + again_s
        again.is_late = lambda ahead_s: budget.left_s - ahead_s <= later_s
        again.set_candidates([trials[number] for number in seeds])
        scheduler.pool.source = again
        scheduler.train()
    members: list[AutoMember] = []
    last = search.plan.facts.folds - 1
    for name, weight in choice.weights.items():
        number = parse_name(name)
        if number is None:
            candidate = baselines[name]
            members.append(AutoMember(name, candidate.config, weight, candidate.weights))
            continue
        settings = spaces.apply_params(config, study.space, trials[number].params)
        own: list[tuple[Mapping[str, Tensor], float]] = []
        if again is not None and number in again.results:
            own = list(_select_fresh(search, again, number))
        if not own:
            epochs = trials[number].user_attrs.get(NOTES, {}).get("best_epoch") or 1.0
            own = [(load_file(search.find_path(number, last)), epochs)]
        share = weight / len(own)
        members += [
            AutoMember(name, settings, share, weights, epochs=epochs) for weights, epochs in own
        ]
    return members


def _select_fresh(
    search: AutoSearch, again: MemberTraining, number: int
) -> Iterator[tuple[Mapping[str, Tensor], float]]:
    """Yield the weights of the models that were trained again, and their best epochs; not those
    that the time has cut off so early that the search's own model is better."""
    trial = search.study.get_trials()[number]
    known = get_score(trial) or math.inf
    for (owner, seed), weights in again.weights.items():
        event = again.known.get((owner, seed))
        if owner != number or event is None or not weights:
            continue
        is_cut = event.stopped is not None and OUT_OF_MINUTES in event.stopped
        is_usable = event.loss is not None and math.isfinite(event.loss)
        if is_usable and (not is_cut or event.loss <= MAX_CUT_LOSS * known):
            yield weights, event.best_epoch or 1.0


def build_answer(search: AutoSearch, members: Sequence[AutoMember]) -> RunSummary:
    """Write the run that predicts, retrained/best, and return its summary."""
    folder = search.run.folder / "retrained" / "best"
    runs.remove(folder.parent / refit.FOLDER)  # that of an earlier answer
    runs.remove(folder)
    name = f"{search.config.name}-best"
    entries = [
        ensemble.NewMember(
            member.name,
            configs.replace_settings(member.config, {"name": name}),
            member.weights,
            member.weight,
        )
        for member in members
    ]
    datasets = [search.datasets.get(entry.config) for entry in entries]
    loaded = [LoadedData(data.dataset, data.fingerprint, data.encoder) for data in datasets]
    losses = [search.library.compute_loss(member.name) for member in members]
    return ensemble.build_from_weights(
        folder,
        name,
        entries,
        loaded,
        search.fitted,
        best=losses.index(min(losses)),
        watch=search.run.watch,
    )


def summarize(
    search: AutoSearch,
    trials: Sequence[FrozenTrial],
    search_result: SearchEnd,
    choice: Combination,
    members: Sequence[AutoMember],
    result: RunSummary,
    baselines: Mapping[str, BaselineCandidate],
) -> SearchSummary:
    """Return the summary: that of the model, of the search, and the leaderboard."""
    run, config = search.run, search.config
    best = next(iter(rank_trials(trials)), None)
    states = [get_state(trial) for trial in trials]
    counts = {name: states.count(name) for name in STATE_NAMES.values()}
    if CUT_OFF in states:
        counts |= {CUT_OFF: states.count(CUT_OFF)}
    search_s, optuna_s = search_result.seconds, search_result.optuna_s or 0.0
    given = next((trial for trial in trials if trial.user_attrs.get(GIVEN)), None)
    rows = make_leaderboard(search, trials, choice, members, result, baselines)
    own = {key: value for key, value in result.items() if key != "detail"}
    summary: dict[str, Any] = {
        **own,
        "run": str(run.folder),
        "name": config.name,
        "metric": config.tune.metric,
        "trials": counts,
        "given": None if given is None else given.number,
        "best": {
            "trial": None if best is None else best.number,
            "value": None if best is None else get_score(best),
            "params": {} if best is None else best.params,
        },
        "best_config": str(run.folder / "best.toml"),
        "search_s": search_s,
        "trials_per_hour": 3600 * len(states) / max(search_s, 1e-9),
        "optuna_s": optuna_s,
        "optuna_share": optuna_s / max(search_s, 1e-9),
        "packs": search_result.packs,
        "retrained": [],
        "test": {"best": {key: result.get(key) for key in summaries.TEST_KEYS}},
        "comparison": None,
        "ranked_by": search.ranked_by,
        "findings": list(describe_findings(search, choice, members)),
        "space": spaces.describe_space(search.study.space),
        "importances": compute_importances(search.study.study),
        "pending": None,
        "prefer": search.plan.prefer,
        "leaderboard": rows,
        "weights": [{"name": name, "weight": weight} for name, weight in choice.weights.items()],
        "models": [{"name": member.name, "epochs": member.epochs} for member in members],
        "refit": make_refit_summary("pending", len(members)) if search.plan.refit else None,
    }
    by_series = search.config.data.scale_by == "series"
    summary["verdict"] = wording.describe_auto(
        result, search.signature.targets, by_series=by_series
    )
    summary |= runs.describe_origin()
    return cast(SearchSummary, summary)


def to_public(summary: SearchSummary) -> SearchSummary:
    """Return the object that `slipstream auto --json` prints: the weights as `ensemble`, which in
    the file of a run is the mean of its repeats."""
    return cast(SearchSummary, {**summary, "ensemble": summary["weights"]})


def describe_findings(
    search: AutoSearch, choice: Combination, members: Sequence[AutoMember]
) -> Iterator[str]:
    """Yield sentences on how the answer was chosen."""
    blocks = len(search.library.blocks)
    judged = "one validation block" if blocks == 1 else f"{blocks} validation blocks"
    chosen = [name for name, weight in choice.weights.items() if weight > 0]
    if len(chosen) > 1:
        models = sum(member.weight > 0 for member in members)
        compared = f"{100 * choice.gain:.1f} % better than one model"
        if abs(choice.gain) < SAME_GAIN:
            compared = "as good as one model"
        elif choice.gain < 0:
            compared = f"{-100 * choice.gain:.1f} % worse than one model, which may be luck,"
        yield (
            f"an ensemble of {models} models from {len(chosen)} candidates, {compared} on "
            f"validation windows that neither was selected by ({judged})"
        )
    if search.config.data.split.walk_forward is not None:
        yield (
            "trained on the rows before the last test block of the walk-forward split, and tested "
            "on that block alone"
        )
    share = _compute_hedge(search.library)
    if len(chosen) > 1 and share and search.plan.prefer == "best":
        yield f"{100 * share:.0f} % of the weight or more are baselines', because few windows judge"
    if choice.rival in chosen:
        gain = 100 * choice.advantages[choice.rival].gain
        compared = f"only {gain:.1f} % better" if gain > 0 else "no better"
        yield (
            f"{100 * choice.weights[choice.rival]:.0f} % of the weight is that of {choice.rival}: "
            f"without it, the ensemble was {compared} on validation windows, which may be luck"
        )
    if len(chosen) == 1 and search.plan.prefer == "best":
        yield (
            "no ensemble: it was not better than one model on validation windows that neither was "
            f"selected by ({judged})"
        )


def make_leaderboard(
    search: AutoSearch,
    trials: Sequence[FrozenTrial],
    choice: Combination,
    members: Sequence[AutoMember],
    result: RunSummary,
    baselines: Mapping[str, BaselineCandidate],
) -> list[LeaderboardRow]:
    """Return a row for everything that was tried, the best first, then what failed."""
    library = search.library
    metric = wording.get_tested_metric(result, search.ranked_by)

    def read(scores: Scores) -> float:
        value = read_metric(scores, "test", metric)
        return math.nan if value is None else value

    tested: dict[str, list[float]] = {}
    scored: Sequence[Scores] = result.get("members") or [result]
    for member, scores in zip(members, scored, strict=True):
        tested.setdefault(member.name, []).append(read(scores))
    reference = ensemble.choose_reference([member.config for member in members], search.fitted)
    data = members[reference].config.data
    for name, known in (result.get("baselines") or {}).items():
        fit = ensemble.find_fitted(search.fitted, data, name)
        row = name if fit is None else search.name_baseline(name, fit.data)
        if known:
            tested.setdefault(row, [read(known)])
    by_name = {name_trial(trial.number): trial for trial in trials}
    costs = measure_costs(search, by_name, members, baselines)
    rows: list[LeaderboardRow] = []
    for name in library.rank():
        trial = by_name.get(name)
        losses = library.losses[name]
        notes = {} if trial is None else trial.user_attrs.get(NOTES, {})
        kind = parse_baseline(name) if trial is None else get_kind(search.config, trial)
        fitted = baselines.get(name)
        found = tested.get(name)
        rows.append(
            {
                "name": name,
                "kind": kind,
                "what": describe_candidate(search.config, trial, _find_baseline(search, name)),
                "val": library.compute_loss(name),
                "val_sd": statistics.compute_deviation(losses) if len(losses) > 1 else None,
                "test": sum(found) / len(found) if found else None,
                "train_s": notes.get("seconds") or (fitted.seconds if fitted else None),
                **costs.get(name, NOT_MEASURED),
                "weight": choice.weights.get(name, 0.0),
                "state": "baseline" if trial is None else get_state(trial),
                "stopped": notes.get("stopped"),
            }
        )
    for slow in search.fits.slow if search.fits else ():
        found = tested.get(slow.name)
        rows.append(
            {
                "name": slow.name,
                "kind": parse_baseline(slow.name),
                "what": describe_candidate(search.config, None, _find_baseline(search, slow.name)),
                "val": None,
                "val_sd": None,
                "test": found[0] if found else None,
                "train_s": slow.seconds,
                **NOT_MEASURED,
                "weight": 0.0,
                "state": "failed",
                "stopped": slow.reason,
            }
        )
    listed = {row["name"] for row in rows}
    for name, trial in by_name.items():
        if name not in listed:
            notes = trial.user_attrs.get(NOTES, {})
            rows.append(
                {
                    "name": name,
                    "kind": get_kind(search.config, trial),
                    "what": describe_candidate(search.config, trial, None),
                    "val": None,
                    "val_sd": None,
                    "test": None,
                    "train_s": notes.get("seconds"),
                    **NOT_MEASURED,
                    "weight": 0.0,
                    "state": get_state(trial),
                    "stopped": notes.get("stopped"),
                }
            )
    return rows


def measure_costs(
    search: AutoSearch,
    trials: Mapping[str, FrozenTrial],
    members: Sequence[AutoMember],
    baselines: Mapping[str, BaselineCandidate],
) -> dict[str, DeploymentCosts]:
    """Return what the members, the best candidates and the baselines cost where they run, in this
    order, as far as the time for it goes."""
    weights = {member.name: member.weights for member in members}
    names = dict.fromkeys([*weights, *search.library.rank()[:MAX_MEASURED], *baselines])
    end = time.perf_counter() + search.budget.measuring_s
    costs: dict[str, DeploymentCosts] = {}
    for name in names:
        if time.perf_counter() > end:
            break
        candidate, trial = baselines.get(name), trials.get(name)
        with suppress(UserError, RuntimeError):  # what cannot be measured has no figures
            if trial is not None:
                config = spaces.apply_params(search.config, search.study.space, trial.params)
                data = search.datasets.get(config)
                costs[name] = measure_network(config, data, weights.get(name))
            elif candidate is not None:
                data = search.datasets.get(candidate.config)
                costs[name] = measure_network(candidate.config, data, candidate.weights)
    return costs


def _find_baseline(search: AutoSearch, name: str) -> Baseline | None:
    """Return what was fitted as a candidate of this name, if it is a baseline."""
    kind = parse_baseline(name)
    named = (entry for entry in search.fitted if name == search.name_baseline(kind, entry.data))
    return next((entry.baselines.get(kind) for entry in named), None)


def get_kind(config: Config, trial: FrozenTrial) -> str:
    """Return the kind of a trial's model."""
    kind: str = trial.params.get("model.kind", config.model.kind)
    return kind


def describe_candidate(config: Config, trial: FrozenTrial | None, fitted: Baseline | None) -> str:
    """Return the settings of a candidate in a few words."""
    if trial is None:
        return fitted.description if fitted else "a baseline"
    given = portfolio.read_given(config)
    params = given | trial.params
    if trial.user_attrs.get(GIVEN):
        return "the config as given"
    own = "data.inputs" in trial.params and trial.params["data.inputs"] != given["data.inputs"]
    parts = [f"{params['data.context']} rows" + (", own past" if own else "")]
    if params["model.patch"] > 1:
        parts.append(f"patches of {params['model.patch']}")
    if params["model.normalize"] != "none":
        parts.append(f"normalize {params['model.normalize']}")
    parts.append(params["train.loss"])
    if params["model.kind"] != "linear":
        parts.append(f"{params['model.layers']} x {params['model.hidden']}")
    return ", ".join(parts)
