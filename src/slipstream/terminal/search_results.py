"""Results of a search as tables and lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.terminal.console import TextTable, print_text
from slipstream.text import escape_to_line

if TYPE_CHECKING:
    from rich.console import Console


def print_search(summary: dict[str, Any], console: Console) -> None:
    """Print the best settings, their errors, the verdict and the paths."""
    from slipstream.reporting import describe_search, describe_search_verdict

    console.print(_build_settings(summary))
    if summary["retrained"]:
        console.print(_build_retrained(summary))
    if any(test["metrics"] for test in summary["test"].values()):
        console.print(_build_tests(summary))
    print_text(console, describe_search_verdict(summary), "bold")
    for line in describe_search(summary):
        print_text(console, line)
    was_tested = summary["test"].get("best", {}).get("metrics")
    model = "retrained/best" if was_tested else "best"
    run, best = escape_to_line(summary["run"]), escape_to_line(summary["best_config"])
    print_text(
        console,
        f"run: {run}\nreport: {escape_to_line(summary['report'])}\nmodel: {run}/{model}\n"
        f"best settings: {best}; train with them: slipstream train {best}",
    )


def _build_settings(summary: dict[str, Any]) -> TextTable:
    from slipstream.reporting import format_value, get_chosen

    best = get_chosen(summary)
    count = sum(summary["trials"].values())
    title = f"{summary['name']}: the best settings of {count} trials, trial {best['trial']}"
    table = TextTable(title=title)
    table.add_column("setting")
    table.add_column("best", justify="right")
    table.add_column("space")
    for name, value in best["params"].items():
        table.add_row(name, format_value(value), _describe_entry(summary["space"][name]))
    return table


def _describe_entry(entry: Any) -> str:
    from slipstream.reporting import format_value

    if isinstance(entry, dict):
        scale = ", log" if entry["log"] else ""
        return f"{format_value(entry['low'])} to {format_value(entry['high'])}{scale}"
    return ", ".join(format_value(choice) for choice in entry)


def _build_retrained(summary: dict[str, Any]) -> TextTable:
    from slipstream.reporting import format_number

    num_seeds = len(summary["retrained"][0]["losses"])
    table = TextTable(
        title=f"retrained from {num_seeds} other seeds: validation {summary['metric']}"
    )
    for heading in ("", "mean ± sd", "by seed"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for result in summary["retrained"]:
        table.add_row(
            result["what"] + (", chosen" if result["chosen"] else ""),
            f"{format_number(result['mean'])} ± {format_number(result['sd'])}",
            ", ".join(format_number(loss) for loss in result["losses"]),
            style="bold" if result["chosen"] else None,
        )
    return table


def _build_tests(summary: dict[str, Any]) -> TextTable:
    from slipstream.reporting import format_number

    first = next(test for test in summary["test"].values() if test["metrics"])
    metrics = {"MAE": "mae", "RMSE": "rmse", "R²": "r2"}
    if not first["scaled"]:
        metrics = {"log-loss": "log_loss", "balanced accuracy": "balanced_accuracy"}
    table = TextTable(title="test set")
    table.add_column("")
    for heading in metrics:
        table.add_column(heading, justify="right")
    for name, test in summary["test"].items():
        cells = [_format_over_seeds(test, key) for key in metrics.values()]
        table.add_row(name, *cells, style="bold" if name == "best" else None)
    for name, baseline in first["baselines"].items():
        if baseline:
            errors = baseline["metrics"]["test"]
            table.add_row(name, *(format_number(errors[key]) for key in metrics.values()))
    return table


def _format_over_seeds(test: dict[str, Any], key: str) -> str:
    """Format mean and deviation over the seeds, or the value of the only seed with a model."""
    from slipstream.reporting import format_number

    if not test["metrics"]:
        return "no finite loss"
    if not test["spread"]:
        return f"{format_number(test['metrics']['test'][key])}, one seed"
    spread = test["spread"][key]
    return f"{format_number(spread['mean'])} ± {format_number(spread['sd'])}"
