"""Commands that make runs: train, pretrain, tune, auto, ensemble."""

from __future__ import annotations

import importlib
import shlex
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import typer

from slipstream.base.errors import Interrupted, UserError
from slipstream.base.phases import PhaseTimer, find_process_start
from slipstream.base.rank import find_place, is_follower
from slipstream.base.text import format_count
from slipstream.cli.options import (
    RUN_HELP,
    AllowCode,
    Folder,
    Force,
    Json,
    Out,
    Quiet,
    Resume,
    Set,
    list_overrides,
    load_job,
    parse_path,
    refuse_several_folders,
)
from slipstream.cli.output import (
    Printer,
    handle_errors,
    print_note,
    print_result,
    to_json_line,
    write_stdout,
)
from slipstream.cli.startup import import_modules, prepare_device
from slipstream.events import Epoch, Event
from slipstream.reporting.terminal.progress import LOADING, SearchDisplay, TrainingDisplay
from slipstream.reporting.terminal.results import (
    print_auto,
    print_ensemble,
    print_probe,
    print_report,
    print_search,
    print_training,
)
from slipstream.reporting.terminal.streams import SafeStream
from slipstream.runs.summary import RunSummary, Summary

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.training import FinishedRun

KINDS = ["train", "pretrain"]
"""Runs that `train --resume` continues"""


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo.")
    ] = None,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            help="Then measure changes of settings by short trainings, at least 6 s each.",
        ),
    ] = False,
    resume: Resume = None,
    force: Force = False,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Divide repeats and folds among N processes; auto: one per GPU.",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ray", help="Divide repeats and folds among workers on Ray."),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Train share I of N of the repeats and folds in --folder, as in 3/8; without it "
            "the command then joins them.",
        ),
    ] = None,
    allow_code: AllowCode = False,
    folder: Folder = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, compare it with baselines, and write a report."""
    with handle_errors(as_json, quiet):
        refuse_several_folders(folder, resume, out)
        overrides, output = list_overrides(set_, out), Output(as_json, quiet, print_training)
        options: dict[str, Any] = {"folder": folder, "force": force, "allow_code": allow_code}
        options |= {"workers": _parse_workers(workers), "on": _parse_cluster(on)}
        if share is not None:
            _train_share(share, config, overrides, output, options)
            return
        _make_run(config, resume, overrides, output, advise=advise, **options)


def parse_probe_set(text: str) -> str:
    """Parse a `--probe-set`; messages about it name the option."""
    from slipstream.config import OptionText

    return OptionText(text, "--probe-set")


def pretrain(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file; targets and labels are not needed. Without one, the embedded probe."
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Then train CONFIG from scratch, frozen and fine-tuned, and compare.",
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Probe the encoder of RUN instead of a new one."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="The number of seeds of the probe.")] = 10,
    resume: Resume = None,
    force: Force = False,
    folder: Folder = None,
    out: Out = None,
    set_: Set = None,
    probe_set: Annotated[
        list[str] | None,
        typer.Option(
            parser=parse_probe_set,
            metavar="SECTION.KEY=VALUE",
            help="As --set, for the config of --probe.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pre-train an encoder on unlabelled windows.

    Other runs start from it (train.init_from); --probe measures whether that helps.
    """
    with handle_errors(as_json, quiet):
        refuse_several_folders(folder, resume, out)
        overrides = list_overrides(set_, out)
        if probe is None and encoder is None and (config is not None or resume is not None):
            options: dict[str, Any] = {"force": force, "folder": folder, "pretrain": True}
            _make_run(config, resume, overrides, Output(as_json, quiet, print_training), **options)
            return
        if folder is not None:
            raise UserError("--folder is for one run, not for a probe of several; pass --out")
        if probe is None and encoder is not None:
            raise UserError("--encoder needs --probe: name the config to probe the encoder with")
        from slipstream import config as configs

        with TrainingDisplay(quiet) as display:
            display.say(LOADING)
            with import_modules():
                from slipstream.search.probe import probe as run_probe

            result = run_probe(
                configs.load_demo("bars") if probe is None else config,
                configs.load_demo("regimes") if probe is None else probe,
                run=encoder,
                seeds=seeds,
                overrides=overrides,
                label_overrides=tuple(probe_set or ()),
                watch=display.show,
                folder=resume,
            )
        finish(result.summary, Output(as_json, quiet, print_probe))


