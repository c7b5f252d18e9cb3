"""One row by weights in 4 to 8 bits, FP8 and 16 bits: what its PTX computes, its tiles, what a GPU computes.

On a CPU the whole kernel runs in numpy (``gluon_on_cpu.py``), its PTX instruction by instruction.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ON_GPU, relative_error, two_level
from tests.kernels.gluon_on_cpu import OnCpu, kernel_modules, run_ptx
from tests.kernels.test_linear import dequantized, fp8, int4, int8, packed, to_device
from vlfit.checkpoint.quantization import CODEBOOKS
from vlfit.kernels.gemm import one_row
from vlfit.kernels.gemm.dense import dense_linear
from vlfit.kernels.gemm.epilogue import PreNormRows, ResidualEpilogue
from vlfit.kernels.gemm.one_row import RowForm, RowTiles, dense_row_form, launch_row, row_form, row_tiles
from vlfit.kernels.gemm.quantized import quantized_linear, quantized_linear_add, quantized_linears
from vlfit.kernels.gemm.weights import (
    LOOKUP_OFFSET,
    LOOKUP_SIGN,
    QuantizedWeight,
    WeightForm,
    weight_form,
)
from vlfit.kernels.target import TargetCard, card_of, simulate_card

WORD = 0xFFFFFFFF


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def run(ptx: str, arguments: dict[str, int]) -> dict[str, int]:
    """Registers after ``ptx``."""
    found = run_ptx(ptx, {name: np.array([value & WORD], np.uint32) for name, value in arguments.items()})
    return {name: int(value[0]) for name, value in found.items() if value.shape}


def pairs(numbers: list[int], places: list[int]) -> list[int]:
    """``numbers`` at ``places`` as words of two 16-bit integers."""
    words = [numbers[place] & 0xFFFF for place in places]
    return [low | high << 16 for low, high in zip(words[::2], words[1::2], strict=True)]


IN_ORDER, EVEN_THEN_ODD = list(range(8)), [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.fixture
def row() -> list[int]:
    return torch.randint(-(2**15), 2**15, (8,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def constants() -> dict[str, str]:
    module = pytest.importorskip("vlfit.kernels.gemm.row_integers")
    return {name: each.value for name, each in module.PRODUCTS.items()}


@pytest.mark.parametrize("codebook", ["iq4nl", "e2m1"])
@pytest.mark.parametrize("first", [0, 8])
def test_codes_are_looked_up(codebook: str, first: int, row: list[int], constants: dict[str, str]) -> None:
    codes = [(first + 3 * place) % 16 for place in range(8)]
    word = sum(code << 4 * place for place, code in enumerate(codes))
    found = run(
        constants[codebook],
        dict(
            zip(
                ("$2", "$3", "$4", "$5", "$6", "$7", "$8"), (word, *pairs(row, IN_ORDER), 100, 0), strict=True
            )
        ),
    )
    total = signed((found["$0"] + found["$1"] - 100) & WORD, 32)
    sign, offset = LOOKUP_SIGN[codebook], LOOKUP_OFFSET
    expected = sum(CODEBOOKS[codebook][code] * number for code, number in zip(codes, row, strict=True))
    assert sign * (total - offset * sum(row)) == expected


def test_codes_of_four_bits(row: list[int], constants: dict[str, str]) -> None:
    codes = [15, 0, 7, 8, 1, 14, 3, 12]
    word = sum(code << 4 * place for place, code in enumerate(codes))
    values = (word, *pairs(row, EVEN_THEN_ODD), 0, 0)
    found = run(constants["nibbles"], {f"${number}": each for number, each in enumerate(values, 2)})
    even, odd = (signed(found[name], 32) for name in ("$0", "$1"))
    assert 16 * even + odd == 16 * sum(code * number for code, number in zip(codes, row, strict=True))


def test_codes_of_bytes(row: list[int], constants: dict[str, str]) -> None:
    codes = [63, 0, 31, 32, 1, 62, 17, 40]
    even, odd = (sum(code << 8 * place for place, code in enumerate(codes[first::2])) for first in (0, 1))
    values = (even, odd, *pairs(row, EVEN_THEN_ODD), 0, 0)
    found = run(constants["bytes"], {f"${number}": each for number, each in enumerate(values, 2)})
    total = signed(found["$0"], 32) + signed(found["$1"], 32)
    assert total == sum(code * number for code, number in zip(codes, row, strict=True))


def test_signed_bytes(row: list[int], constants: dict[str, str]) -> None:
    codes = [-128, 127, 0, -1, 1, -64, 100, -100]
    words = [int.from_bytes(bytes(code & 0xFF for code in codes[at : at + 4]), "little") for at in (0, 4)]
    values = (*words, *pairs(row, IN_ORDER), 0)
    found = run(constants["signed bytes"], {f"${number}": each for number, each in enumerate(values, 1)})
    assert signed(found["$0"], 32) == sum(code * number for code, number in zip(codes, row, strict=True))


# --- which matrices, by which tiles -------------------------------------------------------------------------


def on_card(weights: QuantizedWeight, dtype: torch.dtype = torch.bfloat16, rows: int = 1) -> RowTiles | None:
    """The tiles for ``rows`` rows by ``weights`` on a card of 30 multiprocessors; None: not in integers."""
    x = torch.empty(rows, weights.in_features, dtype=dtype, device="meta")
    with simulate_card(TargetCard((8, 9), multiprocessors=30)):
        form = row_form(x, weights, None)
    return None if form is None else form.tiles


# By outputs and inputs.
TAKEN: dict[str, Callable[[int, int], QuantizedWeight]] = {
    "int4, groups of 32": lambda outputs, inputs: int4(outputs, inputs, 32),
    "int4, a scale a row": lambda outputs, inputs: int4(outputs, inputs, inputs),
    "int4, zero points": lambda outputs, inputs: int4(outputs, inputs, 64, symmetric=False),
    "int8, a scale a row": int8,
    "Q6_K": lambda outputs, inputs: two_level(6, outputs, inputs, 16, 256, affine=False),
    "Q4_K": lambda outputs, inputs: two_level(4, outputs, inputs, 32, 256, affine=True),
    "NVFP4": lambda outputs, inputs: packed(4, outputs, inputs, 16, "e2m1"),
}
LEFT: dict[str, Callable[[], QuantizedWeight]] = {
    "inputs of no 32": lambda: int8(64, 200),
    "groups of no power of two": lambda: int8(64, 144, 4),
    "groups of 16 with scales of 32 bits": lambda: packed(4, 64, 512, 16, None, torch.float32),
    "more inputs than shared memory holds": lambda: int8(8, one_row.MAX_INPUTS + 32),
}


@pytest.mark.parametrize("name", TAKEN)
def test_one_row_is_multiplied_in_integers(name: str) -> None:
    weights = TAKEN[name](64, 512)
    assert on_card(weights) is not None
    assert on_card(weights, rows=2) is None
    assert on_card(weights, torch.float32) is None


@pytest.mark.parametrize("name", LEFT)
def test_others_are_not(name: str) -> None:
    assert on_card(LEFT[name]()) is None


def test_no_card_no_integers() -> None:
    assert row_form(torch.empty(1, 512, dtype=torch.bfloat16), int4(64, 512, 32), None) is None


@pytest.mark.parametrize("multiprocessors", [0, 1, 20, 30, 132, 10_000])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (2560, 9728), (19456, 2560), (151936, 4096)])
def test_tiles_fit_any_card(outputs: int, inputs: int, multiprocessors: int) -> None:
    """Programs with outputs for each warp, and no more of them than there is to do."""
    for make in TAKEN.values():
        form = row_form_of(make(64, 512))
        tiles = row_tiles(form, outputs, inputs, multiprocessors)
        assert tiles.warps in (8, 16)
        assert tiles.warps % tiles.warps_k == 0
        assert 4 <= tiles.outputs <= 64
        assert 1 <= tiles.ahead <= 8
        assert tiles.programs * tiles.warps * 32 <= 1536  # threads of a multiprocessor


@pytest.mark.parametrize("multiprocessors", [1, 30, 132])
@pytest.mark.parametrize("inputs", [64, 2048, 4096, 9728, 32768])
def test_programs_of_floats_fit_any_card(inputs: int, multiprocessors: int) -> None:
    """Outputs for each warp, and no more threads than a multiprocessor has."""
    x = torch.empty(1, inputs, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, inputs, dtype=torch.bfloat16, device="meta")
    codes = torch.empty(4096, inputs, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(4096, 1, device="meta")
    with simulate_card(TargetCard((8, 9), multiprocessors=multiprocessors)):
        forms = [
            dense_row_form(x, weight, None),
            row_form(x, QuantizedWeight(codes, scale, None, (1, inputs)), None),
        ]
    for form in forms:
        assert form is not None
        assert form.tiles.warps % form.tiles.warps_k == 0
        assert form.tiles.outputs % 2 == 0
        assert form.tiles.programs * form.tiles.warps * 32 <= 1536


def row_form_of(weights: QuantizedWeight) -> WeightForm:
    return weight_form(weights, native_fp8=False)


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
def test_fp8_and_16_bits_are_multiplied_as_floats(capability: tuple[int, int]) -> None:
    """FP8 where instructions convert it; matrices that are not whole words, and other dtypes, elsewhere."""
    x = torch.empty(1, 512, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(64, 512, dtype=torch.bfloat16, device="meta")
    with simulate_card(TargetCard(capability, multiprocessors=30)):
        assert (row_form(x, fp8(64, 512, (128, 128)), None) is not None) == (capability >= (8, 9))
        assert row_form(x[:, :200], fp8(64, 200, (128, 128)), None) is None
        for scale_k in (16, 32, 96):
            assert row_form(x, fp8(64, 512, (1, scale_k)), None) is None
        many = torch.empty(1, one_row.MAX_INPUTS + 64, dtype=torch.bfloat16, device="meta")
        assert row_form(many, fp8(8, many.shape[1], (128, 128)), None) is None
        assert (
            dense_row_form(many, torch.empty(8, many.shape[1], dtype=many.dtype, device="meta"), None) is None
        )
        form = dense_row_form(x, weight, None)
        assert form is not None
        assert form.floats
        assert dense_row_form(x.expand(2, -1), weight, None) is None
        assert dense_row_form(x, weight.float(), None) is None
        shifted = torch.empty(64 * 512 + 1, dtype=torch.bfloat16, device="meta")[1:].view(64, 512)
        assert dense_row_form(x, shifted, None) is None
        assert dense_row_form(x[:, :100], weight[:, :100], None) is None


def test_tiles_are_chosen_by_multiprocessors() -> None:
    form = row_form_of(int4(64, 512, 32))
    assert row_tiles(form, 2560, 4096, 30).warps_k == 1
    assert row_tiles(form, 2560, 4096, 132).warps_k == 2


def test_a_card_whose_multiprocessors_are_unknown_counts_as_large() -> None:
    """As in attention and in the other products."""
    form = row_form_of(fp8(64, 512, (128, 128)))
    unknown, large, small = (row_tiles(form, 2560, 9728, count) for count in (0, 132, 30))
    assert unknown == large != small


# --- the kernel, in numpy -----------------------------------------------------------------------------------

MODULES = [f"vlfit.kernels.gemm.{name}" for name in ("row_integers", "row_floats", "one_row_kernels")]
FLOATS: dict[str, Callable[[int, int], QuantizedWeight | Tensor]] = {
    "bfloat16": lambda outputs, inputs: torch.randn(outputs, inputs).bfloat16(),
    "float16": lambda outputs, inputs: torch.randn(outputs, inputs).half(),
    "FP8, blocks of 128": lambda outputs, inputs: fp8(outputs, inputs, (128, 128)),
    "FP8, a scale a row": lambda outputs, inputs: fp8(outputs, inputs, (1, inputs)),
}
SOME_TILES = [
    RowTiles(8, 1, 2, 4, 3),
    RowTiles(8, 1, 4, 3, 2),
    RowTiles(8, 2, 2, 2, 0),
    RowTiles(8, 4, 2, 8, 2),
    RowTiles(16, 4, 2, 4, 1),
    RowTiles(8, 2, 1, 8, 2),
    RowTiles(4, 1, 2, 8, 3),
    RowTiles(4, 1, 4, 4, 4),
]


def uneven(name: str) -> QuantizedWeight | Tensor:
    """Weights of a form of ``TAKEN`` or ``FLOATS`` whose inputs fill no whole step."""
    inputs = {"Q4_K": 2816, "Q6_K": 2816, "int4, zero points": 2880}.get(name, 2848)
    return (TAKEN | FLOATS)[name](200, inputs)


def row_of(weights: QuantizedWeight | Tensor) -> Tensor:
    """A random row for ``weights``, in their dtype if they are in 16 bits, else in bfloat16."""
    dtype = weights.dtype if isinstance(weights, Tensor) else torch.bfloat16
    return torch.randn(1, inputs_of(weights)).to(dtype)


def inputs_of(weights: QuantizedWeight | Tensor) -> int:
    return weights.shape[1] if isinstance(weights, Tensor) else weights.in_features


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Kernels that run here, on a card of one multiprocessor; ``tiles``: None for the ones chosen."""
    pytest.importorskip("triton")
    chosen = SimpleNamespace(tiles=None, multiprocessors=1)
    choose = row_tiles
    monkeypatch.setattr(one_row, "row_tiles", lambda *facts: chosen.tiles or choose(*facts))
    monkeypatch.setattr(one_row, "card_of", lambda _: TargetCard((9, 0), "", chosen.multiprocessors))
    monkeypatch.setattr(one_row, "pdl_options", lambda _: {"USE_PDL": False})
    with kernel_modules(*MODULES) as made:
        module = made[MODULES[-1]]
        for name in ("one_row_kernel", "two_matrices_kernel"):
            kernel = OnCpu(module, name)
            monkeypatch.setattr(module, name, kernel)
            setattr(chosen, name, kernel)
        yield chosen


