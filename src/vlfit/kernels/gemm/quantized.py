"""``x @ weight.T + bias`` with weights in FP8 or in 4 to 8 bits, and lookups in such token embeddings.

One row has a kernel of its own (``one_row.py``). Up to ``MAX_FUSED_ROWS`` rows one kernel reads the weights
once and dequantizes on the fly. More rows are compute-bound, where torch's bf16 GEMM is two to five times as
fast: slices of the weight are dequantized into a buffer of fixed size and multiplied by torch. Tile sizes and
split-K factors are in ``plan/native/tiles.py``, as the plan counts the memory that they take.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.checkpoint.quantization import FP8, INT4, INT6, INT8, LOOKED_UP
from vlfit.kernels.gemm.epilogue import (
    PreNormRows,
    ResidualEpilogue,
    allocate_partial,
    epilogue_pointers,
    fusion_flags,
    prologue_arguments,
    tiled_outputs,
    unwrap_rows,
)
from vlfit.kernels.gemm.one_row import launch_row, launch_two, row_form, row_forms
from vlfit.kernels.gemm.weights import (
    MAX_SPAN,
    QuantizedWeight,
    WeightForm,
    kernel_tensors,
    weight_form,
)
from vlfit.kernels.launch import KernelConstant, pdl_options, tile_counters, triggers_late
from vlfit.kernels.target import card_of, launches_on, per_device
from vlfit.machine.cards import FP8_CAPABILITY
from vlfit.plan.native import tiles as plan
from vlfit.plan.native.tiles import (
    BUILT_IN,
    DEFAULT_DEQUANT_CONFIG,
    GROUPED_INT8,
    MAX_FUSED_ROWS,
    MORE_ROWS,
    CardKind,
    DequantConfig,
    GemmTiles,
    Table,
    load_tiles,
)

DEQUANT_BLOCK_N, DEQUANT_BLOCK_K = 8, 4 * MAX_SPAN  # rows and inputs of weights that one program dequantizes
LOOKUP_BLOCK_K = 512  # inputs of a row that one program looks up
SLICE_MULTIPLE = 128  # outputs per slice, as in the tiles of torch's GEMMs


def card_for_device(device: torch.device) -> CardKind:
    """Name and compute capability of a CUDA device: the key under which its measured tiles are stored."""
    return CardKind(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


@per_device
def tile_table(device: torch.device) -> Table:
    """Tile sizes for ``device``: those measured on its card, if any, else (as for CPUs) the built-in ones."""
    card = card_of(device)
    return BUILT_IN if card is None else load_tiles(CardKind(card.name, card.capability))


def tiles_for(rows: int, weights: QuantizedWeight, dtype: torch.dtype) -> GemmTiles:
    """Default tile to multiply ``rows`` rows of activations in ``dtype`` by ``weights``, on their device."""
    if dtype == torch.float32:  # no tensor cores, and twice the size
        return GemmTiles(8 if rows <= 8 else 16 if rows <= 16 else 32, 32, 32, 4, 2)
    tiles = plan.tiles_for(rows, weights.format, tile_table(weights.codes.device))
    if weights.codebook in LOOKED_UP and tiles == MORE_ROWS[INT4, 32]:
        return MORE_ROWS[INT6, 32]
    if weights.format == INT8 and weights.span < tiles.inputs and tiles == BUILT_IN[INT8, 8]:
        return GROUPED_INT8
    return tiles


def quantized_linear(
    x: Tensor | PreNormRows,
    weights: QuantizedWeight,
    bias: Tensor | None,
    tiles: GemmTiles | None = None,
    splits: int | None = None,
    native_fp8: bool | None = None,
    swiglu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``: [rows, out_features] for ``x`` [rows, in_features], in the dtype of ``x``.

    Rows may be strided; the norm of ``PreNormRows`` is applied first. ``swiglu``: the first half of the
    outputs are gates, and the result is silu(gate) * up, [rows, out_features / 2]. ``tiles``: None for
    ``tiles_for``. ``splits``: split-K factor; None: chosen by shape. ``native_fp8``: convert FP8 in hardware;
    None: if the device can. ``out``: the contiguous tensor to write to; None: a new one.

    More than ``MAX_FUSED_ROWS`` rows without ``tiles`` are multiplied by torch; raises ``ValueError`` if
    ``splits``, ``swiglu``, ``out`` or a norm come with them. Allocates the output, and with split-K [splits,
    rows, out_features] float32, or for torch the buffer of ``dequant_config``.
    """
    rows, _ = unwrap_rows(x)
    num_rows = len(rows)
    if native_fp8 is None:
        native_fp8 = has_native_fp8(rows.device)
    if num_rows > MAX_FUSED_ROWS and tiles is None:
        if swiglu or splits or out is not None or isinstance(x, PreNormRows):
            raise ValueError(f"{num_rows} rows: nothing is fused beyond {MAX_FUSED_ROWS}")
        return _dequantize_and_multiply(rows, weights, bias, native_fp8)
    width = weights.out_features // 2 if swiglu else weights.out_features
    if out is None:
        out = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    converts = native_fp8 or weights.format != FP8
    form = None
    if converts and not (tiles or splits):
        form = row_form(rows, weights, bias, swiglu=swiglu)
    if form is not None:
        launch_row(x, weights, bias, out, form, swiglu=swiglu)
        return out
    tiles = tiles or tiles_for(num_rows, weights, rows.dtype)
    _launch(x, weights, bias, out, tiles, splits, native_fp8, swiglu=swiglu)
    return out


