"""Write and read mini as a checkpoint folder in the form that Qwen3-VL or Qwen3.5 is released in."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from training.mini.card import TrainingRecord, card
from training.mini.model import Model
from training.mini.shape import QWEN3_5, QWEN3_VL, Shape
from training.mini.tokenizer import PACKAGE, added_id

# Limits in pixels: 64 to 144 image tokens. mini was trained between them.
MIN_PIXELS, MAX_PIXELS = 65536, 147456
# Of a clip in all its frames together: of eight frames, each may have 64 tokens.
MIN_CLIP_PIXELS, MAX_CLIP_PIXELS = 122880, 524288
SHARD_BYTES = 14 * 2**20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TEMPLATE_FILE = "chat_template.jinja"
THINKING_TEMPLATE = Path(__file__).parent / "thinking_template.jinja"
# What Qwen3.5 is released with in float32: how long a state lasts is decided by few numbers.
WIDE = (".A_log", ".linear_attn.norm.weight")


def configuration(shape: Shape) -> dict[str, Any]:
    """config.json in the official form (of Qwen3-VL: ``rope_scaling`` and ``rope_theta``)."""
    if shape.is_hybrid:
        return hybrid_configuration(shape)
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": added_id("<|image_pad|>"),
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": added_id("<|endoftext|>"),
            "dtype": "bfloat16",
            "eos_token_id": added_id("<|im_end|>"),
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "initializer_range": 0.02,
            "intermediate_size": shape.feed_forward,
            "max_position_embeddings": shape.context,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.depth,
            "num_key_value_heads": shape.kv_heads,
            "rms_norm_eps": shape.epsilon,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": list(shape.mrope_section),
                "rope_type": "default",
            },
            "rope_theta": shape.rope_theta,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": shape.vocabulary,
        },
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0",
        "video_token_id": added_id("<|video_pad|>"),
        "vision_config": {
            "deepstack_visual_indexes": list(shape.deepstack),
            "depth": shape.vision_depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": shape.vision_hidden,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": shape.vision_feed_forward,
            "model_type": "qwen3_vl",
            "num_heads": shape.vision_heads,
            "num_position_embeddings": shape.positions,
            "out_hidden_size": shape.hidden,
            "patch_size": shape.patch,
            "spatial_merge_size": shape.merge,
            "temporal_patch_size": shape.temporal,
        },
        "vision_end_token_id": added_id("<|vision_end|>"),
        "vision_start_token_id": added_id("<|vision_start|>"),
    }


def hybrid_configuration(shape: Shape) -> dict[str, Any]:
    """The same of Qwen3.5."""
    written = configuration(replace(shape, family=QWEN3_VL))
    text = written["text_config"]
    del text["rope_scaling"], text["rope_theta"]
    text |= {
        "attn_output_gate": True,
        "full_attention_interval": shape.full_interval,
        "layer_types": [
            "full_attention" if shape.is_full(layer) else "linear_attention" for layer in range(shape.depth)
        ],
        "linear_conv_kernel_dim": shape.kernel,
        "linear_key_head_dim": shape.linear_key_dim,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "linear_value_head_dim": shape.linear_value_dim,
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": int(shape.drafts),
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": list(shape.mrope_section),
            "partial_rotary_factor": (shape.rotated or shape.head_dim) / shape.head_dim,
            "rope_theta": shape.rope_theta,
            "rope_type": "default",
        },
    }
    written["vision_config"]["model_type"] = QWEN3_5
    return written | {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": QWEN3_5,
        "text_config": dict(sorted(text.items())),
        "transformers_version": "5.23.0",
    }


def small_files(shape: Shape) -> dict[str, dict[str, Any]]:
    """The JSON files beside the weights."""
    picture = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": shape.patch,
        "temporal_patch_size": shape.temporal,
        "merge_size": shape.merge,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    return {
        "config.json": configuration(shape),
        "generation_config.json": {
            "bos_token_id": added_id("<|endoftext|>"),
            "do_sample": False,
            "eos_token_id": [added_id("<|im_end|>"), added_id("<|endoftext|>")],
            "pad_token_id": added_id("<|endoftext|>"),
            "transformers_version": "4.57.0",
        },
        "preprocessor_config.json": {**picture, "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {
            **picture,
            "size": {"shortest_edge": MIN_CLIP_PIXELS, "longest_edge": MAX_CLIP_PIXELS},
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
    }


def export(
    weights: dict[str, torch.Tensor],
    shape: Shape,
    folder: Path,
    tokenizer: Path = PACKAGE,
    making: TrainingRecord | None = None,
) -> None:
    """Write a complete checkpoint folder with bf16 weights in shards of at most ``SHARD_BYTES``.

    ``tokenizer``: the folder with the tokenizer the weights were trained with. ``making``: what the card,
    README.md, shall say of how they came about.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in weights.items():
        width = torch.float32 if name.endswith(WIDE) else torch.bfloat16
        narrow = tensor.detach().to("cpu", width).contiguous()
        size = narrow.nbytes
        if used + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = narrow
        used += size
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # safetensors' own save_file leaves files that nobody else may read.
        (folder / file).write_bytes(save(shard, metadata={"format": "pt"}))
        index |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
    )
    for name, content in small_files(shape).items():
        write_json(folder / name, content)
    template = THINKING_TEMPLATE if shape.is_hybrid else PACKAGE / TEMPLATE_FILE
    sources = {name: tokenizer / name for name in TOKENIZER_FILES} | {TEMPLATE_FILE: template}
    for name, source in sources.items():
        if (folder / name).resolve() != source.resolve():
            shutil.copy(source, folder / name)
    parameters = sum(tensor.numel() for tensor in weights.values())
    (folder / "README.md").write_text(card(making, shape, parameters, folder))


def write_json(path: Path, content: object) -> None:
    """Indented, with a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def load(folder: Path, shape: Shape | None = None) -> Model:
    """The exported weights back in the training model (float32). ``shape``: mini's if none is given."""
    model = Model(shape)
    model.load_state_dict(load_weights(folder))
    return model


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The exported weights by name, in float32."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return {name: tensor.float() for name, tensor in weights.items()}
