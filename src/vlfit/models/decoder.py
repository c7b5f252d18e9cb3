"""A decoder, the text model of every architecture: rows in (embedded tokens, or a picture's features), logits
out.

Reads top to bottom: embedding, decoder layers (grouped-query attention over the paged cache, gated
feed-forward), deepstack added after the first layers, final norm, head. What differs between architectures,
the config says: biases, normalized queries and keys, the kind of positions, which matrices the files join.
Does not know pictures.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from vlfit.checkpoint.cache import count_weights
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.text_config import TextConfig
from vlfit.kernels.gemm.epilogue import Onto, Scaled
from vlfit.kernels.rows.row_ops import Fresh
from vlfit.layers.attention import AttentionPlan, paged_attention
from vlfit.layers.fused import (
    Folded,
    add_norm,
    add_product,
    feed_forward,
    few,
    foldable,
    folded,
    normed,
    product,
)
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.linear import Linear
from vlfit.layers.rope import TextRope
from vlfit.loading.arena import concatenated
from vlfit.loading.loader import Loader
from vlfit.loading.offload import StreamedLayers


@dataclass(frozen=True, slots=True)
class VisualRows:
    """Where picture features stand in a batch: ``index`` [n] rows; ``rows`` [n, hidden] replace their
    embeddings; ``deepstack[level]`` [n, hidden] is added after layer ``level``.
    """

    index: Tensor
    rows: Tensor
    deepstack: tuple[Tensor, ...]


class TextModel:
    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        waiting: Collection[int] = (),
        before: "TextModel | None" = None,
    ) -> None:
        """``waiting``: layers that wait in RAM, and are on the device only while they compute. ``before``:
        what this one replaces, from the same files; what waits is not read again.
        """
        text = config.text
        self.vocabulary = text.vocab_size
        self.eps = text.rms_norm_eps
        layers = f"{text.prefix}.layers."

        def build(index: int) -> DecoderLayer:
            return DecoderLayer(text, loader, index)

        count = text.num_hidden_layers
        self.layers: Sequence[DecoderLayer] = (
            StreamedLayers(build, count, waiting, loader, before.layers if before else ())
            if waiting
            else loader.together(lambda: list(map(build, range(count))))
        )
        self.norm = loader.tensor(f"{text.prefix}.norm.weight")
        self.embedding = loader.embedding(f"{text.prefix}.embed_tokens")
        self.head: Linear = self.embedding.head() if config.tie_word_embeddings else loader.linear("lm_head")
        self.rope = TextRope(text, loader.device)
        # One for each weight: what a row costs in all layers together.
        self.multiplications_per_row = sum(
            count_weights(info, config.quantization)
            for info in loader.checkpoint.tensors.values()
            if info.name.startswith(layers)
        )

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        visual: VisualRows | None,
        cache: KVCache,
        plan: AttentionPlan,
        wanted: Tensor | None,
    ) -> Tensor:
        """Logits [n, vocabulary] of the rows ``wanted`` [n]; None: of all.

        The rows are ``token_ids`` [rows] at ``positions`` [3, rows]; their keys and values go into ``cache``
        as ``plan`` says.
        """
        hidden = self.embedding(token_ids)
        if visual is not None:
            hidden[visual.index] = visual.rows
        tables = self.rope.tables(positions, hidden.dtype)
        if visual is None and wanted is None and few(hidden) and (layers := self._folded()):
            return self._few(layers, hidden, tables, cache, plan)
        delta: Tensor | None = None  # what the last half of a layer found, not yet added
        for index, layer in enumerate(self.layers):
            delta = layer.attend(hidden, delta, tables, cache, plan)
            if index == len(self.layers) - 1 and wanted is not None:
                # Past the last keys and values only the rows that will speak matter; a picture's never do,
                # so that deepstack has nothing to add there.
                hidden, delta, visual = hidden[wanted], delta[wanted], None
            delta = layer.feed_forward(hidden, delta)
            if visual is not None and index < len(visual.deepstack):
                hidden.add_(delta)
                delta = None
                hidden[visual.index] += visual.deepstack[index]
        return self.head(add_norm(hidden, delta, self.norm, self.eps))

    def _folded(self) -> list[tuple["DecoderLayer", Folded]]:
        """The layers, if products can do what stands between them; else none.

        A product then does what the next layer begins with, too, so that no layer may wait in RAM.
        """
        if not isinstance(self.layers, list):
            return []
        products = [folded(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self.layers]
        pairs = zip(self.layers, products, strict=True)
        found = [(layer, parts) for layer, parts in pairs if parts is not None]
        return found if len(found) == len(self.layers) else []

    def _few(
        self,
        layers: list[tuple["DecoderLayer", Folded]],
        hidden: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Logits of few rows ``hidden`` [rows, hidden], which are overwritten."""
        before: Scaled | None = None
        norms = [*(layer.input_norm for layer, _ in layers[1:]), self.norm]
        for (layer, parts), following in zip(layers, norms, strict=True):
            before = layer.few(parts, hidden, before, following, tables, cache, plan)
        if before is not None and foldable(self.head):
            return product(self.head, before)
        return self.head(add_norm(hidden, None, self.norm, self.eps))


