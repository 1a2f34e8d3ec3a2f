from __future__ import annotations

from dataclasses import replace

from slipstream.base.statistics import BETTER, NO_DIFFERENCE, WORSE, combine_verdicts
from slipstream.engine.monitor import summarize
from slipstream.reporting import wording
from slipstream.reporting.wording import (
    choose_layout,
    describe_estimate,
    describe_intervals,
    describe_usage,
    describe_verdict,
    format_energy,
    judge,
)
from tests.reporting.monitor_sample import ON_CPU, SAMPLE


def test_a_run_reports_its_energy_and_utilisation():
    found = summarize([SAMPLE] * 411 + [replace(SAMPLE, throttled=["power cap"])])
    summary = {"seconds": 412.4, "monitor": found}
    assert format_energy(summary) == "38 Wh"
    assert list(describe_usage(summary)) == [
        "GPU 97 % busy, 332 W, 2.1 GB peak GPU memory, up to 61 °C; "
        "1.0 CPU cores busy, 1.2 GB peak memory"
    ]
    assert format_energy(summary | {"seconds": 30.0}) == "38 Wh since the run began"
    assert (
        format_energy(summary | {"monitor": summarize([replace(SAMPLE, energy_j=9e6)])})
        == "2.5 kWh"
    )
    capped = summarize([SAMPLE, SAMPLE, replace(SAMPLE, throttled=["thermal"])])
    _, throttled = describe_usage({"monitor": capped})
    assert throttled == "the GPU was throttled for 33 % of the time: thermal"
    on_cpu = summarize([ON_CPU])
    assert format_energy({"seconds": 9, "monitor": on_cpu}) == ""
    assert list(describe_usage({"monitor": on_cpu})) == ["1.0 CPU cores busy, 1.2 GB peak memory"]
    assert not list(describe_usage({"monitor": None, "repeated_steps": 0}))
    assert list(describe_usage({"monitor": None, "repeated_steps": 3})) == [
        "3 steps were repeated at a smaller loss scale: fp16 gradients overflowed"
    ]
    assert format_energy({"seconds": 9, "monitor": None}) == ""


def test_estimates_are_compared_with_the_actual_time():
    found = {
        "before_s": 41,
        "before_is": "measured",
        "after_ten_steps_s": 39,
        "took_s": 40,
        "planned_steps": 1520,
    }
    summary = {"steps": 1520, "estimate": found}
    assert (
        describe_estimate(summary)
        == "estimated 41.0 s, 39.0 s after ten steps; training took 40.0 s"
    )
    short = found | {"before_is": "guessed", "after_ten_steps_s": None}
    assert describe_estimate({"steps": 9, "estimate": short}) == (
        "estimated 41.0 s (rule of thumb); training took 40.0 s for 9 of 1,520 steps"
    )
    unknown = found | {"before_s": None, "after_ten_steps_s": None}
    assert describe_estimate({"steps": 9, "estimate": unknown}) == ""


def scores(rmse, mse, r2):
    return {
        "metrics": {"test": {"rmse": rmse, "mae": rmse / 2, "r2": r2}},
        "scaled": {"test": {"mse": mse, "mae": mse}},
    }


def compare(model, baselines, *, share=0.05):
    """What a comparison window by window gives; each interval reaches this share to both sides."""
    differences = {}
    for metric, section in (("rmse", "metrics"), ("scaled_mse", "scaled")):
        key = metric.removeprefix("scaled_")
        value = model[section]["test"][key]
        differences[metric] = {}
        for name, one in baselines.items():
            base = one[section]["test"][key]
            relative = value / base - 1
            low, high = relative - share, relative + share
            verdict = BETTER if high < 0 else WORSE if low > 0 else NO_DIFFERENCE
            differences[metric][name] = {
                "difference": value - base,
                "interval": [base * low, base * high],
                "relative": relative,
                "relative_interval": [low, high],
                "verdict": verdict,
            }
    verdicts = {name: one["verdict"] for name, one in differences["scaled_mse"].items()}
    return {
        "against_baselines": {
            "metric": "scaled_mse",
            "verdict": combine_verdicts(verdicts.values()),
            "level": 0.95,
            "how": "",
            "differences": differences,
        },
        "beaten_by": [name for name, one in verdicts.items() if one == WORSE],
        "judged_by": "mse",
        "baselines": baselines,
    }


def test_the_verdict_states_errors_in_the_datas_units_with_their_interval():
    model = scores(1.25, 0.3, 0.7)
    baselines = {"repeat": scores(3, 0.9, 0.1), "ridge": scores(1.5, 0.4, 0.6)}
    summary = model | compare(model, baselines)
    assert describe_verdict(summary) == (
        "The model beats every baseline on the test set: RMSE 1.250, ridge 1.500 (-17 %, 95 % "
        "interval -22 % to -12 %)."
    )
    assert judge(summary) == BETTER
    worse = scores(1.6, 0.5, 0.5)
    beaten = worse | compare(worse, baselines)
    assert describe_verdict(beaten).startswith("The model loses to ridge on the test set: RMSE 1.6")
    assert describe_verdict(beaten).endswith("ridge is currently the better choice.")
    assert judge(beaten) == WORSE