def form_of(x: Tensor, weights: QuantizedWeight | Tensor, bias: Tensor | None = None) -> RowForm:
    form = dense_row_form(x, weights, bias) if isinstance(weights, Tensor) else row_form(x, weights, bias)
    assert form is not None
    return form


def wide(weights: QuantizedWeight | Tensor) -> Tensor:
    return weights.double() if isinstance(weights, Tensor) else dequantized(weights)


def on_meta(weights: QuantizedWeight | Tensor) -> QuantizedWeight | Tensor:
    meta = torch.device("meta")
    return weights.to(meta) if isinstance(weights, Tensor) else to_device(weights, meta)


@pytest.mark.parametrize("name", [*TAKEN, *FLOATS])
def test_a_gate_and_its_factor_are_in_one_lane(name: str) -> None:
    """Else SwiGLU does not compile; whatever card and layer."""
    weights = (TAKEN | FLOATS)[name](256, 2560)
    with simulate_card(TargetCard((9, 0), "", 30)):
        form = form_of(row_of(weights).to("meta"), on_meta(weights)).weights
    for outputs, inputs in itertools.product((512, 4096, 27648), (1024, 2560, 5120, 12288, 32768)):
        for multiprocessors in (0, 1, 20, 30, 60, 132):
            assert row_tiles(form, outputs, inputs, multiprocessors, True).lane_outputs % 2 == 0


