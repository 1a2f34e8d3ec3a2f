"""The format "c": NAME.c, NAME.h and main.c, compiled and run by the machine's compiler."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import Option, UserError, Wording
from slipstream.base.run_names import name_run
from slipstream.base.text import format_c_double, format_count
from slipstream.config.prepare import ResampleStep
from slipstream.data.columns import read_times
from slipstream.data.files import read_tables
from slipstream.data.prepare.rows import RowTime
from slipstream.data.series import MICROSECONDS, is_date
from slipstream.exporting.c.source import (
    About,
    CLayout,
    CSettings,
    SeriesRows,
    iter_series,
    make_ensemble_source,
    make_source,
    render,
)
from slipstream.exporting.formats import (
    LIMIT,
    ExportSource,
    Interface,
    PieceRunner,
    ReferenceBatch,
    Runner,
    SeriesPiece,
    WrittenExport,
    measure_spreads,
    to_inputs,
    widen_limit,
)
from slipstream.inference.portable import PortableModel, PortableRun
from slipstream.inference.rows import PhysicalWindows
from slipstream.inference.stream import Regime, Stream, StreamPrediction
from slipstream.models.c_code import format_floats

MAX_WINDOWS, MAX_NUMBERS = 8, 20_000
"""Limits of a self-test: windows, and numbers in all of them; at least one window is kept"""
MAX_ROWS = 200
"""Rows of a series that the steps of `data.prepare` are tested on"""
ROWS_AFTER_CONTEXT = 50
"""Rows after the first full context that steps are tested on"""


def count_windows(layout: CLayout) -> int:
    """Return how many windows the self-test has."""
    signature = layout.model.signature
    return max(min(MAX_NUMBERS // (signature.context * len(signature.inputs)), MAX_WINDOWS), 1)


def write_selftest(
    layout: CLayout,
    limit: float,
    *,
    examples: ReferenceBatch | None,
    steps: StepTest | None,
    series: SeriesRows | None,
) -> str:
    """Return the text of main.c: windows, rows one after the other, and rows before and after
    `data.prepare`, each where there are any."""
    double, spread = layout.settings.double, _measure_spreads(layout)
    values: dict[str, Any] = {
        "p": layout.settings.name,
        "prepares": layout.prepared is not None,
        "carried": layout.parts.carried,
        "spread": _format_rows(spread[None], double=True)[0],
        "windows": None,
        "steps": None,
        "prepared": None,
    }
    counts = []
    if examples is not None:
        windows = examples.windows
        expected = next(iter(examples.outputs.values()))  # lower and upper follow it
        limit = max(limit, _widen_limit(layout, limit, expected, spread))
        values["windows"] = {
            "rows": _format_rows(windows.rows, double=double),
            "constants": _format_optional(windows.static, double=double),
            "future": _format_optional(windows.future, double=double),
            "expected": _format_rows(expected, double=True),
        }
        counts.append(format_count(len(windows.rows), "window"))
    if steps is not None:
        piece = steps.piece
        limit = max(limit, _widen_limit(layout, limit, steps.expected, spread))
        static = None if piece.static is None else piece.static[None]
        values["steps"] = {
            "rows": _format_rows(piece.rows, double=double),
            "constants": _format_optional(static, double=double),
            "future": _format_optional(piece.future, double=double),
            "expected": _format_rows(steps.expected, double=True),
            "first": steps.first,
            "times": "" if steps.times is None else _format_times(steps.times),
            "answers": "{" + ", ".join("1" if known else "0" for known in steps.answers) + "}",
        }
        counts.append(format_count(len(piece.rows), "row"))
    if series is not None:
        deviations = measure_spreads(layout.model.signature.inputs, layout.model.scaler)[None]
        if not double:
            prepared = np.nan_to_num(np.abs(series.prepared[:MAX_ROWS]))
            limit = float(widen_limit(limit, prepared / deviations).max())
        raw, count, times = series.raw[:MAX_ROWS], MAX_ROWS, ""
        if layout.parts.resampled:
            raw, raw_times, count = _cut_raw_rows(layout, series)
            times = _format_times(raw_times)
        values["prepared"] = {
            "raw": _format_rows(raw, double=double),
            "rows": _format_rows(series.prepared[:count], double=True),
            "spread": _format_rows(deviations, double=True)[0],
            "times": times,
        }
    about = [f"{counts[0]} of the test set"] if examples is not None else []
    about += [f"{counts[-1]} of a series"] if steps is not None else []
    values |= {
        "limit": f"{limit:g}",
        "about": " and ".join(about),
        "counted": " and ".join(counts),
    }
    return render("main.c.j2", values)


class StepTest(NamedTuple):
    """Rows for the step function one after the other, and what it has to predict."""

    piece: SeriesPiece
    first: int
    """The first row that a prediction is known after"""
    expected: npt.NDArray[np.float64]
    """[N, H, C], with quantiles or classes last"""
    times: Values | None = None
    """The times of the rows, where they are resampled"""
    answers: tuple[bool, ...] = ()
    """Where rows are resampled: whether a prediction follows each row"""


def _cut_raw_rows(layout: CLayout, series: SeriesRows) -> tuple[Values, Values, int]:
    """Return raw rows for a self-test, with their times, and how many new rows they complete."""
    times, new_times = series.times, series.new_times
    assert times is not None
    assert new_times is not None
    # a row after the last of them completes it, where none lies at its very time
    count = int(np.searchsorted(times, new_times[:MAX_ROWS][-1], side="right")) + 1
    times = times[: min(count, MAX_NUMBERS // series.raw.shape[1])]
    unit = MICROSECONDS if is_date(times) else 1.0
    step = layout.model.signature.step or 0.0
    complete = int((new_times <= times[-1] - step * unit).sum())
    return series.raw[: len(times)], times, max(min(complete, MAX_ROWS), 1)


def _format_times(times: Values) -> str:
    """Return the initializer of times: microseconds, or plain numbers."""
    if is_date(times):
        return "{" + ", ".join(f"INT64_C({time})" for time in times.tolist()) + "}"
    return "{" + ", ".join(map(format_c_double, times.tolist())) + "}"


def count_rows(layout: CLayout) -> int:
    """Return how many rows of a series the self-test has; a step from windows predicts nothing
    before it has one."""
    signature = layout.model.signature
    ahead = signature.future_shape[0] * signature.future_shape[1]
    outputs = signature.steps_out * len(signature.targets) * signature.outputs
    columns = layout.prepared.columns if layout.prepared else signature.inputs
    width = len(columns) + ahead + outputs
    count = min(MAX_NUMBERS // width, signature.context + ROWS_AFTER_CONTEXT)
    return max(count, 1 if layout.parts.carried else signature.context)


def make_step_test(
    layout: CLayout,
    run: PortableRun,
    start: SeriesPiece,
    series: SeriesRows | None,
    times: Values | None = None,
) -> StepTest | None:
    """Return the rows of a series that a step takes and what a stream of the same regime predicts
    after them; None where it predicts nothing. `times` are those of the rows, where they are
    resampled."""
    if not layout.settings.double:
        start = _round_to_float(start)
    columns = layout.prepared.columns if layout.prepared else layout.model.signature.inputs
    regime: Regime = "carried" if layout.parts.carried else "window"
    all_steps = len(layout.model.config.data.prepare)
    given = all_steps
    if layout.prepared is not None:
        given = layout.prepared.given[-1].number if layout.prepared.given else 0
    try:
        stream = Stream(_drop_steps(run, given), regime=regime)
        rows = start.rows[:, [columns.index(name) for name in stream.columns]]
    except UserError:
        # a formula over all earlier rows runs in C, but not in a stream: prepared as in training
        if series is None or layout.parts.padded or times is not None:
            return None
        stream = Stream(_drop_steps(run, all_steps), regime=regime)
        places = [layout.model.signature.inputs.index(name) for name in stream.columns]
        rows = series.prepared[: len(start.rows), places]
    skipped, predicted = _push_rows(stream, start._replace(rows=rows), times)
    known = [values for values in predicted if values is not None]
    if not known or (skipped and rows.shape != start.rows.shape):
        return None
    kept = slice(skipped, skipped + len(predicted))
    future = None if start.future is None else start.future[kept]
    piece = SeriesPiece(start.rows[kept], start.static, future)
    expected = np.stack(known)
    if times is None:
        return StepTest(piece, len(predicted) - len(known), expected)
    answers = tuple(values is not None for values in predicted)
    return StepTest(piece, answers.index(True), expected, times[kept], answers)


def _measure_spreads(layout: CLayout) -> npt.NDArray[np.float64]:
    signature = layout.model.signature
    return (
        np.ones(1) if signature.classes else measure_spreads(signature.targets, layout.model.scaler)
    )


def _widen_limit(
    layout: CLayout, limit: float, expected: npt.NDArray[Any], spread: npt.NDArray[np.float64]
) -> float:
    """Return the limit of the differences from these predictions [N, H, C] or [N, H, C, Q]."""
    signature, scaler = layout.model.signature, layout.model.scaler
    if signature.classes:
        return limit
    shift = np.array([scaler.shift[name] for name in signature.targets])
    unit = np.array([scaler.size[name] for name in signature.targets])
    inputs = max(
        abs(edge[name] - scaler.shift[name]) / scaler.size[name]
        for edge in (scaler.low, scaler.high)
        for name in signature.inputs
    )
    by_target = expected.reshape(len(expected), signature.steps_out, len(spread), -1)
    size = np.maximum(np.abs(by_target - shift[:, None]), inputs * unit[:, None])
    if not layout.settings.double:
        size = np.maximum(size, np.abs(by_target))
    return float(widen_limit(limit, size / spread[:, None]).max())


def _round_to_float(piece: SeriesPiece) -> SeriesPiece:
    """Return the piece rounded to float32, as the C code reads it."""
    rows, static, future = (
        None if values is None else values.astype(np.float32).astype(np.float64) for values in piece
    )
    assert rows is not None
    return SeriesPiece(rows, static, future)


def _drop_steps(run: PortableRun, count: int) -> PortableRun:
    """Return the run without the first steps of `data.prepare`, for rows that come after them."""

    def drop(model: PortableModel) -> PortableModel:
        data = model.config.data
        data = data.model_copy(update={"prepare": data.prepare[count:]})
        limits = {str(int(n) - count): v for n, v in model.limits.items() if int(n) > count}
        return replace(model, config=model.config.model_copy(update={"data": data}), limits=limits)

    members = (replace(member, models=tuple(map(drop, member.models))) for member in run.members)
    return replace(run, members=tuple(members))


def _push_rows(
    stream: Stream, start: SeriesPiece, times: Values | None
) -> tuple[int, list[npt.NDArray[Any] | None]]:
    """Return how many rows are refused at the beginning, and what is predicted after each of the
    others, up to one that is refused or starts a new context."""
    skipped, result = 0, list[npt.NDArray[Any] | None]()
    for number, row in enumerate(start.rows):
        ahead = None if start.future is None else start.future[number]
        time = None
        if times is not None:
            time = RowTime(times[number].item(), is_date(times))
        try:
            prediction = stream.push(row, id="", static=start.static, future=ahead, time=time)
        except UserError:
            if result:
                break
            skipped += 1
            continue
        if prediction is None and times is None and result and result[-1] is not None:
            break
        result.append(None if prediction is None else _get_values(prediction))
    return skipped, result


def _get_values(prediction: StreamPrediction) -> npt.NDArray[Any]:
    candidates = (prediction.probabilities, prediction.quantiles, prediction.point)
    return next(values for values in candidates if values is not None)


def _format_rows(values: npt.NDArray[Any], *, double: bool) -> list[str]:
    """Return the initializer of each first-axis entry, flat."""
    flat = values.reshape(len(values), -1)
    if not double:
        return ["{" + ", ".join(format_floats(row)) + "}" for row in flat.astype(np.float32)]
    return ["{" + ", ".join(map(format_c_double, row)) + "}" for row in flat.tolist()]


def _format_optional(values: npt.NDArray[Any] | None, *, double: bool) -> list[str]:
    return [] if values is None else _format_rows(values, double=double)


COMPILERS = ("cc", "gcc", "clang")
ARM_COMPILER = "arm-none-eabi-gcc"
FLAGS = ("-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic")
ARM_FLAGS = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
SECTIONS = ("-ffunction-sections", "-fdata-sections")
COMPILE_LIMIT_S = 300.0
"""The time limit of a compiler; the source of a large model has megabytes of constants"""
Values = npt.NDArray[Any]


def find_compiler() -> str:
    """Return a C compiler: the variable CC, or a usual name; a UserError without any."""
    requested = os.environ.get("CC", "").split()[:1]
    for name in (*requested, *COMPILERS):
        if path := shutil.which(name):
            return path
    raise UserError(
        "there is no C compiler (cc, gcc or clang) to verify the C code with, so it is not "
        "written; install one, or name it in the variable CC"
    )


def run_tool(command: Sequence[str]) -> str:
    """Run a compiler and return its output; a failure is a UserError with its messages."""
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S
        )
    except subprocess.CalledProcessError as error:
        raise UserError(f"{command[0]} cannot compile the C code: {error.stderr.strip()}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{command[0]} does not run: {error}") from None
    return done.stdout


def build_library(sources: Sequence[Path], to: Path) -> Path:
    """Compile a model's sources into a shared library."""
    files = map(str, sources)
    run_tool([find_compiler(), *FLAGS, "-shared", "-fPIC", "-o", str(to), *files, "-lm"])
    return to


