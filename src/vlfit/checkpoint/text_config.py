"""The text model's part of config.json: sizes, rotary embedding, sliding windows, biases.

``read_decoder`` reads a plain decoder by its family's ``DecoderRules``.

Sources: transformers' ``configuration_*.py`` and ``modeling_*.py`` of each family, ``modeling_rope_utils``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vlfit.checkpoint.fields import Fields
from vlfit.errors import UnknownArchitecture
from vlfit.models.cache_spec import CacheSpec, Paged

_PREFIX = "model"


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Position interpolation: every rotary frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1: low rotary frequencies divided by ``factor``, high ones unchanged, linear in between.

    Low: fewer than ``low_freq_factor`` rotations in ``original_max_positions`` tokens; high: more than
    ``high_freq_factor`` rotations.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Phi-3): each rotary frequency is divided by a number of its own.

    ``short_factor``, ``long_factor``: these numbers, [rotary_dim / 2], for contexts of up to
    ``original_max_positions`` tokens and for longer ones. ``attention_factor``: multiplies cosines and sines.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


RopeScaling = LinearRopeScaling | Llama3RopeScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Sizes and features of a decoder. ``head_dim`` need not be ``hidden_size / num_attention_heads``.

    ``mrope_section``: numbers of rotary frequencies for time, height and width; empty for ordinary RoPE.
    ``attention_bias``: queries, keys and values have biases; ``output_bias``: attention's output has one.
    ``prefix``: of tensor names. ``query_key_norm``: RMSNorm of queries and keys in each head.
    ``fused_projections``: the files have one matrix for queries, keys and values, and one for gate and up.
    ``partial_rotary_factor``: the rotated part of each head, above 0 to 1. ``rope_scaling``: change of rotary
    frequencies for long contexts; None: none. ``sliding_windows``: how many tokens each layer attends to,
    None for all; empty if all layers attend to all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    attention_bias: bool
    hidden_act: str
    prefix: str = "model.language_model"
    query_key_norm: bool = True
    output_bias: bool = False
    fused_projections: bool = False
    partial_rotary_factor: float = 1.0
    rope_scaling: RopeScaling | None = None
    sliding_windows: tuple[int | None, ...] = ()

    @property
    def cache_spec(self) -> CacheSpec:
        """What each layer caches: keys and values, of all tokens or of a sliding window.

        A window that is not shorter than ``max_position_embeddings`` counts as none.
        """
        windows = self.sliding_windows or (None,) * self.num_hidden_layers
        return tuple(
            Paged(
                self.num_key_value_heads,
                self.head_dim,
                window if window is not None and window < self.max_position_embeddings else None,
            )
            for window in windows
        )

    @property
    def draft_cache(self) -> CacheSpec:
        """What the layers cache that only draft tokens, after those of ``cache_spec``; () without any."""
        return ()

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of each head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def default_context(self) -> int:
        """The longest context at full quality, in tokens: with LongRoPE, ``original_max_positions``."""
        if isinstance(self.rope_scaling, LongRopeScaling):
            return min(self.rope_scaling.original_max_positions, self.max_position_embeddings)
        return self.max_position_embeddings

    def limited_to(self, context: int) -> "TextConfig":
        """A copy whose ``max_position_embeddings`` is at most ``context`` tokens."""
        return replace(self, max_position_embeddings=min(context, self.max_position_embeddings))


Windows = tuple[int | None, ...]  # as ``TextConfig.sliding_windows``


def read_no_windows(fields: Fields) -> Windows:
    """Empty, whatever config.json says: for families without sliding-window attention."""
    return ()


def read_same_window(fields: Fields) -> Windows:
    """``sliding_window`` in every layer (Phi-3); empty if config.json has none."""
    if not fields.has("sliding_window"):
        return ()
    return (fields.integer("sliding_window"),) * fields.integer("num_hidden_layers")


def read_windows_by_layer(fields: Fields) -> Windows:
    """``sliding_window`` in the layers that ``layer_types`` marks; without it, from ``max_window_layers`` on.

    For Qwen. Empty if ``use_sliding_window`` is false or missing, or no layer has a window.
    """
    if not fields.flag("use_sliding_window", False) or fields.values.get("sliding_window", 4096) is None:
        return ()
    window, count = fields.integer("sliding_window", 4096), fields.integer("num_hidden_layers")
    first = fields.integer("max_window_layers", 28, minimum=0)
    kinds = fields.texts("layer_types", ())
    if kinds and len(kinds) != count:
        raise fields.field_error("layer_types", f"has {len(kinds)} layers", f"{count} (num_hidden_layers)")
    slides = [kind == "sliding_attention" for kind in kinds] or [index >= first for index in range(count)]
    return tuple(window if each else None for each in slides) if any(slides) else ()


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How a family of plain decoders differs, and its defaults for fields that config.json leaves out.

    ``max_positions``, ``head_dim`` (None: hidden size over heads) and ``rms_norm_eps``: the defaults.
    ``qkv_bias``: whether queries, keys and values have biases; None: as ``attention_bias`` in config.json
    says. ``output_bias``: attention's output has a bias too if ``attention_bias`` is true; False: it never
    has one. ``query_key_norm``, ``fused_projections``: as in ``TextConfig``. ``rope_types``: supported RoPE
    scalings besides ``default``; ``rope_aliases``: from other names to these. ``partial_rotary``: whether
    heads may be rotated in part. ``windows``: the function that reads ``TextConfig.sliding_windows``.
    """

    max_positions: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    qkv_bias: bool | None = None
    output_bias: bool = False
    query_key_norm: bool = False
    fused_projections: bool = False
    rope_types: tuple[str, ...] = ("linear", "llama3")
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    partial_rotary: bool = False
    windows: Callable[[Fields], Windows] = read_no_windows


