"""Qwen3.5 (dense): its config.json, tensors and caches, with a vision tower or text only.

Three of four text layers keep a state of fixed size (a gated delta net), the others keys and values. The
vision tower is Qwen3-VL's without deepstack. Defaults are transformers'.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from vlfit.checkpoint.config import NO_TOKEN, ModelConfig
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.quantization import read_quantization
from vlfit.checkpoint.text_config import TextConfig, read_activation, read_rotary_share, rope_fields
from vlfit.errors import UnknownArchitecture
from vlfit.models.cache_spec import MAX_PENDING_TOKENS, CacheSpec, Paged, State, StateTensor
from vlfit.models.qwen3_vl.config import (
    VISION_MODULES,
    read_image_processor_config,
    read_mrope,
    read_with_vision,
    vision_tensors,
)
from vlfit.models.registry import QWEN_THINKING, XML_TOOL_CALLS, ModelSpec

LINEAR, FULL = "linear_attention", "full_attention"
MTP = "mtp"  # prefix of the tensors of multi-token prediction
_FLOAT32 = ("norm.weight", ".conv1d.weight", ".A_log", ".dt_bias")
# A row for each value head: few bytes, and they decide how long a state lasts.
_DECAY = (".in_proj_a.weight", ".in_proj_b.weight")
_RUNS = "vlfit runs the dense Qwen3.5 models, 0.8B to 27B."


@dataclass(frozen=True, slots=True)
class Qwen35TextConfig(TextConfig):
    """Sizes of Qwen3.5's decoder.

    ``layer_types``: ``LINEAR`` or ``FULL`` for each layer. ``linear_*``: heads, widths and convolution of the
    gated delta net; ``linear_num_value_heads`` is a multiple of ``linear_num_key_heads``.
    ``mtp_num_hidden_layers``: layers that draft tokens (multi-token prediction), 0 without.
    """

    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    mtp_num_hidden_layers: int = 0

    @property
    def key_dim(self) -> int:
        """Width of all key heads of a linear layer; its queries are as wide."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all value heads of a linear layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of a linear layer's convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def cache_spec(self) -> CacheSpec:
        """Keys and values of the full layers; of the linear ones the convolution's last inputs and the state.

        Beside them lie the inputs of tokens of which it is not known yet whether they stay
        (``layers/gated_delta.py``).
        """
        heads = self.linear_num_value_heads
        state = State(
            (
                StateTensor("conv", (self.conv_dim, self.linear_conv_kernel_dim - 1)),
                StateTensor("recurrent", (heads, self.linear_key_head_dim, self.linear_value_head_dim)),
                StateTensor("pending_rows", (MAX_PENDING_TOKENS, self.conv_dim), saved=False),
                StateTensor("pending_decay", (MAX_PENDING_TOKENS, heads), saved=False),
                StateTensor("pending_beta", (MAX_PENDING_TOKENS, heads), saved=False),
            )
        )
        paged = Paged(self.num_key_value_heads, self.head_dim)
        return tuple(state if kind == LINEAR else paged for kind in self.layer_types)

    @property
    def draft_cache(self) -> CacheSpec:
        """The cache of the multi-token prediction layer; empty unless the checkpoint has exactly one."""
        return (Paged(self.num_key_value_heads, self.head_dim),) if self.mtp_num_hidden_layers == 1 else ()


def read_config(fields: Fields) -> ModelConfig:
    """Read Qwen3.5's config.json.

    Raises ``CheckpointError`` for a missing or invalid field, and ``UnknownArchitecture`` for what vlfit does
    not run: another rope type, full layers without an output gate.
    """
    read = partial(read_text, prefix="model.language_model")
    return read_with_vision(fields, read, first_token=248053, deepstack=())


def read_text_only_config(fields: Fields) -> ModelConfig:
    """Read config.json of a Qwen3.5 without a vision tower. Raises what ``read_config`` raises."""
    return ModelConfig(
        text=read_text(fields, "model"),
        vision=None,
        image_token_id=NO_TOKEN,
        video_token_id=NO_TOKEN,
        vision_start_token_id=NO_TOKEN,
        vision_end_token_id=NO_TOKEN,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        quantization=read_quantization(fields),
        model_type=fields.text("model_type"),
    )


