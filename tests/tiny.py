"""Tiny random Qwen3-VL checkpoints that differ where real ones do, and the same models in transformers.

``TINY`` names them; ``build_tiny`` writes one in well under a second; ``tiny_reference`` loads it with
transformers in float32. Weights are large enough that greedy text is not one token over and over.
"""

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_text import SPECIAL_TOKENS, chat_template, tokenizer
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.tensors import expected_tensor_shapes
from vlfit.models.registry import read_config

FP8_MAX = 448.0  # the largest number of float8_e4m3fn


@dataclass(frozen=True)
class TinySpec:
    """How one tiny checkpoint differs from the plainest one (the defaults)."""

    hidden: int = 64
    intermediate: int = 96
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 512
    tied: bool = True
    attention_bias: bool = False
    vision_hidden: int = 64
    vision_intermediate: int = 96
    vision_heads: int = 2
    vision_depth: int = 4
    deepstack: tuple[int, ...] = (0, 1, 2)
    positions: int = 64
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    shards: int = 1
    fp8: bool = False
    config_form: Literal["rope_scaling", "rope_parameters"] = "rope_scaling"
    template_in: Literal["chat_template.json", "chat_template.jinja", "tokenizer_config.json"] = (
        "chat_template.json"
    )
    size_form: Literal["edges", "pixels"] = "edges"
    min_pixels: int = 4096
    max_pixels: int = 262144
    seed: int = 0

    @property
    def mrope_section(self) -> list[int]:
        """As in the official models: a bit more for time than for height and width."""
        side = self.head_dim // 2 * 20 // 64
        return [self.head_dim // 2 - 2 * side, side, side]


TINY: dict[str, TinySpec] = {
    "tied": TinySpec(),
    "untied_sharded": TinySpec(
        tied=False,
        shards=3,
        config_form="rope_parameters",
        template_in="chat_template.jinja",
        min_pixels=65536,
        max_pixels=16777216,
        seed=1,
    ),
    "wide_heads_one_level": TinySpec(
        head_dim=32, deepstack=(1,), template_in="tokenizer_config.json", positions=2304, seed=2
    ),
    "vision_head_72": TinySpec(
        vision_hidden=144, vision_intermediate=200, dtype="bfloat16", size_form="pixels", positions=36, seed=3
    ),
    "odd_vocab_one_kv_head": TinySpec(
        heads=6, kv_heads=1, head_dim=24, vocab=601, tied=False, config_form="rope_parameters", seed=4
    ),
    "half_with_biases": TinySpec(kv_heads=4, attention_bias=True, dtype="float16", deepstack=(0, 3), seed=5),
    "fp8": TinySpec(
        hidden=192, intermediate=320, head_dim=64, dtype="bfloat16", fp8=True, vision_heads=4, seed=6
    ),
    "fp8_untied_sharded": TinySpec(
        hidden=160,
        intermediate=272,
        heads=8,
        kv_heads=2,
        head_dim=32,
        tied=False,
        dtype="bfloat16",
        fp8=True,
        shards=2,
        config_form="rope_parameters",
        template_in="chat_template.jinja",
        seed=7,
    ),
}


def build_tiny(spec_name: str, folder: Path, dtype: str | None = None) -> Path:
    """Write the checkpoint ``spec_name`` into ``folder`` (made if need be) and return it.

    ``dtype`` stores the weights in another type than the spec's (``float32``, ``bfloat16``, ``float16``).
    """
    spec = TINY[spec_name]
    stored = getattr(torch, dtype or spec.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config_json(spec, str(stored).removeprefix("torch.")))
    write_sidecars(spec, folder, chat_template())
    _write_weights(spec, folder, random_tensors(read_config(folder), stored, spec.seed))
    return folder


def config_json(spec: TinySpec, dtype: str) -> dict[str, Any]:
    """``config.json`` in the official form or in the one that transformers 5 writes."""
    ids = {name: tokenizer().token_to_id(name) for name in SPECIAL_TOKENS}
    text: dict[str, Any] = {
        "model_type": "qwen3_vl_text",
        "dtype": dtype,
        "attention_bias": spec.attention_bias,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": 32768,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": spec.tied,
        "vocab_size": spec.vocab,
    }
    rope: dict[str, Any] = {
        "mrope_interleaved": True,
        "mrope_section": spec.mrope_section,
        "rope_type": "default",
    }
    if spec.config_form == "rope_scaling":
        text |= {"rope_scaling": rope, "rope_theta": 5000000}
    else:
        text["rope_parameters"] = rope | {"rope_theta": 5000000.0}
    vision = {
        "model_type": "qwen3_vl" if spec.config_form == "rope_scaling" else "qwen3_vl_vision",
        "depth": spec.vision_depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": spec.vision_hidden,
        "in_channels": 3,
        "intermediate_size": spec.vision_intermediate,
        "num_heads": spec.vision_heads,
        "num_position_embeddings": spec.positions,
        "out_hidden_size": spec.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": list(spec.deepstack),
    }
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": spec.tied,
        "text_config": text,
        "vision_config": vision,
    }
    if spec.fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": _not_converted(spec),
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    return config


