"""No path or address of a config leads out of the app's folder, wherever it comes from."""

from __future__ import annotations

import json

import pytest

from slipstream import config as configs
from slipstream import runs
from slipstream.app import paths, settings
from slipstream.base.errors import UserError
from slipstream.config import Config
from slipstream.config.base import Section
from slipstream.config.prepare import STEPS
from tests.app.conftest import Site, start_site
from tests.app.searches import write_search

TABLE = "time,x\n" + "".join(f"{row},{row % 7}\n" for row in range(200))
OUTSIDE = (
    "../out/x.csv",
    "{outside}/x.csv",
    "link.csv",
    "linked/x.csv",
    "*/x.csv",
    "linked",
    "deep",
)
"""Ways to a file outside: as it is, by a link, a pattern, and a folder that holds links"""
ADDRESSES = ("http://127.0.0.1:5000", "sqlite:////tmp/x.db", "file:///tmp/x", "../out", "{outside}")
PATHS = {"data.path", "data.labels", "train.init_from", "follow.out", "step join: path"}
"""Settings whose texts are paths or addresses, which `settings.list_paths` lists"""
OTHERS = {
    *("name", "out", "model.kind", "model.options", "engine.device", "follow.project"),
    *(
        "data.time",
        "data.time_format",
        "data.na",
        "data.names",
        "data.encoding",
        "data.sheet",
        "data.variable",
    ),
    *("data.id", "data.where", "data.inputs", "data.targets", "data.future", "data.static"),
    *("data.ignore", "data.prepare", "data.split.train", "data.split.val", "data.split.test"),
    *("data.split.by", "tune.space", "data.values", "data.undecided", "data.accept"),
}
"""Settings with texts that name no file: columns, cells, formats; `out` is set by each job, and
`model.kind` has a check of its own"""
STEP_TEXTS = {"every", "limit", "columns", "column", "into", "name", "value", "holidays", "zone"}
STEP_TEXTS |= {"time", "time_format", "id", "prefix", "period", "delay", "high", "low", "unit"}
STEP_TEXTS |= {"open", "close", "volume", "price", "country"}


@pytest.fixture(scope="module")
def confined(tmp_path_factory):
    """A site in `in`, beside `out` with a table to which links lead."""
    folder = tmp_path_factory.mktemp("confined")
    inside, outside = folder / "in", folder / "out"
    for folder in (inside, outside, inside / "own", inside / "deep"):
        folder.mkdir()
    (outside / "x.csv").write_text(TABLE)
    (inside / "own" / "y.csv").write_text(TABLE)
    (inside / "link.csv").symlink_to(outside / "x.csv")
    (inside / "linked").symlink_to(outside)
    (inside / "deep" / "z.csv").symlink_to(outside / "x.csv")
    site, stop = start_site(inside)
    yield site
    stop()


def fill(text: str, site: Site) -> str:
    return text.format(outside=site.workspace.folder.parent / "out")


def list_problems(site: Site, form: dict[str, str]) -> str:
    return " ".join(site.post("/api/check", {"settings": form}).json["problems"].values())


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("setting", ["data.path", "data.labels", "train.init_from"])
def test_a_form_refuses_every_way_out(confined, setting, path):
    form = {"data.path": "own/y.csv", setting: fill(path, confined)}
    if setting == "data.labels":
        form["data.task"] = "classify"
    assert "is not below" in list_problems(confined, form)
    started = confined.post("/api/start", {"settings": form})
    assert started.status == 400
    assert confined.workspace.store.list_recent() == []


@pytest.mark.parametrize("path", OUTSIDE)
def test_files_outside_are_not_even_looked_into(confined, path):
    name = fill(path, confined)
    for answer in (
        confined.get(f"/api/inspect?path={name}"),
        confined.post("/api/prepare/draft", {"file": name}),
        confined.get(f"/api/data/table?file={name}"),
        confined.post("/api/what-if", {"settings": {"data.path": name}}),
    ):
        assert answer.status in (200, 400, 404)
        assert '"columns":[{' not in answer.text.replace(" ", "")
        assert "not below" in answer.text or answer.status == 404


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_join_of_a_draft_refuses_every_way_out(confined, path):
    draft = {"settings": {"data.path": "own/y.csv", "data.time": "time"}, "steps": []}
    step = {"step": "join", "path": fill(path, confined), "time": "time", "label": "end"}
    answer = confined.post("/api/prepare/draft", {"draft": draft, "change": [{"add": step}]}).json
    assert "is not below" in " ".join(answer["wrong"].values())
    assert [one["name"] for one in answer["columns"]] == ["time", "x"]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("to", ["tensorboard", "mlflow", "wandb"])
def test_a_tracker_writes_nothing_outside(confined, to, address):
    form = {"data.path": "own/y.csv", "follow.to": to, "follow.out": fill(address, confined)}
    told = list_problems(confined, form)
    assert "follow.out" in told or "is not below" in told
    inside = form | {"follow.out": "boards"}
    assert list_problems(confined, inside) == ""


