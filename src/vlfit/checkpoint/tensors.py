"""The tensors of a checkpoint: names and shapes that its config calls for, checked against its headers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.gptq_awq import QWEIGHT, ByInputs, Stored
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import (
    CODES_PER_WORD,
    FP8,
    INT4,
    INT8,
    CompressedFormat,
    Quantization,
    WeightScheme,
)
from vlfit.errors import MissingTensor, SurplusTensor, UnknownWeightsFormat, WrongShape
from vlfit.models import registry

SCALE_SUFFIX = "_scale_inv"
PACKED_SUFFIX = ".weight_packed"
COMPRESSED_SCALE = ".weight_scale"
# The group of each column, where groups are not consecutive.
ORDER_SUFFIX = ".weight_g_idx"
COMPRESSED_SUFFIXES = (PACKED_SUFFIX, COMPRESSED_SCALE, ".weight_zero_point", ORDER_SUFFIX)
READABLE_DTYPES = ("BF16", "F16", "F32", "F8_E4M3", "I8")
_PLAIN_DTYPES = ("BF16", "F16", "F32")
# Rotary frequencies that older writers stored; vlfit computes them.
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")
# Beside an FP8 weight in some files; vlfit quantizes activations dynamically.
_ACTIVATION_SCALE = ".input_scale"
# Beside each 4-bit weight, redundant.
_PACKED_SHAPE = ".weight_shape"
_NO_WEIGHTS = (SCALE_SUFFIX, *COMPRESSED_SUFFIXES[1:], _PACKED_SHAPE)
# Parts of names by which architectures of transformers call the vision tower and what leads from it to the
# text model.
_VISION = re.compile(
    r"(^|\.)(visual|vision\w*|image_\w+|vit|vpm|siglip\w*|connector|merger|modality_projection"
    r"|multi_modal_projector|multimodal_projector|mm_projector|mlp1|resampler|abstractor)(\.|$)"
)
_NUMBER = re.compile(r"\.\d+\.")
_NARROW_FORMS = {"F8_E4M3": FP8, "I8": INT8}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this ``config``, quantized as it says.

    In FP8, a linear layer has ``weight_scale_inv`` (a scale per block) beside its weight; in
    compressed-tensors it has ``weight_packed``, ``weight_scale``, ... instead of its weight.
    """
    plain = plain_tensors(config)
    tensors = dict(plain)
    for name, (rows, columns) in _quantizable(plain).items():
        module = name.removesuffix(".weight")
        if config.fp8 is not None and config.fp8.converts(module) and not is_embedding(name):
            tensors[name + SCALE_SUFFIX] = config.fp8.scale_shape(rows, columns)
        if (scheme := _configured_scheme(config, module)) is not None:
            del tensors[name]
            tensors |= _stored_tensors(scheme, module, rows, columns)
    return tensors


def plain_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model before quantization."""
    return registry.spec_of(config.model_type).tensors(config)


def linear_weights(plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Weights of linear layers in ``plain``, with rows (outputs) and columns (inputs)."""
    return {name: (shape[0], shape[1]) for name, shape in plain.items() if _is_linear(name, shape)}


def is_embedding(name: str) -> bool:
    """Whether the tensor ``name`` belongs to the token embedding, in any format."""
    return "embed_tokens." in name


def is_quantization_metadata(name: str) -> bool:
    """Whether the tensor ``name`` is a scale, zero point or shape of another one."""
    return name.endswith(_NO_WEIGHTS)


def codes_per_word(name: str, quantization: Quantization | None) -> int:
    """Codes per 32-bit word of the packed tensor ``name``."""
    scheme = None
    if isinstance(quantization, CompressedFormat):
        scheme = quantization.scheme_of(name.removesuffix(PACKED_SUFFIX))
    return scheme.codes_per_word if scheme else CODES_PER_WORD


