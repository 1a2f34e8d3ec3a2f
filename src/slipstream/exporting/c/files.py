"""The format "c": NAME.c, NAME.h and main.c, compiled and run by the machine's compiler."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError
from slipstream.exporting.c.compiler import CLibrary, build_library, build_program, measure_arm
from slipstream.exporting.c.memory import About, CLayout, CSettings
from slipstream.exporting.c.selftest import (
    count_rows,
    count_windows,
    write_row_selftest,
    write_selftest,
)
from slipstream.exporting.c.series import SeriesRows
from slipstream.exporting.c.source import make_source
from slipstream.exporting.formats import (
    LIMIT,
    ExportSource,
    PieceRunner,
    Runner,
    SeriesPiece,
    WrittenExport,
    to_inputs,
)
from slipstream.exporting.interface import Interface
from slipstream.portable.networks.steps import explain_no_steps
from slipstream.portable.rows import PhysicalWindows

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,30}")
LARGEST_LOSS = 0.05
"""By which share the test error may grow with --int8"""
INT8_LIMIT = 1.0
"""The largest relative difference of a prediction with --int8: the spread of the target itself"""
RUN_LIMIT_S = 60.0


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the files, compile them, and check steps; windows are verified by the caller."""
    if len(source.run.members) > 1:
        raise UserError(
            f"{source.run.run.folder}: is an ensemble of runs, which is too large for --to c; "
            "export one of its members, or use --to onnx"
        )
    settings = read_settings(source.options, double=source.interface.dtype == "float64")
    is_carried = source.interface.signature.state == "carried"
    if is_carried and not settings.carried:
        raise UserError(
            f'{source.run.run.folder}: was trained with train.state = "carried", so that windows '
            "from a state of zero are not what it predicts; remove --state windows"
        )
    layout = write_source(source, settings, folder)
    limit = INT8_LIMIT if settings.int8 else LIMIT
    library = load_library(folder, layout)
    differences: dict[str, Any] = {}
    series = None
    if layout.prepared:
        from slipstream.exporting.c.checks import check_prepare  # takes a while to import

        differences, series = check_prepare(library, layout, source.new_data)
    if is_carried:
        start = read_first_rows(source, layout, series)
        main = write_row_selftest(layout, source.run, start, limit)
    else:
        examples = source.read_examples(count_windows(layout))
        main = write_selftest(layout, examples, limit, series)
    (folder / "main.c").write_text(main, encoding="utf-8")
    return WrittenExport(
        run=None if is_carried else make_runner(library.predict, library, source.interface),
        others={} if is_carried else _list_others(library, layout, source.interface),
        rows=_list_rows(library, layout, source) if is_carried else {},
        inside=describe_inside(layout),
        limit=limit,
        largest_loss=LARGEST_LOSS if settings.int8 else None,
        details={
            "sizes": asdict(layout.sizes) | measure_arm(folder / f"{settings.name}.c"),
            "state": "carried" if layout.parts.carried else "windows",
            "selftest": run_selftest(folder, settings.name),
            "before": list(source.interface.before) if settings.after_prepare else [],
            "after": [],
            **differences,
        },
        notes=tuple(describe_notes(layout)),
    )


def write_source(source: ExportSource, settings: CSettings, folder: Path) -> CLayout:
    """Write NAME.c and NAME.h."""
    code = make_source(
        source.run.members[0].models,
        settings,
        half_widths=source.run.half_widths,
        about=About(source.run.run.folder.name, source.units),
    )
    for name, text in code.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return code.layout


def read_settings(options: Mapping[str, Any], *, double: bool) -> CSettings:
    """Return the settings of the command's options."""
    name, state = options.get("name", "slip"), options.get("state", "carried")
    if not NAME.fullmatch(name) or name == "main":
        raise UserError(
            f'--name is "{name}"; it becomes a prefix of C names: a letter, then letters, digits '
            "and underscores, at most 31"
        )
    if state not in ("carried", "windows"):
        raise UserError(f'--state is "{state}"; it should be carried or windows')
    return CSettings(
        name=name,
        int8=bool(options.get("int8")),
        double=double,
        carried=state == "carried",
        after_prepare=bool(options.get("after_prepare")),
    )


def load_library(folder: Path, layout: CLayout) -> CLibrary:
    """Compile the source and load it."""
    name, signature = layout.settings.name, layout.model.signature
    targets = 1 if signature.classes else len(signature.targets)
    outputs = signature.steps_out * targets * signature.outputs
    with tempfile.TemporaryDirectory() as scratch:
        path = build_library(folder / f"{name}.c", Path(scratch) / f"{name}.so")
        return CLibrary(path, name, layout.settings.value_type, num_outputs=outputs)


def read_first_rows(
    source: ExportSource, layout: CLayout, series: SeriesRows | None
) -> SeriesPiece:
    """Return rows from the start of a series, as the step takes them."""
    start = source.read_start(count_rows(layout))
    if series is None:
        return start
    rows = series.raw[: len(start.rows)]
    ahead = None if start.future is None else start.future[: len(rows)]
    return SeriesPiece(rows, start.static, ahead)


def _list_rows(library: CLibrary, layout: CLayout, source: ExportSource) -> dict[str, PieceRunner]:
    """Return what is compared with the model row by row. A step that prepares or filters is
    compiled without that; the self-test has both."""
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


def _list_others(library: CLibrary, layout: CLayout, interface: Interface) -> dict[str, Runner]:
    """Return what has to compute the same: rows one by one, from a reset on. A step that prepares
    or filters computes something else."""
    if layout.prepared or layout.parts.filter_past:
        return {}
    return {
        f"{layout.settings.name}_step": make_runner(library.predict_by_steps, library, interface)
    }


def make_runner(predict: Callable[..., Any], library: CLibrary, interface: Interface) -> Runner:
    """Return a function from windows to what the C code computes."""
    convert = make_converter(library, interface)

    def run(windows: PhysicalWindows) -> dict[str, npt.NDArray[Any]]:
        return convert(predict(*to_inputs(windows, interface.dtype).values()))

    return run


def make_converter(
    library: CLibrary, interface: Interface
) -> Callable[[npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
    """Return a function from predictions [N, outputs] to all outputs by name."""
    shape = [int(one) for one in interface.get_output_shape(interface.output)[1:]]
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


def run_selftest(folder: Path, name: str) -> str:
    """Compile the self-test, run it and return what it prints."""
    with tempfile.TemporaryDirectory() as scratch:
        program = build_program([folder / f"{name}.c", folder / "main.c"], Path(scratch) / "test")
        result = subprocess.run(
            [program], capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
        )
    if result.returncode:
        raise UserError(f"the self-test of the C code fails: {result.stdout.strip()}")
    return result.stdout.strip()


def describe_inside(layout: CLayout) -> tuple[str, ...]:
    """List what the code does between rows and predictions."""
    signature, model = layout.model.signature, layout.model.config.model
    steps = layout.prepared.steps if layout.prepared else ()
    parts = [*(step.where for step in steps), "scaling of the inputs"]
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


def describe_notes(layout: CLayout) -> list[str]:
    """Say what a user should know of the steps."""
    name, why = layout.settings.name, explain_no_steps(layout.model.config.model)
    if not layout.parts.has_window:
        return [
            f"there is no {name}_window: the run was trained to carry its state on from row to row"
        ]
    if layout.parts.carried:
        return [
            f"{name}_step carries the state on from row to row, which training on windows does "
            "not; compare both with slipstream evaluate RUN --stream, or pass --state windows"
        ]
    return [f"{name}_step keeps the last rows and predicts their window: {why}"] if why else []
