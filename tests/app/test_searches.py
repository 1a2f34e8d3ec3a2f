"""Searches and pre-training over HTTP: the space editor, trials as they are written, resume."""

from __future__ import annotations

import json
import math
import threading
import tomllib
from urllib.parse import quote

import pytest

from slipstream import config as configs
from slipstream import runs
from slipstream.app import searches, settings
from slipstream.app.searches import describe_search
from slipstream.config import Config, search_space
from slipstream.events import End
from tests.app.conftest import write_run
from tests.app.searches import (
    PARAMS,
    SPACE,
    add_trial,
    finish_search,
    make_start,
    write_journal,
    write_search,
)

ODD = ["<script>alert(1)</script>", '"onload="x', "a\nb", "ü &amp; ' `", "x" * 200]
FORM = {"data.path": "simulated:cell", "data.targets": '["soc_percent"]'}


def check(site, *rows, **form):
    sent = FORM | {name.replace("__", "."): value for name, value in form.items()}
    return site.post("/api/search/check", {"settings": sent, "space": list(rows)}).json


def make_range(setting, low, high, **more):
    return {"setting": setting, "kind": "range", "low": low, "high": high} | more


def make_list(setting, choices):
    return {"setting": setting, "kind": "choices", "choices": choices}


# the space editor


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        (
            make_range("train.lr", "1e-4", "1e-2", log=True),
            {"low": 1e-4, "high": 1e-2, "log": True},
        ),
        (make_range("model.dropout", "0.0", "0.5"), {"low": 0.0, "high": 0.5}),
        (
            make_range("model.dropout", "0", "0.5", step="0.25"),
            {"low": 0, "high": 0.5, "step": 0.25},
        ),
        (make_range("model.layers", "1", "3"), {"low": 1, "high": 3}),
        (
            make_range("model.hidden.0", "64", "256", step="16"),
            {"low": 64, "high": 256, "step": 16},
        ),
        (make_list("model.kind", "lstm, gru"), ["lstm", "gru"]),
        (make_list("model.hidden", "32, 64"), [32, 64]),
        (make_list("model.hidden", "[32, 64]"), [32, 64]),
        (make_list("model.hidden", "[64, 32], [128]"), [[64, 32], [128]]),
        (make_list("model.bidirectional", "true, false"), [True, False]),
        (make_list("train.patience", '3, "off"'), [3, "off"]),
        (make_range("augment.jitter.<b>a", "0.01", "0.1"), {"low": 0.01, "high": 0.1}),
    ],
)
def test_every_kind_of_entry_becomes_the_config_of_the_command_line(site, row, entry):
    answer = check(site, row)
    assert answer["problems"] == {}
    written = tomllib.loads(answer["toml"])["tune"]["space"]
    assert written == {row["setting"]: entry}
    assert answer["command"].startswith("slipstream tune ")
    again = searches.list_rows(Config.model_validate(tomllib.loads(answer["toml"])).tune.space)
    assert searches.parse_rows(again) == written


@pytest.mark.parametrize("kind", ["lstm", "transformer", "tcn", "linear", "mlp", "nhits"])
def test_the_usual_space_round_trips(kind):
    space = search_space.make_default_space(Config.model_validate({"model": {"kind": kind}}))
    rows = searches.list_rows(space)
    parsed = Config.model_validate({"tune": {"space": searches.parse_rows(rows)}}).tune.space
    assert {
        name: entry if isinstance(entry, tuple) else entry.model_dump()
        for name, entry in parsed.items()
    } == {
        name: entry if isinstance(entry, tuple) else entry.model_dump()
        for name, entry in space.items()
    }


@pytest.mark.parametrize(
    "choice", ["a, b", "true", "1", " x", "[1]", '"', "", "plain", 'q"', "ü\n"]
)
def test_choices_that_look_like_something_else_stay_texts(choice):
    rows = searches.list_rows({"model.pool": (choice, "last")})
    assert searches.parse_rows(rows) == {"model.pool": [choice, "last"]}


