"""Build layers from a checkpoint's tensors: dtypes, quantized formats, stacked projections, device memory.

Each byte is read once. Models request tensors by name, in the order of the ledger.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from math import prod
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from vlfit import kernels
from vlfit.api.progress import ByteProgress
from vlfit.checkpoint.gguf.stored_blocks import DEQUANTIZED_DTYPE, BlockPart, StoredBlocks
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import CODES_PER_WORD, FP8, INT8, PACKED_BITS
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import (
    COMPRESSED_SCALE_SUFFIX,
    FP8_SCALE_SUFFIX,
    G_IDX_SUFFIX,
    PACKED_SUFFIX,
    SUPER_SCALE_SUFFIX,
    packed_scheme,
    quantized_format,
    with_byte_codes,
)
from vlfit.errors import MissingTensor, UnknownWeightsFormat
from vlfit.kernels.cpu.products import BlockWeight, StoredWeight, Weights
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.layers.cpu_linear import HalfEmbedding, HalfLinear, HalfPacker, rows_per_piece, uses_half_weights
from vlfit.layers.cpu_stored import StoredEmbedding, StoredLinear, keeps_stored
from vlfit.layers.embedding import (
    DenseEmbedding,
    Embedding,
    EmbeddingInRam,
    Int8Embedding,
    PackedEmbedding,
)
from vlfit.layers.linear import (
    DenseLinear,
    Fp8Linear,
    Int8Linear,
    Linear,
    PackedLinear,
    ReorderedLinear,
    StackedLinear,
    dequantize_fp8,
    dequantize_int8,
    dequantize_packed,
    stack_zero_points,
    stacked_block_rows,
    unpack_int8,
)
from vlfit.loading.arena import Arena, ArenaSizer, concatenate
from vlfit.loading.block_tensors import rows_in_file
from vlfit.loading.pinned import CAPTURING, PinnedBytes
from vlfit.loading.readers import WeightStreamer, torch_dtype
from vlfit.loading.repack import column_order
from vlfit.plan.allocator import ARENA_MIN_BYTES
from vlfit.plan.native.ram import (
    is_embedding_packed,
    is_embedding_stored,
    is_packed,
    is_stored,
    matrix_shape,
)

_HOST = torch.device("cpu")
_PACKED = frozenset(PACKED_BITS.values())
_DEQUANTIZED_ROWS = 4096  # of 8 bits at a time: a whole embedding in float32 would be as large as the model

T = TypeVar("T")


class Loader:
    """Reads tensors of one checkpoint and builds layers of them, on ``device``.

    A context manager: build layers inside it, and use them only after leaving it without an error. On a GPU
    their memory is allocated inside, but values may be complete only afterwards. Leaving it closes the files.

    ``dtype``: of tensors that do not stay quantized, and of activations. ``progress`` is called with the
    bytes read so far and the checkpoint's total. ``table_in_ram``: an untied embedding is kept in RAM, for a
    GPU. On a GPU FP8, int8 and int4 weights stay quantized; on a CPU
    large matrices stay as they are stored, where possible in the pages of the file (``is_stored``); the rest
    is dequantized, and without compiled products large matrices may be kept in float16. ``rounds_inputs``: of
    ``StoredWeight``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: ByteProgress | None = None,
        *,
        table_in_ram: bool = False,
        rounds_inputs: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self._rounds_inputs = rounds_inputs
        self._table_in_ram = table_in_ram and not checkpoint.config.tie_word_embeddings
        self._formats = checkpoint.config.quantization
        self.device = device
        self.dtype = dtype
        # On a GPU plain PyTorch keeps them, too, and dequantizes at each call.
        self._keeps_quantized = device.type != "cpu" or kernels.enabled_on(device)
        self._stores = keeps_stored(checkpoint, device, dtype)
        self._halves = uses_half_weights(device, dtype)
        self._packing = HalfPacker()
        self._streamer = WeightStreamer(device, checkpoint.weight_bytes, progress)
        self._orders: dict[str, Tensor] = {}
        self._rows_in_file: dict[StoredBlocks, Tensor | None] = {}  # alike in many layers
        self._unsigned_codes: list[Tensor] = []  # packed 8-bit codes being read
        self._arena: ArenaSizer | Arena | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._synchronize()
                self._streamer.log_throughput()
        finally:
            self._streamer.close()
            self._packing.close()

    def finish_blocks(self) -> None:
        """Wait until a GPU has taken the blocks of a GGUF file apart, and free the memory that this took.

        Call it when all layers are built, before memory for anything else is allocated: what this takes is
        not on the ledger.
        """
        if self.device.type == "cuda" and any(info.blocks for info in self.checkpoint.tensors.values()):
            self._synchronize()
            with CAPTURING:  # of another engine of this process
                torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        """Wait for asynchronous reads, then convert the codes that waited for them."""
        self._streamer.synchronize()
        self._packing.wait()
        with torch.inference_mode():
            while self._unsigned_codes:
                unpack_int8(self._unsigned_codes.pop())

    @property
    def fraction_read(self) -> float:
        """Share of the checkpoint's bytes that has been read, 0 to 1."""
        return self._streamer.fraction_read

    @contextmanager
    def into_ram(self) -> Iterator[None]:
        """Within the block, load to RAM instead of the device, but in the device's formats."""
        device, self.device = self.device, torch.device("cpu")
        try:
            yield
        finally:
            self.device = device

    def in_arena(self, build: Callable[[], T]) -> T:
        """The result of ``build``, which creates layers with this loader; on a GPU in one allocation.

        Tensors below ``ARENA_MIN_BYTES`` are allocated one by one. On a GPU ``build`` runs twice, first on
        the meta device to find the size; on a CPU it runs once, without an arena.
        """
        if not self._keeps_quantized:
            return build()
        device, self.device = self.device, torch.device("meta")
        self._arena = sizer = ArenaSizer(ARENA_MIN_BYTES)
        try:
            build()
            self.device = device
            self._arena = Arena(torch.empty(sizer.size, dtype=torch.uint8, device=device), ARENA_MIN_BYTES)
            return build()
        finally:
            self.device, self._arena = device, None

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor ``name`` on the device, in ``dtype`` (None: the loader's). Raises ``MissingTensor``."""
        info = self._info(name)
        tensor = self._empty(info.shape, dtype or self.dtype)
        self._copy(info, tensor)
        return tensor

    def rows(self, name: str, count: int) -> Iterator[Tensor]:
        """Read the unquantized matrix ``name`` in slices of ``count`` rows; the last slice may have fewer.

        Yields new tensors [rows, columns] on the device, in ``dtype``. Only one slice is read at a time,
        for tables that are not to be in memory whole. Do not use it for a quantized matrix, which is not
        detected: its codes would be returned as numbers. Raises ``MissingTensor``.
        """
        return self._rows(self._info(name), count)

    def _rows(self, info: TensorInfo, count: int) -> Iterator[Tensor]:
        """``rows`` of the tensor ``info``."""
        height, width = info.shape
        row_bytes = (info.end - info.start) // max(height, 1)
        if info.blocks is not None and (info.blocks.rope_heads or info.blocks.order is not None):
            count = height  # a row's place depends on others
        for first in range(0, height, count):
            num_rows = min(count, height - first)
            start, shape = info.start + first * row_bytes, (num_rows, width)
            blocks = None if info.blocks is None else replace(info.blocks, shape=shape)
            part = replace(info, shape=shape, start=start, end=start + num_rows * row_bytes, blocks=blocks)
            tensor = torch.empty(part.shape, dtype=self.dtype, device=self.device)
            self._copy(part, tensor)
            yield tensor

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """A linear layer from the weights of the modules ``names``, stacked in order along their outputs.

        So projections of the same input (q, k, v; gate, up) become one GEMM; on a GPU neighbours in
        different formats stay separate. ``names`` are names of modules, without ``.weight``. ``bias``: each
        module has one. Raises ``MissingTensor`` and ``UnknownWeightsFormat``.
        """
        if self._keeps_quantized:
            groups = [tuple(group) for _, group in groupby(names, self._storage_format)]
            if len(groups) > 1:
                return StackedLinear([self.linear(*group, bias=bias) for group in groups])
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        stacked_bias = concatenate(biases) if len(biases) > 1 else biases[0] if biases else None
        weights_format = self._format(names[0])
        if weights_format is not None and self._keeps_quantized:
            build = {FP8: self._fp8_linear, INT8: self._int8_linear}.get(weights_format, self._packed_linear)
            layer, order = build(names, stacked_bias), self._order(names[0])
            return layer if order is None else ReorderedLinear(layer, order.to(torch.int32).to(self.device))
        if self._stores and is_stored([self._info(self._weight_of(name)) for name in names], self.checkpoint):
            return self._stored_linear(names, stacked_bias)
        if self._halves and is_packed([self._info(self._weight_of(name)) for name in names], self._formats):
            return HalfLinear([self._packing.pack(part) for part in self._pieces(names)], stacked_bias)
        return DenseLinear(self._dense(names), stacked_bias)

    def have_one_format(self, *names: str) -> bool:
        """Whether the weights of the modules ``names`` are stored alike, so that one GEMM multiplies them."""
        return len(set(map(self._storage_format, names))) == 1

    def _pieces(self, names: tuple[str, ...]) -> Iterable[Tensor]:
        """``_dense`` in pieces, if it is one unquantized matrix."""
        info = self._dequantized_info(names[0])
        if len(names) > 1 or info is None:
            return [self._dense(names)]
        return self._rows(info, rows_per_piece(self._shape(names[0])[1]))

    def _dequantized_info(self, name: str) -> TensorInfo | None:
        """The tensor to read for the weights of ``name``: of a GGUF its blocks; None: codes and scales."""
        info = self._info(self._weight_of(name))
        if info.blocks is not None and info.blocks.part is BlockPart.CODES:
            blocks = replace(info.blocks, part=BlockPart.WEIGHTS)
            return replace(
                info, name=f"{name}.weight", shape=blocks.shape, dtype=DEQUANTIZED_DTYPE, blocks=blocks
            )
        return info if self._format(name) is None else None

    def _dense(self, names: tuple[str, ...]) -> Tensor:
        """The matrices ``names`` stacked and dequantized."""
        rows = [self._shape(name)[0] for name in names]
        weight = self._empty((sum(rows), self._shape(names[0])[1]), self.dtype)
        for name, part in zip(names, weight.split(rows), strict=True):
            self._fill(name, part)
        return weight

    def embedding(self, name: str) -> Embedding:
        """The token embedding of the module ``name``, which is given without ``.weight``.

        On a GPU quantized if it is stored so; on a CPU it may be in 16 bits (``is_embedding_packed``); else
        in ``dtype``. In RAM with ``table_in_ram``. Raises ``MissingTensor`` and ``UnknownWeightsFormat``, and
        ``DeviceError`` if the RAM cannot be pinned.
        """
        return self._embedding_in_ram(name) if self._table_in_ram else self._embedding(name)

    def _embedding_in_ram(self, name: str) -> Embedding:
        device, sizer = self.device, ArenaSizer()
        try:
            self.device, self._arena = torch.device("meta"), sizer
            self._embedding(name)
            memory = PinnedBytes(sizer.size, device)
            self.device, self._arena = _HOST, Arena(memory.bytes)
            table = self._embedding(name)
        finally:
            self.device, self._arena = device, None
        if not isinstance(table, DenseEmbedding | Int8Embedding | PackedEmbedding):
            raise RuntimeError("on a CPU every embedding is in RAM")
        return EmbeddingInRam(table, memory)

    def _embedding(self, name: str) -> Embedding:
        weights_format = self._format(name)
        if weights_format is not None and self._keeps_quantized:
            if weights_format == INT8:
                return Int8Embedding(*self._int8_stacked((name,)), self.dtype)
            return PackedEmbedding(self._packed_stacked((name,)), self.dtype)
        if self._stores and is_embedding_stored(self._info(self._weight_of(name)), self.checkpoint):
            return StoredEmbedding(*self._stored_parts(name))
        if self._halves and is_embedding_packed(self._info(weight := self._weight_of(name)), self._formats):
            tied = self.checkpoint.config.tie_word_embeddings
            is_plain = weights_format is None
            table = self._stored(weight, self.device) if is_plain else self._half_table(name)
            return HalfEmbedding(table, self._packing.pack_tied_head(table) if tied else None)
        return DenseEmbedding(self._dense((name,)))

    def _stored_linear(self, names: tuple[str, ...], bias: Tensor | None) -> Linear:
        """``names`` as they are stored, each in its own format."""
        stored = [self._stored_parts(name) for name in names]
        parts = [part for some in stored for part in some]
        orders = [self._order(name) for name in names]
        first = orders[0]
        if all(order is None for order in orders):
            return StoredLinear(parts, bias)
        if first is not None and all(order is not None and torch.equal(order, first) for order in orders):
            return ReorderedLinear(StoredLinear(parts, bias), first.to(torch.int32))
        biases = [None] * len(parts) if bias is None else bias.split([part.outputs for part in parts])
        each = [StoredLinear([part], some) for part, some in zip(parts, biases, strict=True)]
        return StackedLinear(
            [
                layer if order is None else ReorderedLinear(layer, order.to(torch.int32))
                for layer, order in zip(each, orders, strict=True)
            ]
        )

    def _stored_parts(self, name: str) -> list[StoredWeight]:
        """The matrix ``name`` as stored; several, one above the other, if it is several in a GGUF file."""
        info = self._info(self._weight_of(name))
        if info.blocks is None or not info.blocks.are_multiplied:
            return [self._stored_matrix(name)]
        key = replace(info.blocks, type="", part=BlockPart.WEIGHTS, rows_after=())
        if key not in self._rows_in_file:
            self._rows_in_file[key] = rows_in_file(info.blocks)
        order = self._rows_in_file[key]
        return [
            StoredWeight(BlockWeight(rows, info.blocks.type, order), rounds_inputs=self._rounds_inputs)
            for rows in self._streamer.mapped_blocks(info, info.blocks)
        ]

    def _stored_matrix(self, name: str) -> StoredWeight:
        """The matrix ``name`` with codes, scales and zero points as stored, mapped where possible."""
        plus_128 = self._format(name) == INT8 and self._is_packed(name)
        return StoredWeight(self._stored_weights(name), plus_128=plus_128, rounds_inputs=self._rounds_inputs)

    def _stored_weights(self, name: str) -> Weights:
        """The weights of ``_stored_matrix``."""
        info, form = self._info(self._weight_of(name)), self._format(name)
        codes = with_byte_codes(info, self._formats)
        if codes is not info:
            weight, form = torch.empty(codes.shape, dtype=torch.int8, device=self.device), INT8
            self._copy(codes, weight)
        else:
            weight = self._as_stored(info.name)
        if form is None:
            return weight
        if form == FP8:
            scale, block = self._as_stored(self._fp8_scale(name)), self._block(name)
            return QuantizedWeight(weight, scale, None, block)
        scale = self._as_stored(f"{name}{COMPRESSED_SCALE_SUFFIX}")
        beside = [f"{name}{SUPER_SCALE_SUFFIX}", f"{name}.weight_zero_point"]
        supers, zeros = (
            self._as_stored(each) if each in self.checkpoint.tensors else None for each in beside
        )
        block = (1, self._shape(name)[1] // scale.shape[1])
        if form in _PACKED:
            return self._packed_weight(name, weight, scale, zeros, supers)
        return QuantizedWeight(weight.view(torch.int8), scale, None, block, supers)

    def _as_stored(self, name: str) -> Tensor:
        """The tensor ``name`` in the dtype of the file: in its pages, or copied if its layout is another."""
        info = self._info(name)
        module, packed, _ = name.rpartition(PACKED_SUFFIX)
        if not packed or self._order(module) is None:
            mapped = self._streamer.mapped(info)
            if mapped is not None:
                return mapped
        return self._stored(name, self.device)

    def _half_table(self, name: str) -> Tensor:
        """The quantized matrix ``name`` dequantized to float16."""
        table = torch.empty(self._shape(name), dtype=torch.float16, device=self.device)
        self._dequantize(name, table)
        return table

    def _fp8_linear(self, names: tuple[str, ...], bias: Tensor | None) -> Linear:
        """``names`` stacked in FP8. Scale blocks that would straddle two of them are split."""
        block = self._block(names[0])
        heights = [self._shape(name)[0] for name in names]
        block_rows = stacked_block_rows(block[0], heights)
        weight = self._stacked([f"{name}.weight" for name in names], torch.float8_e4m3fn)
        scales = [self._fp8_scale(name) for name in names]
        dtype = torch.float32 if scales[0].endswith(FP8_SCALE_SUFFIX) else torch_dtype(self._info(scales[0]))
        if block_rows == block[0]:
            scale = self._stacked(scales, dtype)
        else:
            parts = [self._stacked([name], dtype) for name in scales]
            self._synchronize()
            scale = concatenate(
                [
                    part.repeat_interleave(block[0] // block_rows, dim=0)[: -(-height // block_rows)]
                    for part, height in zip(parts, heights, strict=True)
                ]
            )
        return Fp8Linear(weight, scale, (block_rows, block[1]), bias)

    def _int8_linear(self, names: tuple[str, ...], bias: Tensor | None) -> Linear:
        """``names`` stacked in 8 bits."""
        return Int8Linear(*self._int8_stacked(names), bias)

    def _int8_stacked(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Stacked codes and scales of ``names``."""
        if self._is_packed(names[0]):
            packed = self._stacked([f"{name}{PACKED_SUFFIX}" for name in names], torch.int32)
            codes = packed.view(torch.int8)
            if packed.device.type == "cuda":
                self._unsigned_codes.append(packed)
            elif not packed.is_meta:  # there the operation would import torch's compiler, for seconds
                unpack_int8(packed)
        else:
            codes = self._stacked([f"{name}.weight" for name in names], torch.int8)
        scales = [f"{name}{COMPRESSED_SCALE_SUFFIX}" for name in names]
        return codes, self._stacked(scales, torch_dtype(self._info(scales[0])))

    def _super_scales(self, names: tuple[str, ...]) -> Tensor | None:
        """Stacked super scales of ``names``; None if their scales have one level."""
        stored = [f"{name}{SUPER_SCALE_SUFFIX}" for name in names]
        if stored[0] not in self.checkpoint.tensors:
            return None
        return self._stacked(stored, torch_dtype(self._info(stored[0])))

    def _packed_weight(
        self, name: str, codes: Tensor, scale: Tensor, zeros: Tensor | None, supers: Tensor | None
    ) -> QuantizedWeight:
        """The weights with these tensors, in the number of bits of ``name`` and with its codebook."""
        scheme = packed_scheme(f"{name}{PACKED_SUFFIX}", self._formats)
        bits, codebook = (4, None) if scheme is None else (scheme.bits, scheme.codebook)
        block = (1, self._shape(name)[1] // scale.shape[1])
        return QuantizedWeight(codes, scale, zeros, block, supers, bits, codebook)

    def _packed_linear(self, names: tuple[str, ...], bias: Tensor | None) -> Linear:
        """``names`` stacked in 4, 5 or 6 bits."""
        return PackedLinear(self._packed_stacked(names), bias)

    def _packed_stacked(self, names: tuple[str, ...]) -> QuantizedWeight:
        """Stacked codes, scales, zero points and super scales of ``names``."""
        packed = self._stacked([f"{name}.weight_packed" for name in names], torch.int32)
        scales = [f"{name}.weight_scale" for name in names]
        scale = self._stacked(scales, torch_dtype(self._info(scales[0])))
        zeros = [f"{name}.weight_zero_point" for name in names]
        if not all(name in self.checkpoint.tensors for name in zeros):
            return self._packed_weight(names[0], packed, scale, None, self._super_scales(names))
        heights = [self._shape(name)[0] for name in names]
        if all(
            height % CODES_PER_WORD == 0 for height in heights[:-1]
        ):  # no word holds codes of two matrices
            zero_point = self._stacked(zeros, torch.int32)
        else:
            zero_point = stack_zero_points([self._stored(name, self.device) for name in zeros], heights)
        return self._packed_weight(names[0], packed, scale, zero_point, None)

    def _order(self, name: str) -> Tensor | None:
        """Input order of the codes of ``name`` (GPTQ act-order), [in] in RAM; None: natural order."""
        stored = f"{name}{G_IDX_SUFFIX}"
        if stored in self.checkpoint.tensors and name not in self._orders:
            groups = self._stored(stored, torch.device("cpu"))
            size = len(groups) // self._info(f"{name}{COMPRESSED_SCALE_SUFFIX}").shape[1]
            self._orders[name] = column_order(groups, size, name)
        return self._orders.get(name)

    def _stacked(self, names: list[str], dtype: torch.dtype) -> Tensor:
        """The matrices ``names`` stacked, allocated once and filled one by one."""
        infos = [self._info(name) for name in names]
        rows = [info.shape[0] for info in infos]
        stacked = self._empty((sum(rows), infos[0].shape[1]), dtype)
        for info, part in zip(infos, stacked.split(rows), strict=True):
            self._copy(info, part, asynchronous=True)
        return stacked

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor on the device, in the arena if there is one."""
        size = prod(shape) * dtype.itemsize
        if self._arena is None or size < self._arena.min_bytes:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._arena.allocate(size).view(dtype).view(shape)

    def _format(self, name: str) -> str | None:
        """``WeightScheme.format``; None for an unquantized matrix."""
        return quantized_format(self._info(self._weight_of(name)), self._formats)

    def _storage_format(self, name: str) -> tuple[object, ...]:
        """What must match for matrices to be stacked: format, groups and dtype of scales, zero points,
        codebook, input order.
        """
        tensors = self.checkpoint.tensors
        scale = tensors.get(f"{name}{COMPRESSED_SCALE_SUFFIX}")
        supers = tensors.get(f"{name}{SUPER_SCALE_SUFFIX}")
        scales = (scale.shape[1], scale.dtype, supers and supers.shape[1]) if scale is not None else None
        order = self._order(name)
        input_order = None if order is None else tuple(order.tolist())
        scheme = packed_scheme(f"{name}{PACKED_SUFFIX}", self._formats)
        codebook = None if scheme is None else scheme.codebook
        return self._format(name), scales, f"{name}.weight_zero_point" in tensors, codebook, input_order

    def _weight_of(self, name: str) -> str:
        return f"{name}{PACKED_SUFFIX if self._is_packed(name) else '.weight'}"

    def _is_packed(self, name: str) -> bool:
        return f"{name}{PACKED_SUFFIX}" in self.checkpoint.tensors

    def _shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of the matrix ``name``, in any format."""
        return matrix_shape(self._info(self._weight_of(name)), self._formats)

    def _fill(self, name: str, target: Tensor) -> None:
        """Fill ``target`` [out, in] with the matrix ``name``, dequantized."""
        order = self._order(name)
        if order is None:
            self._dequantize(name, target)
        else:
            ordered = torch.empty_like(target)
            self._dequantize(name, ordered)
            target.copy_(ordered[:, order.argsort().to(target.device)])

    def _dequantize(self, name: str, target: Tensor) -> None:
        """``_fill``, with columns in stored order."""
        weights_format, plain = self._format(name), self._dequantized_info(name)
        if plain is not None:
            self._copy(plain, target, asynchronous=True)
        elif weights_format in _PACKED:
            weights = self._packed_weight(name, *self._packed_part(name))
            target.copy_(dequantize_packed(weights, self.dtype))
        elif weights_format == INT8:
            codes, scale = self._int8_part(name)
            for first in range(0, len(target), _DEQUANTIZED_ROWS):
                rows = slice(first, first + _DEQUANTIZED_ROWS)
                target[rows].copy_(dequantize_int8(codes[rows], scale[rows], self.dtype))
        else:
            codes, scale = self._fp8_part(name)
            target.copy_(dequantize_fp8(codes, scale, self._block(name), self.dtype))

    def _fp8_scale(self, name: str) -> str:
        """Name of the scales of the FP8 matrix ``name``: there are two conventions."""
        official = f"{name}.weight{FP8_SCALE_SUFFIX}"
        return official if official in self.checkpoint.tensors else f"{name}{COMPRESSED_SCALE_SUFFIX}"

    def _fp8_part(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and float32 scales of ``name``, in RAM."""
        return self._stored(f"{name}.weight", _HOST), self._stored(self._fp8_scale(name), _HOST).float()

    def _int8_part(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes and scales of ``name``, in RAM."""
        scale = self._stored(f"{name}{COMPRESSED_SCALE_SUFFIX}", _HOST)
        if self._is_packed(name):
            return unpack_int8(self._stored(f"{name}{PACKED_SUFFIX}", _HOST)), scale
        return self._stored(f"{name}.weight", _HOST), scale

    def _packed_part(self, name: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Codes, scales, zero points and super scales of ``name``, in RAM."""
        return (
            self._stored(f"{name}.weight_packed", _HOST),
            self._stored(f"{name}.weight_scale", _HOST),
            self._stored_if_any(f"{name}.weight_zero_point"),
            self._stored_if_any(f"{name}{SUPER_SCALE_SUFFIX}"),
        )

    def _stored_if_any(self, name: str) -> Tensor | None:
        """The tensor ``name`` in RAM, in the dtype of the file; None if there is none."""
        return self._stored(name, _HOST) if name in self.checkpoint.tensors else None

    def _stored(self, name: str, device: torch.device) -> Tensor:
        """The tensor ``name`` on ``device`` in the dtype of the file."""
        info = self._info(name)
        tensor = torch.empty(info.shape, dtype=torch_dtype(info), device=device)
        self._copy(info, tensor)
        return tensor

    def _block(self, name: str) -> tuple[int, int]:
        """Rows and columns that share a scale of the FP8 matrix ``name``."""
        config = self.checkpoint.config
        if config.fp8 is not None:
            return config.fp8.block_rows, config.fp8.block_columns
        scheme = config.compressed.scheme_of(name) if config.compressed is not None else None
        if scheme is None:
            raise UnknownWeightsFormat(
                "the files hold FP8 tensors, but config.json has no quantization_config",
                "Use the config.json that belongs to the weights.",
            )
        return scheme.block_rows, scheme.group_size or self._shape(name)[1]

    def _info(self, name: str) -> TensorInfo:
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise MissingTensor(
                f"{self.checkpoint.name} has no tensor {name}",
                "The download may be incomplete: vlfit pull fetches what is missing.",
            )
        return info

    def _copy(self, info: TensorInfo, target: Tensor, *, asynchronous: bool = False) -> None:
        """Fill ``target`` with the tensor ``info``, converted; does nothing on the meta device.

        ``asynchronous``: a large tensor, or one of blocks, on a GPU may be complete only after
        ``_synchronize``.
        """
        if target.is_meta:
            return
        module, packed, _ = info.name.rpartition(PACKED_SUFFIX)
        order = self._order(module) if packed else None
        scheme = packed_scheme(info.name, self._formats) if packed else None
        bits = 4 if scheme is None else scheme.bits
        self._streamer.copy(info, target, order, bits, asynchronous=asynchronous)
