"""Ollama's own layout of Qwen3-VL: the vision tower inside the model's file, as its converter writes it.

Its tensors have the checkpoint's names, shortened; q, k and v are three tensors, the frames of the patch
embedding one, and sizes are under ``qwen3vl.vision.``. ``split_tower`` puts all of it as llama.cpp's mmproj
files have it, so that nothing else needs to know. What is joined stays where it lies: only places are noted.

Sources: Ollama's ``convert/convert_qwen3vl.go`` (what is written), ``model/models/qwen3vl`` (how it is read),
and its migration to llama.cpp's layout, which renames and joins the same.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vlfit.checkpoint.gguf.advice import FETCH_AGAIN, OTHER_LAYOUT
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader, GGUFTensor, Value
from vlfit.errors import CheckpointError, UnknownArchitecture

ARCHITECTURE = "qwen3vl"
_TOWER = ("v.", "mm.")
_PATCHES = "v.patch_embed.weight"
_NAMES = {
    "v.patch_embed": "v.patch_embd",
    "v.pos_embed": "v.position_embd",
    "v.merger.norm": "v.post_ln",
    "v.merger.linear_fc1": "mm.0",
    "v.merger.linear_fc2": "mm.2",
}
_IN_BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn_q": "attn_qkv",
    "attn_out": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_BLOCK = re.compile(r"v\.blk\.(\d{1,4})\.(.+)")
_DEEPSTACK = re.compile(r"v\.deepstack_merger\.(\d{1,4})\.(norm|(?:linear_)(fc[12]))")
_SECTIONS = ("rope.dimension_sections", "rope.mrope_section", "mrope_sections")  # the first that is there
_FRAMES = 2
_OWN_KEYS = {
    "is_deepstack_layers": "deepstack_visual_indexes",
    "image_min_pixels": "shortest_edge",
    "image_max_pixels": "longest_edge",
}
_KEY_OR_TENSOR = re.compile(r"\bclip\.vision\.(?P<key>\w+(?:\.\w+)*)|\b(?:v|mm)(?:\.\w+)+")


def has_tower_inside(header: GGUFHeader) -> bool:
    """Whether this is a Qwen3-VL with tensors of its vision tower. Another architecture's is not read."""
    return header.metadata.get("general.architecture") == ARCHITECTURE and any(
        name.startswith(_TOWER) for name in header.tensors
    )


def split_tower(model: GGUFHeader) -> tuple[GGUFHeader, GGUFHeader]:
    """The text model in ``model``, and its vision tower as an mmproj file would have it.

    Of the tower's tensors ``v.patch_embd.weight`` has both frames [outputs, channels, 2, height, width], and
    those of q, k and v together have ``rows_after``. Raises ``UnknownArchitecture`` for tensors under other
    names, ``CheckpointError`` for missing or invalid metadata.
    """
    if _PATCHES not in model.tensors:
        raise UnknownArchitecture(
            f"{model.name} has a vision tower inside, but no {_PATCHES}, as Ollama's converter names it",
            OTHER_LAYOUT,
        )
    metadata = _tower_metadata(model)
    levels = [index for index, mark in enumerate(metadata["clip.vision.is_deepstack_layers"]) if mark]
    tower = _tower_tensors(model, metadata["clip.vision.embedding_length"], levels)
    text = {name: tensor for name, tensor in model.tensors.items() if not name.startswith(_TOWER)}
    return (
        replace(model, metadata=_with_sections(model.metadata), tensors=text),
        replace(model, metadata=metadata, tensors=tower),
    )


def in_own_names(message: str) -> str:
    """``message`` with the keys and tensors of a tower as Ollama's layout calls them, not an mmproj.

    Deepstack mergers keep llama.cpp's names: these have the number of the block.
    """
    return _KEY_OR_TENSOR.sub(_own_name, message)


def _own_name(found: re.Match[str]) -> str:
    if found["key"]:
        return _key(f"vision.{_OWN_KEYS.get(found['key'], found['key'])}")
    parts = {theirs: ours for ours, theirs in _NAMES.items()}
    in_block = {theirs: ours for ours, theirs in _IN_BLOCK.items()}
    for part, rest in ((found[0], ""), found[0].rpartition(".")[::2]):
        ending = f".{rest}" if rest else ""
        block = _BLOCK.fullmatch(part)
        if part in parts:
            return f"{parts[part]}{ending}"
        if block and block[2] in in_block:
            return f"v.blk.{block[1]}.{in_block[block[2]]}{ending}"
    return found[0]


def _with_sections(metadata: Mapping[str, Value]) -> dict[str, Value]:
    """``metadata`` with position sections under llama.cpp's key, if the file has them under any."""
    found = next((metadata[key] for key in map(_key, _SECTIONS) if key in metadata), None)
    return dict(metadata) if found is None else {**metadata, _key(_SECTIONS[0]): found}


def _key(name: str) -> str:
    return f"{ARCHITECTURE}.{name}"


