"""``vlfit convert --to gguf``: write a checkpoint as GGUF files that llama.cpp reads, text and mmproj.

Names of tensors and keys are the ``gguf`` package's; what llama.cpp stores in another order (q and k of
Llama, the patch embedding) is put so. What its files have no key for goes under ``vlfit.``, which it ignores.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gguf.file_layouts import ARCHITECTURES, FileLayout, layout_of
from vlfit.checkpoint.gguf.gguf_config import QWEN3_VL_PROJECTOR, VIDEO_KEYS, VISION_ARCHITECTURE
from vlfit.checkpoint.gguf.gguf_header import read_gguf_header
from vlfit.checkpoint.gguf.gguf_tensors import PATCH_EMBEDDING, names_in_files
from vlfit.checkpoint.gguf.gguf_vocabulary import TokenType, read_vocabulary, splitting_name
from vlfit.checkpoint.gguf.stored_blocks import PLAIN_TYPES, NumberChange
from vlfit.checkpoint.gguf.unopened import read_unopened
from vlfit.checkpoint.processor_files import GenerationDefaults, read_chat_template, tokenizer_file
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import is_embedding, is_vision, plain_tensor_shapes
from vlfit.checkpoint.text_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeScaling,
    TextConfig,
)
from vlfit.errors import CheckpointError, MissingFile, UsageError
from vlfit.loading.block_tensors import as_in_files
from vlfit.loading.loader import Loader
from vlfit.models.qwen3_5.config import FULL, LINEAR, MTP, Qwen35TextConfig
from vlfit.models.qwen3_vl.config import read_image_processor_config, read_video_processor_config
from vlfit.models.registry import spec_of
from vlfit.prompt.tokenizer import SPELLED_BYTE
from vlfit.quantize.output_files import atomic_folder, check_disk_space, write_error

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

# Types that the ``gguf`` package quantizes to and llama.cpp runs fast, as on the command line.
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_SUM_TYPE = "Q8_0"  # of embedding and head where the others have fewer bits: they cost most in accuracy


@dataclass(frozen=True, slots=True)
class GGUFResult:
    """What a conversion wrote. ``mmproj``: None for a text-only model. ``bytes``: of both files."""

    source: str
    folder: Path
    model: Path
    mmproj: Path | None
    weights: str
    bytes: int
    seconds: float


def convert_to_gguf(
    checkpoint: Checkpoint,
    weights: str,
    target: Path,
    *,
    replace: bool = False,
    progress: ByteProgress | None = None,
) -> GGUFResult:
    """Write ``checkpoint`` to the folder ``target`` as ``NAME-TYPE.gguf`` and, with a tower, its mmproj.

    ``weights``: one of ``GGUF_TYPES``, for matrices; vectors, patch and position embedding stay in float32,
    matrices whose rows are in no whole blocks become F16. The embedding and the head have at least 8 bits,
    and a tower in fewer than 8 bits becomes F16. ``replace``, ``progress``: as in ``conversion.convert``.

    ``target`` appears when it is complete, or not at all. Raises ``UsageError`` for a quantized checkpoint or
    a tokenizer that GGUF has no name for, and what ``atomic_folder`` raises.
    """
    started = time.perf_counter()
    if checkpoint.config.quantization is not None:
        raise UsageError(
            f"{checkpoint.name} is quantized ({checkpoint.stored_format})",
            "Convert the original checkpoint in 16 bits.",
        )
    if checkpoint.model_type not in ARCHITECTURES:
        raise UsageError(
            f"there is no GGUF architecture for {checkpoint.model_type} here",
            f"vlfit writes {', '.join(ARCHITECTURES)}.",
        )
    _check_hybrid(checkpoint)
    kind = weights.upper()
    base = checkpoint.name.partition("@")[0].rpartition("/")[2]
    names = (f"{base}-{kind}.gguf", f"mmproj-{base}-{_tower_type(kind)}.gguf")
    try:
        with atomic_folder(target, checkpoint.folder, replace=replace) as folder:
            check_disk_space(folder, 2 * checkpoint.weight_bytes)
            mmproj = folder / names[1] if checkpoint.config.vision is not None else None
            with Loader(checkpoint, torch.device("cpu"), torch.float32) as loader:
                read = _reporting(loader, progress)
                write_text_model(folder / names[0], checkpoint, _types_of_matrices(kind), kind, read)
                if mmproj is not None:
                    write_vision_tower(mmproj, checkpoint, _tower_type(kind), read)
            read_unopened(base, folder / names[0], mmproj)  # the result must open
            read_vocabulary(read_gguf_header(folder / names[0]))
            written = sum(path.stat().st_size for path in folder.iterdir())
    except OSError as error:
        raise write_error(target, error) from error
    mmproj = target / names[1] if checkpoint.config.vision is not None else None
    seconds = time.perf_counter() - started
    return GGUFResult(checkpoint.name, target, target / names[0], mmproj, weights, written, seconds)


def _tower_type(kind: str) -> str:
    return kind if kind in (*PLAIN_TYPES, "Q8_0") else "F16"


def _types_of_matrices(kind: str) -> Callable[[str], str]:
    """The type of each matrix by its name."""
    small = kind not in (*PLAIN_TYPES, "Q8_0")
    return lambda name: _SUM_TYPE if small and (is_embedding(name) or _is_head(name)) else kind


def _is_head(name: str) -> bool:
    return name.startswith("lm_head.")


def _reporting(loader: Loader, progress: ByteProgress | None) -> "ReadWeights":
    """A function that reads the tensors of ``loader``, and reports how far it is."""
    tensors, total, seen = loader.checkpoint.tensors, loader.checkpoint.weight_bytes, set[str]()

    def read(name: str) -> Tensor:
        if progress and name not in seen:  # a patch embedding is read twice
            seen.add(name)
            progress(sum(tensors[each].bytes for each in seen), total)
        return loader.tensor(name)

    return read


# Reads a tensor by its name in the checkpoint, in float32.
ReadWeights = Callable[[str], Tensor]


def write_text_model(
    path: Path,
    checkpoint: Checkpoint,
    type_of: Callable[[str], str],
    main_type: str,
    read: ReadWeights | None,
) -> None:
    """Write the GGUF file of the text model.

    ``type_of``: ggml type of a matrix by its name; a matrix whose rows are not whole blocks is written in F16
    instead. ``main_type``: the type that the file's metadata names. ``read``: reads a weight; None: write a
    sparse file with holes for weights. Raises ``UsageError`` for a tokenizer that GGUF has no name for.
    """
    config, shapes = checkpoint.config, plain_tensor_shapes(checkpoint.config)
    architecture = ARCHITECTURES[checkpoint.model_type]
    with _writer(path, architecture, read) as (writer, add):
        _write_general(writer, checkpoint, main_type, "model")
        _write_text_config(writer, checkpoint)
        write_vocabulary(writer, checkpoint.folder, config.text.vocab_size)
        spec = spec_of(checkpoint.model_type)
        exact = (*spec.float32_tensors, *spec.unquantized)
        for name, stored in names_in_files(config, shapes).items():
            if not is_vision(name) and not (_is_head(name) and config.tie_word_embeddings):
                if name not in checkpoint.tensors:
                    continue  # what a checkpoint may lack
                layout = layout_of(config, architecture, name, shapes[name])
                kind = "F32" if name.endswith(exact) else type_of(name)
                add(stored, layout.shape or shapes[name], kind, name, partial(_as_in_files, layout=layout))
        for stored, values in _rope_tensors(config.text).items():
            add(stored, tuple(values.shape), "F32", "", partial(_constant, values))


def _as_in_files(weight: Tensor, layout: FileLayout) -> Tensor:
    """``weight`` [its shape in the checkpoint] as llama.cpp stores it."""
    if layout.shape is not None:
        weight = weight.view(layout.shape)
    weight = _reordered(weight, layout.rope_heads)
    if layout.order is not None:
        moved = as_in_files(weight.T if layout.order.axis else weight, layout.order)
        weight = moved.T.contiguous() if layout.order.axis else moved
    if layout.change is NumberChange.PLUS_ONE:
        return weight + 1
    return -weight.exp() if layout.change is NumberChange.MINUS_EXP else weight


def _check_hybrid(checkpoint: Checkpoint) -> None:
    """Raise ``UsageError`` for a Qwen3.5 that llama.cpp's format has no keys for."""
    text = checkpoint.config.text
    if not isinstance(text, Qwen35TextConfig):
        return
    if text.layer_types != tuple(_interval_layers(text)):
        raise UsageError(
            f"the full-attention layers of {checkpoint.name} are not every n-th",
            "GGUF has only an interval for them.",
        )
    if text.linear_key_head_dim != text.linear_value_head_dim:
        raise UsageError(
            f"heads of {checkpoint.name} have {text.linear_key_head_dim} keys and "
            f"{text.linear_value_head_dim} values",
            "llama.cpp runs models where both are equal.",
        )


