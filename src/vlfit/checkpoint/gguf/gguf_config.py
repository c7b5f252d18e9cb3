"""Config of a GGUF model: its metadata in the fields of config.json, which the families' readers check.

llama.cpp's keys and the fields of transformers' configs name the same things; what differs is said here. Some
fields have no key: they follow from the tensors, or come from the catalog where a model with the same shapes
is known, and ``GGUFConfig.notes`` says so.

Sources: llama.cpp's ``conversion/`` (what it writes for each architecture) and the ``gguf`` package's keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gguf.advice import NAME_MMPROJ, OTHER_CONVERSION, OTHER_LAYOUT
from vlfit.checkpoint.gguf.file_layouts import MODEL_TYPES
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader, shortest
from vlfit.checkpoint.gguf.gguf_vocabulary import ADDED_TYPES, no_vocabulary
from vlfit.checkpoint.gguf.tower_inside import has_tower_inside, in_own_names, split_tower
from vlfit.errors import CheckpointError, MissingTensor, UnknownArchitecture

_BASE_MAY_LACK = ("llama", "phi3")  # models of these have RoPE's base 10,000, or say another
_KNOWN_NOT_YET = ("qwen3vlmoe", "qwen3moe", "qwen35moe", "qwen2vl", "gemma3", "gemma4", "mistral3")
VISION_ARCHITECTURE = "clip"
QWEN3_VL_PROJECTOR = "qwen3vl_merger"
_WHAT_RUNS = (
    f"vlfit runs {', '.join(MODEL_TYPES)} (dense models). The original checkpoint may run with "
    "--backend transformers."
)
# Limits of pictures and clips in Qwen3-VL's official checkpoints, in pixels; a GGUF has none.
_IMAGE_PIXELS, _VIDEO_PIXELS = (65536, 16777216), (4096, 25165824)
VIDEO_KEYS = ("vlfit.video_min_pixels", "vlfit.video_max_pixels")  # of files that vlfit wrote
_LLAMA3_ORIGINAL, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0  # of every Llama 3.1 to 3.3
# Reads a small tensor by its name in the file, as float32.
ReadTensor = Callable[[str], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class GGUFConfig:
    """What config.json, preprocessor_config.json and its video twin would hold.

    ``preprocessor``, ``video``: None for a text-only model. ``notes``: sentences on what the file lacks and
    where it was taken from instead.
    """

    config: dict[str, Any]
    preprocessor: dict[str, Any] | None = None
    video: dict[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def max_image_tokens(self) -> int | None:
        """The most tokens that a picture takes; None for a text-only model."""
        if self.preprocessor is None:
            return None
        side = self.preprocessor["patch_size"] * self.preprocessor["merge_size"]
        return int(self.preprocessor["size"]["longest_edge"] // side**2)


def read_gguf_config(model: GGUFHeader, mmproj: GGUFHeader | None, read: ReadTensor) -> GGUFConfig:
    """Config of the text model ``model`` and its vision tower ``mmproj``; None: text only.

    ``read``: reads a tensor of ``model``. A Qwen3-VL without its vision tower becomes a Qwen3, which computes
    the same for text; a Qwen3.5 one that reads text only. Raises ``UnknownArchitecture`` for an architecture
    or setting that vlfit does not run, ``CheckpointError`` for missing or invalid metadata,
    ``MissingTensor``.
    """
    if model.architecture not in MODEL_TYPES:
        raise _unknown_architecture(model)
    inside = sum(name.startswith("v.") for name in model.tensors)
    if has_tower_inside(model):
        if mmproj is not None:
            raise CheckpointError(
                f"{model.name} has its vision tower inside ({inside} tensors); {mmproj.name} is another one",
                "Leave out --mmproj.",
            )
        try:
            return _read_with_tower(*split_tower(model), read)
        except CheckpointError as error:
            raise type(error)(in_own_names(error.message), error.hint) from None
    elif inside:
        raise UnknownArchitecture(
            f"{model.name} has its vision tower inside ({inside} tensors), as Ollama's converter lays it out",
            OTHER_LAYOUT,
        )
    if mmproj is None:
        kind, text = MODEL_TYPES[model.architecture][0], _text_fields(model, read)
        return GGUFConfig({"architectures": [_CLASSES[kind]], "model_type": kind, **text})
    return _read_with_tower(model, mmproj, read)


_CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def _unknown_architecture(model: GGUFHeader) -> UnknownArchitecture:
    name = model.architecture
    if name == VISION_ARCHITECTURE:
        return UnknownArchitecture(
            f"{model.name} is a vision tower (mmproj), not a whole model",
            "Name the text model's file: this one is found beside it, or named with --mmproj.",
        )
    known = "is not run yet" if name in _KNOWN_NOT_YET else "is not one that vlfit runs"
    return UnknownArchitecture(f"{model.name}: the architecture {name!r} {known}", _WHAT_RUNS)


class _Keys:
    """Metadata under the prefix of the architecture."""

    def __init__(self, header: GGUFHeader, prefix: str) -> None:
        self.fields = header.fields
        self._prefix = prefix

    def key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def has(self, name: str) -> bool:
        return self.fields.has(self.key(name))

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; a list of one for each layer, if all are equal."""
        key = self.key(name)
        value = self.fields.values.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnknownArchitecture(
                    f"{self.fields.file}: {key} differs between layers", "vlfit runs models of equal layers."
                )
            return Fields({key: value[0]}, self.fields.file).integer(key)
        return self.fields.integer(key) if default is None else self.fields.integer(key, default)

    def number(self, name: str, default: float | None = None) -> float:
        key = self.key(name)
        return self.fields.number(key, above=0) if default is None else self.fields.number(key, default)


