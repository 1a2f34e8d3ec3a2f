"""What a terminal shows of a run: the plan, the progress, and the results."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slipstream.terminal.console import (
    TextTable,
    create_progress_console,
    create_text_column,
    print_text,
)
from slipstream.text import escape_to_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

REFRESH_S = 0.1


class TrainingDisplay:
    """What stderr shows while training: a bar on a terminal, else a line per validation."""

    def __init__(self, quiet: bool) -> None:
        self.console = create_progress_console(quiet)
        self.bar: Progress | None = None
        self.drawn_at = 0.0
        self.loss = self.val_loss = "–"
        self.lanes: LaneProgress | None = None

    def __enter__(self) -> TrainingDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, text: str) -> None:
        print_text(self.console, text, "dim")

    def show(self, event: dict[str, Any]) -> None:
        """Take in one event of the run."""
        match event["event"]:
            case "start":
                self._start(event)
            case "log" if self.lanes:
                self.loss = self.lanes.log(event)
                self._draw(event["step"])
            case "epoch" if self.lanes:
                self.val_loss = self.lanes.validated(event)
            case "lane" if self.lanes:
                told = self.lanes.ended(event)
                if not self.bar:
                    self.say(told)
            case "trained" if self.lanes:
                self._close_bar()
                self.say(self.lanes.told())
            case "log" if self.bar:
                self.loss = f"{event['loss']:.4g}"
                self._draw(event["step"])
            case "step" if self.bar:
                self._draw(event["step"])
            case "epoch":
                self.val_loss = f"{event['val_loss']:.4g}"
                if not self.bar:
                    best = " (best)" if event["best"] else ""
                    self.say(
                        f"epoch {event['epoch']:g}: training {event['train_loss']:.4g}, validation "
                        f"{self.val_loss}{best}, {event['seconds']:.1f} s"
                    )
            case "resume":
                differs = f", but not bit for bit: {event['differs']}" if event["differs"] else ""
                done = f", with {event['lanes']}" if "lanes" in event else ""
                self.say(f"going on from step {event['step']:,}{done}{differs}")
            case "cache":
                size = f"{event['copies']} augmented copies, {event['bytes'] / 1e6:,.0f} MB"
                self.say(f"{event['what']} {size}: {event['folder']}")
            case "probe":
                self.say(event["what"])
            case "thaw":
                self.say(f"from epoch {event['epoch']} on, {event['what']} is trained too")
            case "trouble":
                self.say(event["what"])
            case "fallback":
                self.say(f"{event['what']}: {event['why']}")
            case "recovery":
                self.say(f"{event['what']}: going on with {event['remedy']}")
            case "estimate":
                from slipstream.reporting import format_seconds

                whole = format_seconds(event["expected_s"])
                self.say(f"after ten steps: {whole} of training to expect, validations aside")
            case "plan" if not 0.7 < event.get("ratio", 1.0) < 1.4:
                self.say(
                    f"the plan promised {event['promised_ms']:.3g} ms a step, the first epoch "
                    f"took {event['seen_ms']:.3g}"
                )
            case "trained":
                self._close_bar()
                self.say(
                    f"{event['stopped']}: {event['step']:,} steps, best after epoch "
                    f"{event['best_epoch']:g}"
                )
            case "scoring":
                self.say(f"scoring {event['what']} ...")

    def _close_bar(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None

    def _start(self, event: dict[str, Any]) -> None:
        counts, plan = event["windows"], event["plan"]
        tested = f", {counts['test']:,} test" if counts["test"] else ""
        self.say(
            f"{event['series']:,} series; windows: {counts['train']:,} training, "
            f"{counts['val']:,} validation{tested}; {event['parameters']:,} parameters"
        )
        num_steps = event["steps_per_epoch"] * event["epochs"] * event.get("rounds", 1)
        if "pack" in event:
            self.lanes = LaneProgress(event["pack"])
            self.say(self.lanes.plan())
        for line in describe_plan(plan, num_steps, event["expected_s"]):
            self.say(line)
        for note in event["notes"][:5]:
            self.say(f"note: {note}")
        if len(event["notes"]) > 5:
            self.say(f"note: and {len(event['notes']) - 5} more, in the report")
        if self.console.is_terminal and not self.console.quiet:
            self._open_bar(event)

    def _open_bar(self, event: dict[str, Any]) -> None:
        from rich import progress

        self.bar = progress.Progress(
            create_text_column("epoch {task.fields[epoch]}"),
            progress.BarColumn(),
            create_text_column("{task.fields[speed]} steps/s"),
            create_text_column("loss {task.fields[loss]}, validation {task.fields[val]}"),
            progress.TimeRemainingColumn(),
            create_text_column("left"),
            console=self.console,
            auto_refresh=False,
            transient=True,
        )
        self.steps_per_epoch, self.epochs = event["steps_per_epoch"], event["epochs"]
        self.epochs *= event.get("rounds", 1)
        total = self.steps_per_epoch * self.epochs
        self.bar.add_task("", total=total, epoch="1", loss="–", val="–", speed="–")
        self.bar.start()

    def _draw(self, step: int) -> None:
        """Move the bar, at most ten times a second: drawing costs a millisecond."""
        now = time.monotonic()
        if self.bar is None or now - self.drawn_at < REFRESH_S:
            return
        self.drawn_at = now
        task = self.bar.tasks[0]
        self.bar.update(
            task.id,
            completed=step,
            epoch=f"{min(step // self.steps_per_epoch + 1, self.epochs)}/{self.epochs}",
            loss=self.loss,
            val=self.val_loss,
            speed=f"{task.speed:,.3g}" if task.speed else "–",
        )
        self.bar.refresh()


class LaneProgress:
    """Where each of several models stands."""

    def __init__(self, pack: dict[str, Any]) -> None:
        self.pack = pack
        self.done: dict[int, str] = {}
        self.before: int = pack["done"]
        """How many had ended when the run was resumed"""
        self.best: dict[int, float] = {}

    def plan(self) -> str:
        pack = self.pack
        folds, repeats = pack["folds"], pack["repeats"]
        parts = [f"{folds} folds"] if folds else []
        parts += [f"{repeats} seeds"] if repeats > 1 else []
        some = pack["places"] < pack["lanes"]
        how = f"{pack['places']} at a time" if some else "all at once"
        way = "as one program" if pack["mode"] == "together" else "side by side"
        return f"lanes: {' x '.join(parts)} = {pack['lanes']} models, {how}, {way} ({pack['why']})"

    def name(self, lane: int) -> str:
        """By its fold, counted from 1, and its seed."""
        fold, repeat = divmod(lane, self.pack["repeats"])
        parts = [f"fold {fold + 1}"] if self.pack["folds"] else []
        parts += [f"seed {self.pack['seed'] + repeat}"] if self.pack["repeats"] > 1 else []
        return ", ".join(parts)

    def log(self, event: dict[str, Any]) -> str:
        """The mean loss of those at work."""
        losses = [loss for loss in event["losses"].values() if loss is not None]
        return f"{sum(losses) / len(losses):.4g}" if losses else "–"

    def validated(self, event: dict[str, Any]) -> str:
        """The best validation loss so far, whose it is, and how many are still at work."""
        if event["best"]:
            self.best[event["lane"]] = event["val_loss"]
        at_work = min(self.pack["lanes"] - self._ended, self.pack["places"])
        return f"{self._best()}; {at_work} lanes at work, {self._ended} done"

    @property
    def _ended(self) -> int:
        return self.before + len(self.done)

    def _best(self) -> str:
        """Over seeds the lowest; over folds, which are other windows each, the mean."""
        if not self.best:
            return "–"
        if self.pack["folds"]:
            return f"{sum(self.best.values()) / len(self.best):.4g} on average"
        lane = min(self.best, key=lambda one: self.best[one])
        return f"{self.best[lane]:.4g} ({self.name(lane)})"

    def ended(self, event: dict[str, Any]) -> str:
        self.done[event["lane"]] = event["stopped"]
        loss, found = event["best_loss"], "no finite loss"
        if math.isfinite(loss):
            found = f"best {loss:.4g} after epoch {event['best_epoch']:g}"
        told = f"{self.name(event['lane'])}: {event['stopped']}, {found}"
        return f"lane {self._ended} of {self.pack['lanes']} done: {told}"

    def told(self) -> str:
        reasons = collections.Counter(self.done.values())
        said = "; ".join(f"{why}: {count}" for why, count in reasons.most_common())
        told = f"{self._ended} of {self.pack['lanes']} lanes done"
        return f"{told} ({said}); best validation loss {self._best()}" if self.done else told


def describe_plan(plan: dict[str, Any], num_steps: int, expected_s: float) -> Iterator[str]:
    """What will run and why, in a few lines."""
    where = plan["hardware"].get("gpu", plan["hardware"]["cpu"])
    reasons = plan["reasons"]
    yield f"plan: {plan['device']} ({where}); data: {plan['home']} ({reasons['home']})"
    how = [plan["precision"] + _gain(plan, "precision = fp32", "fp32", reasons["precision"])]
    if plan["device"] == "cpu":
        how.append(f"{plan['threads']} threads ({reasons['threads']})")
    else:
        if plan["cudnn"]:
            how.append(describe_kernels(plan))
        captured = "step captured" if plan["capture"] else "step eager"
        how.append(captured + _gain(plan, "capture = False", "eager", reasons["capture"]))
    if plan["micro_batch"]:
        how.append(f"{plan['micro_batch']} windows per pass ({reasons['micro_batch']})")
    yield f"plan: {'; '.join(how)}"
    from slipstream.reporting import format_seconds

    why = f"; {reasons['plan']}" if "plan" in reasons else ""
    if plan["ms_per_step"] is not None:
        whole = f"{plan['ms_per_step']:.3g} ms a step, at most {format_seconds(expected_s)}"
        yield f"plan: {whole} for {num_steps:,} steps{why}"
    else:
        whole = f"some {format_seconds(expected_s)}" if expected_s >= 1 else "less than a second"
        yield f"plan: {whole} for {num_steps:,} steps (a guess){why}"
    for item in plan["evidence"]:
        if "failed" in item or "refused" in item:
            why = item.get("failed") or item.get("refused")
            yield f"plan: not {item['candidate']}: {why}"


def _gain(plan: dict[str, Any], candidate: str, name: str, otherwise: str) -> str:
    """How much faster the plan is than what it was compared with, where that was measured."""
    for item in plan["evidence"]:
        if item["candidate"] == candidate and "ms" in item:
            ratio = item["ms"] / plan["ms_per_step"]
            return f", {ratio:.2g}x over {name}" if ratio > 1 else ""
    return f" ({otherwise})"


def describe_kernels(plan: dict[str, Any]) -> str:
    """Whose recurrent kernels, and cuDNN's algorithm by those that ran where they are known."""
    if "off" in plan["cudnn"]:
        return f"our own recurrent kernels ({plan['reasons']['cudnn']})"
    ran = "persistent" if any("Persist" in name for name in plan["kernels"]) else "standard"
    names = {ran} if plan["kernels"] else set(plan["cudnn"])
    return f"cuDNN {' and '.join(sorted(names))} ({plan['reasons']['cudnn']})"