@pytest.mark.parametrize(
    ("rows", "at", "message"),
    [
        ([make_range("train.lr", "1", "0.1")], "0", "low = 1 is above high = 0.1"),
        ([make_range("train.lr", "0", "1", log=True)], "0", "log = true needs low"),
        ([make_range("train.lr", "", "1")], "0", "low"),
        ([make_range("train.lr", "abc", "1")], "0", "low"),
        ([make_list("model.kind", "lstm, grü")], "0", 'model.kind is "grü"'),
        ([make_list("model.hidden", "")], "0", "give a list of values"),
        (
            [make_list("train.lr", "1e-3"), make_range("train.lrr", "1", "2")],
            "1",
            'did you mean "train.lr"',
        ),
        ([make_list("data.horizon", "1, 2")], "0", "trials cannot be compared"),
        ([make_list("engine.device", "cpu")], "0", "does not change the model"),
        ([make_list("train.lr", "1e-3"), make_list("train.lr", "1e-2")], "1", "twice"),
        ([make_list(" ", "1")], None, "choose a setting"),
        ([make_list("model.hidden.9", "1")], "0", "entries, counted from 0"),
    ],
)
def test_mistakes_in_the_space_are_named_at_their_row(site, rows, at, message):
    answer = check(site, *rows)
    assert message in answer["problems"]["tune.space"]
    assert list(answer["rows"]) == ([at] if at else [])


def test_messages_are_those_of_the_command_line(site):
    rows = [make_list("data.stride", "1, 2")]
    config = configs.load(FORM_CONFIG | {"tune": {"space": {"data.stride": [1, 2]}}})
    with pytest.raises(Exception, match="stride") as error:
        search_space.make_space(config)
    assert check(site, *rows)["problems"] == {"tune.space": str(error.value)}


FORM_CONFIG = {"data": {"path": "simulated:cell", "targets": ["soc_percent"]}}


def test_settings_that_a_search_does_not_support_are_marked(site):
    row = make_range("train.lr", "1e-4", "1e-2")
    assert "tune.retrain_seeds" in check(site, row, train__repeats="3")["problems"]["train.repeats"]
    assert "tune.trials" in check(site, row, tune__trials="0")["problems"]["tune.trials"]
    assert (
        "needs a list or a step"
        in check(site, row, tune__sampler="grid")["problems"]["tune.sampler"]
    )
    assert "tune.folds" in next(
        iter(check(site, row, tune__pruner="wilcoxon")["problems"].values())
    )


def test_a_class_in_the_space_is_refused_without_permission(site):
    problems = check(site, make_list("model.kind", "lstm, os:System"))["problems"]
    assert "--allow-code" in next(iter(problems.values()))


@pytest.mark.parametrize("space", ["x", [1], [{"setting": 1}], [{}] * 101, [{"low": "1" * 10_001}]])
def test_other_than_rows_of_texts_is_refused(site, space):
    answer = site.post("/api/search/check", {"settings": FORM, "space": space})
    assert "space" in answer.json["problems"]["tune.space"]


def test_without_rows_the_usual_space_is_offered(site):
    answer = check(site, train__lr="0.5")
    assert "space" not in tomllib.loads(answer["toml"]).get("tune", {})
    (lr,) = (row for row in answer["usual"] if row["setting"] == "train.lr")
    assert (lr["low"], lr["high"], lr["log"]) == ("0.05", "5.0", True)


def test_every_setting_that_is_offered_is_accepted():
    names = {one["name"] for one in searches.list_settings()}
    assert {"train.lr", "model.hidden", "data.context", "train.batch"} <= names
    assert not {"seed", "data.path", "data.stride", "engine.device", "tune.trials"} & names
    for name in names:
        value = configs.Config().model_dump()
        for key in name.split("."):
            value = value[key]
        if isinstance(value, int | float | str) and value != "auto":
            config = configs.load(
                FORM_CONFIG | {"tune": {"space": {name: [value]}, "metric": "mse"}}
            )
            assert search_space.make_space(config)


