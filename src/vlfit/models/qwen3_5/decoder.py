"""Qwen3.5's text layers: gated delta nets and, every fourth, attention with an output gate.

Source: transformers' ``modeling_qwen3_5.py``.
"""

import torch
from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.text_config import TextConfig
from vlfit.kernels.gemm.epilogue import PreNormRows
from vlfit.kernels.recurrent.delta_rule import (
    DecayProjection,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    OutputGate,
)
from vlfit.kernels.rows.row_ops import PackedQKV
from vlfit.layers.attention import AttentionMetadata, gate_output, paged_attention
from vlfit.layers.cpu_stored import rounds_inputs
from vlfit.layers.fused import FusedLayer, fuse_layer, is_fusable, project
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

    def fuse(self) -> FusedLayer | None:
        """See ``DecoderLayer.fuse``."""
        return fuse_layer(self.qkv, self.output, self.gate_up, self.down)

    def mix(
        self,
        x: Tensor | PreNormRows,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Paged attention, times its gate."""
        projected = project(self.qkv, x)
        width = self.heads * self.head_dim
        gated, keys_values = projected.split((2 * width, projected.shape[1] - 2 * width), dim=1)
        query, gate = gated.unflatten(1, (self.heads, 2, -1)).unbind(2)
        qkv = torch.cat((query, keys_values.unflatten(1, (2 * self.kv_heads, -1))), dim=1)
        rounds = rounds_inputs(self.qkv) and "attention" not in kernels.plain_on(qkv.device)
        packed = PackedQKV(qkv, self.query_key_norm, *tables, self.eps, rounds=rounds)
        return gate_output(paged_attention(packed, self.index, cache, metadata), gate)


class GatedDeltaLayer(DecoderLayer):
    """A layer with a gated delta net, which keeps a state of fixed size."""

    def load_mixer(self, config: TextConfig, loader: Loader, load_norm: LoadNorm) -> None:
        """Load the projections, and in float32 what the state's decay and convolution are computed from."""
        assert isinstance(config, Qwen35TextConfig)
        name = f"{self.name}.linear_attn"
        parts = [f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        widths = (config.conv_dim, config.value_dim, *[config.linear_num_value_heads] * 2)
        # One product of all four, unless write strengths and decays are wider than the others.
        count = 4 if loader.have_one_format(*parts) else 2
        self.widths = widths[:count]
        self.qkv_z = loader.linear(*parts[:count])
        self.b_a = loader.linear(*parts[count:]) if count == 2 else None
        self.weights = DeltaWeights(
            loader.tensor(f"{name}.conv1d.weight", torch.float32).flatten(1),
            loader.tensor(f"{name}.A_log", torch.float32),
            loader.tensor(f"{name}.dt_bias", torch.float32),
        )
        self.norm = loader.tensor(f"{name}.norm.weight", torch.float32)
        self.output = loader.linear(f"{name}.out_proj")

    def fuse(self) -> FusedLayer | None:
        """See ``DecoderLayer.fuse``."""
        if self.b_a is not None and not is_fusable(self.b_a):
            return None
        return fuse_layer(self.qkv_z, self.output, self.gate_up, self.down)

    def mix(
        self,
        x: Tensor | PreNormRows,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The gated delta rule, with its gated norm."""
        if metadata.states is None:
            raise RuntimeError("a layer with a state got a batch without state slots")
        qkv, z, *rest = project(self.qkv_z, x).split(self.widths, dim=1)
        b, a, projection = self._decays(x) if self.b_a is not None else (*rest, None)
        rows, state = DeltaRows(qkv, a, b), DeltaState(**cache.states[self.index])
        gate = OutputGate(z, self.norm, self.eps)
        return gated_delta(rows, self.weights, state, metadata.states, gate, projection)

    def _decays(self, x: Tensor | PreNormRows) -> tuple[Tensor, Tensor, DecayProjection | None]:
        """Inputs of write strength and decay, each [rows, value_heads], by a product of their own.

        On the fused decode path they are uninitialized, and the kernel of the gated delta rule computes them.
        """
        assert self.b_a is not None
        projection = None
        if (
            isinstance(x, PreNormRows)
            and isinstance(self.b_a, DenseLinear)
            and projects_decays(x.rows.device)
        ):
            projection = DecayProjection(x, self.b_a.weight)
            b_a = x.rows.new_empty(len(x.rows), len(self.b_a.weight))
        else:
            b_a = project(self.b_a, x)
        b, a = b_a.chunk(2, dim=1)
        return b, a, projection


def build_layer(config: TextConfig, loader: Loader, index: int) -> DecoderLayer:
    """The layer ``index``, of the kind that the config names."""
    assert isinstance(config, Qwen35TextConfig)
    layer = GatedDeltaLayer if config.layer_types[index] == LINEAR else GatedAttentionLayer
    return layer(config, loader, index, load_norm)
