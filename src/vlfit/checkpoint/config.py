"""``config.json`` of a checkpoint as frozen records: Qwen3-VL here, text-only models by ``text_config.py``.

Knows: both forms of the file (``rope_scaling`` + ``rope_theta``, the official one; ``rope_parameters``, which
transformers 5 writes), the defaults that transformers fills in, and what vlfit does not run.
Does not know: weights formats (``quantization.py`` does), tensors, tokens or pictures.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.quantization import CompressedFormat, Fp8Format, Quantization, read_quantization
from vlfit.checkpoint.text_config import TEXT_ONLY, TextConfig, activation, read_text_only
from vlfit.errors import InvalidRequest, NotACheckpoint, UnknownArchitecture

MODEL_TYPE = "qwen3_vl"
ARCHITECTURE = "Qwen3VLForConditionalGeneration"
NO_TOKEN = -1  # in the place of a picture's tokens where the model has none
_WHAT_RUNS = (
    "vlfit runs Qwen3-VL (2B, 4B, 8B; dense), and without pictures Qwen2.5, Qwen3, Llama and Phi-3 (dense). "
    "Try vlfit pull Qwen/Qwen3-VL-2B-Instruct-FP8."
)
# Before it, for what takes pictures and is none of these.
_WHAT_ELSE_RUNS = "Add --backend transformers, which runs all that transformers knows. By itself "


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower. ``deepstack_visual_indexes``: the blocks whose output also goes to text layers."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    hidden_act: str

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything in ``config.json`` that decides tensors and computation.

    ``vision`` is None where the model has no eyes; the four tokens around pictures are then ``NO_TOKEN``.
    """

    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tie_word_embeddings: bool
    quantization: Quantization | None

    @property
    def eyes(self) -> VisionConfig:
        """``vision``, of a model that has it. Raises ``InvalidRequest`` otherwise."""
        if self.vision is None:
            raise no_eyes()
        return self.vision

    @property
    def fp8(self) -> Fp8Format | None:
        return self.quantization if isinstance(self.quantization, Fp8Format) else None

    @property
    def compressed(self) -> CompressedFormat | None:
        return self.quantization if isinstance(self.quantization, CompressedFormat) else None

    @classmethod
    def read(cls, folder: Path) -> "ModelConfig":
        """Read ``folder/config.json``.

        Raises ``NotACheckpoint`` when there is none, ``UnknownArchitecture`` and ``UnknownWeightsFormat`` for
        models that vlfit does not run, and ``CheckpointError`` naming a field that is missing or wrong.
        """
        if not (folder / "config.json").is_file():
            what = "holds no config.json" if folder.is_dir() else "is not a folder"
            raise NotACheckpoint(
                f"{folder} {what}",
                "Give a checkpoint's folder, a name like Qwen/Qwen3-VL-2B-Instruct-FP8, or mini.",
            )
        fields = Fields.read(folder / "config.json")
        if fields.text("model_type", "none") in TEXT_ONLY:
            return _read_text_only(fields)
        _check_architecture(fields)
        text_fields = fields.section("text_config")
        text = _read_text(text_fields)
        vision = _read_vision(fields.section("vision_config"), text)
        # Both places may say it. The reference goes by the top level; checkpoints that say it in text_config
        # alone are older than the field's move, and mean the same.
        tied = fields if fields.has("tie_word_embeddings") else text_fields
        return cls(
            text=text,
            vision=vision,
            image_token_id=_token(fields, "image_token_id", 151655, text),
            video_token_id=_token(fields, "video_token_id", 151656, text),
            vision_start_token_id=_token(fields, "vision_start_token_id", 151652, text),
            vision_end_token_id=_token(fields, "vision_end_token_id", 151653, text),
            tie_word_embeddings=tied.flag("tie_word_embeddings", False),
            quantization=read_quantization(fields),
        )


def no_eyes(model: str = "this model") -> InvalidRequest:
    """The error for a picture that is meant for a text-only ``model``."""
    return InvalidRequest(
        f"{model} has no eyes: it reads text only",
        "Leave the pictures out, or load a Qwen3-VL.",
        param="messages",
    )


def _read_text_only(fields: Fields) -> ModelConfig:
    model_type = fields.text("model_type")
    _check_class(fields, TEXT_ONLY[model_type])
    return ModelConfig(
        text=read_text_only(fields, model_type),
        vision=None,
        image_token_id=NO_TOKEN,
        video_token_id=NO_TOKEN,
        vision_start_token_id=NO_TOKEN,
        vision_end_token_id=NO_TOKEN,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        quantization=read_quantization(fields),
    )


def _check_class(fields: Fields, wanted: str) -> None:
    architectures = fields.texts("architectures", (wanted,))
    if wanted not in architectures:
        raise UnknownArchitecture(
            f"config.json: architectures is {list(architectures)}, without {wanted}", _what_runs(fields)
        )