def test_a_difference_within_its_interval_is_no_success():
    model = scores(1.485, 0.392, 0.7)
    baselines = {"repeat": scores(3, 0.9, 0.1), "ridge": scores(1.5, 0.4, 0.6)}
    summary = model | compare(model, baselines)
    assert describe_verdict(summary) == (
        "The model is not shown to beat ridge on the test set: RMSE 1.485, ridge 1.500 (-1.0 %, "
        "95 % interval -6.0 % to +4.0 %); it beats repeat."
    )
    assert judge(summary) == NO_DIFFERENCE


def test_figures_never_contradict_the_verdict():
    """With several targets, a unit may dominate the RMSE, but not the scaled error that decides."""
    model, other = scores(0.246, 0.05, 0.7), {"interpolate": scores(0.217, 0.08, 0.6)}
    assert describe_verdict(model | compare(model, other)) == (
        "The model beats every baseline on the test set: scaled MSE 0.05000, interpolate 0.08000 "
        "(-38 %, 95 % interval -42 % to -32 %)."
    )


def test_a_run_of_an_older_version_has_no_interval_and_is_no_success():
    summary = scores(1.25, 0.3, 0.7) | {"judged_by": "mse", "beaten_by": []}
    summary["baselines"] = {"repeat": scores(3, 0.9, 0.1), "seasonal": None}
    assert describe_verdict(summary) == (
        "The model has the lowest error on the test set: scaled MSE 0.3000, repeat 0.9000 (an "
        "older version wrote no interval of the difference)."
    )
    assert judge(summary) == NO_DIFFERENCE
    assert judge(summary | {"beaten_by": ["repeat"]}) == WORSE


def test_a_model_that_explains_nothing_is_no_success():
    model, baselines = scores(1.25, 0.3, -0.08), {"repeat": scores(3, 0.9, -2.0)}
    summary = model | compare(model, baselines)
    assert "But its R² is -0.0800" in describe_verdict(summary)
    assert judge(summary) == WORSE
    for unknown in (None, float("nan")):  # a constant truth has none
        constant = summary | scores(1.25, 0.3, unknown)
        assert "R²" not in describe_verdict(constant)
        assert judge(constant) == BETTER


def test_the_verdict_is_about_what_the_run_predicts_with():
    model, mean = scores(1.6, 0.5, 0.6), scores(1.25, 0.3, 0.7)
    baselines = {"ridge": scores(1.5, 0.4, 0.6)}
    ensemble = mean | {"against_baselines": compare(mean, baselines)["against_baselines"]}
    summary = model | compare(model, baselines) | {"uses": "ensemble", "ensemble": ensemble}
    assert describe_verdict(summary).startswith("The ensemble beats every baseline")
    assert judge(summary) == BETTER
    assert judge(summary | {"uses": "model"}) == WORSE


def test_an_ensemble_that_is_one_of_its_members_says_so():
    members = [
        {"name": "a-1", "kind": "mlp", "weight": 1.0},
        {"name": "b-1", "kind": "mlp", "weight": 0.0},
    ]
    summary = {"members": members, "folds": None, "coverage": {}}
    weights, alone = wording.describe_members(summary)
    assert weights == "weights, fitted to the validation set: 1.000 a-1 (mlp), 0.000 b-1 (mlp)"
    assert alone == "a-1 alone is as good on the validation set as any mean with the others"
    assert [name for name, _ in wording.list_members(summary)] == [
        "mlp, a-1, weight 1.00",
        "mlp, b-1, weight 0.00",
    ]


def test_a_forecast_shows_its_relative_errors_and_an_estimate_those_it_has():
    plain = {"mae": 1.0, "rmse": 1.0, "r2": 0.5, "max_error": 2.0, "bias": 0.0}
    relative = {"smape": 5.0, "wape": 4.0}

    def list_headings(metrics, *, compact):
        layout = choose_layout({"metrics": metrics})
        return [column.heading for column in (layout.compact if compact else layout.columns)]

    names = ["MASE", "sMAPE", "WAPE"]
    forecast = {"test": plain | relative | {"mase": 0.8}}
    assert list_headings(forecast, compact=False)[5:8] == names
    assert list_headings(forecast, compact=True)[3:6] == names
    assert list_headings(forecast["test"], compact=True)[3:6] == names  # as `evaluate` has them
    estimate = {"test": plain | relative}
    assert list_headings(estimate, compact=False)[5:7] == names[1:]
    assert "max error" in list_headings(estimate, compact=True)
    assert not {*names} & {*list_headings({"test": plain}, compact=False)}  # of an older version


def test_intervals_are_described_as_far_as_a_run_has_scored_them():
    coverage = {"80": 0.789, "95": 0.94}
    scores = {"coverage": coverage, "width": {"80": 1.5, "95": 2.25}, "crps": 0.031}
    assert describe_intervals(scores, "of the ensemble") == (
        "coverage of the ensemble: 78.9 % inside the 80 % interval (mean width 1.500), 94.0 % "
        "inside the 95 % interval (mean width 2.250); CRPS 0.03100"
    )
    assert describe_intervals({"coverage": coverage}) == (
        "coverage: 78.9 % inside the 80 % interval, 94.0 % inside the 95 % interval"
    )
    assert describe_intervals({"coverage": {}, "width": {}, "crps": None}) == ""
    assert describe_intervals({"coverage": {"80": 0.42, "95": 0.86}}).endswith(
        "86.0 % inside the 95 % interval; too narrow: these rows are unlike those of validation"
    )
