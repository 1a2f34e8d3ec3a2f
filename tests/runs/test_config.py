from __future__ import annotations

import random
import re

import pyarrow.parquet
import pytest

import slipstream
from slipstream import UserError, runs
from slipstream import config as configs
from slipstream.base import storage
from slipstream.engine import checkpoint
from slipstream.models import files
from tests.conftest import slow, small_config, waves
from tests.training.test_resume import configured, interrupted

FLIPS = 400


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with a model and checkpoints that can be resumed."""
    return interrupted(configured(tmp_path_factory.mktemp("run")), waves(400), 30)


def flipped(content, draw):
    bad = bytearray(content)
    bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
    return bytes(bad)


@pytest.mark.parametrize("bound_to", ["a checkpoint", slow("the model"), slow("nothing yet")])
def test_a_flipped_bit_in_the_config_is_refused_or_changes_nothing(stopped, bound_to):
    path, draw = stopped.folder / "config.toml", random.Random(bound_to)
    whole, wanted = path.read_bytes(), runs.load_config(stopped)
    origin = {
        "a checkpoint": checkpoint.read_newest(stopped)[0].metadata,
        "the model": files.read_origin(stopped),
        "nothing yet": None,
    }[bound_to]
    refused = 0
    try:
        for _ in range(FLIPS):
            path.write_bytes(flipped(whole, draw))
            try:
                assert runs.load_config(stopped, origin=origin) == wanted
            except UserError:
                refused += 1
    finally:
        path.write_bytes(whole)
    assert refused > 0.9 * FLIPS


def test_whoever_edits_a_run_is_told_what_differs_and_what_to_do(stopped):
    path, table = stopped.folder / "config.toml", waves(400)
    whole = path.read_text()
    edited = re.sub(r"^lr = .*$", "lr = 0.5", whole, flags=re.MULTILINE)
    assert edited != whole
    told = r"config.toml: was changed .*\(train.lr is 0.5, was 0.001\); undo that, .* overrides"
    path.write_text(edited)
    try:
        for use in (
            lambda: slipstream.train(data=table, resume=stopped.folder),
            lambda: slipstream.predict(stopped.folder, table),
            lambda: slipstream.evaluate(stopped.folder, table),
        ):
            with pytest.raises(UserError, match=told):
                use()
    finally:
        path.write_text(whole)


def test_comments_in_a_run_s_config_do_no_harm(stopped):
    path = stopped.folder / "config.toml"
    whole = path.read_text()
    path.write_text("# mine\n" + whole)
    try:
        assert len(slipstream.predict(stopped.folder, waves(400)))
    finally:
        path.write_text(whole)


def test_a_run_that_is_killed_after_its_epochs_were_raised_still_goes_on(tmp_path):
    table = waves(400)
    run = interrupted(configured(tmp_path), table, 12)
    config = configs.load(runs.load_config(run), ("train.epochs=6",))
    runs.write_text(
        run.folder / "config.toml", runs.format_config(config)
    )  # what a resume does first
    assert slipstream.train(data=table, resume=run.folder).summary["epochs"] == 6
    assert slipstream.evaluate(run.folder, table)["windows"]


def test_runs_of_version_0_1_are_used_as_they_are(tmp_path):
    table = waves(400)
    result = slipstream.train(small_config(tmp_path), table)
    run = runs.open_run(result.run)
    path = run.folder / "config.toml"
    path.write_text(path.read_text().rpartition("# SHA-256")[0])
    (run.folder / "manifest.json").unlink()
    model = {path.name: path.read_bytes() for path in run.model.iterdir()}
    del model["origin.json"], model["manifest.json"]
    with runs.replace_atomically(run.model) as folder:
        folder.mkdir()
        for name, content in model.items():
            (folder / name).write_bytes(content)
        sums = {name: storage.compute_sha256(folder / name) for name in model}
        runs.write_json(folder / "manifest.json", sums)
    assert len(slipstream.predict(run.folder, table))
    assert slipstream.evaluate(run.folder, table)["windows"]


def test_evaluate_says_when_the_run_s_data_changed_since_training(tmp_path):
    path = tmp_path / "data.parquet"
    table = waves(400)
    pyarrow.parquet.write_table(table, path)
    config = small_config(tmp_path / "runs", data={"path": str(path)})
    result = slipstream.train(config)
    assert not [note for note in slipstream.evaluate(result.run)["notes"] if "changed" in note]
    columns = table.to_pydict()
    columns["a"][-3] += 0.5  # a test row: neither scaler nor windows differ
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    notes = slipstream.evaluate(result.run)["notes"]
    assert [note for note in notes if "the data of this run have changed since training" in note]
    strided = slipstream.evaluate(result.run, overrides=("data.stride=2",))["notes"]
    assert not [note for note in strided if "changed" in note]
