"""Finishes a search: retrains and tests the best settings and writes the summary.

The summary is written as soon as each part of it is known: after the search, after the retraining
and after the test. So a failure in a later part cannot lose an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import optuna
from optuna.trial import FrozenTrial

from slipstream import config as configs
from slipstream import runs
from slipstream.base import statistics
from slipstream.base.errors import Command, UserError
from slipstream.base.phases import EARLIER, SEARCH_PARTS, PhaseTimer
from slipstream.base.statistics import Spread
from slipstream.base.text import format_count
from slipstream.config import Config
from slipstream.config import search_space as spaces
from slipstream.engine.lanes import OUT_OF_TIME as TRAINING_OUT_OF_TIME
from slipstream.events import End, Recovery, RetrainingStart, SearchEnd
from slipstream.runs import Run
from slipstream.runs.summary import RunSummary, SearchComparison, SearchSummary, SearchTest
from slipstream.scoring.summary import get_metric, get_metric_over_seeds
from slipstream.search import retraining, sharing
from slipstream.search.budget import ModelCosts, RetrainingPlan, SearchBudget
from slipstream.search.packs import PACK_FAILED, PackScheduler
from slipstream.search.retraining import DEFAULT, FilledSearch, RetrainedConfig, Retraining
from slipstream.search.storage import CUT_OFF, NOTES, OUT_OF_TIME, STATE_NAMES
from slipstream.search.study import (
    GIVEN,
    compute_importances,
    describe_trial,
    get_score,
    get_state,
    rank_trials,
)
from slipstream.search.trials import OptunaSearch
from slipstream.search.workers import get_costs

TEST_KEYS = (
    *("run", "metrics", "scaled", "spread", "scaled_spread"),
    *("baselines", "judged_by", "beaten_by", "against_baselines", "failed"),
    *("coverage", "width", "crps"),
)
"""What the summary contains of each test run"""
RETRAINING_PENDING = "the best trials have yet to be retrained"
TEST_PENDING = "the test runs have yet to finish"
NO_BETTER_TRIAL = "no better trial"
"""The verdict where the given config was the best of what was retrained"""


@dataclass(frozen=True)
class FinishedSearch:
    """A search that is over; `slipstream.Study` is made from it."""

    run: Path
    best: Config
    """The chosen config"""
    summary: SearchSummary
    """The object that `slipstream tune --json` prints"""
    study: optuna.Study


def finish_search(
    search: OptunaSearch, scheduler: PackScheduler, search_result: SearchEnd, timer: PhaseTimer
) -> FinishedSearch:
    """Retrain the best trials, test the chosen settings and the default, and write the summary.

    The scheduler continues with what the end of the search has begun to retrain.
    """
    run, config, study, budget = search.run, search.config, search.study, search.budget
    trials = sharing.select_counted(study.get_trials())
    runs.remove_manifest(run)
    runs.write_json(run.folder / "trials.json", [describe_trial(trial) for trial in trials])
    ranked = rank_trials(trials)
    if not ranked:
        raise make_no_result_error(run, trials)
    chosen = spaces.apply_params(config, study.space, ranked[0].params)
    space: SearchSummary = {
        "space": spaces.describe_space(study.space),
        "importances": compute_importances(study.study),
    }

    def write(
        retrained: list[RetrainedConfig], tests: Mapping[str, RunSummary], pending: str | None
    ) -> SearchSummary:
        runs.remove_manifest(run)
        runs.write_text(run.folder / "best.toml", configs.to_toml(chosen, only_set=True))
        summary = summarize(run, config, trials, retrained, tests, search_result)
        summary |= space
        limits = describe_limits(config, trials, retrained, tests, plan)
        summary["findings"] += limits
        requested = {"of_trials": config.tune.retrain, "of_seeds": config.tune.retrain_seeds}
        summary |= {"retraining": plan._asdict() | requested, "pending": pending}
        summary["seconds"] = budget.elapsed_s
        summary |= cast(SearchSummary, runs.describe_origin())
        before = {EARLIER: budget.spent_s} if budget.spent_s else {}
        summary["time"] = timer.summarize(SEARCH_PARTS, before=before)
        runs.write_metrics(run, summary)
        return summary

    plan, is_new = plan_retraining(run, config, search_result, budget)
    summary = write([], {}, RETRAINING_PENDING if config.tune.retrain else None)
    if plan.num_trials:
        limit = None if budget.tune.minutes is None or not is_new else budget
        costs = get_costs(search_result) or ModelCosts(0.0)
        limited, source = _limit_retraining(config, plan), scheduler.pool.source
        again = Retraining(run, limited, study)
        if isinstance(source, FilledSearch):
            again = source.retraining
        again.is_late = lambda ahead_s: limit is not None and limit.is_late(plan, costs, ahead_s)
        candidates = [trial for trial in ranked if not trial.user_attrs.get(GIVEN)]
        retrained = retraining.retrain_best(again, candidates[: plan.num_trials], scheduler)
        timer.end("retraining")
        chosen = retraining.choose_settings(retrained).config
        write(retrained, {}, TEST_PENDING)
        tests = retraining.run_tests(run, limited, retrained, search.datasets, limit)
        timer.end("scoring")
        summary = write(_add_losses(retrained, tests), tests, None)
    elif config.tune.retrain:
        write([], {}, TEST_PENDING)
        tests = retraining.score_best(run, config, chosen, search.datasets, budget)
        timer.end("scoring")
        summary = write([], tests, None)
    run.append(End(seconds=summary["seconds"]))
    return FinishedSearch(run.folder, chosen, summary, study.study)


def plan_retraining(
    run: Run, config: Config, search_result: SearchEnd, budget: SearchBudget
) -> tuple[RetrainingPlan, bool]:
    """Return what is retrained, and whether that is decided now, not before a resume."""
    earlier: RetrainingStart | None = None
    for event in runs.read_events(run):
        if isinstance(event, SearchEnd):
            earlier = None
        elif isinstance(event, RetrainingStart):
            earlier = event
    if earlier is not None and config.tune.retrain:
        return RetrainingPlan(earlier.num_trials, earlier.num_seeds), False
    plan = budget.plan_retraining(get_costs(search_result))
    run.append(RetrainingStart(num_trials=plan.num_trials, num_seeds=plan.num_seeds))
    return plan, True


def _limit_retraining(config: Config, plan: RetrainingPlan) -> Config:
    """Return the config with what is retrained."""
    update = {"retrain": plan.num_trials, "retrain_seeds": plan.num_seeds}
    return config.model_copy(update={"tune": config.tune.model_copy(update=update)})


def _add_losses(
    retrained: Sequence[RetrainedConfig], tests: Mapping[str, RunSummary]
) -> list[RetrainedConfig]:
    """Take the validation losses of settings that only the test runs have retrained from these."""
    results = list(retrained)
    chosen = results.index(retraining.choose_settings(results))
    for position, name in ((chosen, "best"), (len(results) - 1, "default")):
        lanes = tests[name].get("lanes") or []
        # a lane that was read back has None where its loss was not finite
        if not results[position].losses:
            found = (lane["val_loss"] for lane in lanes)
            losses = [math.inf if loss is None else loss for loss in found]
            results[position] = results[position]._replace(losses=losses)
    return results


def describe_limits(
    config: Config,
    trials: Sequence[FrozenTrial],
    retrained: Sequence[RetrainedConfig],
    tests: Mapping[str, RunSummary],
    plan: RetrainingPlan,
) -> Iterator[str]:
    """Yield a sentence for everything that `tune.minutes` cut short."""
    tune, ranked = config.tune, rank_trials(trials)
    chosen = retraining.choose_settings(retrained).trial if retrained else ranked[0].number
    trial = next((candidate for candidate in ranked if candidate.number == chosen), None)
    if trial is not None and get_state(trial) == CUT_OFF:
        epochs = f"{trial.user_attrs[NOTES]['epochs']:.3g} of {config.train.epochs} epochs"
        remark = "" if get_state(ranked[0]) != CUT_OFF else "; no trial was complete"
        yield f"{OUT_OF_TIME}: trial {chosen} was cut off after {epochs}{remark}"
    if tune.retrain and not plan.num_trials:
        yield f"{OUT_OF_TIME}: no trial was retrained; the model of trial {chosen} was tested"
    elif plan != (tune.retrain, tune.retrain_seeds) and tune.retrain:
        trials_left = f"{plan.num_trials} of {tune.retrain} trials"
        yield (
            f"tune.minutes left time to retrain {trials_left}, from {plan.num_seeds} of "
            f"{format_count(tune.retrain_seeds, 'seed')}"
        )
    cut = [
        "the default" if result.trial == DEFAULT else f"trial {result.trial}"
        for result in retrained
        if result.is_cut_off
    ]
    if cut:
        yield f"tune.minutes cut off the retraining of {', '.join(cut)}"
    cut = [name for name, test in tests.items() if test.get("stopped") == TRAINING_OUT_OF_TIME]
    if cut:
        yield f"tune.minutes cut off the test run{'s' * (len(cut) > 1)} {' and '.join(cut)}"


def make_no_result_error(run: Run, trials: Sequence[FrozenTrial]) -> UserError:
    reasons = {trial.user_attrs.get(NOTES, {}).get("stopped") for trial in trials}
    reason = "; ".join(sorted(filter(None, reasons))[:3])
    return UserError(
        f"no trial finished ({reason or 'none started'}); {run.folder / 'trials.json'} "
        "lists every trial; correct tune.space or tune.minutes and start a new search, "
        "or add trials and resume with: " + Command("tune", resume=run.folder, set="tune.trials=N")
    )


def summarize(
    run: Run,
    config: Config,
    trials: Sequence[FrozenTrial],
    retrained: Sequence[RetrainedConfig],
    tests: Mapping[str, RunSummary],
    search_result: SearchEnd,
) -> SearchSummary:
    best = rank_trials(trials)[0]
    params = {trial.number: trial.params for trial in trials}  # numbers may have gaps
    given = next((trial for trial in trials if trial.user_attrs.get(GIVEN)), None)
    if given is not None:
        params[DEFAULT] = given.params
    chosen = retraining.choose_settings(retrained) if retrained else None
    comparison = compare_tests(tests) if len(tests) > 1 else None
    if comparison is not None and chosen is not None and chosen.trial == DEFAULT:
        comparison["verdict"] = NO_BETTER_TRIAL
    states = [get_state(trial) for trial in trials]
    counts = {name: states.count(name) for name in STATE_NAMES.values()}
    counts |= {CUT_OFF: states.count(CUT_OFF)} if CUT_OFF in states else {}
    search_s, optuna_s = search_result.seconds, search_result.optuna_s or 0.0
    return {
        "run": str(run.folder),
        "name": config.name,
        "metric": config.tune.metric,
        "trials": counts,
        "given": None if given is None else given.number,
        "best": {"trial": best.number, "value": get_score(best), "params": best.params},
        "best_config": str(run.folder / "best.toml"),
        "search_s": search_s,
        "trials_per_hour": 3600 * (len(states) - states.count(CUT_OFF)) / max(search_s, 1e-9),
        "optuna_s": optuna_s,
        "optuna_share": optuna_s / max(search_s, 1e-9),
        "packs": search_result.packs,
        "retrained": [
            {
                "trial": None if result.trial == DEFAULT else result.trial,
                "what": "default" if result.trial == DEFAULT else f"trial {result.trial}",
                "params": params.get(result.trial),
                "losses": result.losses,
                "mean": result.mean_loss,
                "sd": statistics.compute_deviation(result.losses),
                "chosen": result is chosen,
            }
            for result in retrained
        ],
        "test": {
            name: cast(SearchTest, {key: test.get(key) for key in TEST_KEYS})
            for name, test in tests.items()
        },
        "comparison": comparison,
        "findings": [*_describe_packs(run), *_describe_failures(retrained, tests)],
    }


def _describe_packs(run: Run) -> Iterator[str]:
    """Yield a sentence on packs that failed, and on what became of their trials."""
    logged = (event for event in runs.read_events(run) if isinstance(event, Recovery))
    events = [event for event in logged if event.what == PACK_FAILED]
    if events:
        many = "a pack failed" if len(events) == 1 else f"{len(events)} packs failed"
        remedies = list(dict.fromkeys(event.remedy for event in events))
        listed = "; ".join(remedies[:3]) + ("; ..." if len(remedies) > 3 else "")
        yield f"{many} ({events[-1].why}), and the search went on: {listed} (see crash.txt)"


def _describe_failures(
    retrained: Sequence[RetrainedConfig], tests: Mapping[str, RunSummary]
) -> Iterator[str]:
    """Yield a sentence for settings that did not reach a finite loss from every seed."""
    if not retrained:
        return
    best, default = retrained[0], retrained[-1]
    chosen = retraining.choose_settings(retrained)
    parts = (("best", best), ("default", default))
    for name, result in parts[1:] if best is default else parts:
        problem = f"trial {result.trial}"
        if result is chosen:
            problem = f"the chosen settings ({problem})"
        if name == "default":
            problem = "the config without a search"
        problem += " did not reach a finite loss"
        failed, num_seeds = result.num_failed, len(result.losses)
        if failed:
            yield f"{problem} from {'any' if failed == num_seeds else failed} of {num_seeds} seeds"
        elif reason := tests.get(name, {}).get("failed"):
            yield f"{problem} in the test run: {reason}"


def compare_tests(tested: Mapping[str, RunSummary]) -> SearchComparison:
    """Compare the test runs "best" and "default".

    The gain is None where one of them has no model or fewer than two seeds; the verdict then says
    so. Errors of numbers are in standardised units, so that no target dominates by its unit.
    """
    chosen, default = tested["best"], tested["default"]
    if _has_spread(chosen) and _has_spread(default):
        return compare_test_errors(chosen, default)
    with_model = [test for test in (chosen, default) if not test.get("failed")]
    metric = with_model[0]["judged_by"] if with_model else None
    return {
        "metric": metric,
        "scaled": any("scaled" in test for test in with_model),
        "default": _summarize_error(default, metric),
        "chosen": _summarize_error(chosen, metric),
        "gain": None,
        "gain_percent": None,
        "low": None,
        "high": None,
        "level": statistics.LEVEL,
        "verdict": {
            (False, False): "both failed",
            (True, False): "default failed",
            (False, True): "chosen failed",
            (True, True): "too few seeds",
        }[chosen in with_model, default in with_model],
    }


def compare_test_errors(chosen: RunSummary, default: RunSummary) -> SearchComparison:
    """Return how much better the chosen settings' test metric is, with Welch's interval."""
    metric = chosen["judged_by"]
    before, after = (get_metric_over_seeds(test, metric) for test in (default, chosen))
    assert before is not None
    assert after is not None
    is_error = metric not in statistics.HIGHER_IS_BETTER
    gain = statistics.compute_welch_interval(*((before, after) if is_error else (after, before)))
    return {
        "metric": metric,
        "scaled": bool(chosen.get("scaled_spread")),
        "default": before,
        "chosen": after,
        "gain": gain.mean,
        "gain_percent": 100 * gain.mean / before["mean"] if before["mean"] else None,
        "low": gain.low,
        "high": gain.high,
        "level": statistics.LEVEL,
        "verdict": gain.judge(higher_is_better=True),
    }


def _has_spread(test: RunSummary) -> bool:
    """Whether at least two seeds have a finite error."""
    spread = None if test.get("failed") else get_metric_over_seeds(test, test["judged_by"])
    values = [spread["mean"], spread["sd"]] if spread else [None]
    return all(value is not None and math.isfinite(value) for value in values)


def _summarize_error(test: RunSummary, metric: str | None) -> Spread | None:
    """Return the mean and deviation over the seeds, or the single value of one seed."""
    if test.get("failed") or metric is None:
        return None
    value = get_metric(test, "test", metric)
    return get_metric_over_seeds(test, metric) or statistics.summarize_spread([value])
