"""What a search prints."""

from __future__ import annotations

import pytest

from slipstream.events import SearchEnd, SearchStart
from slipstream.reporting.terminal.progress import SearchProgress


@pytest.mark.parametrize(("storage", "where"), [("journal:/shared/study.log", " here"), (None, "")])
def test_the_counts_of_a_shared_search_are_those_of_this_command(storage, where):
    progress = SearchProgress()
    facts = {"run": "a", "parallel": 2, "space": [], "windows": {}, "device": "cpu"}
    progress.update(SearchStart(trials=8, done=0, storage=storage, **facts))
    text = progress.describe_result(SearchEnd(seconds=15.0))
    assert text == f"searched for 15.0 s: 0 finished, 0 pruned, 0 failed{where}"