def read_decoder(fields: Fields, rules: DecoderRules) -> TextConfig:
    """The decoder that config.json (``fields``) describes, by the ``rules`` of its family.

    Raises ``UnknownArchitecture`` for a feature that vlfit does not run, ``CheckpointError`` for invalid
    fields.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.field_error(
            "num_key_value_heads", f"is {kv_heads}", f"a divisor of num_attention_heads ({heads})"
        )
    hidden = fields.integer("hidden_size")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.field_error(
            "hidden_size", f"is {hidden}", f"a multiple of num_attention_heads ({heads})"
        )
    head_dim = fields.integer("head_dim", rules.head_dim or hidden // heads)
    if fields.flag("mlp_bias", False):
        raise UnknownArchitecture(
            "config.json: mlp_bias is true", "vlfit runs feed-forward layers without biases only."
        )
    positions = fields.integer("max_position_embeddings", rules.max_positions)
    share = _read_partial_rotary(fields, rules, head_dim)
    biases = fields.flag("attention_bias", False)
    return TextConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=fields.number("rms_norm_eps", rules.rms_norm_eps, above=0),
        rope_theta=_read_rope_theta(fields),
        mrope_section=(),
        attention_bias=biases if rules.qkv_bias is None else rules.qkv_bias,
        hidden_act=read_activation(fields, "silu"),
        prefix=_PREFIX,
        query_key_norm=rules.query_key_norm,
        output_bias=biases and rules.output_bias,
        fused_projections=rules.fused_projections,
        partial_rotary_factor=share,
        rope_scaling=_read_rope_scaling(fields, rules, positions, int(head_dim * share)),
        sliding_windows=_read_windows(fields, rules),
    )


def read_activation(fields: Fields, supported: str) -> str:
    """``supported``, if that is ``hidden_act`` or there is none. Raises ``UnknownArchitecture`` otherwise."""
    name = fields.text("hidden_act", supported)
    if name != supported:
        raise UnknownArchitecture(
            f"config.json: {fields.prefix}hidden_act is {name!r}", f"vlfit runs {supported!r} there."
        )
    return name


def _read_windows(fields: Fields, rules: DecoderRules) -> Windows:
    """Sliding windows. Raises ``UnknownArchitecture`` for other kinds of layers."""
    unsupported = sorted(set(fields.texts("layer_types", ())) - {"full_attention", "sliding_attention"})
    if unsupported:
        raise UnknownArchitecture(
            f"config.json: layer_types has {', '.join(unsupported)}",
            "vlfit runs full_attention and sliding_attention.",
        )
    return rules.windows(fields)


def rope_fields(fields: Fields) -> Fields:
    """``rope_parameters`` of transformers 5, or ``rope_scaling``; empty without either."""
    return fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def _read_rope_theta(fields: Fields) -> float:
    rope = rope_fields(fields)
    return (rope if rope.has("rope_theta") else fields).number("rope_theta", 10000.0, above=0)


def read_rotary_share(fields: Fields, head_dim: int, default: float) -> float:
    """The share of ``head_dim`` that is rotated (``partial_rotary_factor``); ``default``: if none is given.

    Raises ``CheckpointError`` unless it is an even number of elements.
    """
    rope = rope_fields(fields)
    share = (rope if rope.has("partial_rotary_factor") else fields).number("partial_rotary_factor", default)
    rotated = int(head_dim * share)
    if not 0 < rotated <= head_dim or rotated % 2:
        what = f"rotates {rotated} of head_dim {head_dim}"
        raise fields.field_error("partial_rotary_factor", what, "an even number of them")
    return share


def _read_partial_rotary(fields: Fields, rules: DecoderRules, head_dim: int) -> float:
    share = read_rotary_share(fields, head_dim, 1.0)
    if int(head_dim * share) != head_dim and not rules.partial_rotary:
        raise UnknownArchitecture(
            f"config.json: partial_rotary_factor is {share:g}",
            f"vlfit runs {fields.text('model_type')} models that rotate whole heads only.",
        )
    return share


def _read_rope_scaling(
    fields: Fields, rules: DecoderRules, positions: int, rotary: int
) -> RopeScaling | None:
    rope = rope_fields(fields)
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = rules.rope_aliases.get(kind, kind)
    if kind == "default" and not any(isinstance(value, dict) for value in rope.values.values()):
        return None
    if kind not in rules.rope_types:
        raise UnknownArchitecture(
            f"config.json: {rope.prefix}rope_type is {kind!r}, for a {fields.text('model_type')} model",
            f"vlfit runs {', '.join(('default', *rules.rope_types))} there. Without that section the model "
            "runs with the context that it was first trained on.",
        )
    if kind == "linear":
        return LinearRopeScaling(rope.number("factor", above=0))
    if kind == "llama3":
        original = rope.integer("original_max_position_embeddings", positions)
        low = rope.number("low_freq_factor", above=0)
        high = rope.number("high_freq_factor", above=low)
        return Llama3RopeScaling(rope.number("factor", above=0), low, high, original)
    return _read_longrope(fields, rope, positions, rotary)


def _read_longrope(fields: Fields, rope: Fields, positions: int, rotary: int) -> LongRopeScaling:
    original = fields.integer("original_max_position_embeddings", 4096, minimum=2)
    factors = {name: rope.numbers(name) for name in ("short_factor", "long_factor")}
    for name, found in factors.items():
        if len(found) != rotary // 2 or min(found, default=0) <= 0:
            raise rope.field_error(name, f"has {len(found)} numbers", f"{rotary // 2} numbers above 0")
    factor = rope.number("factor", positions / original, above=0)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        factors["short_factor"],
        factors["long_factor"],
        original,
        rope.number("attention_factor", scale, above=0),
    )
