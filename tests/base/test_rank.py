from __future__ import annotations

import pytest

from slipstream import UserError
from slipstream.base.rank import find_place, is_follower

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    names = (*TORCHRUN, "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def change(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return change


def test_a_process_by_itself_has_no_place(environment):
    assert find_place() is None
    environment(**TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"})
    assert find_place() is None


def test_torchrun_gives_a_process_its_place(environment):
    more = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2"}
    environment(**TORCHRUN, **more)
    place = find_place()
    assert (place.rank, place.size, place.local_rank) == (1, 4, 0)
    assert (place.run_id, place.restarts, place.why) == (
        "job7",
        2,
        "torchrun has started the processes again",
    )
    assert is_follower(place)


def test_a_place_that_is_not_a_number_is_refused(environment):
    environment(**TORCHRUN | {"RANK": "first"})
    with pytest.raises(UserError, match=r"RANK.* is not a number; start with torchrun, or unset"):
        find_place()
