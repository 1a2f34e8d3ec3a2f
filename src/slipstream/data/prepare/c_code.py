"""The C statements of steps: one row at a time, in double, with a state that the caller keeps.

`Statements` collects what the steps write; `exporting/c/templates/prepare.c.j2` defines the
functions that they call, and contains only those that some step needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.base.text import format_c_double
from slipstream.data.series import Floats

NEEDS = {
    "lag": ("ring",),
    "diff": ("ring", "lag"),
    "mean": ("ring", "is_full", "moments"),
    "std": ("ring", "is_full", "moments"),
    "zscore": ("ring", "is_full", "moments"),
    "sum": ("ring", "is_full"),
    "min": ("ring", "is_full", "extreme"),
    "max": ("ring", "is_full", "extreme"),
    "median": ("ring", "is_full", "known_median"),
    "filter_median": ("ring", "known_median"),
    "filter_mean": ("ring",),
    "weigh": ("ring",),
    "//": ("modulo",),
    "%": ("modulo",),
}
"""The functions of the template that a function calls"""
RING_HEADER = 2
"""The numbers of state that a ring of past values needs besides the values"""
LOW_PASS_HEADER = 3
"""The numbers of state that a low pass needs besides the state of its sections"""


@dataclass
class Statements:
    """The statements of steps, the constants they name, and the state they need."""

    lines: list[str] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    """The functions of the template that are called"""
    arrays: list[tuple[str, tuple[str, int]]] = field(default_factory=list)
    """The name, the initializer and the number of values of each constant array"""
    num_state: int = 0
    num_variables: int = 0

    def assign(self, expression: str) -> str:
        """Add a variable that holds an expression, and return its name."""
        name = f"v{self.num_variables}"
        self.num_variables += 1
        self.lines.append(f"const double {name} = {expression};")
        return name

    def call(self, function: str) -> None:
        """Note that a function of the template is called."""
        self.functions |= {function, *NEEDS.get(function, ())}

    def allocate(self, count: int) -> str:
        """Reserve `count` numbers of the state, and return the expression of their address."""
        begin = self.num_state
        self.num_state += count
        return f"s + {begin}"

    def add_array(self, values: Sequence[float]) -> str:
        """Add a constant array and return its name."""
        name = f"filter{len(self.arrays)}"
        numbers = ", ".join(map(format_c_double, values))
        self.arrays.append((name, (f"{{{numbers}}}", len(values))))
        return name

    def apply_ring(self, function: str, template: str, x: str, rows: int) -> str:
        """Add the call of a function that keeps the last rows, and return the variable of its
        result."""
        self.call(function)
        state = self.allocate(RING_HEADER + rows)
        return self.assign(template.format(state=state, rows=rows, x=x))

    def apply_low_pass(self, sections: Floats, x: str) -> str:
        """Add the second-order sections [S, 5] of a variable, and return the variable of the
        result."""
        self.call("low_pass")
        name = self.add_array(sections.ravel().tolist())
        state = self.allocate(LOW_PASS_HEADER + 2 * len(sections))
        return self.assign(f"low_pass({state}, {len(sections)}, {name}, {x})")

    def limit(self, x: str, low: float | None, high: float | None) -> str:
        """Move a value that is outside of a range to its limit."""
        if low is not None:
            edge = format_c_double(low)
            x = self.assign(f"{x} < {edge} ? {edge} : {x}")
        if high is not None:
            edge = format_c_double(high)
            x = self.assign(f"{x} > {edge} ? {edge} : {x}")
        return x

    def drop(self, x: str, low: float, high: float) -> str:
        """Make a value that is outside of a range missing."""
        low_edge, high_edge = format_c_double(low), format_c_double(high)
        return self.assign(f"{x} < {low_edge} || {x} > {high_edge} ? NAN : {x}")
