"""A program of torch.export; and the ONNX graph of a network of the user's own class."""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from slipstream import runs
from slipstream.base.errors import Option, UserError
from slipstream.data import windows
from slipstream.data.scaler import Scaler
from slipstream.exporting.formats import ExportSource, Interface, Runner, WrittenExport, to_inputs
from slipstream.inference.rows import PhysicalWindows
from slipstream.inference.trained import Member, TrainedRun
from slipstream.models.forecaster import set_execution
from slipstream.models.losses import select_point
from slipstream.runs.lanes import ENSEMBLE
from slipstream.scoring.ensemble import to_half_widths


class ColumnScaler(nn.Module):
    """Selects columns of physical values [..., N] and scales them, in float32."""

    places: Tensor
    shift: Tensor
    size: Tensor

    def __init__(self, columns: Sequence[str], among: Sequence[str], scaler: Scaler) -> None:
        super().__init__()
        self.selects = tuple(columns) != tuple(among)
        places = [among.index(name) for name in columns]
        self.register_buffer("places", torch.tensor(places, dtype=torch.int64))
        for name, by_column in (("shift", scaler.shift), ("size", scaler.size)):
            values = [by_column[column] for column in columns]
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        if self.selects:
            values = values[..., self.places]
        return ((values.double() - self.shift) / self.size).float()


class MemberPredictor(nn.Module):
    """The networks of one run: from physical windows to their mean prediction [B, H, C, Q] in
    physical units, or to probabilities."""

    shift: Tensor
    size: Tensor
    places: Tensor

    def __init__(self, member: Member, interface: Interface, *, shares_weights: bool) -> None:
        super().__init__()
        trained = member.trained
        signature, scaler = trained.signature, trained.scaler
        self.signature, self.quantiles = signature, interface.signature.quantiles
        self.networks = nn.ModuleList(trained.models)
        if not shares_weights:
            self.networks = nn.ModuleList(copy.deepcopy(network) for network in trained.models)
            for network in self.networks:
                plain = ("persistent",) * len(member.config.model.sizes)
                algorithms = plain if member.config.model.spec.is_recurrent else ()
                set_execution(network, algorithms=algorithms, recompute=False, compiled=False)
        self.rows = ColumnScaler(signature.inputs, interface.inputs, scaler)
        self.static = ColumnScaler(signature.static, interface.static, scaler)
        self.future = ColumnScaler(signature.future, interface.future, scaler)
        order = [signature.targets.index(name) for name in interface.signature.targets]
        self.register_buffer("places", torch.tensor(order, dtype=torch.int64))
        for name, by_column in (("shift", scaler.shift), ("size", scaler.size)):
            values = [[by_column[target]] for target in signature.targets]
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, rows: Tensor, static: Tensor | None, future: Tensor | None) -> Tensor:
        if self.signature.state == "windows":  # a carried state has seen all rows
            rows = rows[:, -self.signature.context :]
        inputs = self.rows(rows).transpose(0, 1)
        beside = []
        if static is not None and self.signature.static:
            beside.append(self.static(static))
        if future is not None and self.signature.future:
            beside.append(self.future(future).flatten(1))
        numbers = torch.cat(beside, dim=-1) if beside else None
        inputs, numbers = windows.split_input_channels(
            inputs, numbers, self.signature.sequences_per_window
        )
        total = self._convert(self.networks[0](inputs, numbers))
        for network in self.networks[1:]:
            total = total + self._convert(network(inputs, numbers))
        return total / len(self.networks)

    def _convert(self, raw: Tensor) -> Tensor:
        """Return one network's prediction in physical units, or its probabilities."""
        merged = windows.merge_channels(raw, self.signature.sequences_per_window)
        if self.signature.classes:
            return torch.softmax(merged, dim=-1)
        if self.signature.quantiles:
            merged = merged.sort(dim=-1).values
        values = merged.double() * self.size + self.shift
        if self.signature.output_range is not None:
            values = values.clamp(*self.signature.output_range)
        if self.signature.quantiles != self.quantiles:
            values = select_point(values, self.signature.quantiles)[..., None]
        return values[:, :, self.places]


