"""A trained network with all that predicting needs: what `slipstream.load` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream import runs
from slipstream.api.arguments import format_override, name_columns
from slipstream.api.messages import speak_python
from slipstream.config import Config, Signature
from slipstream.errors import UserError
from slipstream.runs import Run

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from torch import nn

    from slipstream.data.scaler import Scaler
    from slipstream.inference.trained import TrainedRun

MAX_NAMES = 4
"""Columns that a model's text lists"""


class TrainedModel:
    """A run's trained network, its scaler, and predictions in physical units.

    The weights are read once, so this is the fastest way to predict many times.

    Attributes:
        run: The run folder that the weights come from.
        module: The `torch.nn.Module`, in evaluation mode. It maps scaled windows, a tensor of
            context x windows x inputs, and the static columns or None to scaled predictions:
            windows x rows x targets x quantiles, or x classes. Where columns are known ahead
            (`future`), their rows follow the static columns, one after the other: windows x
            (static columns + horizon * future columns). `predict` uses it, so changed weights
            change the predictions.
        members: All networks that `predict` averages: `module` alone, or those of an ensemble, of
            which `module` is the first. Where runs were joined, `module`, `scaler`, `config` and
            `inputs` are those of the member whose scaling the ensemble has.
        scaler: `scaled = (physical - scaler.shift[name]) / scaler.size[name]` for each column.
        config: The `Config` of the run.
        inputs: The columns that the network reads, in its order.
        future: Those of them, the first, that it also reads for the rows that it predicts.
        targets: The columns that it predicts, in its order.
        classes: The names of the classes, in the order of the network's outputs; empty for numbers.
        context: The rows that it sees.
        horizon: The rows that it forecasts; 0 for an estimate at the last row of the context.
        device: Where the network is.
        predict: A function: predictions for new data, as from `slipstream.predict`. A pre-trained
            encoder predicts nothing yet and says so.

    Example:
        model = slipstream.load("runs/job-20260131T120000Z")
        model.predict("latest.csv").to_pandas()
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
        self._trained, self._reload = weights.trained, reload

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @speak_python
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
        if self._trained is None:
            raise UserError(
                f"{self.run}: holds a pre-trained encoder, which predicts nothing yet; train a "
                "model from it: slipstream.train(config, init_from=...)"
            )
        from slipstream import prediction

        table = name_columns(data, columns)
        options: dict[str, Any] = {"every": every, "resample": resample, "joins": joins}
        return prediction.predict_with(self._trained, table, **options)

    def __repr__(self) -> str:
        count = sum(weight.numel() for weight in self.module.parameters())
        ensemble = f", the mean of {len(self.members)}" if len(self.members) > 1 else ""
        kind = f"{self.config.model.kind}, {count:,} parameters on {self.device}{ensemble}"
        if self._trained is None:
            what = "an encoder, which fills in masked rows"
        elif self.classes:
            what = f"tells {_join(self.classes)} apart"
        elif self.horizon:
            what = f"forecasts {_join(self.targets)}, {self.horizon} rows"
        else:
            what = f"estimates {_join(self.targets)}"
        reads = f"reads {_join(self.inputs)}, {self.context} rows"
        if self.future and self._trained is not None:
            reads += f", and {_join(self.future)} of the rows ahead"
        return f"TrainedModel of {self.run.name}: {kind}\n{reads}; {what}"

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
        for one in (member, *(other for other in trained.members if other is not member))
        for model in one.trained.models
    ]
    return TrainedModel(
        LoadedWeights(
            trained.run, member.config, predictors.signature, predictors.scaler, models, trained
        ),
        reload,
    )


def _load_encoder(run: Run, overrides: tuple[str, ...], allow_code: bool) -> LoadedWeights:
    from slipstream.autotune.rules import make_plan
    from slipstream.engine import checkpoint
    from slipstream.models import permission
    from slipstream.portable.files import load_run_config

    permission.require_permission(run.folder, allow_code=allow_code)
    config = load_run_config(run, overrides)
    plan = make_plan(config, data_bytes=0, training=False)
    model, signature, scaler = checkpoint.load_model(run, config, plan.device)
    return LoadedWeights(run, config, signature, scaler, [model.eval()], None)


def _reload(
    folder: str, ensemble: bool | None, device: str | None, allow_code: bool
) -> TrainedModel:
    return load_model(Path(folder), ensemble=ensemble, device=device, allow_code=allow_code)


def _join(names: Sequence[str]) -> str:
    """List the first few names."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
