"""``x @ weight.T + bias`` on a CPU with weights as they are stored: in 4, 8 or 16 bits, or blocks of a GGUF.

A few rows are multiplied from the codes (``products.c``): codes of 4 and 8 bits with inputs of 22 bits of
their block's largest, where the CPU has instructions for that, all else in float32. For more rows CPUs with
AMX multiply in parts of bfloat16 (``tiles.c``), others codes of 4 and 8 bits in integers (``gemm.c``) and the
rest in float32 (``floats.c``), both with inputs of fewer bits for weights with ``rounds_inputs``; without
vector units slices of the weights are dequantized to float32 in a small buffer, and torch multiplies. Threads
are their own (``threads.c``). ``available`` says whether the compiled code can be had.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vlfit.checkpoint.gguf.stored_blocks import EXACT_FORMS
from vlfit.kernels.cpu.library import load_library
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.plan.native.ram import GROUP_MULTIPLE, is_group

FEW_ROWS = 64  # at most this many are multiplied from the codes, where torch multiplies more
FEW_ROWS_WITH_TILES = 16  # the same on a CPU with AMX
FEW_ROWS_WITH_GEMM = 16  # where more are multiplied in integers
FEW_ROWS_WITH_FLOATS = 16  # and where more are multiplied by our own product in float32
# Bytes of weights that are dequantized to float32 at a time; with fewer torch packs its inputs too often.
# Without torch: of inputs that are brought into another order, or form, at a time.
MANY_ROWS_BYTES = 2**24
_INT4, _INT8, _FP8, _FP8_WITH_NAN, _BF16, _F16 = range(6)
_SCALES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_TWO_LEVEL, _AFFINE, _BLOCKS, _AFFINE_BLOCKS = 4, 5, 6, 7
_DENSE = {torch.bfloat16: _BF16, torch.float16: _F16}
# Blocks of GGUF files: number of the format in ``products.c``, weights and bytes of a block.
_BLOCK_FORMATS = {
    "BF16": (_BF16, 1, 2),
    "F16": (_F16, 1, 2),
    "Q4_0": (6, 32, 18),
    "Q4_1": (7, 32, 20),
    "Q5_0": (8, 32, 22),
    "Q5_1": (9, 32, 24),
    "Q8_0": (10, 32, 34),
    "IQ4_NL": (11, 32, 18),
    "MXFP4": (12, 32, 17),
    "NVFP4": (13, 64, 36),
    "Q2_K": (14, 256, 84),
    "Q3_K": (15, 256, 110),
    "Q4_K": (16, 256, 144),
    "Q5_K": (17, 256, 176),
    "Q6_K": (18, 256, 210),
    "IQ4_XS": (19, 256, 136),
}


def available() -> bool:
    """Whether the compiled products can be had on this computer; compiles them at the first call."""
    return load_library() is not None


class _Weight(ctypes.Structure):
    """``Weight`` of ``products.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zeros", "supers", "order")),
        *(
            (name, ctypes.c_int64)
            for name in ("outputs", "inputs", "row_bytes", "groups", "group", "block_rows", "super_groups")
        ),
        *((name, ctypes.c_int32) for name in ("format", "scale_kind", "flip", "rounds")),
    )


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight matrix as it lies in a GGUF file.

    ``rows``: uint8 [outputs, bytes of a row], whole blocks of ``type`` (``Q4_K``; ``BF16`` and ``F16`` too).
    ``order``: int32 [outputs], the row of ``rows`` that each output is; None: in order.
    """

    rows: Tensor
    type: str
    order: Tensor | None = None


Weights = QuantizedWeight | BlockWeight | Tensor


class StoredWeight:
    """A weight matrix [outputs, inputs] of which only the stored bytes are in memory.

    ``weights``: quantized, on a CPU, in blocks of a GGUF file, or a matrix in bfloat16 or float16; tensors
    may be views of a mapped file. ``plus_128``: int8 codes are stored plus 128. ``rounds_inputs``: products
    of many rows may round their inputs as much as products on a GPU do (``input_roundoff``). Raises
    ``ValueError`` for a form that ``products.c`` does not know, or where ``available`` is false.
    """

    def __init__(self, weights: Weights, *, plus_128: bool = False, rounds_inputs: bool = False) -> None:
        library = load_library()
        if library is None:
            raise ValueError("the compiled products are not available")
        self._library = library
        self.form = _described(library, weights, plus_128)
        self.form.rounds = rounds_inputs
        self.outputs: int = self.form.outputs
        self.inputs: int = self.form.inputs
        # What the addresses in ``form`` belong to; files stay mapped for as long.
        self._tensors: tuple[Tensor, ...] = _tensors_of(weights)
        self._order = weights.order if isinstance(weights, BlockWeight) else None
        self.in_gemm = bool(library.vlfit_in_gemm(ctypes.byref(self.form)))
        tiled = _has_tiles(library)
        self._rounded_bits: int = 0 if tiled else library.vlfit_rounded_bits(ctypes.byref(self.form))

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T``: see ``multiply``."""
        return multiply((self,), x, None)

    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, mapped or not, without ``order``; 0 after ``free``."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def rounds_inputs(self) -> bool:
        """Whether products of many rows may round their inputs."""
        return bool(self.form.rounds)

    @property
    def input_roundoff(self) -> float:
        """By how much a product rounds its inputs, as a share of the rms of those that share a step.

        Two parts in bfloat16 are within 2**-18, and what weights of two parts leave out makes it 2**-16.4
        (``tiles.c``). Integers of 16 bits are within 2**-16 of the largest of 128 inputs, evenly, and that
        is sqrt(128) times their rms at most (``gemm.c``). Those of 8 bits are within 1/254 of the largest,
        which is 4 times the rms of normal numbers at most (one piece in a hundred has more); among inputs
        with one that stands out, up to three times as much. One part in bfloat16 is within 2**-8 of each
        input, and of each weight that has more bits than that (``floats.c``); attention beside products that
        may round is within as much (``pair_attention.c``). 0: in float32, or in three digits, which come
        near.
        """
        exact = self._product_roundoff()
        return max(exact, 2.0**-8) if self.rounds_inputs and _attends_in_pairs(self._library) else exact

    def _product_roundoff(self) -> float:
        """``input_roundoff`` of the product itself."""
        if _has_tiles(self._library):
            return float(2.0 ** (-18 if self.form.format == _BF16 else -16.4))
        if self._rounded_bits == 16:
            return float(2.0**-8 * (1 if self.form.format == _BF16 else 2**0.5))
        if self.in_gemm:
            return float((4 / 254 if self._rounded_bits == 8 else 2.0**-16 * 128**0.5) / 3**0.5)
        return 0.0

    @property
    def is_loaded(self) -> bool:
        """False after ``free``."""
        return bool(self._tensors)

    def free(self) -> None:
        """Free or unmap the weights; the object can no longer be called."""
        self._tensors, self._order, self.form = (), None, _Weight()

    def rows(self, index: Tensor) -> Tensor:
        """The rows ``index`` [n] int64 of the matrix in float32: [n, inputs]. Indices are checked."""
        if len(index) and not (int(index.min()) >= 0 and int(index.max()) < self.outputs):
            raise IndexError(f"a row outside of 0 to {self.outputs - 1}")
        index = index.long().contiguous()
        out = torch.empty((len(index), self.inputs), dtype=torch.float32)
        self._library.vlfit_lookup(
            ctypes.byref(self.form),
            ctypes.c_void_p(index.data_ptr()),
            ctypes.c_int64(len(index)),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out

    def dequantize(self, first: int, out: Tensor) -> None:
        """Dequantize n rows from ``first`` on to float32, into ``out`` [n, inputs], contiguous."""
        self._library.vlfit_dequantize(
            ctypes.byref(self.form),
            ctypes.c_int64(first),
            ctypes.c_int64(len(out)),
            ctypes.c_void_p(out.data_ptr()),
            torch.get_num_threads(),
        )


def multiply(parts: Sequence[StoredWeight], x: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` [rows, outputs of all parts] float32 for ``x`` [rows, inputs] float32.

    ``bias``: [outputs of all parts] float32, or None.
    """
    outputs = sum(part.outputs for part in parts)
    if not len(x):
        return torch.empty((0, outputs), dtype=torch.float32)
    library = parts[0]._library
    product = _product_of(library, parts, len(x))
    if product is None:
        return _multiply_many(parts, x, bias, outputs)
    x = x.contiguous()
    out = torch.empty((len(x), outputs), dtype=torch.float32)
    forms = stored_forms(parts)
    if product is library.vlfit_multiply:
        _call(product, forms, x, bias, out)
        return out
    height = max(MANY_ROWS_BYTES // (4 * parts[0].inputs) // 96 * 96, 96)
    for some, to in zip(x.split(height), out.split(height), strict=True):
        _call(product, forms, some, bias, to)
    return out


def _product_of(library: ctypes.CDLL, parts: Sequence[StoredWeight], rows: int) -> Callable[..., int] | None:
    """What multiplies ``rows`` rows with ``parts``; None: torch, as ``_multiply_many``."""
    product: Callable[..., int] = library.vlfit_multiply
    if _has_tiles(library):
        return product if rows <= FEW_ROWS_WITH_TILES else library.vlfit_multiply_tiles
    if all(part.in_gemm for part in parts):
        return product if rows <= FEW_ROWS_WITH_GEMM else library.vlfit_multiply_gemm
    if library.vlfit_has_floats():
        return product if rows <= FEW_ROWS_WITH_FLOATS else library.vlfit_multiply_floats
    return product if rows <= FEW_ROWS else None


def stored_forms(parts: Sequence[StoredWeight]) -> "ctypes.Array[_Weight]":
    """``parts`` as an array of ``Weight`` of ``products.c``, valid until one of them is freed."""
    return (_Weight * len(parts))(*(part.form for part in parts))


@cache
def _has_tiles(library: ctypes.CDLL) -> bool:
    """Whether many rows are multiplied by ``tiles.c``; asks the system for the use of AMX."""
    return bool(library.vlfit_has_tiles())


@cache
def _attends_in_pairs(library: ctypes.CDLL) -> bool:
    """Whether attention of many queries may be computed in bfloat16 (``pair_attention.c``)."""
    return bool(library.vlfit_attends_in_pairs())


def _call(
    function: Callable[..., int], forms: ctypes.Array[_Weight], x: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    failed = function(
        forms,
        ctypes.c_int64(len(forms)),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(len(x)),
        None if bias is None else ctypes.c_void_p(bias.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the inputs of a product")


def _multiply_many(parts: Sequence[StoredWeight], x: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``multiply``, by torch, of slices in float32."""
    out = torch.empty((len(x), outputs), dtype=torch.float32)
    inputs = parts[0].inputs
    height = max(MANY_ROWS_BYTES // (4 * inputs) // 16 * 16, 16)
    buffer = _buffer(height * inputs).view(height, inputs)
    begin = 0
    for part in parts:
        for first in range(0, part.outputs, height):
            some = buffer[: min(height, part.outputs - first)]
            part.dequantize(first, some)
            torch.mm(x, some.T, out=out[:, begin : begin + len(some)])
            begin += len(some)
    return out if bias is None else out.add_(bias)


_kept = threading.local()


def _buffer(count: int) -> Tensor:
    """``count`` float32 of this thread's buffer, which is kept: fresh pages would be zeroed each time."""
    if not hasattr(_kept, "buffer") or len(_kept.buffer) < count:
        with torch.inference_mode(False):
            _kept.buffer = torch.empty(max(count, MANY_ROWS_BYTES // 4), dtype=torch.float32)
    buffer: Tensor = _kept.buffer
    return buffer[:count]


def read_memory(tensor: Tensor, threads: int) -> int:
    """Read all bytes of ``tensor``, in whole MiB, with ``threads``: how fast memory is. Returns their sum."""
    library = load_library()
    if library is None:
        raise ValueError("the compiled products are not available")
    size = ctypes.c_int64(tensor.nbytes)
    return int(library.vlfit_read(ctypes.c_void_p(tensor.data_ptr()), size, threads))


def _tensors_of(weights: Weights) -> tuple[Tensor, ...]:
    if isinstance(weights, Tensor):
        return (weights,)
    if isinstance(weights, BlockWeight):
        return (weights.rows,)
    stored = (weights.codes, weights.scale, weights.zero_point, weights.super_scale)
    return tuple(tensor for tensor in stored if tensor is not None)


def _described(library: ctypes.CDLL, weights: Weights, plus_128: bool) -> _Weight:
    if isinstance(weights, BlockWeight):
        return _described_blocks(weights)
    form = _Weight()
    if isinstance(weights, Tensor):
        _check(weights.is_contiguous() and weights.dtype in _DENSE, "a matrix in 16 bits")
        form.codes, form.format = weights.data_ptr(), _DENSE[weights.dtype]
        form.outputs, form.inputs = weights.shape
        form.row_bytes, form.groups, form.group, form.block_rows = 2 * form.inputs, 1, form.inputs, 1
        return form
    codes, scale, supers, zeros = weights.codes, weights.scale, weights.super_scale, weights.zero_point
    for tensor in (codes, scale, supers, zeros):
        _check(tensor is None or (tensor.is_contiguous() and tensor.device.type == "cpu"), "in RAM")
    form.outputs, form.inputs = weights.out_features, weights.in_features
    form.block_rows = weights.block_shape[0]
    form.groups, form.group = scale.shape[1], min(weights.block_shape[1], weights.in_features)
    _check(is_group(form.group, form.inputs), f"groups of {form.group} inputs")
    _check(-(-form.inputs // form.group) == form.groups, "as many groups as the inputs have")
    _check(-(-form.outputs // form.block_rows) == len(scale), "as many scales as the outputs have")
    form.codes, form.scale = codes.data_ptr(), scale.data_ptr()
    form.row_bytes = codes.shape[1] * codes.dtype.itemsize
    form.format = {torch.int32: _INT4, torch.int8: _INT8, torch.float8_e4m3fn: _FP8}[codes.dtype]
    if form.format == _FP8 and library.vlfit_has_nan(
        ctypes.c_void_p(codes.data_ptr()), ctypes.c_int64(codes.numel())
    ):
        form.format = _FP8_WITH_NAN
    if form.format == _INT4:
        _check(form.inputs % form.groups == 0 and form.group % GROUP_MULTIPLE == 0, "whole groups")
    form.flip = 0x80 if plus_128 else 0
    if supers is not None:
        form.scale_kind = _AFFINE if weights.is_affine else _TWO_LEVEL
        form.supers, form.super_groups = supers.data_ptr(), supers.shape[1]
        _check(form.groups % form.super_groups == 0 and form.block_rows == 1, "whole super-blocks")
    else:
        _check(scale.dtype in _SCALES, f"scales in {scale.dtype}")
        form.scale_kind = _SCALES[scale.dtype]
    if zeros is not None:
        _check(zeros.shape == (-(-form.outputs // 8), form.groups) and form.block_rows == 1, "zero points")
        form.zeros = zeros.data_ptr()
    return form


def _described_blocks(weights: BlockWeight) -> _Weight:
    _check(weights.type in _BLOCK_FORMATS, f"other blocks than {weights.type}")
    rows, order, form = weights.rows, weights.order, _Weight()
    form.format, count, size = _BLOCK_FORMATS[weights.type]
    _check(rows.is_contiguous() and rows.dtype == torch.uint8 and rows.shape[1] % size == 0, "whole blocks")
    form.outputs, form.row_bytes = rows.shape
    form.inputs = form.row_bytes // size * count
    form.codes, form.block_rows = rows.data_ptr(), 1
    if order is not None:
        each = order.dtype == torch.int32 and order.shape == (form.outputs,) and order.is_contiguous()
        _check(each, "the row of each output")
        _check(bool(((order >= 0) & (order < form.outputs)).all()), "rows that are there")
        form.order = order.data_ptr()
    exact = EXACT_FORMS.get(weights.type)
    form.group = exact.group if exact is not None else form.inputs
    form.groups = form.inputs // form.group
    if exact is not None:
        form.scale_kind = _AFFINE_BLOCKS if exact.scale_dtype == "I16" else _BLOCKS
    return form


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"products of stored weights want {what}")