class PhysicalModel(nn.Module):
    """What a run predicts with, as one module with the inputs and outputs of an `Interface`.

    It has copies of the networks that can be traced or, with `shares_weights`, the networks
    themselves.
    """

    half_widths: Tensor | None

    def __init__(
        self, trained: TrainedRun, interface: Interface, *, shares_weights: bool = False
    ) -> None:
        super().__init__()
        weights = list_weights(trained)
        pairs = [pair for pair in zip(trained.members, weights, strict=True) if pair[1]]
        self.members = nn.ModuleList(
            MemberPredictor(member, interface, shares_weights=shares_weights) for member, _ in pairs
        )
        self.weights = tuple(weight for _, weight in pairs)
        self.interface, self.dtype = interface, getattr(torch, interface.dtype)
        self.register_buffer("half_widths", stack_half_widths(trained))

    def forward(
        self, rows: Tensor, static: Tensor | None = None, future: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the outputs by name."""
        signature = self.interface.signature
        total: Any = 0.0
        for member, weight in zip(self.members, self.weights, strict=True):
            out = member(rows, static, future)
            total = total + (out if weight == 1 else out * weight)
        if signature.classes:
            return {"probability": total[:, :, 0]}
        point = select_point(total, signature.quantiles)
        results = {"prediction": total if signature.quantiles else point}
        if self.half_widths is not None:
            results["lower"] = self._limit(point[..., None] - self.half_widths)
            results["upper"] = self._limit(point[..., None] + self.half_widths)
        return {name: values.to(self.dtype) for name, values in results.items()}

    def _limit(self, values: Tensor) -> Tensor:
        edges = self.interface.signature.output_range
        return values if edges is None else values.clamp(*edges)


def list_weights(trained: TrainedRun) -> list[float]:
    """Return the weight of each member in the prediction."""
    if not trained.mixtures:
        return [1.0]
    mixture = trained.mixtures[-1]
    if trained.uses == ENSEMBLE:
        return mixture.weights
    return [float(number == mixture.best) for number in range(len(trained.members))]


def stack_half_widths(trained: TrainedRun) -> Tensor | None:
    """Return how far intervals reach in physical units, [H, C, levels]; None without intervals."""
    run = trained.first.trained
    targets, scaled = run.signature.targets, run.folds[-1].half_widths
    if trained.mixtures:
        scaled = to_half_widths(trained.mixtures[-1].reach[trained.uses], run.scaler, targets)
    if not scaled:
        return None
    sizes = torch.tensor([[run.scaler.size[name]] for name in targets], dtype=torch.float64)
    return torch.stack(list(scaled.values()), dim=-1).double() * sizes


NAMESPACE = "slipstream_export"
SCHEMA = (
    "{name}(Tensor input, {states} hx, Tensor[] params, bool has_biases, int num_layers, "
    "float dropout, bool train, bool bidirectional, bool batch_first) -> ({results})"
)
KINDS = {"lstm": ("Tensor[]", "Tensor, Tensor, Tensor"), "gru": ("Tensor", "Tensor, Tensor")}
"""By the name of PyTorch's operation: the types of its states and of its results"""


@contextmanager
def stand_in_for_recurrent_layers() -> Iterator[None]:
    """Replace PyTorch's recurrent operations by stand-ins while the model is traced."""
    _define_operations()
    with warnings.catch_warnings(), _RecurrentStandIns():
        # of the weights that nn.LSTM keeps in a list as well
        warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during")
        yield


def restore_recurrent_layers(program: ExportedProgram) -> ExportedProgram:
    """Put PyTorch's operations back."""
    operations = getattr(torch.ops, NAMESPACE)
    originals = {
        getattr(operations, name).default: getattr(torch.ops.aten, name).input for name in KINDS
    }
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in originals:
            node.target = originals[node.target]
    program.graph_module.recompile()
    return program


class _RecurrentStandIns(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in KINDS and func is getattr(torch._VF, name) and not _is_packed(args):
            return getattr(getattr(torch.ops, NAMESPACE), name)(*args)
        return func(*args, **(kwargs or {}))


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Return whether the arguments are for a packed sequence: they begin with data and lengths."""
    return not isinstance(args[3], bool)


@cache
def _define_operations() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, (states, results) in KINDS.items():
        library.define(SCHEMA.format(name=name, states=states, results=results))
        torch.library.register_fake(f"{NAMESPACE}::{name}", _make_results, lib=library)
    return library


def _make_results(
    input: Tensor, hx: Tensor | Sequence[Tensor], *options: Any
) -> tuple[Tensor, ...]:
    """Return tensors of the shapes of the outputs and of each state."""
    states = [hx] if isinstance(hx, Tensor) else hx
    directions = 2 if options[-2] else 1
    outputs = input.new_empty(*input.shape[:-1], states[0].shape[-1] * directions)
    return outputs, *(torch.empty_like(state) for state in states)


PROGRAM_FILE, DESCRIPTION = "model.pt2", "slipstream.json"
EXAMPLE_WINDOWS = 3
"""Windows that the model is traced with; a single one would fix their number"""


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the program."""
    program = trace(PhysicalModel(source.trained, source.interface))
    path, description = folder / PROGRAM_FILE, runs.to_json(source.interface.describe())
    torch.export.save(program, path, extra_files={DESCRIPTION: description})
    return WrittenExport(
        run=make_runner(path, source.interface),
        inside=("scaling of the inputs", "the networks", "predictions in physical units"),
        versions={"torch": torch.__version__},
    )


def trace(model: PhysicalModel) -> ExportedProgram:
    """Return the model as a program for any number of windows."""
    interface, batch = model.interface, Dim("batch")
    shapes = {
        name: _make_shape(dims, interface) for name, dims in interface.get_input_shapes().items()
    }
    example = {
        name: torch.zeros(EXAMPLE_WINDOWS, *shape, dtype=model.dtype)
        for name, shape in shapes.items()
    }
    with torch.no_grad(), stand_in_for_recurrent_layers():
        try:
            program = torch.export.export(
                model.eval(), (), example, dynamic_shapes={name: {0: batch} for name in example}
            )
        except Exception as error:  # torch's own kinds of errors, and those of users' classes
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"torch.export cannot trace the model: {reason}") from error
    return restore_recurrent_layers(program)


def make_runner(path: Path, interface: Interface) -> Runner:
    """Load the written program and return a function that runs it on windows."""
    module = torch.export.load(path).module()

    def run(windows: PhysicalWindows) -> Mapping[str, npt.NDArray[Any]]:
        inputs = to_inputs(windows, interface.dtype)
        with torch.no_grad():
            outputs = module(**{name: torch.from_numpy(values) for name, values in inputs.items()})
        return {name: values.numpy() for name, values in outputs.items()}

    return run


def _make_shape(dims: list[str | int], interface: Interface) -> tuple[int, ...]:
    """Return the shape of one window's input; the time has the context's length."""
    return tuple(interface.context if dim == "time" else int(dim) for dim in dims[1:])


OWN_OPSET = 18
"""The oldest opset that PyTorch's exporter writes"""


def write_own_class(source: ExportSource, path: Path) -> None:
    """Write the ONNX graph of a network of the user's own class, by PyTorch's exporter: for windows
    of the context's length."""
    import onnx  # an extra

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
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in metadata.items()})
    onnx.save(model, str(path))


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the messages of PyTorch's exporter: prints, logs and warnings."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