def _text_fields(model: GGUFHeader, read: ReadTensor) -> dict[str, Any]:
    """The decoder's fields of config.json, for any architecture that runs."""
    architecture = model.architecture
    keys = _Keys(model, architecture)
    if keys.has("expert_count") and keys.integer("expert_count"):
        raise UnknownArchitecture(
            f"{model.name} has {keys.integer('expert_count')} experts", "vlfit runs dense models of its kind."
        )
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnknownArchitecture(
            f"{model.name} has values of another length than keys", "vlfit runs models where both are equal."
        )
    fields = {
        "vocab_size": _shape(model, "token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": _count(keys, "block_count", len(model.tensors)),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": _rope_theta(keys, architecture),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in model.tensors),
    }
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        fields["partial_rotary_factor"] = rotated / head_dim
    if architecture == "qwen35":
        return _hybrid_fields(model, keys, fields, rotated)
    if architecture == "phi3" and keys.has("attention.sliding_window"):
        fields["sliding_window"] = keys.integer("attention.sliding_window")
    return fields | _rope_scaling(model, keys, rotated, read)


def _rope_theta(keys: _Keys, architecture: str) -> float:
    """RoPE's base. For a missing one llama.cpp takes 10,000, which is wrong for every Qwen."""
    if architecture in _BASE_MAY_LACK:
        return keys.number("rope.freq_base", 10000.0)
    return keys.number("rope.freq_base")


def _hybrid_fields(model: GGUFHeader, keys: _Keys, fields: dict[str, Any], rotated: int) -> dict[str, Any]:
    """``fields`` of a Qwen3.5: sizes of the gated delta net, and which layers are for drafts."""
    mtp = keys.fields.integer(keys.key("nextn_predict_layers"), 0, minimum=0)
    layers = fields["num_hidden_layers"] - mtp
    interval = keys.integer("full_attention_interval", 4)
    if layers < 1 or interval < 1:
        raise UnknownArchitecture(
            f"{model.name} has {fields['num_hidden_layers']} layers, {mtp} of them for drafts",
            OTHER_CONVERSION,
        )
    inner, value_heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if inner % value_heads:
        raise keys.fields.field_error(
            keys.key("ssm.inner_size"), f"is {inner}", f"a multiple of ssm.time_step_rank ({value_heads})"
        )
    sections = keys.fields.integers(keys.key("rope.dimension_sections"), ())[:3]
    rope = {
        "rope_type": "default",
        "rope_theta": fields["rope_theta"],
        "partial_rotary_factor": rotated / fields["head_dim"],
        "mrope_interleaved": True,
        **({"mrope_section": list(sections)} if sections else {}),
    }
    return {
        **fields,
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": mtp,
        "full_attention_interval": interval,
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "rope_parameters": rope,
    }


def _count(keys: _Keys, name: str, most: int) -> int:
    """A count of things that each have a tensor, so at most ``most``: loops up to it stay short."""
    count = keys.integer(name)
    if count > most:
        raise keys.fields.field_error(
            keys.key(name), f"is {count:,}", f"at most {most:,}, as many as tensors"
        )
    return count


def _rope_scaling(model: GGUFHeader, keys: _Keys, rotated: int, read: ReadTensor) -> dict[str, Any]:
    """``rope_scaling`` of config.json, {} without; with LongRoPE ``original_max_position_embeddings`` too."""
    kind = keys.fields.text(keys.key("rope.scaling.type"), "none")
    if "rope_freqs.weight" in model.tensors:
        return {"rope_scaling": _llama3_scaling(model, keys, rotated, read("rope_freqs.weight"))}
    if "rope_factors_long.weight" in model.tensors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": _numbers(read("rope_factors_long.weight")),
            "short_factor": _numbers(read("rope_factors_short.weight")),
        }
        if keys.has("rope.scaling.attn_factor"):
            scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
        original = keys.integer("rope.scaling.original_context_length")
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    if kind == "none" or (kind == "linear" and keys.number("rope.scaling.factor") == 1):
        return {}
    return {"rope_scaling": {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}}


