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


class Embedding(Protocol):
    """A token embedding in any weights format; ``head`` is the output head that shares its weights."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Rows [n, hidden] of ``token_ids`` [n] in the computation's dtype."""
        ...

    def head(self) -> Linear:
        """The tied output head. ``HalfEmbedding`` raises ``RuntimeError`` if loaded without one."""
        ...


class DenseEmbedding:
    """Embedding with ``weight`` [vocabulary, hidden] in the computation's dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def head(self) -> Linear:
        """The tied output head, with the same weights in memory."""
        return DenseLinear(self.weight)


class Int8Embedding:
    """Embedding with ``codes`` [vocabulary, hidden] int8 and ``scale`` [vocabulary, groups].

    Rows are dequantized (``dequantize_int8``) to ``dtype``. On a CPU a lookup takes 5 bytes per value besides
    its result: for the code and the float32 product.
    """

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes = codes
        self.scale = scale
        self.dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        if kernels.enabled_on(self.codes.device):
            return embedding_lookup(token_ids, self.codes, self.scale, self.dtype)
        return dequantize_int8(self.codes[token_ids], self.scale[token_ids], self.dtype)

    def head(self) -> Linear:
        """The tied output head, with the same codes in memory."""
        return Int8Linear(self.codes, self.scale)
