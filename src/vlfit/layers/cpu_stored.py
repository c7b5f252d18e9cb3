"""Linear layers and embeddings for float32 on a CPU whose weights stay as they are stored.

int4, int8, FP8, bfloat16 and float16 are multiplied from their own bytes (``kernels/cpu/products.py``), where
the layout allows from the pages of the file. ``plan/native/ram.py`` decides for which matrices. Without
compiled products they are widened (``cpu_linear.py``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.source import Checkpoint
from vlfit.kernels.cpu import decode_layers, products
from vlfit.kernels.cpu.decode_layers import DecodeLayers
from vlfit.kernels.cpu.products import StoredWeight
from vlfit.layers.attention import AttentionMetadata, SlotAttentionMetadata, token_counts
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.linear import Linear
from vlfit.plan.native.ram import has_stored


def keeps_stored(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether large matrices of ``checkpoint`` stay as stored when computing in ``dtype`` on ``device``.

    Only in float32, on a CPU with compiled products, which are compiled here if there is a use for them, and
    which no one has switched off.
    """
    if device.type != "cpu" or dtype != torch.float32 or "linear" in kernels.plain_on(device):
        return False
    return has_stored(checkpoint) and products.available()


class StoredLinear:
    """A linear layer: [rows, out] float32 for ``x`` [rows, in] float32.

    ``parts``: matrices with the same inputs, of any formats, whose outputs are joined. ``bias``: [out] or
    None.
    """

    def __init__(self, parts: Sequence[StoredWeight], bias: Tensor | None = None) -> None:
        self.parts = parts
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return products.multiply(self.parts, x, self.bias)


def rounds_inputs(layer: Linear) -> bool:
    """Whether ``layer`` has its weights as stored, and may round the inputs of many rows."""
    return isinstance(layer, StoredLinear) and layer.parts[0].rounds_inputs


class StoredEmbedding:
    """An ``Embedding`` with its table as stored; the tied output head has the same weights in memory."""

    def __init__(self, table: StoredWeight) -> None:
        self.table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.table.rows(token_ids)

    def head(self) -> StoredLinear:
        """The tied output head."""
        return StoredLinear([self.table])


def decode_stored(
    layers: DecodeLayers,
    hidden: Tensor,
    tables: tuple[Tensor, Tensor],
    cache: KVCache,
    metadata: AttentionMetadata,
) -> bool:
    """Run ``layers`` on ``hidden`` [rows, hidden] in place, if the batch is one of decoding sequences only.

    Returns whether it did: up to ``decode_layers.MAX_ROWS`` sequences, without sliding windows, over a cache
    in float32. ``tables``: cosines and sines [rows, 1, rotary_dim].
    """
    if not kernels.plain_on(hidden.device).isdisjoint(("attention", "rows")):
        return False
    if not isinstance(metadata, SlotAttentionMetadata) or metadata.decode is None or metadata.chunks:
        return False
    group = metadata.decode
    if len(hidden) > decode_layers.MAX_ROWS or cache.has_windows or not decode_layers.takes_cache(cache.keys):
        return False
    layers(
        hidden, tables, (cache.keys, cache.values), metadata.slot_mapping, group.slots, token_counts(group)
    )
    return True
