"""A lane of a pack is that model trained alone, whoever its neighbours are."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from slipstream import UserError
from slipstream.config.model import SPECS
from slipstream.data import windows
from slipstream.engine import pack as packs
from slipstream.engine.context import resolve_settings
from slipstream.engine.lanes import EpochStart, Lane, Pace, compute_lrs
from slipstream.engine.pack import _start_threads, check_compatible
from slipstream.engine.planning import make_plan
from tests.conftest import KINDS, close, mostly_slow, slow, small_config, small_dataset, waves
from tests.engine.steps import run_steps
from tests.limits import FaultyDevice, run_out_of_memory

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
MODES = ("together", "branches")
BASE = {
    "model": {"layers": 2, "dropout": 0.2},
    "train": {"batch": 32, "lr": 0.01, "epochs": 12, "clip": 0.5},
}
ROUNDING = ("in_proj_bias", "pool.score.bias")
"""Biases that a softmax ignores, so that their gradients are rounding and nothing else"""
MIXED = (
    {},
    {"seed": 7, "train": {"lr": 0.003, "weight_decay": 0.1}},
    {"seed": 3, "model": {"dropout": 0.0}, "train": {"clip": "off", "schedule": "constant"}},
    {"seed": 3, "model": {"hidden": 4, "dropout": 0.4}, "train": {"schedule": "step"}},
    {"seed": 1, "model": {"hidden": [6, 8]}, "train": {"warmup_epochs": 2.0, "batch": 20}},
)


def configured(change=None, device="cpu", **common):
    """A small config with some sections changed for all lanes, and others for one."""
    together = {"engine": {"device": device, "precision": "fp32"}}
    for part in (BASE, common, change or {}):
        for name, value in part.items():
            both = isinstance(value, dict) and name in together
            together[name] = together[name] | value if both else value
    kind = together.get("model", {}).get("kind")
    if kind in SPECS and SPECS[kind].has_one_width:
        together["model"]["hidden"] = 8
    return small_config(**together)


def lanes_of(changes, dataset, **common):
    return [Lane(configured(change, **common), dataset.memory.starts) for change in changes]


def packed(lanes, dataset, mode, *, capture=False, room=(), **changed):
    config = lanes[0].config
    engine = config.engine.model_copy(update={"capture": capture})
    chosen = make_plan(config.model_copy(update={"engine": engine}), data_bytes=0)
    series = dataset.memory.series.to(chosen.device)
    return packs.build_pack(
        lanes, dataset.signature, series, chosen, mode=mode, room=room, **changed
    )


def train(pack, *, steps):
    """So many steps of every lane, over as many epochs as each needs; all losses."""
    places = range(len(pack.lanes))
    epochs, done, losses = [0] * len(places), [0] * len(places), [[] for _ in places]
    with pack.plan.flags():
        pack.begin({place: EpochStart() for place in places})
        for _ in range(steps):
            pack.advance()
            for place in places:
                done[place] += 1
                losses[place].append(float(pack.buffers["losses"][place, done[place] - 1]))
                if done[place] == pack.num_steps(place):
                    epochs[place], done[place] = epochs[place] + 1, 0
                    pack.begin({place: EpochStart(epochs[place], steps_before=len(losses[place]))})
    return losses


def same_as_alone(lanes, dataset, pack, losses, *, rel=1e-5):
    for place, lane in enumerate(lanes):
        wanted, weights = run_steps(lane.config, dataset, steps=len(losses[place]))
        close(losses[place], wanted, rel=rel)
        found = pack.weights(place)
        assert found.keys() == weights.keys()
        names = [name for name in weights if not name.endswith(ROUNDING)]
        flat, reference = (
            torch.cat([values[name].flatten().cpu() for name in names])
            for values in (found, weights)
        )
        assert all(found[name].shape == weights[name].shape for name in names)
        close(flat, reference, rel=rel)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_new_rates_reach_the_steps_to_come_of_one_lane_alone(device):
    dataset = small_dataset(configured())
    lanes = lanes_of([{}, {"seed": 1}], dataset, device=device)
    whole, changed = (packed(lanes, dataset, "together", capture=device == "cuda") for _ in "ab")
    paced = EpochStart(0, step=3, pace=Pace(3, 0.5, 1.0))
    with whole.plan.flags():
        for pack in (whole, changed):
            pack.begin({0: EpochStart(), 1: EpochStart()})
            for step in range(6):
                if pack is changed and step == 3:
                    pack.update_rates({0: paced})
                pack.advance()
    assert torch.equal(whole.losses[:, :4], changed.losses[:, :4])  # the third step's rate is old
    assert torch.equal(whole.losses[1], changed.losses[1])
    assert not torch.equal(whole.losses[0, 4:6], changed.losses[0, 4:6])
    rates = compute_lrs(lanes[0].config.train, paced, changed.num_steps(0))
    close(changed.buffers["rates"][0, : len(rates)].cpu(), rates, rel=1e-6)


@pytest.mark.parametrize("activation", ["silu", slow("gelu"), slow("tanh"), slow("elu")])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_lanes_of_other_activations_and_with_noise_by_column_are_those_alone(activation, device):
    """Units that pad a narrower lane stay at zero; noise reaches the columns that it names."""
    dataset = small_dataset(configured())
    model = BASE["model"] | {"kind": "mlp", "activation": activation}
    changes = {"augment": {"jitter": {"a": 0.3, "c": 0.1}, "jitter_chance": 1.0}}
    lanes = [
        Lane(resolve_settings(lane.config, dataset), lane.starts)
        for lane in lanes_of(MIXED, dataset, model=model, device=device, **changes)
    ]
    pack = packed(lanes, dataset, "together", capture=device == "cuda")
    losses = train(pack, steps=12)
    same_as_alone(lanes, dataset, pack, losses, rel=1e-5 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "device", "steps"),
    [
        *((kind, "cpu", 20) for kind in ("lstm", "mlp")),
        *(slow(kind, "cpu", 100) for kind in (*KINDS, "bidirectional")),
        *(
            pytest.param(kind, "cuda", 100, marks=pytest.mark.gpu)
            for kind in (*KINDS, "bidirectional")
        ),
    ],
)
def test_the_steps_of_every_lane_are_those_of_the_model_alone(kind, mode, device, steps):
    model = {"kind": kind}
    if kind == "bidirectional":
        model = {"kind": "gru", "bidirectional": True, "pool": "attention"}
    dataset = small_dataset(configured())
    lanes = lanes_of(MIXED, dataset, model=BASE["model"] | model, device=device)
    pack = packed(lanes, dataset, mode, capture=device == "cuda")
    losses = train(pack, steps=steps)
    assert not pack.failures()
    rounded = device == "cuda" and mode == "branches"  # cuDNN sums otherwise at other widths
    same_as_alone(lanes, dataset, pack, losses, rel=1e-4 if rounded else 1e-5)
    pack.close()


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        *(("adamw", schedule) for schedule in ("constant", "step", "plateau", "restarts")),
        *((optimizer, "cosine") for optimizer in ("adam", "adamw", "sgd", "rmsprop")),
    ],
)
def test_every_optimizer_and_schedule(optimizer, schedule):
    dataset = small_dataset(configured())
    rates = {"sgd": 0.1, "rmsprop": 0.003}
    common = {"optimizer": optimizer, "lr": rates.get(optimizer, 0.01), "restart_epochs": 2}
    common |= {"step_epochs": 2, "batch": 64, "epochs": 6, "clip": 0.5}
    changes = [{}, {"seed": 1, "train": {"weight_decay": 0.03, "momentum": 0.5}}]
    for change in changes:
        change["train"] = common | {"schedule": schedule} | change.get("train", {})
    lanes = lanes_of(changes, dataset, model={"kind": "mlp", "layers": 1})
    pack = packed(lanes, dataset, "together")
    same_as_alone(lanes, dataset, pack, train(pack, steps=15))


@pytest.mark.slow
def test_lanes_may_each_have_their_own_optimizer():
    dataset = small_dataset(configured())
    changes = [{"train": {"optimizer": name, "lr": 0.003}} for name in ("sgd", "adamw", "rmsprop")]
    lanes = lanes_of(changes, dataset, model={"kind": "gru", "layers": 1})
    pack = packed(lanes, dataset, "together")
    same_as_alone(lanes, dataset, pack, train(pack, steps=20))


@pytest.mark.parametrize("mode", ["together", slow("branches")])
@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"accumulate": 3, "batch": 12}},
        {"data": {"channels": "independent"}, "model": {"normalize": "last", "patch": 4}},
        {"data": {"horizon": 0, "targets": ["c"]}, "model": {"pool": "flatten"}},
        {"train": {"loss": "quantile"}, "model": {"normalize": "window", "pool": "mean"}},
    ],
)
def test_every_shape_of_a_job(sections, mode):
    sections = {name: BASE.get(name, {}) | value for name, value in sections.items()}
    dataset = small_dataset(configured(**sections))
    changes = [{}, {"seed": 4, "model": {"hidden": 5}}]
    lanes = lanes_of(changes, dataset, **sections)
    pack = packed(lanes, dataset, mode)
    same_as_alone(lanes, dataset, pack, train(pack, steps=15))


@pytest.mark.parametrize("mode", ["together", slow("branches")])
def test_lanes_with_normalized_layers(mode):
    model = {"layer_norm": True, "bidirectional": True, "hidden": 6, "layers": 2}
    dataset = small_dataset(configured())
    lanes = lanes_of([{}, {"seed": 4}], dataset, model=model)
    pack = packed(lanes, dataset, mode)
    same_as_alone(lanes, dataset, pack, train(pack, steps=15))
    lanes = lanes_of([{}, {"model": {"hidden": 4}}], dataset, model=model)
    with pytest.raises(UserError, match=r"model.hidden \(with model.layer_norm\)"):
        packed(lanes, dataset, mode)


def test_threads_change_nothing():
    dataset = small_dataset(configured())
    found = []
    for threads in (1, 2):
        lanes = lanes_of(MIXED, dataset, engine={"threads": threads})
        pack = packed(lanes, dataset, "branches")
        train(pack, steps=8)
        found.append(pack.live["weights"].clone())
        pack.close()
    assert torch.equal(*found)


def test_branches_leave_the_callers_number_of_threads_alone():
    torch.set_num_threads(2)
    try:
        workers = _start_threads(3)
        inside = [workers.submit(torch.get_num_threads).result() for _ in range(3)]
        assert torch.get_num_threads() == 2
        assert inside == [1, 1, 1]
    finally:
        torch.set_num_threads(1)
        workers.shutdown()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["lstm", slow("transformer"), "mlp"])
def test_neighbours_do_not_matter_to_the_bit(kind, mode, device):
    """Not even one that is no longer a number."""
    model = BASE["model"] | {"kind": kind}
    dataset = small_dataset(configured())
    rows = []
    for others in ([1, 2], [2, 1], "spoilt"):
        changes = [MIXED[0], *(MIXED[i] for i in (others if others != "spoilt" else [1, 2]))]
        pack = packed(lanes_of(changes, dataset, model=model, device=device), dataset, mode)
        if others == "spoilt":
            pack.live["weights"][1] = torch.nan
        train(pack, steps=12)
        rows.append({name: tensor[0].clone() for name, tensor in pack.tensors().items()})
        rows[-1]["score"] = torch.tensor(pack.score([0]))
    for name, row in rows[0].items():
        assert torch.equal(row, rows[1][name]), name
        assert torch.equal(row, rows[2][name]), name


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_lane_stays_as_it_is(mode):
    dataset = small_dataset(configured())
    pack = packed(lanes_of(MIXED[:3], dataset), dataset, mode)
    train(pack, steps=5)
    pack.freeze(1)
    before = {name: pack.live[name].clone() for name in pack.live}
    for _ in range(2):
        pack.advance()
    for name, tensor in pack.live.items():
        assert torch.equal(tensor[1], before[name][1])
        assert not torch.equal(tensor[0], before[name][0])


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("mode", MODES)
def test_a_refilled_place_is_a_lane_like_any_other(mode, device):
    dataset = small_dataset(configured())
    rounded = device == "cuda" and mode == "branches"  # cuBLAS repeats no bits beside other streams
    # the last bits of a gradient that is next to nothing decide about Adam's whole first step
    train_by = {"optimizer": "sgd" if rounded else "adamw"}
    lanes = lanes_of(MIXED, dataset, device=device, train=train_by)
    calm = packed(lanes[:3], dataset, mode, room=lanes)
    train(calm, steps=6)
    pack = packed([lanes[0], lanes[4], lanes[2]], dataset, mode, room=lanes)
    train(pack, steps=6)
    pack.put(1, lanes[1])
    pack.begin({1: EpochStart()})
    pack.freeze(0)
    pack.freeze(2)
    for _ in range(6):
        pack.advance()
    for place in (1, 2):
        found, wanted = pack.live["weights"][place], calm.live["weights"][place]
        if rounded:
            close(found.cpu(), wanted.cpu(), rel=1e-5)
        else:
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_a_smaller_pack_goes_on_with_the_same_bits(mode):
    dataset = small_dataset(configured())
    pack, other = (packed(lanes_of(MIXED, dataset), dataset, mode) for _ in range(2))
    for one in (pack, other):
        train(one, steps=4)
    smaller = other.compact([0, 3])
    for _ in range(4):
        pack.advance()
        smaller.advance()
    for place, was in enumerate([0, 3]):
        assert torch.equal(smaller.live["weights"][place], pack.live["weights"][was])
        assert smaller.score([place]) == pack.score([was])
        assert smaller.lanes[place] is other.lanes[was]


ONE_ORDER = ({}, MIXED[1], MIXED[2], MIXED[3])
"""Lanes of one batch; by one seed for the order, they see the same windows"""


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "mlp"))
def test_lanes_of_one_order_are_those_models_alone(kind):
    dataset = small_dataset(configured())
    model = BASE["model"] | {"kind": kind}
    lanes = lanes_of(ONE_ORDER, dataset, model=model, train=BASE["train"] | {"order_seed": 5})
    pack = packed(lanes, dataset, "together")
    same_as_alone(lanes, dataset, pack, train(pack, steps=20))


VIEWS = ("slice", "select", "view", "_unsafe_view", "expand", "unsqueeze", "transpose", "detach")


def fail_in_allocation(number, least):
    """A device whose memory runs out in its so-manieth operation that takes `least` numbers."""
    names = []

    def refuse(name, result):
        if result.numel() < least or name.endswith("_") or name in VIEWS:
            return None
        names.append(name)
        return run_out_of_memory() if len(names) == number else None

    return FaultyDevice(refuse), names


@pytest.mark.parametrize("optimizers", [["adamw"], ["sgd", "rmsprop", "adam"]])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_memory_leaves_every_lane_as_it_was(mode, optimizers):
    """Whatever part of it fails: the next step is the one that it would have been."""
    dataset = small_dataset(configured())
    some = lanes_of(
        [{"train": {"optimizer": name}} for name in (*optimizers, *optimizers)], dataset
    )
    wanted = train(packed(some, dataset, mode), steps=6)
    pack = packed(some, dataset, mode)
    pack.begin({place: EpochStart() for place in range(len(some))})
    least = pack.live["weights"].numel()
    device, allocations = fail_in_allocation(0, least)  # none fails
    with device:
        pack.advance()
    before = {name: tensor.clone() for name, tensor in pack.tensors().items()}
    for number in (1, len(allocations) // 2, len(allocations)):
        device, _ = fail_in_allocation(number, least)
        with device, pytest.raises(torch.OutOfMemoryError):
            pack.advance()
        for name, tensor in pack.tensors().items():
            assert torch.equal(tensor, before[name]), name
    for _ in range(5):
        pack.advance()
    for place, losses in enumerate(wanted):
        assert pack.losses[place, :6].tolist() == losses


def test_what_does_not_fit_is_refused_by_name():
    dataset = small_dataset(configured())
    lanes = lanes_of([{}, {"model": {"pool": "mean"}, "train": {"loss": "mae"}}], dataset)
    with pytest.raises(UserError, match=r"cannot differ in model.pool, train.loss"):
        packed(lanes, dataset, "together")
    kinds = [{}, {"model": {"hidden": 4}}]
    lanes = [
        Lane(small_config(model={"kind": "transformer"} | kind.get("model", {})), {})
        for kind in kinds
    ]
    with pytest.raises(UserError, match=r"model.hidden \(of a transformer\)"):
        check_compatible(lanes)
    pack = packed(lanes_of([{"model": {"dropout": 0.0}}], dataset), dataset, "together")
    wide = {"model": {"hidden": 9}, "train": {"optimizer": "sgd", "batch": 64}}
    (lane,) = lanes_of([wide], dataset)
    with pytest.raises(UserError, match=r"hidden, train.batch, train.optimizer, model.drop"):
        pack.put(0, lane)


def test_the_validation_loss_is_the_models_own():
    from slipstream.models.forecaster import build
    from slipstream.models.losses import compute_window_losses

    dataset = small_dataset(configured(), waves(900))
    val = dataset.memory.starts["val"]
    lanes = lanes_of(MIXED[:2], dataset)
    lanes[1] = Lane(lanes[1].config, dataset.memory.starts | {"val": val[:13]})
    for mode in MODES:
        pack = packed(lanes, dataset, mode)
        found = pack.score([0, 1])
        for place, lane in enumerate(lanes):
            model = build(lane.config.model, dataset.signature)
            model.load_state_dict(pack.weights(place))
            batch = windows.gather(dataset.memory.series, lane.starts["val"])
            with torch.no_grad():
                out = model.eval()(batch.inputs, batch.static)
            wanted = compute_window_losses(out, batch.targets, lane.config.train).mean()
            close(found[place], wanted)


@pytest.mark.parametrize("kind", [slow("lstm"), slow("transformer"), "mlp"])
def test_bf16_lanes_stay_close_to_those_alone(kind):
    model = BASE["model"] | {"kind": kind, "dropout": 0.0}
    dataset = small_dataset(configured())
    lanes = lanes_of(MIXED[:2], dataset, model=model, engine={"precision": "bf16"})
    pack = packed(lanes, dataset, "together")
    for lane, losses in zip(lanes, train(pack, steps=10), strict=True):
        close(losses, run_steps(lane.config, dataset, steps=10)[0], rel=0.02)


def test_lanes_read_static_columns():
    table = waves(200).to_pydict()
    table["id"], table["k"] = [0] * 100 + [1] * 100, [0.5] * 100 + [1.5] * 100
    sections = {"data": {"static": ["k"], "id": "id"}}
    dataset = small_dataset(configured(**sections), table)
    lanes = lanes_of(MIXED[2:5], dataset, **sections)
    for mode in MODES:
        pack = packed(lanes, dataset, mode)
        same_as_alone(lanes, dataset, pack, train(pack, steps=10))


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "lstm", "mlp"))
def test_lanes_read_rows_ahead(kind):
    sections = {"data": {"future": ["b"]}, "model": BASE["model"] | {"kind": kind}}
    dataset = small_dataset(configured(**sections))
    lanes = lanes_of(MIXED[2:4], dataset, **sections)
    for mode in MODES:
        pack = packed(lanes, dataset, mode)
        same_as_alone(lanes, dataset, pack, train(pack, steps=5))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["lstm", "transformer", "mlp"])
def test_captured_packs_equal_eager_ones_to_the_bit(kind, mode, precision):
    model = BASE["model"] | {"kind": kind}
    dataset = small_dataset(configured())
    engine = {"device": "cuda", "precision": precision}
    lanes = lanes_of(MIXED[:3], dataset, model=model, engine=engine)
    rows = []
    for capture in (False, True):
        pack = packed(lanes, dataset, mode, capture=capture)
        train(pack, steps=40)
        rows.append({name: tensor.clone() for name, tensor in pack.state().items()})
        rows[-1]["scores"] = torch.tensor([pack.score([0, 1, 2]) for _ in range(5)])
        assert not pack.failures()
        pack.close()
    for name, row in rows[0].items():
        assert torch.equal(row, rows[1][name]), name


@pytest.mark.parametrize("mode", ["together", "branches"])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def test_a_closed_pack_is_gone_at_once(mode, device):
    """Its memory does not wait for the garbage collector, which may come much later."""
    config = small_config(engine={"device": device})
    dataset = small_dataset(config)
    lanes = [Lane(config.model_copy(update={"seed": s}), dataset.memory.starts) for s in (0, 1)]
    gc.collect()
    gc.disable()
    try:
        pack = packed(lanes, dataset, mode, capture=device == "cuda")
        train(pack, steps=5)
        gone = weakref.ref(pack)
        pack.close()
        assert pack.failures() == {}
        del pack
        assert gone() is None
    finally:
        gc.enable()
