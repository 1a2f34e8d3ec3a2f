"""Commands that train: train, pretrain."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream import terminal
from slipstream.cli.options import AllowCode, Force, Json, Quiet, Resume, Set, load_job
from slipstream.cli.output import handle_errors, print_result
from slipstream.errors import UserError
from slipstream.terminal import TrainingDisplay

if TYPE_CHECKING:
    from slipstream.runs import Event


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo.")
    ] = None,
    resume: Resume = None,
    force: Force = False,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, compare it with baselines, and write a report."""
    with handle_errors(as_json):
        loaded, resume = load_job(config, resume, set_, demo="demo")
        with TrainingDisplay(quiet) as display:
            display.say("loading torch and the data ...")
            from slipstream.training import train as run_training

            result = run_training(
                loaded,
                overrides=() if loaded else tuple(set_ or ()),
                watch=lambda event: _watch(event, display),
                resume=resume,
                force=force,
                allow_code=allow_code,
            )
            path = _write_report(result.run, display)
        summary = result.summary | {"report": str(path)}
        print_result(summary, as_json, quiet, terminal.print_training)


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
    set_: Set = None,
    probe_set: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=VALUE", help="As --set, for the config of --probe."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pre-train an encoder on unlabelled windows, for train.init_from; or test if it helps."""
    with handle_errors(as_json):
        if probe is None and encoder is None and (config is not None or resume is not None):
            _pretrain(config, resume, force, set_, as_json, quiet)
            return
        if probe is None and encoder is not None:
            raise UserError("--encoder needs --probe: name the config to probe the encoder with")
        if resume == "last":
            raise UserError("--resume needs the folder of the probe here, not last")
        from slipstream import config as configs

        with TrainingDisplay(quiet) as display:
            display.say("loading torch and the data ...")
            from slipstream.probing import probe as run_probe

            result = run_probe(
                configs.load_demo("bars") if probe is None else config,
                configs.load_demo("regimes") if probe is None else probe,
                run=encoder,
                seeds=seeds,
                overrides=tuple(set_ or ()),
                label_overrides=tuple(probe_set or ()),
                watch=display.show,
                folder=resume,
            )
            path = _write_report(result.run, display)
        summary = result.summary | {"report": str(path)}
        print_result(summary, as_json, quiet, terminal.print_probe)


def _pretrain(
    config: Path | None,
    resume: str | None,
    force: bool,
    set_: list[str] | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from slipstream.config import PRETRAIN_OVERRIDE

    loaded, resume = load_job(config, resume, set_, [PRETRAIN_OVERRIDE], demo="demo")
    with TrainingDisplay(quiet) as display:
        display.say("loading torch and the data ...")
        from slipstream.training import pretrain as run_pretraining

        result = run_pretraining(
            loaded,
            overrides=() if loaded else tuple(set_ or ()),
            watch=lambda event: _watch(event, display),
            resume=resume,
            force=force,
        )
        path = _write_report(result.run, display)
    print_result(result.summary | {"report": str(path)}, as_json, quiet, terminal.print_training)


def _watch(event: Event, display: TrainingDisplay) -> None:
    if event["event"] == "start":  # importing it takes a second, so do that while the model trains
        module = "slipstream.reporting"
        threading.Thread(target=importlib.import_module, args=(module,), daemon=True).start()
    display.show(event)


def _write_report(run: Path, display: TrainingDisplay) -> Path:
    display.say("writing the report ...")
    from slipstream.reporting import report

    return report(run)