def test_the_form_begins_with_the_space_of_a_run(site):
    write_search(site.workspace.folder / "runs")
    text = site.get(f"/search/new?start={quote('run:runs/job-1')}").text
    given = json.loads(text.partition('id="space-values">')[2].partition("</script>")[0])
    assert searches.parse_rows(given["rows"]) == SPACE
    values = json.loads(text.partition('id="values">')[2].partition("</script>")[0])
    assert values["values"]["tune.trials"] == "4"
    assert values["data"] == "simulated:cell"


def test_a_search_is_a_config_and_a_command(site):
    sent = {"settings": FORM, "space": [make_list("model.hidden", "8, 16")]}
    job = site.workspace.store.read(site.post("/api/search/start", sent).json["job"])
    assert (job.command[0], job.command[2]) == ("tune", "--out")
    config = configs.load(job.command[1])
    assert config.tune.space == {"model.hidden": (8, 16)}
    refused = site.post("/api/search/start", sent | {"space": [make_list("seed", "1")]})
    assert refused.status == 400
    assert "seed" in refused.json["problems"]["tune.space"]


# the trials


@pytest.mark.parametrize("journal", ["study.log", "study-shared.log"])
def test_trials_are_those_that_ended_and_those_in_training(site, journal):
    folder = write_search(site.workspace.folder)
    add_trial(folder, 0, 0.5)
    add_trial(folder, 2, 0.4, state="pruned")
    kinds = json.dumps({"name": "CategoricalDistribution", "attributes": {"choices": ["a", "b"]}})
    whole = json.dumps({"name": "IntDistribution", "attributes": {}})
    write_journal(
        folder,
        {"op_code": 4},
        {"op_code": 4},
        {
            "op_code": 5,
            "trial_id": 1,
            "param_name": "k",
            "param_value_internal": 1,
            "distribution": kinds,
        },
        {
            "op_code": 5,
            "trial_id": 1,
            "param_name": "n",
            "param_value_internal": 2.0,
            "distribution": whole,
        },
        {"op_code": 7, "trial_id": 1, "step": 4, "intermediate_value": 0.75},
        {"op_code": 6, "trial_id": 0, "state": 1, "values": [0.5]},
        torn='{"op_code": 4, "da',
        name=journal,
    )
    search = site.get("/api/trials/job-1").json
    assert [one["state"] for one in search["trials"]] == ["finished", "running", "pruned"]
    running = search["trials"][1]
    assert (running["value"], running["epochs"], running["params"]) == (0.75, 5, {"k": "b", "n": 2})
    assert (search["ended"], search["total"], search["best"]) == (2, 4, 0)
    assert search["phase"] == "searching"
    assert search["counts"] == {"finished": 1, "running": 1, "pruned": 1}


def test_axes_are_those_of_the_space(site):
    folder = write_search(site.workspace.folder)
    add_trial(folder, 0, 0.5)
    axes = {axis["name"]: axis for axis in site.get("/api/trials/job-1").json["axes"]}
    assert axes["train.lr"] == {
        "name": "train.lr",
        "label": "lr",
        "low": 1e-4,
        "high": 1e-2,
        "log": True,
    }
    assert axes["model.hidden"]["choices"] == ["8", "[16, 8]"]
    assert axes["model.kind"]["choices"] == ["lstm", "gru"]


def test_a_finished_search_has_its_importances_and_its_report(site):
    folder = write_search(site.workspace.folder)
    add_trial(folder, 0, 0.5)
    add_trial(folder, 1, None, state="failed", stopped="<b>no finite loss")
    finish_search(folder)
    (folder / "best.toml").write_text('name = "chosen"\n')
    search = site.get("/api/trials/job-1").json
    assert search["importances"] == [["model.kind", 0.75], ["train.lr", 0.25]]
    assert search["trials"][1]["value"] is None
    page = site.get("/search/job-1").text
    assert "Trial 0 has the lowest validation loss" in page
    assert "name = &#34;chosen&#34;" in page
    assert "finished" in page


