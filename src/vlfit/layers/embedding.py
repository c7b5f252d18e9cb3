"""The table of tokens: one class per weights format. Knows nothing of files; ``loader.py`` builds them.

A table gives rows for token ids, and where a model's output head is the same matrix, that head: both read the
same bytes.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.rows.row_ops import look_up
from vlfit.layers.linear import DenseLinear, Int8Linear, Linear, dequantize_int8


class Embedding(Protocol):
    """What the model calls, whatever the format of the table."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Rows [n, hidden] in the dtype of the computation for ``token_ids`` [n]."""
        ...

    def head(self) -> Linear:
        """The output head that is this table (tied)."""
        ...


class DenseEmbedding:
    """``weight`` [vocabulary, hidden] in the dtype of the computation."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def head(self) -> Linear:
        return DenseLinear(self.weight)


class Int8Embedding:
    """``codes`` [vocabulary, hidden] int8 and ``scale`` [vocabulary, groups]: ``dequantize_int8`` takes them.

    Rows come out in ``dtype``. On a CPU looking n of them up takes 5 bytes more for each value: the codes and
    a product in float32.
    """

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes = codes
        self.scale = scale
        self.dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        if kernels.used_on(self.codes.device):
            return look_up(token_ids, self.codes, self.scale, self.dtype)
        return dequantize_int8(self.codes[token_ids], self.scale[token_ids], self.dtype)

    def head(self) -> Linear:
        return Int8Linear(self.codes, self.scale)
