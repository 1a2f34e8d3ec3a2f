"""A journal that was truncated, zeroed or damaged is repaired from what is left of it."""

from __future__ import annotations

import json
import random
import shutil
import signal

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import slipstream
from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Interrupted
from slipstream.config import search_space as spaces
from slipstream.events import TrialEnd
from slipstream.runs import Run
from slipstream.search import api, sharing
from slipstream.search import storage as journal
from slipstream.search.budget import MARGIN, SearchBudget
from slipstream.search.packs import FORWARD_SHARE, DatasetCache, PackCosts, TrialRun
from slipstream.search.storage import OUT_OF_TIME
from slipstream.search.study import make_distributions, open_study
from slipstream.search.trials import OptunaSearch
from tests.logs import as_lines
from tests.search.searches import make_config

FLIPS = 60


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A search of three trials, each with settings of two kinds."""
    folder = tmp_path_factory.mktemp("journal")
    return slipstream.tune(make_config(folder, trials=3, space=SPACE)).run


SPACE = {"train.lr": {"low": 1e-3, "high": 1e-2, "log": True}, "model.hidden": [4, 8]}


def repair(run, content, events=True):
    """Repair a journal with this content; return the trials, and the problems."""
    path = run / "study.log"
    whole, config = path.read_bytes(), configs.load(run / "config.toml")
    path.write_bytes(content)
    try:
        problems = journal.repair(
            path,
            study="search",
            distributions=make_distributions(spaces.make_space(config)),
            events=runs.read_events(Run(run)) if events else [],
        )
        return trials_in(path), problems
    finally:
        path.write_bytes(whole)
        (run / "study.log.damaged").unlink(missing_ok=True)


def trials_in(path):
    """As Optuna itself reads them."""
    storage = JournalStorage(JournalFileBackend(str(path)))
    return optuna.load_study(study_name="search", storage=storage).trials


def results(trials):
    return [(t.number, t.state, t.value, t.params) for t in trials]


def test_an_intact_journal_is_not_changed(done):
    content = (done / "study.log").read_bytes()
    trials, problems = repair(done, content)
    assert problems == []
    assert len(trials) == 3
    assert all("sum" in json.loads(line) for line in content.splitlines())


def test_no_flipped_bit_changes_a_result_or_ends_a_search(done):
    content, draw = (done / "study.log").read_bytes(), random.Random(0)
    wanted = results(trials_in(done / "study.log"))
    silent = 0
    for _ in range(FLIPS):
        bad = bytearray(content)
        at, bit = draw.randrange(len(bad)), draw.randrange(8)
        bad[at] ^= 1 << bit
        trials, problems = repair(done, bytes(bad))
        assert results(trials) == wanted, (at, bit)
        silent += not problems
    assert silent < FLIPS / 10  # of a key that names the checksum, or a letter's case in an escape


def test_every_break_between_two_lines_may_be_damaged(done):
    content = (done / "study.log").read_bytes()
    wanted = results(trials_in(done / "study.log"))
    for at in (i for i, byte in enumerate(content) if byte == 0x0A):
        for bit in (0, 5, 7):
            bad = bytearray(content)
            bad[at] ^= 1 << bit
            trials, _ = repair(done, bytes(bad))
            assert results(trials) == wanted, (at, bit)


@pytest.mark.parametrize("tail", [b"\0" * 4096, b'{"op_code":7,"worker_id"', b"\xff\xfe\n", b"\n"])
def test_a_damaged_end_is_dropped(done, tail):
    content = (done / "study.log").read_bytes()
    wanted = results(trials_in(done / "study.log"))
    trials, problems = repair(done, content + tail)
    assert results(trials) == wanted
    assert len(problems) == 1


def test_a_journal_may_be_truncated_anywhere(done):
    """The search's log knows how the trials ended."""
    content = (done / "study.log").read_bytes()
    wanted = results(trials_in(done / "study.log"))
    for size in range(0, len(content), 97):
        trials, _ = repair(done, content[:size])
        assert results(trials) == wanted, size


def test_without_the_log_of_the_search_no_result_is_invented(done):
    """What comes after the damaged line is lost then: a trial whose end is lost trains again."""
    content, draw = (done / "study.log").read_bytes(), random.Random(1)
    wanted = results(trials_in(done / "study.log"))
    lines = content.splitlines(keepends=True)
    for index, line in enumerate(lines):
        place = draw.randrange(len(line) - 2)
        damaged = line[:place] + b"#" + line[place + 1 :]
        bad = b"".join([*lines[:index], damaged, *lines[index + 1 :]])
        trials, problems = repair(done, bad, events=False)
        assert len(problems) == 1
        for found, original in zip(results(trials), wanted, strict=False):
            assert found == original or found[1] in (TrialState.RUNNING, TrialState.WAITING)


def test_trials_under_way_that_are_lost_are_replaced(done):
    """The log has the ends of the first and the last one; the one between them had not ended."""
    path = done / "study.log"
    wanted, config = results(trials_in(path)), configs.load(done / "config.toml")
    content = path.read_bytes()
    events = runs.read_events(Run(done))
    ends = [event for event in events if isinstance(event, TrialEnd) and event.trial != 1]
    try:
        path.write_bytes(content[:200])
        distributions = make_distributions(spaces.make_space(config))
        assert journal.repair(path, "search", distributions, ends)
        trials = trials_in(path)
        found = results(trials)
        assert [found[0], found[2]] == [wanted[0], wanted[2]]
        assert trials[1].state == TrialState.FAIL
        assert sharing.count_started(trials) == len(sharing.select_counted(trials)) == 2
    finally:
        path.write_bytes(content)
        (done / "study.log.damaged").unlink(missing_ok=True)


