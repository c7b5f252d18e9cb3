"""Tiny random Qwen3.5 checkpoints made by transformers: the pattern of each size, with a tower and without.

``QWEN3_5`` names them; ``build_qwen3_5`` writes one, in well under a second, ``qwen3_5_reference`` loads it.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny import TinySpec, write_sidecars
from tests.tiny_text import SPECIAL_TOKENS, tokenizer

TEMPLATE = (Path(__file__).parent / "qwen3_5_template.jinja").read_text(encoding="utf-8")
PARTS = {"num_heads": 2, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True)
class HybridSpec:
    """How one tiny checkpoint differs. ``like``: the size whose pattern it has; ``more``: further fields."""

    like: str
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 1
    value_heads: int = 2
    tied: bool = True
    vision: bool = True
    mtp: bool = False
    seed: int = 1
    more: dict[str, Any] = field(default_factory=dict)


QWEN3_5: dict[str, HybridSpec] = {
    # As many value heads as key heads, tied: 0.8B and 2B. Twice as many: 4B, and untied 9B.
    "small": HybridSpec("0.8B"),
    "large": HybridSpec("9B", layers=8, kv_heads=2, value_heads=4, tied=False, mtp=True),
    "text": HybridSpec("4B", value_heads=4, vision=False),
    "text_odd": HybridSpec(
        "2B",
        layers=3,
        vision=False,
        tied=False,
        more={
            "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
}


def text_fields(spec: HybridSpec) -> dict[str, Any]:
    """The decoder's part of config.json."""
    words = tokenizer()
    return {
        "vocab_size": 512,
        "hidden_size": spec.hidden,
        "intermediate_size": 96,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": spec.value_heads,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": spec.tied,
        "eos_token_id": words.token_to_id("<|im_end|>"),
        **spec.more,
    }


def build_qwen3_5(name: str, folder: Path) -> Path:
    """Write the checkpoint ``name`` into ``folder`` (made if need be) and return it."""
    from safetensors.torch import load_file, save_file
    from transformers import (
        Qwen3_5Config,
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5TextConfig,
    )

    spec = QWEN3_5[name]
    if spec.vision:
        ids = {token: tokenizer().token_to_id(token) for token in SPECIAL_TOKENS}
        vision = PARTS | {
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 80,
            "out_hidden_size": spec.hidden,
        }
        model: Any = Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(
                text_config=text_fields(spec),
                vision_config=vision | {"num_position_embeddings": 49},
                image_token_id=ids["<|image_pad|>"],
                video_token_id=ids["<|video_pad|>"],
                vision_start_token_id=ids["<|vision_start|>"],
                vision_end_token_id=ids["<|vision_end|>"],
                tie_word_embeddings=spec.tied,
            )
        )
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text_fields(spec)))
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_random(parameter_name, parameter.shape, generator))
    model.save_pretrained(folder)
    write_sidecars(TinySpec(template_in="chat_template.jinja"), folder, TEMPLATE)
    if spec.mtp:  # which transformers leaves out
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["text_config"]["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        from vlfit.models.registry import read_config, spec_of

        read = read_config(folder)
        shapes = spec_of(read.model_type).tensors(read)
        more = {
            key: _random(key, shape, generator) for key, shape in shapes.items() if key.startswith("mtp.")
        }
        file = folder / "model.safetensors"
        save_file(load_file(file) | more, file, metadata={"format": "pt"})
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith(("A_log", "dt_bias")):  # from states that last long to ones that do not
        return noise - 1 if name.endswith("dt_bias") else noise.mul_(0.5)
    if "norm" in name:
        is_difference = "visual." not in name and "linear_attn." not in name
        return 0.2 * noise + (0 if is_difference or name.endswith("bias") else 1)
    if name.endswith("bias"):
        return 0.1 * noise
    if name.endswith("pos_embed.weight"):
        return 0.5 * noise
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        noise[tokenizer().get_vocab_size() :] = 0
        return 0.2 * noise
    return noise * 2.0 / math.sqrt(math.prod(shape[1:]))


def qwen3_5_reference(folder: Path) -> Any:
    """The checkpoint as transformers' model: float32, on the CPU, ready to run.

    Raises if a tensor is missing or unknown to transformers, but for multi-token prediction.
    """
    from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    has_tower = "vision_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    loader: Any = Qwen3_5ForConditionalGeneration if has_tower else Qwen3_5ForCausalLM
    model, report = loader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if wrong := {kind: names for kind, names in report.items() if names}:
        raise ValueError(f"transformers does not agree with the tensors in {folder}: {wrong}")
    model.generation_config = GenerationConfig()  # the checkpoint's own would stop at its end token
    return model.eval()
