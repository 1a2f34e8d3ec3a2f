"""Formulas: a new column from an expression over columns, numbers and the functions listed.

A formula is not code. Its characters are checked first, then Python's parser makes a tree of it,
and only the nodes listed here are taken over into a tree of our own; nothing is compiled or
evaluated by Python. Names are columns; those that are not plain ASCII identifiers stand in
backticks.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import UserError
from slipstream.base.text import find_nearest, format_c_double
from slipstream.data.filters import design_ema, filter_column
from slipstream.data.prepare import calendars, rolling
from slipstream.data.prepare.c_code import Statements
from slipstream.data.prepare.calendars import convert_to_local
from slipstream.data.prepare.rolling import split_rows

Floats = npt.NDArray[np.float64]
MAX_ROWS = 100_000


@dataclass(frozen=True)
class Function:
    """A function or an operator of formulas."""

    usage: str
    """An example of a call, for messages"""
    compute: Callable[..., Any]
    c: str = ""
    """The expression in C: {0}, {1} are the arguments; for a function of the last rows, {x}, {rows}
    and {state}. Empty where `_write_c` has the statements, or where C does not have the times"""
    num_values: int = 1
    """Number of arguments that are expressions; the others are numbers of rows"""
    takes: Literal["values", "window", "shift", "times"] = "values"
    fewest_rows: int = 1
    default_rows: int | None = None
    unbounded: bool = False
    """Whether the value depends on all rows since the first"""

    def get_reach(self, rows: int | None) -> tuple[int | None, int]:
        """Return how many rows a call looks back (None: to the first row) and ahead."""
        if self.unbounded:
            return None, 0
        if rows is None:
            return 0, 0
        return (max(rows, 0), max(-rows, 0)) if self.takes == "shift" else (rows - 1, 0)


def compute_lag(values: Floats, rows: int) -> Floats:
    """Return each row's value `rows` rows before, or of a later row where `rows` is negative."""
    result = np.full(len(values), np.nan)
    if 0 <= rows < len(values):
        result[rows:] = values[: len(values) - rows]
    elif -len(values) < rows < 0:
        result[:rows] = values[-rows:]
    return result


def compute_diff(values: Floats, rows: int) -> Floats:
    return values - compute_lag(values, rows)


def compute_ema(values: Floats, rows: int) -> Floats:
    """Return the exponential moving average with the weight 2 / (rows + 1) for each new value."""
    return filter_column(values, design_ema(rows))


def compute_cumsum(values: Floats) -> Floats:
    """Return the sum of the known values so far."""
    missing = np.isnan(values)
    total = np.cumsum(np.where(missing, 0.0, values))
    total[missing] = np.nan
    return total


def choose(condition: Floats, if_true: Floats, if_false: Floats) -> Floats:
    chosen = np.where(condition != 0, if_true, if_false)
    return np.where(np.isnan(condition), np.nan, chosen)


def clip(values: Floats, low: Floats, high: Floats) -> Floats:
    return np.minimum(np.maximum(values, low), high)


def fill(values: Floats, replacement: Floats) -> Floats:
    return np.where(np.isnan(values), replacement, values)


def find_missing(values: Floats) -> Floats:
    return np.isnan(values).astype(np.float64)


def _make_logical(compute: Callable[..., Any]) -> Callable[..., Floats]:
    """Return a logical function of columns whose result is missing where a value is missing."""

    def apply(*values: Floats) -> Floats:
        missing = np.isnan(values[0])
        for value in values[1:]:
            missing = missing | np.isnan(value)
        return np.where(missing, np.nan, compute(*values))

    return apply


def _compare_in_c(operator: str) -> str:
    return f"(isnan({{0}}) || isnan({{1}}) ? NAN : (double)({{0}} {operator} {{1}}))"


def _combine_in_c(operator: str) -> str:
    return f"(isnan({{0}}) || isnan({{1}}) ? NAN : (double)({{0}} != 0.0 {operator} {{1}} != 0.0))"


