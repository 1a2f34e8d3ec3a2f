"""The role of a table's columns and rows: inputs and targets, series, groups of the split."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import LeaveOut, UserError
from slipstream.base.text import find_nearest
from slipstream.config import Config, Data, Signature
from slipstream.data.columns import is_numeric, read_codes, require_column
from slipstream.data.layout import UNNAMED
from slipstream.data.table import FILE_COLUMN, DataTable

Ints = npt.NDArray[np.int64]

LABEL = "label"
"""The column of a table of labels, and the name of the target that it becomes"""
SERIES = "series"
"""The value of `data.split.by` that means the series' name, where no column has that name"""


@dataclass(frozen=True)
class Roles:
    """The columns by role."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    static: tuple[str, ...] = ()
    future: tuple[str, ...] = ()
    """Inputs that are also known over the horizon"""
    masked: bool = False
    """Whether rows of the inputs are to be filled in, as in pre-training"""

    @property
    def scored(self) -> tuple[str, ...]:
        """The columns whose values predictions are compared with."""
        return self.inputs if self.masked else self.targets


def find_roles(table: DataTable, data: Data) -> tuple[Roles, list[str]]:
    """Return the columns by role, with notes on the columns that the defaults leave out."""
    targets = data.targets if data.labels is None else (LABEL,)
    notes = _describe_ambiguous_names(table, data)
    inputs = data.inputs
    for name in data.future:
        require_column(table, name, "data.future")
    for name in inputs or ():
        require_column(table, name, "data.inputs")
    if inputs is None:
        inputs, unused = _select_inputs(table, data)
        notes += [f"not used as inputs: {', '.join(unused)}"] if unused else []
    inputs = (*(name for name in data.future if name not in inputs), *inputs)
    if data.labels is not None and LABEL in inputs:
        raise UserError(
            f'{table.name}: has an input "{LABEL}", the name of the column that data.labels '
            "adds; rename it, or " + LeaveOut("add it to data.ignore", LABEL, "data.ignore")
        )
    forecast = tuple(name for name in inputs if name not in data.future)
    if not (targets or forecast):
        raise UserError(
            f"{table.name}: every input is known ahead (data.future), so nothing is left to "
            "forecast; name data.targets"
        )
    return Roles(inputs, targets or forecast, data.static, data.future), notes


def _select_inputs(table: DataTable, data: Data) -> tuple[tuple[str, ...], list[str]]:
    """Return the default inputs, and the columns without a role."""
    for name in data.targets or ():
        require_column(table, name, "data.targets")
    reserved = {
        *data.time_columns,
        data.time_column,
        data.split.by,
        *data.ids,
        *data.static,
        *data.where,
        *data.ignore,
    }
    if data.horizon == 0 or data.task == "classify":
        reserved |= set(data.targets or ())
    reserved |= {table.file_column, *(name for file in table.files for name in file.scalars)}
    free = [name for name in table.column_names if name not in reserved]
    inputs = tuple(
        name
        for name in free
        if is_numeric(table, name)
        and not name.startswith(UNNAMED)
        and (data.channels == "together" or name in (data.targets or free))
    )
    if not inputs:
        raise UserError(
            f"{table.name}: has no numeric column to use as an input; set data.inputs (it has "
            f"{', '.join(table.column_names[:20])})"
        )
    used = set(inputs)
    return inputs, [name for name in free if name not in used]


def _describe_ambiguous_names(table: DataTable, data: Data) -> list[str]:
    """Note where a reserved word of the settings is also a column's name; the column then wins."""
    notes, columns = [], table.column_names
    if FILE_COLUMN in data.ids and FILE_COLUMN in columns and table.file_column != FILE_COLUMN:
        notes.append(f'data.id = "{FILE_COLUMN}" is the column of that name, not a row\'s file')
    if data.split.by == SERIES and SERIES in columns and SERIES not in data.ids:
        meaning = "is the column of that name, not the series' name"
        notes.append(f'data.split.by = "{SERIES}" {meaning}')
    return notes