def test_the_address_that_the_app_was_started_with_is_accepted(confined, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ADDRESSES[0])
    form = {"data.path": "own/y.csv", "follow.to": "mlflow", "follow.out": ADDRESSES[0]}
    assert list_problems(confined, form) == ""


def test_a_search_space_names_no_paths(confined):
    table = str(confined.workspace.folder / "own" / "y.csv")
    for name in ("data.path", "data.labels", "train.init_from", "follow.out"):
        space = [{"setting": name, "kind": "choices", "choices": '"/etc/passwd", "a"'}]
        body = {"settings": {"data.path": "own/y.csv"}, "space": space}
        assert confined.post("/api/search/check", body).json["problems"]
        config = Config.model_validate(
            {"data": {"path": table}, "tune": {"space": {name: ["/etc/passwd", "a"]}}}
        )
        with pytest.raises(UserError, match="is not below"):
            settings.refuse_unsafe(confined.workspace, config)


@pytest.mark.parametrize(
    "section",
    [
        {"data": {"path": "{outside}/x.csv"}},
        {"data": {"path": "{inside}/*/x.csv"}},
        {"follow": {"to": "mlflow", "out": "http://evil.example"}},
        {"follow": {"to": "tensorboard", "out": "{outside}"}},
        {"data": {"prepare": [{"step": "join", "path": "{outside}/x.csv", "label": "end"}]}},
    ],
)
def test_a_run_from_elsewhere_is_not_resumed_with_what_it_names(confined, section):
    folder = confined.workspace.folder
    text = json.dumps(section).replace("{outside}", str(folder.parent / "out"))
    values = json.loads(text.replace("{inside}", str(folder)))
    values["data"] = {"path": str(folder / "own" / "y.csv"), "time": "time"} | values.get(
        "data", {}
    )
    config = configs.load(values)
    run = runs.create_run("job", out=str(folder), files={"config.toml": runs.format_config(config)})
    answer = confined.post(f"/api/resume/{run.folder.name}", {"epochs": 3})
    assert answer.status == 400
    assert "resume the run on the command line: slipstream train --resume" in answer.json["error"]
    assert confined.workspace.store.list_recent() == []


def test_a_search_from_elsewhere_is_not_resumed_with_what_it_names(confined):
    folder = confined.workspace.folder
    search = write_search(folder)
    loaded = configs.load(
        search / "config.toml", ["follow.to=mlflow", "follow.out=http://x.example"]
    )
    (search / "config.toml").write_text(runs.format_config(loaded))
    answer = confined.post("/api/search/resume/job-1", {"trials": 6})
    assert answer.status == 400
    assert "slipstream tune --resume" in answer.json["error"]


def list_texts(section: type[Section], prefix: str = "") -> set[str]:
    """Every setting that may hold a text."""
    names = set()
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            names |= list_texts(inner, f"{prefix}{name}.")
        elif "str" in str(inner).replace("Strict", "").replace("strict", ""):
            names.add(f"{prefix}{name}")
    return names


def test_every_setting_with_a_text_is_known_as_a_path_or_as_none():
    steps = {one for step, form in STEPS.items() for one in list_texts(form, f"step {step}: ")}
    others = {one for one in steps if one.partition(": ")[2] in STEP_TEXTS}
    found = {one for one in list_texts(Config) if not one.startswith(("data.home",))}
    literal = {"augment.jitter", "model.hidden", "model.output_range", "train.class_weights"}
    literal |= {"engine.home", "engine.rnn", "data.split.rows"}
    assert found - literal == (PATHS - {"step join: path"}) | OTHERS
    assert steps - others == {"step join: path"}


def test_every_path_is_listed():
    config = Config.model_validate(
        {
            "data": {
                "path": ["a", "b"],
                "labels": "c",
                "task": "classify",
                "time": "t",
                "prepare": [{"step": "join", "path": "d", "label": "end"}],
            },
            "train": {"init_from": "e"},
            "follow": {"out": "f"},
        }
    )
    assert sorted(one.text for one in settings.list_paths(config)) == list("abcdef")


def test_what_is_too_much_to_be_looked_at_is_refused(confined, monkeypatch):
    """A link behind many files must not pass unseen."""
    monkeypatch.setattr(paths, "MAX_LOOKED_AT", 3)
    folder = confined.workspace.folder
    for number in range(4):
        (folder / f"part{number}.csv").write_text(TABLE)
    (folder / "part9.csv").symlink_to(folder.parent / "out" / "x.csv")
    with pytest.raises(UserError, match=r"part\*\.csv: stands for more than 3 files"):
        settings.refuse_path(confined.workspace, settings.NamedPath("data.path", "part*.csv"))