MINIMUM_IN_C = "(isnan({0}) || {0} < {1} ? {0} : {1})"
MAXIMUM_IN_C = "(isnan({0}) || {0} > {1} ? {0} : {1})"
FUNCTIONS = {
    "lag": Function(
        "lag(x, rows)", compute_lag, "lag({state}, {rows}, {x})", takes="shift", default_rows=1
    ),
    "diff": Function(
        *("diff(x, rows)", compute_diff, "{x} - lag({state}, {rows}, {x})"),
        takes="shift",
        default_rows=1,
    ),
    "mean": Function(
        "mean(x, rows)", rolling.compute_mean, "mean({state}, {rows}, {x})", takes="window"
    ),
    "sum": Function(
        "sum(x, rows)", rolling.compute_sum, "sum({state}, {rows}, {x})", takes="window"
    ),
    "std": Function(
        "std(x, rows)",
        rolling.compute_std,
        "standard_deviation({state}, {rows}, {x})",
        takes="window",
        fewest_rows=2,
    ),
    "min": Function(
        "min(x, rows)", rolling.compute_min, "extreme({state}, {rows}, {x}, 0)", takes="window"
    ),
    "max": Function(
        "max(x, rows)", rolling.compute_max, "extreme({state}, {rows}, {x}, 1)", takes="window"
    ),
    "median": Function(
        "median(x, rows)", rolling.compute_median, "median({state}, {rows}, {x})", takes="window"
    ),
    "zscore": Function(
        "zscore(x, rows)",
        rolling.compute_zscore,
        "zscore({state}, {rows}, {x})",
        takes="window",
        fewest_rows=2,
    ),
    "ema": Function("ema(x, rows)", compute_ema, takes="window", unbounded=True),
    "cumsum": Function("cumsum(x)", compute_cumsum, unbounded=True),
    "where": Function(
        "where(condition, if_true, if_false)",
        choose,
        "(isnan({0}) ? NAN : {0} != 0.0 ? {1} : {2})",
        num_values=3,
    ),
    "clip": Function("clip(x, low, high)", clip, num_values=3),
    "minimum": Function("minimum(a, b)", np.minimum, MINIMUM_IN_C, num_values=2),
    "maximum": Function("maximum(a, b)", np.maximum, MAXIMUM_IN_C, num_values=2),
    "fill": Function("fill(x, value)", fill, "(isnan({0}) ? {1} : {0})", num_values=2),
    "missing": Function("missing(x)", find_missing, "(double)isnan({0})"),
    "log": Function("log(x)", np.log, "log({0})"),
    "exp": Function("exp(x)", np.exp, "exp({0})"),
    "abs": Function("abs(x)", np.abs, "fabs({0})"),
    "sqrt": Function("sqrt(x)", np.sqrt, "sqrt({0})"),
    "sign": Function(
        "sign(x)", np.sign, "(isnan({0}) ? NAN : (double)(({0} > 0.0) - ({0} < 0.0)))"
    ),
    "floor": Function("floor(x)", np.floor, "floor({0})"),
    "sin": Function("sin(x)", np.sin, "sin({0})"),
    "cos": Function("cos(x)", np.cos, "cos({0})"),
    "tanh": Function("tanh(x)", np.tanh, "tanh({0})"),
    "hour": Function("hour()", calendars.compute_hour, num_values=0, takes="times"),
    "minute": Function("minute()", calendars.compute_minute, num_values=0, takes="times"),
    "weekday": Function("weekday()", calendars.compute_weekday, num_values=0, takes="times"),
    "day_of_year": Function(
        "day_of_year()", calendars.compute_day_of_year, num_values=0, takes="times"
    ),
    "month": Function("month()", calendars.compute_month, num_values=0, takes="times"),
}
OPERATORS = {
    "+": Function("a + b", np.add, "({0} + {1})", num_values=2),
    "-": Function("a - b", np.subtract, "({0} - {1})", num_values=2),
    "*": Function("a * b", np.multiply, "({0} * {1})", num_values=2),
    "/": Function("a / b", np.divide, "({0} / {1})", num_values=2),
    "//": Function("a // b", np.floor_divide, "modulo({0}, {1}, 1)", num_values=2),
    "%": Function("a % b", np.mod, "modulo({0}, {1}, 0)", num_values=2),
    "**": Function("a ** 2", np.power, "pow({0}, {1})", num_values=2),
    "negate": Function("-a", np.negative, "(-{0})"),
    "<": Function("a < b", _make_logical(np.less), _compare_in_c("<"), num_values=2),
    "<=": Function("a <= b", _make_logical(np.less_equal), _compare_in_c("<="), num_values=2),
    ">": Function("a > b", _make_logical(np.greater), _compare_in_c(">"), num_values=2),
    ">=": Function("a >= b", _make_logical(np.greater_equal), _compare_in_c(">="), num_values=2),
    "==": Function("a == b", _make_logical(np.equal), _compare_in_c("=="), num_values=2),
    "!=": Function("a != b", _make_logical(np.not_equal), _compare_in_c("!="), num_values=2),
    "and": Function("a and b", _make_logical(np.logical_and), _combine_in_c("&&"), num_values=2),
    "or": Function("a or b", _make_logical(np.logical_or), _combine_in_c("||"), num_values=2),
    "not": Function(
        "not a", _make_logical(np.logical_not), "(isnan({0}) ? NAN : (double)({0} == 0.0))"
    ),
}


