"""What a terminal shows of a search: where it stands, and what it found."""

from __future__ import annotations

import collections
import math
import time
from typing import TYPE_CHECKING, Any

from rich.console import Group

from slipstream.terminal.console import TextTable, create_progress_console, print_text, to_text
from slipstream.terminal.training import REFRESH_S, TrainingDisplay
from slipstream.text import escape_to_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

LAST = 5
"""Trials that the table shows"""
STYLES = {"finished": None, "pruned": "dim", "failed": "red"}
DEFAULT = -1
"""Instead of a trial's number: the settings without a search"""


class SearchDisplay:
    """What stderr shows of a search: a table on a terminal, else a line per trial."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.console = create_progress_console(quiet)
        self.at = Standing()
        self.live: Live | None = None
        self.drawn_at = 0.0
        self.run: TrainingDisplay | None = None
        """Of the ordinary run that is being trained in the end"""

    def __enter__(self) -> SearchDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def say(self, text: str, style: str | None = "dim") -> None:
        print_text(self.console, text, style)

    def show(self, event: dict[str, Any]) -> None:
        """Take in one event of the search, or of a run that follows it."""
        what = event["event"]
        if what in ("start", "resume") and "space" not in event:
            self._follow(event)
        elif self.run is not None:
            self.run.show(event)
        else:
            self._take_in(what, event)

    def _follow(self, event: dict[str, Any]) -> None:
        """An ordinary run begins, or goes on."""
        self._close()
        if event["event"] == "start" and "run" in event:
            self.say(f"training {event['run']}, to be tested")
        self.run = TrainingDisplay(self.quiet)
        self.run.show(event)

    def _take_in(self, what: str, event: dict[str, Any]) -> None:
        self.at.take_in(event)
        match what:
            case "search" | "resume":
                self.say(self.at.begun(event))
                self._open()
            case "pack" if not self.live:
                if self.at.first_again():
                    self.say("training the best again from other seeds, beside the defaults ...")
                self.say(self.at.packed(event))
            case "trial" if not self.live:
                style = "bold" if event["best"] else STYLES[event["state"]]
                self.say(self.at.trial(event), style)
            case "searched":
                self._close()
                self.say(self.at.searched(event), None)
            case "retrained":
                self.say(self.at.retrained(event))
            case "recovery":
                whose = f"trial {event['trial']}: " if "trial" in event else ""
                self.say(f"{whose}{event['what']}: going on with {event['remedy']}")
            case "fallback":
                self.say(f"{event['what']}: {event['why']}")
            case "trouble":
                self.say(event["what"])
        self._draw()

    def _open(self) -> None:
        if self.console.is_terminal and not self.console.quiet and not self.at.over:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()

    def _close(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None
        if self.run:
            self.run.__exit__()

    def _draw(self) -> None:
        """Draw the table, at most ten times a second: it costs some milliseconds."""
        now = time.monotonic()
        if self.live is not None and now - self.drawn_at >= REFRESH_S:
            self.drawn_at = now
            self.live.update(self.at.table(), refresh=True)


class Standing:
    """Where a search stands, from its events."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.total = self.before = self.packs = self.lanes = 0
        self.counts: dict[str, int] = dict.fromkeys(STYLES, 0)
        self.best: dict[str, Any] | None = None
        self.last: collections.deque[dict[str, Any]] = collections.deque(maxlen=LAST)
        self.lowest: dict[int, tuple[int, float]] = {}
        """Epoch and loss of each trial under way, by its number"""
        self.over = self.again = False
        """Whether all trials are done, and whether the best are trained again"""

    @property
    def ended(self) -> int:
        return sum(self.counts.values())

    def take_in(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "search" | "resume":
                self.began = time.monotonic()
                self.total, self.before = event["trials"], event["done"]
                self.over = self.before >= self.total
            case "pack":
                self.packs, self.lanes = self.packs + 1, event["places"]
            case "log":
                self.lanes = len(event["losses"])
            case "epoch" if not self.over:
                self.lowest[event["trial"]] = event["epoch"], event["val_loss"]
            case "trial":
                self.counts[event["state"]] += 1
                self.last.appendleft(event)
                self.lowest.pop(event["trial"], None)
                if event["best"]:
                    self.best = event
            case "searched":
                self.over = True

    def rate(self) -> float:
        """Trials a second, of this sitting."""
        return self.ended / max(time.monotonic() - self.began, 1e-9)

    def left_s(self) -> float | None:
        """Seconds until all trials are done, at the rate so far."""
        left = self.total - self.before - self.ended
        return left / self.rate() if self.ended else None

    def begun(self, event: dict[str, Any]) -> str:
        windows = event["windows"]
        done = f", {event['done']} of them done" if event["done"] else ""
        return (
            f"search on {event['device']}: {event['trials']} trials{done}, {event['parallel']} "
            f"under way at a time, of {', '.join(event['space'])}; windows: "
            f"{windows['train']:,} training, {windows['val']:,} validation"
        )

    def packed(self, event: dict[str, Any]) -> str:
        widths = " x ".join(map(str, event["widths"]))
        way = "as one program" if event["mode"] == "together" else "side by side"
        count = event["places"]
        lanes = f"{count} lanes {way}" if count > 1 else "1 lane"
        word = "trials" if len(event["trials"]) > 1 else "trial"
        whose = f"{word} {_listed(event['trials'])}: " if not self.over else ""
        return f"pack {self.packs}: {whose}{lanes}, width {widths}, batch {event['batch']}"

    def first_again(self) -> bool:
        """Whether this is the first pack after the search."""
        first = self.over and not self.again
        self.again = self.over
        return first

    def trial(self, event: dict[str, Any]) -> str:
        from slipstream.reporting import describe_settings

        best = ", best so far" if event["best"] else ""
        return (
            f"{self.before + self.ended} of {self.total}: trial {event['trial']}: "
            f"{_outcome(event)}{best}; {describe_settings(event['params'])}"
        )

    def searched(self, event: dict[str, Any]) -> str:
        from slipstream.reporting import format_seconds

        counts = ", ".join(f"{count} {state}" for state, count in self.counts.items())
        before = f", beside {self.before} before" if self.before else ""
        told = f"searched for {format_seconds(event['seconds'])}: {counts}{before}"
        best = self.best
        return told + (f"; best {_loss(best['value'])}, trial {best['trial']}" if best else "")

    def retrained(self, event: dict[str, Any]) -> str:
        whose = "the defaults" if event["trial"] == DEFAULT else f"trial {event['trial']}"
        return f"{whose}, seed {event['seed']}: {_loss(event['loss'])}, {event['stopped']}"

    def table(self) -> Group:
        """What a terminal shows while it searches."""
        from slipstream.reporting import describe_settings, format_seconds

        facts = TextTable.grid(padding=(0, 2))
        left = self.left_s()
        time_left = "" if left is None else f", ~{format_seconds(left)} left"
        counts = ", ".join(f"{count} {state}" for state, count in self.counts.items())
        done = self.before + self.ended
        facts.add_row("trials", f"{done} of {self.total} done: {counts}")
        speed = f"{3600 * self.rate():,.0f} trials an hour{time_left}" if self.ended else "–"
        facts.add_row("speed", speed)
        facts.add_row("running", self._running())
        if self.best:
            best = f"{_outcome(self.best)}, trial {self.best['trial']}"
            facts.add_row("best", to_text(best, "bold"))
            facts.add_row("", describe_settings(self.best["params"]))
        last = TextTable.grid(padding=(0, 2))
        for event in self.last:
            last.add_row(
                f"trial {event['trial']}",
                _outcome(event),
                describe_settings(event["params"]),
                style=STYLES[event["state"]],
            )
        return Group(facts, to_text(""), last) if self.last else Group(facts)

    def _running(self) -> str:
        told = f"{self.lanes} lanes in pack {self.packs}" if self.packs else "–"
        if not self.lowest:
            return told
        ahead = max(epoch for epoch, _ in self.lowest.values())
        number, (epoch, loss) = min(self.lowest.items(), key=lambda one: one[1][1])
        return f"{told}, up to epoch {ahead}; lowest {_loss(loss)} (trial {number}, epoch {epoch})"


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _loss(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "no finite loss"


def _outcome(event: dict[str, Any]) -> str:
    """How a trial ended, in a few words."""
    if event["state"] == "failed":
        return f"failed: {event.get('stopped') or 'no finite loss'}"
    epochs = f"{event['epochs']:.4g} epoch{'' if event['epochs'] == 1 else 's'}"
    if event["state"] == "pruned":
        return f"pruned after {epochs}"
    return f"{_loss(event['value'])} after {epochs}"


def print_search(found: dict[str, Any], console: Console) -> None:
    """The best settings, what they are worth, and where everything is."""
    from slipstream.reporting import describe_search, describe_search_verdict

    console.print(_settings(found))
    if found["retrained"]:
        console.print(_again(found))
    if any(one["metrics"] for one in found["test"].values()):
        console.print(_tested(found))
    print_text(console, describe_search_verdict(found), "bold")
    for line in describe_search(found):
        print_text(console, line)
    tested = found["test"].get("best", {}).get("metrics")
    model = "retrained/best" if tested else "best"
    run, best = escape_to_line(found["run"]), escape_to_line(found["best_config"])
    print_text(
        console,
        f"run: {run}\nreport: {escape_to_line(found['report'])}\nmodel: {run}/{model}\n"
        f"best settings: {best}; train with them: slipstream train {best}",
    )


def _settings(found: dict[str, Any]) -> TextTable:
    from slipstream.reporting import format_value, get_chosen

    best = get_chosen(found)
    count = sum(found["trials"].values())
    title = f"{found['name']}: the best settings of {count} trials, trial {best['trial']}"
    table = TextTable(title=title)
    table.add_column("setting")
    table.add_column("best", justify="right")
    table.add_column("tried")
    for name, value in best["params"].items():
        table.add_row(name, format_value(value), _tried(found["space"][name]))
    return table


def _tried(entry: Any) -> str:
    from slipstream.reporting import format_value

    if isinstance(entry, dict):
        how = ", log" if entry["log"] else ""
        return f"{format_value(entry['low'])} to {format_value(entry['high'])}{how}"
    return ", ".join(format_value(one) for one in entry)


def _again(found: dict[str, Any]) -> TextTable:
    from slipstream.reporting import format_number

    count = len(found["retrained"][0]["losses"])
    title = f"trained again from {count} other seeds: validation {found['metric']}"
    table = TextTable(title=title)
    for heading in ("", "mean ± sd", "by seed"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for one in found["retrained"]:
        table.add_row(
            one["what"] + (", chosen" if one["chosen"] else ""),
            f"{format_number(one['mean'])} ± {format_number(one['sd'])}",
            ", ".join(format_number(loss) for loss in one["losses"]),
            style="bold" if one["chosen"] else None,
        )
    return table


def _tested(found: dict[str, Any]) -> TextTable:
    from slipstream.reporting import format_number

    with_model = {name: one for name, one in found["test"].items() if one["metrics"]}
    first = next(iter(with_model.values()))
    shown = {"MAE": "mae", "RMSE": "rmse", "R²": "r2"}
    if not first["scaled"]:
        shown = {"log-loss": "log_loss", "balanced accuracy": "balanced_accuracy"}
    table = TextTable(title="test set")
    table.add_column("")
    for heading in shown:
        table.add_column(heading, justify="right")
    for name, tested in found["test"].items():
        cells = [_over_seeds(tested, key) for key in shown.values()]
        table.add_row(name, *cells, style="bold" if name == "best" else None)
    for name, beside in first["baselines"].items():
        if beside:
            test = beside["metrics"]["test"]
            table.add_row(name, *(format_number(test[key]) for key in shown.values()))
    return table


def _over_seeds(tested: dict[str, Any], key: str) -> str:
    """Mean and deviation; one figure where one seed has a model, none where none has."""
    from slipstream.reporting import format_number

    if not tested["metrics"]:
        return "no finite loss"
    if not tested["spread"]:
        return f"{format_number(tested['metrics']['test'][key])}, one seed"
    spread = tested["spread"][key]
    return f"{format_number(spread['mean'])} ± {format_number(spread['sd'])}"
