"""Progress on stderr or in a notebook: of training, a search, a measurement, a copy, a follower."""

from __future__ import annotations

import collections
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Group

from slipstream.base.text import (
    escape_controls,
    format_count,
    format_epoch,
    format_ms,
    format_number,
)
from slipstream.events import (
    CopiesOnDisk,
    EncoderThawed,
    Epoch,
    Estimate,
    Event,
    Exploit,
    Fallback,
    LaneEnd,
    Log,
    PackStart,
    PlanComparison,
    ProbeStep,
    Recovery,
    RefitStart,
    Resume,
    Retrained,
    Scoring,
    SearchEnd,
    SearchStart,
    Start,
    Step,
    ThreadsReviewed,
    TrainingEnd,
    TrialEnd,
    Trouble,
    WorkerChange,
)
from slipstream.reporting.terminal.console import (
    TextTable,
    create_progress_console,
    create_text_column,
    print_text,
    render,
    to_text,
)
from slipstream.reporting.wording import describe_settings, format_seconds, list_states

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.progress import Progress


def is_notebook() -> bool:
    """Whether the code runs in a kernel, whose front end replaces outputs instead of a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookOutput:
    """The lines so far, and below them what changes."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._handle: Any = None

    def say(self, text: str) -> None:
        self._lines.append(escape_controls(text))
        self._show(self._lines)

    def draw(self, live: RenderableType) -> None:
        """Show something of rich's below the lines; `say` removes it."""
        self._show([*self._lines, render(live).rstrip()])

    def clear(self) -> None:
        """Remove what changes."""
        self._show(self._lines)

    def _show(self, lines: list[str]) -> None:
        from IPython.display import display

        content = {"text/plain": "\n".join(line.rstrip() for line in lines)}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


LOADING = "loading torch and the data ..."
REFRESH_S = 0.1
MAX_NOTES = 5
PACK_MODES = {"together": "as one program", "branches": "as parallel branches"}


