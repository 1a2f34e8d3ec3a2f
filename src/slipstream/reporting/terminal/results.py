"""Results of training, evaluation, prediction, probing and searches as tables and lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from rich import box
from rich.padding import Padding

from slipstream.base.text import (
    escape_to_line,
    format_count,
    format_epoch,
    format_ms,
    format_number,
)
from slipstream.reporting import streaming, wording
from slipstream.reporting.run_rows import RunRow
from slipstream.reporting.runs import (
    Comparison,
    format_against,
    format_setting,
    tabulate,
    tabulate_differences,
    tabulate_metrics,
    tabulate_paired,
    tabulate_settings,
)
from slipstream.reporting.terminal.console import (
    TextTable,
    print_text,
    to_text,
)
from slipstream.reporting.terminal.progress import (
    describe_kernels,
)
from slipstream.reporting.wording import (
    choose_layout,
    format_metric,
    format_seconds,
    format_step,
    format_value,
    get_metric_name,
    list_relative,
)
from slipstream.runs.summary import (
    IntervalScores,
    ProbeSummary,
    RunSummary,
    SearchSummary,
    SearchTest,
    get_metrics,
)

if TYPE_CHECKING:
    from rich.console import Console


def print_training(summary: RunSummary, console: Console) -> None:
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
            cells = [
                format_number(column.read(result), column.decimals) for column in layout.compact
            ]
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


def print_ensemble(summary: RunSummary, console: Console) -> None:
    layout = choose_layout(summary)
    title = (
        f"{summary['name']}: {layout.description}, "
        f"{format_count(summary['windows']['test'], 'window')}"
    )
    table = TextTable("", *(column.heading for column in layout.compact), title=title)
    rows = [("ensemble", summary), *streaming.list_unfiltered(summary)]
    rows += wording.list_members(summary)
    rows += [(name, result) for name, result in summary["baselines"].items() if result]
    for name, result in rows:
        cells = [format_number(column.read(result), column.decimals) for column in layout.compact]
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
    if line := wording.describe_intervals(cast(IntervalScores, result)):
        print_text(console, line)
    _print_filter(result, console)
    _print_notes(result, console)


def _print_quantiles(result: Mapping[str, Any], console: Console) -> None:
    if line := wording.describe_quantiles(result):
        print_text(console, line)


def _print_filter(result: Mapping[str, Any], console: Console) -> None:
    if line := streaming.describe_filter(result):
        print_text(console, line)


def _tabulate_targets(result: dict[str, Any], title: str) -> TextTable:
    """Build one row per target, one for all of them, and one for every member and baseline."""
    relative = list_relative(result["metrics"])
    headings = ("MAE", "RMSE", "max error", "bias", "R²", *map(get_metric_name, relative))
    table = TextTable("target", *headings, title=title)
    rows = [*result["detail"]["per_target"].items()]
    if len(rows) > 1:
        rows.append(("all", result["metrics"]))
    rows += [(name, scores["metrics"]) for name, scores in _list_beside(result)]
    for name, metrics in rows:
        cells = [format_number(metrics[key]) for key in ("mae", "rmse", "max_error", "bias")]
        cells.append(format_number(metrics["r2"], 4))
        table.add_row(name, *cells, *(format_number(metrics.get(key)) for key in relative))
    return table


def _list_beside(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """List an ensemble's members, and the baselines that have metrics, by the name of their row."""
    baselines = [
        (f"baseline {name}", scores) for name, scores in result["baselines"].items() if scores
    ]
    return [*streaming.list_unfiltered(result), *wording.list_members(result), *baselines]


def _tabulate_classes(result: dict[str, Any], title: str) -> TextTable:
    """Build one row per class, one for all of them, and one for every member and baseline."""
    table = TextTable("class", "windows", "precision", "recall", "F1", "AUC", title=title)
    for name, scores in result["detail"]["per_class"].items():
        cells = [format_number(scores[key], 4) for key in ("precision", "recall", "f1", "auc")]
        table.add_row(name, f"{scores['count']:,}", *cells)
    keys = ("log_loss", "accuracy", "balanced_accuracy", "f1_macro", "auc")
    for name, scores in [("all", result), *_list_beside(result)]:
        loss, accuracy, *cells = (format_number(scores["metrics"][key], 4) for key in keys)
        label = f"{name}; log-loss {loss}, accuracy {accuracy}"
        style = "bold" if scores is result else None
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


