"""The result of finished runs over HTTP: figures, plots, tests on new data and exports."""

from __future__ import annotations

import io
import json
import re
import shutil
import zipfile
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import slipstream
from slipstream import runs
from slipstream.base.text import format_number
from tests.app.conftest import start_site, write_run
from tests.conftest import merged, small_config, waves

QUICK = {"model": {"kind": "mlp"}, "train": {"epochs": 1}}
JOBS = {
    "forecast": {},
    "one": {"data": {"inputs": ["b"], "targets": ["a"], "horizon": 0}},
    "quantiles": {"train": {"loss": "quantile"}, "data": {"targets": ["b"]}},
    "repeats": {"train": {"repeats": 2}, "data": {"targets": ["a"]}},
    "folds": {"data": {"targets": ["a"], "split": {"walk_forward": 2}}},
    "states": {"data": {"targets": ["state"], "inputs": ["a", "b"], "task": "classify"}},
}
ODD = "<script>alert(1)</script>\n" + "x" * 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one run of each kind."""
    folder = tmp_path_factory.mktemp("results")
    parts = []
    for number in range(3):
        table = waves(300, seed=number)
        state = np.where(table["a"].to_numpy() > 10, "high", "low")
        named = pa.array([f"s{number}"] * len(table))
        parts.append(table.append_column("state", pa.array(state)).append_column("id", named))
    path = folder / "table.csv"
    pa.concat_tables(parts).to_pandas().to_csv(path, index=False)
    data = {"path": str(path), "id": "id", "inputs": ["a", "b"], "targets": ["a", "b"]}
    for name, sections in JOBS.items():
        config = small_config(folder, **merged(merged(QUICK, {"data": data}), sections))
        run = slipstream.train(config, quiet=True).run
        run.rename(folder / name)
    return folder.resolve()


@pytest.fixture(scope="module")
def site(folder):
    site, stop = start_site(folder)
    yield site
    stop()


def read_table(folder, name):
    return pq.read_table(folder / name / "predictions.parquet").to_pandas()


@pytest.mark.parametrize("name", JOBS)
def test_every_run_has_a_page_and_figures_of_each_series(site, name):
    page = site.get(f"/result/{name}")
    assert page.status == 200
    assert "Test on new data" in page.text
    figures = site.get(f"/api/result/{name}").json
    assert figures["names"] == ["s0", "s1", "s2"]
    assert len(figures["series"]) == 3
    assert sum(one["windows"] for one in figures["series"]) > 0
    assert figures["worst"]
    for series in range(3):
        plot = site.get(f"/api/plot/{name}?series={series}").json
        assert len(plot["x"]) == len(plot["true"]) == len(plot["predicted"]) > 0


def test_errors_by_series_and_overall_are_those_of_the_table(site, folder):
    table = read_table(folder, "forecast")
    for number, target in enumerate(("a", "b")):
        figures = site.get(f"/api/result/forecast?target={number}").json
        assert figures["target"] == target
        error = (table[f"{target}_predicted"] - table[target]).to_numpy()
        assert figures["mean"] == pytest.approx(np.abs(error).mean())
        for at, name in enumerate(figures["names"]):
            mine = error[(table["series"] == name).to_numpy()]
            one = figures["series"][at]
            assert one["mae"] == pytest.approx(np.abs(mine).mean())
            assert one["rmse"] == pytest.approx(np.sqrt((mine**2).mean()))
            assert one["bias"] == pytest.approx(mine.mean())
            assert one["max_error"] == pytest.approx(np.abs(mine).max())


def test_the_interval_holds_the_mean_error(site):
    figures = site.get("/api/result/one").json
    low, high = figures["interval"]
    assert low < figures["mean"] < high


def test_the_first_of_the_worst_windows_is_the_worst(site, folder):
    table = read_table(folder, "forecast")
    table["error"] = (table["a_predicted"] - table["a"]).abs()
    table["start"] = table["row"] - table["step"] + 1
    means = table.groupby(["series", "start"], observed=True)["error"].mean()
    worst = site.get("/api/result/forecast").json["worst"]
    assert worst[0]["error"] == pytest.approx(means.max())
    assert (f"s{worst[0]['series']}", worst[0]["row"]) == means.idxmax()
    errors = [one["error"] for one in worst]
    assert errors == sorted(errors, reverse=True)
    places = [(one["series"], one["row"]) for one in worst]
    assert all(
        abs(one[1] - other[1]) > 1
        for at, one in enumerate(places)
        for other in places[:at]
        if one[0] == other[0]
    )


def test_a_plot_has_the_rows_of_its_range(site, folder):
    table = read_table(folder, "one")
    mine = table[table["series"] == "s1"].sort_values("time")
    whole = site.get("/api/plot/one?series=1").json
    assert whole["x"] == pytest.approx(mine["time"].to_numpy())
    assert whole["true"] == pytest.approx(mine["a"].to_numpy(), abs=1e-2)
    error = (mine["a_predicted"] - mine["a"]).abs()
    assert whole["mean_error"] == pytest.approx(error.mean())
    low, high = mine["time"].iloc[5], mine["time"].iloc[14]
    part = site.get(f"/api/plot/one?series=1&low={low}&high={high}").json
    assert part["rows"] == 10
    assert part["mean_error"] == pytest.approx(error.iloc[5:15].mean())


def test_forecasts_are_laid_end_to_end_or_shown_by_rows_ahead(site, folder):
    table = read_table(folder, "forecast")
    mine = table[table["series"] == "s0"]
    plot = site.get("/api/plot/forecast?series=0&ahead=4").json
    assert plot["rows"] == (mine["step"] == 4).sum()
    laid = site.get("/api/plot/forecast?series=0").json
    rows = mine["row"].max() - mine["row"].min() + 1
    assert laid["rows"] == rows // 4 * 4
    assert None in laid["predicted"]  # between two forecasts
    assert site.get("/api/plot/forecast?series=0&ahead=99").json["x"] == []


def test_quantiles_and_intervals_are_bands(site):
    (band,) = site.get("/api/plot/quantiles?series=0").json["bands"]
    assert band["label"] == "quantiles 10 to 90 %"
    assert len(band["low"]) == len(band["high"])
    bands = site.get("/api/plot/repeats?series=0").json["bands"]
    assert [one["label"] for one in bands] == ["95 % interval", "80 % interval"]


def test_errors_over_the_horizon_stand_beside_the_baselines(site, folder):
    by_step = site.get("/api/result/forecast").json["by_step"]
    summary = json.loads((folder / "forecast" / "metrics.json").read_text())
    assert by_step["model"] == [one["mae"] for one in summary["detail"]["test"]["per_step"]]
    assert by_step["ridge"] == summary["baselines"]["ridge"]["mae_by_step"]
    assert site.get("/api/result/one").json["by_step"] == {}


def test_classes_have_a_matrix_figures_and_probabilities(site, folder):
    page = site.get("/result/states").text
    assert "Confusion matrix" in page
    assert "precision" in page
    figures = site.get("/api/result/states").json
    assert figures["classes"] == ["high", "low"]
    assert figures["reliability"]
    plot = site.get("/api/plot/states?series=0").json
    assert set(plot["true"]) - {None} <= {0, 1}
    assert all(0 <= one <= 1 for one in plot["probability"] if one is not None)
    table = read_table(folder, "states")
    loss = -np.log(np.where(table["label"] == "high", table["p_high"], table["p_low"]))
    assert figures["mean"] == pytest.approx(loss.mean(), rel=1e-5)


def test_a_repeat_without_a_model_leaves_the_others_on_the_page(site, folder):
    copy = folder / "diverged"
    shutil.copytree(folder / "repeats", copy)
    lanes = runs.read_metrics(copy)["lanes"]
    failed = {"metrics": None, "scaled": None, "val_loss": None, "best": False}
    runs.update_metrics(copy, lanes=[lanes[0] | failed, lanes[1] | {"best": True}])
    try:
        whole, page = (site.get(f"/result/{name}").text for name in ("repeats", "diverged"))
    finally:
        shutil.rmtree(copy)
    assert "2 seeds: test MAE" in page
    assert page.count("<tr") == whole.count("<tr") > 0


def test_repeats_and_folds_show_their_spread(site):
    assert "2 seeds: test MAE" in site.get("/result/repeats").text
    assert "fold 2" in site.get("/result/folds").text
    assert "Several models" not in site.get("/result/one").text


def test_many_rows_are_thinned_and_keep_their_extremes(site, folder):
    rows = 30_000
    truth = np.sin(np.arange(rows) / 500)
    predicted = truth.copy()
    predicted[12_345] = 9.0
    predicted[23_456] = np.nan
    table = pa.table(
        {
            "series": pa.array(["long"] * rows).dictionary_encode(),
            "row": np.arange(rows),
            "a": truth,
            "a_predicted": predicted,
        }
    )
    shutil.copytree(folder / "one", folder / "long")
    pq.write_table(table, folder / "long" / "predictions.parquet", row_group_size=4_000)
    plot = site.get("/api/plot/long?series=0&points=1000").json
    assert plot["rows"] == rows
    assert plot["points"] <= 1_000
    assert max(one for one in plot["predicted"] if one is not None) == 9
    worst = site.get("/api/result/long").json["worst"]
    assert worst[0] == {"series": 0, "row": 23_456, "low": 23_456, "high": 23_456, "error": None}
    assert worst[1]["row"] == 12_345
    shutil.rmtree(folder / "long")


def test_names_of_series_are_cut_and_not_taken_as_markup(site, folder):
    table = pq.read_table(folder / "one" / "predictions.parquet")
    names = pa.array([ODD] * len(table)).dictionary_encode()
    shutil.copytree(folder / "one", folder / "odd")
    pq.write_table(table.set_column(0, "series", names), folder / "odd" / "predictions.parquet")
    assert site.get("/api/result/odd").json["names"] == [ODD[:200]]
    assert site.get("/api/plot/odd?series=0").json["rows"] == len(table)
    odd = "<script>alert(1)<"
    (folder / "odd").rename(folder / odd)
    page = site.get(f"/result/{quote(odd)}")
    assert page.status == 200
    assert "<script>alert" not in page.text
    shutil.rmtree(folder / odd)


@pytest.mark.parametrize(
    "query",
    [
        "series=9",
        "series=-1",
        "series=x",
        "low=a",
        "high=nan",
        "target=7",
        "source=../x",
        "points=x",
    ],
)
def test_wrong_views_are_refused(site, query):
    assert site.get(f"/api/plot/one?{query}").status in (400, 404)


def test_a_damaged_or_missing_file_is_named(site, folder):
    shutil.copytree(folder / "one", folder / "bad")
    (folder / "bad" / "predictions.parquet").write_bytes(b"PAR1 nothing")
    answer = site.get("/api/result/bad")
    assert answer.status == 400
    assert "predictions.parquet" in answer.json["error"]
    (folder / "bad" / "predictions.parquet").unlink()
    assert site.get("/api/result/bad").status == 404
    assert site.get("/result/bad").status == 200
    shutil.rmtree(folder / "bad")


def test_a_run_that_is_not_finished_has_no_result_yet(site, folder):
    run = write_run(folder, "stopped", finished=False)
    assert "once it is finished" in site.get("/result/stopped").text
    answer = site.post("/api/test/stopped", {"data": "table.csv"})
    assert "only a finished one" in answer.json["error"]
    shutil.rmtree(run)


def test_a_test_on_new_data_is_a_command(site, folder):
    job = site.post("/api/test/one", {"data": "table.csv"}).json["job"]
    command = site.workspace.store.read(job).command
    assert command[:4] == ("evaluate", str(folder / "one"), "--data", str(folder / "table.csv"))
    (test,) = site.get("/api/tests/one").json["tests"]
    assert test["state"] == "queued"
    assert test["command"].startswith("slipstream evaluate ")
    assert site.get("/api/tests/forecast").json["tests"] == []
    assert site.get(f"/api/result/forecast?source={job}").status == 404
    assert site.get(f"/tested/{job}/one").status == 404
    plain = site.post("/api/test/one", {"data": "table.csv", "score": False}).json["job"]
    assert site.workspace.store.read(plain).command[0] == "predict"


@pytest.mark.parametrize("data", ["../a.csv", "/etc/passwd", "none.csv", "", 5, None])
def test_new_data_are_below_the_folder(site, data):
    assert site.post("/api/test/one", {"data": data}).status in (400, 404)


def test_the_scores_and_the_plot_of_a_test_are_shown(site, folder):
    job = site.post("/api/test/one", {"data": "table.csv"}).json["job"]
    place, store = site.workspace.store.jobs / job, site.workspace.store
    path = place / "predictions.parquet"
    scores = slipstream.evaluate(folder / "one", folder / "table.csv", predictions=path, quiet=True)
    (place / "output.json").write_text(json.dumps(scores, default=str))
    assert store.claim(job)
    store.record_end(job, 0)
    test = next(one for one in site.get("/api/tests/one").json["tests"] if one["job"] == job)
    model = test["scores"][0]
    assert model["name"] == "model"
    assert model["values"][0] == pytest.approx(scores["metrics"]["mae"])
    assert test["windows"] == scores["windows"]
    figures = site.get(f"/api/result/one?source={job}").json
    assert figures["mean"] == pytest.approx(scores["metrics"]["mae"], rel=1e-5)
    assert site.get(f"/api/plot/one?source={job}&series=2").json["rows"] > 0
    assert site.get(f"/tested/{job}/one").body == path.read_bytes()
    assert site.get(f"/job/{job}").headers["location"] == "/result/one"


def test_an_export_is_a_command_and_its_files_a_download(site, folder):
    options = {"int8": True, "name": "cell", "state": ""}
    job = site.post("/api/export/one", {"to": "c", "options": options}).json["job"]
    command = site.workspace.store.read(job).command
    out = folder / "one" / "exports" / "c"
    assert command[:6] == ("export", str(folder / "one"), "--to", "c", "--out", str(out))
    assert {"--int8", "--name=cell", "--force"} <= set(command)
    again = site.post("/api/export/one", {"to": "c"})
    assert "waits or runs already" in again.json["error"]
    out.mkdir()
    (out / "model.c").write_text("int x;")
    files = [{"name": "model.c", "bytes": 6}]
    parity = {"windows": 5, "max_rel": 1e-7, "limit": 1e-5}
    (out / "export.json").write_text(json.dumps({"parity": parity, "files": files}))
    (out / "link").symlink_to("/etc/passwd")
    entry = next(one for one in site.get("/api/exports/one").json["exports"] if one["to"] == "c")
    assert entry["export"]["parity"] == parity
    assert entry["export"]["bytes"] == 6
    packed = zipfile.ZipFile(io.BytesIO(site.get("/export/c/one").body))
    assert sorted(packed.namelist()) == ["c/export.json", "c/model.c"]
    assert site.get("/export/onnx/one").status == 404
    assert site.get("/export/..%2f..%2fx/one").status == 404


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"to": "exe"},
        {"to": 5},
        {"to": "onnx", "options": {"int8": True}},
        {"to": "c", "options": {"name": "x" * 1000}},
        {"to": "c", "options": {"int8": "--force"}},
        {"to": "hub", "options": [1]},
    ],
)
def test_wrong_exports_are_refused(site, values):
    assert site.post("/api/export/forecast", values).status == 400
    assert site.get("/export/onnx/forecast").status == 404


def test_predictions_without_truth_are_plotted_without_errors(site, folder):
    for name in ("forecast", "states"):
        job = site.post(f"/api/test/{name}", {"data": "table.csv", "score": False}).json["job"]
        table = slipstream.predict(folder / name, folder / "table.csv", every=True, quiet=True)
        place, store = site.workspace.store.jobs / job, site.workspace.store
        pq.write_table(table, place / "predictions.parquet")
        (place / "output.json").write_text(json.dumps({"rows": len(table), "notes": []}))
        assert store.claim(job)
        store.record_end(job, 0)
        figures = site.get(f"/api/result/{name}?source={job}").json
        assert not figures["has_truth"]
        assert figures["names"] == ["s0", "s1", "s2"]
        plot = site.get(f"/api/plot/{name}?source={job}&series=1").json
        assert plot["rows"] > 0
        assert plot["mean_error"] is None
        assert set(plot["true"]) == {None}
        (test, *_) = site.get(f"/api/tests/{name}").json["tests"]
        assert test["rows"] == len(table)


def read_outcome(page):
    """The colour of the verdict on a page: good, bad, or none."""
    (shade,) = re.findall(
        r'<p class="message ([a-z]*)">The model|<p class="message ([a-z]*)">Too', page
    )
    return "".join(shade)


@pytest.mark.parametrize(
    ("verdict", "shade", "relative"),
    [("better", "good", -0.1), ("worse", "bad", 0.1), ("no difference shown", "", -0.01)],
)
def test_green_is_only_what_is_shown_to_be_better(site, folder, verdict, shade, relative):
    """In the app, the lists of runs and the report alike, whatever the error's first digit says."""
    name = f"shown {verdict}"
    shutil.copytree(folder / "one", folder / name)
    metrics = runs.read_metrics(folder / name)
    against, baselines = metrics["against_baselines"], metrics["baselines"]
    sections = {
        "scaled_mse": ("scaled", "mse"),
        "rmse": ("metrics", "rmse"),
        "mae": ("metrics", "mae"),
    }
    for metric, gaps in against["differences"].items():
        section, key = sections.get(metric, ("scaled", "mae"))
        for other, gap in gaps.items():
            value = metrics[section]["test"][key]
            baselines[other][section]["test"][key] = value / (1 + relative)
            spread = [relative - 0.05, relative + 0.05]
            gap |= {"difference": relative, "interval": spread, "verdict": verdict}
            gap |= {"relative": relative, "relative_interval": spread}
    metrics["metrics"]["test"]["r2"] = 0.9
    against["verdict"] = verdict
    beaten = list(against["differences"]["mae"]) if verdict == "worse" else []
    runs.update_metrics(
        folder / name,
        against_baselines=against,
        baselines=baselines,
        metrics=metrics["metrics"],
        beaten_by=beaten,
    )
    slipstream.report(folder / name)
    report = (folder / name / "report.html").read_text(encoding="utf-8")
    assert f'<div class="verdict{({"good": " good", "bad": " lost"}).get(shade, "")}">' in report
    for screen in ("run", "result"):
        assert read_outcome(site.get(f"/{screen}/{quote(name)}").text) == shade
    (row,) = (one for one in site.get("/api/runs").json["runs"] if one["name"] == name)
    assert row["verdict"] == verdict
    assert ("(not shown)" in row["against"]) == (not shade)
    details = slipstream.show_run(folder / name)
    assert details["outcome"] == verdict
    sentence = {"good": "beats every baseline", "bad": "loses to"}.get(
        shade, "is not shown to beat"
    )
    assert sentence in details["verdict"]
    assert "95 % interval" in details["verdict"]
    shutil.rmtree(folder / name)


