from __future__ import annotations

from slipstream.engine.monitor import summarize
from slipstream.reporting import wording
from slipstream.reporting.wording import (
    describe_estimate,
    describe_usage,
    describe_verdict,
    format_energy,
    is_beaten,
)
from tests.reporting.monitor_sample import SAMPLE


def test_a_run_reports_its_energy_and_utilisation():
    found = summarize([SAMPLE] * 411 + [SAMPLE | {"throttled": ["power cap"]}])
    summary = {"seconds": 412.4, "monitor": found}
    assert format_energy(summary) == "38 Wh"
    assert list(describe_usage(summary)) == [
        "GPU 97 % busy, 332 W, 2.1 GB peak GPU memory, up to 61 °C; "
        "1.0 CPU cores busy, 1.2 GB peak memory"
    ]
    assert format_energy(summary | {"seconds": 30.0}) == "38 Wh since the run began"
    assert (
        format_energy(summary | {"monitor": summarize([SAMPLE | {"energy_j": 9e6}])}) == "2.5 kWh"
    )
    capped = summarize([SAMPLE, SAMPLE, SAMPLE | {"throttled": ["thermal"]}])
    _, throttled = describe_usage({"monitor": capped})
    assert throttled == "the GPU was throttled for 33 % of the time: thermal"
    on_cpu = summarize([{key: SAMPLE[key] for key in list(SAMPLE)[:4]}])
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


def test_the_verdict_states_errors_in_the_datas_units_first():
    summary = scores(1.25, 0.3, 0.7) | {"judged_by": "mse", "beaten_by": []}
    summary["baselines"] = {"repeat": scores(3, 0.9, 0.1), "ridge": scores(1.5, 0.4, 0.6)}
    assert describe_verdict(summary) == (
        "The model beats every baseline on the test set: RMSE 1.250, ridge 1.500 (scaled MSE "
        "0.3000 vs. 0.4000)."
    )
    assert not is_beaten(summary)
    beaten = summary | scores(1.6, 0.5, 0.5) | {"beaten_by": ["ridge"]}
    assert describe_verdict(beaten).endswith("ridge is currently the better choice.")
    assert is_beaten(beaten)


def test_a_model_that_explains_nothing_is_no_success():
    summary = scores(1.25, 0.3, -0.08) | {"judged_by": "mse", "beaten_by": []}
    summary["baselines"] = {"repeat": scores(3, 0.9, -2.0), "seasonal": None}
    assert "But its R² is -0.0800" in describe_verdict(summary)
    assert is_beaten(summary)
    for unknown in (None, float("nan")):  # a constant truth has none
        constant = summary | scores(1.25, 0.3, unknown)
        assert "R²" not in describe_verdict(constant)
        assert not is_beaten(constant)


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
