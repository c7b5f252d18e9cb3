"""Products of one row on a GPU: which weights are multiplied as integers or floats, by which tiles, launches.

Device side: ``one_row_kernels.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlfit.checkpoint.quantization import FP8, LOOKED_UP
from vlfit.kernels.gemm.epilogue import (
    PreNormRows,
    ResidualEpilogue,
    epilogue_pointers,
    fusion_flags,
    prologue_arguments,
    tiled_outputs,
    unwrap_rows,
)
from vlfit.kernels.gemm.weights import (
    LOOKUP_OFFSET,
    LOOKUP_SIGN,
    QuantizedWeight,
    WeightForm,
    kernel_tensors,
    weight_form,
)
from vlfit.kernels.launch import KernelConstant, pdl_options
from vlfit.kernels.target import TargetCard, card_of, launches_on
from vlfit.machine.cards import FP8_CAPABILITY, KERNEL_CAPABILITY
from vlfit.plan.native.tiles import MANY_MULTIPROCESSORS

GROUP = 32  # inputs that a lane multiplies at a time, and that share a scale of the row's integers
DENSE = "dense"  # the format of weights in the dtype of the row
REGISTERS = 65536  # of a multiprocessor, of every card from 7.0 to 12.0
MOST_REGISTERS = 248  # of a thread, in whole eights
SHARED_MEMORY = 100 * 1024  # bytes of a multiprocessor, of the cards that have least
# Inputs that a program can hold in its shared memory, at most two bytes and three eighths each.
MAX_INPUTS = 32768


@dataclass(frozen=True, slots=True)
class RowTiles(KernelConstant):
    """How a product of one row is cut.

    ``warps``: of a program. ``warps_k``: of them that share an output's inputs; the others have outputs of
    their own. ``lane_outputs``: that a lane multiplies by the same inputs. ``ahead``: steps whose weights are
    loaded ahead. ``programs``: of a multiprocessor at a time, which multiply tiles in turn; 0: each tile has
    its own.
    """

    warps: int
    warps_k: int
    lane_outputs: int
    ahead: int
    programs: int

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return 2 * self.lane_outputs * self.warps_n

    @property
    def warps_n(self) -> int:
        """Warps with outputs of their own, which each store a sum of squares."""
        return self.warps // self.warps_k


def row_tiles(
    form: WeightForm, outputs: int, inputs: int, multiprocessors: int, swiglu: bool = False
) -> RowTiles:
    """Tiles for one row by a matrix [outputs, inputs] on a card of as many ``multiprocessors``, 0: unknown.

    ``swiglu``: the epilogue applies it, which needs a gate and its factor in one lane. A product takes as
    long as memory takes to answer, so what counts is how much a multiprocessor asks for at a
    time, and that all have as much to do. Programs that multiply tiles in turn load the next one's weights
    meanwhile, and prepare the row once; 16 bits, which need few instructions, gain more by small programs
    that the card hands out as others end. Swept in whole decode steps of 4B (int4, FP8) and 2B (FP8, 16 bits)
    on an H200 and on 30 of its multiprocessors (docs/log.md).
    """
    share = outputs / max(multiprocessors, 1)  # of each
    many = not 0 < multiprocessors < MANY_MULTIPROCESSORS
    if form.format == DENSE:
        if many:
            return RowTiles(8, 4, 2, 4, 2) if inputs > 4096 else RowTiles(16, 2, 2, 8, 1)
        if inputs > 8192:
            return RowTiles(8, 2, 2, 4, 2)
        return RowTiles(4, 1, 2, 8 if share < 128 else 4, 0)
    if form.format == FP8:
        if many and inputs > 3072:
            return RowTiles(16, 4, 2, 4, 1) if 4096 < inputs <= 8192 else RowTiles(16, 2, 2, 8, 1)
        if many:
            if inputs <= 2048 and share >= 24:
                return RowTiles(16, 1, 2, 4, 1) if share < 64 else RowTiles(4, 1, 4, 4, 4)
            return RowTiles(8, 1 if share < 64 else 2, 2, 8, 2)
        if inputs > 4096 and not swiglu:
            return RowTiles(8, 2, 1, 8, 2)
        if inputs > 3072:
            return RowTiles(8, 2, 2, 4, 2)
        if inputs > 2048 and share >= 256:
            return RowTiles(8, 1, 2, 4, 2)
        return RowTiles(4, 1, 2, 8, 3 if 96 <= share < 256 else 4)
    takes_more = form.two_level or form.codebook != ""  # instructions, for scales or codes
    if form.bits == 8 and not takes_more:
        if share < 32:
            return RowTiles(16, 2, 2, 4, 1) if inputs <= 8192 else RowTiles(8, 4, 2, 2, 3)
        return RowTiles(16, 1, 2, 4, 1) if share < (192 if many else 64) else RowTiles(8, 1, 2, 2, 3)
    if share < 32 or (takes_more and inputs > 8192):
        return RowTiles(8, 2, 2, 4, 2) if inputs <= 8192 else RowTiles(16, 2, 2, 4, 1)
    if inputs > 8192 and form.bits == 4 and not many:
        return RowTiles(8, 2, 2, 4, 2)
    if share < 64:
        return RowTiles(16, 1, 2, 4, 1)
    if form.bits > 4:
        return RowTiles(8, 1, 2, 2, 0) if many else RowTiles(8, 1, 2, 4, 2 if share > 128 else 3)
    if form.codebook != "" and share > 128:
        return RowTiles(16, 1, 2, 2, 2)
    if not takes_more and share > 320:
        return RowTiles(8, 1, 4, 4, 2)
    return RowTiles(8, 1, 2, 4 if takes_more else 2, 3)


@dataclass(frozen=True, slots=True)
class RowForm(KernelConstant):
    """What a kernel that multiplies one row is compiled for: its weights and its tiles.

    - ``has_bias``: one is added. ``inputs``: of the layer. ``row_words``: words of codes of an
      output, of integers.
    """

    weights: WeightForm
    has_bias: bool
    inputs: int
    row_words: int
    tiles: RowTiles

    @property
    def floats(self) -> bool:
        """Whether weights are multiplied as floats: FP8, and 16 bits."""
        return self.weights.format in (FP8, DENSE)

    @property
    def lane_inputs(self) -> int:
        """Neighbouring inputs of a lane in a step: a group of 32 integers, or 16 bytes of floats."""
        return 128 // self.weights.bits if self.floats else GROUP

    @property
    def steps(self) -> int:
        """Steps of an output's inputs."""
        return -(-self.inputs // (16 * self.lane_inputs * self.tiles.warps_k))

    @property
    def ahead(self) -> int:
        """Steps that are loaded ahead."""
        return min(self.tiles.ahead, self.steps)

    @property
    def has_scales(self) -> bool:
        """Whether floats have scales for some of an output's inputs."""
        return self.weights.format == FP8 and not self.one_scale

    @property
    def group_words(self) -> int:
        """Words of codes of 32 inputs, without the lowest bits of 5 and 6."""
        return 8 if self.weights.bits == 8 else 4

    @property
    def low_bits(self) -> int:
        """Bits of a code beyond the upper four."""
        return self.weights.bits - 4 if self.weights.bits in (5, 6) else 0

    @property
    def looked_up(self) -> bool:
        """Whether codes are looked up in a table."""
        return self.weights.codebook in LOOKED_UP

    @property
    def negated(self) -> bool:
        """Whether tables have the negative of what codes stand for."""
        return self.looked_up and LOOKUP_SIGN[self.weights.codebook] < 0

    @property
    def even_and_odd(self) -> bool:
        """Whether even codes are multiplied apart from odd ones."""
        return self.weights.bits < 8 and not self.looked_up

    @property
    def halves(self) -> int:
        """Sums of a group of 32 inputs: 2 if a scale is for 16."""
        return 2 if self.weights.scale_k == 16 else 1

    @property
    def one_scale(self) -> bool:
        """Whether each output has one scale, applied at last."""
        return (
            self.weights.format != DENSE
            and self.weights.scale_k >= self.inputs
            and not self.weights.two_level
        )

    @property
    def shift(self) -> int:
        """Integer sums are 2 to this power times the sum of codes by integers."""
        return 4 if self.even_and_odd and not self.low_bits else 0

    @property
    def unit(self) -> int:
        """2 to the power of ``shift``."""
        return 1 << self.shift

    @property
    def zero(self) -> int:
        """What is subtracted from a code, in the units of integer sums."""
        if self.weights.codebook == "odd":  # 7.5, before sums are doubled
            return 15 * self.unit // 2
        if self.looked_up:
            return LOOKUP_OFFSET
        if self.weights.bits == 8 or self.weights.affine:
            return 0
        return (1 << self.weights.bits - 1) * self.unit


def row_form(
    x: Tensor,
    weights: QuantizedWeight,
    bias: Tensor | None,
    tiles: RowTiles | None = None,
    swiglu: bool = False,
) -> RowForm | None:
    """How ``x`` is multiplied by ``weights`` as integers, or FP8 as floats; None if it is not.

    It must be one row of 16-bit floats, on a GPU that converts FP8 where there is any. Integers must share
    scales by 16 inputs or by multiples of 32, FP8 by multiples of 64 or by a whole row. ``tiles``: None for
    ``row_tiles``, which is told ``swiglu``.
    """
    card = card_of(x.device)
    if card is None or not _is_row(x):
        return None
    form = weight_form(weights, native_fp8=True)
    inputs = weights.in_features
    if weights.format == FP8 and (card.capability < FP8_CAPABILITY or not _in_words(weights.codes)):
        return None
    if not _has_row_form(form, weights, inputs):
        return None
    tiles = tiles or row_tiles(form, weights.out_features, inputs, card.multiprocessors, swiglu)
    codes = weights.codes
    row_words = codes.shape[1] if codes.dtype == torch.int32 else codes.shape[1] // 4
    return RowForm(form, bias is not None, inputs, row_words, tiles)


def dense_row_form(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: RowTiles | None = None, swiglu: bool = False
) -> RowForm | None:
    """How ``x`` is multiplied by ``weight`` [outputs, inputs], both in 16 bits; None if it is not one row.

    ``tiles`` and ``swiglu``: as in ``row_form``.
    """
    card = card_of(x.device)
    if card is None or card.capability < KERNEL_CAPABILITY or not _is_row(x) or weight.dtype != x.dtype:
        return None
    outputs, inputs = weight.shape
    if inputs % 8 or inputs > MAX_INPUTS or not weight.is_contiguous() or not _in_words(weight):
        return None
    form = WeightForm(
        format=DENSE,
        bits=16,
        codebook="",
        native_fp8=False,
        has_zeros=False,
        affine=False,
        two_level=False,
        scale_n=1,
        scale_k=inputs,
        super_k=0,
        span=inputs,
        scales_in_words=False,
    )
    tiles = tiles or row_tiles(form, outputs, inputs, card.multiprocessors, swiglu)
    return RowForm(form, bias is not None, inputs, 0, tiles)


def _is_row(x: Tensor) -> bool:
    return len(x) == 1 and x.dtype in (torch.float16, torch.bfloat16)


def _in_words(tensor: Tensor) -> bool:
    """Whether ``tensor`` starts at a whole word of 32 bits, as weights are loaded. Allocations do."""
    return tensor.storage_offset() * tensor.itemsize % 4 == 0


def _has_row_form(form: WeightForm, weights: QuantizedWeight, inputs: int) -> bool:
    if form.format == FP8:
        if inputs % 16 or inputs > MAX_INPUTS:
            return False
        return form.scale_k % 64 == 0 or form.scale_k >= inputs  # a sum is of 64 inputs
    if form.scale_n != 1 or inputs % GROUP or inputs > MAX_INPUTS:
        return False
    if form.two_level and (form.super_k % GROUP or inputs % form.super_k):
        return False
    if form.has_zeros and form.scale_k % GROUP:
        return False
    if form.scale_k == 16:
        return weights.scale.dtype != torch.float32 and _in_words(weights.scale)  # two at a time
    return form.scale_k % GROUP == 0 and inputs % form.scale_k == 0


def row_forms(x: Tensor, layers: Sequence[tuple[QuantizedWeight, Tensor | None]]) -> list[RowForm] | None:
    """``row_form`` of ``layers``, weights and bias of each, for one launch; None if they have none.

    Tiles are those for all outputs together. Programs of both must have as many warps.
    """
    card = card_of(x.device)
    if card is None:
        return None
    outputs = sum(weights.out_features for weights, _ in layers)
    forms: list[RowForm] = []
    for weights, bias in layers:
        kind = weight_form(weights, native_fp8=True)
        tiles = row_tiles(kind, outputs, weights.in_features, card.multiprocessors)
        form = row_form(x, weights, bias, tiles)
        if form is None or (forms and tiles.warps != forms[0].tiles.warps):
            return None
        forms.append(form)
    return forms


def launch_row(
    x: Tensor | PreNormRows,
    weights: QuantizedWeight | Tensor,
    bias: Tensor | None,
    out: Tensor,
    form: RowForm,
    swiglu: bool = False,
    residual: ResidualEpilogue | None = None,
    prenorm: PreNormRows | None = None,
) -> None:
    """Multiply one row. Arguments as in ``quantized.quantized_linear``; ``form``: from ``row_form``.

    Raises ``ValueError`` for ``swiglu`` with tiles that have a gate and its factor in different lanes.
    """
    if swiglu and form.tiles.lane_outputs < 2:
        raise ValueError(f"SwiGLU takes two outputs of a lane: {form.tiles}")
    row, prologue = unwrap_rows(x)
    if out.dtype != row.dtype:
        raise TypeError(f"the product of {row.dtype} is written to {out.dtype}")
    if not launches_on(row.device):
        return
    from vlfit.kernels.gemm.one_row_kernels import one_row_kernel

    if isinstance(weights, Tensor):
        outputs, tensors = len(weights), (weights, weights, weights)
    else:
        outputs, tensors = weights.out_features, kernel_tensors(weights)
    tiles = _num_tiles(outputs, form, swiglu)
    programs = min(tiles, _most_programs(form, row.device) or tiles)
    one_row_kernel[(programs,)](
        row,
        *tensors,
        row if bias is None else bias,
        out,
        *epilogue_pointers(row, prologue, residual, prenorm),
        outputs,
        *prologue_arguments(prologue),
        FORM=form,
        SWIGLU=swiglu,
        **fusion_flags(prologue, residual),
        **_schedule(form, row.device, one_tile=programs == tiles),
        **pdl_options(row.device),
    )


def launch_two(
    x: Tensor | PreNormRows,
    layers: Sequence[tuple[QuantizedWeight, Tensor | None]],
    forms: Sequence[RowForm],
    out: Tensor,
) -> None:
    """Multiply one row by two matrices; ``out`` has their outputs side by side.

    A program for each tile: one for several would hold the registers of the form that takes more.
    """
    row, prologue = unwrap_rows(x)
    if not launches_on(row.device):
        return
    from vlfit.kernels.gemm.one_row_kernels import two_matrices_kernel

    pointers: list[Any] = []
    for weights, bias in layers:
        pointers += [*kernel_tensors(weights), row if bias is None else bias]
    tiles = [_num_tiles(weights.out_features, form) for (weights, _), form in zip(layers, forms, strict=True)]
    flags = fusion_flags(prologue, None)
    two_matrices_kernel[(sum(tiles),)](
        row,
        *pointers,
        out,
        row if prologue is None else prologue.square_sums,
        *(weights.out_features for weights, _ in layers),
        tiles[0],
        *prologue_arguments(prologue),
        FIRST=forms[0],
        SECOND=forms[1],
        PRENORM=flags["PRENORM"],
        BLOCK_SUMS=flags["BLOCK_SUMS"],
        num_warps=forms[0].tiles.warps,
        **pdl_options(row.device),
    )


def _most_programs(form: RowForm, device: torch.device) -> int:
    """Programs that ``device`` runs at a time; 0: as many as there are tiles."""
    return _programs(form) * _card(device).multiprocessors


def _programs(form: RowForm) -> int:
    """``tiles.programs``, or as many as a multiprocessor has shared memory for: each holds the whole row."""
    row = form.inputs * 2 + form.inputs // GROUP * 4 * (1 + form.halves)
    return min(form.tiles.programs, max(SHARED_MEMORY // (row + 1024), 1))


def _schedule(form: RowForm, device: torch.device, *, one_tile: bool) -> dict[str, int | bool]:
    """Options of a launch: warps, whether a program multiplies one tile only, and registers at most.

    Where programs multiply tiles in turn, ``_programs`` of them must fit a multiprocessor's registers: one
    that waits for another to end doubles the time. Codes of 5 to 8 bits on few multiprocessors have neither
    this limit (gate and up in Q8_0 take 24.8 us without, 27.4 with it) nor a kernel for one tile only (down
    takes 15.8 us without, 18.6 with it).
    """
    tiles = form.tiles
    options: dict[str, int | bool] = {"ONE_TILE": one_tile, "num_warps": tiles.warps}
    if 4 < form.weights.bits <= 8 and not form.floats and _card(device).has_few_multiprocessors:
        return options | {"ONE_TILE": False}
    if not one_tile:
        options["maxnreg"] = min(REGISTERS // (_programs(form) * tiles.warps * 32) // 8 * 8, MOST_REGISTERS)
    return options


def _card(device: torch.device) -> TargetCard:
    card = card_of(device)
    assert card is not None  # or there were no form
    return card


def _num_tiles(outputs: int, form: RowForm, swiglu: bool = False) -> int:
    width, tile_width = tiled_outputs(outputs, form.tiles.outputs, swiglu)
    return -(-width // tile_width)