def test_the_best_settings_are_those_that_retraining_chose(site):
    folder = write_search(site.workspace.folder)
    add_trial(folder, 0, 0.5)
    add_trial(folder, 1, 0.75)
    assert (describe_search(folder)["best"], describe_search(folder)["chosen"]) == (0, None)
    losses = {"losses": [1.0, 1.0], "mean": 1.0, "sd": 0.1}
    retrained = [
        {"trial": 1, "what": "trial 1", "params": PARAMS, "chosen": True} | losses,
        {"trial": None, "what": "default", "params": None, "chosen": False} | losses,
    ]
    finish_search(folder, retrained=retrained)
    runs.Run(folder).append(End(seconds=3.0))
    assert (describe_search(folder)["best"], describe_search(folder)["chosen"]) == (0, 1)
    assert "trial 1 (chosen)" in site.get("/search/job-1").text


def test_a_resumed_search_goes_on_with_the_trials_it_had(site):
    folder = write_search(site.workspace.folder)
    add_trial(folder, 0, 0.5)
    finish_search(folder)
    job = site.workspace.store.read(
        site.post("/api/search/resume/job-1", {"trials": 6}).json["job"]
    )
    assert job.command[:3] == ("tune", "--resume", str(folder))
    assert job.command[-2:] == ("--set", "tune.trials=6")
    assert "already" in site.post("/api/search/resume/job-1", {"trials": 6}).json["error"]
    runs.remove_manifest(runs.Run(folder))
    runs.Run(folder).append(make_start(folder, is_resumed=True, trials=6, done=1))
    add_trial(folder, 1, 0.25)
    search = describe_search(folder)
    assert (search["total"], search["ended"], search["best"]) == (6, 2, 1)
    assert search["phase"] == "searching"


@pytest.mark.parametrize(
    "values", [{}, {"trials": 0}, {"trials": 1.5}, {"trials": "9"}, {"minutes": -1}]
)
def test_a_finished_search_is_resumed_with_a_number_of_trials_only(site, values):
    folder = write_search(site.workspace.folder)
    add_trial(folder, 0, 0.5)
    finish_search(folder)
    answer = site.post("/api/search/resume/job-1", values)
    assert answer.status == 400
    assert "trials" in answer.json["error"] or "minutes" in answer.json["error"]


RESUME_BUTTON = 'id="resume"'
DATABASE = "postgresql://me:***@db/studies"


