"""Qwen3-VL: its config.json, image processor settings and tensors.

Both forms of config.json are read: ``rope_scaling`` with ``rope_theta`` (official checkpoints), and
``rope_parameters`` (transformers 5). Defaults are transformers'.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from vlfit.checkpoint.config import ModelConfig, VisionConfig
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.processor_files import ImageProcessorConfig, processor_fields
from vlfit.checkpoint.quantization import read_quantization
from vlfit.checkpoint.tensors import decoder_tensor_shapes, weight_and_bias
from vlfit.checkpoint.text_config import TextConfig, read_activation, rope_fields
from vlfit.errors import MissingFile, UnknownArchitecture
from vlfit.models.registry import QWEN_THINKING, ModelSpec, VisionModules

VISION_MODULES = VisionModules(
    root="model.visual",
    blocks="model.visual.blocks",
    quantized=r"re:.*visual\..*(attn\.qkv|attn\.proj|linear_fc1|linear_fc2)$",
)
_BICUBIC = 3
_IMAGE_PROCESSOR = ("image_processor", "preprocessor_config.json")


def read_config(fields: Fields) -> ModelConfig:
    """Read Qwen3-VL's config.json.

    Raises ``CheckpointError`` for a missing or invalid field, and ``UnknownArchitecture`` for a rope type
    other than the default or M-RoPE sections that are not interleaved.
    """
    return read_with_vision(fields, _read_text, first_token=151652, deepstack=(8, 16, 24))


def read_with_vision(
    fields: Fields, read_text: Callable[[Fields], TextConfig], *, first_token: int, deepstack: tuple[int, ...]
) -> ModelConfig:
    """Read a config.json with ``text_config``, which ``read_text`` reads, and ``vision_config``.

    ``first_token``: default id of the first of four tokens in a row: start and end of a picture, a picture's
    and a video's. ``deepstack``: as for ``read_vision``. Raises ``CheckpointError``, and what ``read_text``
    raises.
    """
    for part in ("text_config", "vision_config"):
        if not fields.has(part):
            raise fields.field_error(part, "is missing", "an object")
    text_fields = fields.section("text_config")
    text = read_text(text_fields)
    vision = read_vision(fields.section("vision_config"), text, fields.text("model_type"), deepstack)
    # The reference reads the top level; older checkpoints have it in text_config alone.
    tied = fields if fields.has("tie_word_embeddings") else text_fields
    return ModelConfig(
        text=text,
        vision=vision,
        image_token_id=read_token(fields, "image_token_id", first_token + 3, text),
        video_token_id=read_token(fields, "video_token_id", first_token + 4, text),
        vision_start_token_id=read_token(fields, "vision_start_token_id", first_token, text),
        vision_end_token_id=read_token(fields, "vision_end_token_id", first_token + 1, text),
        tie_word_embeddings=tied.flag("tie_word_embeddings", False),
        quantization=read_quantization(fields),
        model_type=fields.text("model_type"),
    )


def _read_text(fields: Fields) -> TextConfig:
    rope = read_mrope(fields)
    heads = fields.integer("num_attention_heads", 32)
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.field_error(
            "num_key_value_heads", f"is {kv_heads}", f"a divisor of num_attention_heads ({heads})"
        )
    head_dim = fields.integer("head_dim", 128)
    if head_dim % 2:
        raise fields.field_error("head_dim", f"is {head_dim}", "an even number, for rotary positions")
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
        hidden_act=read_activation(fields, "silu"),
    )


def read_mrope(
    fields: Fields, default_theta: float = 500000.0, default_sections: tuple[int, ...] = (24, 20, 20)
) -> tuple[float, tuple[int, int, int]]:
    """Theta and the M-RoPE sections, from ``rope_parameters`` or from ``rope_scaling`` and ``rope_theta``.

    Raises ``UnknownArchitecture`` for another rope type, or sections that are not interleaved.
    """
    rope = rope_fields(fields)
    kind = rope.text("rope_type", rope.text("type", "default"))
    # Older files call the default type with sections "mrope".
    if kind not in ("default", "mrope"):
        raise UnknownArchitecture(
            f"config.json: {rope.prefix}rope_type is {kind!r}", 'vlfit runs the rope_type "default" only.'
        )
    if not rope.flag("mrope_interleaved", True):
        raise UnknownArchitecture(
            f"config.json: {rope.prefix}mrope_interleaved is false",
            "vlfit runs interleaved position sections only, as Qwen3-VL has them.",
        )
    theta = (rope if rope.has("rope_theta") else fields).number("rope_theta", default_theta, above=0)
    sections = rope.integers("mrope_section", default_sections)
    if len(sections) != 3:
        raise rope.field_error(
            "mrope_section", f"is {list(sections)}", "three integers (time, height, width)"
        )
    return theta, (sections[0], sections[1], sections[2])


def read_vision(
    fields: Fields, text: TextConfig, model_type: str, deepstack: tuple[int, ...]
) -> VisionConfig:
    """The sizes of a vision tower, checked against each other and against ``text``.

    ``deepstack``: default of ``deepstack_visual_indexes``. Raises ``CheckpointError``.
    """
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
        deepstack_visual_indexes=fields.integers("deepstack_visual_indexes", deepstack),
        hidden_act=read_activation(fields, "gelu_pytorch_tanh"),
        model_type=model_type,
    )
    if vision.hidden_size % vision.num_heads or vision.head_dim % 4:
        # RoPE splits a head into halves for height and width, of cosine and sine pairs each.
        wanted = f"{vision.num_heads} (num_heads) times a multiple of 4"
        raise fields.field_error("hidden_size", f"is {vision.hidden_size}", wanted)
    if vision.out_hidden_size != text.hidden_size:
        wanted = f"text_config.hidden_size ({text.hidden_size})"
        raise fields.field_error("out_hidden_size", f"is {vision.out_hidden_size}", wanted)
    side = math.isqrt(vision.num_position_embeddings)
    if side * side != vision.num_position_embeddings:
        raise fields.field_error(
            "num_position_embeddings", f"is {vision.num_position_embeddings}", "a square number"
        )
    levels = vision.deepstack_visual_indexes
    if any(level >= vision.depth for level in levels) or list(levels) != sorted(set(levels)):
        wanted = f"rising block numbers below depth ({vision.depth})"
        raise fields.field_error("deepstack_visual_indexes", f"is {list(levels)}", wanted)
    if len(levels) > text.num_hidden_layers:
        wanted = f"at most one per text layer ({text.num_hidden_layers})"
        raise fields.field_error("deepstack_visual_indexes", f"names {len(levels)} levels", wanted)
    return vision


def read_token(fields: Fields, name: str, default: int, text: TextConfig) -> int:
    """A token id below the vocabulary's size. Raises ``CheckpointError`` otherwise."""
    token = fields.integer(name, default, minimum=0)
    if token >= text.vocab_size:
        raise fields.field_error(
            name, f"is {token}", f"a token below text_config.vocab_size ({text.vocab_size})"
        )
    return token


def tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, before quantization: vision tower, then decoder."""
    return {**dict(vision_tensors(config.required_vision)), **decoder_tensor_shapes(config)}


def vision_tensors(vision: VisionConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the vision tower, before quantization."""
    root = VISION_MODULES.root
    hidden, inner = vision.hidden_size, vision.intermediate_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield from weight_and_bias(f"{root}.patch_embed.proj", hidden, *patch)
    yield f"{root}.pos_embed.weight", (vision.num_position_embeddings, hidden)
    for index in range(vision.depth):
        block = f"{VISION_MODULES.blocks}.{index}"
        yield from weight_and_bias(f"{block}.norm1", hidden)
        yield from weight_and_bias(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from weight_and_bias(f"{block}.attn.proj", hidden, hidden)
        yield from weight_and_bias(f"{block}.norm2", hidden)
        yield from weight_and_bias(f"{block}.mlp.linear_fc1", inner, hidden)
        yield from weight_and_bias(f"{block}.mlp.linear_fc2", hidden, inner)
    merged = hidden * vision.spatial_merge_size**2
    levels = len(vision.deepstack_visual_indexes)
    for merger in ("merger", *(f"deepstack_merger_list.{level}" for level in range(levels))):
        # The last merger normalizes each patch before four are joined, the deepstack ones after.
        yield from weight_and_bias(f"{root}.{merger}.norm", hidden if merger == "merger" else merged)
        yield from weight_and_bias(f"{root}.{merger}.linear_fc1", merged, merged)
        yield from weight_and_bias(f"{root}.{merger}.linear_fc2", vision.out_hidden_size, merged)


def read_image_processor_config(folder: Path) -> ImageProcessorConfig:
    """Image processor settings for pictures.

    Raises ``MissingFile`` without the file, ``CheckpointError`` for an invalid field.
    """
    fields = processor_fields(folder, *_IMAGE_PROCESSOR)
    if fields is None:
        raise MissingFile(
            f"preprocessor_config.json is missing in {folder}",
            "Fetch the whole checkpoint (vlfit pull NAME): this file has the size limits of pictures.",
        )
    return _read_processing(fields, 56 * 56, 28 * 28 * 1280)


def read_video_processor_config(folder: Path) -> ImageProcessorConfig:
    """Image processor settings for clips. Raises ``CheckpointError`` for an invalid field.

    From the checkpoint's video processor file, else from its image processor file. Settings missing there, or
    all of them without either file, have the defaults of transformers' ``Qwen3VLVideoProcessor``.
    """
    fields = (
        processor_fields(folder, "video_processor", "video_preprocessor_config.json")
        or processor_fields(folder, *_IMAGE_PROCESSOR)
        or Fields({}, "video_preprocessor_config.json")
    )
    return _read_processing(fields, 128 * 32 * 32, 768 * 32 * 32)


def _read_processing(fields: Fields, min_pixels: int, max_pixels: int) -> ImageProcessorConfig:
    """``min_pixels`` and ``max_pixels``: defaults for missing fields."""
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag(step, True):
            raise fields.field_error(step, "is false", "true: vlfit always does this step")
    if fields.integer("resample", _BICUBIC, minimum=0) != _BICUBIC:
        raise fields.field_error("resample", f"is {fields.values['resample']}", f"{_BICUBIC} (bicubic)")
    min_pixels, max_pixels = _pixel_limits(fields, min_pixels, max_pixels)
    return ImageProcessorConfig(
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        patch_size=fields.integer("patch_size", 16),
        temporal_patch_size=fields.integer("temporal_patch_size", 2),
        merge_size=fields.integer("merge_size", 2),
        mean=_per_channel(fields, "image_mean"),
        std=_per_channel(fields, "image_std", above_zero=True),
        rescale_factor=fields.number("rescale_factor", 1 / 255, above=0),
    )


def _pixel_limits(fields: Fields, least: int, most: int) -> tuple[int, int]:
    """Least and most pixels. ``shortest_edge`` and ``longest_edge`` are areas here, not edges."""
    size = fields.section("size")
    least = size.integer("shortest_edge", size.integer("min_pixels", least))
    most = size.integer("longest_edge", size.integer("max_pixels", most))
    # At the top level the older names win, as in transformers.
    least, most = fields.integer("min_pixels", least), fields.integer("max_pixels", most)
    if least > most:
        raise fields.field_error(
            "size", f"allows {least} pixels at least but {most} at most", "least below most"
        )
    return least, most


def _per_channel(fields: Fields, name: str, *, above_zero: bool = False) -> tuple[float, float, float]:
    values = fields.numbers(name, (0.5, 0.5, 0.5))
    if len(values) != 3 or (above_zero and min(values) <= 0):
        wanted = "three numbers above 0" if above_zero else "three numbers"
        raise fields.field_error(name, f"is {list(values)}", wanted)
    return values[0], values[1], values[2]


SPEC = ModelSpec(
    architecture="Qwen3VLForConditionalGeneration",
    read_config=read_config,
    tensors=tensors,
    cost="vlfit.models.qwen3_vl.cost",
    builders="vlfit.models.qwen3_vl.builders",
    read_image_processor=read_image_processor_config,
    vision_modules=VISION_MODULES,
    thinking=QWEN_THINKING,
)
