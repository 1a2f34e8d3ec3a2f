"""What a finished run is used for: `slipstream.evaluate`, `predict`, `export`, `report`, `load`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.api.arguments import check_run, name_columns, parse_overrides
from slipstream.api.progress import name_arguments, show_loading
from slipstream.base.text import format_count, format_html_table, format_number, format_table
from slipstream.reporting import streaming, wording

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from slipstream.api.model import TrainedModel

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
        columns = CLASSES
        if not self.get("classes"):
            relative = wording.list_relative(self["metrics"])
            columns = NUMBERS | {key: wording.get_metric_name(key) for key in relative}
        rows = {"model": self["metrics"]}
        rows |= {name: result["metrics"] for name, result in streaming.list_unfiltered(self)}
        rows |= {name: result["metrics"] for name, result in wording.list_members(self)}
        for name, result in (self.get("baselines") or {}).items():
            if result:
                rows[name] = result.get("metrics", result)
        targets = {} if self.get("classes") else self["detail"]["per_target"]
        if len(targets) > 1 and len(rows) + len(targets) <= MAX_ROWS + 1:
            rows |= {f"model, {name}": result for name, result in targets.items()}
        windows = format_count(self["windows"], "window")
        title = f"Evaluation on {self['on']}: {windows}; {self['model']}"
        cells = [
            [name, *(format_number(result.get(key), 4 if key == "r2" else 8) for key in columns)]
            for name, result in rows.items()
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


@name_arguments
def evaluate(
    run: str | os.PathLike[str],
    data: Any = None,
    *,
    columns: Sequence[str] | None = None,
    on: str = "test",
    resample: bool = False,
    ensemble: bool | None = None,
    joins: Mapping[str, Any] | None = None,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    quiet: bool = False,
    allow_code: bool = False,
    stream: bool = False,
    predictions: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Compute the metrics of a run's model on one of its own sets or on new data.

    The baselines are scored on the same windows; they are fitted to the run's training windows.

    Args:
        run: The run folder, the beginning of its name, `last`, or the `Result` of `train`. For a
            search, the model of its best settings is used.
        data: A path or a table to score instead; every window of it counts.
        columns: The names of the columns, where `data` is a numpy array.
        on: The set of the run's own data: "train", "val" or "test". In a walk-forward run, each
            fold is scored by its own model.
        resample: Resample new data to the time step that the model was trained on.
        ensemble: True for the mean of all repeats, False for the single model; by default whichever
            was better on the validation set.
        joins: Tables or paths for the joins of `data.prepare`, instead of the files that the
            model was trained with: {"weather.csv": frame}, by the file's name.
        overrides: Settings that override the run's config: "data.stride=4", a list of such
            texts, or a mapping.
        quiet: Do not say that torch is being loaded, which takes seconds on first use.
        allow_code: Let the run's config import the network class that it names.
        stream: Compare two ways to use the model on a stream of rows, instead of scoring the
            baselines: a window of rows each time, and a carried state. The better one is recorded
            in the run's folder, for `Stream`, exports and the server.
        predictions: A Parquet file to which predictions and true values are written.

    Returns:
        An `Evaluation`, a dict with `metrics` (physical units), `scaled`, `windows`,
        `windows_without_target` (left out), `detail` (per target, series and predicted row),
        `model`, `baselines` (each with `metrics` and `scaled` on the same windows, or None),
        the `coverage` and `width` of the intervals by level and their `crps` (None without
        intervals), and `notes`; with `predict.filter` also `filter`, its settings and delay, and
        `unfiltered`, the metrics without it. With `stream`, a `StreamEvaluation`.

    Raises:
        UserError: The run or the data cannot be used; the message names the fix.

    Example:
        slipstream.evaluate(result)["metrics"]["mae"]
        slipstream.evaluate("runs/job-20260131T120000Z", "new.csv").metrics["mae"]
    """
    folder, table = check_run(run), name_columns(data, columns)
    more = parse_overrides(overrides)
    with show_loading(quiet):
        from slipstream.inference import evaluate as evaluation

        scores = evaluation.evaluate(
            folder,
            table,
            on=on,
            resample=resample,
            ensemble=ensemble,
            joins=joins,
            overrides=more,
            allow_code=allow_code,
            stream=stream,
            predictions=None if predictions is None else os.fspath(predictions),
        )
    return StreamEvaluation(scores) if stream else Evaluation(scores)


@name_arguments
def predict(
    run: str | os.PathLike[str],
    data: Any,
    *,
    columns: Sequence[str] | None = None,
    every: bool = False,
    resample: bool = False,
    ensemble: bool | None = None,
    joins: Mapping[str, Any] | None = None,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    quiet: bool = False,
    allow_code: bool = False,
) -> pa.Table:
    """Predict with a run's model, in physical units.

    A forecasting model predicts the rows that follow each series' end. An estimating model
    (horizon 0) estimates at every row that has a full context behind it. Suspicious but usable data
    raise Python warnings.

    Args:
        run: The run folder, the beginning of its name, `last`, or the `Result` of `train`. For a
            search, the model of its best settings is used.
        data: A path or a table with the columns that the model was trained on. If the model reads
            columns that are known ahead (`data.future`), append the rows to predict to each series,
            with only these columns filled in; columns of a calendar step are computed.
        columns: The names of the columns, where `data` is a numpy array.
        every: Forecast from every row with a full context, not only from the end.
        resample: Resample rows to the time step that the model was trained on.
        ensemble: True for the mean of all repeats, False for the single model; by default whichever
            was better on the validation set.
        joins: Tables or paths for the joins of `data.prepare`, instead of the files that the
            model was trained with: {"weather.csv": frame}, by the file's name.
        overrides: Settings that override the run's config.
        quiet: Do not say that torch is being loaded, which takes seconds on first use.
        allow_code: Let the run's config import the network class that it names.

    Returns:
        A pyarrow table: series, row or time, and one column per target; class probabilities for a
        classifier; intervals (`<target>_lo80` to `<target>_hi95`) for runs with repeats or folds.
        The schema's metadata name the model.

    Raises:
        UserError: The run or the data cannot be used; the message names the fix.

    Example:
        slipstream.predict(result, frame).to_pandas()
        table = slipstream.predict("runs/job-20260131T120000Z", "latest.csv")
    """
    folder, table = check_run(run), name_columns(data, columns)
    more = parse_overrides(overrides)
    with show_loading(quiet):
        from slipstream.inference import predict as prediction

        return prediction.predict(
            folder,
            table,
            every=every,
            resample=resample,
            ensemble=ensemble,
            joins=joins,
            overrides=more,
            allow_code=allow_code,
        )


