"""The decoder's part of ``config.json``: sizes, and what differs between the architectures that vlfit runs.

Knows: the text-only ones (Qwen2 and 2.5, Qwen3, Llama, Phi-3) with the defaults that transformers fills in,
their kinds of rotary positions, and what of them vlfit does not run. Does not know: Qwen3-VL's own fields
(``config.py`` does), weights formats, tensors or tokens.

Sources: transformers' ``configuration_*.py`` and ``modeling_*.py`` of each, and ``modeling_rope_utils``.
"""

import math
from dataclasses import dataclass, replace

from vlfit.checkpoint.fields import Fields
from vlfit.errors import UnknownArchitecture

TEXT_ONLY = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_TEXT_ROOT = "model"


@dataclass(frozen=True, slots=True)
class LinearStretch:
    """Every rotary frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Stretch:
    """Llama 3.1's: low frequencies divided by ``factor``, high ones as they are, a ramp between the two.

    A frequency is low if it turns less than ``low`` times in the ``original`` context, high if more than
    ``high`` times.
    """

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True)
class LongStretch:
    """Phi-3's LongRoPE: a divisor for each frequency, other ones in a context longer than the ``original``.

    ``short`` and ``long`` [rotary_dim / 2]; cosines and sines are multiplied by ``scale`` in both.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    scale: float


Stretch = LinearStretch | Llama3Stretch | LongStretch


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The language model. ``head_dim`` need not be ``hidden_size / num_attention_heads``.

    ``mrope_section``: how many rotary frequencies belong to time, height and width; empty where positions
    have one axis. ``attention_bias`` is of queries, keys and values. The defaults are what all Qwen3-VL have:
    names of tensors begin with ``prefix``; ``query_key_norm``: queries and keys are normalized;
    ``output_bias``: the attention's output has a bias; ``joined``: the files have one matrix for queries,
    keys and values and one for gate and up; ``rotary_share``: the part of each head that is turned;
    ``stretch``: how its frequencies are changed for contexts longer than it was first trained on.
    ``window``: a token sees so many back, itself counted; no context is longer, as vlfit has no windows, and
    ``max_position_embeddings`` is no more.
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
    rotary_share: float = 1.0
    stretch: Stretch | None = None
    window: int | None = None

    @property
    def rotary_dim(self) -> int:
        """How many elements of each head are turned by the position."""
        return int(self.head_dim * self.rotary_share)

    @property
    def usual_context(self) -> int:
        """The longest context that costs nothing: frequencies for longer ones are worse in short ones."""
        most = self.max_position_embeddings
        return min(self.stretch.original, most) if isinstance(self.stretch, LongStretch) else most

    def within(self, context: int) -> "TextConfig":
        """The same for sequences of at most ``context`` tokens."""
        return replace(self, max_position_embeddings=min(context, self.max_position_embeddings))


