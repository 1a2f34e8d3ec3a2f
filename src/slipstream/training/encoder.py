"""The pre-trained encoder that a model starts from: its file, and which of its weights fit.

A predicting model's encoder is its core without pool and head, under the names that the
pre-training run gave the same weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream import checksums, runs
from slipstream.config import Config, Signature
from slipstream.data.scaler import Scaler
from slipstream.engine import checkpoint
from slipstream.engine.optim import CORE, is_encoder_weight
from slipstream.errors import UserError
from slipstream.models.layers import load_network


@dataclass(frozen=True)
class PretrainedEncoder:
    """A pre-trained one, from its run's folder."""

    folder: str
    config: Config
    signature: Signature
    scaler: Scaler
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class EncoderMatch:
    """What a model starts from."""

    weights: dict[str, Tensor]
    """By the model's own names"""
    summary: dict[str, Any]
    """Where it comes from, and which weights matched, are new, or are left there"""


def load_encoder(config: Config) -> PretrainedEncoder | None:
    """The encoder that `train.init_from` names, verified; None where none is asked for."""
    asked = config.train.init_from
    if asked is None:
        return None
    run = runs.open_run(asked)
    theirs = checkpoint.load_run_config(run)
    files = checksums.read_verified(run.model)
    signature = Signature.model_validate_json(files["signature.json"])
    if not signature.masked:
        raise UserError(
            f'train.init_from = "{asked}": is a run of slipstream train; name one of slipstream '
            "pretrain"
        )
    weights = checkpoint.parse_tensors(
        files["weights.safetensors"], run.model / "weights.safetensors"
    )
    scaler = Scaler(**json.loads(files["scaler.json"])).select(signature.inputs)
    return PretrainedEncoder(str(run.folder), theirs, signature, scaler, weights)


def match_weights(
    encoder: PretrainedEncoder, config: Config, signature: Signature, model: nn.Module
) -> EncoderMatch:
    """The encoder's weights as the model takes them; a UserError lists all that does not fit."""
    wrong = [*_other_settings(encoder, config), *_other_columns(encoder, signature)]
    order = _column_order(encoder.signature, signature) if not wrong else []
    wanted = {name: one for name, one in model.named_parameters() if is_encoder_weight(name)}
    found = {name: one for name, one in encoder.weights.items() if name.startswith(CORE)}
    weights, network = {}, load_network(config.model)
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found or name not in wanted:
            where = "the encoder" if name not in found else "this model"
            wrong.append(f"{name} is not in {where}")
        elif found[name].shape != wanted[name].shape:
            shapes = list(wanted[name].shape), list(found[name].shape)
            wrong.append(f"{name} is {shapes[0]} here and {shapes[1]} there")
        else:
            reads = order and network.input_weights.fullmatch(name)
            weights[name] = _reordered(found[name], order) if reads else found[name]
    if wrong:
        raise UserError(
            f'train.init_from = "{config.train.init_from}": the encoder does not fit: '
            + "; ".join(wrong)
            + "; leave out what the encoder settles, or pre-train one that fits"
        )
    own = [name for name, _ in model.named_parameters() if not is_encoder_weight(name)]
    left = [name for name in encoder.weights if not name.startswith(CORE)]
    moved = order != sorted(order)
    told = {"from": encoder.folder, "matched": sorted(weights), "new": own, "unused": left}
    return EncoderMatch(weights, told | {"columns_reordered": moved})


def _other_settings(encoder: PretrainedEncoder, config: Config) -> list[str]:
    """Settings of the encoder's shape that differ, in words."""
    mine, theirs = config.model, encoder.config.model
    if mine.kind != theirs.kind:
        return [f'model.kind is "{mine.kind}", there "{theirs.kind}"']
    pairs = {
        f"model.{name}": (getattr(mine, name), getattr(theirs, name))
        for name in mine.spec.encoder_settings
    }
    pairs["model.hidden"] = list(mine.sizes), list(theirs.sizes)
    for name in ("scale", "channels"):
        pairs[f"data.{name}"] = getattr(config.data, name), getattr(encoder.config.data, name)
    if mine.spec.knows_positions:
        pairs["data.context"] = config.data.context, encoder.signature.context
    return [f"{name} is {a}, there {b}" for name, (a, b) in pairs.items() if a != b]


def list_fixed_settings(config: Config) -> tuple[str, ...]:
    """The settings that cannot be other than those of the encoder that `train.init_from` names."""
    if config.train.init_from is None:
        return ()
    spec = config.model.spec
    more = ("data.context",) if spec.knows_positions else ()
    return "model.kind", *(f"model.{name}" for name in spec.encoder_settings), "data.inputs", *more


def _columns(signature: Signature) -> tuple[str, ...]:
    """What one sequence reads, by name; an independent channel has none."""
    if signature.channels == "together":
        return signature.inputs
    return tuple(name for name in signature.inputs if name not in signature.targets)


def _other_columns(encoder: PretrainedEncoder, signature: Signature) -> list[str]:
    mine, theirs = _columns(signature), _columns(encoder.signature)
    more = [f'data.inputs has "{name}", which the encoder has not seen' for name in mine]
    less = [f'data.inputs lacks "{name}", which the encoder reads' for name in theirs]
    return [
        *(told for name, told in zip(mine, more, strict=True) if name not in theirs),
        *(told for name, told in zip(theirs, less, strict=True) if name not in mine),
    ]


def _column_order(theirs: Signature, mine: Signature) -> list[int]:
    """Where each column of this run's sequences stands in the encoder's."""
    there = _columns(theirs)
    order = [there.index(name) for name in _columns(mine)]
    return order + list(range(len(order), theirs.model_inputs))


def _reordered(weight: Tensor, order: list[int]) -> Tensor:
    by_column = weight.unflatten(1, (-1, len(order)))  # a patch has its rows one after the other
    found: Tensor = by_column[:, :, torch.tensor(order)].flatten(1, 2)
    return found
