"""A checkpoint of the made-up family with random weights."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import tiny_text
from vlfit.checkpoint.tensors import expected_tensor_shapes
from vlfit.models.registry import read_config

WINDOW = 24


def build(folder: Path) -> dict[str, Tensor]:
    """Write the checkpoint into ``folder``; gives its weights."""
    words = tiny_text.tokenizer()
    ids = {name: words.token_to_id(name) for name in tiny_text.SPECIAL_TOKENS}
    config = {
        "model_type": "made_up",
        "architectures": ["MadeUpForConditionalGeneration"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": {
            "vocab_size": 512,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 20000.0,
            "sliding_window": WINDOW,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_heads": 2,
            "num_position_embeddings": 49,
        },
    }
    processor = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 4096, "longest_edge": 65536},
    }
    files: dict[str, Any] = {
        "config.json": config,
        "preprocessor_config.json": processor,
        "chat_template.json": {"chat_template": tiny_text.chat_template()},
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        "generation_config.json": {"eos_token_id": ids["<|im_end|>"]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    words.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(17)
    shapes = expected_tensor_shapes(read_config(folder))
    weights = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    for name in ("lm_head.weight", "model.decoder.embed_tokens.weight"):
        weights[name][words.get_vocab_size() :] = 0  # rows past the tokenizer's last token never win
    save_file(weights, folder / "model.safetensors")
    return weights


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith("bias"):
        one = name.startswith("model.visual.") and name.endswith("norm.weight")
        return 0.2 * noise + (1 if one or (".blocks." in name and name.endswith("weight")) else 0)
    if name.endswith("pos_embed.weight"):
        return 0.5 * noise
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.3 * noise
    return noise * 2.0 / math.sqrt(math.prod(shape[1:]))