def quantized_format(info: TensorInfo, quantization: Quantization | None) -> str | None:
    """``fp8``, ``int8`` or ``int4`` of a tensor of quantized weights, else None."""
    if info.name.endswith(PACKED_SUFFIX):
        return INT4 if codes_per_word(info.name, quantization) == CODES_PER_WORD else INT8
    return _NARROW_FORMS.get(info.dtype)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one dtype and shape whose ``names`` differ in the layer's number only; ``one`` of them.

    ``form``: ``fp8``, ``int8`` or ``int4`` of quantized weights.
    """

    one: TensorInfo
    form: str | None
    names: list[str]


def group_tensors(tensors: Mapping[str, TensorInfo], quantization: Quantization | None) -> list[TensorGroup]:
    """``tensors`` in groups, in order of their first: a thousand tensors are some forty groups."""
    kinds: dict[tuple[str, str, tuple[int, ...], str | None], list[str]] = {}
    for name, info in tensors.items():
        key = _without_number(name), info.dtype, info.shape, quantized_format(info, quantization)
        kinds.setdefault(key, []).append(name)
    return [TensorGroup(tensors[names[0]], key[3], names) for key, names in kinds.items()]


@cache  # the models of the catalog have their names in common
def _without_number(name: str) -> str:
    return _NUMBER.sub(".*.", name, count=1)


@cache
def is_vision(name: str) -> bool:
    """Whether the tensor ``name`` belongs to the vision tower or its projection to the text model."""
    return _VISION.search(name) is not None


def is_text_layer(name: str) -> bool:
    """Whether the tensor ``name`` belongs to a layer of the text model: what FP8 and int4 convert."""
    return ".layers." in name and not is_vision(name)


def _stored_tensors(scheme: WeightScheme, module: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{module}.{part}": shape for part, shape in scheme.stored(rows, columns).items()}


def _quantizable(plain: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Weights that may be quantized, with rows and columns: linear layers and the token embedding."""
    tables = {name: (shape[0], shape[1]) for name, shape in plain.items() if is_embedding(name)}
    return {**linear_weights(plain), **tables}


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Embeddings have two dimensions too, but are looked up."""
    return (
        len(shape) == 2
        and name.endswith(".weight")
        and not name.endswith(("embed_tokens.weight", "pos_embed.weight"))
    )


def decoder_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a plain decoder: embedding, layers, final norm, output head."""
    return dict(_decoder_tensors(config))


def _decoder_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    text, root = config.text, config.text.prefix
    hidden, inner, head = text.hidden_size, text.intermediate_size, text.head_dim
    queries, keys = text.num_attention_heads * head, text.num_key_value_heads * head
    attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    gates = {"gate_proj": inner, "up_proj": inner}
    if text.joined:
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


