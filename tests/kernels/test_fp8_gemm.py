"""FP8 activations times FP8 weights: quantized as in plain PyTorch, GEMMs against float64 of the quantized
values.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ON_GPU, TOLERANCES, relative_error
from tests.kernels.test_linear import dequantized, fp8, int4, to_device
from vlfit import kernels
from vlfit.kernels.gemm import fp8 as fp8_gemm
from vlfit.kernels.gemm.fp8 import Fp8Activations, Fp8Tiles
from vlfit.layers import fused
from vlfit.layers.linear import Fp8Linear
from vlfit.plan.native.tiles import DequantConfig

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
# Relative error of rounding to 3 mantissa bits: up to 2^-4 of the power of two, evenly distributed, which is
# 2^-4 / sqrt(3) of it, and 0.72 of that relative to a number of that binade on average.
ROUNDED = 0.027


@pytest.fixture(autouse=True)
def native_fp8_only(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card does not multiply float8")


def rows_of(count: int, width: int, device: torch.device) -> Tensor:
    """Rows with an outlier, a group of zeros, and values of all magnitudes."""
    x = torch.randn(count, width) * 10 ** torch.linspace(-3, 2, count)[:, None]
    x[:, 5] *= 50
    x[0, 128:256] = 0
    return x.to(device, DTYPE)


def check(result: Fp8Activations, x: Tensor, *, exactly: bool = False) -> None:
    """``result`` equals the reference quantization of ``x``, but for a few codes on a rounding boundary; with
    ``exactly=False`` more, as Triton's interpreter (3.7) truncates when it rounds.
    """
    expected = fp8_gemm.reference_quantize_activations(x)
    assert result.num_rows == len(x)
    rows = slice(0, result.num_rows)
    result = Fp8Activations(result.codes[rows], result.scale[:, rows], result.num_rows, result.dtype)
    assert result.scale.shape == expected.scale.shape
    edge = 1e-6 if exactly else 2.0**-7 if ON_GPU else 2.0**-9
    torch.testing.assert_close(result.scale.cpu(), expected.scale.cpu(), rtol=edge, atol=0)
    differing = result.codes.cpu().view(torch.uint8) != expected.codes.cpu().view(torch.uint8)
    assert float(differing.float().mean()) < (2e-3 if exactly else 0.2)
    dequantized_rows = fp8_gemm.dequantize_activations(result).cpu()
    assert relative_error(dequantized_rows, fp8_gemm.dequantize_activations(expected).cpu()) < (
        2e-3 if exactly else 0.02
    )
    assert relative_error(dequantized_rows, x.double().cpu()) < ROUNDED


@pytest.mark.parametrize("width", [256, 1280, 2560])
def test_quantize_rows(width: int, device: torch.device) -> None:
    torch.manual_seed(0)
    x = rows_of(3, 2 * width, device)[:, :width]
    result = fp8_gemm.quantize_activations(x)
    check(result, x, exactly=True)


@pytest.mark.parametrize("first", [True, False])
def test_add_rms_norm_quantize(first: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    hidden, delta = rows_of(3, 640, device), rows_of(3, 640, device)
    weight = torch.randn(640).to(device, DTYPE)
    there = hidden.clone()
    result = fp8_gemm.add_rms_norm_quantize(there, None if first else delta, weight, 1e-6)
    before = hidden.cpu()
    expected = fused.add_norm(before, None if first else delta.cpu(), weight.cpu(), 1e-6)
    assert torch.equal(there.cpu(), before)
    check(result, expected)


def test_silu_and_mul_quantize(device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = rows_of(3, 2 * 1280, device).clamp(-80, 80)
    result = fp8_gemm.silu_and_mul_quantize(gate_up)
    expected = fused.silu_mul(gate_up.cpu())
    check(result, expected)


@pytest.mark.parametrize("rows", [1, 70, *([257, 808, 2050] if ON_GPU else [])])  # the most: by cuBLAS
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    [
        (256, 256, (128, 128)),
        (200, 384, (128, 128)),
        (96, 256, (32, 128)),
        (70, 256, (1, 256)),
        (130, 128, (130, 128)),
        *([(2560, 9728, (128, 128)), (6144, 2560, (1, 2560))] if ON_GPU else []),
    ],
)
def test_fp8_gemm(rows: int, outputs: int, inputs: int, block: tuple[int, int], device: torch.device) -> None:
    torch.manual_seed(rows)
    weights = to_device(fp8(outputs, inputs, block), device)
    bias = torch.randn(outputs).to(device, DTYPE) if rows % 2 else None
    x = fp8_gemm.quantize_activations(rows_of(rows, inputs, device))
    tiles = None if ON_GPU else Fp8Tiles(64, 64, 4, 2, 2)
    out = fp8_gemm.fp8_linear(x, weights, bias, tiles)
    expected = fp8_gemm.dequantize_activations(x) @ dequantized(weights).T + (
        0 if bias is None else bias.double()
    )
    assert out.dtype == DTYPE
    # Tensor cores of Hopper accumulate with 14 bits, over 128 inputs at a time.
    assert relative_error(out, expected) < TOLERANCES[DTYPE] + (2.0**-13 if ON_GPU else 0)


def test_layer_halves_stay_in_fp8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, GEMMs and SwiGLU against float64: the error of three quantizations of rows, and no more."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    monkeypatch.setattr(fp8_gemm, "dequant_config", lambda device: DequantConfig(fp8_activations=True))
    monkeypatch.setattr(fp8_gemm, "MAX_FUSED_ROWS", 8)
    widths: list[int] = []
    allocate = fp8_gemm._allocate

    def counted(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Fp8Activations:
        widths.append(width)
        return allocate(rows, width, dtype, device)

    monkeypatch.setattr(fp8_gemm, "_allocate", counted)
    gate_up, down = (to_device(fp8(*shape, (128, 128)), device) for shape in ((256, 256), (256, 128)))
    first, last = (Fp8Linear(each.codes, each.scale, each.block_shape) for each in (gate_up, down))
    hidden, delta = (torch.randn(9, 256).to(device, DTYPE) for _ in range(2))
    weight = torch.ones(256).to(device, DTYPE)
    dequantized_rows = hidden.double() + delta.double()
    x = dequantized_rows / (dequantized_rows.square().mean(1, keepdim=True) + 1e-6).sqrt()
    gate, up = (x @ dequantized(gate_up).T).chunk(2, dim=1)
    expected = (torch.nn.functional.silu(gate) * up) @ dequantized(down).T
    result = fused.feed_forward(first, last, hidden.clone(), delta, weight, 1e-6)
    assert widths == [256, 128]
    assert relative_error(result, expected) < 2 * ROUNDED
    joined = fused.add_norm_linear(first, hidden.clone(), delta, weight, 1e-6)
    assert relative_error(joined, x @ dequantized(gate_up).T) < ROUNDED
    assert relative_error(first(x.to(DTYPE)), x @ dequantized(gate_up).T) < ROUNDED
    assert widths == [256, 128, 256, 256]


def test_supported_weights_and_rows() -> None:
    assert fp8_gemm.supports_fp8_gemm(fp8(70, 256, (128, 128)))
    assert fp8_gemm.supports_fp8_gemm(fp8(70, 256, (1, 256)))
    assert not fp8_gemm.supports_fp8_gemm(fp8(70, 256, (128, 64)))
    assert not fp8_gemm.supports_fp8_gemm(fp8(70, 200, (128, 128)))
    assert not fp8_gemm.supports_fp8_gemm(int4(70, 256, 128))
    assert not fp8_gemm.uses_fp8_gemm(fp8(70, 256, (128, 128)), 808, torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("way", ["right", "first block for all", "blocks exchanged", "not at all"])
def test_scaled_mm_is_checked_with_distinct_blocks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ``torch._scaled_mm``, whose layout of the weight's scales may differ."""

    def scaled_mm_stub(
        x: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, *, out_dtype: torch.dtype
    ) -> Tensor:
        if way == "not at all":
            raise RuntimeError("not supported")
        weight_scale = {
            "first block for all": weight_scale[:, :1].expand_as(weight_scale),
            "blocks exchanged": weight_scale.flip(1),
        }.get(way, weight_scale)
        rows = x.float() * scale.repeat_interleave(128, 1)
        dequantized_rows = weight.float() * weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (rows @ dequantized_rows).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm_stub)
    assert fp8_gemm.scaled_mm_is_correct(torch.device("cpu")) == (way == "right")