def print_prepared_rows(result: dict[str, Any], console: Console) -> None:
    """Print the rows of each set, by the column that names it."""
    rows, series = format_count(result["rows"], "row"), f"{result['series']:,} series"
    has_folds = len(result["splits"]) > 1
    names = list(result["splits"][0]["rows"])
    folds = ["test block"] if has_folds else []
    table = TextTable("column", *folds, *names, title=f"prepared rows: {rows} of {series}")
    for split in result["splits"]:
        counts = [f"{split['rows'][name]:,}" for name in names]
        table.add_row(split["column"], *([split["fold"]] if has_folds else []), *counts)
    console.print(table)
    print_text(console, f"columns: {', '.join(map(escape_to_line, result['columns']))}")
    _print_notes(result, console)
    print_text(console, f"file: {escape_to_line(result['out'])}")


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
    deploy = result["deploy"]
    use = f"{deploy['use']}, " if "use" in deploy else ""
    print_text(console, f"deploy: {use}{streaming.REGIMES[deploy['regime']]}; {deploy['reason']}")
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


def print_probe(summary: ProbeSummary, console: Console) -> None:
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
    total, encoder = (format_seconds(part["seconds"]) for part in (summary, summary["encoder"]))
    print_text(console, f"{total} in total, {encoder} of it pre-training")
    print_text(console, f"run: {escape_to_line(summary['run'])}")


def _print_notes(result: Mapping[str, Any], console: Console) -> None:
    for note in result["notes"]:
        print_text(console, f"note: {note}")


def print_search(summary: SearchSummary, console: Console) -> None:
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


MAX_ROWS = 16
"""Rows of a leaderboard that the terminal shows"""


def print_auto(summary: SearchSummary, console: Console) -> None:
    """Print the leaderboard of `slipstream auto`, what the answer consists of, and the verdict."""
    table = _build_leaderboard(summary, console.width)
    console.print(table)
    tried = len(summary["leaderboard"])
    failed = [row for row in summary["leaderboard"] if row["state"] == "failed"]
    trained = sum(summary["trials"].values())
    states = wording.list_states({name: n for name, n in summary["trials"].items() if n})
    more = "" if table.row_count == tried else "; metrics.json and the report have all of them"
    print_text(
        console,
        f"{format_count(tried, 'candidate')} tried, {trained} of them networks"
        + (f" ({states})" if states else "")
        + more,
    )
    for row in failed[:3]:
        print_text(console, f"{wording.name_candidate(row)} failed: {row['stopped']}")
    for line in summary["findings"]:
        print_text(console, line)
    print_text(console, summary["verdict"], "bold")
    if line := wording.describe_intervals(summary, "on the test set"):
        print_text(console, line)
    print_text(console, f"time: {wording.describe_time(summary)}")
    run = escape_to_line(summary["run"])
    print_text(console, f"run: {run}\nmodel: {run}/retrained/best")
    if text := wording.describe_refit(summary):
        print_text(console, text)


MIN_SETTINGS_WIDTH, MIN_COSTS_WIDTH = 110, 150
"""The width of a terminal from which on the settings of candidates are shown beside their scores,
and what they cost where they run"""


def _build_leaderboard(summary: SearchSummary, width: int) -> TextTable:
    with_settings, with_costs = width >= MIN_SETTINGS_WIDTH, width >= MIN_COSTS_WIDTH
    title = f"{summary['name']}: candidates by validation {wording.name_ranking(summary)}"
    table = TextTable("", "validation", "± blocks", "test", "weight", "seconds", title=title)
    if with_costs:
        table.add_column("parameters", justify="right")
        table.add_column("µs", justify="right")
        table.add_column("C flash", justify="right")
        table.add_column("C RAM", justify="right")
    if with_settings:
        table.add_column("settings")
    rows = [row for row in summary["leaderboard"] if row["val"] is not None]
    shown = [
        row
        for place, row in enumerate(rows)
        if place < MAX_ROWS or row["weight"] > 0 or row["state"] == "baseline"
    ]
    for row in shown:
        table.add_row(
            wording.name_candidate(row),
            format_number(row["val"]),
            "" if row["val_sd"] is None else format_number(row["val_sd"], figures=2),
            "" if row["test"] is None else format_number(row["test"]),
            f"{100 * row['weight']:.0f} %" if row["weight"] > 0 else "",
            "" if row["train_s"] is None else f"{row['train_s']:.1f}",
            *(wording.format_costs(row) if with_costs else ()),
            *((row["what"],) if with_settings else ()),
            style="bold" if row["weight"] > 0 else None,
        )
    return table