def test_a_repaired_journal_can_be_repaired_again(done):
    content = (done / "study.log").read_bytes()
    path = done / "study.log"
    wanted = results(trials_in(path))
    config = configs.load(done / "config.toml")
    how = {"study": "search", "distributions": make_distributions(spaces.make_space(config))}
    try:
        path.write_bytes(content.replace(b"op_code", b"op_c\xffde", 3))
        assert journal.repair(path, **how, events=runs.read_events(Run(done)))
        once = path.read_bytes()
        assert results(trials_in(path)) == wanted
        for line in once.splitlines():
            path.write_bytes(once.replace(line, line[:-9] + b"#" * 9))
            assert journal.repair(path, **how, events=runs.read_events(Run(done)))
            assert results(trials_in(path)) == wanted
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("damage", ["cut", "zeros", "within", "gone", "lock"])
def test_a_search_with_a_damaged_journal_resumes(tmp_path, done, damage):
    run = tmp_path / "copy"
    shutil.copytree(done, run)
    path, wanted = run / "study.log", results(trials_in(run / "study.log"))
    content = path.read_bytes()
    middle = len(content) // 2
    match damage:
        case "cut":
            path.write_bytes(content[:-20])
        case "zeros":
            path.write_bytes(content + b"\0" * 512)
        case "within":
            path.write_bytes(content[:middle] + b"\0" * 40 + content[middle + 40 :])
        case "gone":
            path.unlink()
        case "lock":
            (run / "study.log.lock").symlink_to(path)
    events = []
    more = api.tune(resume=run, overrides=("tune.trials=4",), watch=as_lines(events.append))
    assert more.summary["trials"] == {"finished": 4, "pruned": 0, "failed": 0}
    assert results(more.study.trials)[:3] == wanted
    reasons = [e["why"] for e in events if e["event"] == "fallback"]
    assert len(reasons) == (damage != "lock")
    assert all(str(path) in why for why in reasons)
    if damage in ("cut", "zeros", "within"):
        assert (run / "study.log.damaged").exists()
    if damage == "within":
        slipstream.report(run)


def test_params_that_a_kill_left_unsampled_are_sampled_on_resume(tmp_path):
    config = make_config(tmp_path, trials=1, space=SPACE)
    run = runs.create_run("a", out=str(tmp_path / "runs"))
    study = open_study(config, run.folder, None, "search")
    study.study.ask({"train.lr": study.distributions["train.lr"]})  # and killed there
    search = OptunaSearch(config, study, run, DatasetCache(config))
    search.resume_interrupted()
    (one,) = search.interrupted
    params = study.get_trials()[0].params
    assert set(params) == set(SPACE)
    assert (one.config.train.lr, one.config.model.hidden) == tuple(params[name] for name in SPACE)


def test_the_first_epoch_leaves_time_to_test_its_model(tmp_path):
    config = make_config(tmp_path, trials=9, space=SPACE, minutes=1, retrain=1)
    run = runs.create_run("a", out=str(tmp_path / "runs"))
    study = open_study(config, run.folder, None, "search")
    now = [0.0]
    budget = SearchBudget(config.tune, 40, 0.0, 0.0, lambda: now[0])
    search = OptunaSearch(config, study, run, DatasetCache(config), budget=budget)
    trial = TrialRun(0, config)
    costs = PackCosts([trial, TrialRun(1, config)], validate_s=2.0, epoch_s=40.0)
    while not search.find_cut(costs):
        assert not search.was_cut
        now[0] += 0.5
    test_s = MARGIN * FORWARD_SHARE * 40 / 2
    assert now[0] == pytest.approx(60 - budget.overhead_s - 2 - test_s, abs=0.5)
    assert search.is_over()  # no other pack begins
    assert search.find_cut() == OUT_OF_TIME


def test_running_trials_with_impossible_settings_fail_on_resume(tmp_path):
    space = {"model.patch": [3, 5], "data.context": [16, 15]}
    config = make_config(tmp_path, trials=4, space=space, sampler="grid")
    run = runs.create_run("a", out=str(tmp_path / "runs"))
    study = open_study(config, run.folder, None, "search")
    for _ in range(4):
        study.ask()
    search = OptunaSearch(config, study, run, DatasetCache(config))
    search.resume_interrupted()
    assert len(search.interrupted) == 2
    states = [trial.state for trial in study.get_trials()]
    assert states.count(TrialState.FAIL) == 2


@pytest.mark.parametrize("study", [None, b"", b'{"op_code":0,"worker_id":"a', b"\0" * 100])
def test_a_search_killed_before_its_first_trial_resumes_in_its_folder(tmp_path, study):
    config = make_config(tmp_path, trials=2)
    run = runs.create_run("a", out=str(tmp_path / "runs"))
    (run.folder / "config.toml").write_text(configs.to_toml(config))
    if study is not None:
        (run.folder / "study.log").write_bytes(study)
    found = slipstream.tune(resume=run.folder)
    assert found.run == run.folder
    assert found.summary["trials"]["finished"] == 2
    assert (run.folder / "study.log").exists()
    assert not (run.folder / "study.db").exists()


def test_a_pack_without_an_intact_checkpoint_trains_from_the_start(tmp_path):
    config = make_config(tmp_path, trials=2, epochs=6)

    stopped = []

    def stop(event):
        if event["event"] == "epoch" and event["epoch"] == 3 and not stopped:
            stopped.append(event)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        api.tune(config, watch=as_lines(stop))
    folder = runs.find_last(config.out)
    files = list(folder.glob("packs/*/checkpoints/*/*.safetensors"))
    assert files
    for path in files:
        path.write_bytes(b"")
    events = []
    found = api.tune(resume=folder, watch=as_lines(events.append))
    assert found.summary["trials"]["finished"] == 2
    assert any("from their start" in e["what"] for e in events if e["event"] == "fallback")
