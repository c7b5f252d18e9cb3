"""``x @ weights.T + bias`` where weights are FP8, int8 or int4 and stay so: no matrix is ever widened whole.

Knows: how narrow weights lie in memory, which kernel and which tile sizes a number of rows gets, and what
that allocates. Up to ``WIDEN_ROWS`` rows one kernel reads weights once and unpacks them on the fly. More rows
are bound by arithmetic, at which torch's bf16 product is two to five times as fast: there, a slice of the
matrix at a time is widened into a buffer of fixed size. How many programs there are is the plan's to say
(``plan/native/tiles.py``), which counts what they leave for one another.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.checkpoint.quantization import FP8, INT4, INT8
from vlfit.kernels.gemm.epilogue import Onto, Scaled, choices, numbers, pointers
from vlfit.kernels.launch import arrivals, overlapping
from vlfit.plan.native import tiles as plan
from vlfit.plan.native.tiles import (
    BUILT_IN,
    LEAST,
    MULTIPLIES_FLOAT8,
    WIDEN_ROWS,
    Card,
    Means,
    Table,
    Tiles,
    table_of,
)

# Which table of tiles a device has: what was measured on its card, or what is built in.


def card_of(device: torch.device) -> Card:
    """What tiles on ``device``, which is a GPU, are kept for."""
    return Card(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


@cache
def table_on(device: torch.device) -> Table:
    """The table of any device."""
    return table_of(card_of(device)) if device.type == "cuda" else BUILT_IN


LONGEST_SPAN = 128  # inputs that are summed before their scale is applied, at most
WIDEN_OUTPUTS = 32  # rows of weights that one program widens
SLICE_STEP = 128  # outputs of a slice are a multiple of it, as tiles of torch's products are


@dataclass(frozen=True, slots=True)
class NarrowWeights:
    """A matrix [outputs, inputs] in 8 or 4 bits.

    ``codes``: [outputs, inputs] float8_e4m3fn or int8 (inputs a multiple of 4), or [outputs, inputs / 8]
    int32, eight codes to a word, the first in its lowest bits. ``scale`` [ceil(outputs / block[0]),
    ceil(inputs / block[1])] is shared by ``block``.
    ``zero_point`` [ceil(outputs / 8), groups] int32, for int4; None: 8 everywhere.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    block: tuple[int, int]

    @property
    def form(self) -> str:
        """``fp8``, ``int8`` or ``int4``."""
        return _FORMS[self.codes.dtype]

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (8 if self.form == INT4 else 1)

    @property
    def span(self) -> int:
        """The largest power of two, at most 128, of inputs that share a scale in every row."""
        width = self.block[1]
        if width >= self.inputs:
            return LONGEST_SPAN  # one scale for all of them
        return min(width & -width, LONGEST_SPAN)


_FORMS = {torch.float8_e4m3fn: FP8, torch.int8: INT8, torch.int32: INT4}


def tiles_for(rows: int, weights: NarrowWeights, dtype: torch.dtype) -> Tiles:
    """The sizes for ``rows`` rows in ``dtype``."""
    if dtype == torch.float32:  # no matrix units for it, and twice the room
        return Tiles(8 if rows <= 8 else 16 if rows <= 16 else 32, 32, 32, 4, 2)
    return plan.tiles_for(rows, weights.form, table_on(weights.codes.device))


