from __future__ import annotations

import pytest

from slipstream.config import Range, Tune
from slipstream.tuning import retraining
from slipstream.tuning.study import sampler_of
from tests.conftest import small_config


@pytest.mark.parametrize("kind", ["tpe", "random", "cmaes"])
def test_workers_of_the_largest_seed_have_samplers_too(kind):
    space = {"train.lr": Range(low=1e-3, high=1e-2)}
    tune = Tune(seed=2**32 - 1, sampler=kind, space=space)
    assert sampler_of(tune, space, worker=3) is not None


def test_the_largest_seed_leaves_seeds_to_train_the_best_again_from():
    assert retraining.first_seed(small_config(seed=7)) == 1007
    base = small_config(seed=2**63 - 1)
    first = retraining.first_seed(base)
    assert 0 <= first < first + base.tune.retrain_seeds <= 2**63
