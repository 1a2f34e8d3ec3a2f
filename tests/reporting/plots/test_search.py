from __future__ import annotations

from slipstream.reporting.plots.search import draw_all

SPACE = {
    "train.lr": {"low": 1e-4, "high": 0.1, "log": True},
    "model.hidden": [4, 8],
    "model.dropout": {"low": 0.0, "high": 0.4, "log": False},
}


def trial(number, state, value, **more):
    params = {"train.lr": 0.01, "model.hidden": 4, "model.dropout": 0.1}
    losses = {} if value is None else {"1": 2 * value, "2": value}
    found = {"trial": number, "state": state, "value": value, "losses": losses, "params": params}
    return found | {"epochs": 2.0} | more


def draw(trials):
    best = {"trial": trials[0]["trial"], "value": trials[0]["value"]}
    summary = {"space": SPACE, "retrained": [], "importances": None, "best": best}
    return draw_all(summary, trials, metric="loss", curves="epoch")


def test_trials_of_any_state_are_drawn():
    plots = draw(
        [trial(0, "finished", 0.5), trial(1, "stopped early", 0.7), trial(2, "failed", None)]
    )
    for part in ("finished (1)", "stopped early (1)", "failed (1)", "best so far"):
        assert part in plots["history"]
    assert "stopped early" in plots["ends"]
    assert "parallel" not in plots


def test_a_search_without_a_finished_trial_is_drawn():
    plots = draw([trial(0, "pruned", 0.5, losses={"1": 0.5}), trial(1, "failed", None)])
    assert "best so far" not in plots["history"]
    assert [name for name, _ in plots["slices"]] == ["lr", "hidden", "dropout"]
