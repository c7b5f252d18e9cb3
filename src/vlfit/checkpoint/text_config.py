"""The decoder's part of ``config.json``: sizes, rotary embedding, sliding windows, biases.

``read_decoder`` reads a text-only decoder; ``DecoderRules`` say what differs between families.

Sources: transformers' ``configuration_*.py`` and ``modeling_*.py`` of each, and ``modeling_rope_utils``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vlfit.checkpoint.fields import Fields
from vlfit.errors import UnknownArchitecture
from vlfit.models.cache_spec import CacheSpec, Paged

_TEXT_ROOT = "model"


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Linear scaling: every rotary frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's: low frequencies divided by ``factor``, high ones unchanged, linear in between.

    Low: fewer than ``low`` rotations in the ``original`` context; high: more than ``high``.
    """

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Phi-3): a divisor per frequency, ``short`` up to the ``original`` context, ``long`` above.

    Both [rotary_dim / 2]. Cosines and sines are multiplied by ``scale``.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    scale: float


RopeScaling = LinearRopeScaling | Llama3RopeScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class TextConfig:
    """A decoder. ``head_dim`` need not be ``hidden_size / num_attention_heads``.

    ``mrope_section``: how many rotary frequencies belong to time, height and width; empty for positions on
    one axis. ``attention_bias``: of queries, keys and values; ``output_bias``: of attention's output.
    ``prefix``: of the tensors' names. ``query_key_norm``: queries and keys are normalized. ``joined``: the
    files have one matrix for queries, keys and values and one for gate and up.
    ``partial_rotary_factor``: the rotated part of each head. ``rope_scaling``: of rotary frequencies, for
    long contexts. ``window``: the context ends there, so that a window of that size needs no mask;
    ``max_position_embeddings`` is no larger. ``sliding_windows``: tokens that each layer attends to, None for
    all; empty: all layers attend to all.
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
    joined: bool = False
    partial_rotary_factor: float = 1.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    sliding_windows: tuple[int | None, ...] = ()

    @property
    def cache_spec(self) -> CacheSpec:
        """Keys and values in every layer. A window that no sequence can leave is none."""
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
    def rotary_dim(self) -> int:
        """How many elements of each head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def default_context(self) -> int:
        """The longest context at full quality: LongRoPE's long frequencies are worse for short texts."""
        most = self.max_position_embeddings
        return (
            min(self.rope_scaling.original, most) if isinstance(self.rope_scaling, LongRopeScaling) else most
        )

    def limited_to(self, context: int) -> "TextConfig":
        """The same decoder for sequences of at most ``context`` tokens."""
        return replace(self, max_position_embeddings=min(context, self.max_position_embeddings))


def no_window(fields: Fields) -> int | None:
    """For families without sliding-window attention."""
    return None


def plain_window(fields: Fields) -> int | None:
    """``sliding_window``, where config.json has one (Phi-3)."""
    return fields.integer("sliding_window") if fields.has("sliding_window") else None


def switched_window(fields: Fields) -> int | None:
    """``sliding_window`` if it is switched on and some layer has one (Qwen2, Qwen3)."""
    layers = fields.texts("layer_types", ())
    count = fields.integer("num_hidden_layers")
    slides = "sliding_attention" in layers if layers else fields.integer("max_window_layers", 28) < count
    return plain_window(fields) if fields.flag("use_sliding_window", False) and slides else None


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """What a family of text-only decoders has where config.json is silent.

    ``max_positions``, ``head_dim`` (None: hidden size over heads) and ``rms_norm_eps`` are defaults.
    ``qkv_bias``: queries, keys and values have biases, None: where ``attention_bias`` says so;
    ``output_bias``: then the attention's output has one, too. ``query_key_norm``, ``joined``: as in
    ``TextConfig``. ``rope_types``: scalings of rotary frequencies that it may have; ``rope_aliases``: other
    names of them. ``partial_rotary``: a part of each head may be rotated. ``window``: reads the sliding
    window.
    """

    max_positions: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    qkv_bias: bool | None = None
    output_bias: bool = False
    query_key_norm: bool = False
    joined: bool = False
    rope_types: tuple[str, ...] = ("linear", "llama3")
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    partial_rotary: bool = False
    window: Callable[[Fields], int | None] = no_window