def read_text_only(fields: Fields, model_type: str) -> TextConfig:
    """The decoder of a text-only architecture, one of ``TEXT_ONLY``, from its config.json.

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
    head_dim = fields.integer("head_dim", 128 if model_type == "qwen3" else hidden // heads)
    if fields.flag("mlp_bias", False):
        raise UnknownArchitecture(
            "config.json: mlp_bias is true", "vlfit runs feed-forward layers without biases only."
        )
    positions = fields.integer("max_position_embeddings", _POSITIONS[model_type])
    window = _read_window(fields, model_type)
    share = _read_share(fields, model_type, head_dim)
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
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if model_type == "phi3" else 1e-6, above=0),
        rope_theta=_theta(fields),
        mrope_section=(),
        attention_bias=_QWEN2_BIASES if model_type == "qwen2" else biases,
        hidden_act=activation(fields, "silu"),
        prefix=_TEXT_ROOT,
        query_key_norm=model_type == "qwen3",
        output_bias=biases and model_type in ("qwen3", "llama"),
        joined=model_type == "phi3",
        rotary_share=share,
        stretch=_read_stretch(fields, model_type, positions, int(head_dim * share)),
        window=window,
    )


_POSITIONS = {"qwen2": 32768, "qwen3": 32768, "llama": 2048, "phi3": 4096}
_QWEN2_BIASES = True  # of queries, keys and values; no field says so


def activation(fields: Fields, only: str) -> str:
    """``hidden_act``, which must be ``only``."""
    name = fields.text("hidden_act", only)
    if name != only:
        raise UnknownArchitecture(
            f"config.json: {fields.prefix}hidden_act is {name!r}", f"vlfit runs {only!r} there."
        )
    return name


def _read_window(fields: Fields, model_type: str) -> int | None:
    """How far back a token sees, where that is less than everything."""
    layers = fields.texts("layer_types", ())
    others = sorted(set(layers) - {"full_attention", "sliding_attention"})
    if others:
        raise UnknownArchitecture(
            f"config.json: layer_types has {', '.join(others)}", "vlfit runs full_attention only."
        )
    if model_type in ("qwen2", "qwen3"):
        count = fields.integer("num_hidden_layers")
        slides = "sliding_attention" in layers if layers else fields.integer("max_window_layers", 28) < count
        if not (fields.flag("use_sliding_window", False) and slides):
            return None
    elif model_type != "phi3":
        return None
    return fields.integer("sliding_window") if fields.has("sliding_window") else None


def _rope(fields: Fields) -> Fields:
    """``rope_parameters``, as transformers 5 writes it, or ``rope_scaling``; an empty one for neither."""
    return fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def _theta(fields: Fields) -> float:
    rope = _rope(fields)
    return (rope if rope.has("rope_theta") else fields).number("rope_theta", 10000.0, above=0)


def _read_share(fields: Fields, model_type: str, head_dim: int) -> float:
    rope = _rope(fields)
    share = (rope if rope.has("partial_rotary_factor") else fields).number("partial_rotary_factor", 1.0)
    turned = int(head_dim * share)
    if not 0 < turned <= head_dim or turned % 2:
        what = f"leaves {turned} of head_dim {head_dim}"
        raise fields.wrong("partial_rotary_factor", what, "an even number of them, for rotary positions")
    if turned != head_dim and model_type != "phi3":
        raise UnknownArchitecture(
            f"config.json: partial_rotary_factor is {share:g}",
            f"Only Phi-3 turns a part of each head; another {model_type} that does is another architecture.",
        )
    return share


def _read_stretch(fields: Fields, model_type: str, positions: int, rotary: int) -> Stretch | None:
    rope = _rope(fields)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in ("su", "yarn") and model_type == "phi3":
        kind = "longrope"  # what older Phi-3 called it
    if kind == "default" and not any(isinstance(value, dict) for value in rope.values.values()):
        return None
    if kind == "linear":
        return LinearStretch(rope.number("factor", above=0))
    if kind == "llama3" and model_type != "phi3":
        original = rope.integer("original_max_position_embeddings", positions)
        low = rope.number("low_freq_factor", above=0)
        high = rope.number("high_freq_factor", above=low)
        return Llama3Stretch(rope.number("factor", above=0), low, high, original)
    if kind == "longrope" and model_type == "phi3":
        return _read_long(fields, rope, positions, rotary)
    raise UnknownArchitecture(
        f"config.json: {rope.prefix}rope_type is {kind!r}, for a {model_type} model",
        "vlfit runs default and linear ones, llama3, and Phi-3's longrope. Without that section the model "
        "runs in the context that it was first trained on.",
    )


def _read_long(fields: Fields, rope: Fields, positions: int, rotary: int) -> LongStretch:
    original = fields.integer("original_max_position_embeddings", 4096, least=2)
    factors = {name: rope.numbers(name) for name in ("short_factor", "long_factor")}
    for name, found in factors.items():
        if len(found) != rotary // 2 or min(found, default=0) <= 0:
            raise rope.wrong(name, f"has {len(found)} numbers", f"{rotary // 2} numbers above 0")
    factor = rope.number("factor", positions / original, above=0)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongStretch(
        factors["short_factor"],
        factors["long_factor"],
        original,
        rope.number("attention_factor", scale, above=0),
    )
