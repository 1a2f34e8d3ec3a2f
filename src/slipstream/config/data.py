"""Where the series are, and how they become windows."""

import codecs
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from slipstream.base.errors import Setting
from slipstream.config.base import (
    Count,
    CountOrZero,
    Fraction,
    FromData,
    Interval,
    Marks,
    Names,
    PositiveOrInf,
    Scalar,
    Scalars,
    Section,
)
from slipstream.config.prepare import LabelStep, PadStep, PrepareStep, name_step, parse_steps

SIMULATED = "simulated:"
"""Paths that start so name an embedded data set instead of a file."""
WILDCARD = re.compile(r"[*?\[]")
SERIES_COLUMN, VALUE_COLUMN = "series", "value"
"""Columns that a table with a series per row or per column gets when it is made long"""
CASE_ENDINGS = (".ts", ".arff")
"""Endings of files that have a series per row by their format"""
WALK_FORWARD_SHARES = {"val": 0.1, "test": 0.2}
"""Default shares of each series that `walk_forward` sets aside, as in the default split"""


def check_encoding(name: str) -> str:
    """Refuse the name of an encoding that Python does not know."""
    try:
        codecs.lookup(name)
    except LookupError:
        raise ValueError(
            f'data.encoding = "{name}" is no encoding; use "utf-8", "cp1252", "latin-1", "utf-16" '
            "or another one of Python's"
        ) from None
    return name


def find_matches(pattern: Path) -> tuple[Path, list[Path]]:
    """Return the folder that a pattern begins with, and the paths below it that match, in order of
    name."""
    first = next((i for i, part in enumerate(pattern.parts) if WILDCARD.search(part)), None)
    if first is None:
        return pattern, []
    folder = Path(*pattern.parts[:first])
    return folder, sorted(folder.glob("/".join(pattern.parts[first:])))


def _has_cases(path: Any) -> bool:
    """Return whether a path names files that have a series per row, perhaps compressed."""
    name = str(path).lower().removesuffix(".gz").removesuffix(".zip")
    return name.endswith(CASE_ENDINGS)


ALL_ROWS = 0
"""`data.context = "all"`, until the series are read and it is a number of rows"""


def _parse_context(value: Any, parse_rows: ValidatorFunctionWrapHandler) -> Any:
    return ALL_ROWS if value == "all" else parse_rows(value)


Context = Annotated[
    int,
    Field(ge=1, le=10_000_000),
    WrapValidator(_parse_context),
    PlainSerializer(lambda rows: rows or "all"),
]
"""A number of rows, or ALL_ROWS"""