def read_decoder(fields: Fields, rules: DecoderRules) -> TextConfig:
    """The decoder of a text-only checkpoint from its config.json.

    Raises ``UnknownArchitecture`` for what vlfit does not run, ``CheckpointError`` for wrong fields.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong(
            "num_key_value_heads", f"is {kv_heads}", f"a divisor of num_attention_heads ({heads})"
        )
    hidden = fields.integer("hidden_size")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.wrong("hidden_size", f"is {hidden}", f"a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", rules.head_dim or hidden // heads)
    if fields.flag("mlp_bias", False):
        raise UnknownArchitecture(
            "config.json: mlp_bias is true", "vlfit runs feed-forward layers without biases only."
        )
    positions = fields.integer("max_position_embeddings", rules.max_positions)
    window = _read_window(fields, rules)
    share = _read_share(fields, rules, head_dim)
    biases = fields.flag("attention_bias", False)
    return TextConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=min(positions, window or positions),
        rms_norm_eps=fields.number("rms_norm_eps", rules.rms_norm_eps, above=0),
        rope_theta=_theta(fields),
        mrope_section=(),
        attention_bias=biases if rules.qkv_bias is None else rules.qkv_bias,
        hidden_act=activation(fields, "silu"),
        prefix=_TEXT_ROOT,
        query_key_norm=rules.query_key_norm,
        output_bias=biases and rules.output_bias,
        joined=rules.joined,
        partial_rotary_factor=share,
        rope_scaling=_read_stretch(fields, rules, positions, int(head_dim * share)),
        window=window,
    )


def activation(fields: Fields, only: str) -> str:
    """``hidden_act``, which must be ``only``."""
    name = fields.text("hidden_act", only)
    if name != only:
        raise UnknownArchitecture(
            f"config.json: {fields.prefix}hidden_act is {name!r}", f"vlfit runs {only!r} there."
        )
    return name


def _read_window(fields: Fields, rules: DecoderRules) -> int | None:
    """The sliding window, if layers have one. Raises ``UnknownArchitecture`` for other kinds of layers."""
    others = sorted(set(fields.texts("layer_types", ())) - {"full_attention", "sliding_attention"})
    if others:
        raise UnknownArchitecture(
            f"config.json: layer_types has {', '.join(others)}",
            "vlfit runs full_attention and sliding_attention.",
        )
    return rules.window(fields)


def _rope(fields: Fields) -> Fields:
    """``rope_parameters``, as transformers 5 writes it, or ``rope_scaling``; an empty one for neither."""
    return fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def _theta(fields: Fields) -> float:
    rope = _rope(fields)
    return (rope if rope.has("rope_theta") else fields).number("rope_theta", 10000.0, above=0)


def _read_share(fields: Fields, rules: DecoderRules, head_dim: int) -> float:
    rope = _rope(fields)
    share = (rope if rope.has("partial_rotary_factor") else fields).number("partial_rotary_factor", 1.0)
    rotated = int(head_dim * share)
    if not 0 < rotated <= head_dim or rotated % 2:
        what = f"rotates {rotated} of head_dim {head_dim}"
        raise fields.wrong("partial_rotary_factor", what, "an even number of them")
    if rotated != head_dim and not rules.partial_rotary:
        raise UnknownArchitecture(
            f"config.json: partial_rotary_factor is {share:g}",
            f"A {fields.text('model_type')} model rotates whole heads; one that does not is another "
            "architecture.",
        )
    return share


def _read_stretch(fields: Fields, rules: DecoderRules, positions: int, rotary: int) -> RopeScaling | None:
    rope = _rope(fields)
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = rules.rope_aliases.get(kind, kind)
    if kind == "default" and not any(isinstance(value, dict) for value in rope.values.values()):
        return None
    if kind not in rules.rope_types:
        raise UnknownArchitecture(
            f"config.json: {rope.prefix}rope_type is {kind!r}, for a {fields.text('model_type')} model",
            "vlfit runs default and linear ones, llama3, and Phi-3's longrope. Without that section the "
            "model runs in the context that it was first trained on.",
        )
    if kind == "linear":
        return LinearRopeScaling(rope.number("factor", above=0))
    if kind == "llama3":
        original = rope.integer("original_max_position_embeddings", positions)
        low = rope.number("low_freq_factor", above=0)
        high = rope.number("high_freq_factor", above=low)
        return Llama3RopeScaling(rope.number("factor", above=0), low, high, original)
    return _read_long(fields, rope, positions, rotary)


def _read_long(fields: Fields, rope: Fields, positions: int, rotary: int) -> LongRopeScaling:
    original = fields.integer("original_max_position_embeddings", 4096, least=2)
    factors = {name: rope.numbers(name) for name in ("short_factor", "long_factor")}
    for name, found in factors.items():
        if len(found) != rotary // 2 or min(found, default=0) <= 0:
            raise rope.wrong(name, f"has {len(found)} numbers", f"{rotary // 2} numbers above 0")
    factor = rope.number("factor", positions / original, above=0)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        factors["short_factor"],
        factors["long_factor"],
        original,
        rope.number("attention_factor", scale, above=0),
    )