class DecoderLayer:
    def __init__(self, config: TextConfig, loader: Loader, index: int) -> None:
        name = f"{config.prefix}.layers.{index}"
        self.index = index
        self.eps = config.rms_norm_eps
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        attention = f"{name}.self_attn"
        self.input_norm = loader.tensor(f"{name}.input_layernorm.weight")
        projections = ("qkv_proj",) if config.joined else ("q_proj", "k_proj", "v_proj")
        self.qkv = loader.linear(*(f"{attention}.{part}" for part in projections), bias=config.attention_bias)
        self.query_key_norm: Tensor | None = None
        if config.query_key_norm:
            query_norm = loader.tensor(f"{attention}.q_norm.weight").expand(self.heads[0], -1)
            key_norm = loader.tensor(f"{attention}.k_norm.weight").expand(self.heads[1], -1)
            self.query_key_norm = concatenated((query_norm, key_norm))  # a row for each head
        self.output = loader.linear(f"{attention}.o_proj", bias=config.output_bias)
        self.post_attention_norm = loader.tensor(f"{name}.post_attention_layernorm.weight")
        gates = ("gate_up_proj",) if config.joined else ("gate_proj", "up_proj")
        self.gate_up = loader.linear(*(f"{name}.mlp.{part}" for part in gates))
        self.down = loader.linear(f"{name}.mlp.down_proj")

    def attend(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Adds ``delta`` to ``hidden`` [rows, hidden] in place, and gives what attention would add."""
        joined = normed(self.qkv, hidden, delta, self.input_norm, self.eps)
        joined = joined.view(len(joined), sum(self.heads), -1)  # [rows, heads, head_dim]
        fresh = Fresh(joined, self.query_key_norm, *tables, self.eps)
        return self.output(paged_attention(fresh, self.index, cache, plan))

    def few(
        self,
        parts: Folded,
        hidden: Tensor,
        before: Scaled | None,
        following: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        plan: AttentionPlan,
    ) -> Scaled:
        """Adds what the layer finds to ``hidden`` [rows, hidden] in place, which ``before`` was left with.

        What it leaves is ready for the norm of weight ``following`` [hidden], the next.
        """
        if before is None:
            joined = normed(self.qkv, hidden, None, self.input_norm, self.eps)
        else:
            joined = product(parts.qkv, before)
        joined = joined.view(len(joined), sum(self.heads), -1)
        fresh = Fresh(joined, self.query_key_norm, *tables, self.eps)
        found = paged_attention(fresh, self.index, cache, plan)
        before = add_product(parts.output, found, Onto(hidden, self.post_attention_norm, self.eps))
        found = product(parts.gate_up, before, gated=True)
        return add_product(parts.down, found, Onto(hidden, following, self.eps))

    def feed_forward(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """Adds ``delta`` to ``hidden`` [rows, hidden] in place, and gives what the second half would add."""
        return feed_forward(self.gate_up, self.down, hidden, delta, self.post_attention_norm, self.eps)
