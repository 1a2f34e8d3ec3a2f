"""Start a model from a pre-trained encoder: load it, and match its weights.

The encoder of a predicting model is its core without pool and head; the pre-training run uses the
same names for these weights.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream import runs
from slipstream.base import storage
from slipstream.base.errors import Command, UserError
from slipstream.config import Config, Signature
from slipstream.data.prepare.chain import Replay
from slipstream.data.prepare.steps import Limits
from slipstream.data.scaler import Scaler
from slipstream.engine import checkpoint
from slipstream.engine.context import EncoderMatch
from slipstream.engine.optim import CORE, is_encoder_weight
from slipstream.events import EncoderLoaded
from slipstream.models.files import WEIGHTS_FILE, load_run_config, parse_description, parse_limits
from slipstream.models.kinds import load_kind

OTHER_KINDS = {
    "search": "a search",
    "auto": "a search",
    "ensemble": "an ensemble",
    "probe": "a probe",
}


@dataclass(frozen=True)
class PretrainedEncoder:
    """The encoder of a pre-training run."""

    folder: str
    config: Config
    signature: Signature
    scaler: Scaler
    weights: dict[str, Tensor]
    limits: dict[str, Limits]
    """The ranges that its steps of `data.prepare` were fitted to"""


def load_encoder(config: Config) -> PretrainedEncoder | None:
    """Load and verify the encoder that `train.init_from` names, if any."""
    folder = config.train.init_from
    if folder is None:
        return None
    if not Path(folder).is_dir():  # the beginning of a name was completed when it was set
        raise UserError(f'train.init_from = "{folder}": there is no such run')
    kind = runs.find_kind(Path(folder))
    if kind != "pretrain":
        kind_found = OTHER_KINDS.get(kind) or "a run of " + Command(kind)
        raise UserError(
            f'train.init_from = "{folder}": is '
            + kind_found
            + "; name a run of "
            + Command("pretrain")
        )
    run = runs.open_run(folder)
    encoder_config = load_run_config(run)
    files = storage.read_verified(run.model)
    signature, scaler = parse_description(files)
    assert signature.masked
    path = run.model / WEIGHTS_FILE
    weights = checkpoint.parse_tensors(files[path.name], path)
    scaler, limits = scaler.select(signature.inputs), parse_limits(files)
    return PretrainedEncoder(str(run.folder), encoder_config, signature, scaler, weights, limits)


def select_limits(encoder: PretrainedEncoder, config: Config) -> Replay:
    """Return the ranges of the encoder's steps that this config has too, in the same place."""
    pairs = zip(encoder.config.data.prepare, config.data.prepare, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Replay(
        {number: limits for number, limits in encoder.limits.items() if int(number) <= same}
    )


def match_weights(
    encoder: PretrainedEncoder, config: Config, signature: Signature, model: nn.Module
) -> EncoderMatch:
    """Match the encoder's weights to the model's; a UserError lists everything that differs."""
    wrong = [*_list_other_settings(encoder, config), *_list_other_columns(encoder, signature)]
    order = _find_column_order(encoder.signature, signature) if not wrong else []
    own_weights = {
        name: weight for name, weight in model.named_parameters() if is_encoder_weight(name)
    }
    encoder_weights = {
        name: weight for name, weight in encoder.weights.items() if name.startswith(CORE)
    }
    weights = {}
    for name in sorted(own_weights.keys() | encoder_weights.keys()):
        if name not in encoder_weights or name not in own_weights:
            where = "the encoder" if name not in encoder_weights else "this model"
            wrong.append(f"{name} is not in {where}")
        elif encoder_weights[name].shape != own_weights[name].shape:
            shapes = list(own_weights[name].shape), list(encoder_weights[name].shape)
            wrong.append(f"{name} is {shapes[0]} here and {shapes[1]} there")
        else:
            weight = encoder_weights[name]
            of_inputs = load_kind(config.model).input_weights if order else None
            if of_inputs is not None and of_inputs.fullmatch(name):  # a patch has row after row
                by_column = weight.unflatten(1, (-1, len(order)))
                weight = by_column[:, :, torch.tensor(order)].flatten(1, 2)
            weights[name] = weight
    if wrong:
        raise UserError(
            f'train.init_from = "{config.train.init_from}": the encoder does not fit: '
            + "; ".join(wrong)
            + "; leave out what the encoder settles, or pre-train one that fits"
        )
    event = EncoderLoaded(
        from_run=encoder.folder,
        matched=sorted(weights),
        new=[name for name, _ in model.named_parameters() if not is_encoder_weight(name)],
        unused=[name for name in encoder.weights if not name.startswith(CORE)],
        columns_reordered=order != sorted(order),
    )
    return EncoderMatch(weights, event)


def _list_other_settings(encoder: PretrainedEncoder, config: Config) -> list[str]:
    """Describe the settings that differ and that the encoder's shape depends on."""
    model, encoder_model = config.model, encoder.config.model
    if model.kind != encoder_model.kind:
        return [f'model.kind is "{model.kind}", there "{encoder_model.kind}"']
    pairs = {
        f"model.{name}": (getattr(model, name), getattr(encoder_model, name))
        for name in model.spec.encoder_settings
    }
    pairs["model.hidden"] = list(model.sizes), list(encoder_model.sizes)
    for name in ("scale", "scale_by", "channels"):
        pairs[f"data.{name}"] = getattr(config.data, name), getattr(encoder.config.data, name)
    if model.normalize != "none":  # which leaves columns that are known ahead as they are
        pairs["data.future"] = sorted(config.data.future), sorted(encoder.signature.future)
    if model.spec.knows_positions:
        pairs["data.context"] = config.data.context, encoder.signature.context
    return [f"{name} is {a}, there {b}" for name, (a, b) in pairs.items() if a != b]


def _name_columns(signature: Signature) -> tuple[str, ...]:
    """Name the inputs of a sequence that have names; an independent channel has none."""
    if signature.channels == "together":
        return signature.inputs
    return tuple(name for name in signature.inputs if name not in signature.targets)


def _list_other_columns(encoder: PretrainedEncoder, signature: Signature) -> list[str]:
    columns, encoder_columns = _name_columns(signature), _name_columns(encoder.signature)
    more = (name for name in columns if name not in encoder_columns)
    less = (name for name in encoder_columns if name not in columns)
    return [
        *(f'data.inputs has "{name}", which the encoder has not seen' for name in more),
        *(f'data.inputs lacks "{name}", which the encoder reads' for name in less),
    ]


def _find_column_order(encoder_signature: Signature, signature: Signature) -> list[int]:
    """Return the position of each column of this run's sequences in the encoder's."""
    there = _name_columns(encoder_signature)
    order = [there.index(name) for name in _name_columns(signature)]
    return order + list(range(len(order), encoder_signature.model_inputs))
