"""A decoder, the text model of every architecture: rows in (embedded tokens, or a picture's features), logits
out.

Reads top to bottom: embedding, decoder layers (grouped-query attention over the paged cache, gated
feed-forward), deepstack added after the first layers, final norm, head. What differs between architectures,
the config says: biases, normalized queries and keys, the kind of positions, which matrices the files join.
Does not know pictures.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit.checkpoint.cache import count_weights
from vlfit.checkpoint.config import ModelConfig, TextConfig
from vlfit.engine.decoder.rope import TextRope, rotate
from vlfit.engine.kv_cache import KVCache
from vlfit.engine.layers.attention import AttentionPlan, paged_attention
from vlfit.engine.layers.linear import DenseLinear, Linear
from vlfit.engine.layers.norm import rms_norm
from vlfit.engine.loader import Loader


@dataclass(frozen=True, slots=True)
class VisualRows:
    """Where picture features stand in a batch: ``index`` [n] rows; ``rows`` [n, hidden] replace their
    embeddings; ``deepstack[level]`` [n, hidden] is added after layer ``level``.
    """

    index: Tensor
    rows: Tensor
    deepstack: tuple[Tensor, ...]


class TextModel:
    def __init__(self, config: ModelConfig, loader: Loader) -> None:
        text = config.text
        self.eps = text.rms_norm_eps
        layers = f"{text.prefix}.layers."
        self.layers = [DecoderLayer(text, loader, index) for index in range(text.num_hidden_layers)]
        self.norm = loader.tensor(f"{text.prefix}.norm.weight")
        self.embedding = loader.tensor(f"{text.prefix}.embed_tokens.weight")
        self.head: Linear = (
            DenseLinear(self.embedding) if config.tie_word_embeddings else loader.linear("lm_head")
        )
        self.rope = TextRope(text, loader.device)
        # One for each weight: what a row costs in all layers together.
        self.multiplications_per_row = sum(
            count_weights(info) for info in loader.checkpoint.tensors.values() if info.name.startswith(layers)
        )

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        visual: VisualRows | None,
        cache: KVCache,
        plan: AttentionPlan,
        wanted: Tensor,
    ) -> Tensor:
        """Logits [n, vocabulary] in float32 of the rows ``wanted`` [n].

        The rows are ``token_ids`` [rows] at ``positions`` [3, rows]; their keys and values go into ``cache``
        as ``plan`` says.
        """
        hidden = F.embedding(token_ids, self.embedding)
        if visual is not None:
            hidden[visual.index] = visual.rows
        cosines, sines = self.rope.tables(positions, hidden.dtype)
        for index, layer in enumerate(self.layers[:-1]):
            hidden = layer.feed_forward(layer.attend(hidden, cosines, sines, cache, plan))
            if visual is not None and index < len(visual.deepstack):
                hidden[visual.index] += visual.deepstack[index]
        # Past the last keys and values only the rows that will speak matter; a picture's never do, so that
        # deepstack has nothing to add here.
        last = self.layers[-1]
        hidden = last.feed_forward(last.attend(hidden, cosines, sines, cache, plan)[wanted])
        return self.head(rms_norm(hidden, self.norm, self.eps)).float()


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
            self.query_key_norm = torch.cat((query_norm, key_norm))  # a row for each head
        self.output = loader.linear(f"{attention}.o_proj", bias=config.output_bias)
        self.post_attention_norm = loader.tensor(f"{name}.post_attention_layernorm.weight")
        gates = ("gate_up_proj",) if config.joined else ("gate_proj", "up_proj")
        self.gate_up = loader.linear(*(f"{name}.mlp.{part}" for part in gates))
        self.down = loader.linear(f"{name}.mlp.down_proj")

    def attend(
        self, hidden: Tensor, cosines: Tensor, sines: Tensor, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        """The first half of the layer, added to ``hidden`` [rows, hidden] in place."""
        x = rms_norm(hidden, self.input_norm, self.eps)
        query_heads, key_heads, _ = self.heads
        joined = self.qkv(x).view(len(x), sum(self.heads), -1)  # [rows, heads, head_dim]
        turning = joined[:, : query_heads + key_heads]
        if self.query_key_norm is not None:
            turning = rms_norm(turning, self.query_key_norm, self.eps)
        query, key = rotate(turning, cosines, sines).split((query_heads, key_heads), dim=1)
        value = joined[:, query_heads + key_heads :]
        cache.write(self.index, plan.write_slots, key, value)
        return hidden.add_(self.output(paged_attention(query, self.index, cache, plan)))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The second half of the layer, added to ``hidden`` [rows, hidden] in place."""
        gate, up = self.gate_up(rms_norm(hidden, self.post_attention_norm, self.eps)).chunk(2, dim=-1)
        return hidden.add_(self.down(F.silu(gate, inplace=True).mul_(up)))