def _interval_layers(text: Qwen35TextConfig) -> Iterator[str]:
    interval = text.layer_types.index(FULL) + 1
    return (LINEAR if (index + 1) % interval else FULL for index in range(text.num_hidden_layers))


def _constant(values: Tensor, _: Tensor) -> Tensor:
    return values


def write_vision_tower(path: Path, checkpoint: Checkpoint, kind: str, read: ReadWeights | None) -> None:
    """Write the GGUF file (mmproj) of the vision tower and its projection to the text model.

    ``kind``: type of its matrices; patch and position embedding are in F32. ``read``: as in
    ``write_text_model``.
    """
    shapes = plain_tensor_shapes(checkpoint.config)
    with _writer(path, VISION_ARCHITECTURE, read) as (writer, add):
        _write_general(writer, checkpoint, kind, "mmproj")
        _write_vision_config(writer, checkpoint)
        for name, stored in names_in_files(checkpoint.config, shapes).items():
            shape = shapes[name]
            if is_vision(name) and name.endswith(PATCH_EMBEDDING):
                for frame, ending in ((0, ""), (1, ".1")):
                    one = partial(_frame, frame=frame)
                    add(f"{stored}{ending}", (*shape[:2], *shape[3:]), "F32", name, one)
            elif is_vision(name):
                exact = name.endswith("pos_embed.weight")
                add(stored, shape, "F32" if exact else kind, name, lambda values: values)


