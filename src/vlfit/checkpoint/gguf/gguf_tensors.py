"""Tensors of GGUF files under the names, shapes and formats that the rest of vlfit reads.

Names are those of the original checkpoint's safetensors, by the ``gguf`` package's tables. A block type that
a format of compressed-tensors holds exactly becomes codes and scales (``stored_blocks.py``); every other one
becomes float16 for the planner and what computes for the loader.

What llama.cpp changes is undone (``file_layouts.py``), and the two frames of a patch embedding joined.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.gguf.advice import OTHER_TENSORS
from vlfit.checkpoint.gguf.file_layouts import (
    ARCHITECTURES,
    FileLayout,
    key_in_tables,
    layout_of,
    special_name,
    text_layers,
)
from vlfit.checkpoint.gguf.file_names import type_of_name, type_of_number
from vlfit.checkpoint.gguf.gguf_folder import GGUFKind
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader, GGUFTensor
from vlfit.checkpoint.gguf.gguf_names import in_names_of_tensors, plain_name
from vlfit.checkpoint.gguf.stored_blocks import (
    DEQUANTIZED,
    DEQUANTIZED_DTYPE,
    PLAIN_TYPES,
    BlockPart,
    ExactForm,
    StoredBlocks,
    exact_form,
)
from vlfit.checkpoint.gguf.tower_inside import has_tower_inside, split_tower
from vlfit.checkpoint.headers import StoredLayout, TensorInfo
from vlfit.checkpoint.quantization import (
    INTEGER_FORMAT,
    PACKED_FORMAT,
    CompressedFormat,
    WeightScheme,
    packed_words,
)
from vlfit.checkpoint.tensors import (
    check_tensors,
    first_names,
    is_embedding,
    is_vision,
    linear_weight_shapes,
    missing_and_surplus,
    plain_tensor_shapes,
)
from vlfit.errors import CheckpointError, MissingTensor, SurplusTensor, UnknownWeightsFormat
from vlfit.models import registry

# Computed from the config, or read into it: no weights.
_NO_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
PATCH_EMBEDDING = "patch_embed.proj.weight"
_VISION_ROOT = "model.visual."


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """One file of a model: its path and header."""

    path: Path
    header: GGUFHeader


def check_gguf_tensors(
    config: ModelConfig, tensors: dict[str, TensorInfo], text: list[GGUFFile], mmproj: list[GGUFFile]
) -> None:
    """Check the tensors of a GGUF model as ``check_tensors`` does, with errors in the words of its files.

    ``text``, ``mmproj``: as for ``normalize_gguf``.
    """
    try:
        check_tensors(config, tensors)
    except CheckpointError as error:
        if isinstance(error, MissingTensor | SurplusTensor):
            error = type(error)(_counted_in_files(config, tensors, text, mmproj), error.hint)
        stored = names_in_files(config, plain_tensor_shapes(config))
        names, tower = ([file.path.name for file in each] for each in (text, mmproj))
        raise in_names_of_tensors(error, stored, names, tower, OTHER_TENSORS) from None


def _counted_in_files(
    config: ModelConfig, tensors: dict[str, TensorInfo], text: list[GGUFFile], mmproj: list[GGUFFile]
) -> str:
    """What is missing, else what is too much, counted in tensors of the file that is to blame.

    A block-quantized tensor is one, not codes and scales.
    """
    missing, surplus = missing_and_surplus(config, tensors)
    missing = list(dict.fromkeys(plain_name(name) for name in missing))
    of_tower = [is_vision(name) if missing else _is_in(mmproj, tensors[name]) for name in missing or surplus]
    blamed = [*(() if all(of_tower) else text), *(mmproj if any(of_tower) else ())] or text
    count = sum(len(file.header.tensors) for file in blamed)
    if not missing:
        words = "tensors are not in the model that config.json describes"
        return f"{len(surplus):,} of {count:,} {words}: {first_names(surplus)}"
    whole = count + len(missing) - sum(_is_in(blamed, tensors[name]) for name in surplus)
    return f"{len(missing):,} of {whole:,} tensors are missing: {first_names(missing)}"


def _is_in(files: list[GGUFFile], tensor: TensorInfo) -> bool:
    return any(file.path == tensor.file for file in files)


def normalize_gguf(
    config: ModelConfig, text: list[GGUFFile], mmproj: list[GGUFFile]
) -> tuple[ModelConfig, dict[str, TensorInfo]]:
    """``config`` with the schemes of its weights, and all tensors by their safetensors names.

    ``text``: the files of the text model, several if it is split; ``mmproj``: those of the vision tower, none
    for a text-only model. Tensors that the model does not have keep their names in the file, so that
    ``check_tensors`` reports them. Raises ``UnknownWeightsFormat`` for a type of integers, say.
    """
    files = [part for file in (*text, *mmproj) for part in _with_tower_apart(file)]
    found = {name: (file.path, tensor) for file in files for name, tensor in file.header.tensors.items()}
    plain = plain_tensor_shapes(config)
    linears = linear_weight_shapes(plain)
    names = names_in_files(config, plain)
    architecture, kept = text[0].header.architecture, registry.spec_of(config.model_type).unquantized
    tensors: dict[str, TensorInfo] = {}
    modules: dict[WeightScheme, list[str]] = {}
    used: set[str] = set()
    for name in plain:
        stored = names.get(name, name)
        if stored not in found:
            continue  # ``check_tensors`` says so
        used.add(stored)
        path, tensor = found[stored]
        layout = layout_of(config, architecture, name, plain[name])
        info = _tensor_info(name, path, tensor, layout, plain[name])
        if name.endswith(PATCH_EMBEDDING):
            used.add(f"{stored}.1")
            info = _with_second_frame(info, found.get(f"{stored}.1"))
        quantizable = (name in linears or is_embedding(name)) and not name.endswith(kept)
        form = exact_form(tensor.type, layout.order) if quantizable else None
        if form is None or info.shape[-1] % form.group:
            tensors[name] = info
            continue
        module = name.removesuffix(".weight")
        modules.setdefault(_scheme(form), []).append(module)
        tensors |= {each.name: each for each in _codes_and_scales(info, module, form)}
    for name, (path, tensor) in found.items():
        if name in used or name in _NO_WEIGHTS:
            continue
        tensors[name] = _tensor_info(name, path, tensor, FileLayout(), tensor.shape)
    schemes = tuple(replace(scheme, targets=tuple(names)) for scheme, names in modules.items())
    return replace(config, quantization=CompressedFormat(schemes, ()) if schemes else None), tensors


def _with_tower_apart(file: GGUFFile) -> list[GGUFFile]:
    """``file``; if its vision tower is inside, text model and tower as if they were two."""
    if not has_tower_inside(file.header):
        return [file]
    return [GGUFFile(file.path, header) for header in split_tower(file.header)]


def names_in_files(config: ModelConfig, plain: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The name in a GGUF file of every tensor in ``plain``, by the ``gguf`` package's tables."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES

    architectures = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    depth = config.vision.depth if config.vision is not None else 1
    text = get_tensor_name_map(architectures[ARCHITECTURES[config.model_type]], text_layers(config))
    vision = get_tensor_name_map(MODEL_ARCH.MMPROJ, depth)
    names: dict[str, str] = {}
    for name in plain:
        if is_vision(name):
            key = f"visual.{name.removeprefix(_VISION_ROOT)}"
            stored = _merger_name(config, name) or vision.get_name(key, try_suffixes=(".weight", ".bias"))
        else:
            key = key_in_tables(config, name)
            stored = special_name(config, name) or text.get_name(key, try_suffixes=(".weight", ".bias"))
        if stored is not None:
            names[name] = stored
    return names


def _merger_name(config: ModelConfig, name: str) -> str | None:
    """What no table has: patch embedding, merger, and deepstack mergers by the number of their block."""
    rest = name.removeprefix(_VISION_ROOT)
    part, _, kind = rest.rpartition(".")
    fixed = {
        "patch_embed.proj": "v.patch_embd",
        "merger.norm": "v.post_ln",
        "merger.linear_fc1": "mm.0",
        "merger.linear_fc2": "mm.2",
    }
    if part in fixed:
        return f"{fixed[part]}.{kind}"
    if part.startswith("deepstack_merger_list."):
        _, level, layer = part.split(".")
        block = config.required_vision.deepstack_visual_indexes[int(level)]
        return f"v.deepstack.{block}.{layer.removeprefix('linear_')}.{kind}"
    return None


def _tensor_info(
    name: str, path: Path, tensor: GGUFTensor, layout: FileLayout, wanted: tuple[int, ...]
) -> TensorInfo:
    """The tensor as plain numbers; of a block type: as the numbers that its blocks stand for.

    ``wanted``: its shape in the checkpoint, which it gets if the file has it in the shape of ``layout``.
    """
    if tensor.type not in (*PLAIN_TYPES, *DEQUANTIZED):
        raise UnknownWeightsFormat(
            f"{path.name}: {tensor.name} is stored as {tensor.type}",
            f"vlfit reads {', '.join((*PLAIN_TYPES, *DEQUANTIZED))}.",
        )
    shape, end = tensor.shape, tensor.offset + tensor.nbytes
    is_plain = tensor.type in PLAIN_TYPES
    if not is_plain and len(shape) == 1:
        raise UnknownWeightsFormat(
            f"{path.name}: {tensor.name}, a vector, is stored as {tensor.type}",
            f"vlfit reads vectors in {', '.join(PLAIN_TYPES)}, as llama.cpp writes them.",
        )
    dtype = tensor.type if is_plain else DEQUANTIZED_DTYPE
    if shape != (layout.shape or wanted):
        layout = FileLayout()  # ``check_tensors`` says so: what has another shape cannot be put in order
    if is_plain and layout == FileLayout() and not tensor.rows_after:
        return TensorInfo(name, dtype, shape, path, tensor.offset, end)
    blocks = StoredBlocks(
        tensor.type,
        BlockPart.WEIGHTS,
        (shape[0] // (1 + len(tensor.rows_after)), *shape[1:]),
        layout.rope_heads,
        layout.order,
        layout.change,
        rows_after=tensor.rows_after,
    )
    found = wanted if layout.shape is not None else shape
    return TensorInfo(name, dtype, found, path, tensor.offset, end, StoredLayout.GGUF_BLOCKS, blocks)


def _with_second_frame(info: TensorInfo, second: tuple[Path, GGUFTensor] | None) -> TensorInfo:
    """A patch embedding [outputs, channels, 2, height, width] of two tensors without the third dimension."""
    if second is None:
        return info
    path, tensor = second
    if path != info.file or tensor.shape != info.shape or tensor.nbytes != info.end - info.start:
        return info  # its shape is then not what the config calls for
    kind = info.blocks.type if info.blocks is not None else info.dtype
    blocks = StoredBlocks(kind, BlockPart.WEIGHTS, info.shape, second_half=tensor.offset)
    shape = (*info.shape[:2], 2, *info.shape[2:])
    return replace(info, shape=shape, layout=StoredLayout.GGUF_BLOCKS, blocks=blocks)


def _codes_and_scales(info: TensorInfo, module: str, form: ExactForm) -> list[TensorInfo]:
    """The tensors of compressed-tensors that hold the blocks of ``info`` exactly."""
    assert info.blocks is not None
    rows, columns = info.shape
    codes, scales, supers = (
        replace(info.blocks, part=part)
        for part in (BlockPart.CODES, BlockPart.SCALES, BlockPart.SUPER_SCALES)
    )
    packed = form.bits < 8
    parts = [
        replace(
            info,
            name=f"{module}.weight_packed" if packed else f"{module}.weight",
            dtype="I32" if packed else "I8",
            shape=(rows, packed_words(columns, form.bits) if packed else columns),
            blocks=codes,
        ),
        replace(
            info,
            name=f"{module}.weight_scale",
            dtype=form.scale_dtype,
            shape=(rows, columns // form.group),
            blocks=scales,
        ),
    ]
    if form.super_group is not None:
        shape = (rows, columns // form.super_group)
        name = f"{module}.weight_super_scale"
        parts.append(replace(info, name=name, dtype=form.super_scale_dtype, shape=shape, blocks=supers))
    return parts


def _scheme(form: ExactForm) -> WeightScheme:
    kind = PACKED_FORMAT if form.bits < 8 else INTEGER_FORMAT
    return WeightScheme(
        form.bits,
        form.group,
        kind=kind,
        targets=(),
        super_group=form.super_group,
        codebook=form.codebook,
    )


def kind_of(text: list[GGUFFile], mmproj: list[GGUFFile]) -> GGUFKind:
    """What the files of a model say that it is. Arguments: as for ``normalize_gguf``."""
    first = text[0]
    file_type = type_of_number(first.header.metadata.get("general.file_type"))
    file_type = file_type or next(iter(types_in_files(text)), "")
    architectures = tuple(files[0].header.architecture for files in (text, mmproj) if files)
    return GGUFKind(architectures, file_type, type_of_name(first.path.name) or file_type)


def types_in_files(files: list[GGUFFile]) -> dict[str, int]:
    """Number of weights stored in each ggml type, the most frequent first."""
    counts: dict[str, int] = {}
    for file in files:
        for tensor in file.header.tensors.values():
            counts[tensor.type] = counts.get(tensor.type, 0) + prod(tensor.shape)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