def _llama3_scaling(
    model: GGUFHeader, keys: _Keys, rotated: int, factors: npt.NDArray[np.float32]
) -> dict[str, Any]:
    """Llama 3's scaling; the file only has the divisors it leads to, which are computed again as a proof."""
    if len(factors) != rotated // 2:
        raise UnknownArchitecture(
            f"{model.name}: rope_freqs.weight has {len(factors)} numbers, not {rotated // 2}",
            "The file's conversion went wrong. Get another one.",
        )
    factor = float(factors.max())
    theta = keys.number("rope.freq_base", 10000.0)
    turns = _LLAMA3_ORIGINAL / (2 * np.pi * theta ** (np.arange(0, rotated, 2) / rotated))
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
        raise UnknownArchitecture(
            f"{model.name}: rope_freqs.weight has other divisors than Llama 3's RoPE",
            "vlfit runs Llama 3's scaling there, from contexts of 8,192 tokens.",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def check_tower(model: GGUFHeader, mmproj: GGUFHeader) -> None:
    """Raise the ``CheckpointError`` that says why ``mmproj`` is not the vision tower of the model ``model``.

    Its tensors are not all looked at. ``model.architecture`` must be one of ``MODEL_TYPES``.
    """
    _tower_fields(model, mmproj)


def _tower_fields(model: GGUFHeader, mmproj: GGUFHeader) -> dict[str, Any]:
    """The fields of the vision tower, which fits ``model``."""
    kind, keys = MODEL_TYPES[model.architecture][1], _Keys(model, model.architecture)
    if kind is None:
        raise CheckpointError(
            f"{model.name} is a {model.architecture} model, which reads text only; {mmproj.name} is a vision "
            "tower",
            "Leave out --mmproj.",
        )
    vision = _vision_fields(mmproj, keys.integer("embedding_length"))
    levels = len(vision["deepstack_visual_indexes"])
    wanted = levels
    if kind == "qwen3_5":
        wanted = 0
    elif keys.has("n_deepstack_layers"):
        wanted = model.fields.integer(keys.key("n_deepstack_layers"), minimum=0)
    if levels != wanted:
        noun = "level" if levels == 1 else "levels"
        raise _other_model(mmproj, f"it has {levels} deepstack {noun}, {model.name} wants {wanted}")
    return vision


def _read_with_tower(model: GGUFHeader, mmproj: GGUFHeader, read: ReadTensor) -> GGUFConfig:
    notes: list[str] = []
    text, vision = _text_fields(model, read), _tower_fields(model, mmproj)
    keys, kind = _Keys(model, model.architecture), MODEL_TYPES[model.architecture][1]
    if "rope_parameters" not in text:
        sections = model.fields.integers(keys.key("rope.dimension_sections"), ())[:3]
        if not sections:
            sections, name = _sections_of_catalog(model, text)
            notes.append(
                f"{model.name} lacks rope.dimension_sections: taken from {name}, which has the same shapes"
            )
        half = text["head_dim"] // 2
        if len(sections) != 3 or min(sections) < 1 or sum(sections) != half:
            raise model.fields.field_error(
                keys.key("rope.dimension_sections"),
                f"is {list(sections)}",
                f"three integers above 0 that add up to {half}, half of a head",
            )
        text["rope_scaling"] = {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": list(sections),
        }
    config = {
        "architectures": [_CLASSES[str(kind)]],
        "model_type": kind,
        "text_config": {"model_type": f"{kind}_text", **text},
        "vision_config": {**vision, "model_type": kind},
        "tie_word_embeddings": text["tie_word_embeddings"],
        **_image_tokens(model),
    }
    image, video = _pixel_limits(mmproj, notes)
    return GGUFConfig(config, image, video, tuple(notes))


def _vision_fields(mmproj: GGUFHeader, hidden: int) -> dict[str, Any]:
    if mmproj.architecture != VISION_ARCHITECTURE:
        raise CheckpointError(
            f"{mmproj.name} is a {mmproj.architecture} model, not a vision tower (mmproj)",
            "Name the mmproj file that came with the model.",
        )
    fields, keys = mmproj.fields, _Keys(mmproj, "clip.vision")
    projector = projector_of(mmproj)
    if projector != QWEN3_VL_PROJECTOR:
        raise UnknownArchitecture(
            f"{mmproj.name} is the vision tower of another kind of model: {projector!r}",
            f"vlfit runs {QWEN3_VL_PROJECTOR} (Qwen3-VL).",
        )
    epsilon = keys.number("attention.layer_norm_epsilon", 1e-6)
    if not np.isclose(epsilon, 1e-6, rtol=1e-3):
        raise UnknownArchitecture(
            f"{mmproj.name}: clip.vision.attention.layer_norm_epsilon is {epsilon:g}",
            "vlfit runs Qwen3-VL's vision tower, with 1e-06.",
        )
    projected = _shape(mmproj, "mm.2.weight")[0]
    if projected != hidden:
        raise _other_model(
            mmproj, f"it makes {projected} numbers for an image token; the model wants {hidden}"
        )
    depth = _count(keys, "block_count", len(mmproj.tensors))
    marks = fields.values.get("clip.vision.is_deepstack_layers")
    if not isinstance(marks, list) or len(marks) != depth or not all(type(mark) is bool for mark in marks):
        raise fields.field_error(
            "clip.vision.is_deepstack_layers",
            "is missing" if marks is None else f"is {marks!r}",
            f"a truth value for each of {depth} blocks",
        )
    patches = mmproj.tensors.get("v.patch_embd.weight")
    has_frames = patches is not None and len(patches.shape) == 5  # ``split_tower``
    if not has_frames and "v.patch_embd.weight.1" not in mmproj.tensors:
        raise MissingTensor(
            f"{mmproj.name} has no v.patch_embd.weight.1, the second frame of the patch embedding",
            "It was converted by an old llama.cpp. Get another mmproj file.",
        )
    return {
        "depth": depth,
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_heads": keys.integer("attention.head_count"),
        "in_channels": _shape(mmproj, "v.patch_embd.weight", 5 if has_frames else 4)[1],
        "patch_size": keys.integer("patch_size"),
        "spatial_merge_size": keys.integer("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "out_hidden_size": projected,
        "num_position_embeddings": _shape(mmproj, "v.position_embd.weight", 2)[0],
        "deepstack_visual_indexes": [index for index, mark in enumerate(marks) if mark],
        "hidden_act": "gelu_pytorch_tanh",
    }


def projector_of(mmproj: GGUFHeader) -> str:
    """The kind of vision tower, such as ``qwen3vl_merger``; "" if the file names none."""
    fields = mmproj.fields
    return fields.text("clip.projector_type", fields.text("clip.vision.projector_type", ""))


def _pixel_limits(mmproj: GGUFHeader, notes: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The files of the image and of the video processor."""
    fields, keys = mmproj.fields, _Keys(mmproj, "clip.vision")
    least, most = "clip.vision.image_min_pixels", "clip.vision.image_max_pixels"
    if not fields.has(least) or not fields.has(most):
        notes.append(
            f"{mmproj.name} has no limits for the size of pictures: those of Qwen3-VL's official "
            f"checkpoints, {_IMAGE_PIXELS[0]:,} to {_IMAGE_PIXELS[1]:,} pixels"
        )
    common = {
        "patch_size": keys.integer("patch_size"),
        "temporal_patch_size": 2,
        "merge_size": keys.integer("spatial_merge_size", 2),
        "image_mean": _per_channel(fields, "clip.vision.image_mean"),
        "image_std": _per_channel(fields, "clip.vision.image_std", above=0),
    }
    sizes = [
        {
            "shortest_edge": fields.integer(low, limits[0]),
            "longest_edge": fields.integer(high, limits[1]),
        }
        for (low, high), limits in (((least, most), _IMAGE_PIXELS), (VIDEO_KEYS, _VIDEO_PIXELS))
    ]
    for (low, high), size in zip(((least, most), VIDEO_KEYS), sizes, strict=True):
        if size["shortest_edge"] > size["longest_edge"]:
            wanted = f"at most {high}, {size['longest_edge']:,}"
            raise fields.field_error(low, f"is {size['shortest_edge']:,}", wanted)
    return {"size": sizes[0], **common}, {"size": sizes[1], **common}


def _per_channel(fields: Fields, key: str, above: float = float("-inf")) -> list[float]:
    """A number for each of red, green and blue."""
    values = fields.numbers(key)
    if len(values) != 3 or min(values) <= above:
        wanted = "three numbers" if above == float("-inf") else f"three numbers above {above:g}"
        raise fields.field_error(key, f"is {list(values)}", wanted)
    return list(values)


def _image_tokens(model: GGUFHeader) -> dict[str, int]:
    """Ids of the tokens around and for pictures, found by their text."""
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    types = model.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        raise no_vocabulary(model)
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    found: dict[str, int] = {}
    for name, text in names.items():
        if text not in tokens:
            raise CheckpointError(
                f"{model.name} has no token {text} in its vocabulary (tokenizer.ggml.tokens)",
                "Without it no picture can be in a prompt. Get another conversion of the model.",
            )
        index = found[name] = tokens.index(text)
        # A header without its vocabulary (``skim.py``) has other tokens than types.
        if isinstance(types, np.ndarray) and len(types) == len(tokens) and types[index] not in ADDED_TYPES:
            raise model.fields.field_error(
                "tokenizer.ggml.token_type", f"is {types[index]} for {text}", "3 (control)"
            )
    return found


def _sections_of_catalog(model: GGUFHeader, text: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """M-RoPE sections of the catalog's model that has the same shapes, and its name."""
    from vlfit.checkpoint import catalog

    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads"),
    )
    for entry in catalog.entries():
        if entry.config.model_type == "qwen3_vl" and all(
            getattr(entry.config.text, name) == text[name] for name in names
        ):
            return entry.config.text.mrope_section, entry.name
    raise CheckpointError(
        f"{model.name} lacks {model.architecture}.rope.dimension_sections, and no known model has its shapes",
        OTHER_CONVERSION,
    )


def _other_model(mmproj: GGUFHeader, why: str) -> CheckpointError:
    return CheckpointError(
        f"{mmproj.name} is the vision tower of another model: {why}",
        NAME_MMPROJ,
    )


def _shape(header: GGUFHeader, name: str, dimensions: int = 2) -> tuple[int, ...]:
    """Shape of the tensor ``name``. Raises ``MissingTensor``, and ``CheckpointError`` for another number."""
    tensor = header.tensors.get(name)
    if tensor is None:
        raise MissingTensor(
            f"{header.name} has no tensor {name}", "The file is incomplete, or of another kind of model."
        )
    if len(tensor.shape) != dimensions:
        raise CheckpointError(
            f"{header.name}: {name} has the shape {list(tensor.shape)}; wanted {dimensions} dimensions",
            "The file is damaged, or of another kind of model.",
        )
    return tensor.shape


def _numbers(values: npt.NDArray[np.float32]) -> list[float]:
    """``values`` as the shortest decimal numbers that are the same float32."""
    return [shortest(value) for value in values]