class Split(Section):
    """Which rows are for training, validation and test. Give one of the six forms."""

    train: Fraction | Scalars | None = None
    """Fraction of each series, from its start (0.7); with `by`, the values that train (default: the
    rest), also as patterns (`"*US06*"`)."""
    val: Fraction | Scalars | None = None
    """Fraction of each series after the training rows; with `by`, the values that validate, as
    names or patterns, or a fraction of the values that no list has (with `by = "file"`, of their
    series). With `walk_forward`, every fold's fraction (default 0.1)."""
    test: Fraction | Scalars | None = None
    """Fraction of each series after the validation rows, optional only in pre-training; with `by`,
    the values that test. With `walk_forward`, the fraction of all test blocks together (default
    0.2)."""
    rows: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """Training, validation and test rows of each series, in that order; later rows are unused."""
    by: str | None = None
    """A column whose value assigns a row to a set; `"series"` means the series' name where no
    column has that name. `"file"` is a row's file, where `id` or `layout` makes one table of
    several files."""
    folders: bool = False
    """The folders train/, val/ and test/ below `data.path` hold the sets."""
    stratified: bool = False
    """With fractions, for classes: split each class separately, so that every set contains all
    classes. Windows that share rows with a later set are dropped. This is not a forecast: training
    windows of one class may be later than test windows of another."""
    walk_forward: Annotated[int, Field(ge=1, le=1_000)] | None = None
    """Number of folds. The end of each series is cut into that many test blocks of equal length;
    each fold trains on the rows before its block and validates on the last of these."""
    window: Literal["expanding", "rolling"] = "expanding"
    """With `walk_forward`: train on everything before the validation rows, or only on the most
    recent rows, as many as the first fold has (context included)."""
    purge: CountOrZero = 0
    """With `walk_forward`: rows dropped between training and validation, and between validation and
    test. Sets never share target rows; raise it where a label is computed from later rows: 5 for
    the return over the next 5 rows."""
    embargo: CountOrZero = 0
    """With `walk_forward`: rows after each test block that later folds do not train on."""

    @model_validator(mode="before")
    @classmethod
    def _set_walk_shares(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("walk_forward") is not None:
            return WALK_FORWARD_SHARES | settings
        return settings

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        forms = [form is not None for form in (self.rows, self.by, self.walk_forward)]
        if sum((*forms, self.folders)) > 1:
            raise ValueError(
                "data.split: give one of train/val/test fractions, rows, by, folders or "
                "walk_forward, not several"
            )
        if self.stratified and any((*forms, self.folders)):
            raise ValueError(
                "data.split.stratified needs the fractions train, val and test; remove rows, by, "
                "folders and walk_forward"
            )
        if self.walk_forward is not None:
            self._check_walk()
            return self
        for name in ("window", "purge", "embargo"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"data.split.{name} applies only with walk_forward, which is not set; for a "
                    "single split, set walk_forward = 1"
                )
        self._check_sets()
        return self

    @property
    def lists_values(self) -> bool:
        """Whether a set is a list of values."""
        return any(isinstance(share, tuple) for share in (self.train, self.val, self.test))

    @property
    def draws_series(self) -> bool:
        """Whether a set is a fraction of the series, or of the values of `by`."""
        return self.by is not None and any(
            isinstance(share, float) for share in (self.train, self.val, self.test)
        )

    def _check_walk(self) -> None:
        if self.train is not None:
            raise ValueError(
                "data.split.walk_forward trains on all rows before val and test; remove train, as "
                f"in split = {{ walk_forward = {self.walk_forward} }}"
            )
        val, test = self.val, self.test
        if not (isinstance(val, float) and isinstance(test, float)):
            raise ValueError("data.split: with walk_forward, val and test are fractions, as in 0.1")
        if val + test > 1 - 1e-9:
            raise ValueError(
                f"data.split: val = {val:g} and test = {test:g} leave walk_forward no rows to "
                "train on; reduce them"
            )

    def _check_sets(self) -> None:
        shares = (self.train, self.val, self.test)
        if self.by is not None:
            if not self.val or not self.test:
                raise ValueError(
                    f'data.split: with by = "{self.by}", list the values of both val and test, as '
                    'in val = ["a"], or give a fraction of them'
                )
            if sum(share for share in shares if isinstance(share, float)) > 1 + 1e-9:
                raise ValueError(
                    f'data.split: with by = "{self.by}", the fractions of train, val and test add '
                    "up to more than 1"
                )
        elif self.rows is not None or self.folders:
            if any(share is not None for share in shares):
                raise ValueError(
                    "data.split: train, val and test cannot be combined with rows or folders; "
                    "remove one or the other"
                )
            if self.rows is not None and len(self.rows) != 3:
                raise ValueError(
                    "data.split.rows takes three counts: training, validation and test rows, as in "
                    "[8640, 2880, 2880]"
                )
        else:
            fractions = [share for share in shares if isinstance(share, float)]
            if self.train is None or self.val is None or len(fractions) != 3 - shares.count(None):
                raise ValueError(
                    "data.split: give all of train, val and test, as fractions of each series: "
                    "{ train = 0.7, val = 0.1, test = 0.2 }"
                )
            if sum(fractions) > 1 + 1e-9:
                raise ValueError(
                    f"data.split: train, val and test add up to {sum(fractions):g}, which is more "
                    "than 1"
                )


class Data(Section):
    """Where the series are and how they become windows."""

    path: str | Names | None = None
    """A file, a folder, a pattern (`"cells/*.csv"`) or a list of them: CSV, Parquet, Arrow, Excel
    or MATLAB, also compressed (`.csv.gz`, or a `.zip` with one of them inside). A file is one
    series unless `id` names a column. `"simulated:cell"` and `"simulated:bars"` are embedded: a
    battery, a market."""
    layout: Literal["long", "wide", "columns"] = "long"
    """The shape of the table. `"long"`: a row per time. `"wide"`: a series per row, its values side
    by side; the default for `.ts` and `.arff` files. `"columns"`: a series per column. Both become
    a long table with the columns `series` (unless `id` names one) and `value`."""
    values: str | Names | None = None
    """With another layout than `"long"`: the columns that hold the values, by name or by number
    from 1 on: a range (`"V2:"`, `"V2:V700"`, `"2:"`) or a list. Default: every numeric column that
    no other setting names."""
    task: Literal["regress", "classify"] = "regress"
    """`"regress"` predicts numbers; `"classify"` predicts one of several classes (the target is a
    column of integers or text, or comes from `labels`)."""
    time: str | Names | None = None
    """The column that orders the rows and reveals gaps: timestamps, dates, numbers, or times since
    a start (`25:19:08.5`, in seconds). Several columns (`["Date", "Time"]`) are joined by a space,
    or added where they hold dates and times of day."""
    time_format: str | None = None
    """Format of text in the time column, as for Python's strptime (`"%d.%m.%Y %H:%M"`, with `%f`
    for fractions of a second); ISO 8601 needs none."""
    decimal: Literal[".", ","] | None = None
    """The decimal mark of numbers that are text, as in a CSV file. Default: a point; a comma where
    semicolons or tabs separate the cells, no comma can be a thousands separator (1,5 but not 1,199)
    and no number has a decimal point."""
    na: Marks = ()
    """Numbers or texts that mean "missing" (`[-200, "no data"]`), in every column; empty cells,
    `NA`, `n/a`, `NaN` and `null` always do."""
    skip_rows: CountOrZero | None = None
    """Lines above the row of names, in CSV and Excel. Default: lines of text above the names are
    recognised."""
    names: Literal["none"] | Names | None = None
    """Text files and workbooks without a row of names: the names of their columns, in order, or
    `"none"` for `V1`, `V2` and so on."""
    encoding: Annotated[str, AfterValidator(check_encoding)] | None = None
    """Encoding of text files, as Python names it (`"cp1252"`, `"utf-16"`). Default: UTF-8."""
    sheet: str | Names | None = None
    """Excel: the sheet, a pattern or a list of them; `"*"` reads every sheet as a series. Default:
    the only sheet that is not empty."""
    variable: str | None = None
    """MATLAB: the struct, table or matrix that holds the columns (`"meas"`, `"log.cell(2)"`).
    Default: the only one in the file, or its vectors of equal length."""
    id: str | Names | None = None
    """The column or columns that identify the series of a long table. Several files then form one
    table; `"file"` means a row's file where no column has that name."""
    where: dict[str, Scalar | Scalars] = Field(default={})
    """Keep only the rows whose column has this value, or one of these values."""
    inputs: Names | None = None
    """Columns that the model reads. Default: every numeric column (without the targets where
    `horizon` is 0)."""
    targets: Names | None = None
    """Columns that the model predicts. Default when forecasting: every input. Required where
    `horizon` is 0. For classes: one column of integers or text. No window predicts a row where a
    target is missing."""
    labels: str | None = None
    """For classes: a table of labels instead of a target column, with the columns series (where
    there are several), start, end and label. start and end are times, or rows counted from 0
    without `time`."""
    label_rows: Literal["end", "every"] = "end"
    """Meaning of a row of `labels`: the one window that ends at its end, or every window whose
    target rows lie between its start and its end."""
    future: Names = ()
    """Columns that are known ahead, over the horizon: the calendar, prices, planned loads. They are
    inputs too, whether or not `inputs` lists them. The model also reads them for the rows that it
    predicts, so `slipstream predict` needs them for the rows after the last one."""
    static: Names = ()
    """Numeric columns that are constant within a series; they are added at the model's head."""
    ignore: Names = ()
    """Columns that are never inputs, for use with the default `inputs`."""
    context: Annotated[Context, FromData()] = 96
    """Rows that the model sees. `"auto"`: for forecasts 3.5 horizons, or a week of hours, 8 weeks
    of days, 3 years of months, 2 of weeks where that is more, at most 512 rows and as many as the
    series allow; 96 where no season is known. With `layout = "wide"` and `horizon` 0, `"all"`;
    otherwise 96. `"all"`: each series is one window, for `horizon` 0; its length is
    that of the longest series, shorter ones are padded at the front (a step `pad`), and fractions
    of `split` are shares of the series. The run's config has the number."""
    horizon: Annotated[int, Field(ge=0, le=1_000_000)] = 24
    """Rows to forecast; 0, the default for classes, estimates the targets at the window's last
    row."""
    stride: Count = 1
    """Rows from one window to the next, in every set."""
    channels: Annotated[Literal["together", "independent"], FromData()] = "together"
    """`"independent"`: every target column is its own series through one shared model; inputs that
    are not targets are passed with each of them. `"auto"`: `"independent"` for forecasts of several
    targets without other inputs."""
    scale: Literal["standard", "minmax", "seasonal", "none"] = "standard"
    """Scaling of the columns, fitted on training rows only (with several folds, on those of the
    first): to a mean of 0 and a deviation of 1, to a range from 0 to 1, or not at all.
    `"seasonal"`, with `scale_by = "series"`: the size of a series is its mean absolute change from
    one season to the next (`period`), as in MASE."""
    scale_by: Literal["global", "series", "window"] = "global"
    """What a column is scaled by: all training rows; the training rows of each series, or its first
    context where it has none; or the context of each window (then `model.normalize` is `"window"`).
    Of many series of different size, each then counts the same in the loss. Columns of `static` and
    `future`, and targets that are no inputs, are always scaled globally."""
    missing: Literal["error", "forward", "drop"] = "error"
    """Missing values of inputs: raise an error, repeat the last known value (earlier rows are
    dropped), or drop the row (no window crosses it). Rows that lack only a target stay; windows
    that would predict them are left out and counted."""
    unsorted: Literal["error", "sort"] = "error"
    """Rows whose time runs backwards: raise an error, or sort each series by time."""
    duplicates: Literal["error", "first", "last", "mean"] = "error"
    """Rows of a series with the same time: raise an error, keep the first or the last of them, or
    average their numbers (text and labels are those of the first). Where `resample` is the first
    step of `prepare`, the rows of a bin may share times without this setting."""
    gap_tolerance: PositiveOrInf = 0.5
    """A time step that differs from the series' usual one by more than this fraction of it is a
    gap, and no window crosses it. `inf`: rows are always consecutive."""
    short: Literal["error", "drop"] = "error"
    """Series with fewer rows than one window: raise an error or drop them."""
    prepare: Annotated[tuple[PrepareStep, ...], Field(strict=False)] = ()
    """Steps that run on the rows of the file before windows are cut, in order: `resample`,
    `filter`, `formula`, `calendar`, `join`, `label`, `unit`, `pad`, `clip`, `outliers`. Each is a
    table `[[data.prepare]]`; docs/data.md explains them. `predict` and `evaluate` repeat them."""
    undecided: dict[str, str] = Field(default={})
    """Questions that `slipstream inspect` found no answer to, by name. Training refuses until each
    is answered: change the setting that it names and remove the line, or list it in `accept`."""
    accept: Names = ()
    """Names in `undecided` that are right as they are (`["date format"]`)."""
    period: Count | None = None
    """Rows of one season, for the seasonal baseline. Default: a day, week or year, by the time
    column's step."""
    split: Split = Split(train=0.7, val=0.1, test=0.2)
    """Shares of each series in time order, `{ rows = [a, b, c] }`, `{ by = "column", val = [...],
    test = [...] }`, `{ folders = true }` or `{ walk_forward = 6 }`. A window belongs to the set
    that holds its target rows; its context may reach back over the border. To classify, also shares
    of each class (`stratified`)."""

    @property
    def time_columns(self) -> tuple[str, ...]:
        return (self.time,) if isinstance(self.time, str) else self.time or ()

    @property
    def time_column(self) -> str | None:
        """The column of times; of several columns, the one that they are joined to."""
        return " ".join(self.time_columns) or None

    @property
    def sheets(self) -> tuple[str, ...]:
        return (self.sheet,) if isinstance(self.sheet, str) else self.sheet or ()

    @property
    def ids(self) -> tuple[str, ...]:
        """The columns that identify a series, in a long table or in one that was made long."""
        named = (self.id,) if isinstance(self.id, str) else self.id or ()
        if self.layout == "columns" or (self.layout == "wide" and not named):
            return (*named, SERIES_COLUMN)
        return named

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    @field_validator("prepare", mode="before")
    @classmethod
    def _parse_prepare(cls, entries: Any) -> Any:
        return parse_steps(entries)

    @model_validator(mode="before")
    @classmethod
    def _set_layout(cls, settings: Any) -> Any:
        path = settings.get("path") if isinstance(settings, dict) else None
        paths = path if isinstance(path, list | tuple) else filter(None, [path])
        paths = list(paths)
        if paths and all(_has_cases(entry) for entry in paths):
            return {"layout": "wide"} | settings
        return settings

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        if self.layout == "long" and self.values is not None:
            raise ValueError(
                "data.values names the columns of a table with a series per row or per column; "
                "set "
                + Setting({"data.layout": "wide"})
                + ' or "columns", or use data.inputs for a long table'
            )
        if self.context == ALL_ROWS:
            self._check_whole()
        if self.layout == "wide" and self.time is not None:
            raise ValueError(
                'data.layout = "wide" has no column of times: the values of a row follow each '
                "other in the order of the columns; remove data.time"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _set_horizon(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("task") == "classify":
            return {"horizon": 0} | settings
        return settings

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.scale_by != "global" and self.scale == "none":
            raise ValueError(
                f'data.scale_by = "{self.scale_by}" has no effect with data.scale = "none"; remove '
                "one of them"
            )
        if self.scale == "seasonal" and self.scale_by != "series":
            raise ValueError(
                'data.scale = "seasonal" is the size of each series; set data.scale_by = "series" '
                'as well, or data.scale = "standard"'
            )
        return self

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        if self.task == "regress":
            if self.labels is not None or self.split.stratified:
                named = "data.labels" if self.labels is not None else "data.split.stratified"
                raise ValueError(
                    f"{named} is for classification; set " + Setting({"data.task": "classify"})
                )
        elif self.labels is not None and self.targets is not None:
            raise ValueError("data.labels and data.targets both define the target; remove one")
        elif self.labels is None and (self.targets is None or len(self.targets) != 1):
            raise ValueError(
                'data.task = "classify" needs one column of labels, as in targets = ["state"], or '
                "a table of them (data.labels)"
            )
        elif self.labels is None and self.label_rows != "end":
            raise ValueError("data.label_rows applies only with data.labels, which is not set")
        if self.task == "classify" and self.channels == "independent":
            raise ValueError(
                'data.channels = "independent" is for forecasts, not for classification; use '
                '"together"'
            )
        if self.labels is not None and self.label_rows == "end" and self.stride > 1:
            raise ValueError(
                "data.stride has no effect with data.labels, which define the windows; remove "
                "it, or set " + Setting({"data.label_rows": "every"})
            )
        return self

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        for key in ("inputs", "targets", "future"):
            names = getattr(self, key)
            if names is not None and not names and key != "future":
                raise ValueError(f"data.{key} is empty; name at least one column, or remove it")
            if names is not None and len(set(names)) < len(names):
                double = next(name for name in names if names.count(name) > 1)
                raise ValueError(f'data.{key} names a column twice: "{double}"')
        if self.horizon == 0 and self.targets is None and self.labels is None:
            raise ValueError(
                "data.horizon is 0, so data.targets must name what to estimate, as in targets = "
                '["soc"]'
            )
        shared = sorted(set(self.inputs or ()) & set(self.targets or ()))
        if self.horizon == 0 and shared:
            raise ValueError(
                f'data.inputs has the target "{shared[0]}": with data.horizon = 0 the model would '
                "read its own answer; remove it from data.inputs"
            )
        if self.horizon == 0 and self.channels == "independent":
            raise ValueError('data.channels = "independent" needs data.horizon to be at least 1')
        self._check_future()
        if self.channels == "independent" and self.inputs and self.targets:
            lost = sorted(set(self.targets) - set(self.inputs))
            if lost:
                raise ValueError(
                    f'data.channels = "independent" reads every target; add "{lost[0]}" to '
                    "data.inputs"
                )
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        for number, step in enumerate(self.prepare, start=1):
            if not isinstance(step, LabelStep):
                continue
            where = name_step(number, step)
            if self.task != "classify" or self.targets != (step.name,):
                raise ValueError(
                    f"{where} makes classes; set "
                    + Setting({"data.task": "classify", "data.targets": [step.name]})
                )
            if step.name in (*(self.inputs or ()), *self.static):
                raise ValueError(
                    f'{where}: "{step.name}" is made from rows to come and can only be a target; '
                    "remove it from data.inputs and data.static"
                )
        return self

    def _check_whole(self) -> None:
        if self.horizon:
            raise ValueError(
                'data.context = "all" reads a whole series, after which there is nothing to '
                f"forecast, but data.horizon is {self.horizon}; set "
                + Setting({"data.horizon": 0})
                + ", or data.context to a number of rows"
            )
        if self.labels is not None:
            raise ValueError(
                'data.context = "all" makes each series one window, but data.labels defines '
                "windows; remove it, or set data.context to a number of rows"
            )
        if self.split.rows is not None or self.split.walk_forward is not None:
            raise ValueError(
                'data.context = "all" makes each series one window, which data.split.rows and '
                "walk_forward would cut; use fractions, by or folders"
            )
        if any(isinstance(step, PadStep) for step in self.prepare):
            raise ValueError(
                'data.context = "all" pads series itself; remove the step pad from data.prepare'
            )

    def _check_future(self) -> None:
        if self.future and not self.horizon:
            raise ValueError(
                "data.future names columns known over the rows to come, but with data.horizon = 0 "
                "the model predicts the window's last row, which it reads anyway; list them in "
                "data.inputs instead, or set data.horizon"
            )
        other_roles = {"targets": self.targets or (), "static": self.static, "ignore": self.ignore}
        for key, names in other_roles.items():
            for name in self.future:
                if name in names:
                    raise ValueError(
                        f'data.future and data.{key} both name "{name}"; remove it from one of them'
                    )


class Signature(Section):
    """Columns in the order that the weights expect, and the window's shape."""

    inputs: Names
    targets: Names
    static: Names
    shared: int
    """The last `shared` inputs are the first `shared` targets."""
    context: int
    horizon: int
    channels: Literal["together", "independent"]
    quantiles: Annotated[tuple[float, ...], Field(strict=False)]
    """Empty for a point prediction."""
    step: float | None
    """Usual time from row to row: seconds for timestamps, else in the time column's own unit."""
    classes: Names = ()
    """To classify: their names, numbered in this order. Empty where numbers are predicted."""
    decoder: int = 0
    """Hidden units of a pre-trained encoder's decoder; 0 for a model that predicts."""
    output_range: Interval | None = None
    """Limits of the predictions, in physical units."""
    future: Names = ()
    """The first inputs: those that are known over the horizon as well."""
    state: Literal["windows", "carried"] = "windows"
    """What a recurrent model was trained for: a zero state at the start of each window, or a state
    that goes on from row to row, zero at the start of a series and after a gap."""

    @property
    def masked(self) -> bool:
        """Whether the model is an encoder that fills in masked rows of its inputs."""
        return self.decoder > 0

    @property
    def outputs(self) -> int:
        """Numbers for each predicted value: its quantiles, or a probability per class."""
        return max(len(self.quantiles), len(self.classes), 1)

    @property
    def steps_out(self) -> int:
        """Predicted rows per window; an encoder predicts all of its rows."""
        return self.context if self.masked else max(self.horizon, 1)

    @property
    def future_shape(self) -> tuple[int, int]:
        """Rows and columns that a model reads of the horizon."""
        return (self.horizon, len(self.future)) if self.future and not self.masked else (0, 0)

    @property
    def static_width(self) -> int:
        """Numbers that a model reads beside the context: static columns, and rows of the horizon
        one after the other."""
        rows, columns = self.future_shape
        return len(self.static) + rows * columns

    @property
    def sequences_per_window(self) -> int:
        """Sequences that one window becomes: one, or one per target channel."""
        return len(self.targets) if self.channels == "independent" else 1

    @property
    def model_inputs(self) -> int:
        """Columns of one sequence."""
        return len(self.inputs) - self.sequences_per_window + 1

    @property
    def model_targets(self) -> int:
        return len(self.targets) // self.sequences_per_window

    @property
    def model_shared(self) -> int:
        """How many of the sequence's last columns are its first targets. Classes are never: their
        numbers do not scale with the column."""
        return 0 if self.classes else self.shared // self.sequences_per_window

    @property
    def lead(self) -> int:
        """Rows from a window's first row to its first target row."""
        if self.masked:
            return 0
        return self.context if self.horizon else self.context - 1