def test_tiles_of_one_output_a_lane_refuse_swiglu() -> None:
    with simulate_card(TargetCard((9, 0), "", 30)):
        x = torch.empty(1, 512, dtype=torch.bfloat16, device="meta")
        weights = on_meta(fp8(64, 512, (128, 128)))
        assert isinstance(weights, QuantizedWeight)
        form = row_form(x, weights, None, RowTiles(8, 2, 1, 8, 2))
        assert form is not None
        with pytest.raises(ValueError, match="SwiGLU"):
            launch_row(x, weights, None, x[:, :32], form, swiglu=True)


def multiplied(x: Tensor, weights: QuantizedWeight | Tensor, bias: Tensor | None = None) -> Tensor:
    """What the kernel computes; an output that no program stores is NaN."""
    outputs = len(weights) if isinstance(weights, Tensor) else weights.out_features
    out = torch.full((1, outputs), float("nan"), dtype=x.dtype)
    launch_row(x, weights, bias, out, form_of(x, weights, bias))
    return out


# Each form by the tiles that are chosen for it and by every other of the rest, each of those for half of the
# forms; what is left is slow.
FORMS_AND_TILES = [
    pytest.param(name, tiles, id=f"{name}-{tiles}", marks=[pytest.mark.slow] if tiles and skipped else [])
    for first, name in enumerate([*TAKEN, *FLOATS])
    for place, tiles in enumerate([None, *SOME_TILES])
    for skipped in [(first + place) % 2]
]