def build_program(sources: Sequence[Path], to: Path) -> Path:
    """Compile a program."""
    run_tool([find_compiler(), *FLAGS, "-o", str(to), *map(str, sources), "-lm"])
    return to


def measure_arm(sources: Sequence[Path]) -> dict[str, int]:
    """Return the bytes of code and constants, and of RAM, on a Cortex-M4F; nothing where there is
    no compiler for it."""
    if not all(map(shutil.which, (ARM_COMPILER, "arm-none-eabi-size"))):
        return {}
    flash = ram = 0
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "model.o"
        flags = [*FLAGS, *ARM_FLAGS, *SECTIONS]
        for source in sources:
            run_tool([ARM_COMPILER, *flags, "-c", "-o", str(built), str(source)])
            numbers = run_tool(["arm-none-eabi-size", str(built)]).splitlines()[1].split()
            text, data, bss = map(int, numbers[:3])
            flash, ram = flash + text + data, ram + data + bss
    return {"cortex_m4_flash_bytes": flash, "cortex_m4_ram_bytes": ram}


class CLibrary:
    """A compiled model, called from Python. Shapes: N windows or rows."""

    def __init__(self, path: Path, name: str, dtype: npt.DTypeLike, *, num_outputs: int) -> None:
        self._library = ctypes.CDLL(str(path))
        self._name, self._num_outputs = name, num_outputs
        self._dtype = np.dtype("float64" if dtype == "double" else "float32")

    def predict(self, rows: Values, *extra: Values) -> Values:
        """Predict windows [N, context, inputs], each by itself, to [N, outputs]; `extra` are
        constants [N, ...] and rows ahead [N, ...] where the model reads them."""
        return self.window(rows, *extra)[0]

    def window(self, rows: Values, *extra: Values) -> tuple[Values, npt.NDArray[np.int32]]:
        """Return the predictions of windows, and the return value of each call."""
        out = self._make_out(len(rows), self._num_outputs)
        results = self._call_each("window", [*map(self._convert, (rows, *extra)), out])
        return out, results

    def predict_by_steps(self, rows: Values, *extra: Values) -> Values:
        """Predict windows row by row, each from a reset on; NaN where a step says there is none."""
        result = self._make_out(len(rows), self._num_outputs)
        for number, window in enumerate(rows):
            self.reset()
            beside = [
                np.repeat(values[number : number + 1], len(window), axis=0) for values in extra
            ]
            out, complete = self.step(window, *beside)
            if complete[-1]:
                result[number] = out[-1]
        return result

    def bound(self, out: Values, level: str, *, num: int) -> tuple[Values, Values]:
        """Return both ends of the intervals around predictions [N, outputs]."""
        lower, upper = self._make_out(len(out), num), self._make_out(len(out), num)
        self._call_each(f"interval_{level}", [out, lower, upper])
        return lower, upper

    def reset(self) -> None:
        """Start a series."""
        getattr(self._library, f"{self._name}_reset")()

    def step(
        self, rows: Values, *extra: Values, times: Values | None = None
    ) -> tuple[Values, npt.NDArray[np.int32]]:
        """Take rows [N, columns] one by one; return predictions and return values."""
        out = self._make_out(len(rows), self._num_outputs)
        arrays = [*map(self._convert, (rows, *extra)), out]
        return out, self._call_each("step", arrays, times=times)

    def prepare(
        self, rows: Values, num_inputs: int, *, state_bytes: int, times: Values | None = None
    ) -> Values:
        """Prepare the rows [N, columns] of a series; with times, return the new rows [M, inputs]
        that they are resampled to."""
        state = ctypes.create_string_buffer(state_bytes)
        reset = getattr(self._library, f"{self._name}_reset_state")
        reset.argtypes = [ctypes.c_void_p]
        reset(ctypes.addressof(state))
        if times is not None:
            return self._resample(self._convert(rows), num_inputs, times, state)
        out = self._make_out(len(rows), num_inputs)
        self._call_each("prepare_state", [self._convert(rows), out], ctypes.addressof(state))
        return out

    def _resample(self, rows: Values, num_inputs: int, times: Values, state: Any) -> Values:
        call = getattr(self._library, f"{self._name}_prepare_state")
        kind = ctypes.c_int64 if is_date(times) else ctypes.c_double
        call.argtypes = [ctypes.c_void_p, kind, ctypes.c_void_p, ctypes.c_void_p]
        call.restype = ctypes.c_int
        made = []
        for number, time in enumerate(times.tolist()):
            row: int | None = rows[number:].ctypes.data
            out = self._make_out(1, num_inputs)
            while call(ctypes.addressof(state), time, row, out.ctypes.data):
                made.append(out)
                row, out = None, self._make_out(1, num_inputs)
        return np.concatenate(made) if made else self._make_out(0, num_inputs)

    def _convert(self, values: Values) -> Values:
        return np.ascontiguousarray(values, dtype=self._dtype)

    def _make_out(self, count: int, width: int) -> Values:
        return np.full((count, width), np.nan, dtype=self._dtype)

    def _call_each(
        self,
        function: str,
        arrays: Sequence[Values],
        *first: int,
        times: Values | None = None,
    ) -> npt.NDArray[np.int32]:
        """Call a function for each entry of the arrays, after arguments that stay the same."""
        call = getattr(self._library, f"{self._name}_{function}")
        pointer, by_value = ctypes.c_void_p, []
        if times is not None:
            by_value = [ctypes.c_int64 if is_date(times) else ctypes.c_double]
        call.argtypes = [*[pointer] * len(first), *by_value, *[pointer] * len(arrays)]
        call.restype = ctypes.c_int
        places = [(array.ctypes.data, array[:1].nbytes) for array in arrays]
        results = np.zeros(len(arrays[0]), dtype=np.int32)
        for number in range(len(results)):
            moment = [] if times is None else [times[number].item()]
            addresses = (begin + number * size for begin, size in places)
            results[number] = call(*first, *moment, *addresses)
        return results


