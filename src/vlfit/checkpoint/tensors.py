"""The tensors of a checkpoint: expected by its config, checked against its headers, counted by format."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.gptq_awq import QWEIGHT, GptqAwqFormat, GptqAwqScheme
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import (
    CODES_PER_WORD,
    FP8,
    INT4,
    INT5,
    INT6,
    INT8,
    LOW_BITS,
    CompressedFormat,
    Quantization,
    WeightScheme,
)
from vlfit.errors import MissingTensor, SurplusTensor, UnknownWeightsFormat, WrongShape
from vlfit.models import registry
from vlfit.models.cache_spec import CacheSpec

FP8_SCALE_SUFFIX = "_scale_inv"
PACKED_SUFFIX = ".weight_packed"
COMPRESSED_SCALE_SUFFIX = ".weight_scale"
# The group of each column, where groups are not consecutive columns.
G_IDX_SUFFIX = ".weight_g_idx"
SUPER_SCALE_SUFFIX = ".weight_super_scale"  # what scales of two levels are multiples of
COMPRESSED_SUFFIXES = (
    *(PACKED_SUFFIX, COMPRESSED_SCALE_SUFFIX, SUPER_SCALE_SUFFIX, ".weight_zero_point", G_IDX_SUFFIX),
)
READABLE_DTYPES = ("BF16", "F16", "F32", "F8_E4M3", "I8")
_PLAIN_DTYPES = ("BF16", "F16", "F32")
# Rotary frequencies, which older files have; vlfit computes them.
_COMPUTED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")
# Beside an FP8 weight in some files; unused, as activations are quantized dynamically.
_ACTIVATION_SCALE = ".input_scale"
# Beside each 4-bit weight, redundant.
_PACKED_SHAPE = ".weight_shape"
_METADATA_SUFFIXES = (FP8_SCALE_SUFFIX, *COMPRESSED_SUFFIXES[1:], _PACKED_SHAPE)
# Names that transformers' architectures give to the vision tower and its projection to the text model.
_VISION = re.compile(
    r"(^|\.)(visual|vision\w*|image_\w+|vit|vpm|siglip\w*|connector|merger|modality_projection"
    r"|multi_modal_projector|multimodal_projector|mm_projector|mlp1|resampler|abstractor)(\.|$)"
)
_DRAFT = "mtp."  # as transformers' architectures call them
_NUMBER = re.compile(r"\.\d+\.")
_QUANTIZED_DTYPES = {"F8_E4M3": FP8, "I8": INT8}
_REFETCH_CONFIG = "Fetch config.json and the weights again: they do not belong together."


def expected_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this ``config``.

    A linear layer in FP8 has ``weight_scale_inv`` (a scale per block) beside its weight; in
    compressed-tensors it has ``weight_packed``, ``weight_scale``, ... instead.
    """
    plain = plain_tensor_shapes(config)
    tensors = dict(plain)
    for name, (rows, columns) in quantizable_weight_shapes(plain).items():
        module = name.removesuffix(".weight")
        if config.fp8 is not None and config.fp8.quantizes(module) and not is_embedding(name):
            tensors[name + FP8_SCALE_SUFFIX] = config.fp8.scale_shape(rows, columns)
        if (scheme := _configured_scheme(config, module)) is not None:
            del tensors[name]
            tensors |= _quantized_tensors(scheme, module, rows, columns)
    return tensors


def plain_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model before quantization. Ignores ``config.quantization``."""
    return registry.spec_of(config.model_type).tensors(config)


def linear_weight_shapes(plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Rows (outputs) and columns (inputs) of every linear layer's weight, by tensor name.

    ``plain``: from ``plain_tensor_shapes``. Embeddings are left out.
    """
    return {name: (shape[0], shape[1]) for name, shape in plain.items() if _is_linear(name, shape)}


def is_embedding(name: str) -> bool:
    """Whether the tensor ``name`` belongs to the token embedding, in any format."""
    return "embed_tokens." in name


def is_quantization_metadata(name: str) -> bool:
    """Whether the tensor ``name`` is a scale, zero point, group index or shape for a quantized weight."""
    return name.endswith(_METADATA_SUFFIXES)


def packed_scheme(name: str, quantization: Quantization | None) -> WeightScheme | None:
    """The scheme of the packed tensor ``name``; None if ``quantization``, the checkpoint's, has none."""
    if not isinstance(quantization, CompressedFormat):
        return None
    return quantization.scheme_of(name.removesuffix(PACKED_SUFFIX))


