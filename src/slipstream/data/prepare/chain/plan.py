"""What the steps of `data.prepare` read and write, and how many rows they look back and ahead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from slipstream.config import Data
from slipstream.config.prepare import (
    CalendarStep,
    ClipStep,
    FilterStep,
    FormulaStep,
    JoinStep,
    LabelStep,
    OutliersStep,
    PadStep,
    PrepareStep,
    ResampleStep,
    UnitStep,
    name_step,
)
from slipstream.data.prepare import calendars, filters, resampling
from slipstream.data.prepare.formulas import Formula, parse_formula
from slipstream.errors import UserError


@dataclass(frozen=True)
class PlannedStep:
    """One step, and its reach."""

    number: int
    config: PrepareStep
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    look_back: int | None = 0
    """Rows; None for all rows before"""
    look_ahead: int = 0
    formula: Formula | None = None

    @property
    def where(self) -> str:
        """How messages call it."""
        return name_step(self.number, self.config)

    @property
    def changes_rows(self) -> bool:
        """Whether it makes other rows, of all columns."""
        return isinstance(self.config, (ResampleStep, PadStep))


@dataclass(frozen=True)
class StepPlan:
    """The steps that make the columns which are needed, in order."""

    steps: tuple[PlannedStep, ...]
    data: Data

    @property
    def rows_ahead(self) -> int:
        """Rows that every row looks ahead, because it was made from later ones."""
        steps = (step for step in self.steps if isinstance(step.config, ResampleStep))
        return next((step.look_ahead for step in steps), 0)

    @cached_property
    def look_ahead(self) -> dict[str, int]:
        """Rows that each written column looks ahead, through all steps."""
        reach: dict[str, int] = {}
        for step in self.steps:
            before = max((reach.get(name, self.rows_ahead) for name in step.reads), default=0)
            ahead = max(before, self.rows_ahead) + step.look_ahead
            reach |= dict.fromkeys(step.writes, ahead)
        return reach

    @cached_property
    def look_back(self) -> dict[str, int | None]:
        """Rows that each written column looks back, through all steps; None for all of them."""
        reach: dict[str, int | None] = {}
        for step in self.steps:
            if isinstance(step.config, ResampleStep):
                reach = dict.fromkeys(reach)
            rows = [reach.get(name, 0) for name in step.reads]
            known = [one for one in rows if one is not None]
            back = None
            if step.look_back is not None and len(known) == len(rows):
                back = max(known, default=0) + step.look_back
            reach |= dict.fromkeys(step.writes, back)
        return reach

    @cached_property
    def warm_up(self) -> dict[str, int | None]:
        """Rows at a series' beginning in which each written column may be unknown; None where only
        the data tell.

        A recursive filter knows its first row; a formula that has one in it says nothing about the
        rest of it; a join begins with the first row of its table.
        """
        reach: dict[str, int | None] = {}
        for step in self.steps:
            rows = [reach.get(name, 0) for name in step.reads]
            known = [one for one in rows if one is not None]
            own = step.look_back
            if isinstance(step.config, FilterStep):
                own = own or 0
            elif isinstance(step.config, JoinStep):
                own = None
            total = None
            if own is not None and len(known) == len(rows):
                total = max(known, default=0) + own
            if isinstance(step.config, ResampleStep):
                reach = dict.fromkeys(reach)
            reach |= dict.fromkeys(step.writes, total)
        return reach

    def count_ahead(self, names: Collection[str]) -> int:
        """Return the most rows that one of these columns looks ahead."""
        ahead = (self.look_ahead.get(name, self.rows_ahead) for name in names)
        return max(ahead, default=self.rows_ahead)

    @property
    def written(self) -> tuple[str, ...]:
        """The columns that steps make or change, in order."""
        return tuple(dict.fromkeys(name for step in self.steps for name in step.writes))

    @property
    def changes_rows(self) -> bool:
        return any(step.changes_rows for step in self.steps)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """The classes of the columns that are labels."""
        labels = (step.config for step in self.steps if isinstance(step.config, LabelStep))
        return {label.name: label.classes for label in labels}

    def makes_from_times(self, names: Collection[str]) -> bool:
        """Return whether steps make all of these columns from the rows' times alone."""
        mine = select_steps(self, names)
        has_join = any(isinstance(step.config, JoinStep) for step in mine.steps)
        return set(names) <= set(mine.written) and not (has_join or mine.list_sources())

    def trace_to_file(self, names: Collection[str], columns: Collection[str]) -> set[str]:
        """Return the columns of a file that these columns are, or are made from."""
        sources = select_steps(self, names).list_sources()
        return {name for name in (*names, *sources) if name in columns}

    def list_sources(self) -> dict[str, str]:
        """Return the columns that steps read from the file, and the first step that does."""
        new: set[str] = set()
        sources: dict[str, str] = {}
        for step in self.steps:
            for name in step.reads:
                if name not in new:
                    sources.setdefault(name, step.where)
            new |= set(step.writes)
        return sources