def _frame(weight: Tensor, frame: int) -> Tensor:
    return weight[:, :, frame].contiguous()


# Announces a tensor: its name in the file, shape, type, name in the checkpoint, and what is done with it.
_Add = Callable[[str, tuple[int, ...], str, str, Callable[[Tensor], Tensor]], None]
_NOTHING = torch.empty(0)


@contextlib.contextmanager
def _writer(path: Path, architecture: str, read: ReadWeights | None) -> "Iterator[tuple[GGUFWriter, _Add]]":
    """Yield a writer and a function that announces tensors; write the file after the block."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    waiting: list[tuple[GGMLQuantizationType, str, Callable[[Tensor], Tensor]]] = []

    def add(
        stored: str, shape: tuple[int, ...], kind: str, name: str, change: Callable[[Tensor], Tensor]
    ) -> None:
        found = gguf.GGMLQuantizationType[_type_for(shape, kind)]
        in_bytes = gguf.quant_shape_to_byte_shape(shape, found)
        dtypes = {"F32": np.float32, "F16": np.float16}
        if found.name in dtypes:
            size = int(np.prod(shape)) * np.dtype(dtypes[found.name]).itemsize
            writer.add_tensor_info(stored, shape, np.dtype(dtypes[found.name]), size)
        else:
            writer.add_tensor_info(stored, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), found)
        waiting.append((found, name, change))

    try:
        yield writer, add
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for kind, name, change in waiting if read is not None else ():
            writer.write_tensor_data(_quantized(change(read(name) if name and read else _NOTHING), kind))
    finally:
        writer.close()
    if read is None:
        os.truncate(path, read_gguf_header(path.read_bytes()).size)


def _quantized(values: Tensor, kind: "GGMLQuantizationType") -> Any:
    """``values`` in float32 as the type ``kind`` has them."""
    import gguf

    array = values.numpy()
    if kind.name == "F32":
        return array
    if kind.name == "F16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    return gguf.quantize(array, kind)


def _type_for(shape: tuple[int, ...], kind: str) -> str:
    """``kind``, or what a tensor of ``shape`` has instead."""
    import gguf

    if len(shape) == 1:
        return "F32"
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    return kind if shape[-1] % block == 0 else "F16"


def _reordered(weight: Tensor, heads: int) -> Tensor:
    """Rows of each of ``heads`` heads as llama.cpp's rotary embedding of Llama wants them; 0: as they are."""
    if not heads:
        return weight
    halves = weight.view(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _rope_tensors(text: TextConfig) -> dict[str, Tensor]:
    """What rotary frequencies are divided by, where that differs between them."""
    scaling = text.rope_scaling
    if isinstance(scaling, LongRopeScaling):
        factors = {"long": scaling.long_factor, "short": scaling.short_factor}
        return {f"rope_factors_{name}.weight": torch.tensor(values) for name, values in factors.items()}
    if not isinstance(scaling, Llama3RopeScaling):
        return {}
    rotated = np.arange(0, text.rotary_dim, 2) / text.rotary_dim
    turns = scaling.original_max_positions / (2 * np.pi * text.rope_theta**rotated)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": torch.from_numpy(1 / ((1 - smooth) / scaling.factor + smooth)).float()}


# --- metadata ----------------------------------------------------------------------------------------------


def _write_general(writer: "GGUFWriter", checkpoint: Checkpoint, kind: str, purpose: str) -> None:
    import gguf

    file_type = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    writer.add_type(purpose)
    writer.add_name(checkpoint.name.rpartition("/")[2])
    if file_type in gguf.LlamaFileType.__members__:
        writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_text_config(writer: "GGUFWriter", checkpoint: Checkpoint) -> None:
    config, text = checkpoint.config, checkpoint.config.text
    writer.add_vocab_size(text.vocab_size)
    hybrid = text if isinstance(text, Qwen35TextConfig) else None
    drafts = hybrid.mtp_num_hidden_layers if hybrid and f"{MTP}.fc.weight" in checkpoint.tensors else 0
    writer.add_block_count(text.num_hidden_layers + drafts)
    if hybrid is not None:
        _write_hybrid_config(writer, hybrid, drafts)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_key_length(text.head_dim)
    writer.add_value_length(text.head_dim)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_rope_freq_base(text.rope_theta)
    writer.add_rope_dimension_count(text.rotary_dim)
    if any(text.sliding_windows):
        writer.add_sliding_window(next(window for window in text.sliding_windows if window is not None))
    _write_rope_scaling(writer, text.rope_scaling)
    if config.vision is not None or hybrid is not None:
        writer.add_rope_dimension_sections([*text.mrope_section, 0])
    if config.vision is not None and hybrid is None:
        writer.add_num_deepstack_layers(len(config.vision.deepstack_visual_indexes))
    defaults = GenerationDefaults.read(checkpoint.folder)
    if defaults.do_sample:
        writer.add_float32("general.sampling.temp", defaults.temperature)
        writer.add_float32("general.sampling.top_p", defaults.top_p)
        writer.add_int32("general.sampling.top_k", defaults.top_k)
        writer.add_float32("general.sampling.penalty_repeat", defaults.repetition_penalty)


def _write_hybrid_config(writer: "GGUFWriter", text: Qwen35TextConfig, drafts: int) -> None:
    """Sizes of the gated delta net under the keys of state-space models. ``drafts``: layers that draft."""
    writer.add_ssm_conv_kernel(text.linear_conv_kernel_dim)
    writer.add_ssm_state_size(text.linear_key_head_dim)
    writer.add_ssm_group_count(text.linear_num_key_heads)
    writer.add_ssm_time_step_rank(text.linear_num_value_heads)
    writer.add_ssm_inner_size(text.value_dim)
    writer.add_full_attention_interval(text.layer_types.index(FULL) + 1)
    if drafts:
        writer.add_nextn_predict_layers(drafts)


def _write_rope_scaling(writer: "GGUFWriter", scaling: RopeScaling | None) -> None:
    import gguf

    if isinstance(scaling, LinearRopeScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    elif isinstance(scaling, LongRopeScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_positions)
        writer.add_rope_scaling_attn_factors(scaling.attention_factor)


def _write_vision_config(writer: "GGUFWriter", checkpoint: Checkpoint) -> None:
    vision = checkpoint.config.required_vision
    image = read_image_processor_config(checkpoint.folder)
    clip = read_video_processor_config(checkpoint.folder)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(QWEN3_VL_PROJECTOR)
    writer.add_vision_projection_dim(vision.out_hidden_size)
    writer.add_vision_image_size(round(vision.num_position_embeddings**0.5) * vision.patch_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.depth)
    writer.add_vision_head_count(vision.num_heads)
    writer.add_vision_image_mean(list(image.mean))
    writer.add_vision_image_std(list(image.std))
    writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_use_gelu(True)
    levels = vision.deepstack_visual_indexes
    writer.add_vision_is_deepstack_layers([index in levels for index in range(vision.depth)])
    writer.add_vision_min_pixels(image.min_pixels)
    writer.add_vision_max_pixels(image.max_pixels)
    for key, pixels in zip(VIDEO_KEYS, (clip.min_pixels, clip.max_pixels), strict=True):
        writer.add_uint32(key, pixels)


def write_vocabulary(writer: "GGUFWriter", folder: Path, size: int) -> None:
    """The tokenizer of tokenizer.json: byte-level BPE that splits text in a known way, or SentencePiece."""
    fields = Fields.read(tokenizer_file(folder))
    model, settings = fields.section("model"), _read_optional(folder / "tokenizer_config.json")
    spells_bytes = model.flag("byte_fallback", False)
    name = None if spells_bytes else splitting_name(fields.values)
    if model.text("type", "") != "BPE" or (name is None and not spells_bytes):
        raise UsageError(
            f"GGUF has no name for how the tokenizer of {folder.name} splits text",
            "vlfit writes vocabularies like those of Qwen, Llama and Phi-3.",
        )
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for text, index in model.section("vocab").values.items():
        is_byte = spells_bytes and SPELLED_BYTE.fullmatch(text)
        _place(tokens, types, text, index, TokenType.BYTE if is_byte else TokenType.NORMAL)
    for each in fields.values.get("added_tokens", []):
        kind = TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
        unknown = each["content"] == model.values.get("unk_token")
        _place(tokens, types, each["content"], each["id"], TokenType.UNKNOWN if unknown else kind)
    merges = model.values.get("merges", [])
    pairs = [each.split(" ", 1) if isinstance(each, str) else each for each in merges]
    writer.add_tokenizer_model("llama" if spells_bytes else "gpt2")
    writer.add_token_list(tokens)
    if spells_bytes:
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, pairs))
    else:
        writer.add_tokenizer_pre(name or "")
        writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_token_types(types)
    ends = GenerationDefaults.read(folder).eos_token_ids
    if ends:
        writer.add_eos_token_id(ends[0])
    keys = {"bos": writer.add_bos_token_id, "pad": writer.add_pad_token_id, "unk": writer.add_unk_token_id}
    for key, add in keys.items():
        special = settings.values.get(f"{key}_token")
        special = special.get("content") if isinstance(special, dict) else special
        if special in tokens:
            add(tokens.index(special))
    begins = fields.section("post_processor").text("type", "") == "TemplateProcessing"
    writer.add_add_bos_token(begins)
    with contextlib.suppress(MissingFile):
        writer.add_chat_template(read_chat_template(folder))


def _scores(tokens: list[str], pairs: list[list[str]]) -> list[float]:
    """Scores that rank tokens as the merges that make them do; those that no merge makes come last."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(pairs))) for token in tokens]


def _place(tokens: list[str], types: list[int], text: str, index: int, kind: TokenType) -> None:
    if not 0 <= index < len(tokens):
        raise CheckpointError(
            f"tokenizer.json: the token {text!r} has the number {index}, of {len(tokens):,}",
            "The tokenizer is of another model.",
        )
    tokens[index], types[index] = text, int(kind)


def _read_optional(path: Path) -> Fields:
    return Fields.read(path) if path.is_file() else Fields({}, path.name)
