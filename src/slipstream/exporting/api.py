"""Export a run: write a format's files, verify them, and put the folder in its place."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from slipstream import __version__, runs
from slipstream.base.errors import Option, UserError
from slipstream.base.run_names import EXPORT_FILE, name_run
from slipstream.base.storage import compute_sha256
from slipstream.exporting.formats import (
    ExportSource,
    Interface,
    WrittenExport,
    find_format,
    make_interface,
    refuse_settings,
    refuse_unsupported,
)
from slipstream.exporting.standalone import write_servable
from slipstream.exporting.verification import (
    VerificationData,
    load_verification_data,
    read_examples,
    read_start,
    verify,
)
from slipstream.inference.portable import (
    PortableMember,
    PortableModel,
    PortableRun,
    load_portable,
)
from slipstream.inference.stream import choose_default_regime
from slipstream.inference.trained import TrainedRun, load_trained
from slipstream.models.kinds.transformer import POSITIONS

ON_CPU = ("engine.device=cpu", "engine.precision=fp32")


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export beside the run, the format and the folder."""

    data: Any = None
    """Rows to verify on, instead of the run's own test set"""
    force: bool = False
    """Whether an export that exists already is replaced"""
    ensemble: bool | None = None
    allow_code: bool = False
    overrides: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options that only this format has"""


def export_run(
    run: str | Path, to: str, out: str | Path, options: ExportOptions | None = None
) -> dict[str, Any]:
    """Write a run's model as files of a format; `slipstream.export` documents the arguments."""
    options = options or ExportOptions()
    chosen, folder = find_format(to), Path(out).resolve()
    refuse_settings(to, options.settings)
    refuse_folder(folder, force=options.force)
    trained = load_trained(
        run,
        overrides=(*options.overrides, *ON_CPU),
        own_data=options.data is None,
        ensemble=options.ensemble,
        allow_code=options.allow_code,
    )
    portable = load_source(run, trained, options.ensemble)
    refuse_unsupported(to, portable)
    try:
        write = chosen.load_writer()
    except ModuleNotFoundError as error:
        raise UserError(
            Option("to", to) + f' needs the package {error.name}: pip install "slipstream[onnx]"'
        ) from None
    data, interface = load_verification_data(trained, options.data), make_interface(portable)
    source = ExportSource(
        portable,
        interface,
        trained,
        read_examples=lambda count: read_examples(data, interface, count),
        read_start=lambda count: read_start(data, interface, count),
        regime=choose_default_regime(portable),
        units=find_units(interface, data),
        new_data=options.data,
        options=options.settings,
    )
    try:
        with runs.replace_atomically(folder) as temporary:
            temporary.mkdir()
            written = write(source, temporary)
            if chosen.is_run and not portable.first.config.model.is_custom:
                write_servable(portable, temporary)
            parity = verify(written, data, source.interface)
            content = _describe(to, source, written) | {"parity": parity}
            content["files"] = _list_files(temporary)
            runs.write_json(temporary / EXPORT_FILE, content)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None
    return {**content, "run": str(trained.run.folder), "out": str(folder)}


def load_source(run: str | Path, trained: TrainedRun, ensemble: bool | None) -> PortableRun:
    """Load the run without torch; a network of the user's own class comes without weights."""
    if any(member.config.model.is_custom for member in trained.members):
        return _describe_custom(trained)
    portable = load_portable(run, ensemble=ensemble)
    members = [
        replace(
            member,
            models=tuple(map(_add_positions, member.models, loaded.trained.models)),
        )
        for member, loaded in zip(portable.members, trained.members, strict=True)
    ]
    return replace(portable, members=tuple(members))


def _add_positions(model: PortableModel, network: nn.Module) -> PortableModel:
    """Add the table of sinusoidal positions as torch computes it: a last digit of a frequency is
    several of an angle, a thousand tokens later."""
    buffers = dict(network.named_buffers())
    if POSITIONS not in buffers:
        return model
    table = buffers[POSITIONS].cpu().numpy().astype(np.float32)
    return replace(model, weights=model.weights | {POSITIONS: table})


def _describe_custom(trained: TrainedRun) -> PortableRun:
    """Return a run of the user's own class: config, columns, scaling and intervals, no weights."""
    if trained.mixtures:
        raise UserError(
            f"{trained.run.folder}: a member's network is a class of yours, and an ensemble with "
            "one cannot be exported; export the members by themselves"
        )
    member = trained.first
    signature, scaler = member.trained.signature, member.trained.scaler
    widths = None
    if (half_widths := member.trained.folds[-1].half_widths) is not None:
        sizes = [scaler.size[name] for name in signature.targets]
        widths = {level: width.double().numpy() * sizes for level, width in half_widths.items()}
    model = PortableModel(member.config, signature, scaler, {})
    described = PortableMember(
        member.name, member.run, (model,), member.trained.describe_on_new_data(), widths
    )
    description = trained.describe(on_folds=False)
    return PortableRun(
        trained.run, trained.owner, (described,), (1.0,), widths, 0, description, hashes={}
    )


def refuse_folder(folder: Path, *, force: bool) -> None:
    """Refuse a folder that exists; with `force`, an earlier export may be replaced."""
    if not folder.parent.is_dir():
        raise UserError(f"{folder}: there is no folder {folder.parent}; create it first")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder")
    if not any(folder.iterdir()):
        return
    if not (folder / EXPORT_FILE).is_file():
        raise UserError(f"{folder}: is not empty, and no export; name another folder")
    if not force:
        raise UserError(
            f"{folder}: holds an export; pass "
            + Option("force", True)
            + " to replace it, or name another folder"
        )


def _describe(to: str, source: ExportSource, written: WrittenExport) -> dict[str, Any]:
    """Return the content of export.json except for the files and their parity."""
    interface: Interface = source.interface
    versions = {"slipstream": __version__, "python": platform.python_version()}
    units = dict(source.units)
    return {
        "format": to,
        "run": name_run(source.run.run.folder),
        "model": source.run.description,
        "kinds": [member.first.config.model.kind for member in source.run.members],
        "versions": versions | {"numpy": np.__version__} | dict(written.versions),
        "interface": interface.describe() | ({"units": units} if units else {}),
        "inside": list(written.inside),
        "before": list(interface.before),
        "after": list(interface.after),
        "deploy": {"regime": source.regime.name, "reason": source.regime.reason},
        **written.details,
        "notes": list(written.notes),
        "source": source.run.hashes,
    }


def find_units(interface: Interface, data: VerificationData) -> dict[str, str]:
    """Return the units that the data files state for columns which no step changes."""
    if interface.before:
        return {}
    signature = interface.signature
    used = {*interface.inputs, *interface.static, *signature.targets}
    return {
        name: unit for file in data.joint.files for name, unit in file.units.items() if name in used
    }


def _list_files(folder: Path) -> list[dict[str, Any]]:
    """List the written files with their sizes and SHA-256 sums."""
    return [
        {
            "name": path.relative_to(folder).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": compute_sha256(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
