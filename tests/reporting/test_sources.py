from __future__ import annotations

import re
import shutil

import pytest

import slipstream
from slipstream import UserError, runs
from slipstream.reporting import sources
from tests.conftest import small_config, waves


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("runs"), engine={"log_every": 4})
    return slipstream.train(config, waves(400)).run


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def change_a_digit(path):
    """Of the last number: a figure that could just as well be true."""
    text = path.read_text()
    place = [found.start() for found in re.finditer(r"[1-8](?=\d*\D)", text)][-1]
    path.write_text(f"{text[:place]}{int(text[place]) + 1}{text[place + 1 :]}")


@pytest.mark.parametrize("name", ["metrics.json", "plan.json", "config.toml"])
def test_a_changed_digit_is_not_drawn(copy, name):
    change_a_digit(copy / name)
    with pytest.raises(UserError, match=rf"{name}: is damaged .* restore it from a copy"):
        slipstream.report(copy)


def test_predictions_with_a_flipped_bit_are_not_drawn(copy):
    path = copy / "predictions.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"predictions.parquet: is damaged"):
        slipstream.report(copy)
    path.unlink()
    with pytest.raises(UserError, match=r"predictions.parquet: is missing"):
        slipstream.report(copy)


@pytest.mark.parametrize("content", ["", "[]", "{", "7", '{"metrics.json": 3}'])
def test_a_damaged_manifest_is_named(copy, content):
    (copy / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest.json|metrics.json: is damaged|config.toml"):
        slipstream.report(copy)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.json", b"{}"),
        ("metrics.json", b"[]"),
        ("metrics.json", b'{"name": 1, "metrics": 3}'),
        ("predictions.parquet", b"PAR1"),
        ("predictions.parquet", b""),
    ],
)
def test_a_damaged_file_of_version_0_1_is_named_too(copy, name, content):
    (copy / "manifest.json").unlink()
    (copy / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        slipstream.report(copy)


def test_a_report_is_drawn_from_what_is_left_of_the_log(copy):
    log = copy / "events.jsonl"
    whole = log.read_bytes()
    for left in (b"", whole.replace(b'"event"', b'"evemt"'), whole.replace(b'"loss"', b'"lors"')):
        log.write_bytes(left)
        page = slipstream.report(copy).read_text()
        assert ("damaged lines (" in page) == bool(left)


def test_lines_of_version_0_1_with_other_keys_are_left_out(copy):
    """They have no checksum; what curves need must be there."""
    run = runs.open_run(copy)
    lines = ['{"event": "epoch", "at_s": 1.0, "epoch": 1, "val_lozz": 0.5, "train_loss": 0.5}']
    lines.append('{"event": "epoch", "at_s": 1.0, "epoch": "x", "val_loss": 0, "train_loss": 1}')
    lines.append('{"event": "log", "at_s": 1.0, "epoch": 1, "loss": 0.5, "lr": 0.1}')
    run.log.write_text("\n".join(lines) + "\n")
    events, _ = sources.read_plot_events(run)
    assert [event["event"] for event in events] == ["log"]


def test_a_run_that_goes_on_has_other_sums_in_the_end(copy):
    table = waves(400)
    slipstream.train(data=table, resume=copy, overrides=("train.epochs=3",))
    assert slipstream.report(copy).exists()
