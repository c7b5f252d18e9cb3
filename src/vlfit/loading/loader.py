"""Streams a checkpoint's tensors from its files to the device, each byte read once.

Knows: dtypes, narrow weights, stacking of projections with one input, where tensors lie on the device.
Does not know: how bytes come there (``readers.py``), or the model. ``qwen3_vl/`` asks for tensors by name,
in the order of the ledger.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import CODES_PER_WORD, FP8, INT4, INT8
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import (
    COMPRESSED_SCALE,
    ORDER_SUFFIX,
    PACKED_SUFFIX,
    SCALE_SUFFIX,
    codes_per_word,
    narrow_form,
)
from vlfit.errors import MissingTensor, UnknownWeightsFormat
from vlfit.layers.cpu_linear import HalfEmbedding, HalfLinear, Packing, halves_on, piece_rows
from vlfit.layers.embedding import DenseEmbedding, Embedding, Int8Embedding
from vlfit.layers.linear import (
    DenseLinear,
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    Linear,
    Reordered,
    Stacked,
    common_block_rows,
    dequantize_fp8,
    dequantize_int4,
    dequantize_int8,
    join_zero_points,
    signed_codes,
)
from vlfit.loading.arena import Measure, Shelf, concatenated
from vlfit.loading.readers import Arrivals, Progress, torch_dtype
from vlfit.loading.repack import column_order
from vlfit.plan.allocator import SHELVED
from vlfit.plan.native.ram import in_halves, matrix_shape, table_in_halves

_HOST = torch.device("cpu")
_WIDENED_ROWS = 4096  # of 8 bits, at a time: a whole table of tokens in float32 would be a second model

Built = TypeVar("Built")


class Loader:
    """Reads tensors of one checkpoint. A context manager: leaving it waits for what is on its way, and unmaps
    the files.

    On a GPU tensors are where they stay before they are what they will be: whoever needs no more than their
    place need not wait.

    ``dtype`` is what floating-point tensors become. On a GPU FP8, int8 and int4 weights stay as they are; a
    CPU has no unit for them, so there they are widened while loading, large ones to 16 bits.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._formats = checkpoint.config.quantization
        self.device = device
        self.dtype = dtype
        self._keeps_narrow = kernels.used_on(device)
        self._halves = halves_on(device, dtype)
        self._packing = Packing()
        self._arrivals = Arrivals(device, checkpoint.weight_bytes, progress)
        self._orders: dict[str, Tensor] = {}
        self._to_sign: list[Tensor] = []  # packed codes of 8 bits that are on their way
        self._shelf: Measure | Shelf | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle()
                self._arrivals.tell()
        finally:
            self._arrivals.close()
            self._packing.close()

    def _settle(self) -> None:
        """Wait for what ``_copy`` was allowed to bring later, and do what waited for it."""
        self._arrivals.settle()
        self._packing.settle()
        with torch.inference_mode():
            while self._to_sign:
                signed_codes(self._to_sign.pop())

    @property
    def share(self) -> float:
        """Of the bytes that are there."""
        return self._arrivals.share

    @contextmanager
    def into_ram(self) -> Iterator[None]:
        """Until it is left tensors go to RAM, as they would lie on the device: narrow weights stay narrow."""
        device, self.device = self.device, torch.device("cpu")
        try:
            yield
        finally:
            self.device = device

    def together(self, build: Callable[[], Built]) -> Built:
        """What ``build`` makes of tensors of this loader; on a GPU the large ones are one allocation.

        ``build`` then runs twice, the first time without bytes, to see how large that is.
        """
        if not self._keeps_narrow:
            return build()
        device, self.device = self.device, torch.device("meta")
        self._shelf = measure = Measure()
        try:
            build()
            self.device = device
            self._shelf = Shelf(measure.size, device)
            return build()
        finally:
            self.device, self._shelf = device, None

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name`` on the device, in ``dtype``. Raises ``MissingTensor``."""
        info = self._info(name)
        tensor = self._empty(info.shape, self.dtype)
        self._copy(info, tensor)
        return tensor

    def rows(self, name: str, count: int) -> Iterator[Tensor]:
        """The matrix ``name`` in ``dtype``, ``count`` rows after the other. For matrices stored plainly."""
        info = self._info(name)
        height, width = info.shape
        row_bytes = info.bytes // max(height, 1)
        for first in range(0, height, count):
            some = min(count, height - first)
            start = info.start + first * row_bytes
            part = replace(info, shape=(some, width), start=start, end=start + some * row_bytes)
            tensor = torch.empty(part.shape, dtype=self.dtype, device=self.device)
            self._copy(part, tensor)
            yield tensor

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """One linear layer from the matrices ``names`` (each ``NAME.weight``) stacked in order.

        Several names make one product of what would be several: q, k and v share their input, as do gate
        and up. On a GPU those that are stored unlike each other stay several.
        """
        if self._keeps_narrow and len({self._stored_as(name) for name in names}) > 1:
            return Stacked([self.linear(name, bias=bias) for name in names])
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        stacked_bias = concatenated(biases) if len(biases) > 1 else biases[0] if biases else None
        form = self._form(names[0])
        if form is not None and self._keeps_narrow:
            build = {FP8: self._fp8_linear, INT8: self._int8_linear, INT4: self._int4_linear}
            layer, order = build[form](names, stacked_bias), self._order(names[0])
            return layer if order is None else Reordered(layer, order.to(torch.int32).to(self.device))
        if self._halves and in_halves([self._info(self._weight_of(name)) for name in names], self._formats):
            return HalfLinear([self._packing.half(part) for part in self._pieces(names)], stacked_bias)
        return DenseLinear(self._dense(names), stacked_bias)

    def _pieces(self, names: tuple[str, ...]) -> Iterable[Tensor]:
        """As ``_dense``, in pieces if that is one matrix that is stored plainly."""
        if len(names) > 1 or self._form(names[0]) is not None:
            return [self._dense(names)]
        return self.rows(f"{names[0]}.weight", piece_rows(self._shape(names[0])[1]))

    def _dense(self, names: tuple[str, ...]) -> Tensor:
        """The matrices ``names`` on top of one another, widened."""
        rows = [self._shape(name)[0] for name in names]
        weight = self._empty((sum(rows), self._shape(names[0])[1]), self.dtype)
        for name, part in zip(names, weight.split(rows), strict=True):
            self._fill(name, part)
        return weight

    def embedding(self, name: str) -> Embedding:
        """The table of tokens ``name``: in 8 bits where the files have it so and the device has kernels."""
        if self._keeps_narrow and self._form(name) == INT8:
            return Int8Embedding(*self._int8_stacked((name,)), self.dtype)
        if self._halves and table_in_halves(self._info(weight := self._weight_of(name)), self._formats):
            table, tied = self._stored(weight, self.device), self.checkpoint.config.tie_word_embeddings
            return HalfEmbedding(table, self._packing.head(table) if tied else None)
        return DenseEmbedding(self._dense((name,)))

    def _fp8_linear(self, names: tuple[str, ...], bias: Tensor | None) -> Linear:
        """``names`` on top of one another in FP8. Where blocks would straddle two of them, lower blocks."""
        block = self._block(names[0])
        heights = [self._shape(name)[0] for name in names]
        block_rows = common_block_rows(block[0], heights)
        weight = self._stacked([f"{name}.weight" for name in names], torch.float8_e4m3fn)
        scales = [self._fp8_scale(name) for name in names]
        dtype = torch.float32 if scales[0].endswith(SCALE_SUFFIX) else torch_dtype(self._info(scales[0]))
        if block_rows == block[0]:
            scale = self._stacked(scales, dtype)
        else:
            parts = [self._stacked([name], dtype) for name in scales]
            self._settle()
            scale = concatenated(
                [
                    part.repeat_interleave(block[0] // block_rows, dim=0)[: -(-height // block_rows)]
                    for part, height in zip(parts, heights, strict=True)
                ]
            )
        return Fp8Linear(weight, scale, (block_rows, block[1]), bias)

    def _int8_linear(self, names: tuple[str, ...], bias: Tensor | None) -> Linear:
        """``names`` on top of one another in 8 bits."""
        return Int8Linear(*self._int8_stacked(names), bias)

    def _int8_stacked(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Codes and scales of ``names`` on top of one another."""
        if self._is_packed(names[0]):
            packed = self._stacked([f"{name}{PACKED_SUFFIX}" for name in names], torch.int32)
            codes = packed.view(torch.int8)
            if packed.device.type == "cuda":
                self._to_sign.append(packed)
            elif not packed.is_meta:  # where the operation would import torch's compiler, for seconds
                signed_codes(packed)
        else:
            codes = self._stacked([f"{name}.weight" for name in names], torch.int8)
        scales = [f"{name}{COMPRESSED_SCALE}" for name in names]
        return codes, self._stacked(scales, torch_dtype(self._info(scales[0])))

    def _int4_linear(self, names: tuple[str, ...], bias: Tensor | None) -> Linear:
        """``names`` on top of one another in 4 bits."""
        packed = self._stacked([f"{name}.weight_packed" for name in names], torch.int32)
        scales = [f"{name}.weight_scale" for name in names]
        scale = self._stacked(scales, torch_dtype(self._info(scales[0])))
        zeros = [f"{name}.weight_zero_point" for name in names]
        if not all(name in self.checkpoint.tensors for name in zeros):
            return Int4Linear(packed, scale, None, bias)
        heights = [self._shape(name)[0] for name in names]
        if all(height % CODES_PER_WORD == 0 for height in heights[:-1]):  # no word is of two matrices
            return Int4Linear(packed, scale, self._stacked(zeros, torch.int32), bias)
        parts = [self._stored(name, self.device) for name in zeros]
        return Int4Linear(packed, scale, join_zero_points(parts, heights), bias)

    def _order(self, name: str) -> Tensor | None:
        """Which input stands where in the codes of ``name``, [in] in RAM; None: each in its own place."""
        stored = f"{name}{ORDER_SUFFIX}"
        if stored in self.checkpoint.tensors and name not in self._orders:
            groups = self._stored(stored, torch.device("cpu"))
            size = len(groups) // self._info(f"{name}{COMPRESSED_SCALE}").shape[1]
            self._orders[name] = column_order(groups, size, name)
        return self._orders.get(name)

    def _stacked(self, names: list[str], dtype: torch.dtype) -> Tensor:
        """The matrices ``names`` on top of one another, allocated once and filled part by part."""
        infos = [self._info(name) for name in names]
        rows = [info.shape[0] for info in infos]
        stacked = self._empty((sum(rows), infos[0].shape[1]), dtype)
        for info, part in zip(infos, stacked.split(rows), strict=True):
            self._copy(info, part, later=True)
        return stacked

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room on the device."""
        size = prod(shape) * dtype.itemsize
        if self._shelf is None or size < SHELVED:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._shelf.room(size).view(dtype).view(shape)

    def _form(self, name: str) -> str | None:
        """``fp8``, ``int8`` or ``int4``; None for a matrix that is stored plainly."""
        return narrow_form(self._info(self._weight_of(name)), self._formats)

    def _stored_as(self, name: str) -> tuple[object, ...]:
        """What must be alike for matrices to be one: form, groups and type of scales, zero points or none,
        and the order of their inputs.
        """
        tensors = self.checkpoint.tensors
        scale = tensors.get(f"{name}{COMPRESSED_SCALE}")
        scales = (scale.shape[1], scale.dtype) if scale is not None else None
        order = self._order(name)
        places = None if order is None else tuple(order.tolist())
        return self._form(name), scales, f"{name}.weight_zero_point" in tensors, places

    def _weight_of(self, name: str) -> str:
        return f"{name}{PACKED_SUFFIX if self._is_packed(name) else '.weight'}"

    def _is_packed(self, name: str) -> bool:
        return f"{name}{PACKED_SUFFIX}" in self.checkpoint.tensors

    def _shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of the matrix ``name``, however it is stored."""
        return matrix_shape(self._info(self._weight_of(name)), self._formats)

    def _fill(self, name: str, target: Tensor) -> None:
        """The matrix ``name`` into ``target`` [out, in], widened if it is stored in fewer bits."""
        order = self._order(name)
        if order is None:
            self._widen(name, target)
        else:
            ordered = torch.empty_like(target)
            self._widen(name, ordered)
            target.copy_(ordered[:, order.argsort().to(target.device)])

    def _widen(self, name: str, target: Tensor) -> None:
        """As ``_fill``, with the columns as ``_order`` says."""
        form = self._form(name)
        if form == INT4:
            target.copy_(dequantize_int4(*self._int4_part(name), self.dtype))
        elif form == INT8:
            parts = (part.split(_WIDENED_ROWS) for part in (target, *self._int8_part(name)))
            for some, codes, scale in zip(*parts, strict=True):
                some.copy_(dequantize_int8(codes, scale, self.dtype))
        elif form == FP8:
            codes, scale = self._fp8_part(name)
            target.copy_(dequantize_fp8(codes, scale, self._block(name), self.dtype))
        else:
            self._copy(self._info(f"{name}.weight"), target, later=True)

    def _fp8_scale(self, name: str) -> str:
        """What the scales of the FP8 matrix ``name`` are called: there are two customs."""
        official = f"{name}.weight{SCALE_SUFFIX}"
        return official if official in self.checkpoint.tensors else f"{name}{COMPRESSED_SCALE}"

    def _fp8_part(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and float32 scales of ``name``, in host memory."""
        return self._stored(f"{name}.weight", _HOST), self._stored(self._fp8_scale(name), _HOST).float()

    def _int8_part(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes and scales of ``name``, in host memory."""
        scale = self._stored(f"{name}{COMPRESSED_SCALE}", _HOST)
        if self._is_packed(name):
            return signed_codes(self._stored(f"{name}{PACKED_SUFFIX}", _HOST)), scale
        return self._stored(f"{name}.weight", _HOST), scale

    def _int4_part(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales and zero points of ``name``, in host memory."""
        has_zero = f"{name}.weight_zero_point" in self.checkpoint.tensors
        return (
            self._stored(f"{name}.weight_packed", _HOST),
            self._stored(f"{name}.weight_scale", _HOST),
            self._stored(f"{name}.weight_zero_point", _HOST) if has_zero else None,
        )

    def _stored(self, name: str, device: torch.device) -> Tensor:
        """The tensor ``name`` on ``device`` in the dtype that the files have it in."""
        info = self._info(name)
        tensor = torch.empty(info.shape, dtype=torch_dtype(info), device=device)
        self._copy(info, tensor)
        return tensor

    def _block(self, name: str) -> tuple[int, int]:
        """Rows and columns of the FP8 matrix ``name`` that share a scale."""
        config = self.checkpoint.config
        if config.fp8 is not None:
            return config.fp8.block_rows, config.fp8.block_columns
        scheme = config.compressed.scheme_of(name) if config.compressed is not None else None
        if scheme is None:
            raise UnknownWeightsFormat(
                "the files hold FP8 tensors, but config.json has no quantization_config",
                "take config.json from the same place as the weights",
            )
        return scheme.block_rows, scheme.group_size or self._shape(name)[1]

    def _info(self, name: str) -> TensorInfo:
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise MissingTensor(
                f"{self.checkpoint.name} has no tensor {name}",
                "the download may be incomplete: `vlfit pull` fetches what is missing",
            )
        return info

    def _copy(self, info: TensorInfo, target: Tensor, *, later: bool = False) -> None:
        """The numbers of ``info`` into ``target``, converted; none, for torch's meta device.

        ``later``: a large tensor on a GPU may be there only after ``_settle``.
        """
        if target.is_meta:
            return
        module, packed, _ = info.name.rpartition(PACKED_SUFFIX)
        order = self._order(module) if packed else None
        bits = 32 // codes_per_word(info.name, self._formats) if packed else 4
        self._arrivals.bring(info, target, order, bits, later=later)
