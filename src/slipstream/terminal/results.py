"""Results of training, evaluation, prediction, probing and searches as tables and lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.reporting import streaming, wording
from slipstream.reporting.formatting import (
    choose_layout,
    format_number,
    format_seconds,
    format_value,
)
from slipstream.terminal.console import TextTable, print_text
from slipstream.text import escape_to_line, format_count

if TYPE_CHECKING:
    from rich.console import Console


def print_training(summary: dict[str, Any], console: Console) -> None:
    layout = choose_layout(summary)
    windows = summary["windows"][layout.subset]
    title = f"{summary['name']}: {layout.description}, {format_count(windows, 'window')}"
    table = TextTable("", *(column.heading for column in layout.compact), title=title)
    results = {
        "model": summary,
        "unfiltered": summary.get("unfiltered"),
        "ensemble": summary.get("ensemble"),
        **summary["baselines"],
    }
    for name, result in results.items():
        if result:
            cells = [format_number(one.read(result), one.decimals) for one in layout.compact]
            table.add_row(name, *cells, style="bold" if name == "model" else None)
    console.print(table)
    print_text(console, wording.describe_verdict(summary))
    _print_quantiles(summary, console)
    _print_filter(summary, console)
    for line in (summary.get("advice") or {}).get("lines", ()):
        print_text(console, line)
    if latent := summary.get("latent"):
        spread = f"mean standard deviation {format_number(latent['mean_std'], 3)}"
        constant = f"{latent['collapsed']} of {latent['units']} units are constant over windows"
        print_text(console, f"latent: {spread}; {constant}")
    for line in wording.describe_lanes(summary):
        print_text(console, line)
    total = f"{format_seconds(wording.get_total_s(summary))} in total"
    if before_s := summary.get("seconds_before_resume"):
        total += f", {format_seconds(before_s)} of it before the resume"
    cost = ", ".join(filter(None, (total, wording.format_energy(summary))))
    speed = f"{summary['windows_per_s']:,.0f} training windows per second"
    print_text(console, f"{cost}; {speed}; {summary['stopped']}")
    print_text(console, f"time: {wording.describe_time(summary)}")
    for line in (wording.describe_estimate(summary), *wording.describe_usage(summary)):
        if line:
            print_text(console, line)
    print_text(console, f"run: {escape_to_line(summary['run'])}")


def print_ensemble(summary: dict[str, Any], console: Console) -> None:
    layout = choose_layout(summary)
    title = (
        f"{summary['name']}: {layout.description}, "
        f"{format_count(summary['windows']['test'], 'window')}"
    )
    table = TextTable("", *(column.heading for column in layout.compact), title=title)
    rows = [("ensemble", summary), *streaming.list_unfiltered(summary)]
    rows += wording.list_members(summary)
    rows += [(name, one) for name, one in summary["baselines"].items() if one]
    for name, result in rows:
        cells = [format_number(one.read(result), one.decimals) for one in layout.compact]
        table.add_row(name, *cells, style="bold" if result is summary else None)
    console.print(table)
    print_text(console, wording.describe_verdict(summary))
    _print_quantiles(summary, console)
    for line in wording.describe_members(summary):
        print_text(console, line)
    _print_notes(summary, console)
    print_text(console, f"{format_seconds(summary['seconds'])} in total")
    print_text(console, f"run: {escape_to_line(summary['run'])}")


def print_evaluation(result: dict[str, Any], console: Console) -> None:
    title = f"{result['on']}: {format_count(result['windows'], 'window')}; {result['model']}"
    console.print(
        (_tabulate_classes if result.get("classes") else _tabulate_targets)(result, title)
    )
    _print_quantiles(result, console)
    if result["coverage"]:
        print_text(console, wording.describe_coverage(result["coverage"]))
    _print_filter(result, console)
    _print_notes(result, console)


def _print_quantiles(result: dict[str, Any], console: Console) -> None:
    if line := wording.describe_quantiles(result):
        print_text(console, line)


def _print_filter(result: dict[str, Any], console: Console) -> None:
    if line := streaming.describe_filter(result):
        print_text(console, line)


def _tabulate_targets(result: dict[str, Any], title: str) -> TextTable:
    """Build one row per target, one for all of them, and one for every member and baseline."""
    table = TextTable("target", "MAE", "RMSE", "max error", "bias", "R²", title=title)
    rows = [*result["detail"]["per_target"].items()]
    if len(rows) > 1:
        rows.append(("all", result["metrics"]))
    rows += [(name, one["metrics"]) for name, one in _list_beside(result)]
    for name, metrics in rows:
        cells = [format_number(metrics[key]) for key in ("mae", "rmse", "max_error", "bias")]
        table.add_row(name, *cells, format_number(metrics["r2"], 4))
    return table


def _list_beside(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """List an ensemble's members, and the baselines that have metrics, by the name of their row."""
    baselines = [(f"baseline {name}", one) for name, one in result["baselines"].items() if one]
    return [*streaming.list_unfiltered(result), *wording.list_members(result), *baselines]


