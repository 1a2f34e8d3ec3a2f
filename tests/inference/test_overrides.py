from __future__ import annotations

import pytest

import slipstream
from slipstream import UserError
from tests.conftest import small_config, waves


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overrides")
    path = folder / "data.csv"
    waves().to_pandas().to_csv(path, index=False)
    config = small_config(folder, data={"path": str(path)}, model={"kind": "linear"})
    return slipstream.train(config).run


@pytest.mark.parametrize("setting", ["data.context=4", "model.normalize=last", "data.scale=minmax"])
def test_what_a_model_was_trained_with_cannot_be_changed(run, setting):
    name = setting.partition("=")[0]
    for use in (slipstream.predict, slipstream.evaluate):
        with pytest.raises(UserError, match=f"{name} cannot be changed any more: .* trained with"):
            use(run, waves(), overrides=(setting,))


def test_new_data_have_no_split(run):
    for use in (slipstream.predict, slipstream.evaluate):
        with pytest.raises(UserError, match=r"data.split has no effect on new data"):
            use(run, waves(), overrides=("data.split.train=0.5", "data.split.val=0.3"))


def test_how_rows_are_read_can_be_changed(run):
    settings = ("data.missing=forward", "data.gap_tolerance=2.0", "data.context=16")
    assert len(slipstream.predict(run, waves(), overrides=settings))
    few, every = (
        slipstream.evaluate(run, overrides=some)["windows"] for some in ((), ("data.stride=2",))
    )
    assert every == -(-few // 2)


@pytest.mark.filterwarnings('ignore:"new.csv"')
def test_a_new_file_may_be_laid_out_in_another_way(run, tmp_path):
    table = waves(100)
    rows = zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
    lines = [";".join(map(repr, row)).replace(".", ",") for row in rows]
    lines[20] = lines[20].rpartition(";")[0] + ";-999"
    text = "\n".join(["Größe", "t;u;v;w", ";".join(table.column_names), *lines])
    (tmp_path / "new.csv").write_bytes(text.encode("cp1252"))
    settings = {
        "data.encoding": "cp1252",
        "data.skip_rows": 2,
        "data.decimal": ",",
        "data.na": [-999],
        "data.missing": "forward",
    }
    predicted = slipstream.predict(run, tmp_path / "new.csv", overrides=settings, every=True)
    same = slipstream.predict(run, table.slice(0, 20), every=True)
    assert predicted["a_predicted"][: len(same)] == same["a_predicted"]
