"""FP8 x FP8 GEMM for many rows, on cards whose tensor cores multiply FP8 (compute capability 8.9 and later).

Each row is quantized to float8_e4m3fn with a scale per 128 neighbours, as transformers and vLLM do for the
official FP8 checkpoints, whose weights have a scale per 128 x 128. Checkpoints with a scale per output, meant
for one scale per row, get the same finer quantization. It costs about 3 % of relative error per GEMM and
saves dequantizing the weights. Few rows are not quantized (``quantized.py``).

On Hopper cuBLAS reaches 640 to 970 TFLOP/s and the kernel here 600, but calling cuBLAS through torch takes
longer (docs/log.md), so only large GEMMs go there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.gemm.quantized import dequant_config, has_native_fp8
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.kernels.launch import next_power_of_2
from vlfit.kernels.target import card_of, launches_on, per_device
from vlfit.plan.native.tiles import CUBLAS_MIN_MACS, FP8_ROW_MULTIPLE, MAX_FUSED_ROWS
from vlfit.plan.shapes import GROUP, has_fp8_gemm_scales

FP8_MAX, MIN_AMAX = 448.0, 1e-12  # largest float8_e4m3fn; lower bound of a group's amax
_BLOCK = 1024  # elements that one program quantizes


@dataclass(frozen=True, slots=True)
class Fp8Activations:
    """Activations in FP8: ``codes`` [rows, width] float8_e4m3fn times ``scale`` [width / 128, rows] float32.

    Only the first ``num_rows`` rows are valid; the rest is uninitialized padding. ``dtype``: that of the
    activations before quantization, and of results of GEMMs with them.
    """

    codes: Tensor
    scale: Tensor
    num_rows: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """Tile of one program: ``rows`` x ``outputs``, with its ``warps`` and pipeline ``stages``.

    ``group_n``: column tiles that are traversed together (``fp8_kernels.swizzled_block``).
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    group_n: int = 4


# The fastest of ten on an H100, for all shapes of 2B and 4B (docs/log.md).
DEFAULT_TILES = Fp8Tiles(64, 128, 4, 3)