@pytest.mark.parametrize(("name", "tiles"), FORMS_AND_TILES)
def test_the_kernel_multiplies(name: str, tiles: RowTiles | None, kernels: SimpleNamespace) -> None:
    """Against float64, wherever tiles and steps end, with a program for each tile and with fewer."""
    torch.manual_seed(0)
    kernels.tiles = tiles
    weights = uneven(name)
    x = row_of(weights)
    bias = torch.randn(200).to(x.dtype)
    expected = x.double() @ wide(weights).T
    in_turn = multiplied(x, weights)
    assert relative_error(in_turn, expected) < 4e-3
    assert relative_error(multiplied(x, weights, bias), expected + bias.double()) < 4e-3
    kernels.multiprocessors = 1000
    assert torch.equal(multiplied(x, weights), in_turn)
    (few, _), _, (many, constants) = kernels.one_row_kernel.launches
    assert constants["ONE_TILE"]
    assert tiles is None or tiles.programs == 0 or few < many


@pytest.mark.parametrize("multiprocessors", [1, 3, 1000])
@pytest.mark.parametrize("name", ["Q4_K", "int8, a scale a row", "bfloat16", "FP8, blocks of 128"])
def test_what_is_fused_to_it(name: str, multiprocessors: int, kernels: SimpleNamespace) -> None:
    """The residual and the next norm in the epilogue; that norm in the prologue; SwiGLU."""
    torch.manual_seed(0)
    kernels.multiprocessors = multiprocessors
    make = (TAKEN | FLOATS)[name]
    x, hidden = torch.randn(1, 512).bfloat16(), torch.randn(1, 256).bfloat16()
    norm = torch.rand(256).bfloat16()
    weights = make(256, 512)
    expected = hidden.double() + x.double() @ wide(weights).T
    residual = ResidualEpilogue(hidden, norm, 0.5)
    form = form_of(x, weights)
    rows = residual.allocate_prenorm(form.tiles.outputs, form.tiles.warps_n)
    launch_row(x, weights, None, hidden, form, residual=residual, prenorm=rows)
    assert relative_error(hidden, expected) < 4e-3
    assert relative_error(rows.square_sums.sum(), hidden.double().square().sum()) < 1e-4
    assert relative_error(rows.rows, hidden.double() * norm.double()) < 4e-3

    following = make(140, 256)
    normed = hidden.double() * torch.rsqrt(hidden.double().square().mean() + 0.5) * norm.double()
    gate, up = (normed @ wide(following).T).chunk(2, dim=1)
    out = torch.full((1, 70), float("nan"), dtype=x.dtype)
    prenorm = PreNormRows(rows.rows, rows.square_sums, 0.5)
    launch_row(prenorm, following, None, out, form_of(rows.rows, following), swiglu=True)
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < 1.5e-2


