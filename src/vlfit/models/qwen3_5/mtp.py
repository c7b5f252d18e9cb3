"""Qwen3.5's multi-token prediction (MTP): a full-attention layer that drafts the token after the next one.

Its input is the hidden state of a token, after the final norm, and the embedding of the token that follows.
Its output takes the place of the hidden state to draft one token further. Sources: vLLM's
``qwen3_5_mtp.py`` and transformers' ``MtpModel``, which agree on text; about the position of a row beside a
picture they do not, and vLLM's is taken: that of the token whose hidden state it is.
"""

from dataclasses import replace

import torch
from torch import Tensor

from vlfit.checkpoint.config import ModelConfig
from vlfit.layers.attention import AttentionMetadata
from vlfit.layers.fused import add_norm
from vlfit.layers.kv_cache import KVCache
from vlfit.loading.loader import Loader
from vlfit.models.decoder import TextModel
from vlfit.models.qwen3_5.config import MTP, text_config
from vlfit.models.qwen3_5.decoder import GatedAttentionLayer, load_norm


class MtpModel:
    """``DraftModel`` of a Qwen3.5 checkpoint with one layer of multi-token prediction.

    Embedding, head and rotary embedding are those of ``text``.
    """

    def __init__(self, config: ModelConfig, loader: Loader, text: TextModel) -> None:
        """Load the weights with ``loader``. Raises what the loader raises."""
        sizes = text_config(config)
        self._rope = text.rope
        self._eps = sizes.rms_norm_eps
        self._fc = loader.linear(f"{MTP}.fc")
        self._embedding_norm = load_norm(loader, f"{MTP}.pre_fc_norm_embedding.weight")
        self._hidden_norm = load_norm(loader, f"{MTP}.pre_fc_norm_hidden.weight")
        self._layer = GatedAttentionLayer(replace(sizes, prefix=MTP), loader, 0, load_norm)
        self._layer.index = len(sizes.cache_spec)  # its keys and values follow those of the text layers
        self._norm = load_norm(loader, f"{MTP}.norm.weight")

    def store(
        self,
        hidden: Tensor,
        embedded: Tensor,
        positions: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> None:
        """See ``DraftModel.store``."""
        self._attend(hidden, embedded, positions, cache, metadata)

    def predict(
        self,
        hidden: Tensor,
        embedded: Tensor,
        positions: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        rows: Tensor,
    ) -> Tensor:
        """See ``DraftModel.predict``."""
        residual, delta = self._attend(hidden, embedded, positions, cache, metadata)
        residual, delta = residual[rows], delta[rows]
        delta = self._layer.feed_forward(residual, delta)
        return add_norm(residual, delta, self._norm, self._eps)

    def _attend(
        self,
        hidden: Tensor,
        embedded: Tensor,
        positions: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """The residual and the output of attention, each [rows, hidden]."""
        parts = (
            add_norm(embedded, None, self._embedding_norm, self._eps),
            add_norm(hidden, None, self._hidden_norm, self._eps),
        )
        joined = self._fc(torch.cat(parts, dim=1))
        tables = self._rope.tables(positions, joined.dtype)
        return joined, self._layer.attend(joined, None, tables, cache, metadata)
