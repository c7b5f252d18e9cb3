"""The decoder of a text model: token ids and image features in, logits out.

Embedding, decoder layers (grouped-query attention over the paged KV cache, gated feed-forward), deepstack
features added after the first layers, final norm, output head. ``TextConfig`` says what differs between
families: biases, query and key norms, rotary embedding, fused projections. A family with other norms or
layers passes functions that load them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from vlfit import kernels
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.tensors import count_weights
from vlfit.checkpoint.text_config import TextConfig
from vlfit.kernels.cpu.decode_layers import DecodeLayers, LayerWeights
from vlfit.kernels.gemm.epilogue import PreNormRows, ResidualEpilogue
from vlfit.kernels.rows.row_ops import PackedQKV
from vlfit.layers.attention import AttentionMetadata, paged_attention
from vlfit.layers.cpu_stored import StoredLinear, decode_stored, rounds_inputs
from vlfit.layers.embedding import Embedding, EmbeddingInRam
from vlfit.layers.fused import (
    FusedLayer,
    add_norm,
    add_norm_linear,
    feed_forward,
    fuse_layer,
    fused_linear,
    is_fusable,
    linear_add_residual,
    project,
    uses_fused_decode,
)
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.linear import Linear
from vlfit.layers.rope import RotaryEmbedding
from vlfit.loading.arena import concatenate
from vlfit.loading.loader import Loader
from vlfit.loading.offload import StreamedLayers


@dataclass(frozen=True, slots=True)
class VisualRows:
    """Image features of a batch with n image tokens.

    ``rows`` [n, hidden] replace the embeddings of the batch's rows ``index`` [n]. ``deepstack[level]``
    [n, hidden] is added to the batch's rows ``index`` after text layer ``level``.
    """

    index: Tensor
    rows: Tensor
    deepstack: tuple[Tensor, ...]


def load_norm(loader: Loader, name: str) -> Tensor:
    """Load the weight ``name`` of an RMSNorm, as it is multiplied: [width]."""
    return loader.tensor(name)


class TextModel:
    """A text model: embedding, decoder layers, final norm, output head.

    Called with a batch (token ids, positions, image features, cache, attention metadata), it stores the
    keys and values of all rows in the cache and returns logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        offloaded: Collection[int] = (),
        previous: "TextModel | None" = None,
        build_layer: "BuildLayer | None" = None,
        load_norm: "LoadNorm" = load_norm,
    ) -> None:
        """Load the weights with ``loader``.

        ``offloaded``: indices of layers whose weights stay in RAM and are streamed in for each pass.
        ``previous``: the model that this one replaces, from the same files; its weights in RAM are not
        read again. ``build_layer``: builds the layer of an index; None: ``AttentionLayer``. ``load_norm``:
        loads the weight of the final norm.
        """
        text = config.text
        self.vocabulary, self.hidden_size = text.vocab_size, text.hidden_size
        self.eps = text.rms_norm_eps
        self._heads = text.num_attention_heads
        self._decode_layers: DecodeLayers | None = None
        self._described_layers: Sequence[DecoderLayer] = ()  # those that it was made of
        layers = f"{text.prefix}.layers."

        def build(index: int) -> DecoderLayer:
            return (build_layer or AttentionLayer)(text, loader, index)

        count = text.num_hidden_layers
        self.layers: Sequence[DecoderLayer] = (
            StreamedLayers(build, count, offloaded, loader, previous.layers if previous else ())
            if offloaded
            else loader.in_arena(lambda: list(map(build, range(count))))
        )
        self.norm = load_norm(loader, f"{text.prefix}.norm.weight")
        self.embedding: Embedding = (
            previous.embedding  # in RAM it stays valid
            if previous is not None and isinstance(previous.embedding, EmbeddingInRam)
            else loader.embedding(f"{text.prefix}.embed_tokens")
        )
        self.head: Linear = self.embedding.head() if config.tie_word_embeddings else loader.linear("lm_head")
        self.rope = RotaryEmbedding(text, loader.device)
        # One for each weight of the layers.
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
        metadata: AttentionMetadata,
        logit_rows: Tensor | None,
    ) -> Tensor:
        """Logits [n, vocabulary] of the rows ``logit_rows`` [n] of a batch, or of all rows if None.

        ``token_ids`` [rows], ``positions`` [3, rows]. ``visual``: image features; None: the batch has no
        image tokens. No image token may be among ``logit_rows``. Stores the keys and values of all rows in
        ``cache``.
        """
        return self._forward(token_ids, positions, visual, cache, metadata, logit_rows, self.head)

    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        visual: VisualRows | None,
        cache: KVCache,
        metadata: AttentionMetadata,
        rows: Tensor | None,
    ) -> Tensor:
        """Hidden states [n, hidden] of ``rows`` [n] after the final norm: what the output head takes.

        ``rows`` None: of all. Otherwise as a call.
        """
        return self._forward(token_ids, positions, visual, cache, metadata, rows, None)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        visual: VisualRows | None,
        cache: KVCache,
        metadata: AttentionMetadata,
        logit_rows: Tensor | None,
        head: Linear | None,
    ) -> Tensor:
        hidden = self.embedding(token_ids)
        if visual is not None:
            hidden[visual.index] = visual.rows
        tables = self.rope.tables(positions, hidden.dtype)
        if (
            visual is None
            and logit_rows is None
            and uses_fused_decode(hidden)
            and (layers := self._fused_layers())
        ):
            return self._decode_fused(layers, hidden, tables, cache, metadata, head)
        if (
            visual is None
            and (stored := self._stored_layers())
            and decode_stored(stored, hidden, tables, cache, metadata)
        ):
            wanted = hidden if logit_rows is None else hidden[logit_rows]
            final = add_norm(wanted, None, self.norm, self.eps)
            return final if head is None else head(final)
        delta: Tensor | None = None  # output of the last half layer, to be added to the residual
        for index, layer in enumerate(self.layers):
            delta = layer.attend(hidden, delta, tables, cache, metadata)
            if index == len(self.layers) - 1 and logit_rows is not None:
                # After the last attention only rows with logits matter. None of them is an image token, so
                # there is no deepstack to add.
                hidden, delta, visual = hidden[logit_rows], delta[logit_rows], None
            delta = layer.feed_forward(hidden, delta)
            if visual is not None and index < len(visual.deepstack):
                hidden.add_(delta)
                delta = None
                hidden[visual.index] += visual.deepstack[index]
        final = add_norm(hidden, delta, self.norm, self.eps)
        return final if head is None else head(final)

    def _fused_layers(self) -> list[tuple["DecoderLayer", FusedLayer]]:
        """The layers with their fused GEMMs, if all layers can be fused; else an empty list.

        A layer's last GEMM prepares the next layer's norm, so a model with offloaded layers cannot be fused.
        """
        if not isinstance(self.layers, list):
            return []
        fused = [
            (layer, parts)
            for layer in self.layers
            if isinstance(layer, DecoderLayer) and (parts := layer.fuse()) is not None
        ]
        return fused if len(fused) == len(self.layers) else []

    def _stored_layers(self) -> DecodeLayers | None:
        """The layers as one call of compiled code, if all weights stay as stored on a CPU; else None."""
        stored = self._decode_layers
        if self.layers == self._described_layers and (stored is None or stored.is_current):
            return stored
        weights = [
            weights
            for layer in self.layers
            if isinstance(layer, AttentionLayer) and (weights := layer.stored()) is not None
        ]
        self._described_layers = self.layers
        self._decode_layers = None
        if weights and len(weights) == len(self.layers):
            self._decode_layers = DecodeLayers(weights, self._heads, self.eps)
        return self._decode_layers

    def _decode_fused(
        self,
        layers: list[tuple["DecoderLayer", FusedLayer]],
        hidden: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
        head: Linear | None,
    ) -> Tensor:
        """Logits by the fused decode path, or without ``head`` the hidden states after the final norm.

        Overwrites ``hidden`` [rows, hidden].
        """
        rows: PreNormRows | None = None
        next_norms = [*(layer.input_norm for layer, _ in layers[1:]), self.norm]
        for (layer, fused), next_norm in zip(layers, next_norms, strict=True):
            rows = layer.decode_fused(fused, hidden, rows, next_norm, tables, cache, metadata)
        if rows is not None and head is not None and is_fusable(head):
            return fused_linear(head, rows)
        final = add_norm(hidden, None, self.norm, self.eps)
        return final if head is None else head(final)