def test_a_search_in_a_database_is_resumed_where_the_environment_names_it(site, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_STORAGE", raising=False)
    folder = write_search(site.workspace.folder)
    runs.Run(folder).append(make_start(folder, is_resumed=True, storage=DATABASE))
    command = f"slipstream tune --resume {folder} --storage URL"
    answer = site.post("/api/search/resume/job-1", {})
    assert f"its study is in {DATABASE}" in answer.json["error"]
    assert answer.json["error"].endswith(f"set SLIPSTREAM_STORAGE, or resume with: {command}")
    page = site.get("/search/job-1").text
    assert f"optuna-dashboard &#39;{DATABASE}&#39;" in page
    assert page.count(command) >= 2  # why there is no button, and the next command to copy
    assert RESUME_BUTTON not in page
    monkeypatch.setenv("SLIPSTREAM_STORAGE", "postgresql://me:s3cret@db/studies")
    page = site.get("/search/job-1").text
    assert RESUME_BUTTON in page
    assert "s3cret" not in page
    job = site.workspace.store.read(site.post("/api/search/resume/job-1", {}).json["job"])
    assert job.command[:3] == ("tune", "--resume", str(folder))
    assert not any("s3cret" in part for part in job.command)


def test_a_search_in_a_journal_is_resumed_where_the_file_is(site, tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_STORAGE", raising=False)
    folder, journal = write_search(site.workspace.folder), tmp_path / "several.log"
    runs.Run(folder).append(make_start(folder, is_resumed=True, storage=f"journal:{journal}"))
    page = site.get("/search/job-1").text
    assert "which does not exist here" in page
    assert f"optuna-dashboard {journal}" in page
    answer = site.post("/api/search/resume/job-1", {})
    assert answer.json["error"].endswith(
        f"slipstream tune --resume {folder} --storage journal:FILE"
    )
    journal.touch()
    assert RESUME_BUTTON in site.get("/search/job-1").text
    assert "job" in site.post("/api/search/resume/job-1", {}).json


@pytest.mark.parametrize("storage", ["journal:", "journal:/nowhere\0", "journal:~nobody/x", 3])
def test_a_storage_that_cannot_be_does_not_break_the_page(site, storage):
    folder = write_search(site.workspace.folder)
    runs.Run(folder).append(make_start(folder, is_resumed=True, storage=storage))
    assert site.get("/search/job-1").status == 200
    assert site.post("/api/search/resume/job-1", {}).status == 400


def test_other_runs_are_no_searches(site):
    write_run(site.workspace.folder, "job-1", finished=False)
    assert site.get("/search/job-1").headers["location"] == "/run/job-1"
    assert site.post("/api/search/resume/job-1", {}).status == 400
    write_search(site.workspace.folder, "job-2")
    assert site.get("/run/job-2").headers["location"] == "/search/job-2"
    listed = site.get("/search").text
    assert "job-2" in listed
    assert "job-1" not in listed


def test_a_search_has_its_page_before_its_first_event(site):
    job = site.workspace.store.read(
        site.post("/api/search/start", {"settings": FORM, "space": []}).json["job"]
    )
    folder = write_search(site.workspace.folder)
    (folder / "events.jsonl").unlink()
    assert site.get("/search/job-1").status == 303
    site.workspace.store.record_run(job.id, "job-1")
    assert site.get("/search/job-1").status == 200
    assert site.get("/run/job-1").headers["location"] == "/search/job-1"
    assert site.get("/api/trials/job-1").json["total"] == 4


@pytest.mark.slow
def test_a_search_is_read_while_it_is_written(site):
    folder = write_search(site.workspace.folder)
    ended = threading.Event()

    def write() -> None:
        for number in range(200):
            add_trial(folder, number, 1.0 / (number + 1))
            runs.write_json(folder / "trials.json", [])
            write_journal(folder, *[{"op_code": 4}] * (number + 2), torn='{"op_c')
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    counts = []
    while not ended.is_set():
        search = site.get("/api/trials/job-1").json
        numbers = [one["trial"] for one in search["trials"] if one["state"] == "finished"]
        assert numbers == list(range(len(numbers)))
        counts.append(len(numbers))
    writer.join()
    assert counts == sorted(counts)
    assert site.get("/api/trials/job-1").json["ended"] == 200


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "trials.json").write_text('[1, {"trial": "x", "params": {}}, '),
        lambda folder: (folder / "trials.json").write_text('[1, {"trial": -1, "params": {}}]'),
        lambda folder: (folder / "study.log").write_bytes(
            b'{"op_code": 5}\n[]\n\xff\n{"op_code": 4, "number": []}\n'
        ),
        lambda folder: (folder / "events.jsonl").write_bytes(b'{"event": "trial", "trial": 9}\n'),
        lambda folder: (folder / "config.toml").write_text("x ="),
        lambda folder: (folder / "metrics.json").write_text(
            '{"space": 1, "importances": [], "retrained": [3]}'
        ),
    ],
)
def test_damaged_files_do_not_break_the_page(site, damage):
    folder = write_search(site.workspace.folder)
    write_journal(folder)
    add_trial(folder, 0, 0.5)
    damage(folder)
    assert site.get("/api/trials/job-1").status == 200
    assert site.get("/search/job-1").status == 200


@pytest.mark.parametrize("name", ODD)
def test_names_with_markup_are_escaped(site, name):
    name = name.replace("/", "_")
    space = {f"augment.jitter.{name}": [0.1, 0.2], "model.kind": ["lstm", "gru"]}
    folder = write_search(site.workspace.folder, space=space)
    add_trial(folder, 0, 0.5, params={f"augment.jitter.{name}": 0.1, "model.kind": "gru"})
    folder.rename(site.workspace.folder / name)
    pages = [
        f"/search/{quote(name)}",
        f"/search/new?start={quote('run:' + name)}",
        "/search",
        "/pretrain",
    ]
    for path in pages:
        page = site.get(path)
        assert page.status == 200, path
        assert "<script>alert" not in page.text
        assert '"onload=' not in page.text.replace('\\"onload=', "")
    axes = site.get(f"/api/trials/{quote(name)}").json["axes"]
    assert axes[0]["name"] == f"augment.jitter.{name}"