@name_arguments
def export(
    run: str | os.PathLike[str],
    *,
    to: str = "onnx",
    out: str | os.PathLike[str],
    data: Any = None,
    force: bool = False,
    ensemble: bool | None = None,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    license: str | None = None,
    quiet: bool = False,
    allow_code: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Write a run's model as files for other programs, verified against the model.

    Every window of the run's test set goes through the files. If their output differs from
    `predict` by more than 1e-5 of the target's standard deviation, nothing is written.

    Args:
        run: The run folder, the beginning of its name, `last`, or the `Result` of `train`. For a
            search, the model of its best settings is used.
        to: The format: "onnx", "c" (C99 source), "torch" (a `torch.export` program), "hub" (a
            folder for the Hugging Face Hub), "triton" (a model repository for NVIDIA Triton) or
            "ray" (an application for Ray Serve).
        out: The folder to create.
        data: A path or a table to verify on instead, for a run whose own data are gone.
        force: Replace an export that is there already.
        ensemble: True for the mean of all repeats, False for the single model; by default whichever
            was better on the validation set.
        overrides: Settings that override the run's config, such as "data.path=moved.csv".
        license: For "hub": the licence in the model card, such as "apache-2.0".
        quiet: Do not say that torch is being loaded, which takes seconds on first use.
        allow_code: Let the run's config import the network class that it names.
        options: For "c": `int8=True` for weights of 8 bits, `name` for the prefix of its names,
            `state` ("carried" or "windows") for what a step does, by default what the run was
            trained for or what `evaluate` with `stream` advised, `after_prepare=True` to leave the
            steps of `data.prepare` to the caller, or `after_prepare="resample"` to leave those up
            to this step.

    Returns:
        A dict, as in `export.json`: `files` with their SHA-256, `parity` (`windows`, `max_abs`,
        `max_rel`), `deploy` (the regime to use, and why), `interface` (names, shapes and columns),
        `before` (the steps of `data.prepare` that are left to the caller), `run` and `out`.

    Raises:
        UserError: The run holds no model, the format cannot hold it, or it differs.

    Example:
        slipstream.export(result, out="model")["parity"]["max_rel"]
        slipstream.export("last", to="onnx", out="model", data="rows.csv")
        slipstream.export("last", to="c", out="firmware", name="soc")
    """
    folder = check_run(run)
    more = parse_overrides(overrides)
    with show_loading(quiet):
        from slipstream import runs
        from slipstream.exporting.api import ExportOptions, export_run

        settings = options if license is None else {"license": license, **options}
        chosen = ExportOptions(data, force, ensemble, allow_code, more, settings)
        return export_run(runs.find_run(folder), to, Path(out), chosen)


@name_arguments
def report(run: str | os.PathLike[str], *, out: str | os.PathLike[str] | None = None) -> Path:
    """Write report.html, a self-contained page, from the files of a finished run.

    Args:
        run: The folder of a run, a search or a probe, or the object that `train`, `tune` or `probe`
            returned. The report of a search includes those of its retrained models.
        out: The folder to write to, instead of the run folder.

    Returns:
        The path of the page.

    Raises:
        UserError: The run is not finished, or one of its files is damaged.

    Example:
        slipstream.report(result)
        slipstream.report("runs/job-20260131T120000Z", out="public")
    """
    folder = check_run(run)
    from slipstream.reporting import page

    return page.report(folder, out=None if out is None else Path(out))


@name_arguments
def load(
    run: str | os.PathLike[str],
    *,
    ensemble: bool | None = None,
    device: str | None = None,
    allow_code: bool = False,
) -> TrainedModel:
    """Load a run's trained model, to predict with it or to use its `torch.nn.Module`.

    Args:
        run: The run folder, the beginning of its name, `last`, or the `Result` of `train`. For a
            search, the model of its best settings is loaded; for walk-forward folds, that of the
            last fold.
        ensemble: As for `predict`: True for the mean of all repeats, False for the single model; by
            default whichever was better on the validation set.
        device: "cpu", "cuda" or "cuda:1"; by default the GPU where there is one.
        allow_code: Let the run's config import the network class that it names.

    Returns:
        A `TrainedModel` with the network, its scaler and `predict` in physical units.

    Raises:
        UserError: The run holds no model, or a file of it is damaged.

    Example:
        model = slipstream.load(result)
        model.predict(frame)
        model.module.state_dict()
    """
    folder = check_run(run)
    from slipstream.api import model

    return model.load_model(folder, ensemble=ensemble, device=device, allow_code=allow_code)