def check_prepare(
    library: CLibrary, layout: CLayout, new_data: Any
) -> tuple[dict[str, Any], SeriesRows | None]:
    """Compare the steps in C with those in Python; refuse steps that differ. Return the largest
    difference, and a series for the self-test, if possible as long as the context."""
    steps, model = layout.prepared, layout.model
    assert steps is not None
    spread = measure_spreads(model.signature.inputs, model.scaler)
    largest, limit, rows, num_late, first = 0.0, LIMIT, 0, 0, None
    for series in iter_series(model, steps, new_data):
        values = library.prepare(
            series.raw,
            len(spread),
            state_bytes=layout.sizes.state_bytes,
            times=series.times if layout.parts.resampled else None,
        )
        if len(values) != len(series.prepared):
            raise UserError(
                f'series "{series.name}": data.prepare in C makes {len(values):,} rows and not '
                f"{len(series.prepared):,}; nothing was written. Pass "
                + Option("after-prepare", "resample")
                + " to leave this step to the caller"
            )
        same = np.isnan(values) == np.isnan(series.prepared)
        distance = np.abs(values - series.prepared) / spread
        distance[~same] = np.inf
        # in double but for the last rounding, where rows are float
        sizes = np.nan_to_num(np.abs(series.prepared)) * (not layout.settings.double)
        allowed = widen_limit(LIMIT, sizes / spread)
        distance = np.nan_to_num(distance, nan=0.0, posinf=np.inf)
        largest, limit = max(largest, float(distance.max())), max(limit, float(allowed.max()))
        rows, num_late = rows + len(series.raw), num_late + series.num_late
        if first is None or len(first.raw) < min(len(series.raw), model.signature.context):
            first = series
        if not (distance <= allowed).all():
            raise UserError(
                f'series "{series.name}": data.prepare in C differs by up to {largest:.2g} of a '
                "column's spread; nothing was written. Pass "
                + Option("after-prepare", True)
                + " to leave the steps to the caller"
            )
    compared = {"rows": rows, "max_rel": largest, "limit": limit}
    if num_late:
        compared["late_rows"] = num_late
    return {"prepare": compared}, first


NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,30}")
LARGEST_LOSS = 0.05
"""The share by which the test error may grow with --int8"""
INT8_LIMIT = 1.0
"""The largest relative difference of a prediction with --int8: the spread of the target itself"""
RUN_LIMIT_S = 60.0
STATES = {"window": "windows", "carried": "carried"}
"""The values of the option `state` by regime"""


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the files, compile them, and check steps; windows are verified by the caller."""
    source, select = leave_out_unused(source)
    settings = read_settings(source)
    is_carried = source.interface.signature.state == "carried"
    if is_carried and not settings.carried:
        raise UserError(
            f'{source.run.run.folder}: was trained with train.state = "carried", so that '
            "windows from a state of zero are not what it predicts; remove "
            + Wording("--state windows", "state windows")
        )
    settings = replace(settings, has_dates=find_dates(source, settings))
    layout = write_source(source, settings, folder)
    limit = INT8_LIMIT if settings.int8 else LIMIT
    library = load_library(folder, layout)
    differences: dict[str, Any] = {}
    series = None
    if layout.prepared:
        differences, series = check_prepare(library, layout, source.new_data)
    start, times = read_first_rows(source, layout, series), None
    if layout.parts.resampled:
        assert series is not None
        start, times = read_resampled_rows(layout, start, series)
    steps = make_step_test(layout, source.run, start, series, times)
    if is_carried and steps is None:
        raise UserError("no series is long enough for the self-test of the C code")
    examples = None if is_carried else source.read_examples(count_windows(layout))
    runners = {} if is_carried else _list_runners(library, layout, source.interface, select)
    run_windows = runners.pop("window", None)
    main = write_selftest(
        layout, limit, examples=examples, steps=steps, series=None if is_carried else series
    )
    (folder / "main.c").write_text(main, encoding="utf-8")
    regime = "carried" if layout.parts.carried else "window"
    return WrittenExport(
        run=run_windows,
        window_runners={f"{settings.name}_{name}": run for name, run in runners.items()},
        rows=_list_rows(library, layout, source) if is_carried else {},
        inside=describe_inside(layout),
        limit=limit,
        largest_loss=LARGEST_LOSS if settings.int8 else None,
        details={
            "sizes": asdict(layout.sizes) | measure_arm([folder / name for name in layout.sources]),
            "state": STATES[regime],
            "deploy": {
                "regime": regime,
                "reason": layout.about.regime,
                "use": f"{settings.name}_step",
            },
            "selftest": run_selftest(folder, layout.sources),
            "before": list_before(source, layout),
            "after": [],
            **({"interface": source.interface.describe()} if layout.members else {}),
            **differences,
        },
        notes=(*describe_notes(layout), *describe_late(differences)),
    )


Select = Callable[[PhysicalWindows], PhysicalWindows]


def leave_out_unused(source: ExportSource) -> tuple[ExportSource, Select]:
    """Return the source without the rows and columns that only members of an ensemble without
    weight read, and a function that leaves them out of windows."""
    full, run = source.interface, source.run
    pairs = zip(run.members, run.weights, strict=True)
    used = [member.first.signature for member, weight in pairs if weight]
    if len(used) == len(run.members):
        return source, lambda windows: windows
    read = {
        "inputs": {name for signature in used for name in signature.inputs},
        "static": {name for signature in used for name in signature.static},
        "future": {
            name for signature in used if signature.future_shape[0] for name in signature.future
        },
    }
    places = {
        group: [i for i, name in enumerate(getattr(full, group)) if name in names]
        for group, names in read.items()
    }
    context = max(signature.context for signature in used)
    interface = replace(
        full,
        inputs=tuple(full.inputs[i] for i in places["inputs"]),
        static=tuple(full.static[i] for i in places["static"]),
        future=tuple(full.future[i] for i in places["future"]),
        context=context,
    )

    def take(values: Values | None, group: str) -> Values | None:
        return None if values is None or not places[group] else values[..., places[group]]

    def select(windows: PhysicalWindows) -> PhysicalWindows:
        return PhysicalWindows(
            windows.rows[:, -context:, places["inputs"]],
            take(windows.static, "static"),
            take(windows.future, "future"),
        )

    def read_examples(count: int) -> ReferenceBatch:
        batch = source.read_examples(count)
        return batch._replace(windows=select(batch.windows))

    def read_start(count: int) -> SeriesPiece:
        piece = source.read_start(count)
        return SeriesPiece(
            piece.rows[:, places["inputs"]],
            take(piece.static, "static"),
            take(piece.future, "future"),
        )

    narrow = replace(
        source, interface=interface, read_examples=read_examples, read_start=read_start
    )
    return narrow, select


def list_before(source: ExportSource, layout: CLayout) -> list[str]:
    """Name the steps of `data.prepare` that are left to the caller."""
    if layout.settings.after_prepare is True:
        return list(source.interface.before)
    return [step.where for step in layout.prepared.given] if layout.prepared else []


def write_source(source: ExportSource, settings: CSettings, folder: Path) -> CLayout:
    """Write NAME.c and NAME.h, and those of each model of an ensemble."""
    run, widths = source.run, source.run.half_widths
    about = About(name_run(run.run.folder), source.units, explain_regime(source, settings))
    if len(run.members) > 1:
        code = make_ensemble_source(
            run, source.interface, settings, half_widths=widths, about=about
        )
    else:
        code = make_source(run.members[0].models, settings, half_widths=widths, about=about)
    for name, text in code.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return code.layout


def read_settings(source: ExportSource) -> CSettings:
    """Return the settings of the command's options; the regime of a step is by default the one to
    deploy."""
    options = source.options
    name, state = options.get("name", "slip"), options.get("state", STATES[source.regime.name])
    if not NAME.fullmatch(name) or name == "main":
        raise UserError(
            Option("name")
            + f' is "{name}"; it becomes a prefix of C names: a letter, then letters, digits '
            "and underscores, at most 31"
        )
    if state not in STATES.values():
        raise UserError(Option("state") + f' is "{state}"; it should be carried or windows')
    return CSettings(
        name=name,
        int8=bool(options.get("int8")),
        double=source.interface.dtype == "float64",
        carried=state == "carried",
        after_prepare=read_after(options.get("after_prepare")),
    )


def read_after(option: Any) -> bool | str:
    """Return whether all steps of `data.prepare`, or those up to a kind of step, are left to the
    caller."""
    return option if isinstance(option, str) and option != "all" else bool(option)


def explain_regime(source: ExportSource, settings: CSettings) -> str:
    """Return why a step carries the state or predicts windows."""
    default = source.regime
    if settings.carried == (default.name == "carried"):
        return default.reason
    return f"as requested; the default would be {STATES[default.name]}: {default.reason}"


def load_library(folder: Path, layout: CLayout) -> CLibrary:
    """Compile the source and load it."""
    name, signature = layout.settings.name, layout.model.signature
    targets = 1 if signature.classes else len(signature.targets)
    outputs = signature.steps_out * targets * signature.outputs
    with tempfile.TemporaryDirectory() as scratch:
        sources = [folder / file for file in layout.sources]
        path = build_library(sources, Path(scratch) / f"{name}.so")
        return CLibrary(path, name, layout.settings.value_type, num_outputs=outputs)


def read_first_rows(
    source: ExportSource, layout: CLayout, series: SeriesRows | None
) -> SeriesPiece:
    """Return rows from the start of a series, in the columns of the step function."""
    start = source.read_start(count_rows(layout))
    if series is None:
        return start
    rows = series.raw[: len(start.rows)]
    ahead = None if start.future is None else start.future[: len(rows)]
    return SeriesPiece(rows, start.static, ahead)


def read_resampled_rows(
    layout: CLayout, start: SeriesPiece, series: SeriesRows
) -> tuple[SeriesPiece, Values]:
    """Return raw rows from the start of a series, with their times, where they are resampled."""
    assert series.times is not None
    signature = layout.model.signature
    outputs = signature.steps_out * len(signature.targets) * signature.outputs
    count = MAX_NUMBERS // (series.raw.shape[1] + outputs)
    return SeriesPiece(series.raw[:count], start.static, None), series.times[:count]


def find_dates(source: ExportSource, settings: CSettings) -> bool:
    """Return whether rows that the code resamples have dates as times, and not plain numbers."""
    data = source.run.first.config.data
    resamples = any(isinstance(step, ResampleStep) for step in data.prepare)
    column = data.time_column
    if settings.after_prepare or not resamples or column is None:
        return False
    new_data = source.new_data
    if isinstance(new_data, (str, os.PathLike)):
        data, new_data = data.model_copy(update={"path": str(new_data)}), None
    table = read_tables(data, new_data)[0]
    first = table.slice_rows(0, min(table.num_rows, 1000))
    return is_date(read_times(first, column, data.time_format))


def _list_rows(library: CLibrary, layout: CLayout, source: ExportSource) -> dict[str, PieceRunner]:
    """Return the runners that are compared with the model row by row. A step that prepares or
    filters is compiled again without either; the self-test runs the complete step."""
    settings = layout.settings
    if layout.prepared or layout.parts.filter_past:
        bare = replace(settings, after_prepare=True, filtered=False)
        with tempfile.TemporaryDirectory() as scratch:
            library = load_library(Path(scratch), write_source(source, bare, Path(scratch)))
    convert = make_converter(library, source.interface)

    def run(piece: SeriesPiece) -> dict[str, npt.NDArray[Any]]:
        extra = [] if piece.static is None else [np.tile(piece.static, (len(piece.rows), 1))]
        extra += [] if piece.future is None else [piece.future]
        library.reset()
        return convert(library.step(piece.rows, *extra)[0])

    return {f"{settings.name}_step": run}


def _list_runners(
    library: CLibrary, layout: CLayout, interface: Interface, select: Select
) -> dict[str, Runner]:
    """Return what runs windows: the function for them, and one that must agree with it, their rows
    one by one after a reset. A step that prepares or filters does not agree and has none."""
    calls = {"window": library.predict}
    if not (layout.prepared or layout.parts.filter_past):
        calls["step"] = library.predict_by_steps

    def make(predict: Callable[..., Any]) -> Runner:
        run = make_runner(predict, library, interface)
        return lambda windows: run(select(windows))

    return {name: make(predict) for name, predict in calls.items()}


def make_runner(predict: Callable[..., Any], library: CLibrary, interface: Interface) -> Runner:
    """Return a function that runs the C code on windows."""
    convert = make_converter(library, interface)

    def run(windows: PhysicalWindows) -> dict[str, npt.NDArray[Any]]:
        return convert(predict(*to_inputs(windows, interface.dtype).values()))

    return run


def make_converter(
    library: CLibrary, interface: Interface
) -> Callable[[npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
    """Return a function from predictions [N, outputs] to all outputs by name."""
    shape = [int(size) for size in interface.get_output_shape(interface.output)[1:]]
    numbers = [*shape[:2], 1]

    def convert(flat: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        result = {interface.output: flat.reshape(-1, *shape)}
        if interface.levels:
            bounds = [
                library.bound(flat, level, num=shape[0] * shape[1]) for level in interface.levels
            ]
            for i, name in enumerate(("lower", "upper")):
                parts = [pair[i].reshape(-1, *numbers) for pair in bounds]
                result[name] = np.concatenate(parts, axis=-1)
        return result

    return convert


def run_selftest(folder: Path, sources: Sequence[str]) -> str:
    """Compile the files of these names with main.c and run it; return its output."""
    with tempfile.TemporaryDirectory() as scratch:
        files = [folder / name for name in (*sources, "main.c")]
        program = build_program(files, Path(scratch) / "test")
        result = subprocess.run(
            [program], capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
        )
    if result.returncode:
        raise UserError(f"the self-test of the C code fails: {result.stdout.strip()}")
    return result.stdout.strip()


def describe_inside(layout: CLayout) -> tuple[str, ...]:
    """List the operations of the C code between rows and predictions."""
    signature, model = layout.model.signature, layout.model.config.model
    steps = layout.prepared.steps if layout.prepared else ()
    parts = [*(step.where for step in steps), "scaling of the inputs"]
    if layout.members:
        parts.append(f"{len(layout.members)} models and their weighted mean")
    else:
        if model.normalize != "none":
            parts.append(f'normalization of each window ("{model.normalize}")')
        count = layout.parts.networks
        parts.append(f"{count} networks and their mean" if count > 1 else "the network")
    parts.append("class probabilities" if signature.classes else "predictions in physical units")
    if signature.output_range:
        parts.append("model.output_range")
    if layout.parts.filter_past:
        parts.append(f"predict.filter ({model_filter(layout)})")
    return tuple(parts)


def model_filter(layout: CLayout) -> str:
    return layout.model.config.predict.filter.kind


def describe_late(differences: Mapping[str, Any]) -> list[str]:
    """Note rows that the code ignores, because what they belong to is complete."""
    count = differences.get("prepare", {}).get("late_rows", 0)
    if not count:
        return []
    return [
        f"the code ignores {format_count(count, 'row')} of the data that "
        f"{'repeats' if count == 1 else 'repeat'} the time of a new row which is complete; "
        "predict counts them"
    ]


def describe_notes(layout: CLayout) -> list[str]:
    """Return notes on the steps that a user should know about."""
    if layout.parts.has_window:
        return []
    name = layout.settings.name
    return [f"there is no {name}_window: the run was trained to carry its state on from row to row"]