Times = npt.NDArray[Any]

LONGEST = 1000
"""The number of characters that a formula may have"""
DEEPEST = 50
"""The nesting that a formula may have, well below the limit of Python's recursion"""
SHOWN = 80
"""The number of a formula's characters that messages repeat"""
LARGEST_EXPONENT = 16
LARGEST_NUMBER = 1e30
"""Larger constants are refused, as are larger values in columns (`columns.LARGEST`)"""
ALLOWED = re.compile(r"[A-Za-z0-9_.,()+\-*/%<>=! \t\r\n]")
"""The characters allowed outside of backticks: no quotes, brackets, braces, colons, semicolons,
backslashes, @ or #"""
QUOTED = re.compile("`([^`]*)`")
BESIDE = re.compile(r"[A-Za-z0-9_`]")
"""Characters that must not touch a name in backticks: Python would read both as one name"""
MARK = "λ"
"""The prefix of the word that replaces a name in backticks while Python parses; formulas cannot
contain it"""
BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
INSTEAD = {"&": "use and", "|": "use or", "~": "use not", "^": "use **", "[": "use lag(x, rows)"}
"""The spelling in a formula of operators from other languages"""
HINTS: dict[type[ast.AST], str] = {
    ast.IfExp: "use where(condition, if_true, if_false)",
    ast.Attribute: "a point belongs to a number only; put a column with a point in backticks",
    ast.Tuple: "use commas between arguments only",
    ast.Starred: "use commas between arguments only",
    ast.GeneratorExp: "there are no loops",
}


@dataclass(frozen=True)
class Number:
    """A number in a formula."""

    value: float


@dataclass(frozen=True)
class ColumnName:
    """A column in a formula."""

    name: str
    position: int


@dataclass(frozen=True)
class Operation:
    """A function or an operator in a formula, with its arguments."""

    name: str
    arguments: tuple[Node, ...]
    rows: int | None = None

    @property
    def function(self) -> Function:
        return OPERATORS[self.name] if self.name in OPERATORS else FUNCTIONS[self.name]


Node = Number | ColumnName | Operation