def linear(
    x: Tensor | Scaled,
    weights: NarrowWeights,
    bias: Tensor | None,
    tiles: Tiles | None = None,
    splits: int | None = None,
    hardware: bool | None = None,
    gated: bool = False,
) -> Tensor:
    """``x`` [rows, inputs] (rows may lie apart) times ``weights``: [rows, outputs] in the dtype of ``x``.

    ``gated``, for at most ``WIDEN_ROWS`` rows: the first half of the outputs are gates, and what comes is
    silu(gate) * other, [rows, outputs / 2]. Rows before their norm are as few.
    Allocates the output; for a product that is split as much as all outputs in float32 for each split; for
    one of more than ``WIDEN_ROWS`` rows the buffer of ``means``. ``tiles``, ``splits`` and ``hardware``
    (whether the card converts float8 itself) are chosen if not given.
    """
    all_rows = x.rows if isinstance(x, Scaled) else x
    rows = len(all_rows)
    if hardware is None:
        hardware = converts_float8(all_rows.device)
    if rows > WIDEN_ROWS and tiles is None:
        return _by_slices(all_rows, weights, bias, hardware)
    width = weights.outputs // 2 if gated else weights.outputs
    output = torch.empty((rows, width), dtype=all_rows.dtype, device=all_rows.device)
    if rows == 0:
        return output
    tiles = tiles or tiles_for(rows, weights, all_rows.dtype)
    _launch_matmul(x, weights, bias, output, tiles, splits, hardware, gated=gated)
    return output