def uses_fp8_gemm(weights: QuantizedWeight, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``rows`` rows in ``dtype`` are multiplied by ``weights`` in FP8 on ``device``.

    True above ``MAX_FUSED_ROWS`` rows, for dtypes but float32, if ``dequant_config`` turns it on and the
    weights pass ``supports_fp8_gemm``.
    """
    return uses_fp8_for_rows(rows, dtype, device) and supports_fp8_gemm(weights)


def uses_fp8_for_rows(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """``uses_fp8_gemm`` for weights that pass ``supports_fp8_gemm``, without checking them."""
    if rows <= MAX_FUSED_ROWS or dtype == torch.float32 or "linear" in kernels.plain_on(device):
        return False
    return dequant_config(device).fp8_activations


def supports_fp8_gemm(weights: QuantizedWeight) -> bool:
    """Whether ``weights`` are FP8 and their scales can be applied to sums over 128 inputs each."""
    return has_fp8_gemm_scales(weights.format, weights.in_features, weights.block_shape[1])


def _allocate(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Fp8Activations:
    allocated = rows + -rows % FP8_ROW_MULTIPLE
    codes = torch.empty((allocated, width), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((width // GROUP, allocated), dtype=torch.float32, device=device)
    return Fp8Activations(codes, scale, rows, dtype)


def _quantize_constants(x: Tensor, width: int, block: int) -> dict[str, int | bool]:
    return {"WIDTH": width, "BLOCK": block, "GROUP": GROUP, "NATIVE_FP8": has_native_fp8(x.device)}


def quantize_activations(x: Tensor) -> Fp8Activations:
    """Quantize ``x`` [rows, width] to FP8. Rows may be strided; ``width`` is a multiple of 128."""
    rows, width = x.shape
    out = _allocate(rows, width, x.dtype, x.device)
    if launches_on(x.device):
        from vlfit.kernels.gemm.fp8_kernels import quantize_activations_kernel

        quantize_activations_kernel[(rows, -(-width // _BLOCK))](
            x,
            out.codes,
            out.scale,
            len(out.codes),
            x.stride(0),
            **_quantize_constants(x, width, _BLOCK),
            num_warps=4,
        )
    return out


def add_rms_norm_quantize(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Fp8Activations:
    """Add ``delta`` to ``hidden`` [rows, width] in place; returns the RMSNorm of the sum, quantized to FP8.

    ``delta`` [rows, width]; None: nothing is added.
    """
    rows, width = hidden.shape
    out = _allocate(rows, width, hidden.dtype, hidden.device)
    if launches_on(hidden.device):
        from vlfit.kernels.gemm.fp8_kernels import add_rms_norm_quantize_kernel

        block = max(next_power_of_2(width), GROUP)
        add_rms_norm_quantize_kernel[(rows,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            out.codes,
            out.scale,
            len(out.codes),
            eps,
            HAS_DELTA=delta is not None,
            **_quantize_constants(hidden, width, block),
            num_warps=8 if block >= 2048 else 4,
        )
    return out


def silu_and_mul_quantize(gate_up: Tensor) -> Fp8Activations:
    """silu(gate) * up, quantized to FP8: [rows, inner] for ``gate_up`` [rows, 2 * inner], gates first."""
    rows, double_width = gate_up.shape
    width = double_width // 2
    out = _allocate(rows, width, gate_up.dtype, gate_up.device)
    if launches_on(gate_up.device):
        from vlfit.kernels.gemm.fp8_kernels import silu_and_mul_quantize_kernel

        silu_and_mul_quantize_kernel[(rows, -(-width // _BLOCK))](
            gate_up,
            out.codes,
            out.scale,
            len(out.codes),
            **_quantize_constants(gate_up, width, _BLOCK),
            num_warps=4,
        )
    return out


def fp8_linear(
    x: Fp8Activations, weights: QuantizedWeight, bias: Tensor | None, tiles: Fp8Tiles | None = None
) -> Tensor:
    """``x @ weight.T + bias`` in FP8: [num_rows, out_features] in ``x.dtype``.

    ``weights`` must pass ``supports_fp8_gemm`` (not checked). GEMMs of ``CUBLAS_MIN_MACS`` or more for each
    multiprocessor go to cuBLAS if it takes the dtype and scales (``supports_cublas_fp8``) and ``tiles`` is
    None; others go to the kernel, with ``DEFAULT_TILES`` if ``tiles`` is None. Memory for the result is
    allocated in multiples of ``FP8_ROW_MULTIPLE`` rows.
    """
    device = x.codes.device
    card = card_of(device)
    macs = x.num_rows * weights.in_features * weights.out_features
    if (
        card is not None
        and macs >= CUBLAS_MIN_MACS * card.multiprocessors
        and tiles is None
        and x.dtype == torch.bfloat16
        and _is_cublas_layout(weights)
        and supports_cublas_fp8(device)
    ):
        weight_scale = weights.scale.t()
        out = torch._scaled_mm(x.codes, weights.codes.t(), x.scale.t(), weight_scale, out_dtype=x.dtype)
        if x.codes.shape[0] != x.num_rows:
            out = out[: x.num_rows]
        return out if bias is None else out.add_(bias)
    out = torch.empty((len(x.codes), weights.out_features), dtype=x.dtype, device=device)[: x.num_rows]
    if launches_on(device):
        _launch(x, weights, bias, out, tiles or DEFAULT_TILES)
    return out


def _is_cublas_layout(weights: QuantizedWeight) -> bool:
    """Whether the scales of ``weights`` have the layout that cuBLAS takes."""
    scale = weights.scale
    return weights.block_shape == (GROUP, GROUP) and scale.shape[1] % 4 == 0 and scale.dtype == torch.float32


@per_device
def supports_cublas_fp8(device: torch.device) -> bool:
    """Whether cuBLAS (``torch._scaled_mm``) multiplies FP8 with a scale per 128 inputs on ``device``.

    It does on compute capability 9.0, from CUDA 12.9 on. Checked once, by running a small GEMM; on a
    simulated card it is not, and the kernel is launched in its place.
    """
    card = card_of(device)
    if device.type != "cuda" or card is None or card.capability != (9, 0):
        return False
    return scaled_mm_is_correct(device)


def scaled_mm_is_correct(device: torch.device) -> bool:
    """Whether ``torch._scaled_mm`` gets a small block-scaled GEMM right; False if it raises."""
    x = torch.ones((FP8_ROW_MULTIPLE, 4 * GROUP), device=device).to(torch.float8_e4m3fn)
    weight = torch.ones((2 * GROUP, 4 * GROUP), device=device).to(torch.float8_e4m3fn)
    steps = torch.arange(1.0, 5.0, device=device)
    scale = steps.repeat(FP8_ROW_MULTIPLE, 1).t().contiguous()
    weight_scale = torch.stack((steps, 2 * steps.flip(0)))  # distinct, so that a mixed-up layout shows
    try:
        out = torch._scaled_mm(x, weight.t(), scale.t(), weight_scale.t(), out_dtype=torch.bfloat16)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    expected = out.new_tensor([30, 40]).repeat_interleave(GROUP)  # 1 + 4 + 9 + 16; 2 (4 + 6 + 6 + 4)
    return bool((out == GROUP * expected).all())


def _launch(
    x: Fp8Activations, weights: QuantizedWeight, bias: Tensor | None, out: Tensor, tiles: Fp8Tiles
) -> None:
    from vlfit.kernels.gemm.fp8_kernels import fp8_matmul_kernel

    outputs, inputs = weights.out_features, weights.in_features
    fp8_matmul_kernel[(-(-x.num_rows // tiles.rows) * -(-outputs // tiles.outputs),)](
        x.codes,
        x.scale,
        weights.codes,
        weights.scale,
        out if bias is None else bias,
        out,
        x.num_rows,
        len(x.codes),
        outputs,
        inputs,
        weights.scale.shape[1],
        HAS_BIAS=bias is not None,
        SCALE_N=weights.block_shape[0],
        ONE_GROUP=weights.block_shape[1] != GROUP,
        GROUP_K=GROUP,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.outputs,
        GROUP_N=tiles.group_n,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def reference_quantize_activations(x: Tensor) -> Fp8Activations:
    """``quantize_activations`` in plain PyTorch: the tests' reference."""
    grouped = x.float().unflatten(1, (-1, GROUP))
    amax = grouped.abs().amax(2).clamp_min(MIN_AMAX)
    codes = (grouped * (FP8_MAX / amax).unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    return Fp8Activations(codes, (amax / FP8_MAX).T.contiguous(), len(x), x.dtype)


def dequantize_activations(x: Fp8Activations) -> Tensor:
    """The activations in float64, [num_rows, width]: for tests."""
    x_f64: Tensor = x.codes.double().unflatten(1, (-1, GROUP)) * x.scale.T.double().unsqueeze(2)
    return x_f64[: x.num_rows].flatten(1)