def with_bias(module: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Weight and bias of a layer whose weight has ``shape``."""
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]


def check_tensors(config: ModelConfig, tensors: dict[str, TensorInfo]) -> None:
    """Check ``tensors`` against ``config``, in both directions.

    Raises ``MissingTensor`` and ``SurplusTensor`` (how many, and the first names), ``WrongShape``, and
    ``UnknownWeightsFormat`` for a dtype that vlfit does not read. A linear layer's own dtype, not the list of
    exempt modules, decides whether it needs a scale.
    """
    expected = _required_tensors(config, tensors)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise MissingTensor(
            f"{len(missing):,} of {len(expected):,} tensors are missing: {_first_names(missing)}",
            "The weights do not belong to this config.json, or a shard is missing. Fetch them again.",
        )
    for name, shape in expected.items():
        _check_tensor(tensors[name], shape)
    # Ignoring them could run another model than the one in the files, say without its last layers.
    surplus = [name for name in tensors if name not in expected and not _may_be_ignored(name, tensors)]
    if surplus:
        raise SurplusTensor(
            f"{len(surplus):,} of {len(tensors):,} tensors are not in the model that config.json describes: "
            f"{_first_names(surplus)}",
            "config.json belongs to other weights, or was changed. Fetch it again with its weights.",
        )


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _may_be_ignored(name: str, tensors: dict[str, TensorInfo]) -> bool:
    """Whether ``name``, which the config does not call for, has no effect on the model."""
    if name.startswith("lm_head.") or name.endswith(_COMPUTED):
        return True  # with a tied head it is a copy of the embedding
    if name.endswith(_PACKED_SHAPE):
        return name.removesuffix(_PACKED_SHAPE) + PACKED_SUFFIX in tensors
    weight = tensors.get(name.removesuffix(_ACTIVATION_SCALE) + ".weight")
    return name.endswith(_ACTIVATION_SCALE) and weight is not None and weight.dtype == "F8_E4M3"


def _required_tensors(config: ModelConfig, tensors: dict[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    """The tensors that the config calls for, each linear layer in the format of the files."""
    plain = plain_tensors(config)
    needed = dict(plain)
    for name, (rows, columns) in _quantizable(plain).items():
        module = name.removesuffix(".weight")
        stored = tensors.get(name)
        if stored is not None and stored.dtype == "F8_E4M3" and is_embedding(name):
            continue  # an FP8 embedding is not supported, whatever config.json says
        if stored is not None and stored.dtype == "F8_E4M3" and config.fp8 is not None:
            needed[name + SCALE_SUFFIX] = config.fp8.scale_shape(rows, columns)
        elif (stored is not None and stored.dtype in _NARROW_FORMS) or module + PACKED_SUFFIX in tensors:
            scheme = config.compressed.scheme_of(module) if config.compressed is not None else None
            if scheme is None:
                raise _undeclared_format(
                    *((module + PACKED_SUFFIX, "int4") if stored is None else (name, stored.dtype))
                )
            del needed[name]
            needed |= _checked_parts(scheme, module, rows, columns)
        elif stored is None and (scheme := _configured_scheme(config, module)) is not None:
            del needed[name]
            needed |= _checked_parts(scheme, module, rows, columns)
    return needed


def _checked_parts(scheme: WeightScheme, module: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    if is_embedding(f"{module}.") and scheme.form != INT8:
        raise UnknownWeightsFormat(
            f"{module} is stored in {scheme.form}",
            "vlfit reads the embedding in 16 bits and in int8. vlfit convert makes such checkpoints.",
        )
    if not scheme.divides(columns):
        raise UnknownWeightsFormat(
            f"{module} has {columns} inputs, which are no whole number of groups of "
            f"{scheme.group_size or scheme.codes_per_word}",
            "config.json belongs to other weights. Fetch it again with its weights.",
        )
    return _stored_tensors(scheme, module, rows, columns)


def _configured_scheme(config: ModelConfig, module: str) -> WeightScheme | None:
    """The compressed-tensors scheme of ``module`` by config.json; None: not quantized, or FP8."""
    form = config.compressed
    return form.scheme_of(module) if form is not None and form.converts(module) else None


def _undeclared_format(name: str, form: str) -> UnknownWeightsFormat:
    return UnknownWeightsFormat(
        f"{name} is stored as {form}, but config.json has no quantization_config for it",
        "Fetch config.json again; it does not belong to these weights.",
    )


def _check_tensor(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise WrongShape(
            f"{info.name} has shape {list(info.shape)}; config.json calls for {list(shape)}",
            f"{info.file.name} and config.json are of different models. Fetch the checkpoint again.",
        )
    if info.name.endswith((PACKED_SUFFIX, ".weight_zero_point", ORDER_SUFFIX)):
        readable = info.dtype == "I32"
    elif info.dtype in _NARROW_FORMS:
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


# AWQ and GPTQ checkpoints under the names of compressed-tensors.


def normalize_gptq_awq(
    config: ModelConfig, tensors: dict[str, TensorInfo]
) -> tuple[ModelConfig, dict[str, TensorInfo]]:
    """``config`` and ``tensors`` with AWQ and GPTQ names replaced by those of compressed-tensors.

    Raises what ``ByInputs.read_in`` raises, and ``UnknownWeightsFormat`` where config.json has no word of
    them.
    """
    if not isinstance(config.quantization, ByInputs):
        if config.quantization is None and any(name.endswith(QWEIGHT) for name in tensors):
            raise UnknownWeightsFormat(
                "the weights are stored as AWQ and GPTQ do, but config.json has no quantization_config",
                "Older programs wrote quantize_config.json or quant_config.json: put what it holds into "
                'config.json, as {"quantization_config": {"quant_method": "gptq" or "awq", ...}}.',
            )
        return config, tensors
    plain = plain_tensors(config)
    matrices = {name.removesuffix(".weight"): shape for name, shape in linear_weights(plain).items()}
    converted, named = config.quantization.read_in(matrices, tensors)
    for bias in (f"{module}.bias" for module in converted):
        # Older programs wrote a bias of zeros for each layer; vLLM ignores them.
        if bias in named and bias not in plain and _is_zeros(named[bias]):
            del named[bias]
    kept = tuple(module for module in matrices if module not in converted)
    return replace(config, quantization=CompressedFormat(_schemes(converted), kept)), named


def _is_zeros(info: TensorInfo) -> bool:
    with info.file.open("rb") as file:
        file.seek(info.start)
        return not any(file.read(info.bytes))


def _schemes(converted: dict[str, Stored]) -> tuple[WeightScheme, ...]:
    """A scheme for each way that modules are stored; the most common applies to all that are not named."""
    modules: dict[Stored, list[str]] = {}
    for module, stored in converted.items():
        modules.setdefault(stored, []).append(module)
    most = max(modules, key=lambda stored: len(modules[stored]), default=None)
    return tuple(
        WeightScheme(
            stored.bits,
            stored.group_size,
            stored.symmetric,
            targets=("Linear",) if stored is most else tuple(named),
            ordered=stored.ordered,
        )
        for stored, named in modules.items()
    )