def tune(
    config: Annotated[
        Path | None,
        typer.Argument(help="A TOML file; without one, a small search on embedded data."),
    ] = None,
    resume: Resume = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A study that several commands share: journal:FILE on a shared drive, or "
            "postgresql://USER@HOST/DATABASE; default: SLIPSTREAM_STORAGE.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="The number of processes; auto: one per GPU."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ray", help="Start the workers on a Ray cluster."),
    ] = None,
    allow_code: AllowCode = False,
    folder: Folder = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search hyper-parameters and retrain the best settings.

    Many trials train at a time; they stop early where they fall behind.
    """
    with handle_errors(as_json, quiet):
        refuse_several_folders(folder, resume, out)
        overrides, timer = list_overrides(set_, out), PhaseTimer(find_process_start())
        loaded, earlier = load_job(config, resume, overrides, demo="search", kinds=("search",))
        if loaded and workers is None and on is None:
            prepare_device(loaded.engine.device)
        with SearchDisplay(quiet) as display:
            display.say(LOADING)
            with import_modules():
                from slipstream.search.api import SearchRequest, run_search

            _warn_about_password(storage)
            has_classes = loaded is not None and loaded.data.task == "classify"
            request = SearchRequest(
                config=loaded,
                overrides=() if loaded else overrides,
                watch=lambda event: show_event(event, display, has_classes),
                resume=earlier,
                folder=folder,
                storage=storage,
                workers=_parse_workers(workers),
                on=_parse_cluster(on),
                allow_code=allow_code,
                timer=timer,
            )
            study = run_search(request)
        finish(study.summary, Output(as_json, quiet, print_search), timer)


def auto(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA|CONFIG",
            help="A file, a folder or a pattern of data files, or a TOML file; without one, the "
            "embedded demo.",
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="The columns to predict, of a file without a config."),
    ] = None,
    horizon: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS", help="Rows to forecast; 0 estimates the target's last row.", min=0
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="The time of the whole command; 5 where nothing is said."),
    ] = None,
    prefer: Annotated[
        str | None,
        typer.Option(
            metavar="best|fast|small",
            help="best: an ensemble where it is better; fast: one model; small: one that a "
            "microcontroller can run; default: best.",
        ),
    ] = None,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help="Also write a model for use that is trained on all rows, and so untested.",
        ),
    ] = False,
    resume: Resume = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="The number of processes; auto: one per GPU."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ray", help="Start the workers on a Ray cluster."),
    ] = None,
    allow_code: AllowCode = False,
    folder: Folder = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the best model that a few minutes can buy.

    Many different models train at a time; the best of them are combined, retrained and tested.
    """
    with handle_errors(as_json, quiet):
        refuse_several_folders(folder, resume, out)
        if prefer not in (None, "best", "fast", "small"):
            raise UserError(f'--prefer is "{prefer}"; it should be best, fast or small')
        from slipstream.config import search_space

        search_space.check_minutes(minutes)
        overrides, timer = list_overrides(set_, out), PhaseTimer(find_process_start())
        wanted = tuple(name.strip() for name in (targets or "").split(",") if name.strip())
        is_config = source is None or source.endswith(".toml")
        if resume and (wanted or horizon is not None or not is_config):
            given = source if not is_config else "--targets and --horizon"
            raise UserError(f"--resume continues a search with its own data; remove {given}")
        if is_config and (wanted or horizon is not None):
            raise UserError(
                "--targets and --horizon are for data files; in a config they are data.targets and "
                "data.horizon: change them with --set"
            )
        if is_config or resume:
            path = Path(source) if source is not None else None
            loaded, earlier = load_job(path, resume, overrides, demo="search", kinds=("auto",))
        else:
            assert source is not None
            loaded, earlier = _propose(source, wanted, horizon, overrides, quiet), None
        if loaded and workers is None and on is None:
            prepare_device(loaded.engine.device)
        with SearchDisplay(quiet) as display:
            display.say(LOADING)
            with import_modules():
                from slipstream.search.api import AutoRequest, run_search
                from slipstream.search.auto import to_public

            has_classes = loaded is not None and loaded.data.task == "classify"
            request = AutoRequest(
                config=loaded,
                overrides=() if loaded else overrides,
                watch=lambda event: show_event(event, display, has_classes),
                resume=earlier,
                folder=folder,
                workers=_parse_workers(workers),
                on=_parse_cluster(on),
                allow_code=allow_code,
                timer=timer,
                minutes=minutes,
                prefer=cast(Any, prefer),
                refit=refit,
            )
            before = _read_seconds(earlier)
            study = run_search(request)
        if study.summary["seconds"] == before and not quiet:
            more = f"slipstream auto --resume {shlex.quote(str(study.run))} --minutes M"
            print_note(f"the search has used its minutes, and this is its answer; for more: {more}")
        finish(to_public(study.summary), Output(as_json, quiet, print_auto), timer)
        refitted = study.summary["refit"]
        is_cut = refitted is not None and refitted["state"] == "interrupted"
        if study.summary["interrupted"] or is_cut:
            raise SystemExit(128 + signal.SIGINT)