@dataclass(frozen=True)
class Formula:
    """A checked formula."""

    text: str
    root: Node

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the formula reads, each once, in the order of the text."""
        return tuple(dict.fromkeys(leaf.name for leaf in _list_columns(self.root)))

    @property
    def needs_times(self) -> bool:
        """Whether the formula uses the time stamps of the rows."""
        return any(node.function.takes == "times" for node in _list_operations(self.root))

    @property
    def look_back(self) -> int | None:
        """The number of earlier rows that a value depends on; None for all of them."""
        return _get_reach(self.root)[0]

    @property
    def look_ahead(self) -> int:
        """The number of later rows that a value depends on."""
        return _get_reach(self.root)[1]

    def check_columns(self, known: Iterable[str]) -> None:
        """Refuse a column that is not among the known ones."""
        names = list(known)
        for leaf in _list_columns(self.root):
            if leaf.name not in names:
                nearest = find_nearest(leaf.name, names)
                listed = f"there are {', '.join(names[:20])}"
                hint = f'did you mean "{nearest}"?' if nearest else listed
                _refuse(self.text, leaf.position, f'no column "{leaf.name}"; {hint}')

    def evaluate(self, columns: Mapping[str, Floats], times: Times | None = None) -> Floats:
        """Return the formula's column of a series, NaN where a result is not finite."""
        self.check_columns(columns)
        names = self.columns
        local = convert_to_local(times, None) if self.needs_times else None
        num_rows = len(columns[names[0]]) if names else len(local if local is not None else ())
        back, ahead = _get_reach(self.root)
        result = np.empty(num_rows)
        parts = split_rows(num_rows, num_rows if back is None else back, ahead)
        with np.errstate(all="ignore"):
            for read, write, inner in parts:
                part = {name: columns[name][read] for name in names}
                stamps = None if local is None else local[read]
                values = _evaluate(self.root, part, stamps, read.stop - read.start)
                result[write] = np.broadcast_to(values, read.stop - read.start)[inner]
        result[~np.isfinite(result)] = np.nan
        return result

    def write_c(self, columns: Mapping[str, str], code: Statements) -> str:
        """Add the statements of the formula and return the variable of its value; a result that is
        not finite is missing. `columns` are the variables of its columns."""
        value = _write_c(self.root, columns, code)
        return code.assign(f"isfinite({value}) ? {value} : NAN")


def parse_formula(text: str) -> Formula:
    """Return the formula of a text; anything but a formula is refused, with the position."""
    if len(text) > LONGEST:
        raise UserError(
            f"the formula has {len(text):,} characters; at most {LONGEST:,} are allowed"
        )
    if not text.strip():
        raise UserError("the formula is empty")
    source, names = _replace_quoted(text)
    root = _Parser(text, source, names).convert(_parse_python(text, source), 1)
    formula = Formula(text, root)
    if not formula.columns and not formula.needs_times:
        raise UserError(f'formula "{text}": names no column')
    return formula


def _refuse(text: str, position: int, problem: str) -> NoReturn:
    raise UserError(f'formula "{_shorten(text)}", position {position + 1}: {problem}')


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def _replace_quoted(text: str) -> tuple[str, dict[str, str]]:
    """Replace names in backticks by words of equal length, so that positions stay; check the
    other characters."""
    names: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        if not match[1].strip():
            _refuse(text, match.start(), "there is no name between the backticks")
        around = (
            text[max(match.start() - 1, 0) : match.start()],
            text[match.end() : match.end() + 1],
        )
        if any(BESIDE.fullmatch(character) for character in around):
            _refuse(text, match.start(), "an operator is missing beside the backticks")
        number = len(names)
        word = f"{MARK}{chr(97 + number // 26)}{chr(97 + number % 26)}".ljust(len(match[0]), "_")
        names[word] = match[1]
        return word

    spaces = QUOTED.sub(lambda match: " " * len(match[0]), text)
    for position, character in enumerate(spaces):
        if character == "`":
            _refuse(text, position, "the backtick has no second one")
        if not ALLOWED.fullmatch(character):
            fix = INSTEAD.get(character, "put a column with such a name in backticks")
            _refuse(text, position, f'"{character}" is not allowed in a formula; {fix}')
    return re.sub(r"[\t\r\n]", " ", QUOTED.sub(replace, text)), names


def _parse_python(text: str, source: str) -> ast.expr:
    # leading spaces would be an indent; positions are corrected where they are used
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return ast.parse(source.strip(), mode="eval").body
    except SyntaxError as error:
        start = len(source) - len(source.lstrip())
        position = min(start + max((error.offset or 1) - 1, 0), len(text) - 1)
        _refuse(text, position, f"not a formula, at {_quote_near(text, position)}")
    except (ValueError, MemoryError, RecursionError, OverflowError):
        problem = "nested too deep, or a number is too long"
        raise UserError(f'formula "{_shorten(text)}": {problem}') from None