def refuse_unknown_jitter(jitter: Any, inputs: Sequence[str]) -> None:
    """Raise a UserError for noise on a column that is no input, with the nearest name."""
    for name in jitter if isinstance(jitter, Mapping) else ():
        if name not in inputs:
            nearest = find_nearest(name, inputs)
            hint = f'did you mean "{nearest}"?' if nearest else f"inputs are {', '.join(inputs)}"
            raise UserError(
                f'augment.jitter has "{name}", which is not an input; {hint}',
                setting="augment.jitter",
            )
    if isinstance(jitter, tuple) and len(jitter) != len(inputs):
        raise UserError(
            f"augment.jitter lists {len(jitter)} numbers, but the inputs are "
            f"{len(inputs)}: {', '.join(inputs)}; name the columns instead, as in "
            f'augment.jitter = {{ "{inputs[0]}" = 0.02 }}',
            setting="augment.jitter",
        )


def adapt_to_pretraining(roles: Roles, data: Data) -> tuple[Roles, Data]:
    """Return the roles and the settings of pre-training: inputs only, windows without a horizon."""
    targets = roles.targets if data.channels == "independent" else ()
    split = data.split.model_copy(update={"stratified": False})
    unused = {"horizon": 0, "static": (), "task": "regress", "labels": None, "split": split}
    roles = Roles(roles.inputs, targets, future=roles.future, masked=True)
    return roles, data.model_copy(update=unused)


def sort_roles(roles: Roles) -> Roles:
    """Sort the columns: inputs only (known ahead first), then inputs that are targets as well, then
    targets only."""
    inputs, targets = set(roles.inputs), set(roles.targets)
    shared = [name for name in roles.targets if name in inputs]
    past_inputs = (
        name for name in roles.inputs if name not in targets and name not in roles.future
    )
    return replace(
        roles,
        inputs=(*roles.future, *past_inputs, *shared),
        targets=(*shared, *(name for name in roles.targets if name not in inputs)),
    )


def build_signature(
    config: Config, roles: Roles, step: float | None, names: tuple[str, ...]
) -> Signature:
    """Return the signature of a model, its inputs and outputs; `names` are the classes."""
    data = config.data
    return Signature(
        inputs=roles.inputs,
        targets=roles.targets,
        static=roles.static,
        shared=len(set(roles.inputs) & set(roles.targets)),
        context=data.context,
        horizon=0 if config.masked else data.horizon,
        channels=data.channels,
        quantiles=config.train.quantiles if config.train.loss == "quantile" else (),
        step=step,
        classes=names,
        decoder=config.pretrain.decoder if config.masked else 0,
        output_range=config.model.output_range,
        future=roles.future,
        state=config.train.state,
    )


def select_rows(table: DataTable, data: Data) -> Ints | range:
    """Return the rows that `data.where` selects."""
    if not data.where:
        return range(table.num_rows)
    keep = np.ones(table.num_rows, dtype=bool)
    present = []
    for name, value in data.where.items():
        codes, texts = read_codes(table, name, "data.where")
        accepted = {normalize_value(v) for v in (value if isinstance(value, tuple) else (value,))}
        keys = [normalize_value(text) for text in texts]
        _refuse_lookalikes(table, name, texts, accepted.difference(keys))
        keep &= np.isin(codes, [i for i, key in enumerate(keys) if key in accepted])
        present.append(f'"{name}" is {", ".join(texts[:10])}')
    if not keep.any():
        wanted = ", ".join(f"{name} = {value!r}" for name, value in data.where.items())
        raise UserError(f"{table.name}: no row matches data.where ({wanted}); {'; '.join(present)}")
    return np.flatnonzero(keep)