def matrix_columns(info: TensorInfo, quantization: Quantization | None) -> int:
    """Weights in a row of the matrix ``info``, packed or not; as of int4 if the scheme is unknown.

    ``quantization``: the checkpoint's; None: it has none.
    """
    if not info.name.endswith(PACKED_SUFFIX):
        return info.shape[1]
    if info.blocks is not None:
        return info.blocks.shape[-1]
    scheme = packed_scheme(info.name, quantization)
    return info.shape[1] * (scheme.codes_per_word if scheme else CODES_PER_WORD)


def with_byte_codes(info: TensorInfo, quantization: Quantization | None) -> TensorInfo:
    """The matrix ``info`` with integers of 8 bits for codes that compiled products of CPUs do not know.

    These are the packed codes of GGUF files in 5 or 6 bits, or with a codebook.
    """
    scheme = packed_scheme(info.name, quantization) if info.blocks is not None else None
    if scheme is None or info.blocks is None or (scheme.codebook is None and scheme.bits not in LOW_BITS):
        return info
    name = f"{info.name.removesuffix(PACKED_SUFFIX)}.weight"
    return replace(info, name=name, dtype="I8", shape=(info.shape[0], info.blocks.shape[-1]))


def quantized_format(info: TensorInfo, quantization: Quantization | None) -> str | None:
    """``WeightScheme.format`` of quantized weights; None for any other tensor, such as a scale."""
    if is_quantization_metadata(info.name):
        return None
    if info.name.endswith(PACKED_SUFFIX):
        scheme = packed_scheme(info.name, quantization)
        return scheme.format if scheme else INT4
    return _QUANTIZED_DTYPES.get(info.dtype)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one dtype and shape whose ``names`` differ only in the layer's number.

    ``example``: the first tensor. ``format``: as from ``quantized_format``.
    """

    example: TensorInfo
    format: str | None
    names: list[str]


def group_tensors(tensors: Mapping[str, TensorInfo], quantization: Quantization | None) -> list[TensorGroup]:
    """``tensors`` in groups, in order of first appearance: a thousand tensors make some forty groups.

    ``quantization``: the checkpoint's, from which the groups' formats follow; None: it has none.
    """
    names_by_key: dict[tuple[str, str, tuple[int, ...], str | None], list[str]] = {}
    for name, info in tensors.items():
        key = _without_number(name), info.dtype, info.shape, quantized_format(info, quantization)
        names_by_key.setdefault(key, []).append(name)
    return [TensorGroup(tensors[names[0]], key[3], names) for key, names in names_by_key.items()]


@cache  # models of the catalog share names
def _without_number(name: str) -> str:
    return _NUMBER.sub(".*.", name, count=1)


def weights_format(tensors: Mapping[str, TensorInfo], quantization: Quantization | None) -> str:
    """Weights format of a checkpoint: the first of int4, int5, int6, FP8 and int8 that any text layer has.

    If no layer is quantized, the format of most bytes in all tensors: ``bf16``, ``fp16``, ``fp32``, or
    ``int8`` for a large int8 embedding. ``unknown`` without tensors.
    """
    return weights_format_of_groups(group_tensors(tensors, quantization))


def weights_format_of_groups(groups: Iterable[TensorGroup]) -> str:
    """``weights_format`` of a checkpoint with the tensors of ``groups``."""
    sizes: dict[str, int] = {}
    in_layers: set[str] = set()
    names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
    for group in groups:
        info = group.example
        name = group.format or names.get(info.dtype, info.dtype.lower())
        sizes[name] = sizes.get(name, 0) + len(group.names) * info.bytes
        if ".layers." in info.name:
            in_layers.add(name)
    quantized = next((name for name in (INT4, INT5, INT6, FP8, INT8) if name in in_layers), None)
    return quantized or max(sizes, key=lambda name: sizes[name], default="unknown")


def count_parameters(tensors: Mapping[str, TensorInfo], quantization: Quantization | None) -> int:
    """Number of weights in all ``tensors``, not counting scales and zero points.

    ``quantization``: the checkpoint's, which tells how many weights a packed word holds; None: it has
    none.
    """
    return count_parameters_of_groups(group_tensors(tensors, quantization), quantization)


def count_parameters_of_groups(groups: Iterable[TensorGroup], quantization: Quantization | None) -> int:
    """``count_parameters`` of a checkpoint with the tensors of ``groups``."""
    return sum(len(group.names) * count_weights(group.example, quantization) for group in groups)


def count_weights(info: TensorInfo, quantization: Quantization | None) -> int:
    """Number of weights in one tensor: several per word of packed weights; 0 for a scale or zero point.

    ``quantization``: the checkpoint's; None: it has none.
    """
    if is_quantization_metadata(info.name):
        return 0
    if not info.name.endswith(PACKED_SUFFIX):
        return info.count
    return info.shape[0] * matrix_columns(info, quantization)


@cache
def is_vision(name: str) -> bool:
    """Whether the tensor ``name`` belongs to the vision tower or its projection to the text model."""
    return _VISION.search(name) is not None


def is_draft(name: str) -> bool:
    """Whether the tensor ``name`` belongs to the layers that only draft tokens (multi-token prediction)."""
    return name.startswith(_DRAFT)


def has_draft_model(config: ModelConfig, names: Iterable[str]) -> bool:
    """Whether a checkpoint of tensors ``names`` has layers that draft tokens, of a kind that vlfit runs."""
    return bool(config.text.draft_cache) and any(map(is_draft, names))


def used_cache_spec(config: ModelConfig, names: Iterable[str], *, speculate: bool) -> CacheSpec:
    """What the layers of a checkpoint of tensors ``names`` cache; with ``speculate`` its draft layers too."""
    return registry.cache_spec_of(config, drafts=speculate and has_draft_model(config, names))


def is_text_layer(name: str) -> bool:
    """Whether the tensor ``name`` belongs to a layer of the text model: not embedding, final norm or head.

    What drafts tokens (``is_draft``) counts, too.
    """
    return (".layers." in name or is_draft(name)) and not is_vision(name)


def _quantized_tensors(
    scheme: WeightScheme, module: str, rows: int, columns: int
) -> dict[str, tuple[int, ...]]:
    return {f"{module}.{part}": shape for part, shape in scheme.tensor_shapes(rows, columns).items()}


def quantizable_weight_shapes(plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """The weights that may be quantized: those of ``linear_weight_shapes`` and the token embedding.

    ``plain``: from ``plain_tensor_shapes``.
    """
    tables = {name: (shape[0], shape[1]) for name, shape in plain.items() if is_embedding(name)}
    return {**linear_weight_shapes(plain), **tables}


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is the weight of a linear layer, not of an embedding."""
    return (
        len(shape) == 2
        and name.endswith(".weight")
        and not name.endswith(("embed_tokens.weight", "pos_embed.weight"))
    )


