"""What GGUF calls the fields, tensors and small files of a checkpoint, for errors of their readers.

Config, tensors, tokenizer and chat template of a GGUF model are read by what reads those of safetensors
(``gguf_folder.py``), whose errors name config.json and its like. People have one GGUF file or two: errors
that reach them name the file, its metadata keys and its tensors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.fields import COMPARE_HINT, Fields
from vlfit.checkpoint.gguf.advice import OTHER_METADATA
from vlfit.checkpoint.gguf.gguf_folder import model_file_name
from vlfit.errors import CheckpointError
from vlfit.models.registry import parse_config

if TYPE_CHECKING:
    from vlfit.checkpoint.gguf.gguf_header import GGUFHeader  # imports numpy

_TEXT_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "partial_rotary_factor": "rope.dimension_count",
    "mrope_section": "rope.dimension_sections",
    "rope_type": "rope.scaling.type",
    "rope_scaling": "rope.scaling",
    "sliding_window": "attention.sliding_window",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "full_attention_interval": "full_attention_interval",
    "mtp_num_hidden_layers": "nextn_predict_layers",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_value_head_dim": "ssm.inner_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
_TOWER_KEYS = {
    "depth": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_heads": "attention.head_count",
    "patch_size": "patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "deepstack_visual_indexes": "is_deepstack_layers",
}
_TEXT_SECTION, _TOWER_SECTION = "text_config.", "vision_config."
_FIELD = re.compile(r"[a-z]\w*(?:\.\w+)*")
_TENSOR = re.compile(r"\w+(?:\.\w+)+")
_TOWER = ("v.", "mm.")  # how names of tensors begin in an mmproj, and in any file
_IN_FILES = (*_TOWER, "blk.", "token_embd.", "output.", "output_norm.")
_STORED_PARTS = re.compile(r"\.weight(?:_packed|_scale|_super_scale)?$")
# In messages about the small files; the longer names first.
_SMALL_FILES = (
    (r"\S*tokenizer_config\.json", "its metadata tokenizer.ggml.*"),
    (r"\S*tokenizer\.json", "its vocabulary (tokenizer.ggml.tokens, tokenizer.ggml.merges)"),
    (r"\S*generation_config\.json", "its metadata"),
    (r"\S*config\.json", "its metadata"),
    (r"\bthe (?:checkpoint's )?chat template", "tokenizer.chat_template"),
)
_HINT_OF_FILES = re.compile(r"\.json|\b[Ff]etch\b")


def parse_gguf_config(
    config: dict[str, object], text: "GGUFHeader", tower: "GGUFHeader | None"
) -> ModelConfig:
    """``parse_config`` of what was made of the metadata, with errors that name its keys and the file.

    ``tower``: of the mmproj; None: there is none, or the tower is inside.
    """
    try:
        return parse_config(Fields(config, text.name))
    except CheckpointError as error:
        raise _in_keys(error, text, tower) from None


def _in_keys(error: CheckpointError, text: "GGUFHeader", tower: "GGUFHeader | None") -> CheckpointError:
    """``error`` of a field of config.json in the words of the metadata that the field was made of."""
    of_tower = _TOWER_SECTION in error.message
    header = tower if of_tower and tower is not None else text
    keys = _TOWER_KEYS if of_tower else _TEXT_KEYS
    prefix = "clip.vision" if of_tower else text.architecture

    def named(found: re.Match[str]) -> str:
        *section, name = found[0].split(".")
        # Words of a sentence are no fields: in it these have an underscore.
        is_field = bool(section) or "_" in name
        return f"{prefix}.{keys[name]}" if is_field and name in keys else found[0]

    message = error.message
    for start in (f"{text.name}: ", "config.json: "):
        message = message.removeprefix(start)
    message = _FIELD.sub(named, message).replace(_TEXT_SECTION, "").replace(_TOWER_SECTION, "")
    hint = OTHER_METADATA if error.hint == COMPARE_HINT or "config.json" in error.hint else error.hint
    return type(error)(f"{header.name}: {message if tower is not None else _in_own_names(message)}", hint)


def _in_own_names(message: str) -> str:
    from vlfit.checkpoint.gguf.tower_inside import in_own_names  # imports numpy

    return in_own_names(message)


def plain_name(name: str) -> str:
    """The name of the weight that the tensor ``name`` is a part of: codes, or their scales."""
    module = _STORED_PARTS.sub("", name)
    return name if module == name else f"{module}.weight"


def in_names_of_tensors(
    error: CheckpointError,
    stored: Mapping[str, str],
    text: Sequence[str],
    mmproj: Sequence[str],
    hint: str,
) -> CheckpointError:
    """``error`` about tensors, with their names in the file and the name of the file that has them.

    ``stored``: names in the file by those of safetensors. ``text``, ``mmproj``: names of the model's files.
    """
    modules = {_STORED_PARTS.sub("", name): _STORED_PARTS.sub("", found) for name, found in stored.items()}
    files: list[str] = []

    def named(found: re.Match[str]) -> str:
        name = found[0]
        module = _STORED_PARTS.sub("", name)
        new = stored.get(name) or modules.get(module, "")
        known = new or (name if name.startswith(_IN_FILES) else "")
        if known:
            files.extend((mmproj or text)[:1] if known.startswith(_TOWER) else text[:1])
        if not new:
            return name
        return f"{new}.weight" if name not in stored and module != name else new

    message = _TENSOR.sub(named, error.message).replace("config.json", "its metadata")
    message = message if mmproj else _in_own_names(message)
    names = dict.fromkeys(files or [*text[:1], *mmproj[:1]])
    return type(error)(f"{' and '.join(names)}: {message}", hint)


@contextmanager
def errors_name_gguf(folder: Path) -> Iterator[None]:
    """Within the block, errors about the small files in ``folder`` name the GGUF file that they are made of.

    Other folders' errors stay as they are.
    """
    try:
        yield
    except CheckpointError as error:
        name = model_file_name(folder)
        if not name or name in error.message:
            raise
        message = error.message
        for pattern, words in _SMALL_FILES:
            message = re.sub(pattern, words, message)
        hint = OTHER_METADATA if _HINT_OF_FILES.search(error.hint) else error.hint
        raise type(error)(f"{name}: {message}", hint) from error
