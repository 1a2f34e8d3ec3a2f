"""An export's folder as a run of its own: config, weights, and a Dockerfile that serves it without
PyTorch."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from slipstream import __version__, runs
from slipstream.base.run_names import ENSEMBLE_FILE, OUT, UNTESTED_FILE
from slipstream.base.storage import MANIFEST, compute_sha256, read_verified
from slipstream.config import Config, Engine
from slipstream.config.data import SIMULATED
from slipstream.inference.portable import MEMBERS, PortableMember, PortableRun
from slipstream.inference.stream import STREAM_FILE, read_measurement
from slipstream.models.files import ORIGIN, load_run_config
from slipstream.runs.lanes import ENSEMBLE, LANE_METADATA, LANES_FOLDER, MODEL

PACKAGES = (
    *("numpy", "onnxruntime", "psutil", "pyarrow", "pydantic", "rich", "safetensors"),
    *("starlette", "tomli-w", "typer", "uvicorn"),
)
"""Packages of `slipstream serve`; Slipstream itself is installed without its dependencies, of
which torch is one"""
FOR_STEPS = ("scipy",)
"""Further packages of steps of `data.prepare` and of `predict.filter`"""
PORT = 8000
TEMPLATE = """\
# Serves this folder without PyTorch:
#   docker build -t {name} .
#   docker run --rm -p {port}:{port} -e SLIPSTREAM_TOKEN=... {name}
# A wheel of Slipstream beside this file is installed instead of the released version.
FROM python:{python}-slim
WORKDIR /model
COPY requirements.txt ./
RUN pip install --no-cache-dir --requirement requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps \\
    "$(ls slipstream-*.whl 2>/dev/null || echo slipstream=={version})"
USER nobody
EXPOSE {port}
CMD ["slipstream", "serve", "/model", "--host", "0.0.0.0", "--port", "{port}"]
"""


def write_servable(run: PortableRun, folder: Path) -> None:
    """Make an export a run as well, and write Dockerfile and requirements.txt for it."""
    write_standalone(run, folder)
    name = re.sub(r"[^a-z0-9_.-]", "-", run.first.config.name.lower())
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = TEMPLATE.format(name=name, port=PORT, python=python, version=__version__)
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
    lines = "\n".join(pin_packages(choose_packages(run))) + "\n"
    (folder / "requirements.txt").write_text(lines, encoding="utf-8")


def choose_packages(run: PortableRun) -> tuple[str, ...]:
    """Return the packages that serving this run needs."""
    configs = [member.first.config for member in run.members]
    has_steps = any(
        config.data.prepare or config.predict.filter.kind != "none" for config in configs
    )
    steps = [step for config in configs for step in config.data.prepare]
    has_country = any(getattr(step, "country", None) is not None for step in steps)
    for_holidays = ("holidays",) if has_country else ()
    return (*PACKAGES, *FOR_STEPS, *for_holidays) if has_steps else PACKAGES


def pin_packages(names: tuple[str, ...]) -> list[str]:
    """Return packages and their requirements as `name==version`, in the installed versions; a
    package that is not installed comes without a version."""
    pinned: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in pinned:
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            pinned[name] = name
            continue
        pinned[name] = f"{name}=={package.version}"
        needs = [Requirement(line) for line in package.requires or ()]
        waiting += [
            _normalize(need.name)
            for need in needs
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return sorted(pinned.values())


def _normalize(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def write_standalone(run: PortableRun, folder: Path) -> None:
    """Write the run's model, or its members with their weights, into a folder."""
    if (mark := run.run.folder / UNTESTED_FILE).exists():
        shutil.copyfile(mark, folder / UNTESTED_FILE)
    if not run.is_ensemble:
        _write_member(run.members[0], folder)
        if read_measurement(run) is not None:  # the export is deployed as the run is
            measurement = (run.run.folder / STREAM_FILE).read_bytes()
            (folder / STREAM_FILE).write_bytes(measurement)
        return
    config = strip_config(runs.load_config(run.run))
    (folder / "config.toml").write_text(runs.format_config(config), encoding="utf-8")
    content = runs.read_json(run.run.folder / ENSEMBLE_FILE)
    for described in content["members"]:
        described["run"] = Path(described["run"]).name
    if list(run.weights) != content["folds"][-1]["weights"]:  # the best member was chosen
        for fold in content["folds"]:
            fold["weights"] = [float(number == fold["best"]) for number in range(len(run.members))]
            fold["reach"][ENSEMBLE] = fold["reach"][MODEL]
    runs.write_json(folder / ENSEMBLE_FILE, content)
    for number, member in enumerate(run.members, start=1):
        inner = folder / MEMBERS / str(number)
        inner.mkdir(parents=True)
        _write_member(member, inner)


def strip_config(config: Config) -> Config:
    """Return a config without settings of its machine: folders and devices."""
    steps = tuple(
        step.model_copy(update={"path": _shorten(path)}) if (path := _get_path(step)) else step
        for step in config.data.prepare
    )
    paths = {"path": config.data.path, "labels": config.data.labels}
    data = {name: _shorten(value) for name, value in paths.items()} | {"prepare": steps}
    return config.model_copy(
        update={
            "out": OUT,
            "data": config.data.model_copy(update=data),
            "train": config.train.model_copy(update={"init_from": None}),
            "engine": Engine(),
        }
    )


def _get_path(step: Any) -> str | None:
    return getattr(step, "path", None)


def _shorten(path: Any) -> Any:
    """Return the last part of a path, or of each of several paths."""
    if isinstance(path, str):
        return path if path.startswith(SIMULATED) else Path(path).name
    return tuple(map(_shorten, path)) if path else path


def _write_member(member: PortableMember, folder: Path) -> None:
    run = member.run
    text = runs.format_config(strip_config(load_run_config(run)))
    (folder / "config.toml").write_text(text, encoding="utf-8")
    files = read_verified(run.model)
    origin = json.loads(files.get(ORIGIN, b"{}")) | {"config": text}
    files[ORIGIN] = runs.to_json(origin).encode()
    _write_verified(folder / run.model.name, files)
    if (lanes := run.folder / LANES_FOLDER).exists():
        files = read_verified(lanes)
        metadata = json.loads(files[LANE_METADATA])
        if len(metadata["folds"][-1]["lanes"]) > 1:
            metadata["uses"] = ENSEMBLE if len(member.models) > 1 else MODEL
        files[LANE_METADATA] = runs.to_json(metadata).encode()
        _write_verified(folder / LANES_FOLDER, files)


def _write_verified(folder: Path, files: dict[str, bytes]) -> None:
    """Write a folder with its manifest."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sums = {name: compute_sha256(folder / name) for name in sorted(files)}
    runs.write_json(folder / MANIFEST, sums)
