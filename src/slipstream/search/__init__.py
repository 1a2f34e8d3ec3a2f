"""Hyper-parameter search: Optuna proposes and prunes trials, lanes train them.

The path of a search: `api.tune` loads the config; `workers.launcher` opens the study and starts
the workers; `workers.worker` runs a `packing.scheduler` with `search.OptunaSearch` as its source of
trials; `packing.pack` trains them; `summary.finish_search` retrains, tests and writes the summary.
"""

from slipstream.search.api import SearchRequest, tune
from slipstream.search.summary import FinishedSearch

__all__ = ["FinishedSearch", "SearchRequest", "tune"]
