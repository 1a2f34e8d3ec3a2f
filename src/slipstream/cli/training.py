"""Commands that train: train, pretrain."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream import terminal
from slipstream.cli.options import AllowCode, Force, Json, Quiet, Resume, Set, asked
from slipstream.cli.output import answering, print_result
from slipstream.errors import UserError
from slipstream.terminal import TrainingDisplay

if TYPE_CHECKING:
    from slipstream.runs import Event


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo trains.")
    ] = None,
    resume: Resume = None,
    force: Force = False,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, score it beside the baselines, write a report."""
    _train("train", config, resume, force, set_, as_json, quiet, allow_code=allow_code)


def _train(
    verb: str,
    config: Path | None,
    resume: str | None,
    force: bool,
    set_: list[str] | None,
    as_json: bool,
    quiet: bool,
    **more: bool,
) -> None:
    with answering(as_json):
        from slipstream import config as configs

        always = [configs.PRETRAIN_OVERRIDE] if verb == "pretrain" else []
        settings, resume = asked(config, resume, set_, always, demo="demo")
        with TrainingDisplay(quiet) as watching:
            watching.say("loading torch and the data ...")
            from slipstream import training

            def watch(event: Event) -> None:
                if event["event"] == "start":
                    _load_meanwhile("slipstream.reporting")
                watching.show(event)

            run = {"train": training.train, "pretrain": training.pretrain}[verb]
            result = run(
                settings,
                overrides=() if settings else tuple(set_ or ()),
                watch=watch,
                resume=resume,
                force=force,
                **more,
            )
            watching.say("drawing the report ...")
            from slipstream.reporting import report

            path = report(result.run)
        print_result(
            result.summary | {"report": str(path)}, as_json, quiet, terminal.print_training
        )


def _load_meanwhile(module: str) -> None:
    """Import while a model trains what takes a second, and is needed only after it."""
    threading.Thread(target=importlib.import_module, args=(module,), daemon=True).start()


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
            help="Then train this from scratch, frozen and fine-tuned, and say whether it helped.",
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Probe with the encoder of this run, not a new one."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of each way to probe.")] = 10,
    resume: Resume = None,
    force: Force = False,
    set_: Set = None,
    probe_set: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=VALUE", help="As --set, for the config to probe with."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pre-train an encoder on windows without labels, for train.init_from; or see if it helps."""
    if probe is None and encoder is None and (config is not None or resume is not None):
        _train("pretrain", config, resume, force, set_, as_json, quiet)
        return
    with answering(as_json):
        from slipstream import config as configs

        if probe is None and encoder is not None:
            raise UserError("--encoder goes with --probe: name the config to probe it with")
        if resume == "last":
            raise UserError("--resume takes the folder of a probe here, not last")
        demo = probe is None
        with TrainingDisplay(quiet) as watching:
            watching.say("loading torch and the data ...")
            from slipstream.probing import probe as run_probe
            from slipstream.reporting import report

            found = run_probe(
                configs.load_demo("bars") if demo else config,
                configs.load_demo("regimes") if probe is None else probe,
                run=encoder,
                seeds=seeds,
                overrides=tuple(set_ or ()),
                label_overrides=tuple(probe_set or ()),
                watch=watching.show,
                folder=resume,
            )
            watching.say("drawing the report ...")
            path = report(found.run)
        print_result(found.summary | {"report": str(path)}, as_json, quiet, terminal.print_probe)
