"""GGUF files for tests: converted tiny checkpoints, blocks of every type, the same weights in safetensors.

``wide_copy`` reads a GGUF with the ``gguf`` package's own reader and knows llama.cpp's names by heart, so
that what vlfit reads is held against another reading of the same file.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from vlfit.checkpoint.source import open_checkpoint
from vlfit.quantize import gguf_output
from vlfit.quantize.gguf_output import convert_to_gguf

Array = npt.NDArray[Any]
# Where blocks of a type have their float16 scales; the rest may be any bytes.
SCALES = {
    **dict.fromkeys(
        ("Q4_0", "Q5_0", "Q8_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)
    ),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Everything that the gguf package dequantizes.
BLOCK_TYPES = (*SCALES, "IQ1_M", "MXFP4", "NVFP4")
_SPREAD = 0.1  # of weights
_TEXT_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOWER_NAMES = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}


def as_gguf(folder: Path, target: Path, weights: str = "f32") -> tuple[Path, Path | None]:
    """The checkpoint in ``folder`` as GGUF files in the new folder ``target``: model and mmproj."""
    done = convert_to_gguf(open_checkpoint(folder), weights, target)
    return done.model, done.mmproj


def as_blocks(folder: Path, target: Path, kind: str) -> tuple[Path, Path | None]:
    """Like ``as_gguf``, with made-up blocks of a type that the gguf package cannot quantize to.

    Embedding and head have that type, too.
    """
    random = np.random.default_rng(7)

    def made_up(values: Array, wanted: gguf.GGMLQuantizationType) -> Array:
        blocks = values.size // gguf.GGML_QUANT_SIZES[wanted][0]
        made = plausible_blocks(wanted.name, blocks, random)
        return made.reshape(*values.shape[:-1], -1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gguf, "quantize", made_up)
        patched.setattr(gguf_output, "_types_of_matrices", lambda wanted: lambda name: wanted)
        return as_gguf(folder, target, kind.lower())


def plausible_blocks(kind: str, count: int, random: np.random.Generator) -> Array:
    """``count`` blocks [count, bytes] of ``kind`` at random, with weights as large as a model's."""
    found = gguf.GGMLQuantizationType[kind]
    blocks = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[found][1]), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(120, 124, count)
    elif kind == "NVFP4":
        blocks[:, :4] = random.integers(8, 24, (count, 4))
    elif kind == "IQ1_M":  # the bits of 0.02 are spread over the highest four of four words
        bits = int(np.float16(0.02).view(np.uint16))
        words = blocks[:, 48:56].view(np.uint16)
        words &= 0x0FFF
        for place in range(4):
            words[:, place] |= (bits >> 4 * place & 15) << 12
    else:
        for at in SCALES[kind]:
            blocks[:, at : at + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
        scale = np.float16(_SPREAD / gguf.dequantize(blocks, found).std())
        for at in SCALES[kind]:
            blocks[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks


def wide_copy(source: Path, target: Path, model: Path, mmproj: Path | None = None) -> Path:
    """GGUF files in float32 as safetensors in ``target``, with the small files of ``source``."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and "index" not in path.name:
            shutil.copy(path, target)
    config = open_checkpoint(source).config
    tensors = {}
    heads = {"attn_q.": config.text.num_attention_heads, "attn_k.": config.text.num_key_value_heads}
    reader = gguf.GGUFReader(model)
    reordered = reader.fields["general.architecture"].contents() == "llama"
    for tensor in reader.tensors:
        if tensor.name.startswith("rope_"):
            continue
        values = dequantized(tensor)
        count = next((n for part, n in heads.items() if part in tensor.name), 0) if reordered else 0
        if count:  # rows 0, n/2, 1, n/2 + 1, ... of every head
            values = values.reshape(count, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        name = _text_name(tensor.name, config.text.prefix)
        tensors[name.replace("up_proj", "gate_up_proj") if config.text.fused_projections else name] = values
    for tensor in gguf.GGUFReader(mmproj).tensors if mmproj is not None else ():
        tensors[tensor.name] = dequantized(tensor)
    if mmproj is not None:
        frames = [tensors.pop("v.patch_embd.weight"), tensors.pop("v.patch_embd.weight.1")]
        levels = config.required_vision.deepstack_visual_indexes
        tensors = {_tower_name(name, levels): values for name, values in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = np.stack(frames, axis=2)
    written = {name: torch.from_numpy(values.copy()) for name, values in tensors.items()}
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    return target


def dequantized(tensor: gguf.ReaderTensor) -> Array:
    """The weights of a tensor in float32, outputs first."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return np.asarray(values, np.float32).reshape(shape)


def _text_name(name: str, prefix: str) -> str:
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found:
        part = _TEXT_NAMES[found[2]]
        return f"{prefix}.layers.{found[1]}.{part}.{found[3]}"
    ends = {
        "token_embd.weight": f"{prefix}.embed_tokens.weight",
        "output_norm.weight": f"{prefix}.norm.weight",
    }
    return ends.get(name, "lm_head.weight" if name == "output.weight" else name)


def _tower_name(name: str, levels: tuple[int, ...]) -> str:
    part, _, kind = name.rpartition(".")
    found = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", part)
    if found:
        return f"model.visual.blocks.{found[1]}.{_TOWER_NAMES[found[2]]}.{kind}"
    found = re.fullmatch(r"v\.deepstack\.(\d+)\.(\w+)", part)
    if found:
        layer = found[2].replace("fc", "linear_fc")
        return f"model.visual.deepstack_merger_list.{levels.index(int(found[1]))}.{layer}.{kind}"
    fixed = {
        "v.patch_embd": "patch_embed.proj",
        "v.position_embd": "pos_embed",
        "v.post_ln": "merger.norm",
        "mm.0": "merger.linear_fc1",
        "mm.2": "merger.linear_fc2",
    }
    return f"model.visual.{fixed[part]}.{kind}" if part in fixed else name
