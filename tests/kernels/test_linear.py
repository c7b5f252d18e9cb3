"""GEMMs with FP8, int8 and int4 weights against float64 with weights dequantized by definition."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error, two_level
from vlfit.kernels.gemm import quantized as kernels
from vlfit.kernels.gemm.dense import DENSE_MAX_ROWS, dense_linear
from vlfit.kernels.gemm.epilogue import PreNormRows
from vlfit.kernels.gemm.quantized import (
    dequantize_weight_rows,
    quantized_linear,
    quantized_linears,
    tiles_for,
)
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.layers.linear import dequantize_fp8, dequantize_int8, dequantize_packed, pack_codes
from vlfit.plan.native.tiles import MAX_FUSED_ROWS, SCRATCH_BYTES, DequantConfig, GemmTiles, splits_for

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

ROWS = [1, 3, 17, 128, 200]
# Outputs and inputs of the linear layers of Qwen3-VL's text model: qkv, o, gate and up, down.
TRUE_SHAPES = {
    "2B": [(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)],
    "4B": [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)],
    "8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
}


def fp8(outputs: int, inputs: int, block: tuple[int, int]) -> QuantizedWeight:
    """All finite codes occur, including subnormals."""
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    scale = torch.rand(-(-outputs // block[0]), -(-inputs // block[1])) * 0.01 + 0.001
    return QuantizedWeight(codes.view(torch.float8_e4m3fn), scale, None, block)


def int4(outputs: int, inputs: int, group: int, *, symmetric: bool = True) -> QuantizedWeight:
    words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8)).to(torch.int32)
    scale = (torch.rand(outputs, inputs // group) * 0.01 + 0.001).to(torch.bfloat16)
    zeros = torch.randint(-(2**31), 2**31, (-(-outputs // 8), inputs // group)).to(torch.int32)
    return QuantizedWeight(words, scale, None if symmetric else zeros, (1, group))


def packed(
    bits: int,
    outputs: int,
    inputs: int,
    group: int = 32,
    codebook: str | None = None,
    dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """As GGUF's Q5_0 and IQ4_NL: a scale for each group, no zero points."""
    codes = pack_codes(torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8), bits)
    scale = (torch.rand(outputs, inputs // group) * 0.01 + 0.001).to(dtype)
    return QuantizedWeight(codes, scale, None, (1, group), None, bits, codebook)


def int8(outputs: int, inputs: int, groups: int = 1) -> QuantizedWeight:
    """All codes occur, including -128; one scale per row or several."""
    codes = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    scale = (torch.rand(outputs, groups) * 0.01 + 0.001).to(torch.bfloat16)
    return QuantizedWeight(codes, scale, None, (1, inputs // groups))


# With fewer inputs than this, rounding errors of weights do not average out: the expected weights are rounded
# too, which leaves the rounding of the result.
MIN_INPUTS = 16

# Sizes that fill no tile, with any block and group sizes that a checkpoint may have.
ODD: dict[str, Callable[[], QuantizedWeight]] = {
    "fp8, within one block": lambda: fp8(70, 96, (128, 128)),
    "fp8, blocks cut off": lambda: fp8(150, 200, (128, 128)),
    "fp8, lower blocks": lambda: fp8(70, 256, (32, 128)),
    "fp8, blocks of no power of two": lambda: fp8(33, 100, (16, 24)),
    "fp8, tiles filled": lambda: fp8(128, 256, (128, 128)),
    "fp8, smaller than anything": lambda: fp8(9, 7, (1, 3)),
    "fp8, a scale a row": lambda: fp8(40, 200, (1, 200)),
    "int8, a scale a row": lambda: int8(70, 200),
    "int8, groups of 128": lambda: int8(50, 384, 3),
    "int8, groups of 32": lambda: int8(70, 288, 9),
    "int8, groups of 32, tiles filled": lambda: int8(64, 512, 16),
    "int8, groups of no power of two": lambda: int8(33, 144, 4),
    "int4, a scale a row": lambda: int4(33, 200, 200),
    "int4, groups of 32": lambda: int4(70, 96, 32),
    "int4, groups of 128": lambda: int4(50, 384, 128),
    "int4, zero points": lambda: int4(33, 160, 32, symmetric=False),
    "int4, two levels": lambda: two_level(4, 40, 512, 32, 256, affine=False),
    "int4, two levels, groups of 16": lambda: two_level(4, 33, 256, 16, 256, affine=False),
    "int4, minima": lambda: two_level(4, 70, 256, 32, 256, affine=True),
    "int4, minima, groups of 16": lambda: two_level(4, 33, 512, 16, 256, affine=True),
    "int4, minima of each group": lambda: two_level(4, 33, 96, 32, 32, affine=True),
    "int8, two levels": lambda: two_level(8, 40, 256, 16, 256, affine=False),
    "int8, minima": lambda: two_level(8, 33, 512, 32, 256, affine=True),
    "int8, minima of each group": lambda: two_level(8, 70, 96, 32, 32, affine=True),
    "int5, groups of 32": lambda: packed(5, 70, 96),
    "int5, tiles filled": lambda: packed(5, 64, 512),
    "int5, minima": lambda: two_level(5, 40, 512, 32, 256, affine=True),
    "int5, minima of each group": lambda: two_level(5, 33, 160, 32, 32, affine=True),
    "int6, two levels": lambda: two_level(6, 40, 512, 16, 256, affine=False),
    "int6, groups of 32": lambda: packed(6, 33, 160),
    "iq4nl, groups of 32": lambda: packed(4, 70, 96, 32, "iq4nl"),
    "iq4nl, two levels": lambda: two_level(4, 40, 512, 32, 256, affine=False, codebook="iq4nl"),
    "e2m1, groups of 16": lambda: packed(4, 64, 256, 16, "e2m1"),
    "e2m1, powers of two": lambda: packed(4, 33, 160, 32, "e2m1", torch.bfloat16),
    "odd, two levels": lambda: two_level(4, 70, 256, 32, 256, affine=False, codebook="odd"),
    "int4, groups of no power of two": lambda: int4(33, 96, 24, symmetric=False),
}


def dequantized(weights: QuantizedWeight, dtype: torch.dtype = torch.float64) -> Tensor:
    if weights.codes.dtype == torch.int32:
        return dequantize_packed(weights, dtype)
    if weights.format == "int8":
        return dequantize_int8(weights.codes, weights.scale, dtype, weights.super_scale)
    return dequantize_fp8(weights.codes, weights.scale, weights.block_shape, dtype)


def to_device(weights: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    zero_point, super_scale = (
        None if each is None else each.to(device) for each in (weights.zero_point, weights.super_scale)
    )
    codes, scale = weights.codes.to(device), weights.scale.to(device)
    return replace(weights, codes=codes, scale=scale, zero_point=zero_point, super_scale=super_scale)


def check(
    weights: QuantizedWeight,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    native_fp8: bool | None = None,
    tiles: GemmTiles | None = None,
) -> None:
    """Rows are strided, as those of gate and up are; odd numbers of them have a bias. The interpreter's time
    depends on the number of programs, so float32 uses the larger half-precision tiles there.
    """
    if tiles is None and device.type == "cpu" and rows <= MAX_FUSED_ROWS:
        tiles = tiles_for(rows, weights, torch.float16)
    on_device = to_device(weights, device)
    buffer = torch.randn(rows, 2 * weights.in_features).to(device, dtype)
    x = buffer[:, : weights.in_features]
    bias = torch.randn(weights.out_features).to(device, dtype) if rows % 2 else None
    out = quantized_linear(x, on_device, bias, tiles, native_fp8=native_fp8)
    weight = dequantized(on_device)
    if weights.in_features < MIN_INPUTS:
        weight = weight.to(dtype).double()
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [*ROWS, *([2, 8, 9, 40, 300] if ON_GPU else [])])
@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name: str, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    if not ON_GPU and dtype == torch.float32 and rows > 17:
        pytest.skip("slow to interpret, and float32 has the same kernel for 17 rows")
    torch.manual_seed(rows)
    check(ODD[name](), rows, dtype, device)


@pytest.mark.parametrize("rows", [1, 17])
def test_fp8_with_and_without_native_conversion(rows: int, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card does not convert float8")
    torch.manual_seed(0)
    for native_fp8 in (True, False):
        check(fp8(70, 200, (128, 128)), rows, torch.float16, device, native_fp8)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ODD)
def test_sliced_k(name: str, rows: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    check(ODD[name](), rows, torch.float16, device, tiles=GemmTiles(8, 32, 256, 4, 2, parts=4))


def test_each_half_of_a_swiglu_tile_has_its_own_scale(device: torch.device) -> None:
    torch.manual_seed(0)
    weights = fp8(256, 256, (128, 128))
    weights.scale[0] *= 50  # of gates; a scale of theirs for the other half would show
    on_device = to_device(weights, device)
    x = (torch.randn(2, 256) * 0.01).to(device, torch.float16)
    out = quantized_linear(x, on_device, None, GemmTiles(8, 64, 128, 4, 2), swiglu=True)
    gate, up = (x.double() @ dequantized(on_device).T).chunk(2, 1)
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < 2 * TOLERANCES[torch.float16]


@pytest.mark.parametrize("group", [32, 64, 128, 512])
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_row_of_int4_in_half_precision(symmetric: bool, group: int, device: torch.device) -> None:
    """Codes are multiplied before their zero points are subtracted, so sums are far larger than the result.
    One input is far larger than the others, as in real models.
    """
    torch.manual_seed(group)
    weights = int4(70, 1024, group, symmetric=symmetric)
    x = torch.randn(1, 1024)
    x[0, 300] = 500.0
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    out = quantized_linear(
        x.to(device, dtype), to_device(weights, device), None, tiles_for(1, weights, dtype)
    )
    expected = x.to(dtype).double() @ dequantized(weights).T
    assert relative_error(out.cpu(), expected) < TOLERANCES[dtype]


# Several rows of other forms multiply weights by scales with fewer instructions, and rounding differs.
INLINE: dict[str, tuple[Callable[[], QuantizedWeight], tuple[int, ...]]] = {
    "int4": (lambda: int4(64, 512, 32), (1, 9)),
    "int5": (lambda: packed(5, 64, 512), (1,)),
    "int6": (lambda: two_level(6, 64, 512, 16, 256, affine=False), (1,)),
    "int8": (lambda: int8(64, 512), (1, 9)),
    "int8, groups of 32": (lambda: int8(64, 512, 16), (1,)),
    "iq4nl": (lambda: packed(4, 64, 512, 32, "iq4nl"), (1,)),
    "e2m1": (lambda: packed(4, 64, 512, 32, "e2m1"), (1,)),
    "odd": (lambda: two_level(4, 64, 512, 32, 256, affine=False, codebook="odd"), (1,)),
}


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "rows"), [(name, rows) for name, (_, each) in INLINE.items() for rows in each]
)
def test_inline_ptx_is_bit_equal(
    name: str, rows: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    make, _ = INLINE[name]
    on_device = to_device(make(), device)
    x = torch.randn(rows, 512, device=device, dtype=dtype)
    tiles = tiles_for(rows, on_device, dtype)  # one row has a kernel of its own without them
    by_hand = quantized_linear(x, on_device, None, tiles)
    monkeypatch.setattr(kernels, "has_inline_ptx", lambda _: False)
    assert torch.equal(quantized_linear(x, on_device, None, tiles), by_hand)


# Forms of q, k and v, as in files of mixed types.
BESIDE: dict[str, list[Callable[[], QuantizedWeight]]] = {
    "Q4_K and Q6_K": [
        lambda: two_level(4, 70, 512, 32, 256, affine=True),
        lambda: two_level(6, 40, 512, 16, 256, affine=False),
    ],
    "Q4_0 and Q8_0": [lambda: packed(4, 200, 512), lambda: int8(33, 512, 16)],
    "scales for 16 inputs: Q3_K and Q6_K": [
        lambda: two_level(4, 33, 512, 16, 256, affine=False),
        lambda: two_level(6, 40, 512, 16, 256, affine=False),
    ],
    "three: IQ4_NL, Q5_0, Q4_0": [
        lambda: packed(4, 33, 512, 32, "iq4nl"),
        lambda: packed(5, 40, 512),
        lambda: packed(4, 70, 512),
    ],
}


@pytest.mark.parametrize("normed", [False, True], ids=["rows", "prenorm"])
@pytest.mark.parametrize("name", BESIDE)
def test_products_of_one_row_side_by_side(name: str, normed: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    layers: list[tuple[QuantizedWeight, Tensor | None]] = []
    for make in BESIDE[name]:
        weights = make()
        bias = None if layers else torch.randn(weights.out_features).to(device, dtype)
        layers.append((to_device(weights, device), bias))
    row = torch.randn(1, 512).to(device, dtype)
    sums = torch.rand(1, 5).to(device) * 100
    x = PreNormRows(row, sums, 1e-6) if normed else row
    expected = torch.cat([quantized_linear(x, weights, bias) for weights, bias in layers], dim=1)
    for _ in range(2):  # counters of split products are as before
        assert torch.equal(quantized_linears(x, layers), expected)


def test_split_k_is_deterministic(device: torch.device) -> None:
    """Few rows with many inputs are split over K; sums are added in a fixed order."""
    torch.manual_seed(0)
    weights = int4(40, 1024, 32)
    x = torch.randn(9, 1024)
    assert splits_for(9, 40, 1024, tiles_for(9, weights, torch.float16)) > 1
    check(weights, 9, torch.float16, device)
    on_device = to_device(weights, device)
    first, second = (quantized_linear(x.to(device, torch.float16), on_device, None) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ODD)
def test_many_rows_are_dequantized_in_slices(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantized rows are the reference's from any row on, and slices cover all outputs."""
    torch.manual_seed(0)
    weights = ODD[name]()
    on_device = to_device(weights, device)
    for first in (0, 5):
        weight = torch.full(
            (weights.out_features - first, weights.in_features), torch.nan, dtype=dtype, device=device
        )
        for native_fp8 in {False, kernels.has_native_fp8(device)}:
            dequantize_weight_rows(on_device, first, weight, native_fp8)
            # A GPU multiplies a code by its scale and adds a minimum with one rounding, torch with two.
            twice, once = (dequantized(weights, each).to(dtype)[first:] for each in (dtype, torch.float64))
            assert bool(((weight.cpu() == twice) | (weight.cpu() == once)).all())
    slices: list[int] = []

    def dequantize_and_count(stored: QuantizedWeight, first: int, weight: Tensor, native_fp8: bool) -> None:
        slices.append(len(weight))
        dequantize_weight_rows(stored, first, weight, native_fp8)

    monkeypatch.setattr(kernels, "SLICE_MULTIPLE", 2)
    monkeypatch.setattr(
        kernels, "dequant_config", lambda device: DequantConfig(17 * weights.in_features * dtype.itemsize)
    )
    monkeypatch.setattr(kernels, "dequantize_weight_rows", dequantize_and_count)
    check(weights, MAX_FUSED_ROWS + 1, dtype, device)
    assert sum(slices) == weights.out_features
    assert max(slices) <= 16


@pytest.mark.parametrize("size", TRUE_SHAPES)
def test_slices_start_at_multiples(size: str) -> None:
    """Multiples of a tile, within the buffer, and no more slices than necessary."""
    room = SCRATCH_BYTES // 2
    for outputs, inputs in TRUE_SHAPES[size]:
        height = kernels.rows_per_slice(outputs, inputs, room)
        assert height % kernels.SLICE_MULTIPLE == 0
        assert height * inputs <= room
        fewest = -(-outputs // (room // inputs // kernels.SLICE_MULTIPLE * kernels.SLICE_MULTIPLE))
        assert -(-outputs // height) == fewest


def test_slices_of_a_small_buffer() -> None:
    assert kernels.rows_per_slice(40, 1024, 3 * 1024) == 3
    assert kernels.rows_per_slice(40, 1024, 1000) == 1


def test_no_rows(device: torch.device) -> None:
    weights = to_device(int4(16, 32, 32), device)
    assert quantized_linear(torch.empty(0, 32, device=device), weights, None).shape == (0, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [*ROWS, 9, 300])
@pytest.mark.parametrize("form", ["fp8", "int8", "int4, groups of 32", "int4, groups of 128"])
@pytest.mark.parametrize("size", TRUE_SHAPES)
def test_true_shapes(size: str, form: str, rows: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    for outputs, inputs in TRUE_SHAPES[size]:
        if form == "fp8":
            check(fp8(outputs, inputs, (128, 128)), rows, torch.bfloat16, device)
        elif form == "int8":
            check(int8(outputs, inputs), rows, torch.bfloat16, device)
        else:
            check(int4(outputs, inputs, int(form.split()[-1])), rows, torch.bfloat16, device)


# int8 matrices other than text layers: output heads, and the vision tower of 8B, whose last GEMM has inputs
# that no power of two above 16 divides.
EIGHT = {"head of 4B": (151936, 2560), "tower's fc1": (4304, 1152), "tower's fc2": (1152, 4304)}


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 4, 17, 300])
@pytest.mark.parametrize("name", EIGHT)
def test_true_shapes_of_heads_and_towers(name: str, rows: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    check(int8(*EIGHT[name]), rows, torch.bfloat16, device)


def test_too_many_rows_for_what_is_fused() -> None:
    x = torch.zeros(MAX_FUSED_ROWS + 1, 64)
    with pytest.raises(ValueError, match=str(MAX_FUSED_ROWS)):
        quantized_linear(x, int8(32, 64), None, swiglu=True)
    with pytest.raises(ValueError, match=str(MAX_FUSED_ROWS)):
        quantized_linear(x, int8(32, 64), None, splits=2)
    with pytest.raises(ValueError, match=str(DENSE_MAX_ROWS)):
        dense_linear(torch.zeros(DENSE_MAX_ROWS + 1, 64), torch.zeros(32, 64), None)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_two_levels_by_definition(bits: int, affine: bool) -> None:
    """Each weight computed alone in Python; exact in float32 with sub-scales and codes as small as GGUF's."""
    torch.manual_seed(bits)
    weights = two_level(bits, 3, 512, 32, 256, affine=affine)
    result = dequantized(weights, torch.float64)
    assert weights.super_scale is not None
    halves = weights.super_scale.view(torch.float16).view(3, 2, -1).tolist()
    for row, column in ((0, 0), (1, 31), (2, 300), (2, 511)):
        if bits == 4:
            code = int(weights.codes[row, column // 8].item()) >> 4 * (column % 8) & 15
            code -= 0 if affine else 8
        else:
            code = int(weights.codes[row, column].item())
        sub = int(weights.scale[row, column // 32].item())
        d = halves[row][column // 256]
        low, high = (sub & 255, sub >> 8 & 255) if affine else (sub, 0)
        expected = code * low * d[0] - (high * d[1] if affine else 0)
        assert result[row, column].item() == pytest.approx(expected, rel=1e-6)