def _quote_near(text: str, position: int) -> str:
    return f'"{text[position : position + 20]}"'


@dataclass(frozen=True)
class _Parser:
    """Takes over the allowed nodes of Python's tree."""

    text: str
    source: str
    names: Mapping[str, str]

    def convert(self, node: ast.expr, depth: int) -> Node:
        if depth > DEEPEST:
            self.refuse(node, f"nested more than {DEEPEST} deep; split it into several formulas")
        match node:
            case ast.Constant():
                return Number(self.read_number(node))
            case ast.Name(id=name):
                return ColumnName(self.names.get(name, name), self.get_position(node))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.convert(operand, depth + 1)
            case ast.UnaryOp(op=ast.USub() | ast.Not() as sign, operand=operand):
                name = "negate" if isinstance(sign, ast.USub) else "not"
                return Operation(name, (self.convert(operand, depth + 1),))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in BINARY:
                if isinstance(operator, ast.Pow):
                    self.check_exponent(right)
                sides = (self.convert(left, depth + 1), self.convert(right, depth + 1))
                return Operation(BINARY[type(operator)], sides)
            case ast.BoolOp(op=operation, values=values):
                name = "and" if isinstance(operation, ast.And) else "or"
                return self.chain(name, [self.convert(value, depth + 1) for value in values])
            case ast.Compare():
                return self.convert_comparison(node, depth)
            case ast.Call():
                return self.convert_call(node, depth)
        hint = HINTS.get(type(node), "use columns, numbers, operators and functions only")
        return self.refuse(node, f"{_quote_near(self.text, self.get_position(node))}: {hint}")

    def chain(self, name: str, nodes: list[Node]) -> Node:
        result = nodes[0]
        for node in nodes[1:]:
            result = Operation(name, (result, node))
        return result

    def convert_comparison(self, node: ast.Compare, depth: int) -> Node:
        """Convert a < b < c to a < b and b < c."""
        sides = [self.convert(side, depth + 1) for side in (node.left, *node.comparators)]
        pairs: list[Node] = []
        for operator, left, right in zip(node.ops, sides[:-1], sides[1:], strict=True):
            if type(operator) not in COMPARISONS:
                self.refuse(node, "compare with <, <=, >, >=, == or !=")
            pairs.append(Operation(COMPARISONS[type(operator)], (left, right)))
        return self.chain("and", pairs)

    def convert_call(self, node: ast.Call, depth: int) -> Node:
        if not isinstance(node.func, ast.Name) or node.func.id in self.names:
            self.refuse(node, "only the functions of formulas can be called, by their names")
        name = node.func.id
        function = FUNCTIONS.get(name)
        if function is None:
            nearest = find_nearest(name, FUNCTIONS)
            hint = f'did you mean "{nearest}"?' if nearest else f"there are {', '.join(FUNCTIONS)}"
            self.refuse(node, f'no function "{name}"; {hint}')
        if node.keywords:
            self.refuse(node, f"arguments have no names; write {function.usage}")
        values, row_counts = node.args[: function.num_values], node.args[function.num_values :]
        takes_rows = function.takes in ("window", "shift")
        optional = function.default_rows is not None
        if len(values) < function.num_values or len(row_counts) > takes_rows:
            self.refuse(node, f"{name} is called as {function.usage}")
        if takes_rows and not row_counts and not optional:
            self.refuse(node, f"{name} needs a number of rows; write {function.usage}")
        rows = (
            self.read_rows(row_counts[0], name, function) if row_counts else function.default_rows
        )
        arguments = tuple(self.convert(value, depth + 1) for value in values)
        return Operation(name, arguments, rows)

    def read_rows(self, node: ast.expr, name: str, function: Function) -> int:
        value = _read_literal(node)
        low = -MAX_ROWS if function.takes == "shift" else function.fewest_rows
        if not isinstance(value, int) or not low <= value <= MAX_ROWS:
            problem = (
                f"the second argument of {name} is a whole number of rows, {low} to {MAX_ROWS}"
            )
            if name in ("min", "max"):
                problem += f"; for the {name[:3]} of two values use {name}imum(a, b)"
            self.refuse(node, problem)
        return value

    def read_number(self, node: ast.Constant) -> float:
        value = _read_literal(node)
        if value is None or abs(value) > LARGEST_NUMBER:
            self.refuse(node, "use plain numbers up to 1e30, and 1 and 0 for true and false")
        return float(value)

    def check_exponent(self, node: ast.expr) -> None:
        value = _read_literal(node)
        if value is None or abs(value) > LARGEST_EXPONENT:
            self.refuse(node, f"an exponent is a number up to {LARGEST_EXPONENT}; else use exp")

    def get_position(self, node: ast.expr) -> int:
        """Return the position of a node's first character; Python's parser counts bytes."""
        stripped = self.source.strip()
        before = stripped.encode()[: node.col_offset].decode()
        return len(before) + len(self.source) - len(self.source.lstrip())

    def refuse(self, node: ast.expr, problem: str) -> NoReturn:
        _refuse(self.text, self.get_position(node), problem)