# from a trial to a run, and from an encoder to a run


def test_any_trial_can_be_sent_to_a_new_run(site):
    folder = write_search(site.workspace.folder)
    add_trial(folder, 3, 0.5)
    config = settings.load_start(site.workspace, "trial:3:job-1")
    assert (config.train.lr, config.model.sizes, config.model.kind) == (1e-3, (16, 8), "gru")
    text = site.get(f"/new?start={quote('trial:3:job-1')}").text
    values = json.loads(text.partition('id="values">')[2].partition("</script>")[0])["values"]
    assert values["model.hidden"] == "[16, 8]"
    assert "trial 3 of job-1" in text
    assert site.get(f"/new?start={quote('trial:4:job-1')}").status == 404
    add_trial(folder, 5, 0.5, params=PARAMS | {"model.kind": "other"})
    assert "does not fit" in site.get(f"/new?start={quote('trial:5:job-1')}").text


def test_an_infinite_choice_is_shown_edited_and_sent_to_a_new_run(site):
    space = {"train.clip": [1.0, math.inf]}
    folder = write_search(site.workspace.folder, space=space)
    assert search_space.to_params(space["train.clip"]) == [1.0, "inf"]
    add_trial(folder, 1, 0.5, params={"train.clip": "inf"})
    (axis,) = site.get("/api/trials/job-1").json["axes"]
    assert axis["choices"] == ["1.0", "inf"]
    assert settings.load_start(site.workspace, "trial:1:job-1").train.clip == math.inf
    assert site.get(f"/search/new?start={quote('run:job-1')}").status == 200
    assert searches.list_rows(space)[0]["choices"] == "1.0, inf"
    assert searches.parse_rows(searches.list_rows(space)) == space


def test_a_pretraining_is_a_config_and_a_command(site):
    sent = {"settings": {"data.path": "simulated:bars", "pretrain.ratio": "0.5"}}
    answer = site.post("/api/pretrain/check", sent).json
    assert answer["command"].startswith("slipstream pretrain ")
    assert tomllib.loads(answer["toml"])["pretrain"] == {"ratio": 0.5}
    job = site.workspace.store.read(site.post("/api/pretrain/start", sent).json["job"])
    assert job.command[0] == "pretrain"
    assert configs.load(job.command[1]).masked
    refused = site.post(
        "/api/pretrain/check", {"settings": sent["settings"] | {"model.kind": "mlp"}}
    )
    assert "has no sequence encoder" in str(refused.json["problems"])
    assert site.post("/api/pretrain/start", {"settings": {"tune.trials": "1"}}).status == 400


def test_the_form_of_pretraining_shows_its_own_defaults(site):
    text = site.get("/pretrain").text
    batch = text.partition('id="set-train-batch"')[2].partition(">")[0]
    assert 'placeholder="512"' in batch
    assert 'id="set-data-targets"' not in text
    assert 'id="set-pretrain-mask"' in text


def test_the_time_of_one_training_is_not_shown_as_that_of_a_search(site):
    assert 'id="estimate"' in site.get("/new").text
    assert 'id="estimate"' not in site.get("/search/new").text
    assert 'id="estimate"' not in site.get("/pretrain").text


def write_encoder(out, name="bars-1"):
    config = configs.load(
        {
            "data": {"path": "simulated:bars", "time": "bar", "inputs": ["open"], "context": 32},
            "model": {"kind": "gru", "hidden": 16},
            "train": {"objective": "masked"},
        }
    )
    run = runs.create_run(name, out=str(out), files={"config.toml": runs.format_config(config)})
    return run.folder.rename(out / name)


