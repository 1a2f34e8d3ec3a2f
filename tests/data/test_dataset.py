from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from slipstream import UserError
from slipstream import config as configs
from slipstream.data import dataset as datasets
from tests.conftest import real_file, small_config, small_dataset, waves

STEPS = [("h", 1, 24), ("m", 15, 96), ("D", 1, 7), ("D", 7, 52), ("s", 1, 86400), ("h", 7, None)]


@pytest.mark.parametrize(("unit", "count", "period"), STEPS)
def test_the_season_follows_from_the_step(unit, count, period):
    time = np.datetime64("2020-01-01", unit) + np.arange(100) * np.timedelta64(count, unit)
    table = waves(100).set_column(0, "time", pa.array(time.astype("datetime64[us]")))
    assert small_dataset(table=table).period == period


def test_the_season_can_be_set_and_plain_numbers_have_none():
    assert small_dataset(small_config(data={"period": 12})).period == 12
    assert small_dataset().period is None


def test_monthly_rows_have_a_yearly_season_and_no_gaps():
    months = np.arange("2000-01", "2012-01", dtype="datetime64[M]").astype("datetime64[D]")
    table = waves(144).set_column(0, "time", pa.array(months))
    dataset = small_dataset(table=table)
    assert dataset.period == 12
    assert sum(map(len, dataset.memory.starts.values())) > 90


