from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from slipstream import config as configs
from slipstream.config import Engine
from slipstream.tools.bench import ladder, plots, results
from slipstream.tools.bench.cases import STANDARD, build_standard_cases
from slipstream.tools.bench.frameworks import PeerSettings
from slipstream.tools.bench.results import ResultRow
from tests.tools.bench.small import small_case


@pytest.fixture(scope="module")
def outcome():
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "MAX_STEPS", 5)
        found = ladder.measure_ladder(
            [small_case()], minutes=60.0, watch=lambda what, share: told.append((what, share))
        )
    assert all(0 <= share <= 1 for _, share in told)
    return found


@pytest.mark.slow
def test_every_rung_is_timed_and_compared(outcome):
    rows = outcome.rows
    assert rows[0].variant == "naive loop"
    assert rows[-1].variant.startswith("auto")
    assert len(rows) >= 5
    assert all(len(row.repeats) == ladder.REPEATS for row in rows)
    first = rows[0]
    for before, row in zip([first, *rows], rows, strict=False):
        assert row.extra["speedup"] == pytest.approx(first.median / row.median)
        assert row.extra["speedup_over_rung_before"] == pytest.approx(before.median / row.median)
        assert row.extra["windows_per_s"] == pytest.approx(64e3 / row.median)
        assert row.extra["run_s"] == pytest.approx(row.median / 1e3 * 10)


@pytest.mark.slow
def test_without_time_the_lowest_rung_and_the_highest_are_compared():
    rows = ladder.measure_ladder([small_case()], minutes=1e-4, watch=lambda _, __: None).rows
    assert [bool(row.repeats) for row in rows] == [True, *[False] * (len(rows) - 2), True]
    assert all("left out: " in row.problem for row in rows[1:-1])
    assert all("give more --minutes" in row.problem for row in rows[1:-1])


def test_each_rung_adds_to_the_one_before():
    """One technique a rung, up to the last, which leaves everything to measuring."""
    for name in STANDARD:
        for on_gpu in (False, torch.cuda.is_available()):
            config = build_standard_cases([name], small=True)[0].config
            found = list(ladder.list_rungs(config, on_gpu=on_gpu))
            assert len({rung.technique for rung in found}) == len(found)
            ours = [rung.settings for rung in found if isinstance(rung.settings, dict)]
            assert all(Engine(**settings) for settings in ours)
            assert ours[-1] == {"device": "auto", "plan": "measure"}
            plain = [rung.settings for rung in found if not isinstance(rung.settings, dict)]
            assert plain[0] == PeerSettings(
                "", "plain", "fp32", 0, fused=False, pinned=False, waits=True
            )
            assert plain[-1].fused
            for before, after in itertools.pairwise(plain):
                assert sum(a != b for a, b in zip(before, after, strict=True)) in (1, 2)


@pytest.mark.slow
def test_its_files_hold_every_repeat(outcome, tmp_path):
    found = results.write_result(outcome, tmp_path)
    picture = plots.plot(outcome, tmp_path)
    assert picture.name == "ladder.svg"
    assert picture.read_text("utf-8").startswith("<svg ")
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["rows"][0]["repeats"] == outcome.rows[0].repeats
    assert saved["hardware"]["torch"] == torch.__version__
    small = saved["settings"]["cases"]["small"]
    assert small["train"]["batch"] == 64
    assert small["data"]["path"] == []
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(max(len(row.repeats), 1) for row in outcome.rows)
    summary = (tmp_path / "summary.md").read_text()
    assert all(row.variant in summary for row in outcome.rows)
    assert found["folder"] == str(tmp_path)


def test_a_rung_that_fails_is_shown_as_failed():
    if torch.cuda.is_available():
        pytest.skip("a GPU can capture")
    rung = ladder.Rung("captured", {"plan": "off", "capture": True})
    trial = ladder.open_trial(small_case(), rung, torch.device("cpu"))
    assert "failed: engine.capture is true, but steps are captured on CUDA only" in trial.problem
    assert trial.workload is None
    assert not trial.measured


def test_what_moved_beyond_the_spread_is_told(tmp_path):
    def outcome_of(*repeats):
        rows = [ResultRow("A", f"way {i}", "ms per step", list(r)) for i, r in enumerate(repeats)]
        return results.BenchResult("ladder", "", rows, [], {}, 1.0)

    results.write_result(outcome_of([1.0, 1.1, 1.2], [5.0, 5.1, 5.2]), tmp_path / "old")
    results.write_result(outcome_of([1.15, 1.3, 1.4], [4.0, 4.1, 4.2]), tmp_path / "new")
    found = results.compare_results(tmp_path / "old", tmp_path / "new")
    assert [row.extra["moved"] for row in found.rows] == [False, True]
    assert "1 of 2" in found.headline
    assert found.tables[0].cells[0][1:] == [
        *("way 1", "5.1 (5 to 5.2)", "4.1 (4 to 4.2)", "0.80x", "lower"),
    ]


def test_a_folder_without_results_is_refused(tmp_path):
    from slipstream import UserError

    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(UserError, match="holds no results of slipstream bench"):
        results.compare_results(tmp_path, tmp_path)


def test_augmenting_in_the_step_is_timed_beside_copies_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    case = small_case()
    for cache, other in ((0, "in 2 copies on disk"), (3, "in the step")):
        config = configs.load(case.config, ["augment.jitter=0.1", f"augment.cache={cache}"])
        steps = list(ladder.list_rungs(config, on_gpu=False))
        assert [rung.technique for rung in steps[-2:]] == [
            f"auto, augmented {other}",
            "auto, all measured",
        ]
        augmented = replace(case, config=config)
        for rung in steps[-2:]:
            settings = rung.settings | {"device": "cpu", "plan": "off", "threads": 1}
            changed = rung._replace(settings=settings)
            workload = ladder.open_trial(augmented, changed, torch.device("cpu")).workload
            reads_copies = hasattr(workload.job.batches, "copies")
            assert reads_copies == ((rung.copies if rung.copies is not None else cache) > 0)
            workload.close()