def test_fine_tuning_begins_with_the_encoder_and_what_it_settles(site):
    folder = write_encoder(site.workspace.folder)
    text = site.get(f"/new?start={quote('encoder:bars-1')}").text
    given = json.loads(text.partition('id="values">')[2].partition("</script>")[0])
    values = given["values"]
    assert values["train.init_from"] == str(folder)
    assert (values["model.kind"], values["model.hidden"]) == ("gru", "16")
    assert (values["data.context"], values["data.time"]) == ("32", "bar")
    assert given["data"] == "simulated:bars"
    checked = site.post(
        "/api/check",
        {"settings": values | {"data.path": given["data"], "data.targets": '["close"]'}},
    ).json
    assert checked["problems"] == {}
    assert tomllib.loads(checked["toml"])["train"]["init_from"] == str(folder)
    write_run(site.workspace.folder, "job-1")
    assert "pretrain" in site.get(f"/new?start={quote('encoder:job-1')}").text


def test_pretraining_begins_with_the_settings_of_a_run(site):
    write_encoder(site.workspace.folder)
    text = site.get(f"/pretrain?start={quote('run:bars-1')}").text
    values = json.loads(text.partition('id="values">')[2].partition("</script>")[0])["values"]
    assert values["model.kind"] == "gru"
    assert "train.batch" not in values
    assert "bars-1" in text


def test_a_trial_that_was_given_counts_as_running_once_it_has_begun(site):
    folder = write_search(site.workspace.folder)
    waiting = {"op_code": 4, "state": 4}
    write_journal(folder, waiting, waiting, {"op_code": 6, "trial_id": 0, "state": 0})
    assert describe_search(folder)["counts"] == {"running": 1}


# slipstream auto


ROW = {
    "name": "trial 0",
    "kind": "gru",
    "what": "48 rows, mse, 1 x 16",
    "val": 0.25,
    "val_sd": 0.05,
    "test": 0.3,
    "train_s": 1.5,
    "parameters": 1100,
    "predict_us": 161.7,
    "flash_bytes": 45_000,
    "ram_bytes": None,
    "weight": 0.75,
    "state": "finished",
    "stopped": None,
}


def write_auto(folder, **more):
    """Write a folder of `slipstream auto` after its first trial, and return it."""
    run = write_search(folder, trials=100_000, minutes=5.0)
    (run / "auto.json").write_text("{}")
    add_trial(run, 0, 0.25)
    if more:
        finish_search(run, **more)
    return run


def test_auto_starts_as_a_job_with_its_minutes(site):
    body = {"settings": FORM, "minutes": 2.5, "prefer": "small"}
    job = site.workspace.store.read(site.post("/api/auto", body).json["job"])
    assert job.command[0] == "auto"
    assert job.command[1].endswith(".toml")
    assert job.command[2:6] == ("--minutes", "2.5", "--prefer", "small")
    assert job.command[-1] == "--json"
    assert "--refit" not in job.command
    job = site.workspace.store.read(site.post("/api/auto", body | {"refit": True}).json["job"])
    assert job.command[2:7] == ("--minutes", "2.5", "--prefer", "small", "--refit")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 0}, "minutes is 0; it should be a number from 0.1"),
        ({"minutes": True}, "minutes is True"),
        ({"minutes": "5"}, "minutes is 5"),
        ({"prefer": "huge"}, "expected one of best, fast, small"),
        ({"prefer": ["best"]}, "expected one of best, fast, small"),
        ({"refit": "yes"}, "refit: expected true or false"),
    ],
)
def test_auto_refuses_what_is_no_time_or_preference(site, change, message):
    body = {"settings": FORM, "minutes": 1, "prefer": "best"} | change
    answer = site.post("/api/auto", body)
    assert answer.status == 400
    assert message in answer.json["error"]
    assert site.workspace.store.list_recent() == []


def test_the_score_of_auto_is_that_of_its_model(site):
    scores = {"test": {"mse": 0.125}}
    folder = write_auto(
        site.workspace.folder, judged_by="mse", scaled=scores, metrics=scores, leaderboard=[]
    )
    assert describe_search(folder)["answer"] is None  # it is not over
    runs.Run(folder).append(End(seconds=1.0))
    assert describe_search(folder)["answer"] == {
        "value": 0.125,
        "note": "scaled MSE on the test set",
    }


