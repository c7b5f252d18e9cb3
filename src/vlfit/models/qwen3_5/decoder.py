"""Qwen3.5's text layers: gated delta nets and, every fourth, attention with an output gate.

Source: transformers' ``modeling_qwen3_5.py``.
"""

import torch
from torch import Tensor

from vlfit.checkpoint.text_config import TextConfig
from vlfit.kernels.recurrent.delta_rule import DeltaRows, DeltaState, DeltaWeights, OutputGate
from vlfit.kernels.rows.row_ops import PackedQKV
from vlfit.layers.attention import AttentionMetadata, gate_output, paged_attention
from vlfit.layers.fused import add_norm
from vlfit.layers.gated_delta import gated_delta
from vlfit.layers.kv_cache import KVCache
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
        width = self.heads * self.head_dim
        gated, keys_values = projected.split((2 * width, projected.shape[1] - 2 * width), dim=1)
        query, gate = gated.unflatten(1, (self.heads, 2, -1)).unbind(2)
        qkv = torch.cat((query, keys_values.unflatten(1, (2 * self.kv_heads, -1))), dim=1)
        packed = PackedQKV(qkv, self.query_key_norm, *tables, self.eps)
        attended = paged_attention(packed, self.index, cache, metadata)
        return self.output(gate_output(attended, gate))


class GatedDeltaLayer(DecoderLayer):
    """A layer with a gated delta net, which keeps a state of fixed size."""

    def load_mixer(self, config: TextConfig, loader: Loader, load_norm: LoadNorm) -> None:
        """Load the projections, and in float32 what the state's decay and convolution are computed from."""
        assert isinstance(config, Qwen35TextConfig)
        name = f"{self.name}.linear_attn"
        self.widths = (config.conv_dim, config.value_dim)
        self.qkv_z = loader.linear(f"{name}.in_proj_qkv", f"{name}.in_proj_z")
        self.b_a = loader.linear(f"{name}.in_proj_b", f"{name}.in_proj_a")
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
        if metadata.states is None:
            raise RuntimeError("a layer with a state got a batch without state slots")
        x = add_norm(hidden, delta, self.input_norm, self.eps)
        qkv, z = self.qkv_z(x).split(self.widths, dim=1)
        b, a = self.b_a(x).chunk(2, dim=1)
        state = DeltaState(**cache.states[self.index])
        gate = OutputGate(z, self.norm, self.eps)
        return self.output(gated_delta(DeltaRows(qkv, a, b), self.weights, state, metadata.states, gate))


def build_layer(config: TextConfig, loader: Loader, index: int) -> DecoderLayer:
    """The layer ``index``, of the kind that the config names."""
    assert isinstance(config, Qwen35TextConfig)
    layer = GatedDeltaLayer if config.layer_types[index] == LINEAR else GatedAttentionLayer
    return layer(config, loader, index, load_norm)