def quantized_linear_add(
    x: Tensor,
    weights: QuantizedWeight,
    bias: Tensor | None,
    residual: ResidualEpilogue,
    tiles: GemmTiles | None = None,
    splits: int | None = None,
) -> PreNormRows:
    """Compute ``residual.hidden += x @ weight.T + bias`` in place, for 1 to ``MAX_FUSED_ROWS`` rows.

    Returns what the next GEMM needs to normalize ``residual.hidden`` in its prologue. ``tiles`` and
    ``splits`` as in ``quantized_linear``.
    """
    form = None if tiles or splits else row_form(x, weights, bias)
    if form is not None:
        prenorm = residual.allocate_prenorm(form.tiles.outputs, form.tiles.warps_n)
        launch_row(x, weights, bias, residual.hidden, form, residual=residual, prenorm=prenorm)
        return prenorm
    tiles = tiles or tiles_for(len(x), weights, x.dtype)
    prenorm = residual.allocate_prenorm(tiles.outputs)
    native_fp8 = has_native_fp8(x.device)
    _launch(x, weights, bias, residual.hidden, tiles, splits, native_fp8, residual=residual, prenorm=prenorm)
    return prenorm


@per_device
def has_native_fp8(device: torch.device) -> bool:
    """Whether ``device`` has instructions that convert FP8: compute capability 8.9 and later."""
    card = card_of(device)
    return card is not None and card.capability >= FP8_CAPABILITY


_DEQUANT_CONFIGS: dict[torch.device, DequantConfig] = {}


def set_dequant_config(device: torch.device, config: DequantConfig) -> None:
    """Set what ``dequant_config(device)`` returns in this process.

    Its buffer must be that of the plan's ledger. ``cuda`` without an index also sets the current device.
    """
    _DEQUANT_CONFIGS[device] = config
    if device.type == "cuda" and device.index is None:  # devices of tensors have an index
        _DEQUANT_CONFIGS[torch.device("cuda", torch.cuda.current_device())] = config


def dequant_config(device: torch.device) -> DequantConfig:
    """How ``device`` multiplies more than ``MAX_FUSED_ROWS`` rows: buffer size, and whether in FP8.

    ``DEFAULT_DEQUANT_CONFIG`` until ``set_dequant_config``.
    """
    return _DEQUANT_CONFIGS.get(device, DEFAULT_DEQUANT_CONFIG)


def has_inline_ptx(device: torch.device) -> bool:
    """Whether kernels on ``device`` may contain PTX: on CUDA, not in Triton's interpreter on a CPU."""
    return card_of(device) is not None


class DequantBuffer:
    """A dequantization buffer that stays, for passes that are captured as CUDA graphs.

    In a graph's pool each product's buffer may lie elsewhere, so that none stays in the card's L2 cache.
    Allocated by the first product that needs it, which must not be one that is captured.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer; 0 before it is needed."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block, products of this thread dequantize into this buffer."""
        token = _KEPT_BUFFER.set(self)
        try:
            yield
        finally:
            _KEPT_BUFFER.reset(token)

    def of(self, x: Tensor) -> Tensor:
        """The buffer for a product of ``x`` [dequant_config(x.device).scratch_bytes / itemsize]."""
        if self._buffer is None or self._buffer.dtype != x.dtype:
            self._buffer = _new_buffer(x)
        return self._buffer