def test_auto_names_the_mistakes_of_the_form(site):
    body = {"settings": FORM | {"train.lr": "fast"}, "minutes": 1, "prefer": "best"}
    answer = site.post("/api/auto", body)
    assert answer.status == 400
    assert "train.lr" in answer.json["problems"]


def test_auto_counts_minutes_and_not_trials(site):
    folder = write_auto(site.workspace.folder)
    runs.Run(folder).append(
        make_start(folder, is_resumed=True, trials=100_000, minutes=5.0, left_s=1e6)
    )
    found = describe_search(folder)
    assert found["total"] is None
    assert found["ended"] == 1
    assert 0 < found["left_s"] < 1e6


def test_the_page_of_auto_has_the_verdict_and_the_leaderboard(site):
    failed = ROW | {"name": "trial 1", "val": None, "val_sd": None, "test": None, "weight": 0.0}
    failed |= {"state": "failed", "stopped": "<b>out of memory</b>"}
    write_auto(site.workspace.folder, leaderboard=[ROW, failed], verdict="2.31 MW on the test set.")
    page = site.get("/search/job-1").text
    assert "2.31 MW on the test set." in page
    assert "48 rows, mse, 1 x 16" in page
    assert "75 %" in page
    for text in ("1,100", "162", "45,000"):
        assert f'<td class="number">{text}</td>' in page
    assert "&lt;b&gt;out of memory&lt;/b&gt;" in page
    assert "More minutes" in page
    assert "More trials" not in page


def test_auto_goes_on_where_the_training_on_all_rows_is_missing(site):
    refit = {"state": "interrupted", "run": None, "why": None, "models": 0, "of": 2, "windows": 0}
    answer = {"leaderboard": [ROW], "verdict": "So.", "interrupted": False}
    folder = write_auto(site.workspace.folder, **answer, refit=refit)
    page = site.get("/search/job-1").text
    assert "the training on all rows was stopped" in page
    assert RESUME_BUTTON in page
    job = site.workspace.store.read(site.post("/api/search/resume/job-1", {}).json["job"])
    assert job.command[:3] == ("auto", "--resume", str(folder))
    assert site.workspace.store.cancel(job.id)
    finish_search(folder, **answer, refit=refit | {"state": "done", "models": 2})
    page = site.get("/search/job-1").text
    assert "untested: trained on all rows" in page
    assert RESUME_BUTTON not in page


def test_a_damaged_leaderboard_leaves_the_page(site):
    write_auto(site.workspace.folder, leaderboard=[{"name": "trial 0"}, 7], verdict="So.")
    answer = site.get("/search/job-1")
    assert answer.status == 200
    assert 'id="leaderboard"' not in answer.text


def test_auto_goes_on_where_it_was_stopped_and_not_where_its_time_is_up(site):
    folder = write_auto(site.workspace.folder)
    job = site.workspace.store.read(site.post("/api/search/resume/job-1", {}).json["job"])
    assert job.command[:3] == ("auto", "--resume", str(folder))
    assert site.workspace.store.cancel(job.id)
    answer = site.post("/api/search/resume/job-1", {"trials": 7})
    assert "say how many minutes it may take" in answer.json["error"]
    finish_search(folder, leaderboard=[ROW], verdict="So.", interrupted=False)
    answer = site.post("/api/search/resume/job-1", {})
    assert "say how many minutes it should have" in answer.json["error"]
    finish_search(folder, leaderboard=[ROW], verdict="So.", interrupted=True)
    assert RESUME_BUTTON in site.get("/search/job-1").text
    answer = site.post("/api/search/resume/job-1", {"minutes": 7.5})
    job = site.workspace.store.read(answer.json["job"])
    assert job.command[:3] == ("auto", "--resume", str(folder))
    assert job.command[-2:] == ("--set", "tune.minutes=7.5")
