"""What files hold, without a config: `slipstream.inspect`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.api.arguments import Overrides, parse_overrides
from slipstream.api.progress import speak_python

if TYPE_CHECKING:
    import pandas as pd

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

    @speak_python
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

    @speak_python
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
            [one["name"], one["type"], one["role"], describe_range(one)] for one in self.columns
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


@speak_python
def inspect(path: str | os.PathLike[str], *, overrides: Overrides = ()) -> Inspection:
    """Look at files without a config: columns, gaps, suspicious values, and a config to begin with.

    Files are read once, in batches, so that memory stays small however large they are.

    Args:
        path: A file, a folder or a pattern such as `"cells/*.csv"`.
        overrides: How files are read, as in `"data.encoding=cp1252"`: data.encoding, data.decimal,
            data.skip_rows, data.sheet, data.variable.

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
