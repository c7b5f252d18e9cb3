"""Products with FP8, int8 and int4 weights, by kernels, against float64 and the weights' own definition."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error
from vlfit.kernels.gemm import quantized as kernels
from vlfit.kernels.gemm.quantized import NarrowWeights, linear, tiles_for, widen_rows
from vlfit.layers.linear import dequantize_fp8, dequantize_int4, dequantize_int8
from vlfit.plan.native.tiles import SCRATCH_BYTES, WIDEN_ROWS, Means, Tiles, splits_for

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

ROWS = [1, 3, 17, 128, 200]
# Outputs and inputs of the linear layers of Qwen3-VL's text model: q, k and v as one; o; gate and up as one;
# down.
TRUE_SHAPES = {
    "2B": [(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)],
    "4B": [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)],
    "8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
}


def fp8(outputs: int, inputs: int, block: tuple[int, int]) -> NarrowWeights:
    """Every code that stands for a number occurs, subnormal ones too."""
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    scale = torch.rand(-(-outputs // block[0]), -(-inputs // block[1])) * 0.01 + 0.001
    return NarrowWeights(codes.view(torch.float8_e4m3fn), scale, None, block)


def int4(outputs: int, inputs: int, group: int, *, symmetric: bool = True) -> NarrowWeights:
    words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8)).to(torch.int32)
    scale = (torch.rand(outputs, inputs // group) * 0.01 + 0.001).to(torch.bfloat16)
    zeros = torch.randint(-(2**31), 2**31, (-(-outputs // 8), inputs // group)).to(torch.int32)
    return NarrowWeights(words, scale, None if symmetric else zeros, (1, group))


def int8(outputs: int, inputs: int, groups: int = 1) -> NarrowWeights:
    """Every code occurs, -128 too; one scale a row, or several."""
    codes = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    scale = (torch.rand(outputs, groups) * 0.01 + 0.001).to(torch.bfloat16)
    return NarrowWeights(codes, scale, None, (1, inputs // groups))


# With fewer inputs than these the roundings of weights do not average out: they are made in the expectation,
# too, and what is left is the rounding of the result.
FEW = 16

# Sizes that fill no tile, and blocks and groups of any size that a checkpoint may have.
ODD: dict[str, Callable[[], NarrowWeights]] = {
    "fp8, within one block": lambda: fp8(70, 96, (128, 128)),
    "fp8, blocks cut off": lambda: fp8(150, 200, (128, 128)),
    "fp8, lower blocks": lambda: fp8(70, 256, (32, 128)),
    "fp8, blocks of no power of two": lambda: fp8(33, 100, (16, 24)),
    "fp8, smaller than anything": lambda: fp8(9, 7, (1, 3)),
    "fp8, a scale a row": lambda: fp8(40, 200, (1, 200)),
    "int8, a scale a row": lambda: int8(70, 200),
    "int8, groups of 128": lambda: int8(50, 384, 3),
    "int8, groups of no power of two": lambda: int8(33, 144, 4),
    "int4, a scale a row": lambda: int4(33, 200, 200),
    "int4, groups of 32": lambda: int4(70, 96, 32),
    "int4, groups of 128": lambda: int4(50, 384, 128),
    "int4, zero points": lambda: int4(33, 160, 32, symmetric=False),
    "int4, groups of no power of two": lambda: int4(33, 96, 24, symmetric=False),
}


def widened(weights: NarrowWeights, dtype: torch.dtype = torch.float64) -> Tensor:
    if weights.form == "int4":
        return dequantize_int4(weights.codes, weights.scale, weights.zero_point, dtype)
    if weights.form == "int8":
        return dequantize_int8(weights.codes, weights.scale, dtype)
    return dequantize_fp8(weights.codes, weights.scale, weights.block, dtype)


def on(weights: NarrowWeights, device: torch.device) -> NarrowWeights:
    zero_point = None if weights.zero_point is None else weights.zero_point.to(device)
    return NarrowWeights(weights.codes.to(device), weights.scale.to(device), zero_point, weights.block)


def check(
    weights: NarrowWeights,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    hardware: bool | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Rows that lie apart in memory, as those of gate and up do; odd numbers of them with a bias.

    The interpreter's time goes by programs, so there float32 has the larger tiles of half precision.
    """
    if tiles is None and device.type == "cpu" and rows <= 256:
        tiles = tiles_for(rows, weights, torch.float16)
    there = on(weights, device)
    apart = torch.randn(rows, 2 * weights.inputs).to(device, dtype)
    x = apart[:, : weights.inputs]
    bias = torch.randn(weights.outputs).to(device, dtype) if rows % 2 else None
    out = linear(x, there, bias, tiles, hardware=hardware)
    wide = widened(there)
    if weights.inputs < FEW:
        wide = wide.to(dtype).double()
    exact = x.double() @ wide.T + (0 if bias is None else bias.double())
    assert out.dtype == dtype
    assert relative_error(out, exact) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [*ROWS, *([2, 8, 9, 40, 300] if ON_GPU else [])])