def _what_runs(fields: Fields) -> str:
    """A hint for a model that the native engine does not run."""
    return (_WHAT_ELSE_RUNS if fields.has("vision_config") else "") + _WHAT_RUNS


def _check_architecture(fields: Fields) -> None:
    model_type = fields.text("model_type", "none")
    if model_type != MODEL_TYPE:
        raise UnknownArchitecture(
            f"config.json: model_type is {model_type!r}, not {MODEL_TYPE!r}", _what_runs(fields)
        )
    _check_class(fields, ARCHITECTURE)
    for part in ("text_config", "vision_config"):
        if not fields.has(part):
            raise fields.wrong(part, "is missing", "an object")


def _read_text(fields: Fields) -> TextConfig:
    rope = _read_rope(fields)
    heads = fields.integer("num_attention_heads", 32)
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong(
            "num_key_value_heads", f"is {kv_heads}", f"a divisor of num_attention_heads ({heads})"
        )
    head_dim = fields.integer("head_dim", 128)
    if head_dim % 2:
        raise fields.wrong("head_dim", f"is {head_dim}", "an even number, for rotary positions")
    return TextConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", 128000),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
        rope_theta=rope[0],
        mrope_section=rope[1],
        attention_bias=fields.flag("attention_bias", False),
        output_bias=fields.flag("attention_bias", False),
        hidden_act=activation(fields, "silu"),
    )


def _read_rope(fields: Fields) -> tuple[float, tuple[int, int, int]]:
    """Theta and the M-RoPE sections, from ``rope_parameters`` or from ``rope_scaling`` and ``rope_theta``."""
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default"))
    # "mrope" is what older writers called the default type with sections.
    if kind not in ("default", "mrope"):
        raise UnknownArchitecture(
            f"config.json: {rope.prefix}rope_type is {kind!r}", 'vlfit runs the rope_type "default" only.'
        )
    if not rope.flag("mrope_interleaved", True):
        raise UnknownArchitecture(
            f"config.json: {rope.prefix}mrope_interleaved is false",
            "Qwen3-VL interleaves its position sections; a checkpoint that does not is another architecture.",
        )
    theta = (rope if rope.has("rope_theta") else fields).number("rope_theta", 500000.0, above=0)
    sections = rope.integers("mrope_section", (24, 20, 20))
    if len(sections) != 3:
        raise rope.wrong("mrope_section", f"is {list(sections)}", "three integers (time, height, width)")
    return theta, (sections[0], sections[1], sections[2])


def _read_vision(fields: Fields, text: TextConfig) -> VisionConfig:
    vision = VisionConfig(
        depth=fields.integer("depth"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=fields.integer("num_heads", 16),
        in_channels=fields.integer("in_channels", 3),
        patch_size=fields.integer("patch_size", 16),
        spatial_merge_size=fields.integer("spatial_merge_size", 2),
        temporal_patch_size=fields.integer("temporal_patch_size", 2),
        out_hidden_size=fields.integer("out_hidden_size"),
        num_position_embeddings=fields.integer("num_position_embeddings", 2304),
        deepstack_visual_indexes=fields.integers("deepstack_visual_indexes", (8, 16, 24)),
        hidden_act=activation(fields, "gelu_pytorch_tanh"),
    )
    if vision.hidden_size % vision.num_heads or vision.head_dim % 4:
        # Rotary positions split a head into height and width halves of cos/sin pairs.
        wanted = f"{vision.num_heads} (num_heads) times a multiple of 4"
        raise fields.wrong("hidden_size", f"is {vision.hidden_size}", wanted)
    if vision.out_hidden_size != text.hidden_size:
        wanted = f"text_config.hidden_size ({text.hidden_size})"
        raise fields.wrong("out_hidden_size", f"is {vision.out_hidden_size}", wanted)
    side = math.isqrt(vision.num_position_embeddings)
    if side * side != vision.num_position_embeddings:
        raise fields.wrong(
            "num_position_embeddings", f"is {vision.num_position_embeddings}", "a square number"
        )
    levels = vision.deepstack_visual_indexes
    if any(level >= vision.depth for level in levels) or list(levels) != sorted(set(levels)):
        wanted = f"rising block numbers below depth ({vision.depth})"
        raise fields.wrong("deepstack_visual_indexes", f"is {list(levels)}", wanted)
    if len(levels) > text.num_hidden_layers:
        wanted = f"at most one per text layer ({text.num_hidden_layers})"
        raise fields.wrong("deepstack_visual_indexes", f"names {len(levels)} levels", wanted)
    return vision


def _token(fields: Fields, name: str, default: int, text: TextConfig) -> int:
    token = fields.integer(name, default, least=0)
    if token >= text.vocab_size:
        raise fields.wrong(name, f"is {token}", f"a token below text_config.vocab_size ({text.vocab_size})")
    return token
