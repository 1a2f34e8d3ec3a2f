"""`slipstream.train`, `pretrain`, `tune`, `auto`, `probe` and `ensemble`, with progress."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.api.arguments import (
    Job,
    check_config,
    check_run,
    is_config,
    name_columns,
    parse_overrides,
    prepare_job,
)
from slipstream.api.progress import name_arguments, show_progress
from slipstream.api.results import Probe, Result, Study
from slipstream.base.errors import Message, UserError
from slipstream.base.rank import find_place, is_follower
from slipstream.events import Event

if TYPE_CHECKING:
    from torch import nn

    from slipstream.config import Config


@name_arguments
def train(
    config: Config | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    columns: Sequence[str] | None = None,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    init_from: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    on_event: Callable[[Event], None] | None = None,
    resume: str | os.PathLike[str] | None = None,
    force: bool = False,
    folder: str | os.PathLike[str] | None = None,
    model: type[nn.Module] | None = None,
    allow_code: bool = False,
    workers: int | Literal["auto"] | None = None,
    on: Literal["ray"] | None = None,
) -> Result:
    """Train a model and return its metrics.

    Slipstream reads the data, measures the fastest way to run the training step, trains with early
    stopping, scores every window of the model and the baselines, and writes all of it to a new run
    folder under the setting `out`. Progress is shown as by the command: a bar in a terminal and in
    a notebook, else a line per validation on stderr.

    Args:
        config: A TOML file, a mapping of sections, or a `Config`. It may be omitted with `resume`.
        data: A path or a table to use instead of `data.path`: pandas, polars (lazy too), duckdb,
            pyarrow, a dict of columns, or a numpy array with `columns`. An unnamed index of dates
            becomes the column that `data.time` names.
        columns: The names of the columns, where `data` is a numpy array.
        overrides: Settings that override `config`: "train.lr=1e-4", a list of such texts, or a
            mapping such as {"train.lr": 1e-4}.
        init_from: A pre-training run, or its `Result`, to start from: the setting
            `train.init_from`.
        quiet: Show no progress.
        on_event: A function that is called with every event as it is logged (`slipstream.events`,
            docs/events.md). An exception in it stops the run, which is saved first.
        resume: The folder, or the `Result`, of a run to continue from its newest checkpoint (from
            its beginning, if it has none yet), to the same end as if it had never stopped.
        force: Resume although settings have changed; other data are refused.
        folder: The run's folder, instead of a new one under `out`. A run that was stopped there is
            resumed, and the result of a finished one is returned.
        model: Your own `torch.nn.Module` class; docs/guide.md describes its interface.
        allow_code: Let a resumed run's config import the network class that it names. The config
            may come from anybody, so this needs your consent.
        workers: The number of processes that the models of `train.repeats` and of walk-forward
            folds are divided among, or "auto" for one per GPU; by default one, or as many as the
            resumed run had. The data must come from `data.path`.
        on: "ray" trains them on a Ray cluster; there, one worker per GPU or, without GPUs, per
            machine is the default.

    Returns:
        A `Result` with the run folder, the metrics of each set, the baselines and the history.

    Raises:
        UserError: A setting, the data or an argument is wrong; the message names the fix.
        Interrupted: Ctrl-C, SIGTERM or SIGUSR1 stopped the run, after it saved a checkpoint.

    Example:
        result = slipstream.train({"data": {"path": "ETTh1.csv", "targets": ["OT"]}})
        result.metrics["test"]["mae"]
        slipstream.train(resume=result, overrides="train.epochs=100")
    """
    job = prepare_job(
        "train", config, data, columns=columns, overrides=overrides, init_from=init_from
    )
    return _make_run(
        *(job, quiet, on_event),
        resume=_to_path(resume),
        force=force,
        folder=_to_path(folder),
        model=model,
        allow_code=allow_code,
        workers=workers,
        on=on,
    )


def _make_run(
    job: Job, quiet: bool, on_event: Callable[[Event], None] | None, **options: Any
) -> Result:
    """Train with progress shown; `options` are further fields of the `TrainRequest`."""
    place = find_place()
    with show_progress("training", quiet or is_follower(place), on_event) as show:
        from slipstream.training.request import TrainRequest
        from slipstream.training.run import train as run_training

        request = TrainRequest(**job._asdict(), watch=show, place=place, **options)
        finished = run_training(request)
    return Result(finished.run, finished.summary)


def _to_path(path: str | os.PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path)


@name_arguments
def pretrain(
    config: Config | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    columns: Sequence[str] | None = None,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    quiet: bool = False,
    on_event: Callable[[Event], None] | None = None,
    resume: str | os.PathLike[str] | None = None,
    force: bool = False,
    folder: str | os.PathLike[str] | None = None,
) -> Result:
    """Pre-train an encoder on unlabelled windows by masked reconstruction.

    The encoder learns to fill in masked rows. Pass the result to `train` as `init_from` to
    fine-tune it.

    Args:
        config: A TOML file, a mapping or a `Config`; targets and labels are not needed.
        data: A path or a table to use instead of `data.path`, as for `train`.
        columns: The names of the columns, where `data` is a numpy array.
        overrides: Settings that override `config`, as for `train`.
        quiet: Show no progress.
        on_event: A function that is called with every event, as for `train`.
        resume: The folder, or the `Result`, of a pre-training run to continue.
        force: Resume although settings have changed; other data are refused.
        folder: The run's folder, as for `train`.

    Returns:
        A `Result`; its metrics are those of masked rows of the validation set.

    Raises:
        UserError: A setting, the data or an argument is wrong.
        Interrupted: Ctrl-C, SIGTERM or SIGUSR1 stopped the run, after it saved a checkpoint.

    Example:
        encoder = slipstream.pretrain("bars.toml")
        slipstream.train("labels.toml", init_from=encoder)
    """
    job = prepare_job("pretrain", config, data, columns=columns, overrides=overrides)
    return _make_run(
        *(job, quiet, on_event),
        resume=_to_path(resume),
        force=force,
        folder=_to_path(folder),
        pretrain=True,
    )


@name_arguments
def tune(
    config: Config | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    columns: Sequence[str] | None = None,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    init_from: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    on_event: Callable[[Event], None] | None = None,
    resume: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    storage: str | None = None,
    workers: int | Literal["auto"] | None = None,
    on: Literal["ray"] | None = None,
    model: type[nn.Module] | None = None,
    allow_code: bool = False,
) -> Study:
    """Search for the settings with the lowest validation loss, and retrain the best ones.

    Optuna proposes the trials of `config.tune`; they train as lanes of one program. The best
    settings are retrained from fresh seeds and compared with `config` itself on the test set.

    Args:
        config: A TOML file, a mapping or a `Config`. It may be omitted with `resume`.
        data: A path or a table to use instead of `data.path`, as for `train`.
        columns: The names of the columns, where `data` is a numpy array.
        overrides: Settings that override `config`, as for `train`.
        init_from: A pre-training run, or its `Result`, that every trial starts from.
        quiet: Show no progress.
        on_event: A function that is called with every event, as for `train`.
        resume: The folder, or the `Study`, of a search to continue: finished trials are kept, the
            others continue from their pack's checkpoint.
        folder: The search's folder, as for `train`.
        storage: A study that several commands share: `journal:FILE` on a shared drive, or the URL
            of a database (`postgresql://...`, `sqlite:///...`); defaults to the environment
            variable SLIPSTREAM_STORAGE, else to the run folder.
        workers: The number of processes, or "auto" for one per GPU; by default one, or as many as
            the resumed search had.
        on: "ray" starts the workers on a Ray cluster.
        model: Your own `torch.nn.Module` class, as for `train`.
        allow_code: Let a resumed search's config import the network class that it names.

    Returns:
        A `Study` with the best config, the retrained model's result and Optuna's own study.

    Raises:
        UserError: A setting, the data or an argument is wrong, or no trial reached a finite loss.
        Interrupted: Ctrl-C, SIGTERM or SIGUSR1 stopped the search, after it saved its state.

    Example:
        study = slipstream.tune("job.toml", overrides="tune.trials=50")
        slipstream.train(study.best)
    """
    job = prepare_job(
        "tune", config, data, columns=columns, overrides=overrides, init_from=init_from
    )
    with show_progress("search", quiet, on_event) as show:
        with warnings.catch_warnings():  # Optuna's progress bars, which are not used
            warnings.filterwarnings("ignore", message="IProgress not found")
            from slipstream.search import api

        request = api.SearchRequest(
            **job._asdict(),
            watch=show,
            resume=_to_path(resume),
            folder=_to_path(folder),
            storage=storage,
            workers=workers,
            on=on,
            model=model,
            allow_code=allow_code,
        )
        finished = api.run_search(request)
    return Study(finished.run, finished.summary, finished.best, finished.study)


@name_arguments
def auto(
    source: Any = None,
    data: Any = None,
    *,
    targets: str | Sequence[str] | None = None,
    horizon: int | None = None,
    minutes: float | None = None,
    prefer: Literal["best", "fast", "small"] = "best",
    refit: bool = False,
    columns: Sequence[str] | None = None,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    quiet: bool = False,
    on_event: Callable[[Event], None] | None = None,
    resume: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    workers: int | Literal["auto"] | None = None,
    on: Literal["ray"] | None = None,
    allow_code: bool = False,
) -> Study:
    """Find the best model that a few minutes can buy.

    A portfolio of different models trains, then neighbours of the best, and the baselines are
    candidates too. All are judged on several validation blocks; an ensemble is selected from them
    where it is better than one model, its members are retrained from fresh seeds, and the test set
    is scored once.

    Args:
        source: A table (as `data` of `train`), a data file, a folder or a pattern, of which
            `inspect` proposes a config; or a config: a TOML file, a mapping or a `Config`. It may
            be omitted with `resume`.
        data: A path or a table to use instead of `data.path`, where `source` is a config.
        targets: The columns to predict, where `source` is no config.
        horizon: Rows to forecast, where `source` is no config; 0 estimates the targets at the last
            row.
        minutes: The time of the whole call; five, or those of the search to resume.
        prefer: "best" combines models where that is better, "fast" answers with one model, "small"
            with one that a microcontroller can run.
        refit: Also train the members on the rows of all sets, as a second model for use. It is
            untested: `Study.refit` is its folder. With `resume`, True adds it.
        columns: The names of the columns, where the table is a numpy array.
        overrides: Settings that override the config, as for `train`.
        quiet: Show no progress.
        on_event: A function that is called with every event, as for `train`.
        resume: The folder, or the `Study`, to continue with the minutes that are left.
        folder: The run's folder, as for `train`.
        workers: The number of processes, or "auto" for one per GPU.
        on: "ray" starts the workers on a Ray cluster.
        allow_code: Let a resumed config import the network class that it names.

    Returns:
        A `Study`: `leaderboard` has everything that was tried, `result` the model.

    Raises:
        UserError: A setting, the data or an argument is wrong, or only a person can decide it.
        Interrupted: A signal stopped it before there was a candidate.

    Example:
        study = slipstream.auto(table, targets=["load"], minutes=5)
        study.verdict
        study.predict(new_table)
    """
    from slipstream.config import search_space

    search_space.check_minutes(minutes)
    wanted = (targets,) if isinstance(targets, str) else tuple(targets or ())
    more = parse_overrides(overrides)
    if resume is not None and source is None:
        job = prepare_job("auto", None, data, columns=columns, overrides=overrides)
    elif is_config(source):
        if wanted or horizon is not None:
            raise UserError(
                "targets and horizon are for tables and data files; in a config they are "
                "data.targets and data.horizon: change them with overrides"
            )
        job = prepare_job("auto", source, data, columns=columns, overrides=overrides)
    elif data is not None:
        raise UserError("data goes with a config; give the table or the file as the only argument")
    else:
        job = _propose_job(source, wanted, horizon, columns, more, quiet=quiet)
    with show_progress("search", quiet, on_event) as show:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")
            from slipstream.search import api

        request = api.AutoRequest(
            **job._asdict(),
            watch=show,
            resume=_to_path(resume),
            folder=_to_path(folder),
            workers=workers,
            on=on,
            allow_code=allow_code,
            minutes=minutes,
            prefer=None if resume is not None and prefer == "best" else prefer,
            refit=refit,
        )
        finished = api.run_search(request)
        from slipstream.search.auto import to_public
    return Study(finished.run, to_public(finished.summary), finished.best, finished.study)


def _show_choice(lines: Iterable[str]) -> None:
    """Write what was chosen for a raw table to stderr, as the command does."""
    from slipstream.base.text import escape_controls
    from slipstream.reporting.terminal.streams import SafeStream

    SafeStream(sys.stderr).write(escape_controls("".join(f"{line}\n" for line in lines)))


def _propose_job(
    source: Any,
    targets: tuple[str, ...],
    horizon: int | None,
    columns: Sequence[str] | None,
    overrides: tuple[str, ...],
    *,
    quiet: bool,
) -> Job:
    """Return the config that `inspect` proposes for a file or a table, and the table; say what it
    has chosen."""
    from slipstream.tools.inspection import Aim, propose_config

    aim = Aim(targets, horizon)
    if isinstance(source, (str, os.PathLike)):
        config, findings = propose_config(os.fspath(source), aim, overrides)
        if not quiet:
            _show_choice(findings.describe_choice(config))
        return Job(config, None, ())
    import tempfile

    import pyarrow.parquet as pq

    from slipstream.data.table import to_arrow

    table = name_columns(source, columns)
    with tempfile.TemporaryDirectory() as place:  # inspect reads files
        path = Path(place) / "table.parquet"

        def hide(text: str) -> str:
            return text.replace(str(path), "the table")

        pq.write_table(to_arrow(table, time="time"), path)
        try:
            config, findings = propose_config(str(path), aim, overrides)
        except UserError as error:
            fix = None if error.fix is None else Message(error.fix).map_texts(hide)
            reason = error.reason.map_texts(hide)
            raise UserError(reason, fix=fix, setting=error.setting) from None
        if not quiet:
            _show_choice(map(hide, findings.describe_choice(config)))
    data = config.data.model_dump(exclude_unset=True)
    settings = config.model_dump(exclude_unset=True) | {"name": "auto"}
    settings["data"] = {name: value for name, value in data.items() if name != "path"}
    return Job(type(config).model_validate(settings), table, ())


@name_arguments
def ensemble(
    members: Sequence[str | os.PathLike[str]],
    data: Any = None,
    *,
    columns: Sequence[str] | None = None,
    name: str = "ensemble",
    out: str | os.PathLike[str] | None = None,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    quiet: bool = False,
    on_event: Callable[[Event], None] | None = None,
    allow_code: bool = False,
) -> Result:
    """Join finished runs into one run that predicts by their weighted mean.

    The weights are fitted to the validation set; none is negative, and they add up to one. Members
    may differ in kind, inputs and context. They must agree in targets, horizon, split and data. The
    new run folder contains everything it needs; `evaluate`, `predict` and `report` use it like any
    other.

    Args:
        members: Two or more runs, each as for `predict`. A search takes part with its best
            settings, a run with repeats with their mean or its best model, whichever validated
            better.
        data: The table that the members were trained on, where they were not trained on a file.
        columns: The names of the columns, where `data` is a numpy array.
        name: The start of the new run folder's name.
        out: The folder to create the run in; by default the setting `out` of the first member.
        overrides: Settings that override those of every member, such as "data.path=moved.csv".
        quiet: Show no progress.
        on_event: A function that is called with every event, as for `train`.
        allow_code: Let the members' configs import the network classes that they name.

    Returns:
        A `Result`; its summary has the members with their weights and metrics (`members`).

    Raises:
        UserError: The members do not agree, are not finished, or their data have changed.

    Example:
        kinds = ("lstm", "transformer", "mlp")
        runs = [slipstream.train("job.toml", overrides=f"model.kind={kind}") for kind in kinds]
        joined = slipstream.ensemble(runs)
        joined.metrics["test"]["mae"], [member["weight"] for member in joined.summary["members"]]
    """
    if isinstance(members, (str, os.PathLike)):
        raise UserError("an ensemble needs a list of two runs or more, not one")
    folders = [check_run(member) for member in members]
    job = prepare_job("ensemble", None, data, columns=columns, overrides=overrides)
    with show_progress("training", quiet, on_event) as show:
        from slipstream.search import ensemble as ensembling

        finished = ensembling.ensemble(
            folders,
            job.data,
            name=name,
            out=_to_path(out),
            overrides=job.overrides,
            watch=show,
            allow_code=allow_code,
        )
    return Result(finished.run, finished.summary)


@name_arguments
def probe(
    encoder: Config | str | os.PathLike[str] | Mapping[str, Any] | None,
    labels: Config | str | os.PathLike[str] | Mapping[str, Any],
    data: Any = None,
    *,
    columns: Sequence[str] | None = None,
    run: str | os.PathLike[str] | None = None,
    seeds: int = 10,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    label_overrides: str | Iterable[str] | Mapping[str, Any] = (),
    quiet: bool = False,
    on_event: Callable[[Event], None] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Probe:
    """Test whether pre-training helps a task with few labels.

    Pre-trains the encoder, then trains `labels` from scratch, on the frozen encoder and fine-tuned,
    from the same seeds, and compares the test metrics with paired intervals.

    Args:
        encoder: The config to pre-train with; None with `run`.
        labels: The config of the labelled task.
        data: A table to use instead of `data.path` of both configs.
        columns: The names of the columns, where `data` is a numpy array.
        run: The folder, or the `Result`, of an earlier pre-training run whose encoder is used.
        seeds: The number of seeds.
        overrides: Settings that override `encoder`.
        label_overrides: Settings that override `labels`.
        quiet: Show no progress.
        on_event: A function that is called with every event, as for `train`.
        folder: The folder of an earlier probe with the same settings to continue; finished runs
            are not trained again.

    Returns:
        A `Probe` with the folder of the four runs and the summary.

    Raises:
        UserError: A setting, the data or an argument is wrong.
        Interrupted: Ctrl-C, SIGTERM or SIGUSR1 stopped a run, after it saved a checkpoint.

    Example:
        print(slipstream.probe("bars.toml", "labels.toml", seeds=10))
    """
    job = prepare_job("probe", encoder, data, columns=columns, overrides=overrides)
    path = job.overrides[len(parse_overrides(overrides)) :]  # data.path, where data is a path
    with show_progress("training", quiet, on_event) as show:
        from slipstream.search import probe as probing

        finished = probing.probe(
            job.config,
            check_config("probe", labels, None),
            job.data,
            run=_to_path(run),
            seeds=seeds,
            overrides=job.overrides,
            label_overrides=(*parse_overrides(label_overrides), *path),
            watch=show,
            folder=_to_path(folder),
        )
    return Probe(finished.run, finished.summary)


@name_arguments
def train_share(
    config: Config | str | os.PathLike[str] | Mapping[str, Any],
    folder: str | os.PathLike[str],
    share: tuple[int, int],
    *,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    quiet: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Train one share of a run's folds and repeats, as in a task of an array job.

    The first call, on any machine, creates the run in `folder`; a stopped share continues with the
    same call. When all shares are trained, `train` with the same `config` and `folder` joins them,
    scores the models and returns the result.

    Args:
        config: A TOML file, a mapping of sections, or a `Config`, the same for all shares. The data
            must come from `data.path`.
        folder: The folder of the whole run, on a drive that all machines share.
        share: Which share of how many, from 1: (3, 8).
        overrides: Settings that override `config`, as for `train`.
        quiet: Show no progress.
        on_event: A function that is called with every event of the share, as for `train`.

    Returns:
        A dict: `run`, `share`, `of`, and `lanes`, the numbers of its models; none where the run is
        finished or has fewer models than shares.

    Raises:
        UserError: A setting, the data or an argument is wrong, or the run is divided otherwise.
        Interrupted: Ctrl-C, SIGTERM or SIGUSR1 stopped the share, after it saved a checkpoint.

    Example:
        for number in (1, 2):
            slipstream.train_share("job.toml", "runs/job", (number, 2))
        result = slipstream.train("job.toml", folder="runs/job")
    """
    job = prepare_job("train_share", config, None, overrides=overrides)
    number, of = _check_share(share)
    with show_progress("training", quiet, on_event) as show:
        from slipstream import config as configs
        from slipstream.training.array_jobs import ShareNumber, train_share_of

        loaded = configs.load(job.config, job.overrides)
        return train_share_of(loaded, Path(folder), ShareNumber(number, of), watch=show)


def _check_share(share: Any) -> tuple[int, int]:
    match share:
        case (int(number), int(of)) if 0 < number <= of:
            return number, of
    raise UserError(f"share is {share!r}; give (I, N) with I from 1 to N, as in (3, 8)")
