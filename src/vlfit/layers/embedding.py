"""Token embeddings: one class per weights format, built by ``loading/loader.py``.

A tied output head shares the embedding's weights.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.rows.row_ops import embedding_lookup
from vlfit.layers.linear import DenseLinear, Int8Linear, Linear, dequantize_int8
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
    besides its result: for the code and the float32 product. ``super_scale`` [vocabulary, n]: see
    ``QuantizedWeight``; None: scales have one level.
    """

    def __init__(
        self, codes: Tensor, scale: Tensor, dtype: torch.dtype, super_scale: Tensor | None = None
    ) -> None:
        self.codes = codes
        self.scale = scale
        self.dtype = dtype
        self.super_scale = super_scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        if kernels.enabled_for("rows", self.codes.device):
            return embedding_lookup(token_ids, self.codes, self.scale, self.dtype, self.super_scale)
        supers = None if self.super_scale is None else self.super_scale[token_ids]
        return dequantize_int8(self.codes[token_ids], self.scale[token_ids], self.dtype, supers)

    def head(self) -> Linear:
        """The tied output head, with the same codes in memory."""
        return Int8Linear(self.codes, self.scale, super_scale=self.super_scale)


class EmbeddingInRam:
    """An ``Embedding`` whose table is in pinned RAM, from where a GPU reads the rows that it needs.

    ``table``: a ``DenseEmbedding`` or ``Int8Embedding`` with its tensors in ``memory``. A row is some
    kilobytes, and the lookup is the same kernel, so that CUDA graphs have it. Only for an embedding that is
    not the output head, too.
    """

    def __init__(self, table: DenseEmbedding | Int8Embedding, memory: PinnedBytes) -> None:
        self.memory = memory
        if isinstance(table, DenseEmbedding):
            self._table: Embedding = DenseEmbedding(memory.on_device(table.weight))
        else:
            super_scale = None if table.super_scale is None else memory.on_device(table.super_scale)
            self._table = Int8Embedding(
                memory.on_device(table.codes), memory.on_device(table.scale), table.dtype, super_scale
            )

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._table(token_ids)

    def head(self) -> Linear:
        """Raise ``RuntimeError``: a head that reads its weights from RAM would be slow."""
        raise RuntimeError("an embedding in RAM has no tied head")