def _build_settings(summary: SearchSummary) -> TextTable:
    best = wording.get_chosen(summary)
    count = sum(summary["trials"].values())
    title = (
        f"{summary['name']}: the best settings of {format_count(count, 'trial')}, trial "
        f"{best['trial']}"
    )
    table = TextTable("setting", "best", title=title)
    table.add_column("space")
    for name, value in (best["params"] or {}).items():
        entry = summary["space"][name]
        if isinstance(entry, dict):
            space = " to ".join(format_value(entry[end]) for end in ("low", "high"))
            space += ", log" if entry["log"] else ""
        else:
            space = ", ".join(map(format_value, entry))
        table.add_row(name, format_value(value), space)
    return table


def _build_retrained(summary: SearchSummary) -> TextTable:
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


def _build_tests(summary: SearchSummary) -> TextTable:
    first = next(test for test in summary["test"].values() if test["metrics"])
    metrics = {"MAE": "mae", "RMSE": "rmse", "R²": "r2"}
    metrics |= {get_metric_name(key): key for key in list_relative(get_metrics(first)["test"])}
    if not first["scaled"]:
        metrics = {"log-loss": "log_loss", "balanced accuracy": "balanced_accuracy"}
    table = TextTable("", *metrics, title="test set")
    for name, test in summary["test"].items():
        cells = [_format_over_seeds(test, key) for key in metrics.values()]
        table.add_row(name, *cells, style="bold" if name == "best" else None)
    for name, baseline in first["baselines"].items():
        if baseline:
            errors = get_metrics(baseline)["test"]
            table.add_row(name, *(format_number(errors[key]) for key in metrics.values()))
    return table


def _format_over_seeds(test: SearchTest, key: str) -> str:
    """Format mean and deviation over the seeds, or the value of the only seed with a model."""
    metrics, spreads = test["metrics"], test["spread"]
    if not metrics:
        return "no finite loss"
    if not spreads:
        return f"{format_number(metrics['test'][key])}, one seed"
    spread = spreads[key]
    return f"{format_number(spread['mean'])} ± {format_number(spread['sd'])}"


RUN_STYLES = {"running": "green", "stopped": "yellow", "damaged": "red"}
WRAPPED = {"data", "vs. baseline"}
"""Columns that give way on a narrow terminal"""
MIN_WIDTH = 8


def print_runs(rows: Sequence[RunRow], console: Console) -> None:
    """Print one line per run."""
    headings, cells = tabulate(rows)
    table = TextTable(box=None, pad_edge=False)
    for heading in headings:
        is_number = heading == "age" or heading.startswith("test")
        options: dict[str, Any] = {"no_wrap": True}
        if heading in WRAPPED:
            options = {"min_width": MIN_WIDTH, "overflow": "fold"}
        table.add_column(heading, justify="right" if is_number else "left", **options)
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*line, style=RUN_STYLES.get(row.state))
    console.print(table)
    for row in rows:
        if row.note and row.state != "stopped":  # of which there may be many
            print_text(console, f"{escape_to_line(row.name)}: {row.state}: {row.note}")


