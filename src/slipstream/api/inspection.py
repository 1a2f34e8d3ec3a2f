"""What files hold, without a config and with one: `slipstream.inspect` and `prepare`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.api.arguments import Overrides, parse_overrides, prepare_job
from slipstream.api.progress import name_arguments

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from slipstream.config import Config
    from slipstream.tools.inspection import Findings


class Inspection:
    """The findings of `inspect`. They print as a table of the columns, in a notebook with plots.

    Attributes:
        path: The file, folder or pattern.
        files: Each file with `name`, `format`, `bytes`, `rows`, `columns` and `notes`.
        columns: Each column with `name`, `type`, `unit`, `role`, `missing` (a share), `constant`;
            numbers also have `low`, `high`, `mean`, `deviation` and `course`, the time `first`,
            `last`, `step` and `gaps`.
        problems: Suspicious data, each with `column` (None if it concerns files) and `message`.
        config: Settings to begin with, as a dict that `slipstream.train` accepts.
        toml: The same as the text of a config file, with the reason for each choice.
        summary: The object that `slipstream inspect --json` prints.
        write: A function: write the config to a file, as in `write("job.toml")`.
        to_html: A function: write a page with a plot per column.
        to_pandas: A function: the columns as a table.

    Example:
        found = slipstream.inspect("cells/")
        found.problems
        slipstream.train(found.config, overrides="train.epochs=5")
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.summary: dict[str, Any] = findings.to_dict()
        self.path: str = findings.path
        self.files: list[dict[str, Any]] = self.summary["files"]
        self.columns: list[dict[str, Any]] = self.summary["columns"]
        self.problems: list[dict[str, Any]] = self.summary["problems"]
        self.config: dict[str, Any] = findings.proposal.config
        self.toml: str = self.summary["toml"]

    @name_arguments
    def write(self, file: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the config to a file; an existing one is replaced only with `force`."""
        from slipstream import runs
        from slipstream.base.errors import UserError

        path = Path(file)
        if path.exists() and not force:
            raise UserError(f"{path}: exists; pass force=True to replace it, or name another file")
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.write_text(path, self._findings.format_config(path))
        return path

    @name_arguments
    def to_html(self, file: str | os.PathLike[str]) -> Path:
        """Write a page with a plot per column."""
        from slipstream.reporting.page import write_inspection

        return write_inspection(Path(file), self.summary, self._findings.list_courses())

    def to_pandas(self) -> pd.DataFrame:
        """Return the columns as a table."""
        import pandas as pd

        return pd.DataFrame(self.columns).set_index("name")

    def __repr__(self) -> str:
        from slipstream.base.text import format_table
        from slipstream.reporting.terminal.results import describe_range

        title = f"{self.path}: {self.summary['rows']:,} rows, {self.summary['series']}"
        headings = ["", "type", "role", "range"]
        rows = [
            [column["name"], column["type"], column["role"], describe_range(column)]
            for column in self.columns
        ]
        more = f"\n{len(self.problems)} remarks: .problems" if self.problems else ""
        return f"{format_table(title, headings, rows)}{more}"

    def _repr_html_(self) -> str:
        from slipstream.reporting.page import render_inspection

        page = render_inspection(self.summary, self._findings.list_courses())
        return f'<iframe srcdoc="{_escape(page)}" width="100%" height="600"></iframe>'


def _escape(page: str) -> str:
    """Escape a page for an attribute."""
    return page.replace("&", "&amp;").replace('"', "&quot;")


@name_arguments
def inspect(path: str | os.PathLike[str], *, overrides: Overrides = ()) -> Inspection:
    """Look at files without a config: columns, gaps, suspicious values, and a config to begin with.

    Files are read once, in batches, so that memory stays small however large they are.

    Args:
        path: A file, a folder or a pattern such as `"cells/*.csv"`.
        overrides: How files are read, as in `"data.encoding=cp1252"`: data.encoding, data.decimal,
            data.skip_rows, data.names, data.sheet, data.variable.

    Returns:
        An `Inspection`.

    Raises:
        UserError: A file is missing, empty, or cannot be read.

    Example:
        found = slipstream.inspect("ETTh1.csv")
        found.write("job.toml")
    """
    from slipstream.tools.inspection import inspect_path

    return Inspection(inspect_path(os.fspath(path), parse_overrides(overrides)))


@name_arguments
def prepare(
    config: Config | str | os.PathLike[str] | Mapping[str, Any],
    data: Any = None,
    *,
    columns: Sequence[str] | None = None,
    overrides: Overrides = (),
    out: str | os.PathLike[str] | None = None,
) -> pa.Table:
    """Return the rows that training sees, after `data.prepare` and before scaling.

    Args:
        config: A TOML file, a mapping of sections, or a `Config`.
        data: A path or a table to use instead of `data.path`, as for `train`.
        columns: The names of the columns, where `data` is a numpy array.
        overrides: Settings that override `config`.
        out: A file to write the rows to: .parquet, .csv or .arrow. An existing file is replaced.
            Rows that training streams from disk are written in batches and not returned.

    Returns:
        A pyarrow table with `series`, `row` (its number in the series), the time, inputs, targets,
        static columns and `split`: "train", "val", "test" or "unused". With walk-forward folds
        there are `split_1`, `split_2` ... instead, the earliest test block first.

    Raises:
        UserError: A setting or the data are wrong, as for `train`.

    Example:
        slipstream.prepare("job.toml").to_pandas().groupby("split").mean(numeric_only=True)
        slipstream.prepare("job.toml", out="rows.parquet")
    """
    from slipstream import config as configs
    from slipstream.base.errors import UserError
    from slipstream.data.prepared_rows import load_prepared_rows, write_prepared_rows

    job = prepare_job("prepare", config, data, columns=columns, overrides=overrides)
    if job.config is None:
        raise UserError("config is None; pass a TOML file, a mapping of sections, or a Config")
    rows = load_prepared_rows(configs.load(job.config, job.overrides), job.data)
    return rows.collect() if out is None else write_prepared_rows(rows, Path(out))