def _refuse_lookalikes(table: DataTable, name: str, texts: list[str], absent: set[str]) -> None:
    """Refuse a value of `data.where` that no row has, if a text in the column reads as the same
    number."""
    numbers = {_read_number(value): value for value in absent if _match_number(value)}
    for cell in texts:
        number = None if _match_number(cell) else _read_number(cell)
        if number in numbers:
            raise UserError(
                f'{table.name}: "{name}" is never {numbers[number]}, but "{cell}"; write it so in '
                "data.where, as text"
            )


def _read_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


PLAIN_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>0|[1-9][0-9]*|(?=\.[0-9]))(?:(?P<point>\.)(?P<fraction>[0-9]*))?"
    r"(?:[eE](?P<exponent>(?P<signed>[+-]?)[0-9]{1,3}))?"
)
SPELLINGS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}


def normalize_value(value: Any) -> str:
    """Return one text for all spellings of a value: 25, 25.0, "25" and "2.5e+01"; true and "True".

    Numbers are compared exactly. A text that may be a name stays text: 007, 1_2 and 1e3.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # all of its digits, where repr has the first 17
    text = str(value)
    number = _match_number(text)
    if number is None:
        return SPELLINGS.get(text, text)
    digits = (number["whole"] + (number["fraction"] or "")).lstrip("0")
    shift = int(number["exponent"] or 0) - len(number["fraction"] or "")
    shift += len(digits) - len(digits.rstrip("0"))
    digits = digits.rstrip("0")
    if not digits:
        return "0"
    sign = "-" if number["sign"] == "-" else ""
    if shift >= 0:
        return f"{sign}{digits}{'0' * shift}"
    padded = digits.rjust(1 - shift, "0")
    return f"{sign}{padded[:shift]}.{padded[shift:]}"


def _match_number(text: str) -> re.Match[str] | None:
    """Match the parts of a plain number; None for other text, and for 1e3, which may be a name."""
    number = PLAIN_NUMBER.fullmatch(text.strip())
    is_name = number and number["exponent"] and not (number["signed"] or number["point"])
    return None if is_name else number


def identify_series(table: DataTable, data: Data) -> tuple[Ints, list[str]]:
    """Return each row's series, as codes in order of appearance, and the series' names."""
    if not data.ids:
        return _zeros(table.num_rows), [table.name]
    codes, names = read_codes(table, data.ids[0], "data.id")
    for column in data.ids[1:]:
        more, values = read_codes(table, column, "data.id")
        pairs, first, codes = np.unique(
            codes * len(values) + more, return_index=True, return_inverse=True
        )
        appearance = np.argsort(first)
        names = [f"{names[p // len(values)]}/{values[p % len(values)]}" for p in pairs[appearance]]
        codes = np.argsort(appearance)[codes]
    return codes, names


def _zeros(rows: int) -> Ints:
    """Return a zero for every row, as a view of a single number."""
    return np.broadcast_to(np.zeros(1, dtype=np.int64), rows)


def _names_series(data: Data) -> bool:
    """Return whether the column "series" has the names of series, alone or with other ids."""
    return data.ids == (SERIES,) or data.layout != "long"


def find_split_groups(
    table: DataTable, data: Data, series: Ints, names: list[str], group_names: dict[str, int]
) -> npt.NDArray[np.int32]:
    """Return each row's group for the split: a column's value, the series' name or the folder."""
    by = data.split.by
    codes, values = _zeros(len(series)), [""]
    if data.split.folders and table.file_column is not None:
        codes, files = read_codes(table, table.file_column, "data.split.folders")
        values = [file.split("/")[0] for file in files]
    elif data.split.folders:
        values = [table.name.split("/")[0]]
    elif by == SERIES and (by not in table.column_set or _names_series(data)):
        codes, values = series, names
    elif by is not None:
        codes, values = read_codes(table, by, "data.split.by")
    known = [group_names.setdefault(normalize_value(value), len(group_names)) for value in values]
    if len(known) == 1:
        return np.broadcast_to(np.array(known, dtype=np.int32), len(codes))
    return np.array(known, dtype=np.int32)[codes]
