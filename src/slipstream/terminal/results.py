"""Results of training, evaluation, prediction and probing as tables and lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.terminal.console import TextTable, print_text
from slipstream.text import escape_to_line

if TYPE_CHECKING:
    from rich.console import Console


def print_training(summary: dict[str, Any], console: Console) -> None:
    from slipstream import reporting
    from slipstream.reporting import format_number

    layout = reporting.choose_layout(summary)
    windows = summary["windows"][layout.subset]
    table = TextTable(title=f"{summary['name']}: {layout.description}, {windows:,} windows")
    table.add_column("")
    for column in layout.compact:
        table.add_column(column.heading, justify="right")
    results = {"model": summary, "ensemble": summary.get("ensemble"), **summary["baselines"]}
    for name, result in results.items():
        if result:
            cells = [format_number(one.read(result), one.decimals) for one in layout.compact]
            table.add_row(name, *cells, style="bold" if name == "model" else None)
    console.print(table)
    print_text(console, reporting.describe_verdict(summary))
    if "latent" in summary:
        latent = summary["latent"]
        print_text(
            console,
            f"latent: mean standard deviation {format_number(latent['mean_std'], 3)}; "
            f"{latent['collapsed']} of {latent['units']} units are constant over windows",
        )
    for line in reporting.describe_lanes(summary):
        print_text(console, line)
    total = f"{reporting.format_seconds(summary['seconds'])} in total"
    cost = ", ".join(filter(None, (total, reporting.format_energy(summary))))
    speed = f"{summary['windows_per_s']:,.0f} training windows per second"
    print_text(console, f"{cost}; {speed}; {summary['stopped']}")
    for line in (reporting.describe_estimate(summary), *reporting.describe_usage(summary)):
        if line:
            print_text(console, line)
    _print_paths(summary, console)


def print_evaluation(result: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import describe_coverage

    title = f"{result['on']}: {result['windows']:,} windows; {result['model']}"
    table = TextTable(title=title)
    (_fill_classes if result.get("classes") else _fill_targets)(result, table)
    console.print(table)
    if result["coverage"]:
        print_text(console, describe_coverage(result["coverage"]))
    _print_notes(result, console)


def _fill_targets(result: dict[str, Any], table: TextTable) -> None:
    """Add one row per target, and one for all of them."""
    from slipstream.reporting import format_number

    table.add_column("target")
    for heading in ("MAE", "RMSE", "max error", "bias", "R²"):
        table.add_column(heading, justify="right")
    rows = dict(result["detail"]["per_target"])
    if len(rows) > 1:
        rows["all"] = result["metrics"]
    for name, metrics in rows.items():
        cells = [format_number(metrics[key]) for key in ("mae", "rmse", "max_error", "bias")]
        table.add_row(name, *cells, format_number(metrics["r2"], 4))


def _fill_classes(result: dict[str, Any], table: TextTable) -> None:
    """Add one row per class, and one for all of them."""
    from slipstream.reporting import format_number

    for heading in ("class", "windows", "precision", "recall", "F1", "AUC"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, one in result["detail"]["per_class"].items():
        cells = [format_number(one[key], 4) for key in ("precision", "recall", "f1", "auc")]
        table.add_row(name, f"{one['count']:,}", *cells)
    metrics = {
        key: format_number(result["metrics"][key], 4)
        for key in ("balanced_accuracy", "f1_macro", "auc", "log_loss", "accuracy")
    }
    label = f"all; log-loss {metrics['log_loss']}, accuracy {metrics['accuracy']}"
    cells = [metrics[key] for key in ("balanced_accuracy", "f1_macro", "auc")]
    table.add_row(label, f"{result['windows']:,}", "", *cells, style="bold")


def print_prediction(result: dict[str, Any], console: Console) -> None:
    rows = f"{result['rows']:,} rows written to {result['out']}"
    print_text(console, f"{rows}, predicted by {result['model']}")
    _print_notes(result, console)


def print_report(result: dict[str, Any], console: Console) -> None:
    print_text(console, f"report: {result['report']}")


def print_probe(summary: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import format_seconds, probe_headings, probe_rows

    windows = summary["windows"]
    table = TextTable(
        title=f"{summary['name']}: test set, {windows['test']:,} windows; {windows['train']:,} "
        f"training windows, {len(summary['seeds'])} seeds",
    )
    table.add_column("")
    for heading in probe_headings(summary):
        table.add_column(heading, justify="right")
    for row in probe_rows(summary):
        style = "bold" if row["name"] == "fine-tuned" else None
        table.add_row(row["name"], *row["cells"], style=style)
    console.print(table)
    print_text(console, summary["verdict"])
    total, encoder = (format_seconds(one["seconds"]) for one in (summary, summary["encoder"]))
    print_text(console, f"{total} in total, {encoder} of it pre-training")
    _print_paths(summary, console)


def _print_paths(summary: dict[str, Any], console: Console) -> None:
    run, report = (escape_to_line(summary[name]) for name in ("run", "report"))
    print_text(console, f"run: {run}\nreport: {report}")


def _print_notes(result: dict[str, Any], console: Console) -> None:
    for note in result["notes"]:
        print_text(console, f"note: {note}")
