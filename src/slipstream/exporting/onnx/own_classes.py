"""The graph of a network of the user's own class: by PyTorch's exporter, for windows of the
context's length."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from onnx import helper

from slipstream.base.errors import Option, UserError
from slipstream.exporting.formats import ExportSource
from slipstream.exporting.torch_program import PhysicalModel, trace

OWN_OPSET = 18
"""The oldest that PyTorch's exporter writes"""


def write_own_class(source: ExportSource, path: Path) -> None:
    """Write the graph; whether it computes the same is verified as of any other."""
    interface = source.interface
    program = trace(PhysicalModel(source.trained, interface))
    try:
        with _silence():
            exported = torch.onnx.export(
                program,
                input_names=list(interface.get_input_shapes()),
                output_names=list(interface.outputs),
                opset_version=OWN_OPSET,
                dynamo=True,
                verbose=False,
            )
    except ModuleNotFoundError as error:
        raise UserError(
            Option("to", "onnx")
            + f" needs the package {error.name} for a network of your own: pip install "
            '"slipstream[onnx]"'
        ) from None
    except Exception as error:  # torch's own kinds of errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        kind = source.run.first.config.model.kind
        raise UserError(
            f'model.kind = "{kind}": PyTorch cannot write it as ONNX: {reason}; use '
            + Option("to", "torch")
        ) from error
    assert exported is not None
    model = exported.model_proto
    metadata = interface.describe() | {"model": source.run.description}
    helper.set_model_props(model, {key: json.dumps(value) for key, value in metadata.items()})
    onnx.save(model, str(path))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress what PyTorch's exporter prints, logs and warns about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
