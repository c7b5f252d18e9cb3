"""Qwen3.5's text layers: gated delta nets and, every fourth, attention with an output gate.

Source: transformers' ``modeling_qwen3_5.py``.
"""

import torch
from torch import Tensor

from vlfit.checkpoint.text_config import TextConfig
from vlfit.kernels.gemm.epilogue import PreNormRows, unwrap_rows
from vlfit.kernels.recurrent.delta_rule import (
    DecayProjection,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    OutputGate,
)
from vlfit.kernels.rows.row_ops import PackedQKV
from vlfit.layers.attention import AttentionMetadata, gate_output, paged_attention
from vlfit.layers.fused import FusedLayer, add_norm, fuse_layer, fused_linear, is_fusable
from vlfit.layers.gated_delta import gated_delta, projects_decays
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.linear import DenseLinear
from vlfit.loading.loader import Loader
from vlfit.models.decoder import DecoderLayer, LoadNorm, load_query_key_norm
from vlfit.models.qwen3_5.config import LINEAR, Qwen35TextConfig


def load_norm(loader: Loader, name: str) -> Tensor:
    """Load the weight ``name`` of an RMSNorm: [width] float32. The files have its difference from 1.

    In 16 bits the sum would lose most of what the difference says.
    """
    return loader.tensor(name, torch.float32).add_(1)


class GatedAttentionLayer(DecoderLayer):
    """A layer with grouped-query attention, whose output is multiplied by the sigmoid of a gate."""

    def load_mixer(self, config: TextConfig, loader: Loader, load_norm: LoadNorm) -> None:
        """Load the projections: of each head the query and the gate, then keys and values."""
        attention = f"{self.name}.self_attn"
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        parts = (f"{attention}.{part}" for part in ("q_proj", "k_proj", "v_proj"))
        self.qkv = loader.linear(*parts, bias=config.attention_bias)
        self.query_key_norm = load_query_key_norm(config, loader, attention, load_norm)
        self.output = loader.linear(f"{attention}.o_proj", bias=config.output_bias)

    def attend(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See ``DecoderLayer.attend``."""
        projected = self.qkv(add_norm(hidden, delta, self.input_norm, self.eps))
        return self.output(self._attend(projected, tables, cache, metadata))

    def fuse(self) -> FusedLayer | None:
        """See ``DecoderLayer.fuse``."""
        return fuse_layer(self.qkv, self.output, self.gate_up, self.down)

    def mix_fused(
        self,
        fused: FusedLayer,
        x: Tensor | PreNormRows,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See ``DecoderLayer.mix_fused``."""
        return self._attend(fused_linear(fused.qkv, x), tables, cache, metadata)

    def _attend(
        self, projected: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Gated output of attention [rows, heads * head_dim] for queries, gates, keys and values."""
        width = self.heads * self.head_dim
        gated, keys_values = projected.split((2 * width, projected.shape[1] - 2 * width), dim=1)
        query, gate = gated.unflatten(1, (self.heads, 2, -1)).unbind(2)
        qkv = torch.cat((query, keys_values.unflatten(1, (2 * self.kv_heads, -1))), dim=1)
        packed = PackedQKV(qkv, self.query_key_norm, *tables, self.eps)
        return gate_output(paged_attention(packed, self.index, cache, metadata), gate)


class GatedDeltaLayer(DecoderLayer):
    """A layer with a gated delta net, which keeps a state of fixed size."""

    def load_mixer(self, config: TextConfig, loader: Loader, load_norm: LoadNorm) -> None:
        """Load the projections, and in float32 what the state's decay and convolution are computed from."""
        assert isinstance(config, Qwen35TextConfig)
        name = f"{self.name}.linear_attn"
        parts = [f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        heads = config.linear_num_value_heads
        self.widths = (config.conv_dim, config.value_dim, heads, heads)
        # One product of all four, unless decays and write strengths are wider than the others.
        self.is_one = loader.have_one_format(*parts)
        self.qkv_z = loader.linear(*(parts if self.is_one else parts[:2]))
        self.b_a = None if self.is_one else loader.linear(*parts[2:])
        self.weights = DeltaWeights(
            loader.tensor(f"{name}.conv1d.weight", torch.float32).flatten(1),
            loader.tensor(f"{name}.A_log", torch.float32),
            loader.tensor(f"{name}.dt_bias", torch.float32),
        )
        self.norm = loader.tensor(f"{name}.norm.weight", torch.float32)
        self.output = loader.linear(f"{name}.out_proj")

    def attend(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See ``DecoderLayer.attend``."""
        x = add_norm(hidden, delta, self.input_norm, self.eps)
        b_a = None if self.b_a is None else self.b_a(x)
        return self.output(self._run(self.qkv_z(x), b_a, cache, metadata))

    def fuse(self) -> FusedLayer | None:
        """See ``DecoderLayer.fuse``."""
        if self.b_a is not None and not is_fusable(self.b_a):
            return None
        return fuse_layer(self.qkv_z, self.output, self.gate_up, self.down)

    def mix_fused(
        self,
        fused: FusedLayer,
        x: Tensor | PreNormRows,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See ``DecoderLayer.mix_fused``."""
        projected = fused_linear(fused.qkv, x)
        if self.b_a is None or not is_fusable(self.b_a):
            return self._run(projected, None, cache, metadata)
        if isinstance(self.b_a, DenseLinear) and projects_decays(projected.device):
            rows, _ = unwrap_rows(x)
            return self._run(
                projected,
                rows.new_empty(len(rows), 2 * self.widths[-1]),
                cache,
                metadata,
                DecayProjection(x, self.b_a.weight),
            )
        return self._run(projected, fused_linear(self.b_a, x), cache, metadata)

    def _run(
        self,
        projected: Tensor,
        b_a: Tensor | None,
        cache: KVCache,
        metadata: AttentionMetadata,
        projection: DecayProjection | None = None,
    ) -> Tensor:
        """Output of the gated delta rule [rows, value_dim].

        ``b_a`` [rows, 2 * value_heads]: with ``projection`` it is computed there; None: ``projected`` ends
        with it.
        """
        if metadata.states is None:
            raise RuntimeError("a layer with a state got a batch without state slots")
        qkv, z, b, a = (
            projected.split(self.widths, dim=1)
            if b_a is None
            else (*projected.split(self.widths[:2], dim=1), *b_a.chunk(2, dim=1))
        )
        rows, state = DeltaRows(qkv, a, b), DeltaState(**cache.states[self.index])
        gate = OutputGate(z, self.norm, self.eps)
        return gated_delta(rows, self.weights, state, metadata.states, gate, projection)


def build_layer(config: TextConfig, loader: Loader, index: int) -> DecoderLayer:
    """The layer ``index``, of the kind that the config names."""
    assert isinstance(config, Qwen35TextConfig)
    layer = GatedDeltaLayer if config.layer_types[index] == LINEAR else GatedAttentionLayer
    return layer(config, loader, index, load_norm)