def decoder_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a plain decoder, without quantization.

    Embedding, layers, final norm, and the head if it is not tied.
    """
    return dict(_decoder_tensors(config))


def _decoder_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    text, root = config.text, config.text.prefix
    hidden, inner, head = text.hidden_size, text.intermediate_size, text.head_dim
    queries, keys = text.num_attention_heads * head, text.num_key_value_heads * head
    attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    gates = {"gate_proj": inner, "up_proj": inner}
    if text.fused_projections:
        attention, gates = {"qkv_proj": queries + 2 * keys}, {"gate_up_proj": 2 * inner}
    yield f"{root}.embed_tokens.weight", (text.vocab_size, hidden)
    for index in range(text.num_hidden_layers):
        layer = f"{root}.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for name, rows in attention.items():
            yield f"{layer}.self_attn.{name}.weight", (rows, hidden)
            if text.attention_bias:
                yield f"{layer}.self_attn.{name}.bias", (rows,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        if text.output_bias:
            yield f"{layer}.self_attn.o_proj.bias", (hidden,)
        if text.query_key_norm:
            yield f"{layer}.self_attn.q_norm.weight", (head,)
            yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for name, rows in gates.items():
            yield f"{layer}.mlp.{name}.weight", (rows, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield f"{root}.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (text.vocab_size, hidden)


def weight_and_bias(module: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the weight of ``module``, and of its bias.

    ``shape``: of the weight, outputs first.
    """
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]


