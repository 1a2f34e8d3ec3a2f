"""A trained network with all that predicting needs: what `slipstream.load` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream import runs
from slipstream.api.arguments import format_override, name_columns
from slipstream.api.progress import name_arguments
from slipstream.base.errors import UserError
from slipstream.base.text import format_count
from slipstream.config import Config, Signature
from slipstream.runs import Run

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from torch import nn

    from slipstream.data.scaler import Scaler
    from slipstream.exporting.formats import Interface
    from slipstream.exporting.torch_program import PhysicalModel
    from slipstream.inference.trained import TrainedRun

MAX_NAMES = 4
"""Columns that a model's text lists"""


class TrainedModel:
    """A run's trained network, its scaler, and predictions in physical units.

    The weights are read once, so this is the fastest way to predict many times.

    The object itself is called with a batch of windows in physical units and returns their
    predictions in physical units: `model(rows)`, with `static` and `future` if the model reads such
    columns. `rows` is windows x context x inputs, after the steps of `data.prepare`; `static` is
    windows x columns, `future` windows x horizon x columns. The result is windows x rows x targets
    (x quantiles), or windows x rows x classes; an estimate has one row. Arrays give an array.
    Tensors give a tensor on their own device, with gradients as of any module: wrap the call in
    `torch.no_grad()` if you need none. The networks are in evaluation mode. `predict.filter`, which
    smooths consecutive windows, is applied by `predict` only. A model with a carried state starts
    from zero before the first of the rows, which may be any number.

    Attributes:
        run: The run folder that the weights come from.
        module: The `torch.nn.Module`, in evaluation mode. It maps scaled windows, a tensor of
            context x windows x inputs, and the static columns or None to scaled predictions:
            windows x rows x targets x quantiles, or x classes. Where columns are known ahead
            (`future`), their rows follow the static columns, one after the other: windows x
            (static columns + horizon * future columns). `predict` uses it, so changed weights
            change the predictions.
        members: All networks that `predict` averages: `module` alone, or those of an ensemble, of
            which `module` is the first. For an ensemble of runs, `module`, `scaler`, `config` and
            `inputs` are those of the member whose scaling the ensemble uses.
        scaler: `scaled = (physical - scaler.shift[name]) / scaler.size[name]` for each column.
        config: The `Config` of the run.
        inputs: The columns that the network reads, in its order.
        future: The first of these columns, which the network also reads for the rows that it
            predicts.
        targets: The columns that it predicts, in its order.
        classes: The names of the classes, in the order of the network's outputs; empty for numbers.
        context: The number of rows that it reads.
        horizon: The number of rows that it forecasts; 0 for an estimate at the last row of the
            context.
        step: The time from row to row: seconds for dates, else in the time column's own unit; None
            where the data had no time.
        device: The device of the network.
        predict: A function: predictions for new data, as from `slipstream.predict`. For a
            pre-trained encoder it raises a `UserError`.

    Example:
        model = slipstream.load("runs/job-20260131T120000Z")
        model.predict("latest.csv").to_pandas()
        model(frame[list(model.inputs)].to_numpy()[None, -model.context :])
        sum(weight.numel() for weight in model.module.parameters())
    """

    def __init__(self, weights: LoadedWeights, reload: tuple[Any, ...]) -> None:
        signature = weights.signature
        self.run, self.config, self.scaler = weights.run.folder, weights.config, weights.scaler
        self.members, self.module = weights.models, weights.models[0]
        self.inputs, self.targets = signature.inputs, signature.targets
        self.future = signature.future
        self.classes = signature.classes
        self.context, self.horizon = signature.context, signature.horizon
        self.step = signature.step
        self._trained, self._reload = weights.trained, reload

    @property
    def device(self) -> torch.device:
        return self._list_weights()[0].device

    def _list_weights(self) -> list[torch.Tensor]:
        """Return the parameters of the network; a fitted baseline has buffers instead."""
        return [*self.module.parameters()] or [*self.module.buffers()]

    @name_arguments
    def __call__(self, rows: Any, static: Any = None, future: Any = None) -> Any:
        """Predict windows in physical units: arrays give an array, tensors a tensor."""
        import numpy as np
        import torch

        interface, physical = self._physical
        inputs = {"rows": rows, "static": static, "future": future}
        are_tensors = isinstance(rows, torch.Tensor)
        shapes = interface.get_input_shapes()
        if interface.signature.state != "carried":
            shapes["rows"][1] = interface.context
        tensors = {}
        for name, value in inputs.items():
            if (value is not None) != (name in shapes):
                raise UserError(_describe_input(name, value, interface))
            if value is not None:
                if not isinstance(value, torch.Tensor):
                    value = torch.from_numpy(np.array(value, dtype=np.float64))
                tensors[name] = value.to(self.device)
                shape = list(tensors[name].shape)
                wanted = [size for size in shapes[name] if isinstance(size, int)]
                if len(shape) != len(shapes[name]) or shape[-len(wanted) :] != wanted:
                    raise UserError(_describe_input(name, shape, interface))
        with torch.set_grad_enabled(are_tensors and torch.is_grad_enabled()):
            outputs = physical(**tensors)[interface.output]
        return outputs.to(rows.device) if are_tensors else np.asarray(outputs.cpu())

    @cached_property
    def _physical(self) -> tuple[Interface, PhysicalModel]:
        """What a call takes and returns, and the module that computes it."""
        from slipstream.exporting.api import load_source
        from slipstream.exporting.formats import make_interface, refuse_series_scales
        from slipstream.exporting.torch_program import PhysicalModel

        trained = self._require_predictions()
        source = load_source(trained.run.folder, trained, self._reload[1])
        refuse_series_scales(source, "the windows of a call do not say which series they are of")
        interface = make_interface(source)
        interface = replace(interface, dtype="float64")
        physical = PhysicalModel(trained, interface, shares_weights=True).eval()
        return interface, physical.to(self.device)

    def _require_predictions(self) -> TrainedRun:
        if self._trained is None:
            raise UserError(
                f"{self.run}: holds a pre-trained encoder, which predicts nothing yet; train a "
                "model from it: slipstream.train(config, init_from=...)"
            )
        return self._trained

    @name_arguments
    def predict(
        self,
        data: Any,
        *,
        columns: Sequence[str] | None = None,
        every: bool = False,
        resample: bool = False,
        joins: Mapping[str, Any] | None = None,
    ) -> pa.Table:
        """Predict new data in physical units; the arguments are those of `slipstream.predict`."""
        trained = self._require_predictions()
        from slipstream.inference import predict as prediction

        table = name_columns(data, columns)
        options: dict[str, Any] = {"every": every, "resample": resample, "joins": joins}
        return prediction.predict_with(trained, table, **options)

    def __repr__(self) -> str:
        count = sum(weight.numel() for weight in self._list_weights())
        ensemble = f", the mean of {len(self.members)}" if len(self.members) > 1 else ""
        kind = f"{self.config.model.kind}, {count:,} parameters on {self.device}{ensemble}"
        if self._trained is None:
            task = "an encoder, which fills in masked rows"
        elif self.classes:
            task = f"tells {_join(self.classes)} apart"
        elif self.horizon:
            task = f"forecasts {_join(self.targets)}, {format_count(self.horizon, 'row')}"
        else:
            task = f"estimates {_join(self.targets)}"
        reads = f"reads {_join(self.inputs)}, {format_count(self.context, 'row')}"
        if self.future and self._trained is not None:
            reads += f", and {_join(self.future)} of the rows ahead"
        return f"TrainedModel of {self.run.name}: {kind}\n{reads}; {task}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Read the weights from the run folder again where it is unpickled."""
        return _reload, self._reload


