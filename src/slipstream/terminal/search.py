"""Progress of a search on stderr."""

from __future__ import annotations

import collections
import math
import time
from typing import TYPE_CHECKING, Any

from rich.console import Group

from slipstream.reporting.formatting import format_seconds
from slipstream.reporting.wording import describe_settings, list_states
from slipstream.terminal.console import TextTable, create_progress_console, print_text, to_text
from slipstream.terminal.training import REFRESH_S, TrainingDisplay, describe_event
from slipstream.text import format_count, format_epoch

if TYPE_CHECKING:
    from rich.live import Live

    from slipstream.terminal.notebook import NotebookOutput

NUM_RECENT = 5
"""Finished trials in the table"""
MAX_LISTED = 8
STYLES = {"finished": None, "pruned": "dim", "failed": "red", "cut off": "dim"}
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

    def show(self, event: dict[str, Any]) -> None:
        """Show one event of the search, or of a test run after it."""
        if event["event"] in ("start", "resume") and "space" not in event:
            self._start_training(event)
        elif self.training is not None:
            self.training.show(event)
        else:
            self._show_search(event)

    def _start_training(self, event: dict[str, Any]) -> None:
        self._close()
        if _is_trained(event):
            models = format_count(event["pack"]["lanes"], "retrained model")
            self.say(f"testing {event['run']}: {models}")
            self.training = None
            return
        if event["event"] == "start" and "run" in event:
            self.say(f"training {event['run']}, to be tested")
        self.training = TrainingDisplay(self.quiet, self.notebook)
        self.training.show(event)

    def _show_search(self, event: dict[str, Any]) -> None:
        progress = self.progress
        progress.update(event)
        match event["event"]:
            case "search" | "resume":
                self.say(describe_start(event))
                self._open_table()
            case "pack" if not self.live:
                if progress.is_over and not progress.num_retraining_packs:
                    self.say("retraining the best trials and the defaults from other seeds ...")
                progress.num_retraining_packs += progress.is_over
                self.say(progress.describe_pack(event))
            case "trial" if not self.live:
                style = "bold" if event["best"] else STYLES[event["state"]]
                self.say(progress.describe_trial(event), style)
            case "searched":
                self._close()
                self.say(progress.describe_result(event), None)
            case "retrained":
                self.say(describe_retrained(event))
            case "recovery" | "fallback" | "trouble" | "review":
                trial = f"trial {event['trial']}: " if "trial" in event else ""
                self.say(f"{trial}{describe_event(event)}")
            case "worker" if text := describe_event(event):
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
        self.counts: dict[str, int] = dict.fromkeys(STYLES, 0)
        self.best: dict[str, Any] | None = None
        self.recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=NUM_RECENT)
        self.running: dict[int, tuple[int, float]] = {}
        """Last epoch and loss of each running trial, by its number"""
        self.is_over = False
        self.is_shared = False
        """Whether other commands may train trials too"""

    @property
    def num_ended(self) -> int:
        """The trials that ended since this command started."""
        return sum(self.counts.values())

    def update(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "search" | "resume":
                self.started_at = time.monotonic()
                self.total, self.num_done_before = event["trials"], event["done"]
                self.is_over = self.num_done_before >= self.total
                self.is_shared = event.get("storage") is not None
            case "pack":
                self.num_packs, self.num_lanes = self.num_packs + 1, event["places"]
            case "log":
                self.num_lanes = len(event["losses"])
            case "epoch" if not self.is_over and event["trial"] >= 0:  # else it is retrained
                self.running[event["trial"]] = event["epoch"], event["val_loss"]
            case "trial":
                self.counts[event["state"]] += 1
                self.recent.appendleft(event)
                self.running.pop(event["trial"], None)
                if event["best"]:
                    self.best = event
            case "searched":
                self.is_over = True

    def describe_pack(self, event: dict[str, Any]) -> str:
        widths = " x ".join(map(str, event["widths"]))
        mode = "as one program" if event["mode"] == "together" else "side by side"
        lanes = f"{event['places']} lanes {mode}" if event["places"] > 1 else "1 lane"
        numbers = event["trials"]
        trials = ", ".join(map(str, numbers[:MAX_LISTED]))
        if len(numbers) > MAX_LISTED:
            trials += f" and {len(numbers) - MAX_LISTED} more"
        prefix = "" if self.is_over else f"trial{'s' * (len(numbers) > 1)} {trials}: "
        return f"pack {self.num_packs}: {prefix}{lanes}, width {widths}, batch {event['batch']}"

    def describe_trial(self, event: dict[str, Any]) -> str:
        best = ", best so far" if event["best"] else ""
        return (
            f"{self.num_done_before + self.num_ended} of {self.total}: trial {event['trial']}: "
            f"{_describe_end(event)}{best}; {describe_settings(event['params'])}"
        )

    def describe_result(self, event: dict[str, Any]) -> str:
        before = " here" if self.is_shared else ""
        before += f", in addition to {self.num_done_before}" if self.num_done_before else ""
        text = f"searched for {format_seconds(event['seconds'])}: {self._list_counts()}{before}"
        if self.best:
            text += f"; best {_format_loss(self.best['value'])}, trial {self.best['trial']}"
        return text

    def build_table(self) -> Group:
        """Build the table that a terminal shows during the search."""
        facts = TextTable.grid(padding=(0, 2))
        num_done = self.num_done_before + self.num_ended
        facts.add_row("trials", f"{num_done} of {self.total} done: {self._list_counts()}")
        facts.add_row("speed", self._describe_speed())
        facts.add_row("running", self._describe_running())
        if self.best:
            best = f"{_describe_end(self.best)}, trial {self.best['trial']}"
            facts.add_row("best", to_text(best, "bold"))
            facts.add_row("", describe_settings(self.best["params"]))
        recent = TextTable.grid(padding=(0, 2))
        for event in self.recent:
            recent.add_row(
                f"trial {event['trial']}",
                _describe_end(event),
                describe_settings(event["params"]),
                style=STYLES[event["state"]],
            )
        return Group(facts, to_text(""), recent) if self.recent else Group(facts)

    def _list_counts(self) -> str:
        return list_states(self.counts)

    def _describe_speed(self) -> str:
        """Describe the trials per hour since this command started, and the time left."""
        if not self.num_ended:
            return "–"
        per_second = self.num_ended / max(time.monotonic() - self.started_at, 1e-9)
        left_s = (self.total - self.num_done_before - self.num_ended) / per_second
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


def describe_start(event: dict[str, Any]) -> str:
    windows = event["windows"]
    done = f", {event['done']} of them done" if event["done"] else ""
    return (
        f"search on {event['device']}: {format_count(event['trials'], 'trial')}{done}, "
        f"{event['parallel']} "
        f"in parallel, over {', '.join(event['space'])}; windows: "
        f"{windows['train']:,} training, {windows['val']:,} validation"
    )


def describe_retrained(event: dict[str, Any]) -> str:
    name = "the defaults" if event["trial"] == DEFAULT else f"trial {event['trial']}"
    return f"{name}, seed {event['seed']}: {_format_loss(event['loss'])}, {event['stopped']}"


def _is_trained(event: dict[str, Any]) -> bool:
    """Whether a test run starts with all of its models trained."""
    pack = event.get("pack") or {}
    return event["event"] == "start" and pack.get("done") == pack.get("lanes") is not None


def _format_loss(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "no finite loss"


def _describe_end(event: dict[str, Any]) -> str:
    if event["state"] == "failed":
        return f"failed: {event.get('stopped') or 'no finite loss'}"
    epochs = f"{format_epoch(event['epochs'])} epoch{'' if event['epochs'] == 1 else 's'}"
    if event["state"] == "cut off":
        return f"cut off after {epochs} (tune.minutes), {_format_loss(event['value'])}"
    if event["state"] == "pruned":
        return f"pruned after {epochs}"
    return f"{_format_loss(event['value'])} after {epochs}"