def check_tensors(config: ModelConfig, tensors: dict[str, TensorInfo]) -> None:
    """Check that ``tensors`` are exactly those that ``config`` calls for, with the right shapes.

    Surplus tensors without effect, such as a tied head, are allowed. A linear layer whose weight is stored
    quantized needs its scales, even if config.json exempts its module. Raises ``MissingTensor`` and
    ``SurplusTensor`` with counts and the first names, ``WrongShape``, and ``UnknownWeightsFormat`` for a
    dtype that vlfit does not read or config.json does not declare.
    """
    expected = _required_tensors(config, tensors)
    missing, surplus = _missing_and_surplus(expected, tensors)
    if missing:
        raise MissingTensor(
            f"{len(missing):,} of {len(expected):,} tensors are missing: {first_names(missing)}",
            "Fetch the weights again: they do not belong to this config.json, or a shard is missing.",
        )
    for name, shape in expected.items():
        _check_tensor(tensors[name], shape)
    # Ignoring them could run a different model, such as one without its last layers.
    if surplus:
        raise SurplusTensor(
            f"{len(surplus):,} of {len(tensors):,} tensors are not in the model that config.json describes: "
            f"{first_names(surplus)}",
            _REFETCH_CONFIG,
        )


def missing_and_surplus(config: ModelConfig, tensors: dict[str, TensorInfo]) -> tuple[list[str], list[str]]:
    """Names of the tensors that ``config`` calls for but are missing, and of those that it has no use for."""
    return _missing_and_surplus(_required_tensors(config, tensors), tensors)


def _missing_and_surplus(
    expected: dict[str, tuple[int, ...]], tensors: dict[str, TensorInfo]
) -> tuple[list[str], list[str]]:
    missing = [name for name in expected if name not in tensors]
    surplus = [name for name in tensors if name not in expected and not _is_ignorable(name, tensors)]
    return missing, surplus