def _tabulate_classes(result: dict[str, Any], title: str) -> TextTable:
    """Build one row per class, one for all of them, and one for every member and baseline."""
    table = TextTable("class", "windows", "precision", "recall", "F1", "AUC", title=title)
    for name, one in result["detail"]["per_class"].items():
        cells = [format_number(one[key], 4) for key in ("precision", "recall", "f1", "auc")]
        table.add_row(name, f"{one['count']:,}", *cells)
    keys = ("log_loss", "accuracy", "balanced_accuracy", "f1_macro", "auc")
    for name, one in [("all", result), *_list_beside(result)]:
        loss, accuracy, *cells = (format_number(one["metrics"][key], 4) for key in keys)
        label = f"{name}; log-loss {loss}, accuracy {accuracy}"
        style = "bold" if one is result else None
        table.add_row(label, f"{result['windows']:,}", "", *cells, style=style)
    return table


def print_prediction(result: dict[str, Any], console: Console) -> None:
    rows = f"{format_count(result['rows'], 'row')} written to {result['out']}"
    print_text(console, f"{rows}, predicted by {result['model']}")
    _print_filter(result, console)
    _print_notes(result, console)


def print_report(result: dict[str, Any], console: Console) -> None:
    """Print the path of the report; with none, the command that draws it."""
    if result["report"] is None:
        run = escape_to_line(result["run"])
        print_text(console, f"report: not drawn; draw it with: slipstream report {run}")
    else:
        print_text(console, f"report: {escape_to_line(result['report'])}")


def print_export(result: dict[str, Any], console: Console) -> None:
    """Print the files, how closely they follow the model, and what they leave to the caller."""
    parity = result["parity"]
    table = TextTable("file", "bytes", title=f"{result['format']}: {result['model']}")
    for file in result["files"]:
        table.add_row(file["name"], f"{file['bytes']:,}")
    console.print(table)
    on = "test set" if parity["on"] == "test" else "data"
    total = parity["windows_of_set"]
    share = f" out of {total:,}" if parity["windows"] < total else ""
    print_text(
        console,
        f"verified on {format_count(parity['windows'], 'window')}{share} of the {on}: largest "
        f"difference {parity['max_rel']:.1e} relative, {parity['max_abs']:.1e} absolute (limit "
        f"{parity['limit']:g} relative)",
    )
    if "loss" in parity:
        loss = parity["loss"]
        print_text(
            console,
            f"test error ({loss['error']}): {loss['export']:.4g}, the model's {loss['model']:.4g} "
            f"({100 * loss['relative']:+.2g} %, limit {100 * loss['limit']:+g} %)",
        )
    _print_sizes(result.get("sizes", {}), console)
    if result["before"]:
        steps = "; ".join(result["before"])
        print_text(console, f"not inside, to be done before: {steps}")
    if result["after"]:
        print_text(console, f"not inside, to be done after: {'; '.join(result['after'])}")
    _print_notes(result, console)
    print_text(console, f"folder: {escape_to_line(result['out'])}")


def _print_sizes(sizes: dict[str, int], console: Console) -> None:
    """Print what C code takes on a microcontroller."""
    if not sizes:
        return
    text = (
        f"flash: {sizes['flash_bytes']:,} bytes of constants ({sizes['num_weights']:,} weights); "
        f"RAM: {sizes['scratch_bytes']:,} bytes and {sizes['state_bytes']:,} for each series; "
        f"{sizes['step_multiply_adds']:,} multiply-adds a step"
    )
    if "cortex_m4_flash_bytes" in sizes:
        flash, ram = sizes["cortex_m4_flash_bytes"], sizes["cortex_m4_ram_bytes"]
        text += f"; compiled for a Cortex-M4F: {flash:,} bytes of flash with code, {ram:,} of RAM"
    print_text(console, text)