def _not_converted(spec: TinySpec) -> list[str]:
    """Every module that keeps its 16 bits, by full name, as the official FP8 checkpoints list them."""
    names = ["lm_head", "model.language_model.embed_tokens", "model.visual.patch_embed.proj"]
    for block in range(spec.vision_depth):
        for part in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            names.append(f"model.visual.blocks.{block}.{part}")
    mergers = ["merger", *(f"deepstack_merger_list.{level}" for level in range(len(spec.deepstack)))]
    return names + [f"model.visual.{merger}.linear_fc{index}" for merger in mergers for index in (1, 2)]


def random_tensors(config: ModelConfig, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Random weights for every tensor of ``config``; FP8 ones as 8-bit blocks with bfloat16 scales."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    shapes = expected_tensor_shapes(config)
    for name, shape in shapes.items():
        if name.endswith("_scale_inv"):
            continue
        value = _random_tensor(name, shape, generator)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            # Real vocabularies are padded: rows past the tokenizer's last token never win.
            value[tokenizer().get_vocab_size() :] = 0
        if name + "_scale_inv" in shapes and config.fp8 is not None:
            block = (config.fp8.block_rows, config.fp8.block_columns)
            tensors[name], tensors[name + "_scale_inv"] = quantize_fp8(value, block)
        else:
            tensors[name] = value.to(dtype)
    return tensors


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise if name.endswith("weight") else 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if name.endswith("pos_embed.weight"):
        return 0.5 * noise
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.2 * noise
    # Above 1 over the root of the inputs, so that layers drown out the token that came in: with a tied head
    # the model would otherwise repeat it.
    return noise * 2.0 / math.sqrt(math.prod(shape[1:]))


def quantize_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """``weight`` [rows, columns] as float8, and one bfloat16 scale per block (the last ones partial)."""
    rows, columns = weight.shape
    scale = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = weight[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            scale[row, column] = part.abs().max() / FP8_MAX
    stored = scale.to(torch.bfloat16)
    scaled = weight / _spread(stored, weight, block)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), stored


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The float32 weights that ``weight`` and its scales stand for."""
    return weight.float() * _spread(scale, weight, block)


def _spread(scale: Tensor, weight: Tensor, block: tuple[int, int]) -> Tensor:
    wide = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: weight.shape[0], : weight.shape[1]]


def _write_weights(spec: TinySpec, folder: Path, tensors: dict[str, Tensor]) -> None:
    if spec.shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    size = math.ceil(len(names) / spec.shards)
    homes: dict[str, str] = {}
    for shard in range(spec.shards):
        file = f"model-{shard + 1:05d}-of-{spec.shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard * size : (shard + 1) * size]}
        save_file(part, folder / file, metadata={"format": "pt"})
        homes |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": homes}
    )


def write_sidecars(spec: TinySpec, folder: Path, template: str) -> None:
    """Write tokenizer, chat template, generation defaults and the settings of pictures and clips."""
    words = tokenizer()
    words.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 262144,
        "clean_up_tokenization_spaces": False,
    }
    if spec.template_in == "tokenizer_config.json":
        settings["chat_template"] = template
    elif spec.template_in == "chat_template.json":
        _write_json(folder / "chat_template.json", {"chat_template": template})
    else:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", settings)
    ends = [words.token_to_id("<|im_end|>"), words.token_to_id("<|endoftext|>")]
    _write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "repetition_penalty": 1.0,
            "eos_token_id": ends,
            "pad_token_id": ends[1],
        },
    )
    common = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    edges = {"longest_edge": spec.max_pixels, "shortest_edge": spec.min_pixels}
    pixels = {"max_pixels": spec.max_pixels, "min_pixels": spec.min_pixels}
    _write_json(
        folder / "preprocessor_config.json",
        common
        | ({"size": edges} if spec.size_form == "edges" else pixels)
        | {"image_processor_type": "Qwen2VLImageProcessorFast"},
    )
    _write_json(
        folder / "video_preprocessor_config.json",
        common | {"size": edges, "video_processor_type": "Qwen3VLVideoProcessor"},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def tiny_reference(folder: Path) -> Any:
    """The checkpoint in ``folder`` as transformers' model: float32, on the CPU, ready to run.

    transformers refuses FP8 whose sizes are no multiple of the block, so that is widened here first. Raises
    when a tensor is missing or unknown to transformers: the names are held to the reference's.
    """
    from transformers import Qwen3VLForConditionalGeneration

    with tempfile.TemporaryDirectory() as scratch:
        source = _widened_copy(folder, Path(scratch)) if read_config(folder).fp8 else folder
        loaded: Any = Qwen3VLForConditionalGeneration.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True
        )
    model, report = loaded
    wrong = {kind: names for kind, names in report.items() if names}
    if wrong:
        raise ValueError(f"transformers does not agree with the tensors in {folder}: {wrong}")
    return model.eval()


def _widened_copy(folder: Path, scratch: Path) -> Path:
    """A plain float32 checkpoint with the values of the FP8 one in ``folder``."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    block = tuple(config.pop("quantization_config")["weight_block_size"])
    stored = {
        name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    plain = {
        name: dequantize_fp8(tensor, stored[name + "_scale_inv"], (block[0], block[1]))
        if name + "_scale_inv" in stored
        else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    _write_json(scratch / "config.json", config)
    save_file(plain, scratch / "model.safetensors", metadata={"format": "pt"})
    return scratch