def add_product(
    x: Tensor,
    weights: NarrowWeights,
    bias: Tensor | None,
    onto: Onto,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> Scaled:
    """Adds to the rows of ``onto``, at most ``WIDEN_ROWS``, in place, what ``linear`` gives; what comes is
    ready for the next.
    """
    tiles = tiles or tiles_for(len(x), weights, x.dtype)
    left = onto.scaled(tiles.outputs)
    hardware = converts_float8(x.device)
    _launch_matmul(x, weights, bias, onto.hidden, tiles, splits, hardware, onto=onto, left=left)
    return left


@cache
def converts_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MULTIPLIES_FLOAT8


_MEANS: dict[torch.device, Means] = {}


def provide(device: torch.device, means: Means) -> None:
    """``device`` has these ``means`` for many rows from now on, as the plan says that counts them."""
    _MEANS[device] = means
    if device.type == "cuda" and device.index is None:  # tensors tell its number
        _MEANS[torch.device("cuda", torch.cuda.current_device())] = means


def means(device: torch.device) -> Means:
    """What ``device`` has for many rows."""
    return _MEANS.get(device, LEAST)


def by_hand(device: torch.device) -> bool:
    """Whether kernels may name an instruction of NVIDIA's cards (Triton's interpreter knows none)."""
    return device.type == "cuda"


def _by_slices(x: Tensor, weights: NarrowWeights, bias: Tensor | None, hardware: bool) -> Tensor:
    """Always a buffer of the same size, so that torch's allocator has one block for all of them."""
    room = means(x.device).scratch // x.dtype.itemsize
    scratch = torch.empty(room, dtype=x.dtype, device=x.device)
    outputs, inputs = weights.outputs, weights.inputs
    height = slice_height(outputs, inputs, room)
    if height >= outputs and x.device.type != "meta":
        whole = scratch[: outputs * inputs].view(outputs, inputs)
        widen_rows(weights, 0, whole, hardware)
        return F.linear(x, whole, bias)
    output = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    if x.device.type == "meta":
        return output
    wide = scratch[: height * inputs].view(height, inputs)
    columns = wide.T
    first = 0
    for part in output.split(height, dim=1):
        rows = part.shape[1]
        if rows < height:
            wide, columns = wide[:rows], columns[:, :rows]
        widen_rows(weights, first, wide, hardware)
        torch.mm(x, columns, out=part)
        first += rows
    if bias is not None:
        output += bias
    return output


def slice_height(outputs: int, inputs: int, room: int) -> int:
    """Outputs in a slice, of at most ``room`` weights: all slices but the last have it.

    A multiple of ``SLICE_STEP`` wherever so many fit: a slice that begins off 16 bytes in the output costs
    torch's product two thirds of its speed.
    """
    most = room // inputs // SLICE_STEP * SLICE_STEP
    if most == 0:
        return max(room // inputs, 1)
    slices = -(-outputs // most)
    return -(-outputs // (slices * SLICE_STEP)) * SLICE_STEP


def widen_rows(weights: NarrowWeights, first: int, wide: Tensor, hardware: bool) -> None:
    """Fills ``wide`` [outputs, inputs] with the rows of ``weights`` from ``first`` on, in its dtype."""
    from vlfit.kernels.gemm.quantized_kernels import widen

    outputs, inputs = wide.shape
    widen[(-(-outputs // WIDEN_OUTPUTS), -(-inputs // LONGEST_SPAN))](
        *_stored(weights),
        wide,
        first,
        first + outputs,
        inputs,
        weights.scale.shape[1],
        form=weights.form,
        hardware=hardware and weights.form == FP8,
        has_zero_point=weights.zero_point is not None,
        scale_rows=weights.block[0],
        scale_width=weights.block[1],
        span=weights.span,
        tile_outputs=WIDEN_OUTPUTS,
        tile_inputs=LONGEST_SPAN,
        num_warps=4,
    )


def _launch_matmul(
    x: Tensor | Scaled,
    weights: NarrowWeights,
    bias: Tensor | None,
    output: Tensor,
    tiles: Tiles,
    splits: int | None,
    hardware: bool,
    gated: bool = False,
    onto: Onto | None = None,
    left: Scaled | None = None,
) -> None:
    norm = x if isinstance(x, Scaled) else None
    x = x.rows if isinstance(x, Scaled) else x
    rows, outputs = len(x), weights.outputs
    splits = splits or plan.splits_for(rows, outputs, weights.inputs, tiles)
    partial = output
    if splits > 1:
        partial = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    if x.device.type == "meta":
        return
    from vlfit.kernels.gemm.quantized_kernels import matmul

    steps = -(-weights.inputs // (splits * tiles.inputs))
    # Halves of a tile are gates and what they are for.
    cut = (outputs // 2, tiles.outputs // 2) if gated else (outputs, tiles.outputs)
    programs = -(-cut[0] // cut[1]) * -(-rows // tiles.rows)
    codes, scale, zero_point = _stored(weights)
    # One row of int4 whose groups a tile has enough rows for.
    apart = rows == 1 and weights.form == INT4 and tiles.inputs // tiles.parts <= tiles.rows * weights.span
    matmul[(programs, splits)](
        x,
        codes,
        scale,
        zero_point,
        x if bias is None else bias,
        partial,
        arrivals(x.device),
        output,
        *pointers(x, norm, onto, left),
        rows,
        outputs,
        codes.shape[1],
        x.stride(0),
        weights.scale.shape[1],
        steps,
        *numbers(norm),
        **_form(weights, hardware),
        by_hand=by_hand(x.device),
        has_bias=bias is not None,
        gated=gated,
        **choices(norm, onto),
        span=min(weights.span, tiles.inputs),
        apart=apart,
        one_scale=not apart and weights.scale.shape[1] == 1,
        whole=cut[0] % cut[1] == 0 and weights.inputs % tiles.inputs == 0,
        tile_rows=tiles.rows,
        tile_outputs=tiles.outputs,
        tile_inputs=tiles.inputs,
        parts=tiles.parts,
        splits=splits,
        stages=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **overlapping(x.device),
    )


def _stored(weights: NarrowWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors as the kernels take them; codes stand in for zero points that are not there."""
    codes = weights.codes
    if codes.dtype != torch.int32:
        codes = codes.view(torch.uint8 if codes.dtype == torch.float8_e4m3fn else torch.int32)
    return codes, weights.scale, codes if weights.zero_point is None else weights.zero_point


def _form(weights: NarrowWeights, hardware: bool) -> dict[str, int | bool | str]:
    return {
        "form": weights.form,
        "hardware": hardware and weights.form == FP8,
        "has_zero_point": weights.zero_point is not None,
        "scale_rows": weights.block[0],
        "scale_width": weights.block[1],
    }