_KEPT_BUFFER: ContextVar[DequantBuffer | None] = ContextVar("dequantization buffer", default=None)


def _new_buffer(x: Tensor) -> Tensor:
    capacity = dequant_config(x.device).scratch_bytes // x.dtype.itemsize
    return torch.empty(capacity, dtype=x.dtype, device=x.device)


def _dequantize_and_multiply(
    x: Tensor, weights: QuantizedWeight, bias: Tensor | None, native_fp8: bool
) -> Tensor:
    """Dequantize one slice of the weight at a time and multiply by torch.

    The buffer always has the same size, so that torch's allocator reuses one block for it.
    """
    kept = _KEPT_BUFFER.get()
    buffer = _new_buffer(x) if kept is None else kept.of(x)
    capacity = len(buffer)
    outputs, inputs = weights.out_features, weights.in_features
    slice_height = rows_per_slice(outputs, inputs, capacity)
    if slice_height >= outputs and launches_on(x.device):
        weight = buffer[: outputs * inputs].view(outputs, inputs)
        dequantize_weight_rows(weights, 0, weight, native_fp8)
        return F.linear(x, weight, bias)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    if not launches_on(x.device):
        return out
    part_weight = buffer[: slice_height * inputs].view(slice_height, inputs)
    part_weight_t = part_weight.T
    first = 0
    for out_part in out.split(slice_height, dim=1):
        rows = out_part.shape[1]
        if rows < slice_height:
            part_weight, part_weight_t = part_weight[:rows], part_weight_t[:, :rows]
        dequantize_weight_rows(weights, first, part_weight, native_fp8)
        torch.mm(x, part_weight_t, out=out_part)
        first += rows
    if bias is not None:
        out += bias
    return out