def _tower_metadata(model: GGUFHeader) -> dict[str, Any]:
    """The keys of an mmproj file, from those below ``qwen3vl.vision``."""
    fields, prefix = model.fields, _key("vision.")
    depth = fields.integer(f"{prefix}block_count")
    if depth > len(model.tensors):
        raise fields.field_error(f"{prefix}block_count", f"is {depth}", "no more than there are tensors")
    levels = fields.integers(f"{prefix}deepstack_visual_indexes")
    if list(levels) != sorted({level for level in levels if 0 <= level < depth}):
        raise fields.field_error(
            f"{prefix}deepstack_visual_indexes", f"is {list(levels)[:20]}", f"blocks of {depth}, in order"
        )
    inner = model.tensors.get("v.blk.0.mlp.linear_fc1.weight")
    if inner is None or _PATCHES not in model.tensors:
        raise CheckpointError(f"{model.name} has only parts of a vision tower", FETCH_AGAIN)
    found: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.projector_type": "qwen3vl_merger",
        "clip.vision.block_count": depth,
        "clip.vision.feed_forward_length": inner.shape[0],
        "clip.vision.is_deepstack_layers": [index in levels for index in range(depth)],
        "clip.vision.attention.layer_norm_epsilon": fields.number(
            f"{prefix}attention.layer_norm_epsilon", 1e-6
        ),
        **{
            f"clip.vision.{name}": fields.integer(prefix + name)
            for name in ("embedding_length", "attention.head_count", "patch_size", "spatial_merge_size")
        },
        **{
            f"clip.vision.{name}": list(fields.numbers(prefix + name)) for name in ("image_mean", "image_std")
        },
    }
    # The converter writes 0 where the original says nothing.
    for name, key in (("shortest_edge", "image_min_pixels"), ("longest_edge", "image_max_pixels")):
        pixels = fields.integer(prefix + name, 0, minimum=0)
        if pixels:
            found[f"clip.vision.{key}"] = pixels
    theta = fields.number(f"{prefix}rope.freq_base", 10000.0)
    frames = fields.integer(f"{prefix}temporal_patch_size", _FRAMES)
    if (theta, frames) != (10000.0, _FRAMES):
        raise UnknownArchitecture(
            f"{model.name}: its tower has rotary frequencies of base {theta:g}, {frames} frames a patch",
            f"vlfit runs Qwen3-VL's, with 10,000 and {_FRAMES}.",
        )
    return found


def _tower_tensors(model: GGUFHeader, hidden: int, levels: list[int]) -> dict[str, GGUFTensor]:
    """The tower's tensors by llama.cpp's names; unknown ones keep theirs, so that they are reported."""
    found: dict[str, GGUFTensor] = {}
    for name, tensor in model.tensors.items():
        if not name.startswith(_TOWER) or re.search(r"\.attn_[kv]\.", name):
            continue
        part, _, kind = name.rpartition(".")
        stored = f"{_llama_cpp_name(part, levels)}.{kind}"
        if name == _PATCHES:
            tensor = _with_channels(tensor, hidden)
        elif part.endswith(".attn_q"):
            tensor = _with_keys_and_values(model, tensor, part, kind)
        found[stored] = replace(tensor, name=stored)
    return found


def _llama_cpp_name(part: str, levels: list[int]) -> str:
    if part in _NAMES:
        return _NAMES[part]
    block = _BLOCK.fullmatch(part)
    if block and block[2] in _IN_BLOCK:
        return f"v.blk.{block[1]}.{_IN_BLOCK[block[2]]}"
    merger = _DEEPSTACK.fullmatch(part)
    if merger and int(merger[1]) < len(levels):
        return f"v.deepstack.{levels[int(merger[1])]}.{merger[3] or 'norm'}"
    return part


def _with_channels(tensor: GGUFTensor, hidden: int) -> GGUFTensor:
    """The patch embedding [outputs * channels, frames, height, width] with an axis for channels."""
    if len(tensor.shape) != 4 or tensor.shape[0] % hidden:
        return tensor  # its shape is then not what the config calls for
    return replace(tensor, shape=(hidden, tensor.shape[0] // hidden, *tensor.shape[1:]))


def _with_keys_and_values(model: GGUFHeader, query: GGUFTensor, part: str, kind: str) -> GGUFTensor:
    """``query`` as the first of the three tensors that q, k and v are in."""
    head = part.removesuffix("q")
    others = [model.tensors.get(f"{head}{letter}.{kind}") for letter in "kv"]
    starts = [
        other.offset
        for other in others
        if other is not None and (other.shape, other.type) == (query.shape, query.type)
    ]
    if len(starts) < len(others):
        raise CheckpointError(
            f"{model.name}: {head}q, {head}k and {head}v ({kind}) are not of one shape and type", FETCH_AGAIN
        )
    shape = (len(starts) * query.shape[0] + query.shape[0], *query.shape[1:])
    return replace(query, shape=shape, rows_after=tuple(starts))