class DecoderLayer(ABC):
    """One text layer: a token mixer (``attend``) and a feed-forward, each with its RMSNorm and residual add.

    ``index``: its number, from 0. A residual add is deferred to the next norm, so that one kernel does both:
    ``attend`` and then ``feed_forward`` take ``delta``, the previous output, still to be added to ``hidden``,
    and return their own output without adding it.
    """

    output: Linear  # of the token mixer, loaded by ``load_mixer``

    def __init__(
        self, config: TextConfig, loader: Loader, index: int, load_norm: "LoadNorm" = load_norm
    ) -> None:
        """``load_norm``: loads the weight of an RMSNorm, for a family whose files hold something else."""
        self.name = name = f"{config.prefix}.layers.{index}"
        self.index = index
        self.eps = config.rms_norm_eps
        self.input_norm = load_norm(loader, f"{name}.input_layernorm.weight")
        self.load_mixer(config, loader, load_norm)
        self.post_attention_norm = load_norm(loader, f"{name}.post_attention_layernorm.weight")
        gates = ("gate_up_proj",) if config.fused_projections else ("gate_proj", "up_proj")
        self.gate_up = loader.linear(*(f"{name}.mlp.{part}" for part in gates))
        self.down = loader.linear(f"{name}.mlp.down_proj")

    @abstractmethod
    def load_mixer(self, config: TextConfig, loader: Loader, load_norm: "LoadNorm") -> None:
        """Load ``output`` and the weights of ``mix``."""

    @abstractmethod
    def mix(
        self,
        x: Tensor | PreNormRows,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The input of the output projection [rows, width], for the normalized residual ``x`` [rows, hidden].

        ``tables``: cosines and sines of ``RotaryEmbedding.tables``. The rows' keys and values, or the
        sequences' new states, are stored in ``cache``.
        """

    def attend(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Add ``delta`` to ``hidden`` [rows, hidden] in place; return the output of the token mixer.

        That is [rows, hidden], computed from the RMSNorm of the sum. ``delta`` None: nothing is added. The
        other arguments are those of ``mix``.
        """
        x = add_norm(hidden, delta, self.input_norm, self.eps)
        return self.output(self.mix(x, tables, cache, metadata))

    def feed_forward(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """Add ``delta`` to ``hidden`` [rows, hidden] in place; return the output of the feed-forward.

        That is [rows, hidden], computed from the RMSNorm of the sum.
        """
        return feed_forward(self.gate_up, self.down, hidden, delta, self.post_attention_norm, self.eps)

    @abstractmethod
    def fuse(self) -> FusedLayer | None:
        """The layer's GEMMs for ``decode_fused``; None if they cannot be fused or that would be slower."""

    def decode_fused(
        self,
        fused: FusedLayer,
        hidden: Tensor,
        rows: PreNormRows | None,
        next_norm: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> PreNormRows:
        """Run the whole layer on the fused decode path; add its output to ``hidden`` [rows, hidden] in place.

        ``rows``: what the previous layer's ``decode_fused`` returned; None in the first layer. ``next_norm``
        [hidden]: weight of the RMSNorm that follows the layer. Returns ``hidden`` times that weight, for the
        prologue of the next GEMM.
        """
        x = add_norm(hidden, None, self.input_norm, self.eps) if rows is None else rows
        mixed = self.mix(x, tables, cache, metadata)
        rows = linear_add_residual(
            fused.output, mixed, ResidualEpilogue(hidden, self.post_attention_norm, self.eps)
        )
        inner = fused_linear(fused.gate_up, rows, swiglu=True)
        return linear_add_residual(fused.down, inner, ResidualEpilogue(hidden, next_norm, self.eps))


BuildLayer = Callable[[TextConfig, Loader, int], DecoderLayer]
LoadNorm = Callable[[Loader, str], Tensor]


def load_query_key_norm(
    config: TextConfig, loader: Loader, attention: str, load_norm: LoadNorm = load_norm
) -> Tensor:
    """Weights of the RMSNorm of queries and keys: [heads + kv_heads, head_dim], a row for each head.

    ``attention``: name of the attention module.
    """
    query_norm = load_norm(loader, f"{attention}.q_norm.weight").expand(config.num_attention_heads, -1)
    key_norm = load_norm(loader, f"{attention}.k_norm.weight").expand(config.num_key_value_heads, -1)
    return concatenate((query_norm, key_norm))


class AttentionLayer(DecoderLayer):
    """A text layer with grouped-query attention."""

    def load_mixer(self, config: TextConfig, loader: Loader, load_norm: LoadNorm) -> None:
        """Load the projections, and the norm of queries and keys if the family has one."""
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        attention = f"{self.name}.self_attn"
        projections = ("qkv_proj",) if config.fused_projections else ("q_proj", "k_proj", "v_proj")
        self.qkv = loader.linear(*(f"{attention}.{part}" for part in projections), bias=config.attention_bias)
        self.query_key_norm: Tensor | None = None
        if config.query_key_norm:
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
        """See ``DecoderLayer.attend``. The norm's kernel may quantize its output for the projections."""
        qkv = add_norm_linear(self.qkv, hidden, delta, self.input_norm, self.eps)
        return self.output(self._attend(qkv, tables, cache, metadata))

    def mix(
        self,
        x: Tensor | PreNormRows,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Paged attention."""
        return self._attend(project(self.qkv, x), tables, cache, metadata)

    def _attend(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        qkv = qkv.view(len(qkv), sum(self.heads), -1)  # [rows, heads, head_dim]
        is_compiled = isinstance(self.qkv, StoredLinear) and "attention" not in kernels.plain_on(qkv.device)
        rounds = is_compiled and rounds_inputs(self.qkv)
        packed = PackedQKV(qkv, self.query_key_norm, *tables, self.eps, is_compiled, rounds)
        return paged_attention(packed, self.index, cache, metadata)

    def stored(self) -> LayerWeights | None:
        """The layer's weights for ``DecodeLayers``; None unless all matrices stay as stored on a CPU."""
        qkv, output, gate_up, down = self.qkv, self.output, self.gate_up, self.down
        if not (
            isinstance(qkv, StoredLinear)
            and isinstance(output, StoredLinear)
            and isinstance(gate_up, StoredLinear)
            and isinstance(down, StoredLinear)
        ):
            return None
        matrices = (qkv.parts, output.parts, gate_up.parts, down.parts)
        biases = (qkv.bias, output.bias, gate_up.bias, down.bias)
        return LayerWeights(*matrices, biases, self.input_norm, self.post_attention_norm, self.query_key_norm)

    def fuse(self) -> FusedLayer | None:
        """See ``DecoderLayer.fuse``."""
        return fuse_layer(self.qkv, self.output, self.gate_up, self.down)