def print_probe(summary: dict[str, Any], console: Console) -> None:
    windows = summary["windows"]
    title = (
        f"{summary['name']}: test set, {format_count(windows['test'], 'window')}; "
        f"{windows['train']:,} "
        f"training windows, {len(summary['seeds'])} seeds"
    )
    table = TextTable("", *wording.build_probe_headings(summary), title=title)
    for row in wording.build_probe_rows(summary):
        style = "bold" if row["name"] == "fine-tuned" else None
        table.add_row(row["name"], *row["cells"], style=style)
    console.print(table)
    print_text(console, summary["verdict"])
    total, encoder = (format_seconds(one["seconds"]) for one in (summary, summary["encoder"]))
    print_text(console, f"{total} in total, {encoder} of it pre-training")
    print_text(console, f"run: {escape_to_line(summary['run'])}")


def _print_notes(result: dict[str, Any], console: Console) -> None:
    for note in result["notes"]:
        print_text(console, f"note: {note}")


def print_search(summary: dict[str, Any], console: Console) -> None:
    """Print the best settings, their errors, the verdict and the paths."""
    console.print(_build_settings(summary))
    if summary["retrained"]:
        console.print(_build_retrained(summary))
    if any(test["metrics"] for test in summary["test"].values()):
        console.print(_build_tests(summary))
    print_text(console, wording.describe_search_verdict(summary), "bold")
    for line in wording.describe_search(summary):
        print_text(console, line)
    print_text(console, f"time: {wording.describe_time(summary)}")
    was_tested = summary["test"].get("best", {}).get("metrics")
    model = "retrained/best" if was_tested else "best"
    run, best = escape_to_line(summary["run"]), escape_to_line(summary["best_config"])
    print_text(
        console,
        f"run: {run}\nmodel: {run}/{model}\n"
        f"best settings: {best}; train with them: slipstream train {best}",
    )


def _build_settings(summary: dict[str, Any]) -> TextTable:
    best = wording.get_chosen(summary)
    count = sum(summary["trials"].values())
    title = (
        f"{summary['name']}: the best settings of {format_count(count, 'trial')}, trial "
        f"{best['trial']}"
    )
    table = TextTable("setting", "best", title=title)
    table.add_column("space")
    for name, value in best["params"].items():
        entry = summary["space"][name]
        if isinstance(entry, dict):
            space = " to ".join(format_value(entry[end]) for end in ("low", "high"))
            space += ", log" if entry["log"] else ""
        else:
            space = ", ".join(map(format_value, entry))
        table.add_row(name, format_value(value), space)
    return table


def _build_retrained(summary: dict[str, Any]) -> TextTable:
    num_seeds = len(summary["retrained"][0]["losses"])
    title = f"retrained from {num_seeds} other seeds: validation {summary['metric']}"
    table = TextTable("", "mean ± sd", "by seed", title=title)
    for result in summary["retrained"]:
        table.add_row(
            result["what"] + (", chosen" if result["chosen"] else ""),
            f"{format_number(result['mean'])} ± {format_number(result['sd'])}",
            ", ".join(format_number(loss) for loss in result["losses"]),
            style="bold" if result["chosen"] else None,
        )
    return table


def _build_tests(summary: dict[str, Any]) -> TextTable:
    first = next(test for test in summary["test"].values() if test["metrics"])
    metrics = {"MAE": "mae", "RMSE": "rmse", "R²": "r2"}
    if not first["scaled"]:
        metrics = {"log-loss": "log_loss", "balanced accuracy": "balanced_accuracy"}
    table = TextTable("", *metrics, title="test set")
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
    if not test["metrics"]:
        return "no finite loss"
    if not test["spread"]:
        return f"{format_number(test['metrics']['test'][key])}, one seed"
    spread = test["spread"][key]
    return f"{format_number(spread['mean'])} ± {format_number(spread['sd'])}"
