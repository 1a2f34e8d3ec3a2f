"""Which trials share a pack."""

from __future__ import annotations

import numpy as np

from slipstream import config as configs
from slipstream.search import packs
from slipstream.search.packs import TrialRun


def make_trial(number, **settings):
    base = configs.load({"model": {"hidden": 64, "layers": 1}, "train": {"batch": 128}})
    return TrialRun(number, configs.replace_settings(base, settings))


def covers(shape, other):
    """Whether lanes of the other shape fit into a pack of this shape."""
    return (
        shape.program == other.program
        and shape.batch >= other.batch
        and len(shape.widths) == len(other.widths)
        and all(a >= b for a, b in zip(shape.widths, other.widths, strict=True))
    )


def test_trials_share_a_shape_where_lanes_may_differ():
    one, other, wider, deeper = (
        make_trial(0, **{"train.lr": 0.1}),
        make_trial(1, **{"seed": 5, "train.weight_decay": 0.1, "model.hidden": 60}),
        make_trial(2, **{"model.hidden": 100}),
        make_trial(3, **{"model.layers": 2}),
    )
    shapes = [packs.get_pack_shape(c.config, "cuda") for c in (one, other, wider, deeper)]
    assert shapes[0] == shapes[1]
    assert covers(shapes[2], shapes[0])
    assert not covers(shapes[0], shapes[2])
    assert shapes[3].program != shapes[0].program


def test_small_groups_merge_where_a_step_costs_more_than_padding():
    waiting = [make_trial(i, **{"model.hidden": 128}) for i in range(12)]
    waiting += [make_trial(20, **{"model.hidden": 96}), make_trial(21, **{"model.hidden": 48})]
    assert len(packs.group_trials(waiting, "cuda", 100_000)) == 1
    alone = packs.group_trials(waiting, "cpu", 100_000)
    assert len(alone) == 3


def test_the_given_config_is_in_the_first_group():
    waiting = [make_trial(i, **{"model.layers": 2}) for i in range(1, 5)]
    waiting.append(make_trial(0))
    first, second = packs.group_trials(waiting, "cpu", 100_000)
    assert [trial.number for trial in first.trials] == [0]
    assert len(second.trials) == 4
    without = packs.group_trials([*waiting[:4], make_trial(9)], "cpu", 100_000)
    assert [len(group.trials) for group in without] == [4, 1]


def test_every_trial_is_in_one_group():
    draw = np.random.default_rng(0)
    waiting = [
        make_trial(
            i,
            **{
                "model.hidden": int(draw.choice([16, 40, 64, 120, 200])),
                "train.batch": int(draw.choice([64, 128, 256])),
                "data.context": int(draw.choice([24, 48])),
            },
        )
        for i in range(60)
    ]
    for device in ("cuda", "cpu"):
        found = packs.group_trials(waiting, device, 50_000)
        assert sorted(one.number for group in found for one in group.trials) == list(range(60))
        for group in found:
            for one in group.trials:
                assert covers(group.shape, packs.get_pack_shape(one.config, device))


def test_an_empty_place_on_a_gpu_takes_a_trial_that_wastes_little_of_it():
    pack = packs.get_pack_shape(make_trial(0).config, "cuda")
    joins = {
        "the same width, half the batch": (make_trial(1, **{"train.batch": 64}), True),
        "a quarter of the batch": (make_trial(2, **{"train.batch": 32}), False),
        "half the width": (make_trial(3, **{"model.hidden": 32}), False),
        "a larger batch": (make_trial(4, **{"train.batch": 256}), False),
        "another network": (make_trial(5, **{"model.kind": "gru"}), False),
    }
    for what, (trial, expected) in joins.items():
        assert packs.can_join(trial, pack, "cuda") == expected, what
        assert not packs.can_join(trial, pack, "cpu"), what