def test_quantiles_show_their_pinball_loss_and_coverage(site):
    page = site.get("/result/quantiles").text
    assert "Pinball loss" in page
    assert "CRPS" in page
    assert "apart on average" in page
    assert "Between the quantiles 0.1 and 0.9" in page
    assert "80 % should be" in page


@pytest.mark.parametrize("name", ["repeats", "folds"])
def test_intervals_show_their_coverage_width_and_crps(site, folder, name):
    page = site.get(f"/result/{name}").text
    summary = runs.read_metrics(folder / name)
    for level, share in summary["coverage"].items():
        assert f"Inside the {level} % interval" in page
        assert f"{100 * share:.1f} %" in page
        assert f"mean width {format_number(summary['width'][level])}" in page
    assert "CRPS of the intervals" in page
    assert format_number(summary["crps"]) in page


@pytest.mark.parametrize("name", ["forecast", "states"])
def test_a_bar_is_as_long_as_the_metric_that_it_stands_beside(site, name):
    page = site.get(f"/result/{name}").text
    table = page.partition("Model and baselines, test set</h2>")[2].partition("</table>")[0]
    headline, *headings = re.findall(r'<th scope="col" class="[a-z -]+">(.+?)</th>', table)
    place = headings.index(headline)
    rows = table.partition("<tbody>")[2].split("</tr>")[:-1]
    cells = [re.findall(r'<td class="number">(.+?)</td>', row)[place] for row in rows]
    errors = np.array([float(cell.replace(",", "")) for cell in cells])
    bars = np.array([float(one) for one in re.findall(r'<rect width="([\d.]+)%"', table)])
    assert len(bars) == len(rows) > 2
    np.testing.assert_allclose(bars, 100 * errors / errors.max(), atol=0.2)