def print_training(found: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import (
        choose_layout,
        describe_estimate,
        describe_lanes,
        describe_usage,
        describe_verdict,
        format_energy,
        format_number,
        format_seconds,
    )

    told_of = choose_layout(found)
    columns, which = told_of.brief, told_of.which
    table = TextTable(
        title=f"{found['name']}: {told_of.what}, {found['windows'][which]:,} windows",
    )
    table.add_column("")
    for column in columns:
        table.add_column(column.heading, justify="right")
    rows = {"model": found, "ensemble": found.get("ensemble"), **found["baselines"]}
    for name, beside in rows.items():
        if beside:
            cells = [format_number(column.of(beside), column.decimals) for column in columns]
            table.add_row(name, *cells, style="bold" if name == "model" else None)
    console.print(table)
    print_text(console, describe_verdict(found))
    if "latent" in found:
        latent = found["latent"]
        print_text(
            console,
            f"latent: deviation {format_number(latent['mean_std'], 3)} on average; "
            f"{latent['collapsed']} "
            f"of {latent['units']} units say the same of every window",
        )
    for line in describe_lanes(found):
        print_text(console, line)
    cost = ", ".join(
        filter(None, (f"{format_seconds(found['seconds'])} in all", format_energy(found)))
    )
    print_text(
        console,
        f"{cost}; {found['windows_per_s']:,.0f} training windows a second; {found['stopped']}",
    )
    for line in filter(None, (describe_estimate(found), *describe_usage(found))):
        print_text(console, line)
    print_text(
        console, f"run: {escape_to_line(found['run'])}\nreport: {escape_to_line(found['report'])}"
    )


def print_evaluation(found: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import describe_coverage, format_number

    title = f"{found['on']}: {found['windows']:,} windows; {found['model']}"
    table = TextTable(title=title)
    if found.get("classes"):
        _show_classes(found, table)
        console.print(table)
        for note in found["notes"]:
            print_text(console, f"note: {note}")
        return
    table.add_column("target")
    for heading in ("MAE", "RMSE", "max error", "bias", "R²"):
        table.add_column(heading, justify="right")
    rows = dict(found["detail"]["per_target"])
    if len(rows) > 1:
        rows["all"] = found["metrics"]
    for name, test in rows.items():
        cells = [format_number(test[key]) for key in ("mae", "rmse", "max_error", "bias")]
        table.add_row(name, *cells, format_number(test["r2"], 4))
    console.print(table)
    if found["coverage"]:
        print_text(console, describe_coverage(found["coverage"]))
    for note in found["notes"]:
        print_text(console, f"note: {note}")


def _show_classes(found: dict[str, Any], table: TextTable) -> None:
    """One row per class, and one for all of them."""
    from slipstream.reporting import format_number

    for heading in ("class", "windows", "precision", "recall", "F1", "AUC"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, one in found["detail"]["per_class"].items():
        cells = [format_number(one[key], 4) for key in ("precision", "recall", "f1", "auc")]
        table.add_row(name, f"{one['count']:,}", *cells)
    told = found["metrics"]
    cells = [format_number(told[key], 4) for key in ("balanced_accuracy", "f1_macro", "auc")]
    loss, accuracy = (format_number(told[key], 4) for key in ("log_loss", "accuracy"))
    loss = f"all; log-loss {loss}, accuracy {accuracy}"
    table.add_row(loss, f"{found['windows']:,}", "", *cells, style="bold")


def print_prediction(found: dict[str, Any], console: Console) -> None:
    told = f"{found['rows']:,} rows written to {found['out']}, predicted by {found['model']}"
    print_text(console, told)
    for note in found["notes"]:
        print_text(console, f"note: {note}")


def print_report(found: dict[str, Any], console: Console) -> None:
    print_text(console, f"report: {found['report']}")