def print_run(details: dict[str, Any], row: RunRow, console: Console) -> None:
    """Print what a run is, how good it is, the settings that were chosen, and what to do next."""
    print_text(console, f"{row.name}: {row.kind}, {row.state}", "bold")
    facts = {
        "folder": str(row.run),
        "created": f"{row.at:%Y-%m-%d %H:%M} UTC",
        "data": row.data,
        "model": row.model and f"{row.model}" + (f", {row.repeats} repeats" * (row.repeats > 1)),
        "trained": _describe_training(row),
        "time": details["time"],
        "test": _describe_error(row),
        "verdict": details["verdict"],
        "note": row.note,
        "report": details["report"],
        "next": details["next"],
    }
    table = TextTable(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact:
            table.add_row(name, fact)
    console.print(table)
    settings = TextTable(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        settings.add_column(overflow="fold")
    for name, value in details["settings"].items():
        settings.add_row(name, format_setting(value))
    if details["settings"]:
        print_text(console, "\nsettings that differ from the defaults", "bold")
        console.print(settings)


def _describe_training(row: RunRow) -> str:
    epochs = (
        "" if row.epochs is None else f"{format_epoch(row.epochs)} epoch{'s' * (row.epochs != 1)}"
    )
    seconds = "" if row.seconds is None else format_seconds(row.seconds)
    return ", ".join(filter(None, (epochs, seconds)))


def _describe_error(row: RunRow) -> str:
    value, where = (row.test, "") if row.test is not None else (row.val, " on validation")
    if value is None or row.metric is None:
        return ""
    text = f"{format_metric(row.metric)} {format_number(value)}{where}"
    if row.baseline_error is None:
        return text
    return (
        f"{text}; the best baseline has {format_number(row.baseline_error)} ({format_against(row)})"
    )


def print_comparison(comparison: Comparison, page: str, console: Console) -> None:
    """Print the metrics side by side, the settings that differ, and the path of the page."""
    tables = {
        "test set; of repeats the mean over seeds, with its 95 % interval": tabulate_metrics,
        "difference from the first run, with its 95 % interval": tabulate_differences,
        "the same predicted rows, with 95 % intervals over windows": tabulate_paired,
        "settings that differ": tabulate_settings,
    }
    for title, tabulate_part in tables.items():
        headings, rows = tabulate_part(comparison)
        if rows:
            _print_table(title, headings, rows, console)
    for note in comparison.notes:
        print_text(console, f"note: {note}")
    print_text(console, f"curves: {page}")


def _print_table(title: str, headings: list[str], rows: list[list[str]], console: Console) -> None:
    table = TextTable(title=title)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_copy(result: dict[str, Any], console: Console) -> None:
    """Say what was copied, and how to go on."""
    copied, files = result["copied_files"], format_count(result["files"], "file")
    where = escape_to_line(result["to"])
    if not copied:
        print_text(console, f"{where}: all {files} are there already")
    else:
        size = format_size(result["copied_bytes"])
        before = result["files"] - copied
        already = f"; {before:,} were there already" if before else ""
        print_text(console, f"{format_count(copied, 'file')} ({size}) copied to {where}{already}")


def format_size(num_bytes: int) -> str:
    """Format a number of bytes in a unit that gives a short number."""
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:,.0f} {units[0]}"


NARROW = 110
OPTIONAL = {"peak memory"}
"""Columns that a narrow terminal leaves out"""
SPREAD = re.compile(r" \([^)]* to [^)]*\)")


def print_bench(result: dict[str, Any], console: Console) -> None:
    """Print the tables of a measurement as in summary.md."""
    narrow = console.width < NARROW
    for table in result["tables"]:
        output = TextTable(title=table["title"], box=box.SIMPLE_HEAD, padding=0)
        headings = table["headings"]
        columns = [i for i, name in enumerate(headings) if not (narrow and name in OPTIONAL)]
        for place in columns:
            justify: Literal["left", "right"] = "right" if place else "left"
            output.add_column(f" {headings[place]}", justify=justify, no_wrap=place == 0)
        missing = []
        for row in table["cells"]:
            if row[2:] and not any(row[2:]):
                missing.append(f"{row[0]}: {row[1]}")
                continue
            cells = [SPREAD.sub("", cell) if narrow else cell for cell in row]
            output.add_row(*(f" {cells[place]}" for place in columns))
        console.print(output)
        for line in missing:
            print_text(console, line, "dim")
        if table["note"]:
            print_text(console, table["note"], "dim")
        print_text(console)
    print_text(console, result["headline"], "bold")
    for note in result["notes"]:
        print_text(console, f"note: {note}")
    print_text(console, f"{result['seconds']:.0f} s; results: {result['folder']}")
    if result["picture"]:
        print_text(console, f"picture: {result['picture']}")


def print_profile(result: dict[str, Any], console: Console) -> None:
    """Print the verdict, the parts of a step and the costliest operations."""
    for number, sentence in enumerate(result["sentences"]):
        print_text(console, sentence, "bold" if number == 0 else None)
    print_text(console)
    parts = TextTable("part", "ms", "share", title="one step")
    for part in result["parts"]:
        parts.add_row(part["part"], format_number(part["ms"], figures=3), f"{part['share']:.0%}")
    console.print(parts)
    costly = TextTable(title="costliest operations")
    for heading in ("operation", "where", "calls a step", "ms a step"):
        costly.add_column(heading, justify="right" if "step" in heading else "left", no_wrap=True)
    for operation in sorted(result["operations"], key=lambda row: -row["ms"])[:10]:
        costly.add_row(
            operation["name"][:60],
            operation["place"],
            format_number(operation["calls"], figures=3),
            format_number(operation["ms"], figures=3),
        )
    console.print(costly)
    machine = result["machine"]
    if "power_w" in machine:
        clock, heat = machine.get("clock_mhz", 0), machine.get("temperature_c", 0)
        print_text(console, f"GPU at {clock:.0f} MHz, {machine['power_w']:.0f} W, {heat:.0f} °C")
    print_text(console, f"trace, operations, timeline: {result['folder']}")


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def print_doctor(findings: dict[str, Any], console: Console) -> None:
    def section(title: str, rows: Iterator[tuple[str, ...]]) -> None:
        table = TextTable.grid(padding=(0, 2), pad_edge=True)
        for cells in rows:
            table.add_row(*cells)
        for column in table.columns[:-1]:
            column.no_wrap = True
        print_text(console, f"\n{title}", "bold")
        console.print(table, soft_wrap=False)

    section("This machine", _machine_rows(findings["machine"]))
    techniques = findings["techniques"]
    title = "Techniques and their settings in [engine], each tried with a tiny run"
    section(title, _technique_rows(techniques))
    for why in dict.fromkeys(
        technique["why"] for technique in techniques if technique["works"] is None
    ):
        names = [
            technique["name"]
            for technique in techniques
            if technique["works"] is None and technique["why"] == why
        ]
        text = to_text(f"{why}: {', '.join(names)}")
        console.print(Padding(text, (0, 2)), soft_wrap=False)
    plan = findings["plan"]
    section(f"Plan for {plan['job']}", _plan_rows(plan))
    if job := findings.get("job"):
        _print_job(job, console)
    problems = findings["problems"]
    print_text(console, "\nProblems" if problems else "\nNo problems found", "bold")
    for problem in problems:
        print_text(console, f"  - {problem['problem']}\n    fix: {problem['fix']}")


def _print_job(job: dict[str, Any], console: Console) -> None:
    """Print the notes on a job's data and settings, and what was measured."""
    counts = ", ".join(f"{count:,} {name}" for name, count in job["windows"].items())
    print_text(console, f"\nJob {job['config']}", "bold")
    print_text(console, f"  {job['series']:,} series; windows: {counts}")
    for line in (*(f"note: {note}" for note in job["notes"]), *job["advice"]["lines"]):
        print_text(console, f"  {line}")


def _machine_rows(machine: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the machine's properties, one line each."""
    driver, cuda, cpu = machine["driver"], machine["cuda"], machine["cpu"]
    memory, disk, shm = machine["memory"], machine["disk"], machine["shm"]
    for gpu in machine["gpus"]:
        parts = [gpu["name"], gpu["device"] or "not visible to torch"]
        if gpu["compute_capability"]:
            parts.append(f"compute capability {gpu['compute_capability']}")
        parts.append(_free(gpu["free_bytes"], gpu["memory_bytes"]))
        if gpu["temperature_c"] is not None:
            parts.append(f"{gpu['temperature_c']} °C")
        yield "GPU", ", ".join(parts)
    if not machine["gpus"]:
        yield "GPU", "none"
    if driver["version"]:
        yield "driver", f"{driver['version']}, up to CUDA {driver['cuda'] or 'unknown'}"
    elif machine["gpus"] or machine["nvidia_signs"]:
        yield "driver", f"does not respond ({driver['error']})"
    built = "torch is built without CUDA"
    if cuda["built_for"]:
        built = f"torch is built for {cuda['built_for']}, cuDNN {cuda['cudnn'] or 'missing'}"
    yield "CUDA", f"{built}; Triton {machine['triton'] or 'not installed'}"
    yield "CPU", ", ".join([cpu["name"], *cpu["features"]])
    quota = "" if cpu["quota"] is None else f", quota {cpu['quota']:g}"
    variables = {name: machine["environment"][name] for name in THREADS}
    threads = ", ".join(f"{name} {value or 'not set'}" for name, value in variables.items())
    yield "cores", f"{cpu['usable']} usable of {cpu['cores']}{quota}; {threads}"
    swap = f"{memory['swap_used_bytes'] / 1e9:.1f} GB" if memory["swap_bytes"] else "none"
    total = memory["limit_bytes"] or memory["total_bytes"]
    limit = ", the container's limit" if memory["limit_bytes"] else ""
    room = f"{memory['available_bytes'] / 1e9:.1f} of {total / 1e9:.1f} GB available{limit}"
    yield "memory", f"{room}; swap in use: {swap}"
    spaces = [f"{_free(disk['free_bytes'], disk['total_bytes'])} in this folder"] if disk else []
    spaces += [f"/dev/shm {_free(shm['free_bytes'], shm['total_bytes'])}"] if shm else []
    yield "disk", "; ".join(spaces) or "unknown"
    yield "compiler", machine["compiler"] or "no C++ compiler"
    versions = [f"{name} {machine[name]}" for name in ("slipstream", "torch")]
    yield "software", ", ".join([*versions, f"Python {machine['python']}", machine["system"]])


def _free(free: int | None, total: int) -> str:
    room = f"{total / 1e9:.1f} GB"
    return room if free is None else f"{free / 1e9:.1f} of {room} free"


def _technique_rows(techniques: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the techniques that were tried, one line each."""
    for technique in techniques:
        if technique["works"] is not None:
            speed = "" if technique["ms"] is None else f"{format_ms(technique['ms'])} a step"
            parts = (
                ", ".join(part for part in (speed, technique["note"]) if part) or technique["why"]
            )
            setting, took = (
                technique["setting"].removeprefix("engine."),
                f"{technique['seconds']:.1f} s",
            )
            yield (
                "works" if technique["works"] else "FAILS",
                technique["name"],
                setting,
                took,
                parts,
            )


def _plan_rows(plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the choices and their reasons, one line each."""
    if "failed" in plan:
        yield "none", plan["failed"]
        return
    reasons = plan["reasons"]
    yield "device", f"{plan['device']} ({reasons['device']})"
    yield "home", f"{plan['home']} ({reasons['home']})"
    yield "precision", f"{plan['precision']} ({reasons['precision']})"
    if plan["device"] == "cpu":
        yield "threads", f"{plan['threads']} ({reasons['threads']})"
        if "slipstream" in plan["rnn"]:
            yield "layers", describe_kernels(plan)
        else:
            yield "oneDNN", f"{'yes' if plan['onednn'] else 'no'} ({reasons['onednn']})"
    else:
        yield "capture", f"{'yes' if plan['capture'] else 'no'} ({reasons['capture']})"
        yield "layers", describe_kernels(plan)
    if plan["ms_per_step"] is not None:
        yield "speed", f"{format_ms(plan['ms_per_step'])} a step; {reasons['plan']}"
    if "load" in reasons:
        yield "load", reasons["load"]
    for item in plan["evidence"][1:]:
        why = item.get("failed") or item.get("refused")
        if why:
            yield "rejected", f"{item['candidate']}: {why}"
    timings = [
        f"{item['candidate']}: {format_ms(item['ms'])}" for item in plan["evidence"] if "ms" in item
    ]
    if timings:
        yield "measured", ", ".join(timings)


MAX_FILES, MAX_COLUMNS, MAX_PROBLEMS = 8, 60, 30
MEGABYTE = 1e6


def print_inspection(result: dict[str, Any], console: Console) -> None:
    """Print files, columns, problems and the config."""
    rows, columns = result["rows"], len(result["columns"])
    head = f"{format_count(rows, 'row')}, {format_count(columns, 'column')}, {result['series']}"
    print_text(console, f"{result['path']}: {head}", "bold")
    _print_files(result["files"], console)
    if result["time"]:
        print_text(console, describe_time(result["time"]), "dim")
    _print_columns(result["columns"], console)
    problems = result["problems"]
    if problems:
        print_text(console)
        print_text(console, format_count(len(problems), "remark"), "bold")
    for problem in problems[:MAX_PROBLEMS]:
        where = f"{problem['column']}: " if problem["column"] else ""
        print_text(console, f"- {where}{problem['message']}")
    if len(problems) > MAX_PROBLEMS:
        print_text(console, f"- {len(problems) - MAX_PROBLEMS} more: --json or --html")
    questions = result["questions"]
    if questions:
        print_text(console)
        print_text(console, f"{format_count(len(questions), 'question')} to answer", "bold")
    for question in questions:
        print_text(console, f"- {question['name']}: {question['message']}")
    print_text(console)
    if "written" in result:
        answer = "; answer data.undecided in it first" if questions else ""
        command = f"train with: {result['command']}"
        print_text(console, f"wrote {result['written']}{answer}; {command}", "bold")
    else:
        print_text(console, "a config to begin with (--write job.toml)", "bold")
        print_text(console, result["toml"].rstrip("\n"))
    if "page" in result:
        print_text(console, f"page: {result['page']}")


def _print_files(files: list[dict[str, Any]], console: Console) -> None:
    for file in files[:MAX_FILES]:
        size = f"{file['bytes'] / MEGABYTE:,.1f} MB, " if file["bytes"] else ""
        rows = format_count(file["rows"], "row")
        print_text(console, f"{file['name']}: {file['format']}, {size}{rows}", "dim")
    if len(files) > MAX_FILES:
        print_text(console, format_count(len(files) - MAX_FILES, "more file"), "dim")


def _print_columns(columns: list[dict[str, Any]], console: Console) -> None:
    table = TextTable(box=None, pad_edge=False)
    table.add_column("column", no_wrap=True)
    table.add_column("type", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("range", no_wrap=True)
    table.add_column("missing", justify="right", no_wrap=True)
    table.add_column("course", no_wrap=True)
    for column in columns[:MAX_COLUMNS]:
        share = f"{format_number(100 * column['missing'])} %" if column["missing"] else ""
        cells = (
            column["name"],
            column["type"],
            column["unit"],
            column["role"],
            describe_range(column),
            share,
        )
        table.add_row(*cells, column.get("course", ""))
    print_text(console)
    console.print(table)
    if len(columns) > MAX_COLUMNS:
        more = format_count(len(columns) - MAX_COLUMNS, "more column")
        print_text(console, f"{more}: --json or --html")


def describe_time(time: dict[str, Any]) -> str:
    """Describe the time of the rows: from, to, step and gaps."""
    names = ", ".join(time["time_columns"])
    is_date = isinstance(time["first"], str)
    step = time["step"]
    spacing = "" if step is None else f", every {format_step(step, is_date)}"
    gaps = format_count(time["gaps"], "gap") if time["gaps"] else "no gaps"
    first, last = (end if is_date else f"{end:.6g}" for end in (time["first"], time["last"]))
    return f"time: {names}, {first} to {last}{spacing}, {gaps}"


def describe_range(column: dict[str, Any]) -> str:
    """Describe the values of a column in few characters."""
    if "first" in column and column["type"] == "time":
        return f"{str(column['first'])[:10]} to {str(column['last'])[:10]}"
    if "low" in column:
        return f"{column['low']:.5g} to {column['high']:.5g}"
    if column.get("distinct") is not None:
        return format_count(column["distinct"], "text")
    return "many texts" if column["type"] == "text" else ""


def print_followed(result: dict[str, Any], console: Console) -> None:
    points = format_count(result["points"], "point")
    print_text(console, f"{points} sent to {escape_to_line(result['where'])}")
    if not result["finished"]:
        print_text(
            console, "the run has stopped before its end; follow it again once it is resumed"
        )


def print_stream(result: dict[str, Any], console: Console) -> None:
    title = f"{result['on']}: {format_count(result['windows'], 'window')}; {result['model']}"
    for heading, (headings, rows) in (
        (title, streaming.tabulate_regimes(result)),
        ("error by rows since the start of a series", streaming.tabulate_by_row(result)),
    ):
        table = TextTable(*headings, title=heading)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in streaming.describe_stream(result):
        print_text(console, line)
    for note in result["notes"]:
        print_text(console, f"note: {note}")
    if recorded := result.get("recorded"):
        print_text(console, f"recorded: {escape_to_line(recorded)}; exports and serve follow it")
    if page := result.get("page"):
        print_text(console, f"page: {escape_to_line(page)}")