def test_a_split_without_a_window_says_why():
    with pytest.raises(UserError, match=r"leaves no val window: it has 4 rows.* give it more rows"):
        small_dataset(small_config(data={"split": {"rows": [60, 4, 60]}, "horizon": 5}))
    table = waves(200).to_pydict()
    table["time"] = [7 * (t // 5) + t % 5 for t in table["time"]]
    with pytest.raises(UserError, match=r"39 gaps in time break the series up .*gap_tolerance"):
        small_dataset(table=table)


def test_several_files_with_an_id_make_one_long_table(tmp_path):
    text = waves(200).to_pandas()
    text["id"] = "x"
    text[:100].to_csv(tmp_path / "1.csv", index=False)
    text[100:].to_csv(tmp_path / "2.csv", index=False)
    settings = {"path": str(tmp_path), "inputs": ["a"], "targets": ["a"]}
    one = datasets.load_dataset(small_config(data=settings | {"id": "id"}))
    two = datasets.load_dataset(small_config(data=settings))
    three = datasets.load_dataset(small_config(data=settings | {"id": ["file", "id"]}))
    assert one.index.series_names == ("x",)
    assert two.index.series_names == ("1.csv", "2.csv")
    assert three.index.series_names == ("1.csv/x", "2.csv/x")


def test_an_unknown_embedded_set_is_named():
    with pytest.raises(
        UserError, match=r'the embedded data sets are "simulated:cell" and "simulated:bars"'
    ):
        datasets.load_dataset(small_config(data={"path": "simulated:sell"}))


def test_etth1_has_the_windows_of_the_literature():
    config = small_config(
        data={
            "path": str(real_file("ETTh1.csv")),
            "time": "date",
            "context": 336,
            "horizon": 96,
            "split": {"rows": [8640, 2880, 2880]},
        }
    )
    dataset = datasets.load_dataset(config)
    assert {name: len(starts) for name, starts in dataset.memory.starts.items()} == {
        "train": 8209,
        "val": 2785,
        "test": 2785,
    }
    assert dataset.period == 24


def test_lg_cells_fall_into_series_without_windows_over_gaps():
    config = small_config(
        data={
            "path": str(real_file("lg_hg2_1hz.parquet")),
            "time": "time_s",
            "id": ["test_id", "profile"],
            "where": {"ambient_degC": -10},
            "inputs": ["voltage_V", "current_A", "temperature_degC"],
            "targets": ["soc"],
            "context": 300,
            "horizon": 0,
            "split": {"by": "profile", "val": ["Mixed3"], "test": ["Mixed4"]},
            "short": "drop",
        }
    )
    dataset = datasets.load_dataset(config)
    time, names = dataset.memory.time, dataset.index.series_names
    assert "602/Mixed4" in names
    assert any("usual time step" in note for note in dataset.notes)
    for starts in dataset.memory.starts.values():
        rows = starts.numpy()
        spans = time[rows + 299] - time[rows]
        cap = np.array(["Cap_1C" in name for name in names])
        slow = cap[np.searchsorted(dataset.memory.series.offsets.numpy(), rows, side="right") - 1]
        assert (spans[~slow] == 299).all()


def test_pm25_needs_a_word_on_missing_values():
    settings = {"path": str(real_file("beijing_pm25.csv")), "time": "No", "targets": ["pm2.5"]}
    with pytest.raises(UserError, match=r'line 2, column "pm2.5": is missing .* pm2.5 2,067'):
        datasets.load_dataset(small_config(data=settings))
    dataset = datasets.load_dataset(small_config(data=settings | {"missing": "forward"}))
    assert dataset.notes[0] == "not used as inputs: cbwd"
    assert dataset.notes[1].startswith("left out windows of which a target is missing: 2,349 of")
    assert "repeated the last known value: pm2.5 2,043" in dataset.notes[2]
    assert "left out the first 24 rows" in dataset.notes[2]
    dropped = datasets.load_dataset(small_config(data=settings | {"missing": "drop"}))
    assert len(dropped.memory.starts["train"]) < len(dataset.memory.starts["train"])


@pytest.mark.parametrize(
    ("names", "data"),
    [
        (["time", "a", "b", "row"], {}),
        (["time", "a", "b", "series"], {"targets": ["series"]}),
        (["time", "a", "b", "step"], {}),
        (["at", "a", "b", "time"], {"time": "at"}),
        (["time", "a", "b", "fold"], {"split": {"walk_forward": 2}}),
        (["time", "a", "b", "a_predicted"], {}),
        (["time", "a", "b", "a_lo80"], {}),
        (["time", "a", "b", "b_hi95"], {"targets": ["b_hi95", "b"]}),
        (["time", "a", "b", "a_q2.5"], {}),
    ],
)
def test_a_target_that_predictions_would_write_over_is_refused(names, data):
    train = {"loss": "quantile", "quantiles": [0.025, 0.5, 0.975]} if "_q" in names[-1] else {}
    with pytest.raises(UserError, match=f'"{names[-1]}".*name of another column of predictions'):
        small_dataset(small_config(data=data, train=train), waves().rename_columns(names))


def test_quantiles_whose_columns_would_have_one_name_are_refused():
    train = {"loss": "quantile", "quantiles": [0.5, 0.9000001, 0.9000002]}
    with pytest.raises(UserError, match=r'would be named "a_q90"; give train.quantiles'):
        small_dataset(small_config(train=train))


@pytest.mark.parametrize(
    ("names", "data"),
    [
        (["time", "a", "b", "row"], {"targets": ["a"]}),
        (["time", "a", "b", "step"], {"horizon": 0, "targets": ["step"]}),
        (["time", "a", "b", "fold"], {}),
        (["time", "a", "b", "b_predicted"], {"targets": ["a", "b_predicted"]}),
        (["time", "a", "b", "b_lo80"], {"targets": ["a", "b_lo80"]}),
        (["time", "a", "b", "a_q5"], {}),
    ],
)
def test_names_that_clash_with_nothing_are_fine(names, data):
    dataset = small_dataset(small_config(data=data), waves().rename_columns(names))
    assert names[-1] in (*dataset.signature.inputs, *dataset.signature.targets)


def test_the_fingerprint_of_data_stays_so_that_earlier_runs_can_be_resumed():
    """Its moments are whole numbers, which every machine computes alike."""
    table = pa.table({"a": [0.0, 2.0] * 60, "b": [4.0, 4.0, 8.0, 8.0] * 30})
    split = {"train": 0.6, "val": 0.2, "test": 0.2}
    config = configs.load({"data": {"context": 6, "horizon": 2, "targets": ["a"], "split": split}})
    wanted = "b2b2b70219ab7f8d20729fb35c39eed1f05aa445a3f7d510fe2a994b7e02e94a"
    assert datasets.load_dataset(config, table).compute_fingerprint() == wanted


@pytest.mark.parametrize("few", [0, 4096])  # stretches are marked one by one, or counted
@pytest.mark.parametrize("season", [1, 7])
def test_naive_errors_are_those_of_the_row_a_season_before(season, few, monkeypatch):
    monkeypatch.setattr(datasets, "FEW_STRETCHES", few)
    table = waves(900).append_column("unit", [[f"u{i // 300}" for i in range(900)]])
    missing = np.random.default_rng(0).random(900) < 0.03
    table = table.set_column(2, "b", pa.array(np.where(missing, np.nan, table["b"])))
    table = table.filter(pa.array([i % 97 != 5 for i in range(900)]))  # gaps
    config = small_config(
        data={"id": "unit", "inputs": ["a"], "targets": ["a", "b"], "period": season}
    )
    dataset = small_dataset(config, table)
    series, signature = dataset.memory.series, dataset.signature
    starts = dataset.memory.starts["train"].tolist()
    used = {s + signature.lead + h for s in starts for h in range(signature.steps_out)}
    values, pieces = series.targets.double().numpy(), series.segments.numpy()
    errors = {(owner, target): [] for owner in range(3) for target in range(2)}
    for row in used:
        owner = int(series.find_series(torch.tensor([row])))
        if row - season >= pieces[pieces <= row].max():
            for target in range(2):
                errors[owner, target].append(abs(values[row] - values[row - season])[target])
    for (owner, target), found in errors.items():
        assert float(dataset.naive_errors[owner, target]) == pytest.approx(np.nanmean(found))