def test_every_worst_window_shows_its_own_forecast(site, folder):
    """Windows are drawn end to end, of which most of the worst ones are none."""
    table = read_table(folder, "forecast")
    table["start"] = table["row"] - table["step"] + 1
    figures, changed = site.get("/api/result/forecast").json, 0
    for one in figures["worst"]:
        name = figures["names"][one["series"]]
        mine = table[(table["series"] == name) & (table["start"] == one["row"])]
        place = f"/api/plot/forecast?series={one['series']}&low={one['low']}&high={one['high']}"
        drawn, plain = (site.get(f"{place}{more}").json for more in (f"&window={one['row']}", ""))
        np.testing.assert_allclose(drawn["predicted"], mine["a_predicted"], rtol=1e-4)
        changed += plain["predicted"] != drawn["predicted"]
    assert changed > 0


def test_the_table_of_an_encoder_names_the_set_that_it_is_about(tmp_path):
    path = tmp_path / "table.parquet"
    pq.write_table(waves(300), path)
    config = small_config(tmp_path, data={"path": str(path)}, train={"epochs": 1})
    settings = config.model_dump(exclude_unset=True) | {"pretrain": {"length": 2}}
    settings["data"] = {"path": str(path), "context": 12, "time": "time"}
    slipstream.pretrain(settings, quiet=True).run.rename(tmp_path / "encoder")
    site, stop = start_site(tmp_path.resolve())
    try:
        page = site.get("/run/encoder").text
    finally:
        stop()
    assert "<h2>Test set</h2>" not in page
    assert "alidation" in page.partition('<section id="result">')[2].partition("</h2>")[0]