class LoadedWeights(NamedTuple):
    """What a run folder holds of networks, as far as it is used."""

    run: Run
    config: Config
    signature: Signature
    scaler: Scaler
    models: list[nn.Module]
    trained: TrainedRun | None
    """None for an encoder"""


def load_model(
    folder: Path, *, ensemble: bool | None, device: str | None, allow_code: bool
) -> TrainedModel:
    """Load a run's model, those of an ensemble, or the encoder of a pre-training run."""
    from slipstream.inference.trained import load_trained

    overrides = () if device is None else (format_override("engine.device", device),)
    reload = str(folder), ensemble, device, allow_code
    run = runs.open_run(folder)
    if runs.load_config(run).masked:
        return TrainedModel(_load_encoder(run, overrides, allow_code), reload)
    trained = load_trained(folder, overrides=overrides, ensemble=ensemble, allow_code=allow_code)
    member = trained.first
    predictors = member.trained
    models = [
        model
        for owner in (member, *(extra for extra in trained.members if extra is not member))
        for model in owner.trained.models
    ]
    return TrainedModel(
        LoadedWeights(
            trained.run, member.config, predictors.signature, predictors.scaler, models, trained
        ),
        reload,
    )


def _load_encoder(run: Run, overrides: tuple[str, ...], allow_code: bool) -> LoadedWeights:
    from slipstream.engine import checkpoint
    from slipstream.engine.planning import make_plan
    from slipstream.models import custom
    from slipstream.models.files import load_run_config

    custom.require_permission(run.folder, allow_code=allow_code)
    config = load_run_config(run, overrides)
    plan = make_plan(config, data_bytes=0, training=False)
    model, signature, scaler = checkpoint.load_model(run, config, plan.device)
    return LoadedWeights(run, config, signature, scaler, [model.eval()], None)


def _describe_input(name: str, shape: Any, interface: Interface) -> str:
    """Say what a call takes in the place of something else."""
    shapes, columns = interface.get_input_shapes(), interface.describe()["inputs"]
    if name not in shapes:
        setting = {"static": "data.static", "future": "data.future"}[name]
        return f"{name} is for columns of {setting}, of which the model reads none; leave it out"
    sizes = [str(size) for size in shapes[name][1:]]
    if name == "rows":
        carried = interface.signature.state == "carried"
        sizes[0] = "any number of rows" if carried else f"{interface.context} rows"
        sizes[1] += " inputs"
    is_missing = shape is None or not isinstance(shape, list)
    has = "is missing" if is_missing else f"is {' x '.join(map(str, shape)) or 'one number'}"
    listed = ", ".join(columns[name]["columns"])
    return f"{name} {has}; pass windows x {' x '.join(sizes)}, in this order: {listed}"


def _reload(
    folder: str, ensemble: bool | None, device: str | None, allow_code: bool
) -> TrainedModel:
    return load_model(Path(folder), ensemble=ensemble, device=device, allow_code=allow_code)


def _join(names: Sequence[str]) -> str:
    """List the first few names."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