def plan_steps(data: Data, joined: Mapping[int, tuple[str, ...]] | None = None) -> StepPlan:
    """Check the steps against each other; `joined` are the columns that each join brings.

    Without them, which takes no file, columns that a join brings are not known yet.
    """
    steps: list[PlannedStep] = []
    labels: dict[str, str] = {}
    resampled = padded = False
    for number, config in enumerate(data.prepare, start=1):
        where = name_step(number, config)
        try:
            step = _plan_step(number, config, (joined or {}).get(number, ()))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        _check_time(config, step, data, where)
        _check_look_ahead(step)
        for name in step.reads:
            if name in labels:
                raise UserError(
                    f'{where} reads "{name}", which {labels[name]} makes from rows to come; a '
                    "label can only be a target"
                )
        if isinstance(config, LabelStep):
            labels[config.name] = where
        if isinstance(config, ResampleStep):
            ahead = [one for one in steps if one.look_ahead]
            if resampled or padded or ahead:
                what = (
                    f"{ahead[0].where} looks ahead" if ahead else "another one or pad precedes it"
                )
                raise UserError(f"{where}: {what}; put it first")
            resampled = True
        if isinstance(config, PadStep):
            if padded:
                raise UserError(f"{where}: there is another pad before it; remove one")
            padded = True
        steps.append(step)
    return StepPlan(tuple(steps), data)


def select_steps(plan: StepPlan, needed: Collection[str]) -> StepPlan:
    """Return the steps that these columns depend on, and those that change rows."""
    wanted, steps = set(needed), []
    for step in reversed(plan.steps):
        if step.changes_rows:
            steps.append(step)
        elif mine := [name for name in step.writes if name in wanted]:
            wanted = (wanted - set(mine)) | set(step.reads)
            steps.append(step)
    return replace(plan, steps=tuple(reversed(steps)))


def _plan_step(number: int, config: PrepareStep, joined: tuple[str, ...]) -> PlannedStep:
    step = PlannedStep(number, config)
    match config:
        case ResampleStep():
            ahead = resampling.get_look_ahead(config.every, config.limit, config.method)
            return replace(step, look_back=None, look_ahead=ahead)
        case FilterStep():
            return _plan_filter(step, config)
        case FormulaStep():
            formula = parse_formula(config.value)
            back, ahead = formula.look_back, formula.look_ahead
            step = replace(step, reads=formula.columns, writes=(config.name,), formula=formula)
            return replace(step, look_back=back, look_ahead=ahead)
        case CalendarStep():
            if config.zone is not None:
                calendars.check_zone(config.zone)
            return replace(step, writes=calendars.name_columns(list_features(config)))
        case JoinStep():
            return replace(step, writes=joined)
        case LabelStep():
            ahead = config.rows
            return replace(step, reads=config.sources, writes=(config.name,), look_ahead=ahead)
        case UnitStep() | ClipStep() | OutliersStep():
            return replace(step, reads=config.columns, writes=config.columns)
        case PadStep():
            return step


def list_features(config: CalendarStep) -> tuple[str, ...]:
    """Return the features of a calendar, the holidays last."""
    return (*config.features, "holiday") if config.holidays else config.features


def _plan_filter(step: PlannedStep, config: FilterStep) -> PlannedStep:
    filters.check_filter(
        kind=config.kind,
        rows=config.rows,
        cutoff_hz=config.cutoff_hz,
        order=config.order or filters.DEFAULT_ORDER,
        centered=config.centered,
    )
    back, ahead = filters.get_reach(kind=config.kind, rows=config.rows, centered=config.centered)
    step = replace(step, reads=config.columns, writes=config.outputs)
    return replace(step, look_back=back, look_ahead=ahead)


def _check_time(config: PrepareStep, step: PlannedStep, data: Data, where: str) -> None:
    needs_time = isinstance(config, (ResampleStep, CalendarStep, JoinStep))
    needs_time = needs_time or (isinstance(config, FilterStep) and config.cutoff_hz is not None)
    needs_time = needs_time or (step.formula is not None and step.formula.needs_times)
    if needs_time and data.time_column is None:
        raise UserError(f"{where} needs the time of each row; set data.time")


def _check_look_ahead(step: PlannedStep) -> None:
    accepts = getattr(step.config, "lookahead", True)
    if step.look_ahead and not accepts:
        rows = "1 row" if step.look_ahead == 1 else f"{step.look_ahead} rows"
        raise UserError(
            f"{step.where} looks {rows} ahead, which is unknown when a prediction is made; use "
            "past rows only, or set lookahead = true in the step: these rows are then purged at "
            "every split border, and predictions come that much later"
        )
