"""Runs named by their folder, the beginning of their name, or `last`."""

from __future__ import annotations

import os

import pytest

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.run_names import find_kind, find_run, name_run


def make(out, name, *, at=0, **files):
    """A run folder of small files, `at` seconds after the others."""
    folder = out / name
    folder.mkdir(parents=True)
    texts = {file.replace("_", "."): text for file, text in files.items()}
    for file, text in (texts or {"config.toml": "seed = 0\n"}).items():
        (folder / file).write_text(text)
        os.utime(folder / file, (1e9 + at, 1e9 + at))
    return folder


@pytest.fixture
def out(tmp_path):
    """A folder of three runs, of which the search is the newest."""
    out = tmp_path / "runs"
    make(out, "heat-20260101T000000Z", at=1)
    make(out, "heat-20260102T000000Z", at=2)
    make(out, "load-20260103T000000Z", at=3, config_toml="", study_log="")
    make(out, ".hidden", at=9)
    (out / "notes").mkdir()
    return out


def test_last_is_the_run_that_was_started_or_resumed_most_recently(out):
    assert find_run("last", out=out).name == "load-20260103T000000Z"
    assert find_run(out / "last").name == "load-20260103T000000Z"
    resumed = out / "heat-20260101T000000Z" / "config.toml"
    os.utime(resumed, (1e9 + 4, 1e9 + 4))
    assert find_run("last", out=out) == resumed.parent


def test_last_of_a_kind_passes_over_others(out):
    assert find_run("last", out=out, kinds=("train",)).name == "heat-20260102T000000Z"
    assert find_run("last", out=out, kinds=("probe",)).name == "load-20260103T000000Z"


def test_the_beginning_of_a_name_means_the_only_run_that_has_it(out):
    assert find_run("load", out=out) == out / "load-20260103T000000Z"
    assert find_run("heat-20260102", out=out) == out / "heat-20260102T000000Z"
    assert find_run(str(out / "lo")) == out / "load-20260103T000000Z"


def test_an_ambiguous_beginning_lists_the_candidates(out):
    with pytest.raises(UserError) as caught:
        find_run("heat", out=out)
    lines = str(caught.value).splitlines()
    assert "2 runs in" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "heat-20260102T000000Z",
        "heat-20260101T000000Z",
    ]


def test_a_whole_name_is_no_beginning_of_another(out):
    make(out, "heat-20260101T000000Z-2", at=9)
    assert find_run("heat-20260101T000000Z", out=out).name == "heat-20260101T000000Z"


@pytest.mark.usefixtures("out")
def test_a_run_folder_comes_before_a_name_in_out(monkeypatch, tmp_path):
    make(tmp_path, "load")
    make(tmp_path, "last")
    monkeypatch.chdir(tmp_path)
    assert find_run("load") == (tmp_path / "load").relative_to(tmp_path)
    assert find_run("last").name == "last"
    (tmp_path / "load" / "config.toml").unlink()  # now it is some other folder
    assert find_run("load").name == "load-20260103T000000Z"


@pytest.mark.parametrize("name", ["nothing", "n" * 5000, "a\0b", "nowhere/last", "nowhere/a"])
def test_a_name_that_no_run_has_is_refused(out, name):
    with pytest.raises(UserError, match=r"there is no such run folder|holds no run"):
        find_run(name, out=out)


def test_a_folder_that_is_no_run_and_a_probe_are_refused_by_name(out):
    with pytest.raises(UserError, match="is not a run folder"):
        runs.open_run(out / "notes")
    probe = make(out, "bars-probe", labels_toml="", encoder_toml="")
    with pytest.raises(UserError, match=r"is a probe; name one of its runs: .*fine-tuned"):
        runs.open_run(probe)


def test_the_kind_of_a_run_is_read_from_its_small_files(out):
    masked = make(out, "a", config_toml='[train]\nobjective = "masked"\n')
    shared = make(out, "b", config_toml="", events_jsonl='{"event": "search", "at_s": 0.0}\n')
    probe = make(out, "c", labels_toml="")
    assert [find_kind(one) for one in (masked, shared, probe)] == ["pretrain", "search", "probe"]
    assert find_kind(out / "load-20260103T000000Z") == "search"
    assert find_kind(out / "heat-20260101T000000Z") == "train"


def test_an_encoder_is_named_like_any_run_and_stored_by_its_path(out, monkeypatch, tmp_path):
    encoder = make(
        out,
        "bars-20260104T000000Z",
        config_toml='[data]\ncontext = 16\n[model]\nkind = "gru"\n[train]\nobjective = "masked"\n',
    )
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.toml"
    job.write_text('[train]\ninit_from = "last"\n')
    for source in (job, {"train": {"init_from": "bar"}}, {"train": {"init_from": "runs/last"}}):
        config = configs.load(source)
        assert config.train.init_from == str(encoder)
        assert config.model.kind == "gru"
    with pytest.raises(UserError, match=r"train.init_from: heat: 2 runs in runs"):
        configs.load({"train": {"init_from": "heat"}})


def test_the_path_of_an_encoder_is_not_completed(out):
    """A run's config names its encoder by its path, which means that folder or none."""
    make(out, "bars-20260104T000000Z-2", config_toml="[data]\n[model]\n")
    gone = str(out / "bars-20260104T000000Z")
    with pytest.raises(UserError, match="there is no such run"):
        configs.load({"train": {"init_from": gone}})


def test_the_model_of_a_search_is_named_after_the_search(tmp_path):
    search = tmp_path / "load-1"
    model = search / "retrained" / "best"
    model.mkdir(parents=True)
    assert name_run(model) == "best"
    (search / "config.toml").touch()
    assert name_run(model) == "load-1/retrained/best"
    assert name_run(search) == "load-1"