def _read_literal(node: ast.expr) -> int | float | None:
    """Return a number with its sign; None for all other nodes, true and false among them."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        positive = _read_literal(node.operand) if isinstance(node.operand, ast.Constant) else None
        return None if positive is None else -positive
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _list_columns(node: Node) -> list[ColumnName]:
    if isinstance(node, Operation):
        return [leaf for argument in node.arguments for leaf in _list_columns(argument)]
    return [node] if isinstance(node, ColumnName) else []


def _list_operations(node: Node) -> list[Operation]:
    if not isinstance(node, Operation):
        return []
    inner = (_list_operations(argument) for argument in node.arguments)
    return [node, *itertools.chain.from_iterable(inner)]


def _get_reach(node: Node) -> tuple[int | None, int]:
    """Return how many rows a value looks back (None: to the first row) and ahead."""
    if not isinstance(node, Operation):
        return 0, 0
    back, ahead = node.function.get_reach(node.rows)
    reaches = [_get_reach(argument) for argument in node.arguments]
    inner_back = [rows for rows, _ in reaches if rows is not None]
    bounded = back is not None and len(inner_back) == len(reaches)
    furthest = max(inner_back, default=0) + (back or 0) if bounded else None
    return furthest, max((rows for _, rows in reaches), default=0) + ahead


def _evaluate(node: Node, columns: Mapping[str, Floats], local: Any, num_rows: int) -> Any:
    if isinstance(node, Number):
        return np.float64(node.value)
    if isinstance(node, ColumnName):
        return columns[node.name]
    function = node.function
    if function.takes == "times":
        return function.compute(local)
    values = [_evaluate(argument, columns, local, num_rows) for argument in node.arguments]
    if function.takes == "values" and not function.unbounded:
        return function.compute(*values)
    column = np.ascontiguousarray(np.broadcast_to(values[0], num_rows))
    return function.compute(column) if node.rows is None else function.compute(column, node.rows)


def _write_c(node: Node, columns: Mapping[str, str], code: Statements) -> str:
    """Add the statements of a node and return the variable of its value."""
    if isinstance(node, Number):
        return code.assign(format_c_double(node.value))
    if isinstance(node, ColumnName):
        return columns[node.name]
    values = [_write_c(argument, columns, code) for argument in node.arguments]
    function, rows = node.function, node.rows
    if node.name == "ema":
        assert rows is not None
        return code.apply_low_pass(design_ema(rows).sections, values[0])
    if node.name == "cumsum":
        code.call("cumsum")
        return code.assign(f"accumulate({code.allocate(1)}, {values[0]})")
    if node.name == "clip":
        value, low, high = values
        lower = code.assign(MAXIMUM_IN_C.format(value, low))
        return code.assign(MINIMUM_IN_C.format(lower, high))
    if rows is None:
        code.call(node.name)
        return code.assign(function.c.format(*values))
    if rows == 0:  # only lag and diff may have no rows
        return values[0] if node.name == "lag" else code.assign(f"{values[0]} - {values[0]}")
    return code.apply_ring(node.name, function.c, values[0], rows)
