"""Hyper-parameter search: Optuna proposes and prunes trials, lanes train them.

The path of a search: `api.tune` loads the config; `workers` opens the study and starts the workers;
each fills `packs` with trials that `trials.OptunaSearch` proposes and trains them; `summary`
retrains and tests the best and writes the result.
"""

from slipstream.search.api import SearchRequest, tune
from slipstream.search.summary import FinishedSearch

__all__ = ["FinishedSearch", "SearchRequest", "tune"]