def _read_seconds(folder: Path | None) -> float | None:
    """Return the time that a search of `slipstream auto` took; None where it has no answer."""
    from slipstream import runs

    if folder is None or not (folder / "metrics.json").exists():
        return None
    return runs.read_metrics(folder).get("seconds")


def _propose(
    source: str,
    targets: tuple[str, ...],
    horizon: int | None,
    overrides: tuple[str, ...],
    quiet: bool,
) -> Config:
    """Return the config that inspect proposes for files, and say what it has chosen."""
    from slipstream.data.table import avoid_pandas
    from slipstream.tools.inspection import Aim, propose_config

    avoid_pandas()
    config, findings = propose_config(source, Aim(targets, horizon), overrides)
    if not quiet:
        for line in findings.describe_choice(config):
            print_note(line)
        command = f"slipstream inspect {shlex.quote(source)} --write job.toml"
        print_note(f"  change any of this with --set, or write a config: {command}")
    return config


def ensemble(
    run: Annotated[
        list[Path],
        typer.Argument(parser=parse_path, metavar="RUN", help=f"The members, each {RUN_HELP}"),
    ],
    name: Annotated[str, typer.Option(help="The start of the new run folder's name.")] = "ensemble",
    allow_code: AllowCode = False,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Join finished runs into one that predicts their weighted mean."""
    with handle_errors(as_json, quiet):
        with TrainingDisplay(quiet) as display:
            display.say(LOADING)
            with import_modules():
                from slipstream.search.ensemble import ensemble as join_runs

            overrides = tuple(set_ or ())
            options: dict[str, Any] = {"watch": display.show, "allow_code": allow_code}
            result = join_runs(run, name=name, out=out, overrides=overrides, **options)
        finish(result.summary, Output(as_json, quiet, print_ensemble))


def _make_run(
    config: Path | None,
    resume: str | None,
    overrides: tuple[str, ...],
    output: Output,
    *,
    advise: bool = False,
    **options: Any,
) -> None:
    """Run the training or pre-training, and write its report; `options` are further fields of the
    `TrainRequest`."""
    timer = PhaseTimer(find_process_start())
    from slipstream.config import PRETRAIN_OVERRIDE

    always, kinds = [], KINDS
    if options.get("pretrain"):
        always, kinds = [PRETRAIN_OVERRIDE], ["pretrain"]
    loaded, earlier = load_job(config, resume, overrides, always, demo="demo", kinds=kinds)
    place = find_place()
    is_alone = place is None and options.get("workers") is None and options.get("on") is None
    if loaded and is_alone and loaded.engine.data_parallel == 1:
        prepare_device(loaded.engine.device)
    follows = is_follower(place)
    has_classes = loaded is not None and loaded.data.task == "classify"
    with TrainingDisplay(output.quiet or follows) as display:
        display.say(LOADING)
        with import_modules():
            from slipstream.training.request import TrainRequest
            from slipstream.training.run import train as run_training

        request = TrainRequest(
            config=loaded,
            overrides=() if loaded else overrides,
            watch=lambda event: show_event(event, display, has_classes),
            resume=earlier,
            timer=timer,
            place=place,
            **options,
        )
        result = run_training(request)
        if follows:  # the first process prints and reports
            return
        summary = result.summary
        if advise:
            summary = _advise(result, display)
            summary["time"] = timer.extend(summary["time"], "advice_s")
    if not result.is_new:
        print_note(f"slipstream: {result.run}: was finished before; nothing is left to train")
    finish(summary, output, timer if result.is_new else None)


def _train_share(
    text: str,
    config: Path | None,
    overrides: tuple[str, ...],
    output: Output,
    options: dict[str, Any],
) -> None:
    """Train one share of a run; other shares train the remaining models."""
    timer = PhaseTimer(find_process_start())
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 0 < int(number) <= int(of)):
        raise UserError(f"--share is {text}; give I/N with I from 1 to N, as in 3/8")
    folder = options["folder"]
    if folder is None or options["workers"] is not None or options["on"] is not None:
        raise UserError("--share needs --folder, that of the whole run, and no --workers or --on")
    loaded, _ = load_job(config, None, overrides, demo="demo", kinds=KINDS)
    assert loaded is not None
    prepare_device(loaded.engine.device)
    with TrainingDisplay(output.quiet) as display:
        display.say(LOADING)
        with import_modules():
            from slipstream.training.array_jobs import ShareNumber, train_share_of

        share = ShareNumber(int(number), int(of))
        result = train_share_of(loaded, folder, share, watch=display.show, timer=timer)
    if output.as_json:
        write_stdout(to_json_line(result))
    elif not output.quiet:
        write_stdout(f"share {text} of {result['run']}: {_describe_share(result)}\n")


def _describe_share(result: dict[str, Any]) -> str:
    """Describe the models that a share has trained, and the models that remain."""
    from slipstream import runs

    trained = format_count(len(result["lanes"]), "model")
    trained = f"{trained} trained" if result["lanes"] else "nothing is left to train"
    shares = runs.count_shares(Path(result["run"]))
    if shares is None:
        return trained
    if shares.done < shares.of:
        return f"{trained}; {shares.done} of {shares.of} shares done"
    join = f"slipstream train --resume {result['run']}"
    return f"{trained}; all shares done, join them with: {join}"


def _advise(result: FinishedRun, display: TrainingDisplay) -> RunSummary:
    """Measure changes that may help. The run is complete by then, so an interrupt only skips
    this."""
    from slipstream import runs
    from slipstream.training import advice

    try:
        config = runs.load_config(runs.Run(result.run))
        return advice.advise_run(result.run, config, display.say)
    except KeyboardInterrupt:
        display.say("interrupted: what may help was not measured")
        return result.summary


def _warn_about_password(storage: str | None) -> None:
    from slipstream.base.text import holds_secret

    if storage is not None and holds_secret(storage):
        SafeStream(sys.stderr).write(
            "slipstream: warning: --storage contains a password, which every user of this machine "
            "can see in the process list; set the URL in SLIPSTREAM_STORAGE, or the password in "
            "PGPASSWORD or ~/.pgpass\n"
        )


def _parse_workers(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise UserError(f"--workers is {text}; expected a number from 1, or auto")
    return int(text)


def _parse_cluster(text: str | None) -> Literal["ray"] | None:
    if text not in (None, "ray"):
        raise UserError(f"--on is {text}; expected ray")
    return "ray" if text else None


REPORTING = "slipstream.reporting.page"


def show_event(event: Event, display: TrainingDisplay | SearchDisplay, has_classes: bool) -> None:
    """Show an event; from the first epoch on, prepare the command's end."""
    display.show(event)
    if isinstance(event, Epoch) and REPORTING not in sys.modules:
        threading.Thread(target=_prepare_end, args=(has_classes,), daemon=True).start()


def _prepare_end(has_classes: bool) -> None:
    """Import the modules of baselines and report, and compile the report's templates, while the
    model trains."""
    with suppress(Exception):  # who needs it raises it again
        importlib.import_module(REPORTING)
        if has_classes:
            importlib.import_module("scipy.optimize")
        importlib.import_module("slipstream.reporting.template").compile_templates()


class Output(NamedTuple):
    """How a summary is printed."""

    as_json: bool
    quiet: bool
    print_text: Printer = print_training


class DrawnReport(NamedTuple):
    """The report of a run, or the exit code of the signal that came while it was drawn."""

    path: Path | None
    exit_code: int = 0


def finish(summary: Summary, output: Output, timer: PhaseTimer | None = None) -> None:
    """Print the summary, then draw the report; JSON has the path of the report, and comes last."""
    closed = None
    if not output.as_json:
        try:
            print_result(summary, *output)
        except SystemExit as stop:  # the reader of stdout has gone
            closed = stop
    report = _draw_report(summary, timer)
    path = report.path and str(report.path)
    if output.as_json:
        print_result({**summary, "report": path}, *output)
    elif not closed:
        paths = {"run": summary["run"], "report": path}
        print_result(paths, *output._replace(print_text=print_report))
    if closed:
        raise closed
    if path is None:
        message = "the run is complete, but its report was interrupted; draw it with: slipstream "
        SafeStream(sys.stderr).write(f"slipstream: {message}report {summary['run']}\n")
        raise SystemExit(report.exit_code)


def _draw_report(summary: Summary, timer: PhaseTimer | None) -> DrawnReport:
    """Draw the report and add its time. The run is complete by then, so an interrupt only skips the
    report."""
    from slipstream import runs

    folder = Path(summary["run"])
    try:
        from slipstream.reporting.page import report

        path = report(folder)
        if timer is not None:
            summary["time"] = timer.extend(summary["time"], "report_s")
            runs.update_metrics(folder, time=summary["time"])
        return DrawnReport(path)
    except KeyboardInterrupt:
        return DrawnReport(None, 128 + signal.SIGINT)
    except Interrupted as stop:
        return DrawnReport(None, stop.exit_code)
