"""Compare over HTTP: what is shown of runs, and what the charts are sent."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.app.conftest import Site, write_run

MARKUP = "<script>alert(1)<"


def write_predictions(
    run: Path, error: float, *, rows: int = 2_000, series: str = "s", dates: bool = False
) -> None:
    row = np.arange(rows)
    truth = np.sin(row / 9)
    noise = np.random.default_rng(0).normal(size=rows)
    columns = {"series": [series] * rows, "row": row}
    if dates:
        columns["time"] = (row * 3600 * 1_000_000).astype("datetime64[us]")
    columns |= {"y": truth, "y_predicted": truth + error * noise}
    pq.write_table(pa.table(columns), run / "predictions.parquet")


def link(*ids: str, **values: object) -> str:
    return "?" + urlencode([("run", one) for one in ids] + list(values.items()))


@pytest.fixture
def pair(site: Site) -> tuple[Path, Path]:
    out = site.workspace.folder / "runs"
    runs = write_run(out, "one"), write_run(out, "two", test=2.0)
    for run, error in zip(runs, (1.0, 1.5), strict=True):
        write_predictions(run, error)
    return runs


@pytest.mark.usefixtures("pair")
def test_two_runs_have_metrics_differences_and_a_command(site):
    page = site.get("/compare" + link("runs/one", "runs/two"))
    assert page.status == 200
    assert "2 runs compared" in page.text
    assert '<td class="number best">1.000' in page.text
    assert "worse" in page.text
    assert "2,000 predicted rows" in page.text
    assert "All settings are the same." in page.text
    assert f"slipstream runs compare {site.workspace.folder}/runs/one" in page.text
    assert "/compare?run=runs%2Ftwo&amp;run=runs%2Fone" in page.text  # two as reference


def test_settings_that_differ_are_listed_flat(site, pair):
    config = pair[1] / "config.toml"
    config.write_text(config.read_text().replace('kind = "lstm"', 'kind = "gru"'))
    page = site.get("/compare" + link("runs/one", "runs/two")).text
    assert "<code>model.kind</code>" in page
    assert "<code>train.lr</code>" not in page


@pytest.mark.usefixtures("pair")
def test_without_two_runs_there_is_a_choice(site):
    for path in ("/compare", "/compare?run=runs/one", "/compare?run=runs/one&run=gone"):
        page = site.get(path)
        assert page.status == 200
        assert 'type="checkbox" name="run" value="runs/two"' in page.text
    assert "gone: there is no such run" in page.text
    assert site.get("/compare" + link(*(f"r{n}" for n in range(9)))).status == 400


def test_an_empty_folder_says_what_to_do(site):
    assert "No runs here yet." in site.get("/compare").text


@pytest.mark.usefixtures("pair")
def test_curves_are_the_losses_of_each_epoch(site):
    answer = site.get("/api/compare/curves" + link("runs/one", "runs/two")).json["curves"]
    assert [(point["epoch"], point["val"]) for point in answer["runs/two"]] == [(1, 2.0), (2, 1.0)]
    assert answer["runs/one"][0]["low"] is None


def test_predictions_are_those_of_the_file(site, pair):
    answer = site.get("/api/compare/predictions" + link("runs/one", "runs/two")).json
    assert answer["series"] == ["s"]
    assert answer["targets"] == ["y"]
    table = pq.read_table(pair[1] / "predictions.parquet")
    assert answer["x"] == table["row"].to_pylist()
    assert answer["truth"] == table["y"].to_pylist()
    assert answer["lines"]["runs/two"] == table["y_predicted"].to_pylist()
    query = link("runs/one", "runs/two", show="errors", **{"from": 100, "to": 110})
    errors = site.get("/api/compare/predictions" + query).json
    assert errors["x"] == list(range(99, 112))
    expected = (table["y_predicted"].to_numpy() - table["y"].to_numpy())[99:112]
    assert errors["lines"]["runs/two"] == expected.tolist()


def test_a_long_series_is_sent_with_its_extremes(site, pair):
    for run in pair:
        write_predictions(run, 0.01, rows=100_000, dates=True)
    table = pq.read_table(pair[0] / "predictions.parquet").to_pandas()
    table.loc[54_321, "y_predicted"] = 77.0
    pq.write_table(pa.Table.from_pandas(table), pair[0] / "predictions.parquet")
    answer = site.get("/api/compare/predictions" + link("runs/one", "runs/two")).json
    assert answer["kind"] == "date"
    assert len(answer["x"]) <= 3_000
    assert max(answer["lines"]["runs/one"]) == 77.0
    assert answer["x"][answer["lines"]["runs/one"].index(77.0)] == 54_321 * 3600


def test_runs_on_other_rows_are_compared_with_a_warning(site, pair):
    write_predictions(pair[1], 1.0, series="another")
    page = site.get("/compare" + link("runs/one", "runs/two")).text
    assert "tested on different rows, so their errors cannot be compared" in page
    lines = site.get("/api/compare/predictions" + link("runs/one", "runs/two", series="another"))
    assert list(lines.json["lines"]) == ["runs/two"]


def test_no_winner_is_marked_between_runs_whose_targets_differ(site, pair):
    both = "/compare" + link("runs/one", "runs/two")
    assert 'class="number best"' in site.get(both).text
    table = pq.read_table(pair[1] / "predictions.parquet").to_pandas()
    table["y"] = table["y"].rolling(12, min_periods=1).mean()
    pq.write_table(pa.Table.from_pandas(table), pair[1] / "predictions.parquet")
    page = site.get(both).text
    assert "have different true values in the same rows" in page
    assert 'class="number best"' not in page
    assert "No value is marked as the best" in page
    answer = site.get("/api/compare/predictions" + link("runs/one", "runs/two")).json
    assert answer["truth_of"] == "runs/one"
    assert answer["truth"] == pq.read_table(pair[0] / "predictions.parquet")["y"].to_pylist()


def test_markup_in_names_is_text(site, pair):
    odd = pair[1].rename(pair[1].with_name(MARKUP))
    write_predictions(odd, 1.0, series=MARKUP * 500)
    ids = ("runs/one", f"runs/{MARKUP}")
    page = site.get("/compare" + link(*ids))
    assert page.status == 200
    assert MARKUP not in page.text
    answer = site.get("/api/compare/predictions" + link(*ids))
    assert MARKUP * 500 in answer.json["series"]


def test_running_stopped_and_damaged_runs_are_compared_as_far_as_they_are(site, pair):
    write_run(pair[0].parent, "three", finished=False)
    (pair[1] / "metrics.json").write_text("{")
    (pair[1] / "predictions.parquet").write_text("no table")
    ids = ("runs/one", "runs/two", "runs/three")
    page = site.get("/compare" + link(*ids))
    assert page.status == 200
    assert "two is damaged" in page.text
    assert "three is stopped" in page.text
    assert site.get("/api/compare/predictions" + link(*ids)).status == 200
