"""The checkpoints that are measured: mini, and random ones of other sizes written once into benchmarks/cache.

Random weights say nothing true, but cost what real ones cost. Tokenizer, template and picture settings are
mini's.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT

CACHE = ROOT / "benchmarks" / "cache"
BORROWED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
            "preprocessor_config.json", "generation_config.json")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that make a checkpoint cheap or dear. ``vocabulary`` None: mini's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vision_hidden: int
    vision_depth: int
    vision_heads: int
    vision_ffn: int
    deepstack: tuple[int, ...]
    vocabulary: int | None = None


SHAPES = {
    "random-100m": Shape(768, 12, 12, 4, 64, 2048, 384, 8, 6, 1536, (2, 4, 6)),
    # The shape of Qwen3-VL-2B, for a GPU.
    "random-2b": Shape(2048, 28, 16, 8, 128, 6144, 1024, 24, 16, 4096, (5, 11, 17), 151936),
}


def write_random_checkpoint(name: str, mini: Path) -> Path:
    """The folder of a random checkpoint in bf16; written at the first call, the same bytes every time."""
    folder = CACHE / name
    borrowed = [mini / file for file in BORROWED if (mini / file).exists()]
    # A new mini may bring a new tokenizer: then the old folder is stale.
    state = hashlib.sha256(b"".join(file.read_bytes() for file in borrowed)).hexdigest()
    done = folder / "done"
    if done.exists() and done.read_text("ascii") == state:
        return folder
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = Qwen3VLForConditionalGeneration(reference_config(SHAPES[name], mini))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    for file in borrowed:
        shutil.copy(file, folder / file.name)
    done.write_text(state, "ascii")
    return folder


def reference_config(shape: Shape, mini: Path) -> Any:
    """transformers' config for ``shape``: mini's, with the sizes replaced."""
    from transformers import Qwen3VLConfig

    base = json.loads((mini / "config.json").read_text("utf-8"))
    half = shape.head_dim // 2
    height = width = half * 5 // 16
    text = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary or base["text_config"]["vocab_size"],
        "max_position_embeddings": 262144,
        # Three times the usual spread: with less, a tied head makes the model repeat one token for ever.
        "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_interleaved": True,
            "mrope_section": [half - height - width, height, width],
        },
    }
    vision = {
        "hidden_size": shape.vision_hidden,
        "depth": shape.vision_depth,
        "num_heads": shape.vision_heads,
        "intermediate_size": shape.vision_ffn,
        "out_hidden_size": shape.hidden,
        "deepstack_visual_indexes": list(shape.deepstack),
        "num_position_embeddings": 2304,
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {token: base[token] for token in names}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)


def parameters(folder: Path) -> tuple[int, int]:
    """How many numbers a checkpoint holds, and how many of them one decoded token reads.

    A token reads all text layers, the last norm, and the head once (the embedding, where they are tied); of
    an untied embedding it reads one row, which is not counted.
    """
    total = read = 0
    tied = True
    embedding = 0
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in header(file).items():
            if name == "__metadata__":
                continue
            count = 1
            for size in entry["shape"]:
                count *= size
            total += count
            if name.startswith(("model.language_model.layers.", "model.language_model.norm.", "lm_head.")):
                read += count
            if name.startswith("lm_head."):
                tied = False
            if name.startswith("model.language_model.embed_tokens."):
                embedding = count
    return total, read + (embedding if tied else 0)


def header(file: Path) -> dict[str, Any]:
    """The JSON at the head of a safetensors file: its length in 8 bytes, then itself."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        found: dict[str, Any] = json.loads(opened.read(length))
    return found