@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name: str, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    if not ON_GPU and dtype == torch.float32 and rows > 17:
        pytest.skip("slow to interpret, and float32 has the same kernel for 17 rows")
    torch.manual_seed(rows)
    check(ODD[name](), rows, dtype, device)


@pytest.mark.parametrize("rows", [1, 17])
def test_codes_are_read_alike_with_and_without_the_cards_own_conversion(
    rows: int, device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card does not convert float8")
    torch.manual_seed(0)
    for hardware in (True, False):
        check(fp8(70, 200, (128, 128)), rows, torch.float16, device, hardware)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ODD)
def test_warps_that_share_out_the_inputs_of_a_tile(name: str, rows: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    check(ODD[name](), rows, torch.float16, device, tiles=Tiles(8, 32, 256, 4, 2, parts=4))


@pytest.mark.parametrize("group", [32, 64, 128, 512])
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_row_of_int4_in_half_precision(symmetric: bool, group: int, device: torch.device) -> None:
    """Codes are multiplied before their zero points are taken off: sums far larger than what is left of them.

    One input is far larger than the others, as in real models.
    """
    torch.manual_seed(group)
    weights = int4(70, 1024, group, symmetric=symmetric)
    x = torch.randn(1, 1024)
    x[0, 300] = 500.0
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    out = linear(x.to(device, dtype), on(weights, device), None, tiles_for(1, weights, dtype))
    exact = x.to(dtype).double() @ widened(weights).T
    assert relative_error(out.cpu(), exact) < TOLERANCES[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_an_instruction_by_hand_means_the_same(
    rows: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    there = on(int4(64, 512, 32), device)
    x = torch.randn(rows, 512, device=device, dtype=dtype)
    by_hand = linear(x, there, None)
    monkeypatch.setattr(kernels, "by_hand", lambda _: False)
    assert torch.equal(linear(x, there, None), by_hand)


def test_inputs_shared_out_among_programs(device: torch.device) -> None:
    """Few rows over many inputs are split; the sums are added up in one order, so the result never varies."""
    torch.manual_seed(0)
    weights = int4(40, 1024, 32)
    x = torch.randn(9, 1024)
    assert splits_for(9, 40, 1024, tiles_for(9, weights, torch.float16)) > 1
    check(weights, 9, torch.float16, device)
    there = on(weights, device)
    first, second = (linear(x.to(device, torch.float16), there, None) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ODD)
def test_many_rows_multiply_with_the_weights_themselves(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what the reference widens, from any row on; and slice by slice the whole product."""
    torch.manual_seed(0)
    weights = ODD[name]()
    there = on(weights, device)
    for first in (0, 5):
        wide = torch.full((weights.outputs - first, weights.inputs), torch.nan, dtype=dtype, device=device)
        for hardware in {False, kernels.converts_float8(device)}:
            widen_rows(there, first, wide, hardware)
            assert torch.equal(wide.cpu(), widened(weights, dtype)[first:])
    slices: list[int] = []

    def widen_and_count(stored: NarrowWeights, first: int, wide: Tensor, hardware: bool) -> None:
        slices.append(len(wide))
        widen_rows(stored, first, wide, hardware)

    monkeypatch.setattr(kernels, "SLICE_STEP", 2)
    monkeypatch.setattr(kernels, "means", lambda device: Means(17 * weights.inputs * dtype.itemsize))
    monkeypatch.setattr(kernels, "widen_rows", widen_and_count)
    check(weights, WIDEN_ROWS + 1, dtype, device)
    assert sum(slices) == weights.outputs
    assert max(slices) <= 16


@pytest.mark.parametrize("size", TRUE_SHAPES)
def test_slices_begin_where_products_are_fast(size: str) -> None:
    """At multiples of a tile, in the buffer's room, and as many as there have to be."""
    room = SCRATCH_BYTES // 2
    for outputs, inputs in TRUE_SHAPES[size]:
        height = kernels.slice_height(outputs, inputs, room)
        assert height % kernels.SLICE_STEP == 0
        assert height * inputs <= room
        fewest = -(-outputs // (room // inputs // kernels.SLICE_STEP * kernels.SLICE_STEP))
        assert -(-outputs // height) == fewest


def test_a_slice_is_one_output_where_the_buffer_is_small() -> None:
    assert kernels.slice_height(40, 1024, 3 * 1024) == 3
    assert kernels.slice_height(40, 1024, 1000) == 1


def test_no_rows_give_no_rows(device: torch.device) -> None:
    weights = on(int4(16, 32, 32), device)
    assert linear(torch.empty(0, 32, device=device), weights, None).shape == (0, 16)


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


# Of matrices that are in 8 bits beside text layers: output heads, and the tower of 8B, whose last product has
# inputs that no power of two above 16 divides.
EIGHT = {"head of 4B": (151936, 2560), "tower's fc1": (4304, 1152), "tower's fc2": (1152, 4304)}


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 4, 17, 300])
@pytest.mark.parametrize("name", EIGHT)
def test_true_shapes_of_heads_and_towers(name: str, rows: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    check(int8(*EIGHT[name]), rows, torch.bfloat16, device)