def rows_per_slice(outputs: int, inputs: int, capacity: int) -> int:
    """How many rows of a weight matrix [outputs, inputs] to dequantize at a time.

    ``capacity``: elements of the buffer. At least 1, even if a row does not fit; at least ``outputs`` if all
    rows do. A multiple of ``SLICE_MULTIPLE`` wherever that fits: a slice that starts off a 16-byte boundary
    in the output costs torch's GEMM two thirds of its speed.
    """
    limit = capacity // inputs // SLICE_MULTIPLE * SLICE_MULTIPLE
    if limit == 0:
        return max(capacity // inputs, 1)
    slices = -(-outputs // limit)
    return -(-outputs // (slices * SLICE_MULTIPLE)) * SLICE_MULTIPLE


def dequantize_weight_rows(weights: QuantizedWeight, first: int, out: Tensor, native_fp8: bool) -> None:
    """Dequantize n rows of ``weights`` from row ``first`` on into ``out`` [n, in_features], in its dtype.

    ``native_fp8``: convert FP8 in hardware.
    """
    from vlfit.kernels.gemm.dequantize_kernels import dequantize_kernel

    outputs, inputs = out.shape
    dequantize_kernel[(-(-outputs // DEQUANT_BLOCK_N), -(-inputs // DEQUANT_BLOCK_K))](
        *kernel_tensors(weights),
        out,
        first,
        first + outputs,
        inputs,
        weights.scale.shape[1],
        FORM=weight_form(weights, native_fp8),
        INLINE_PTX=has_inline_ptx(out.device),
        BLOCK_N=DEQUANT_BLOCK_N,
        BLOCK_K=DEQUANT_BLOCK_K,
        num_warps=4,
    )


def lookup_rows(token_ids: Tensor, weights: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Look up ``token_ids`` [n] in an embedding ``weights`` and dequantize: [n, in_features] in ``dtype``."""
    rows, width = len(token_ids), weights.in_features
    out = torch.empty((rows, width), dtype=dtype, device=weights.codes.device)
    if launches_on(out.device) and rows:
        from vlfit.kernels.gemm.dequantize_kernels import lookup_kernel

        lookup_kernel[(rows, -(-width // LOOKUP_BLOCK_K))](
            token_ids,
            *kernel_tensors(weights),
            out,
            weights.out_features,
            width,
            weights.scale.shape[1],
            FORM=weight_form(weights, native_fp8=False),
            INLINE_PTX=has_inline_ptx(out.device),
            BLOCK_K=LOOKUP_BLOCK_K,
            num_warps=4,
            **pdl_options(out.device),
        )
    return out


def _launch(
    x: Tensor | PreNormRows,
    weights: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    tiles: GemmTiles,
    splits: int | None,
    native_fp8: bool,
    swiglu: bool = False,
    residual: ResidualEpilogue | None = None,
    prenorm: PreNormRows | None = None,
) -> None:
    x, prologue = unwrap_rows(x)
    num_rows, outputs = len(x), weights.out_features
    splits = splits or plan.splits_for(num_rows, outputs, weights.in_features, tiles)
    partial = allocate_partial(out, splits, num_rows, outputs)
    if not launches_on(x.device):
        return
    from vlfit.kernels.gemm.quantized_kernels import quantized_matmul_kernel

    codes, scales, zeros = kernel_tensors(weights)
    quantized_matmul_kernel[(_num_tiles(outputs, num_rows, tiles, swiglu), splits)](
        x,
        codes,
        scales,
        zeros,
        x if bias is None else bias,
        partial,
        tile_counters(x.device),
        out,
        *epilogue_pointers(x, prologue, residual, prenorm),
        num_rows,
        outputs,
        codes.shape[1],
        x.stride(0),
        weights.scale.shape[1],
        _steps(weights, tiles, splits),
        *prologue_arguments(prologue),
        FORM=_product_form(weights, bias, tiles, splits, native_fp8, swiglu),
        SWIGLU=swiglu,
        **fusion_flags(prologue, residual),
        INLINE_PTX=has_inline_ptx(x.device),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(x.device),
    )


def quantized_linears(
    x: Tensor | PreNormRows, layers: Sequence[tuple[QuantizedWeight, Tensor | None]]
) -> Tensor:
    """Outputs of several products of one row, side by side: [1, sum of out_features], in the dtype of ``x``.

    ``layers``: weights and bias of each; ``x`` [1, in_features] as in ``quantized_linear``. Two matrices
    that a kernel for one row takes are multiplied at once.
    """
    row, _ = unwrap_rows(x)
    widths = [weights.out_features for weights, _ in layers]
    out = torch.empty((1, sum(widths)), dtype=row.dtype, device=row.device)
    forms = row_forms(row, layers) if len(layers) == 2 else None
    if forms is not None:
        launch_two(x, layers, forms, out)
        return out
    for (weights, bias), columns in zip(layers, out.split(widths, dim=1), strict=True):
        quantized_linear(x, weights, bias, out=columns)
    return out


def _num_tiles(outputs: int, rows: int, tiles: GemmTiles, swiglu: bool = False) -> int:
    width, tile_width = tiled_outputs(outputs, tiles.outputs, swiglu)
    return -(-width // tile_width) * -(-rows // tiles.rows)


def _steps(weights: QuantizedWeight, tiles: GemmTiles, splits: int) -> int:
    """Steps of ``tiles`` that each split takes."""
    return -(-weights.in_features // (splits * tiles.inputs))


@dataclass(frozen=True, slots=True)
class ProductForm(KernelConstant):
    """What a kernel of a product with quantized weights is compiled for: those, and its tile.

    - ``has_bias``: one is added. ``one_group``: an output has one scale. ``stages``: of loads.
    - ``block_m``, ``block_n``, ``block_k``: rows, outputs and inputs of a tile. ``even``: outputs and inputs
      are multiples. ``slices``: of a block of inputs, one per warp, or 1. ``splits``: of all inputs.
    - ``triggers_late``: the next launch, after the main loop (``launch.triggers_late``).
    """

    weights: WeightForm
    has_bias: bool
    one_group: bool
    even: bool
    block_m: int
    block_n: int
    block_k: int
    slices: int
    splits: int
    stages: int
    triggers_late: bool


def _product_form(
    weights: QuantizedWeight,
    bias: Tensor | None,
    tiles: GemmTiles,
    splits: int,
    native_fp8: bool,
    swiglu: bool = False,
) -> ProductForm:
    width, tile_width = tiled_outputs(weights.out_features, tiles.outputs, swiglu)
    return ProductForm(
        weights=weight_form(weights, native_fp8),
        has_bias=bias is not None,
        one_group=weights.scale.shape[1] == 1 and weights.super_scale is None,
        even=width % tile_width == 0 and weights.in_features % tiles.inputs == 0,
        block_m=tiles.rows,
        block_n=tiles.outputs,
        block_k=tiles.inputs,
        slices=tiles.parts,
        splits=splits,
        stages=tiles.stages,
        triggers_late=triggers_late(tiles.rows, weights.format, weights.codes.device),
    )