def first_names(names: list[str]) -> str:
    """The first three of ``names``, for an error."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _is_ignorable(name: str, tensors: dict[str, TensorInfo]) -> bool:
    """Whether the unexpected tensor ``name`` has no effect on the model."""
    if name.startswith("lm_head.") or name.endswith(_COMPUTED_SUFFIXES):
        return True  # a tied head is a copy of the embedding
    if name.endswith(_PACKED_SHAPE):
        return name.removesuffix(_PACKED_SHAPE) + PACKED_SUFFIX in tensors
    weight = tensors.get(name.removesuffix(_ACTIVATION_SCALE) + ".weight")
    return name.endswith(_ACTIVATION_SCALE) and weight is not None and weight.dtype == "F8_E4M3"


def _required_tensors(config: ModelConfig, tensors: dict[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    """The tensors that the config calls for, each linear layer in the format that the files have."""
    absent = tuple(
        prefix
        for prefix in registry.spec_of(config.model_type).optional_tensors
        if not any(name.startswith(prefix) for name in tensors)
    )
    plain = {
        name: shape for name, shape in plain_tensor_shapes(config).items() if not name.startswith(absent)
    }
    needed = dict(plain)
    for name, (rows, columns) in quantizable_weight_shapes(plain).items():
        module = name.removesuffix(".weight")
        stored = tensors.get(name)
        if stored is not None and stored.dtype == "F8_E4M3" and is_embedding(name):
            continue  # an FP8 embedding is not supported, whatever config.json says
        if stored is not None and stored.dtype == "F8_E4M3" and config.fp8 is not None:
            needed[name + FP8_SCALE_SUFFIX] = config.fp8.scale_shape(rows, columns)
        elif (stored is not None and stored.dtype in _QUANTIZED_DTYPES) or module + PACKED_SUFFIX in tensors:
            scheme = config.compressed.scheme_of(module) if config.compressed is not None else None
            if scheme is None:
                raise _undeclared(
                    *((module + PACKED_SUFFIX, "int4") if stored is None else (name, stored.dtype))
                )
            del needed[name]
            needed |= _checked_tensors(scheme, module, rows, columns, tensors)
        elif stored is None and (scheme := _configured_scheme(config, module)) is not None:
            del needed[name]
            needed |= _checked_tensors(scheme, module, rows, columns, tensors)
    return needed


def _checked_tensors(
    scheme: WeightScheme, module: str, rows: int, columns: int, tensors: Mapping[str, TensorInfo]
) -> dict[str, tuple[int, ...]]:
    stored = tensors.get(module + PACKED_SUFFIX)
    in_blocks = stored is not None and stored.blocks is not None
    if is_embedding(f"{module}.") and scheme.format != INT8 and not in_blocks:
        raise UnknownWeightsFormat(
            f"{module} is stored in {scheme.format}",
            "vlfit reads the embedding in 16 bits or int8; vlfit convert makes such checkpoints.",
        )
    if not scheme.can_store_columns(columns):
        raise UnknownWeightsFormat(
            f"{module} has {columns} inputs, not a whole number of groups of "
            f"{scheme.group_size or scheme.codes_per_word}",
            _REFETCH_CONFIG,
        )
    return _quantized_tensors(scheme, module, rows, columns)


def _configured_scheme(config: ModelConfig, module: str) -> WeightScheme | None:
    """The compressed-tensors scheme of ``module`` in config.json; None: not quantized, or FP8."""
    compressed = config.compressed
    return compressed.scheme_of(module) if compressed is not None and compressed.quantizes(module) else None


def _undeclared(name: str, dtype: str) -> UnknownWeightsFormat:
    return UnknownWeightsFormat(
        f"{name} is stored as {dtype}, but config.json has no quantization_config for it", _REFETCH_CONFIG
    )


def _check_tensor(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise WrongShape(
            f"{info.name} has shape {list(info.shape)}; config.json calls for {list(shape)}",
            f"Fetch the checkpoint again: {info.file.name} and config.json are of different models.",
        )
    if info.name.endswith((PACKED_SUFFIX, ".weight_zero_point", G_IDX_SUFFIX)):
        readable = info.dtype == "I32"
    elif info.blocks is not None and info.name.endswith((COMPRESSED_SCALE_SUFFIX, SUPER_SCALE_SUFFIX)):
        readable = True  # made for the blocks of the file
    elif info.dtype in _QUANTIZED_DTYPES:
        table = is_embedding(info.name) and info.dtype == "I8"
        readable = _is_linear(info.name, shape) or table
    else:
        readable = info.dtype in _PLAIN_DTYPES
    if not readable:
        raise UnknownWeightsFormat(
            f"{info.name} is stored as {info.dtype}",
            f"vlfit reads {', '.join(READABLE_DTYPES)} (the last two for linear layers only), and packed "
            "int4 and int8.",
        )


def normalize_gptq_awq(
    config: ModelConfig, tensors: dict[str, TensorInfo]
) -> tuple[ModelConfig, dict[str, TensorInfo]]:
    """Convert ``config`` and ``tensors`` of an AWQ or GPTQ checkpoint to the terms of compressed-tensors.

    Both are returned unchanged for any other checkpoint. A bias that the model does not have is dropped if it
    is all zeros, for which it is read from its file. Raises the errors of ``GptqAwqFormat.normalize``, and
    ``UnknownWeightsFormat`` if the weights are AWQ or GPTQ and config.json has no ``quantization_config``.
    """
    if not isinstance(config.quantization, GptqAwqFormat):
        if config.quantization is None and any(name.endswith(QWEIGHT) for name in tensors):
            raise UnknownWeightsFormat(
                "the weights are stored as AWQ or GPTQ, but config.json has no quantization_config",
                "Add the content of quantize_config.json or quant_config.json, as older programs wrote, to "
                'config.json: {"quantization_config": {"quant_method": "gptq" or "awq", ...}}.',
            )
        return config, tensors
    plain = plain_tensor_shapes(config)
    linears = {name.removesuffix(".weight"): shape for name, shape in linear_weight_shapes(plain).items()}
    schemes, renamed = config.quantization.normalize(linears, tensors)
    for bias in (f"{module}.bias" for module in schemes):
        # Older programs wrote a bias of zeros for each layer; vLLM ignores it too.
        if bias in renamed and bias not in plain and _is_zeros(renamed[bias]):
            del renamed[bias]
    unquantized = tuple(module for module in linears if module not in schemes)
    return replace(config, quantization=CompressedFormat(_weight_schemes(schemes), unquantized)), renamed


def _is_zeros(info: TensorInfo) -> bool:
    with info.file.open("rb") as file:
        file.seek(info.start)
        return not any(file.read(info.bytes))


def _weight_schemes(schemes: dict[str, GptqAwqScheme]) -> tuple[WeightScheme, ...]:
    """``WeightScheme`` of each GPTQ or AWQ scheme; the most common one is the default of all modules."""
    modules: dict[GptqAwqScheme, list[str]] = {}
    for module, scheme in schemes.items():
        modules.setdefault(scheme, []).append(module)
    default = max(modules, key=lambda scheme: len(modules[scheme]), default=None)
    return tuple(
        WeightScheme(
            scheme.bits,
            scheme.group_size,
            scheme.symmetric,
            targets=("Linear",) if scheme is default else tuple(names),
            act_order=scheme.act_order,
        )
        for scheme, names in modules.items()
    )