@pytest.mark.parametrize(
    ("inputs", "block"), [(16, (1, 16)), (80, (128, 80)), (208, (1, 64)), (208, (64, 192))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_of_fp8(
    inputs: int, block: tuple[int, int], dtype: torch.dtype, kernels: SimpleNamespace
) -> None:
    """One scale for a short row, and blocks within which the row ends."""
    torch.manual_seed(0)
    weights = fp8(70, inputs, block)
    x = torch.randn(1, inputs).to(dtype)
    assert relative_error(multiplied(x, weights), x.double() @ dequantized(weights).T) < 4e-3


@pytest.mark.parametrize("name", FLOATS)
def test_floats_that_are_large_small_or_none(name: str, kernels: SimpleNamespace) -> None:
    """Inputs take nothing from much larger ones; zeros stay zeros; NaN and infinity are not hidden."""
    torch.manual_seed(0)
    weights = FLOATS[name](64, 256)
    x = torch.zeros_like(row_of(weights))
    assert not multiplied(x, weights).any()
    x[0, :64], x[0, 64:] = 3e3, 1e-3
    assert relative_error(multiplied(x, weights), x.double() @ wide(weights).T) < 4e-3
    x[0, :64] = 0
    assert relative_error(multiplied(x, weights), x.double() @ wide(weights).T) < 4e-3
    for bad in (float("nan"), float("inf")):
        x[0, 100] = bad
        assert not torch.isfinite(multiplied(x, weights)).any()


def test_a_product_is_of_the_dtype_of_its_row(kernels: SimpleNamespace) -> None:
    weights = FLOATS["bfloat16"](64, 256)
    assert isinstance(weights, Tensor)
    x = row_of(weights)
    with pytest.raises(TypeError):
        launch_row(x, weights, None, torch.empty(1, 64, dtype=torch.float16), form_of(x, weights))


@pytest.mark.parametrize("multiprocessors", [1, 4, 1000])
def test_two_matrices_at_once(multiprocessors: int, kernels: SimpleNamespace) -> None:
    torch.manual_seed(0)
    kernels.multiprocessors = multiprocessors
    layers = [(TAKEN["Q4_K"](300, 512), torch.randn(300).bfloat16()), (TAKEN["Q6_K"](100, 512), None)]
    x = torch.randn(1, 512).bfloat16()
    found = quantized_linears(x, layers)
    for part, (weights, bias) in zip(found.split((300, 100), dim=1), layers, strict=True):
        added = 0 if bias is None else bias.double()
        assert relative_error(part, x.double() @ dequantized(weights).T + added) < 4e-3
    assert len(kernels.two_matrices_kernel.launches) == 1


@pytest.mark.parametrize("multiprocessors", [1, 1000])
@pytest.mark.parametrize("name", ["bfloat16", "FP8, blocks of 128", "int4, groups of 32"])
def test_each_weight_is_loaded_once(name: str, multiprocessors: int, kernels: SimpleNamespace) -> None:
    """Also where the last tile of a program has none after it."""
    kernels.multiprocessors, kernels.tiles = multiprocessors, RowTiles(8, 1, 2, 4, 1)
    weights = (TAKEN | FLOATS)[name](320, 2816)
    multiplied(torch.randn(1, 2816).bfloat16(), weights)
    codes = weights if isinstance(weights, Tensor) else weights.codes
    assert kernels.one_row_kernel.loaded[codes.data_ptr()] == codes.nbytes


def test_programs_are_as_many_as_fit(kernels: SimpleNamespace) -> None:
    """Else one would wait for another to end: registers are limited where tiles are multiplied in turn."""
    kernels.multiprocessors, kernels.tiles = 2, RowTiles(8, 1, 2, 4, 3)
    multiplied(torch.randn(1, 512).bfloat16(), TAKEN["Q4_K"](200, 512))
    programs, constants = kernels.one_row_kernel.launches[0]
    assert programs == 6
    assert constants["maxnreg"] * 3 * 8 * 32 <= 65536
    multiplied(torch.randn(1, 25600).bfloat16(), TAKEN["int8, a scale a row"](128, 25600))
    assert kernels.one_row_kernel.launches[1][0] == 2  # each holds 57,600 bytes of the row


# --- on a GPU -----------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
ALL_TILES = [
    RowTiles(8, 1, 2, 4, 3),
    RowTiles(8, 1, 4, 3, 2),
    RowTiles(8, 2, 2, 2, 0),
    RowTiles(8, 4, 2, 2, 3),
    RowTiles(16, 1, 2, 4, 1),
    RowTiles(16, 4, 2, 4, 1),
    RowTiles(8, 2, 1, 8, 2),
    RowTiles(4, 1, 2, 8, 3),
    RowTiles(4, 1, 4, 4, 4),
    RowTiles(4, 1, 2, 4, 0),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("multiprocessors", [1, 1000])
@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_every_tile_gives_the_same(
    name: str,
    tiles: RowTiles,
    multiprocessors: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against float64, in turn and one a program, wherever tiles and steps end."""
    torch.manual_seed(0)
    weights = uneven(name)
    assert isinstance(weights, QuantizedWeight)
    monkeypatch.setattr(one_row, "row_tiles", lambda *_: tiles)
    card = replace(card_of(device) or TargetCard((9, 0)), multiprocessors=multiprocessors)
    monkeypatch.setattr(one_row, "card_of", lambda _: card)
    on_device = to_device(weights, device)
    x = torch.randn(1, weights.in_features, device=device, dtype=torch.bfloat16)
    found = quantized_linear(x, on_device, None)
    expected = x.double().cpu() @ dequantized(weights).T
    assert relative_error(found.cpu(), expected) < 4e-3
    assert torch.equal(found, quantized_linear(x, on_device, None))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tiles", [*ALL_TILES, RowTiles(8, 4, 2, 8, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_floats_by_every_tile(
    dtype: torch.dtype, tiles: RowTiles, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(one_row, "row_tiles", lambda *_: tiles)
    card = replace(card_of(device) or TargetCard((9, 0)), multiprocessors=1)  # tiles are multiplied in turn
    monkeypatch.setattr(one_row, "card_of", lambda _: card)
    x = torch.randn(1, 2832, device=device, dtype=dtype)
    dense = torch.randn(70, 2832, device=device, dtype=dtype)
    expected = x.double() @ dense.double().T
    assert relative_error(dense_linear(x, dense, None).cpu(), expected.cpu()) < 4e-3
    if torch.cuda.get_device_capability(device) < (8, 9):
        return
    for weights in (fp8(70, 2832, (128, 128)), fp8(70, 2832, (1, 2832))):
        found = quantized_linear(x, to_device(weights, device), None)
        assert relative_error(found.cpu(), x.double().cpu() @ dequantized(weights).T) < 4e-3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_that_are_large_small_or_none(dtype: torch.dtype, device: torch.device) -> None:
    """A group takes nothing from another; zeros stay zeros; NaN and infinity are not hidden."""
    weights = to_device(int8(16, 128, 4), device)
    x = torch.zeros(1, 128, device=device, dtype=dtype)
    assert not quantized_linear(x, weights, None).any()
    x[0, :32], x[0, 32:64] = 3e4, 1e-3
    codes = weights.codes.double() * weights.scale.double().repeat_interleave(32, 1)
    small = x.clone()
    small[0, :32] = 0
    assert (
        relative_error(quantized_linear(small, weights, None).cpu(), (small.double() @ codes.T).cpu()) < 4e-3
    )
    for bad in (float("nan"), float("inf")):
        x[0, 100] = bad
        assert not torch.isfinite(quantized_linear(x, weights, None)).any()


@pytest.mark.gpu
@needs_gpu
def test_residual_and_norm(device: torch.device) -> None:
    """What the epilogue adds, and what the next product's prologue reads of it."""
    torch.manual_seed(0)
    weights, following = (to_device(int4(outputs, 512, 32), device) for outputs in (512, 70))
    x = torch.randn(1, 512, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(1, 512, device=device, dtype=torch.bfloat16)
    norm = torch.rand(512, device=device, dtype=torch.bfloat16)
    total = hidden.float() + quantized_linear(x, weights, None).float()
    rows = quantized_linear_add(x, weights, None, ResidualEpilogue(hidden, norm, 1e-6))
    assert relative_error(hidden.cpu(), total.cpu()) < 4e-3
    normed = hidden.float() * torch.rsqrt(hidden.float().pow(2).mean() + 1e-6) * norm.float()
    found = quantized_linear(rows, following, None)
    assert relative_error(found.cpu(), quantized_linear(normed.bfloat16(), following, None).cpu()) < 8e-3
