"""Augmented copies on disk: the windows that the step would have made of the same draws."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

import slipstream
from slipstream import Interrupted, UserError, runs, training
from slipstream.config import Augment
from slipstream.data import windows
from slipstream.engine import batches
from slipstream.models.noise import Noise, SequenceLayout, augment
from tests.conftest import close, merged, small_config, small_dataset, waves
from tests.engine.steps import run_steps
from tests.logs import as_lines
from tests.training.test_resume import ended, same, stopping_at

AUGMENT = {"augment": {"jitter": 0.1, "warp": 0.3, "scaling": 0.1, "cache": 2}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "augmented"


@pytest.fixture
def told(tmp_path):
    tmp_path.joinpath("run").mkdir()
    events = []
    return runs.Run(tmp_path / "run", as_lines(events.append)), events


def static_table():
    table = waves(400).to_pydict()
    table["id"], table["k"] = [0] * 200 + [1] * 200, [0.5] * 200 + [1.5] * 200
    return pa.table(table)


SHAPES = {
    "plain": {},
    "channels": {"data": {"channels": "independent"}},
    "static": {"data": {"static": ["k"], "id": "id"}},
    "future": {"data": {"future": ["b"], "channels": "independent"}},
    "masked": {"train": {"objective": "masked", "batch": 32, "epochs": 2}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_hold_augmented_windows_in_the_order_of_the_series(shape, told):
    config = small_config(**merged(AUGMENT, SHAPES[shape]))
    dataset = small_dataset(config, static_table() if shape == "static" else waves(400))
    copies = batches.prepare_copies(config, dataset, told[0])
    starts = dataset.memory.starts["train"]
    index = torch.tensor([0, 5, 5, len(starts) - 1])
    batch = windows.gather(dataset.memory.series, starts)
    for copy in range(2):
        key = Noise(torch.tensor(0), torch.tensor(0.0)).for_pass(torch.tensor(-1 - copy), 0).key
        signature = dataset.signature
        wanted = augment(
            config.augment,
            key,
            batch.inputs,
            batch.targets,
            layout=SequenceLayout(signature.model_shared, signature.sequences_per_window),
            shares=torch.ones(len(starts)),
        )
        got = copies.gather(copy, index)
        sequences = (
            index[:, None] * signature.sequences_per_window
            + torch.arange(signature.sequences_per_window)
        ).flatten()
        assert torch.equal(got.inputs, wanted.inputs[:, sequences])
        assert torch.equal(got.targets, wanted.targets[sequences])
        if shape in ("static", "future"):
            assert torch.equal(got.static, batch.static[sequences])
    plain = config.model_copy(update={"augment": Augment()})
    changed, unchanged = (run_steps(one, dataset, steps=12)[0] for one in (config, plain))
    assert all(one != other for one, other in zip(changed, unchanged, strict=True))
    close(changed, unchanged, rel=0.3)


def test_they_are_written_once_kept_by_settings_and_checked(told, cache):
    run, events = told
    config = small_config(**AUGMENT)
    dataset = small_dataset(config)
    batches.prepare_copies(config, dataset, run)
    (folder,) = cache.iterdir()
    batches.prepare_copies(config, dataset, run)
    assert [event["what"] for event in events] == ["writing", "reading"]
    size = sum(path.stat().st_size for path in folder.glob("*.bin"))
    assert events[0]["bytes"] == size == 2 * dataset.num_windows["train"] * 4 * 3 * (16 + 4)
    with (folder / "inputs.bin").open("r+b") as file:
        file.seek(100)
        file.write(b"\x00\x01\x02")
    batches.prepare_copies(config, dataset, run)
    assert events[-1]["what"] == "writing"
    for change in ({"seed": 1}, {"augment": AUGMENT["augment"] | {"jitter": 0.2}}):
        batches.prepare_copies(small_config(**merged(AUGMENT, change)), dataset, run)
    batches.prepare_copies(config, small_dataset(config, waves(390)), run)
    assert len(list(cache.iterdir())) == 4
    assert events[-1]["what"] == "writing"


def test_every_epoch_reads_the_next_copy_and_windows_come_in_the_usual_order(told):
    config = small_config(**merged(AUGMENT, {"augment": {"warp": 0.0, "scaling": 0.0}}))
    dataset = small_dataset(config)
    copies = batches.prepare_copies(config, dataset, told[0])
    source = batches.AugmentedSource(copies, copies.build_sampler(32, 32, 0))
    seen = []
    for epoch in range(3):
        source.start_epoch(epoch)
        (micro_batch,) = source.get_micro_batches(torch.tensor([1]))
        usual = source.sampler.sample_epoch(epoch)[0][1, 0]
        batch = windows.gather(dataset.memory.series, dataset.memory.starts["train"][usual])
        assert torch.equal(micro_batch.batch.targets, batch.targets)
        seen.append((micro_batch.batch.inputs - batch.inputs, usual))
    same_window = {int(i): n for n, i in enumerate(seen[2][1])}
    both = [(n, same_window[int(i)]) for n, i in enumerate(seen[0][1]) if int(i) in same_window]
    assert both
    for one, two in both:  # the noise of a copy is the window's, whenever it is read
        assert torch.allclose(seen[0][0][:, one], seen[2][0][:, two], atol=1e-5)


def test_a_run_with_copies_is_resumed_exactly(tmp_path):
    often = {"engine": {"log_every": 4, "checkpoint_minutes": 1e-9}, "train": {"epochs": 3}}
    blend = {"augment": AUGMENT["augment"] | {"mixup": 0.3}}
    table = waves(300)
    whole = slipstream.train(small_config(tmp_path / "a", **merged(often, blend)), table)
    asked = small_config(tmp_path / "b", **merged(often, blend))
    with pytest.raises(Interrupted):
        training.train(asked, table, watch=as_lines(stopping_at(9)))
    run = runs.open_run(runs.find_last(asked.out))
    slipstream.train(data=table, resume=run.folder)
    same(ended(run), ended(runs.open_run(whole.run)))


def test_what_copies_do_not_go_with_is_refused(told, monkeypatch):
    with pytest.raises(UserError, match=r'does not work with engine\.home = "loader"'):
        small_config(**merged(AUGMENT, {"engine": {"home": "loader"}}))
    monkeypatch.setattr(batches.shutil, "disk_usage", lambda _: type("", (), {"free": 10}))
    config = small_config(**AUGMENT)
    dataset = small_dataset(config)
    with pytest.raises(UserError, match=r"needs 0\.0 GB in .* lower it, or set SLIPSTREAM_CACHE"):
        batches.prepare_copies(config, dataset, told[0])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_copies_are_sent_ahead_and_steps_captured(shape):
    def losses(capture, **engine):
        config = small_config(**merged(AUGMENT, SHAPES[shape]), engine=engine)
        dataset = small_dataset(config, static_table() if shape == "static" else waves(400))
        return run_steps(config, dataset, steps=30, capture=capture)[0]

    eager = losses(False, device="cuda", precision="fp32")
    close(eager, losses(False), rel=1e-4)
    assert eager == losses(True, device="cuda", precision="fp32")


def test_only_blends_stay_in_the_step():
    config = small_config(augment=AUGMENT["augment"] | {"mixup": 0.2})
    assert config.augment.for_step.kinds == ("mixup",)
    assert config.augment.for_cache.kinds == ("jitter", "scaling", "warp")
    assert small_config(augment={"jitter": 0.1}).augment.for_step.kinds == ("jitter",)
