"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import config as configs
from slipstream.cli.options import list_overrides


@pytest.mark.parametrize("name", ["runs", 'a "b"', "back\\slash", "über/all", "x = 1", "7"])
def test_out_is_a_setting_whatever_the_name_of_the_folder(name):
    assert configs.load({}, list_overrides(["out=other", "seed=3"], Path(name))).out == name
    assert configs.load({}, list_overrides(["out=other"], None)).out == "other"
