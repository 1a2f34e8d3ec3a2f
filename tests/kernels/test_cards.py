"""The kernels compiled for cards that are not here: what they need is what the cards have."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import NamedTuple

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from slipstream.kernels import adam, counter_rng, dropout, layer_norm, short_attention  # noqa: E402
from slipstream.kernels.rnn import (  # noqa: E402
    cell,
    fused,
    fused_kernels,
    gradients,
    weight_gradients,
    wide,
    wide_kernels,
)
from slipstream.models import noise as rng  # noqa: E402

pytestmark = pytest.mark.slow


class Card(NamedTuple):
    name: str
    capability: int
    shared: int
    """Bytes that one program may take"""

    def __str__(self) -> str:
        return self.name


CARDS = [
    Card("A100", 80, 166_912),
    Card("RTX 3090", 86, 101_376),
    Card("RTX 4090 and 4060 Laptop", 89, 101_376),
    Card("H100 and H200", 90, 232_448),
]
TURING = Card("RTX 2080 Ti", 75, 65_536)
REGISTERS = 65_536
THREADS = 768
"""That a processor runs at once at least, of kernels that wait for memory"""
MAX_SPILLED = 128
"""Bytes of stack"""
HALF = ("y", "final", "factors", "carry", "slots", "dy")
FULL = ("x", "w_ih", "w_hh", "b_ih", "b_hh", "h0", "c0", "dh0", "dc0", "out_h", "out_x", "out_bias")
COUNTS, STRIDES = (
    ("T", "B", "rows", "share", "apart"),
    ("ih_lane", "hh_lane", "b_ih_lane", "b_hh_lane"),
)
TYPES = dict.fromkeys(HALF, "*fp16") | dict.fromkeys(FULL, "*fp32")
TYPES |= dict.fromkeys(COUNTS, "i32") | dict.fromkeys(STRIDES, "i64")
COMMON = {"W": 1, "PRECISION": "tf32"}


class Needs(NamedTuple):
    shared: int
    registers: int
    """Of one thread"""
    stack: int
    calls: int


def compiled(kernel, card, constants, *, warps, stages=3, types=TYPES):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    used = {name: value for name, value in constants.items() if name in names}
    source = ASTSource(kernel, signature, constexprs=used, attrs=aligned)
    target = GPUTarget("cuda", card.capability, 32)
    made = triton.compile(source, target, options={"num_warps": warps, "num_stages": stages})
    cubin = made.asm["cubin"]
    found = re.search(r"REG:(\d+) STACK:(\d+)", _seen_by("-res-usage", cubin))
    calls = _seen_by("-sass", cubin).count("RET.")
    return Needs(made.metadata.shared, int(found[1]), int(found[2]), calls)


def _seen_by(flag, cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize(
    ("kind", "H", "D"),
    [("lstm", 128, 4), ("gru", 128, 200), ("lstm", 100, 40), ("gru", 64, 10)],
)
def test_a_layer_fits(card, kind, H, D):
    inside, forward, backward = fused.fit_tiles(H, D, 2, room=card.shared, many=True)
    HP, DP = gradients.round_up(H), gradients.round_up(D) if inside else 16
    constants = {"D": D if inside else 1, "DP": DP, "H": HP, "LSTM": kind == "lstm"}
    constants |= COMMON | {
        "FUSE_INPUT": inside,
        "STATES": kind == "lstm",
        "LAST": False,
        "SAVE": True,
        "FAST": True,
    }
    types = TYPES if inside else TYPES | {"x": "*fp16"}
    told = {
        fused_kernels.forward: (forward, fused.forward_bytes(forward, HP, DP * inside, 2)),
        fused_kernels.backward: (backward, fused.backward_bytes(backward, HP, 2)),
    }
    for kernel, (tile, most) in told.items():
        if tile.resident < 4:
            types = types | {"w_hh": "*fp16"}
        cut = {"RESIDENT": tile.resident, "BM": tile.windows, "STAGES": tile.stages}
        needs = compiled(kernel, card, constants | cut, warps=tile.warps, types=types)
        assert needs.shared <= most <= card.shared, kernel
        assert needs.registers * 32 * tile.warps <= REGISTERS
        assert needs.stack <= MAX_SPILLED, kernel
        assert needs.calls == 0, kernel


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_weight_gradients_fit(card):
    columns = gradients.fit_columns(card.shared)
    assert columns == (gradients.COLUMNS if card.shared > 150_000 else gradients.FEWER_COLUMNS)
    for H, D, of_h, of_x in (
        *((128, 4, True, True), (128, 200, True, False), (64, 10, True, True)),
        (128, 256, False, True),
    ):
        wide = 16 if of_h else columns
        constants = {"H": H, "HP": gradients.round_up(H), "D": D, "DP": wide, "ROW": D}
        constants |= {
            "LSTM": True,
            "OF_H": of_h,
            "OF_X": of_x,
            "BR": gradients.ROWS,
            "BC": gradients.SLOT_COLUMNS,
        }
        constants |= COMMON
        types = TYPES if of_h else TYPES | {"x": "*fp16"}  # of the layer below
        needs = compiled(weight_gradients.weight_gradients, card, constants, warps=8, types=types)
        assert needs.shared <= card.shared
        assert needs.registers * 32 * 8 <= REGISTERS
        assert needs.stack <= MAX_SPILLED
        assert needs.calls == 0  # a call in a loop of products spoils them


OF_STEPS = ("product", "x", "y", "out", "dy", "slots", "carry")
STEP_TYPES = dict.fromkeys(("bias", "state"), "*fp32") | dict.fromkeys(("t", "T", "B"), "i32")
STEP_TYPES |= dict.fromkeys(("dy_lane", "dy_time", "dy_row"), "i64")
STEPS = [
    *(cell.lstm_forward, cell.gru_forward),
    *(cell.lstm_backward, cell.gru_backward),
]


@pytest.mark.parametrize(
    ("kind", "H", "W", "card"),
    [
        ("fp16", 256, 1, CARDS[-1]),
        *(("fp16", 256, 1, card) for card in (TURING, *CARDS[:-1])),
        *(("bf16", 136, 2, card) for card in (TURING, CARDS[-1])),
        *(("fp32", 300, 2, card) for card in (TURING, CARDS[-1])),
    ],
    ids=str,
)
def test_a_step_takes_no_shared_memory_and_calls_nothing(kind, H, W, card):
    constants = {"H": H, "W": W, "IN_TIME_ORDER": True, "SAVE": True, "LAST": True}
    constants |= {"FAST": kind != "fp32", "BLOCK": cell.BLOCK}
    types = STEP_TYPES | dict.fromkeys(OF_STEPS, f"*{kind}")
    for kernel in STEPS:
        needs = compiled(kernel, card, constants, warps=cell.WARPS, types=types)
        assert needs.shared == 0, kernel
        assert needs.stack == 0, kernel
        assert needs.calls == 0, kernel
        assert needs.registers <= REGISTERS // THREADS, kernel


SPLIT_TYPES = STEP_TYPES | dict.fromkeys(("x", "hh", "y", "out", "slots", "grads"), "*fp16")
SPLIT_TYPES |= dict.fromkeys(("carry", "dy"), "*fp16") | {"counters": "*i32"}


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize(("kind", "H", "W"), [("lstm", 256, 1), ("gru", 200, 2), ("lstm", 512, 1)])
def test_a_split_layer_fits(card, kind, H, W):
    cut = [tile for tile in wide.TILES if wide.shared_bytes(tile, H, 2) <= card.shared]
    assert cut or H == 512
    HP = triton.next_power_of_2(H)
    constants = {"H": H, "HP": HP, "W": W, "LSTM": kind == "lstm", "IN_TIME_ORDER": W == 2}
    constants |= {"SAVE": True, "FAST": True, "LAST": False}
    for tile in cut:
        constants |= {"N": tile.units, "BM": tile.windows}
        for kernel in (wide_kernels.split_forward, wide_kernels.split_backward):
            needs = compiled(kernel, card, constants, warps=tile.warps, types=SPLIT_TYPES)
            assert needs.shared <= wide.shared_bytes(tile, H, 2), kernel
            assert needs.registers * 32 * tile.warps <= REGISTERS, kernel
            assert needs.stack == 0, kernel
            assert needs.calls == 0, kernel


def test_a_layer_is_split_where_all_programs_run_at_once():
    h200 = wide.GpuLimits(132, 232_448, 233_472)
    laptop = wide.GpuLimits(24, 101_376, 102_400)
    small, large = wide.TILES
    assert wide.fit_tile(1, 256, 256, 2, h200) == small  # 8 * 16 programs
    assert wide.fit_tile(1, 512, 256, 2, h200) == small  # two on each processor
    assert wide.fit_tile(16, 64, 256, 2, h200) == large  # 4 * 2 * 16
    assert wide.fit_tile(17, 64, 256, 2, h200) is None
    assert wide.fit_tile(1, 128, 512, 2, h200) == small
    assert wide.fit_tile(1, 16, 513, 2, h200) is None
    assert wide.fit_tile(1, 16, 256, 4, h200) is None
    assert wide.fit_tile(1, 48, 256, 2, laptop) == small
    assert wide.fit_tile(1, 64, 256, 2, laptop) is None
    assert wide.fit_tile(1, 16, 512, 2, laptop) is None


NORM_TYPES = dict.fromkeys(("weight", "bias", "sums"), "*fp32") | dict.fromkeys(
    ("rows", "share", "weight_lane", "bias_lane"), "i32"
)
DRAW_TYPES = dict.fromkeys(("size", "batch", "key_lane", "key_window"), "i32")
DRAW_TYPES |= {"keys": "*i64", "site": "i64"}


@pytest.mark.parametrize("card", [CARDS[-1], TURING, CARDS[1]], ids=str)
@pytest.mark.parametrize("sizes", [[("fp32", 64)], [("fp16", 256), ("fp16", 2048)]])
def test_norms_and_draws_fit(card, sizes):
    for kind, D in sizes:
        types = NORM_TYPES | dict.fromkeys(("x", "out", "dy", "dx"), f"*{kind}")
        for kernel in (layer_norm.forward, layer_norm.backward):
            constants = {"D": D, "EPS": 1e-5, **layer_norm._tile_of(D)}
            needs = compiled(kernel, card, constants, warps=4, types=types)
            assert needs.shared <= card.shared
            assert needs.stack == 0
    for kind, signed in (("i64", False), ("fp32", False), ("fp32", True)):
        constants = {"MIX": rng.MIX, "BITS": rng.BITS, "SIGNED": signed, "BLOCK": counter_rng.BLOCK}
        types = DRAW_TYPES | {"out": f"*{kind}"}
        needs = compiled(counter_rng._draw, card, constants, warps=4, types=types)
        assert (needs.shared, needs.stack) == (0, 0)


ADAM_TYPES = dict.fromkeys(("weights", "grads", "first", "second"), "*fp32")
ADAM_TYPES |= dict.fromkeys(("lr", "decay", "count", "divisor"), "*fp32") | {"moves": "*i1"}
ADAM_TYPES |= dict.fromkeys(("P", "row", "grad_row"), "i32")
DROP_TYPES = {"keys": "*i64", "rates": "*fp32", "B": "i32", "rows": "i32"}


@pytest.mark.parametrize("card", [CARDS[-1], TURING], ids=str)
def test_updates_and_dropout_take_no_shared_memory(card):
    constants = {"BETA1": 0.9, "BETA2": 0.999, "LOG1": -0.1, "LOG2": -0.001, "EPSILON": 1e-8}
    constants |= {"DECOUPLED": True, "PIECE": adam.MAX_PIECE, "BLOCK": adam.BLOCK}
    needs = compiled(adam._adam, card, constants, warps=4, types=ADAM_TYPES)
    assert (needs.shared, needs.stack) == (0, 0)
    numbers = {"MIX": rng.MIX, "UNIT": 3, "SITE": 5, "LAST": 7, "DIRECTION": 11, "DIRECTIONS": 1}
    for kind, D in (("fp16", 64), ("fp32", 200)):
        wide = triton.next_power_of_2(D)
        constants = numbers | {"D": D, "DP": wide, "BR": dropout.ELEMENTS // wide}
        types = DROP_TYPES | dict.fromkeys(("x", "out"), f"*{kind}")
        needs = compiled(dropout._drop, card, constants, warps=4, types=types)
        assert (needs.shared, needs.stack) == (0, 0)


ATTENTION_TYPES = dict.fromkeys(("T", "B"), "i32")


@pytest.mark.parametrize(
    ("kind", "T", "D", "precision", "card"),
    [
        ("fp16", 20, 8, "tf32", CARDS[-1]),
        *(("fp16", 20, 8, "tf32", card) for card in CARDS[:-1]),
        *(("fp16", 64, 64, "tf32", card) for card in CARDS),
        *(("fp32", 64, 32, "tf32", card) for card in CARDS),
        ("bf16", 12, 5, "tf32", CARDS[1]),
        ("fp16", 32, 64, "tf32", CARDS[1]),
        ("fp32", 32, 64, "tf32", CARDS[1]),
        ("fp32", 32, 64, "ieee", CARDS[1]),
        ("fp32", 64, 32, "ieee", CARDS[1]),
    ],
    ids=str,
)
def test_attention_fits(kind, T, D, precision, card):
    size = 4 if kind == "fp32" else 2
    assert short_attention.fits(T, D, size)
    types = ATTENTION_TYPES | dict.fromkeys(("joined", "out", "dout", "grad"), f"*{kind}")
    constants = short_attention.launch_options(T, D, 4, size, precision)
    warps = constants.pop("num_warps")
    for kernel in (short_attention.attention_forward, short_attention.attention_backward):
        needs = compiled(kernel, card, constants, warps=warps, types=types)
        assert needs.shared <= card.shared, kernel
        assert needs.registers * 32 * warps <= REGISTERS, kernel
        assert needs.stack == 0, kernel
        assert needs.calls == 0, kernel


def test_attention_too_long_or_wide_is_left_to_torch():
    assert short_attention.fits(64, 64, 2)
    assert not short_attention.fits(65, 64, 2)
    assert not short_attention.fits(64, 65, 2)
    assert not short_attention.fits(33, 33, 4)
    assert not short_attention.fits(8, 8, 8)


def test_turing_is_left_to_cudnn():
    assert (
        fused.fit_tiles(128, 4, 2, room=0, many=False) is None
    )  # what `choose` passes before Ampere


def test_what_is_too_wide_is_left_to_others():
    assert fused.fit_tiles(129, 4, 2, room=232_448, many=False) is None
    assert fused.fit_tiles(128, 4, 4, room=232_448, many=False) is None
    assert fused.fit_tiles(64, 4, 4, room=232_448, many=False) is not None
