"""A Dockerfile for an export folder: an image that serves the model without PyTorch."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from slipstream import __version__
from slipstream.exporting.sources import write_standalone
from slipstream.inference.portable import PortableRun

PACKAGES = (
    *("numpy", "onnxruntime", "psutil", "pyarrow", "pydantic", "rich", "safetensors"),
    *("starlette", "tomli-w", "typer", "uvicorn"),
)
"""What `slipstream serve` imports; Slipstream itself is installed without its dependencies, of
which torch is one"""
FOR_STEPS = ("scipy",)
"""What steps of `data.prepare` and `predict.filter` import"""
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
    has_steps = any(one.data.prepare or one.predict.filter.kind != "none" for one in configs)
    return (*PACKAGES, *FOR_STEPS) if has_steps else PACKAGES


def pin_packages(names: tuple[str, ...]) -> list[str]:
    """Return packages and all that they require as `name==version`, as they are installed here;
    those that are not have no version."""
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
            _normalize(one.name)
            for one in needs
            if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return sorted(pinned.values())


def _normalize(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