def read_text(fields: Fields, prefix: str) -> Qwen35TextConfig:
    """The decoder that ``fields`` describe; ``prefix``: of its tensors' names."""
    theta, sections = read_mrope(fields, 10000.0, (11, 11, 10))
    heads, kv_heads = fields.integer("num_attention_heads", 16), fields.integer("num_key_value_heads", 4)
    if heads % kv_heads:
        wanted = f"a divisor of num_attention_heads ({heads})"
        raise fields.field_error("num_key_value_heads", f"is {kv_heads}", wanted)
    head_dim = fields.integer("head_dim", 256)
    key_heads = fields.integer("linear_num_key_heads", 16)
    value_heads = fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        wanted = f"a multiple of linear_num_key_heads ({key_heads})"
        raise fields.field_error("linear_num_value_heads", f"is {value_heads}", wanted)
    for name, supported in (("attn_output_gate", True), ("mtp_use_dedicated_embeddings", False)):
        if fields.flag(name, supported) != supported:
            raise UnknownArchitecture(
                f"config.json: {fields.prefix}{name} is {str(not supported).lower()}", _RUNS
            )
    biases = fields.flag("attention_bias", False)
    return Qwen35TextConfig(
        vocab_size=fields.integer("vocab_size", 248320),
        hidden_size=fields.integer("hidden_size", 4096),
        intermediate_size=fields.integer("intermediate_size", 12288),
        num_hidden_layers=fields.integer("num_hidden_layers", 32),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", 32768),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
        rope_theta=theta,
        mrope_section=sections,
        attention_bias=biases,
        output_bias=biases,
        hidden_act=read_activation(fields, "silu"),
        prefix=prefix,
        partial_rotary_factor=_read_rotated_part(fields, head_dim, sections),
        layer_types=_read_layer_types(fields),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=fields.integer("linear_key_head_dim", 128),
        linear_value_head_dim=fields.integer("linear_value_head_dim", 128),
        linear_conv_kernel_dim=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        mtp_num_hidden_layers=fields.integer("mtp_num_hidden_layers", 0, minimum=0),
    )


def _read_layer_types(fields: Fields) -> tuple[str, ...]:
    """The kind of each layer: as listed, or every ``full_attention_interval``-th is a full one."""
    count = fields.integer("num_hidden_layers", 32)
    interval = fields.integer("full_attention_interval", 4)
    default = tuple(LINEAR if (index + 1) % interval else FULL for index in range(count))
    kinds = fields.texts("layer_types", default)
    if len(kinds) != count:
        raise fields.field_error("layer_types", f"has {len(kinds)} layers", f"{count} (num_hidden_layers)")
    if unknown := sorted(set(kinds) - {LINEAR, FULL}):
        raise UnknownArchitecture(f"config.json: {fields.prefix}layer_types has {', '.join(unknown)}", _RUNS)
    if FULL not in kinds:
        raise fields.field_error("layer_types", f"has no {FULL}", "at least one")
    return kinds


def _read_rotated_part(fields: Fields, head_dim: int, sections: tuple[int, int, int]) -> float:
    share = read_rotary_share(fields, head_dim, 0.25)
    rotated = int(head_dim * share)
    if sum(sections) != rotated // 2:
        wanted = f"three integers that add up to {rotated // 2}, half of the rotated part of a head"
        raise rope_fields(fields).field_error("mrope_section", f"is {list(sections)}", wanted)
    return share


def text_config(config: ModelConfig) -> Qwen35TextConfig:
    """``config.text`` of a Qwen3.5. Raises ``TypeError`` for another family's."""
    if not isinstance(config.text, Qwen35TextConfig):
        raise TypeError(f"{config.model_type} is not a Qwen3.5")
    return config.text


def tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, before quantization: vision tower, decoder, MTP."""
    vision = {} if config.vision is None else dict(vision_tensors(config.vision))
    return {**vision, **dict(_decoder_tensors(config)), **dict(_mtp_tensors(text_config(config)))}


def _decoder_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    text = text_config(config)
    yield f"{text.prefix}.embed_tokens.weight", (text.vocab_size, text.hidden_size)
    for index, kind in enumerate(text.layer_types):
        yield from _layer_tensors(text, f"{text.prefix}.layers.{index}", kind)
    yield f"{text.prefix}.norm.weight", (text.hidden_size,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (text.vocab_size, text.hidden_size)


def _layer_tensors(text: Qwen35TextConfig, layer: str, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = text.hidden_size, text.intermediate_size
    yield f"{layer}.input_layernorm.weight", (hidden,)
    yield from (_linear_tensors if kind == LINEAR else _attention_tensors)(text, layer)
    yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
    yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
    yield f"{layer}.mlp.down_proj.weight", (hidden, inner)


def _linear_tensors(text: Qwen35TextConfig, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    name, hidden, heads = f"{layer}.linear_attn", text.hidden_size, text.linear_num_value_heads
    yield f"{name}.in_proj_qkv.weight", (text.conv_dim, hidden)
    yield f"{name}.in_proj_z.weight", (text.value_dim, hidden)
    yield f"{name}.in_proj_b.weight", (heads, hidden)
    yield f"{name}.in_proj_a.weight", (heads, hidden)
    yield f"{name}.conv1d.weight", (text.conv_dim, 1, text.linear_conv_kernel_dim)
    yield f"{name}.A_log", (heads,)
    yield f"{name}.dt_bias", (heads,)
    yield f"{name}.norm.weight", (text.linear_value_head_dim,)
    yield f"{name}.out_proj.weight", (hidden, text.value_dim)


def _attention_tensors(text: Qwen35TextConfig, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    name, hidden = f"{layer}.self_attn", text.hidden_size
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    # Of each query head the query first, then the gate of its output.
    for part, rows in (("q_proj", 2 * queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{name}.{part}.weight", (rows, hidden)
        if text.attention_bias:
            yield f"{name}.{part}.bias", (rows,)
    yield f"{name}.o_proj.weight", (hidden, queries)
    if text.output_bias:
        yield f"{name}.o_proj.bias", (hidden,)
    yield f"{name}.q_norm.weight", (text.head_dim,)
    yield f"{name}.k_norm.weight", (text.head_dim,)


def _mtp_tensors(text: Qwen35TextConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Multi-token prediction: a full layer over the hidden state and the embedding of the next token."""
    if not text.mtp_num_hidden_layers:
        return
    hidden = text.hidden_size
    yield f"{MTP}.fc.weight", (hidden, 2 * hidden)
    yield f"{MTP}.pre_fc_norm_embedding.weight", (hidden,)
    yield f"{MTP}.pre_fc_norm_hidden.weight", (hidden,)
    for index in range(text.mtp_num_hidden_layers):
        yield from _layer_tensors(text, f"{MTP}.layers.{index}", FULL)
    yield f"{MTP}.norm.weight", (hidden,)


SPEC = ModelSpec(
    architecture="Qwen3_5ForConditionalGeneration",
    read_config=read_config,
    tensors=tensors,
    optional_tensors=(f"{MTP}.",),
    float32_tensors=_FLOAT32,
    unquantized=_DECAY,
    cost="vlfit.models.qwen3_vl.cost",
    builders="vlfit.models.qwen3_5.builders",
    read_image_processor=read_image_processor_config,
    vision_modules=VISION_MODULES,
    tool_calls=XML_TOOL_CALLS,
    thinking=QWEN_THINKING,
)
TEXT_SPEC = ModelSpec(
    architecture="Qwen3_5ForCausalLM",
    read_config=read_text_only_config,
    tensors=tensors,
    optional_tensors=(f"{MTP}.",),
    float32_tensors=_FLOAT32,
    unquantized=_DECAY,
    builders="vlfit.models.qwen3_5.builders:TEXT_BUILDERS",
    tool_calls=XML_TOOL_CALLS,
    thinking=QWEN_THINKING,
)
