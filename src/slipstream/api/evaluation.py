"""The results of `slipstream.evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.reporting import streaming, wording
from slipstream.reporting.formatting import format_number
from slipstream.text import format_count, format_html_table, format_table

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = {"mae": "MAE", "rmse": "RMSE", "max_error": "max error", "bias": "bias", "r2": "R²"}
CLASSES = {
    "log_loss": "log-loss",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "f1_macro": "F1 macro",
    "auc": "AUC",
}
MAX_ROWS = 5
"""Targets, or baselines, that a repr lists"""


class Evaluation(dict[str, Any]):
    """The metrics of a model on a set or on new data; a dict that prints as a small table.

    Attributes:
        metrics: Over all targets, in physical units.
        detail: Per target, series and predicted row, or per class.
        to_pandas: A function that returns the metrics of each target, or class, as a table.

    Example:
        scores = slipstream.evaluate(result, "new.csv")
        scores.metrics["mae"]
        scores["windows"]
    """

    @property
    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = self["metrics"]
        return metrics

    @property
    def detail(self) -> dict[str, Any]:
        detail: dict[str, Any] = self["detail"]
        return detail

    def to_pandas(self) -> pd.DataFrame:
        """Return the metrics of each target, or of each class, with one row for each."""
        import pandas as pd

        by_name = self["detail"]["per_class" if self.get("classes") else "per_target"]
        return pd.DataFrame.from_dict(by_name, orient="index")

    def __repr__(self) -> str:
        return format_table(*self._tabulate())

    def _repr_html_(self) -> str:
        return format_html_table(*self._tabulate())

    def _tabulate(self) -> tuple[str, list[str], list[list[str]]]:
        columns = CLASSES if self.get("classes") else NUMBERS
        rows = {"model": self["metrics"]}
        rows |= {name: one["metrics"] for name, one in streaming.list_unfiltered(self)}
        rows |= {name: one["metrics"] for name, one in wording.list_members(self)}
        for name, one in (self.get("baselines") or {}).items():
            if one:
                rows[name] = one.get("metrics", one)
        targets = {} if self.get("classes") else self["detail"]["per_target"]
        if len(targets) > 1 and len(rows) + len(targets) <= MAX_ROWS + 1:
            rows |= {f"model, {name}": one for name, one in targets.items()}
        windows = format_count(self["windows"], "window")
        title = f"Evaluation on {self['on']}: {windows}; {self['model']}"
        cells = [
            [name, *(format_number(one.get(key), 4 if key == "r2" else 8) for key in columns)]
            for name, one in rows.items()
        ]
        return title, ["", *columns.values()], cells


class StreamEvaluation(Evaluation):
    """Two ways to use a model on a stream of rows, scored on the same rows; a dict that prints as a
    small table.

    `["window"]` has the metrics of predictions from the last `data.context` rows, `["carried"]`
    those of predictions from one row and the state after the rows before it; its `["metrics"]` is
    None if `["refused"]` names a setting that rules this out. `["comparison"]` has the ratio of the
    errors with its interval, `["by_row"]` the errors by rows since the start of a series, and
    `["warm_up"]` the number of rows that a carried state needs.

    Attributes:
        deploy: The regime to use, "window" or "carried".
        reason: Why, with the figures.
        metrics: The metrics of the regime to use.
        detail: The metrics of that regime per series.
        to_pandas: A function that returns the errors by rows since the start as a table.

    Example:
        scores = slipstream.evaluate(result, stream=True)
        scores["carried"]["metrics"]["mae"], scores.deploy, scores.reason
    """

    @property
    def deploy(self) -> str:
        return str(self["deploy"]["use"])

    @property
    def reason(self) -> str:
        return str(self["deploy"]["reason"])

    @property
    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = self[self.deploy]["metrics"]
        return metrics

    @property
    def detail(self) -> dict[str, Any]:
        return {"per_series": self[self.deploy]["per_series"]}

    def to_pandas(self) -> pd.DataFrame:
        """Return the errors of both regimes by rows since the start, one row for each range."""
        import pandas as pd

        return pd.json_normalize(self["by_row"])

    def _tabulate(self) -> tuple[str, list[str], list[list[str]]]:
        windows = format_count(self["windows"], "window")
        title = f"Streaming on {self['on']}: {windows}; deploy {self.deploy}"
        headings, rows = streaming.tabulate_regimes(self)
        return title, headings, rows
