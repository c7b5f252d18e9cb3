"""Token embeddings: one class per weights format, built by ``loading/loader.py``.

A tied output head shares the embedding's weights.
"""

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.gemm.quantized import lookup_rows
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.layers.linear import (
    DenseLinear,
    Int8Linear,
    Linear,
    PackedLinear,
    dequantize_int8,
    dequantize_packed,
)
from vlfit.loading.pinned import PinnedBytes


class Embedding(Protocol):
    """A token embedding in any weights format.

    Called with token ids [n], it returns their rows [n, hidden] in the computation's dtype.
    """

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Rows [n, hidden] of ``token_ids`` [n] in the computation's dtype."""
        ...

    def head(self) -> Linear:
        """The tied output head. ``HalfEmbedding`` raises ``RuntimeError`` if loaded without one."""
        ...


class DenseEmbedding:
    """An ``Embedding`` with ``weight`` [vocabulary, hidden] in the computation's dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def head(self) -> Linear:
        """The tied output head, with the same weights in memory."""
        return DenseLinear(self.weight)


class Int8Embedding:
    """An ``Embedding`` with ``codes`` [vocabulary, hidden] int8 and ``scale`` [vocabulary, groups].

    Rows are dequantized (``dequantize_int8``) to ``dtype``. On a CPU a lookup takes 5 bytes per value
    besides its result: for the code and the float32 product.
    """

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.weights = QuantizedWeight(codes, scale, None, (1, codes.shape[1] // scale.shape[1]))
        self.dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        codes, scale = self.weights.codes, self.weights.scale
        if kernels.enabled_for("rows", codes.device):
            return lookup_rows(token_ids, self.weights, self.dtype)
        return dequantize_int8(codes[token_ids], scale[token_ids], self.dtype)

    def head(self) -> Linear:
        """The tied output head, with the same codes in memory."""
        return Int8Linear(self.weights.codes, self.weights.scale)


class PackedEmbedding:
    """An ``Embedding`` with ``weights`` [vocabulary, hidden] in 4, 5 or 6 bits, as in a ``PackedLinear``.

    Rows are dequantized (``dequantize_packed``) to ``dtype``. Raises ``ValueError`` for zero points, of which
    a word holds those of eight tokens: no embedding that vlfit reads has them.
    """

    def __init__(self, weights: QuantizedWeight, dtype: torch.dtype) -> None:
        if weights.zero_point is not None:
            raise ValueError("an embedding with zero points")
        self.weights = weights
        self.dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        whole = self.weights
        if kernels.enabled_for("rows", whole.codes.device):
            return lookup_rows(token_ids, whole, self.dtype)
        supers = None if whole.super_scale is None else whole.super_scale[token_ids]
        codes, scale = whole.codes[token_ids], whole.scale[token_ids]
        return dequantize_packed(replace(whole, codes=codes, scale=scale, super_scale=supers), self.dtype)

    def head(self) -> Linear:
        """The tied output head, with the same codes in memory."""
        return PackedLinear(self.weights)


class EmbeddingInRam:
    """An ``Embedding`` whose table is in pinned RAM, from where a GPU reads the rows that it needs.

    ``table``: one with its tensors in ``memory``. A row is some kilobytes, and the lookup is the same kernel,
    so that CUDA graphs have it. Only for an embedding that is not the output head, too.
    """

    def __init__(self, table: DenseEmbedding | Int8Embedding | PackedEmbedding, memory: PinnedBytes) -> None:
        self.memory = memory
        self._table: Embedding
        if isinstance(table, DenseEmbedding):
            self._table = DenseEmbedding(memory.on_device(table.weight))
            return
        codes, scale = memory.on_device(table.weights.codes), memory.on_device(table.weights.scale)
        if isinstance(table, Int8Embedding):
            self._table = Int8Embedding(codes, scale, table.dtype)
            return
        supers = table.weights.super_scale
        supers = None if supers is None else memory.on_device(supers)
        self._table = PackedEmbedding(
            replace(table.weights, codes=codes, scale=scale, super_scale=supers), table.dtype
        )

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._table(token_ids)

    def head(self) -> Linear:
        """Raise ``RuntimeError``: a head that reads its weights from RAM would be slow."""
        raise RuntimeError("an embedding in RAM has no tied head")