class TrainingDisplay:
    """Shows the events of a run: with a bar on a terminal or in a notebook, else with a line per
    validation."""

    def __init__(self, quiet: bool, notebook: NotebookOutput | None = None) -> None:
        self.console = create_progress_console(quiet or notebook is not None)
        self.notebook = notebook
        self.bar: Progress | None = None
        self.last_draw = 0.0
        self.loss = self.val_loss = "–"
        self.lanes: LaneProgress | None = None

    def __enter__(self) -> TrainingDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_bar()

    def say(self, text: str) -> None:
        if self.notebook:
            self.notebook.say(text)
        print_text(self.console, text, "dim")

    def show(self, event: Event) -> None:
        """Show one event of the run."""
        match event:
            case Start():
                self._start(event)
            case Step():
                self._draw(event.step)
            case Log(losses=dict()) if self.lanes:
                self.loss = self.lanes.average_loss(event)
                self._draw(self.lanes.average_step(event))
            case Log():
                if event.loss is not None:
                    self.loss = f"{event.loss:.4g}"
                self._draw(event.step)
            case Epoch():
                self._show_validation(event)
            case LaneEnd() if self.lanes:
                text = self.lanes.end_lane(event)
                if not self.bar:
                    self.say(text)
            case Exploit(lane=int(lane)) if self.lanes:
                self.say(f"{self.lanes.name_lane(lane)}: {describe_exploit(event)}")
            case TrainingEnd():
                self._close_bar()
                self.say(self.lanes.summarize() if self.lanes else describe_end(event))
            case _:
                text = describe_event(event)
                if text:
                    self.say(text)

    def _show_validation(self, event: Epoch) -> None:
        if self.lanes:
            self.val_loss = self.lanes.record_validation(event)
            return
        self.val_loss = _format_figure(event.val_loss)
        if not self.bar:
            best = " (best)" if event.best else ""
            train_loss = _format_figure(event.train_loss)
            self.say(
                f"epoch {format_epoch(event.epoch)}: training {train_loss}, validation "
                f"{self.val_loss}{best}, {event.seconds or 0.0:.1f} s"
            )

    def _close_bar(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None
            if self.notebook:
                self.notebook.clear()

    def _start(self, event: Start) -> None:
        self._close_bar()  # processes that train together may have been started again
        counts = event.windows
        if event.files:
            self.say(describe_files(event.files))
        test = f", {counts['test']:,} test" if counts["test"] else ""
        self.say(
            f"{event.series:,} series; windows: {counts['train']:,} training, "
            f"{counts['val']:,} validation{test}; {event.parameters:,} parameters"
        )
        num_steps = event.steps_per_epoch * event.epochs * (event.rounds or 1)
        if event.pack is not None:
            self.lanes = LaneProgress(event.pack)
            self.say(self.lanes.describe_pack())
        for line in describe_plan(event.plan, num_steps, event.expected_s):
            self.say(line)
        for note in event.notes[:MAX_NOTES]:
            self.say(f"note: {note}")
        if len(event.notes) > MAX_NOTES:
            more = format_count(len(event.notes) - MAX_NOTES, "more note")
            self.say(f"note: {more} in the report")
        if self.notebook or (self.console.is_terminal and not self.console.quiet):
            self._open_bar(event)

    def _open_bar(self, event: Start) -> None:
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
        self.steps_per_epoch = event.steps_per_epoch
        self.epochs = event.epochs * (event.rounds or 1)
        total = self.steps_per_epoch * self.epochs
        self.bar.add_task("", total=total, epoch="1", loss="–", val="–", speed="–")
        if not self.notebook:
            self.bar.start()

    def _draw(self, step: int) -> None:
        """Move the bar, at most ten times a second: drawing costs a millisecond."""
        now = time.monotonic()
        if self.bar is None or now - self.last_draw < REFRESH_S:
            return
        self.last_draw = now
        task = self.bar.tasks[0]
        self.bar.update(
            task.id,
            completed=step,
            epoch=f"{min(step // self.steps_per_epoch + 1, self.epochs)}/{self.epochs}",
            loss=self.loss,
            val=self.val_loss,
            speed=f"{task.speed:,.3g}" if task.speed else "–",
        )
        if self.notebook:
            self.notebook.draw(self.bar)
        else:
            self.bar.refresh()


def describe_event(event: Event) -> str:
    """Return one line about an event; empty where there is nothing to say."""
    match event:
        case Resume():
            differs = f", not bit for bit: {event.differs}" if event.differs else ""
            lanes = f", with {event.lanes}" if event.lanes is not None else ""
            return f"resuming from step {event.step:,}{lanes}{differs}"
        case CopiesOnDisk():
            size = f"{event.copies} augmented copies, {event.bytes / 1e6:,.0f} MB"
            return f"{event.what} {size}: {event.folder}"
        case ProbeStep() | Trouble():
            return event.what
        case EncoderThawed():
            return f"from epoch {event.epoch} on, {event.what} is trained too"
        case Exploit():
            return describe_exploit(event)
        case Fallback():
            return f"{_name_worker(event.worker)}{event.what}: {event.why}"
        case Recovery():
            return f"{_name_worker(event.worker)}{event.what}: continuing with {event.remedy}"
        case Estimate():
            duration = format_seconds(event.expected_s)
            return f"estimate after ten steps: {duration} of training, without validations"
        case PlanComparison() if not 0.7 < event.ratio < 1.4:
            return (
                f"the plan predicted {format_ms(event.promised_ms)} a step, the first epoch "
                f"took {format_ms(event.seen_ms)}"
            )
        case ThreadsReviewed():
            return _name_worker(event.worker) + describe_review(event)
        case WorkerChange() if event.what != "started":
            return describe_worker(event)
        case Scoring():
            return f"scoring {event.what} ..."
        case RefitStart():
            models = format_count(event.num_models, "model")
            return f"training {models} on all rows, {event.windows:,} windows ..."
    return ""


def _name_worker(worker: int | None) -> str:
    return "" if worker is None else f"worker {worker}: "


def describe_worker(event: WorkerChange) -> str:
    """Say what became of a worker that died, or who trains its models."""
    name = f"worker {event.worker}"
    if event.what == "died":
        return f"{name} died ({event.why}): {event.remedy}"
    return f"{name} takes over the models of worker {event.of} from their checkpoint"


def describe_exploit(event: Exploit) -> str:
    """Describe the epochs at a low learning rate, which begin."""
    best = f"the best weights (epoch {format_epoch(event.best_epoch)})"
    epochs = format_count(event.epochs, "epoch")
    return f"patience ran out; {epochs} from {best} at a learning rate of {event.lr:g}"


def describe_files(files: list[dict[str, Any]]) -> str:
    """Say what was read: the only file, or how many of each format."""
    rows = format_count(sum(file["rows"] for file in files), "row")
    if len(files) == 1:
        (file,) = files
        columns = format_count(file["columns"], "column")
        return f"read {file['name']} ({file['format']}): {rows}, {columns}"
    formats = collections.Counter(file["format"].partition(",")[0] for file in files)
    listed = ", ".join(f"{count:,} {name}" for name, count in formats.most_common())
    return f"read {len(files):,} files ({listed}): {rows}"


def describe_review(event: ThreadsReviewed) -> str:
    """Describe why and how the number of threads was changed, or not, in the first epoch."""
    planned = event.planned_ms
    slow = f"a step takes {format_ms(event.before_ms)}"
    slow += "" if planned is None else f" instead of the planned {format_ms(planned)}"
    load = f" ({event.load})" if event.load else ""
    if event.before_threads == event.threads:
        return f"{slow}{load}; fewer threads are not faster"
    before, after = (
        format_count(number, "thread") for number in (event.before_threads, event.threads)
    )
    return f"{slow} with {before}{load}; continuing with {after}: {format_ms(event.ms)} a step"


def describe_end(event: TrainingEnd) -> str:
    """Describe the end of a training of one model."""
    best = f"best after epoch {format_epoch(event.best_epoch or 0.0)}"
    return f"{event.stopped}: {format_count(event.step or 0, 'step')}, {best}"


class LaneProgress:
    """The progress of each lane of a pack."""

    def __init__(self, pack: dict[str, Any]) -> None:
        self.pack = pack
        self.stop_reasons: dict[int, str] = {}
        self.num_ended_before: int = pack["done"]
        """Lanes that had ended when the run was resumed"""
        self.best: dict[int, float] = {}
        self.losses: dict[int | None, list[float]] = {}
        """By worker, where there are several: the last of its active lanes"""
        self.steps: dict[int | None, int] = {}

    def describe_pack(self) -> str:
        pack = self.pack
        folds, repeats = pack["folds"], pack["repeats"]
        parts = [format_count(folds, "fold")] if folds else []
        parts += [f"{repeats} seeds"] if repeats > 1 else []
        is_partial = pack["places"] < pack["lanes"]
        how = f"{pack['places']} at a time" if is_partial else "all at once"
        joint = f"; share {pack['share']}:" if "share" in pack else " ="
        lanes = f"lanes: {' x '.join(parts)}{joint} {format_count(pack['lanes'], 'model')}"
        if "workers" in pack:
            lanes += f" on {format_count(pack['workers'], 'worker')}"
        if pack["mode"] not in PACK_MODES:  # one after another; the reason says so
            return f"{lanes}, {pack['why']}"
        return f"{lanes}, {how}, {PACK_MODES[pack['mode']]} ({pack['why']})"

    def name_lane(self, lane: int) -> str:
        """Name a lane by its fold, counted from 1, and its seed."""
        fold, repeat = divmod(lane, self.pack["repeats"])
        parts = [f"fold {fold + 1}"] if self.pack["folds"] else []
        parts += [f"seed {self.pack['seed'] + repeat}"] if self.pack["repeats"] > 1 else []
        return ", ".join(parts)

    def average_loss(self, event: Log) -> str:
        """Average the losses of the active lanes, those of other workers as they are known."""
        self.losses[event.worker] = list((event.losses or {}).values())
        losses = [loss for curve in self.losses.values() for loss in curve if loss is not None]
        return f"{sum(losses) / len(losses):.4g}" if losses else "–"

    def average_step(self, event: Log) -> int:
        """Average the steps of all workers."""
        self.steps[event.worker] = event.step
        num_workers: int = self.pack.get("workers", 1)
        return sum(self.steps.values()) // max(len(self.steps), num_workers)

    def record_validation(self, event: Epoch) -> str:
        """Return the best validation loss so far, its lane, and how many lanes are active."""
        if event.best and event.lane is not None:
            self.best[event.lane] = event.val_loss
        active = min(self.pack["lanes"] - self._num_ended, self.pack["places"])
        return (
            f"{self._describe_best()}; {format_count(active, 'lane')} active, {self._num_ended} "
            f"done"
        )

    @property
    def _num_ended(self) -> int:
        return self.num_ended_before + len(self.stop_reasons)

    def _describe_best(self) -> str:
        """Over seeds, the lowest loss; over folds, which have different windows, the mean."""
        if not self.best:
            return "–"
        if self.pack["folds"]:
            return f"{sum(self.best.values()) / len(self.best):.4g} on average"
        lane = min(self.best, key=lambda number: self.best[number])
        return f"{self.best[lane]:.4g} ({self.name_lane(lane)})"

    def end_lane(self, event: LaneEnd) -> str:
        """Record the end of a lane; return a line about it."""
        self.stop_reasons[event.lane] = event.stopped
        best = _format_loss(event.best_loss)
        if best != NO_LOSS:
            best = f"best {best} after epoch {format_epoch(event.best_epoch)}"
        end = f"{self.name_lane(event.lane)}: {event.stopped}, {best}"
        return f"lane {self._num_ended} of {self.pack['lanes']} done: {end}"

    def summarize(self) -> str:
        count = f"{self._num_ended} of {self.pack['lanes']} lanes done"
        if not self.stop_reasons:
            return count
        reasons = collections.Counter(self.stop_reasons.values()).most_common()
        ends = "; ".join(f"{why}: {number}" for why, number in reasons)
        return f"{count} ({ends}); best validation loss {self._describe_best()}"


def describe_plan(plan: dict[str, Any], num_steps: int, expected_s: float) -> Iterator[str]:
    """Yield what will run, why, and how long it will take."""
    from slipstream.config.train import upgrade_plan  # pydantic takes a while

    plan = upgrade_plan(plan)
    device_name = plan["hardware"].get("gpu", plan["hardware"]["cpu"])
    reasons = plan["reasons"]
    for name, choice in plan.get("settings", {}).items():
        value = choice["value"]
        text = f'"{value}"' if isinstance(value, str) else f"{value}"
        yield f"plan: {name} = {text} ({choice['reason']})"
    yield f"plan: {plan['device']} ({device_name}); data: {plan['home']} ({reasons['home']})"
    if plan.get("data_parallel", 1) > 1:
        yield f"plan: {plan['data_parallel']} processes ({reasons['data_parallel']})"
    choices = [plan["precision"] + _format_gain(plan, "precision = fp32", "fp32", "precision")]
    if plan["device"] == "cpu":
        choices.append(f"{format_count(plan['threads'], 'thread')} ({reasons['threads']})")
        if "slipstream" in plan["rnn"]:
            choices.append(describe_kernels(plan))
    else:
        if plan["rnn"]:
            choices.append(describe_kernels(plan))
        captured = "step captured" if plan["capture"] else "step eager"
        choices.append(captured + _format_gain(plan, "capture = False", "eager", "capture"))
    if plan["micro_batch"]:
        why = reasons.get("micro_batch", "more did not fit")  # a recovery gives no reason
        choices.append(f"{format_count(plan['micro_batch'], 'window')} per pass ({why})")
    yield f"plan: {'; '.join(choices)}"
    why = f"; {reasons['plan']}" if "plan" in reasons else ""
    if plan["ms_per_step"] is not None:
        speed = f"{format_ms(plan['ms_per_step'])} a step, at most {format_seconds(expected_s)}"
        yield f"plan: {speed} for {format_count(num_steps, 'step')}{why}"
    else:
        duration = f"about {format_seconds(expected_s)}" if expected_s >= 1 else "under a second"
        yield f"plan: {duration} for {format_count(num_steps, 'step')} (rule of thumb){why}"
    if "load" in reasons:
        yield f"plan: {reasons['load']}"
    for item in plan["evidence"]:
        if "failed" in item or "refused" in item:
            yield f"plan: not {item['candidate']}: {item.get('failed') or item.get('refused')}"


def describe_kernels(plan: dict[str, Any]) -> str:
    """Name the recurrent kernels: ours, or cuDNN's algorithms, as measured where known."""
    reason = plan["reasons"]["rnn"]
    if "slipstream" in plan["rnn"]:
        name = "our own recurrent kernels"
        if plan["device"] == "cpu":
            return name + _format_gain(plan, "rnn = torch", "PyTorch's layers", "rnn")
        return f"{name} ({reason})"
    if "torch" in plan["rnn"]:
        return f"PyTorch's recurrent layers ({reason})"
    is_persistent = any("Persist" in name for name in plan["kernels"])
    ran = "cudnn" if is_persistent else "cudnn-standard"
    from slipstream.config.train import LAYER_WORDS  # pydantic takes a while

    names = {LAYER_WORDS[name] for name in ([ran] if plan["kernels"] else plan["rnn"])}
    return f"{' and '.join(sorted(names)).replace('and cuDNN', 'and')} ({reason})"


def _format_gain(plan: dict[str, Any], candidate: str, name: str, setting: str) -> str:
    """Format the speed-up over a candidate where it was measured, else the choice's reason."""
    is_timed = plan["ms_per_step"] is not None  # not where threads were chosen by a rule after all
    for item in plan["evidence"]:
        if item["candidate"] == candidate and "ms" in item and is_timed:
            ratio = item["ms"] / plan["ms_per_step"]
            figures = [format_number(ms, figures=3) for ms in (plan["ms_per_step"], item["ms"])]
            gain = f"{format_number(ratio, figures=2)}x over {name}"
            return f" ({gain}: {' ms a step instead of '.join(figures)})" if ratio > 1 else ""
    return f" ({plan['reasons'][setting]})"


NUM_RECENT = 5
"""Finished trials in the table"""
MAX_LISTED = 8
TRIAL_STYLES = {"finished": None, "pruned": "dim", "failed": "red", "cut off": "dim"}
NO_LOSS = "no finite loss"
DEFAULT = -1
"""Stands for a trial number: the config without a search"""


class SearchDisplay:
    """Shows the events of a search: with a table on a terminal or in a notebook, else with a line
    per trial."""

    def __init__(self, quiet: bool, notebook: NotebookOutput | None = None) -> None:
        self.quiet = quiet
        self.notebook = notebook
        self.console = create_progress_console(quiet or notebook is not None)
        self.progress = SearchProgress()
        self.live: Live | None = None
        self.last_draw = 0.0
        self.training: TrainingDisplay | None = None
        """Shows the test runs after the search"""

    def __enter__(self) -> SearchDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def say(self, text: str, style: str | None = "dim") -> None:
        if self.notebook:
            self.notebook.say(text)
        print_text(self.console, text, style)

    def show(self, event: Event) -> None:
        """Show one event of the search, or of a test run after it."""
        if isinstance(event, Start | Resume):
            self._start_training(event)
        elif self.training is not None:
            self.training.show(event)
        else:
            self._show_search(event)

    def _start_training(self, event: Start | Resume) -> None:
        self._close()
        if isinstance(event, Start):
            if event.pack is not None and event.pack["done"] == event.pack["lanes"]:
                models = format_count(event.pack["lanes"], "retrained model")
                self.say(f"testing {event.run}: {models}")
                self.training = None
                return
            self.say(f"training {event.run}, to be tested")
        self.training = TrainingDisplay(self.quiet, self.notebook)
        self.training.show(event)

    def _show_search(self, event: Event) -> None:
        progress = self.progress
        progress.update(event)
        match event:
            case SearchStart():
                self.say(describe_start(event))
                self._open_table()
            case PackStart() if not self.live:
                if progress.is_over and not progress.num_retraining_packs:
                    self.say("retraining from other seeds ...")
                progress.num_retraining_packs += progress.is_over
                self.say(progress.describe_pack(event))
            case TrialEnd() if not self.live:
                style = "bold" if event.best else TRIAL_STYLES[event.state]
                self.say(progress.describe_trial(event), style)
            case SearchEnd():
                self._close()
                self.say(progress.describe_result(event), None)
            case Retrained():
                self.say(describe_retrained(event))
            case RefitStart():
                self.say(describe_event(event))
            case Recovery(trial=int(trial)):
                self.say(f"trial {trial}: {describe_event(event)}")
            case Recovery() | Fallback() | Trouble() | ThreadsReviewed():
                self.say(describe_event(event))
            case WorkerChange() if text := describe_event(event):
                self.say(text)
        self._draw()

    def _open_table(self) -> None:
        is_live = self.notebook or (self.console.is_terminal and not self.console.quiet)
        if is_live and not self.progress.is_over:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            if not self.notebook:
                self.live.start()

    def _close(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None
            if self.notebook:
                self.notebook.clear()
        if self.training:
            self.training.__exit__()

    def _draw(self) -> None:
        """Draw the table, at most ten times a second, since it costs some milliseconds."""
        now = time.monotonic()
        if self.live is not None and now - self.last_draw >= REFRESH_S:
            self.last_draw = now
            if self.notebook:
                self.notebook.draw(self.progress.build_table())
            else:
                self.live.update(self.progress.build_table(), refresh=True)


class SearchProgress:
    """The progress of a search, from its events."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.total = self.num_done_before = self.num_packs = self.num_lanes = 0
        self.num_retraining_packs = 0
        self.counts: dict[str, int] = dict.fromkeys(TRIAL_STYLES, 0)
        self.best: TrialEnd | None = None
        self.recent: collections.deque[TrialEnd] = collections.deque(maxlen=NUM_RECENT)
        self.running: dict[int, tuple[float, float]] = {}
        """Last epoch and loss of each running trial, by its number"""
        self.is_over = False
        self.limit_s: float | None = None
        """The time that is left, where it is limited"""
        self.is_shared = False
        """Whether other commands may train trials too"""

    @property
    def num_ended(self) -> int:
        """The trials that ended since this command started."""
        return sum(self.counts.values())

    def update(self, event: Event) -> None:
        """Take an event into account."""
        match event:
            case SearchStart():
                self.started_at = time.monotonic()
                self.total, self.num_done_before = event.trials, event.done
                self.limit_s = event.left_s
                self.is_over = self.num_done_before >= self.total
                self.is_shared = event.storage is not None
            case PackStart():
                self.num_packs, self.num_lanes = self.num_packs + 1, event.places
            case Log(losses=dict(losses)):
                self.num_lanes = len(losses)
            case Epoch(trial=int(trial)) if not self.is_over and trial >= 0:  # else it is retrained
                self.running[trial] = event.epoch, event.val_loss
            case TrialEnd():
                self.counts[event.state] += 1
                self.recent.appendleft(event)
                self.running.pop(event.trial, None)
                if event.best:
                    self.best = event
            case SearchEnd():
                self.is_over = True

    def describe_pack(self, event: PackStart) -> str:
        widths = " x ".join(map(str, event.widths or ()))
        mode = "as one program" if event.mode == "together" else "side by side"
        lanes = f"{event.places} lanes {mode}" if event.places > 1 else "1 lane"
        numbers = event.trials
        trials = ", ".join(map(str, numbers[:MAX_LISTED]))
        if len(numbers) > MAX_LISTED:
            trials += f" and {len(numbers) - MAX_LISTED} more"
        prefix = "" if self.is_over else f"trial{'s' * (len(numbers) > 1)} {trials}: "
        return f"pack {self.num_packs}: {prefix}{lanes}, width {widths}, batch {event.batch}"

    def describe_trial(self, event: TrialEnd) -> str:
        best = ", best so far" if event.best else ""
        return (
            f"{self._count_done()}: trial {event.trial}: {_describe_end(event)}{best}; "
            f"{describe_settings(event.params)}"
        )

    def _count_done(self) -> str:
        """Format how many trials are done, of how many where their number is limited."""
        num_done = self.num_done_before + self.num_ended
        return f"{num_done}" if self.total >= UNLIMITED else f"{num_done} of {self.total}"

    def describe_result(self, event: SearchEnd) -> str:
        before = " here" if self.is_shared else ""
        before += f", in addition to {self.num_done_before}" if self.num_done_before else ""
        text = f"searched for {format_seconds(event.seconds)}: {self._list_counts()}{before}"
        if self.best:
            text += f"; best {_format_loss(self.best.value)}, trial {self.best.trial}"
        return text

    def build_table(self) -> Group:
        """Build the table that a terminal shows during the search."""
        facts = TextTable.grid(padding=(0, 2))
        facts.add_row("trials", f"{self._count_done()} done: {self._list_counts()}")
        facts.add_row("speed", self._describe_speed())
        facts.add_row("running", self._describe_running())
        if self.best:
            best = f"{_describe_end(self.best)}, trial {self.best.trial}"
            facts.add_row("best", to_text(best, "bold"))
            facts.add_row("", describe_settings(self.best.params))
        recent = TextTable.grid(padding=(0, 2))
        for event in self.recent:
            recent.add_row(
                f"trial {event.trial}",
                _describe_end(event),
                describe_settings(event.params),
                style=TRIAL_STYLES[event.state],
            )
        return Group(facts, to_text(""), recent) if self.recent else Group(facts)

    def _list_counts(self) -> str:
        return list_states(self.counts)

    def _describe_speed(self) -> str:
        """Describe the trials per hour since this command started, and the time left."""
        if not self.num_ended and self.limit_s is not None:
            left_s = max(self.limit_s - (time.monotonic() - self.started_at), 0.0)
            return f"~{format_seconds(left_s)} left"
        if not self.num_ended:
            return "–"
        per_second = self.num_ended / max(time.monotonic() - self.started_at, 1e-9)
        left_s = (self.total - self.num_done_before - self.num_ended) / per_second
        if self.limit_s is not None:
            passed_s = time.monotonic() - self.started_at
            left_s = min(left_s, max(self.limit_s - passed_s, 0.0))
        return f"{3600 * per_second:,.0f} trials an hour, ~{format_seconds(left_s)} left"

    def _describe_running(self) -> str:
        text = (
            f"{format_count(self.num_lanes, 'lane')} in pack {self.num_packs}"
            if self.num_packs
            else "–"
        )
        if not self.running:
            return text
        furthest = max(epoch for epoch, _ in self.running.values())
        number, (epoch, loss) = min(self.running.items(), key=lambda item: item[1][1])
        lowest = f"{_format_loss(loss)} (trial {number}, epoch {epoch})"
        return f"{text}, up to epoch {furthest}; lowest {lowest}"


UNLIMITED = 100_000
"""The number of trials from which on time alone limits a search"""


def describe_start(event: SearchStart) -> str:
    """Describe the trials, the settings and the windows of a search."""
    windows = event.windows
    done = f", {event.done} of them done" if event.done else ""
    trials = format_count(event.trials, "trial")
    if event.trials >= UNLIMITED:
        unit = "minute" if event.minutes == 1 else "minutes"
        trials, done = (
            f"{event.minutes:g} {unit}",
            f", {format_count(event.done or 0, 'trial')} done" * bool(done),
        )
    over = "" if event.trials >= UNLIMITED else f", over {', '.join(event.space)}"
    return (
        f"search on {event.device}: {trials}{done}, {event.parallel} in parallel{over}; windows: "
        f"{windows['train']:,} training, {windows['val']:,} validation"
    )


def describe_retrained(event: Retrained) -> str:
    """Describe the result of a setting that was retrained."""
    name = "the defaults" if event.trial == DEFAULT else f"trial {event.trial}"
    return f"{name}, seed {event.seed}: {_format_loss(event.loss)}, {event.stopped}"


def _format_figure(value: float | None) -> str:
    """Format a loss; None is one that was not finite, from the JSON of a worker."""
    return f"{math.nan if value is None else value:.4g}"


def _format_loss(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and math.isfinite(value) else NO_LOSS


def _describe_end(event: TrialEnd) -> str:
    if event.state == "failed":
        return f"failed: {event.stopped or NO_LOSS}"
    epochs = f"{format_epoch(event.epochs or 0.0)} epoch{'' if event.epochs == 1 else 's'}"
    if event.state == "cut off":
        reason = f" ({event.stopped})" if event.stopped else ""
        return f"cut off after {epochs}{reason}, {_format_loss(event.value)}"
    if event.state == "pruned":
        return f"pruned after {epochs}"
    return f"{_format_loss(event.value)} after {epochs}"


class ProgressMeter:
    """Shows the progress of a measurement on stderr: a bar on a terminal, else a line per case."""

    def __init__(self, quiet: bool) -> None:
        self.console = create_progress_console(quiet)
        self.bar: Progress | None = None
        self.last_case = ""

    def __enter__(self) -> ProgressMeter:
        if self.console.is_terminal and not self.console.quiet:
            from rich import progress

            self.bar = progress.Progress(
                progress.BarColumn(),
                create_text_column("{task.percentage:3.0f} % of the time"),
                create_text_column("{task.description}"),
                console=self.console,
                auto_refresh=False,  # a drawing thread would disturb the measurement
                transient=True,
            )
            self.bar.add_task("", total=1.0)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, what: str, share: float) -> None:
        if self.bar:
            self.bar.update(self.bar.tasks[0].id, completed=share, description=what)
            self.bar.refresh()
            return
        case = what.partition(":")[0]
        if case != self.last_case:
            self.last_case = case
            self.say(f"measuring {case} ...")

    def say(self, text: str) -> None:
        print_text(self.console, text, "dim")


@contextmanager
def show_bytes(is_quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Return a function that shows on a terminal how many of how many bytes are copied."""
    console = create_progress_console(is_quiet)
    if is_quiet or not console.is_terminal:
        yield None
        return
    from rich import progress

    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def show_points(is_quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """Return a function that shows the number of points on stderr."""
    if is_quiet:
        yield None
        return
    with create_progress_console(is_quiet).status("reading the log") as status:
        yield lambda points: status.update(f"{format_count(points, 'point')} sent")
