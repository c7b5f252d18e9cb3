"""A model as the plan sees it: shapes, and what its weights take once they are loaded.

Knows: what the native engine's loader makes of each tensor (FP8 scales widened to float32, a head's norm
repeated for each head, what is not loaded at all). Does not know: where the tensors were read, or machines.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vlfit.checkpoint.cache import format_of, parameters_of
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.config import ModelConfig, VisionConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import FP8, CompressedFormat, Fp8Format, Quantization
from vlfit.checkpoint.tensors import (
    COMPRESSED_SUFFIXES,
    ORDER_SUFFIX,
    PACKED_SUFFIX,
    SCALE_SUFFIX,
    Alike,
    alike,
    codes_per_word,
    is_embedding,
    narrow_form,
)
from vlfit.checkpoint.text_config import TextConfig
from vlfit.plan.allocator import apart, held_for, joined, shelved
from vlfit.plan.native.tiles import fits_eight_bits
from vlfit.units import MIB

HALF = 2  # bytes of bfloat16 and float16, in which everything is computed on a GPU
SINGLE = 4  # bytes of float32
LAYER_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
JOINED_PARTS = dict.fromkeys(LAYER_PARTS[:3], "qkv_proj") | dict.fromkeys(LAYER_PARTS[4:6], "gate_up_proj")
_SHARE_INPUTS = ("k_proj", "v_proj", "up_proj")  # with the one before them
HEAD = "lm_head"
# In the files, but not part of what runs: shapes said twice, scales of activations, computed frequencies.
_NOT_LOADED = (".weight_shape", ".input_scale", ".inv_freq")
# torch rounds what it takes from the driver: up to 2 MiB from this size on, below it from shared segments.
_ROUNDED_FROM, _ROUNDED_TO = 10 * MIB, 2 * MIB


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer of ``rows`` outputs and ``columns`` inputs, in ``form`` (bf16, fp8, int8 or int4).

    ``ordered``: what comes in is put in another order first. ``eight_bits``: in FP8, and scaled in a way that
    matrix units for FP8 can multiply.
    """

    rows: int
    columns: int
    form: str
    ordered: bool = False
    eight_bits: bool = False

    @property
    def weights(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan has to know of a checkpoint. All sizes in bytes, as loaded on a GPU.

    ``embedding_bytes`` are the table of tokens and, if it has weights of its own (``own_head``), the output
    head. ``layer`` has the matrices of one text layer by name, each as large as in the largest layer.
    ``rounding`` is what torch's allocator adds by rounding large tensors up; ``pool`` is all that it takes
    more than the weights are once they are loaded, ``pool_apart`` that without joining what shares its input,
    as in transformers, which is planned with bf16 alone: else 0. ``converted_from`` names the checkpoint that
    ``vlfit convert`` has to make this one of, "" if it exists, and ``convert_options`` what it is told for
    that, beside the format, at the cost of exactness. ``place`` is what a command names to load it: a
    folder's path or a name on the hub. ``tower_is_narrow``: products of the vision tower have weights in
    fewer than 16 bits. ``known_by`` says in words where the sizes were read. ``sizes`` are those of tensors
    as the engine allocates them, in order. ``most_image_tokens``: of a picture, by the checkpoint's own
    settings; None where they are not known.
    """

    name: str
    family: str
    weights: str
    parameters: int
    text: TextConfig
    vision: VisionConfig | None
    text_bytes: int
    vision_bytes: int
    embedding_bytes: int
    rounding: int
    pool: int
    pool_apart: int
    layer: Mapping[str, Matrix]
    head: Matrix
    known_by: str
    converted_from: str = ""
    place: str = ""
    convert_options: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    own_head: bool = True
    tower_is_narrow: bool = False
    most_image_tokens: int | None = None

    @property
    def made_by(self) -> str:
        """The command that makes this checkpoint; "" if it exists."""
        if not self.converted_from:
            return ""
        words = f"vlfit convert {shlex.quote(self.converted_from)} --weights {self.weights}"
        return f"{words} {self.convert_options}".rstrip()

    @property
    def head_is_rounded(self) -> bool:
        """Whether the output head has weights of its own in fewer than 16 bits."""
        return self.head.form != BF16

    @property
    def weight_bytes(self) -> int:
        return self.text_bytes + self.vision_bytes + self.embedding_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, in bfloat16."""
        return kv_bytes_per_token(self.text, BF16)

    @property
    def head_and_layer_weights(self) -> int:
        """Weights that each token is multiplied with: all text layers and the output head once."""
        in_layer = sum(matrix.weights for matrix in self.layer.values())
        return in_layer * self.text.num_hidden_layers + self.head.weights


def model_of(
    name: str,
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo] | list[Alike],
    known_by: str,
    *,
    family: str = "",
    converted_from: str = "",
    place: str = "",
    convert_options: str = "",
    most_image_tokens: int | None = None,
) -> Model:
    """The model that ``tensors`` (a checkpoint's headers, or their kinds) and ``config`` describe."""
    kinds = tensors if isinstance(tensors, list) else alike(tensors, config.quantization)
    text = config.text
    left_out = (f"{HEAD}.",) if config.tie_word_embeddings else ()  # then it is the embedding
    loaded: dict[str, int] = {}
    parts = {"text": 0, "vision": 0, "embedding": 0}
    rounding = 0
    for kind in kinds:
        if kind.one.name.endswith(_NOT_LOADED) or kind.one.name.startswith(left_out):
            continue
        size, count = _loaded(kind.one, text), len(kind.names)
        loaded |= dict.fromkeys(kind.names, size)
        parts[ledger_part(kind.one.name)] += count * size
        rounding += count * (-size % _ROUNDED_TO) if size >= _ROUNDED_FROM else 0
    total, sizes = sum(parts.values()), joined(loaded)
    weights = format_of(kinds)
    return Model(
        name=name,
        family=family or name.rpartition("/")[2],
        weights=weights,
        parameters=parameters_of(kinds, config.quantization),
        text=text,
        vision=config.vision,
        text_bytes=parts["text"],
        vision_bytes=parts["vision"],
        embedding_bytes=parts["embedding"],
        rounding=rounding,
        pool=held_for(shelved(sizes)) - total,
        pool_apart=held_for(apart(loaded).values()) - total if weights == BF16 else 0,
        layer=_layer(text, kinds, config.quantization),
        head=_head(config, kinds),
        known_by=known_by,
        converted_from=converted_from,
        place=place or name,
        convert_options=convert_options,
        sizes=sizes,
        most_image_tokens=most_image_tokens,
        own_head=not config.tie_word_embeddings,
        tower_is_narrow=any(kind.form and ledger_part(kind.one.name) == "vision" for kind in kinds),
    )


def kv_bytes_per_token(text: TextConfig, kv_dtype: str, value_bytes: int = HALF) -> int:
    """Keys and values of one token in all layers, in the engine's own cache: values of ``value_bytes`` or, in
    FP8, a byte each and two more for each row of a head (``layers/kv_cache.py``).
    """
    row = text.head_dim + 2 if kv_dtype == FP8 else text.head_dim * value_bytes
    return 2 * text.num_hidden_layers * text.num_key_value_heads * row


def _loaded(info: TensorInfo, text: TextConfig) -> int:
    """Bytes that the engine allocates for one tensor of the files (``loading/loader.py``)."""
    if info.name.endswith(".q_norm.weight"):  # a row for each head (``models/decoder.py``)
        return text.num_attention_heads * info.count * HALF
    if info.name.endswith(".k_norm.weight"):
        return text.num_key_value_heads * info.count * HALF
    if info.name.endswith(SCALE_SUFFIX):
        return info.count * SINGLE
    if info.name.endswith(ORDER_SUFFIX) and any(f".{part}." in info.name for part in _SHARE_INPUTS):
        return 0  # the engine has one order for all who share their inputs
    if info.dtype in ("F8_E4M3", "I8") or info.name.endswith(COMPRESSED_SUFFIXES):
        return info.bytes
    return info.count * HALF


def ledger_part(tensor: str) -> str:
    """Which of the ledger's lines of weights ``tensor`` belongs to: text, vision or embedding."""
    if tensor.startswith("model.visual."):
        return "vision"
    return "embedding" if is_embedding(tensor) or tensor.startswith(f"{HEAD}.") else "text"


def _layer(text: TextConfig, kinds: list[Alike], quantization: Quantization | None) -> dict[str, Matrix]:
    """The matrices of a layer by ``LAYER_PARTS``; the files may have some of them as one (Phi-3)."""
    keys = text.num_key_value_heads * text.head_dim
    rows = {"q_proj": text.num_attention_heads * text.head_dim, "k_proj": keys, "v_proj": keys}
    rows |= {"gate_proj": text.intermediate_size, "up_proj": text.intermediate_size}
    parts: dict[str, list[TensorInfo]] = {}
    for kind in kinds:
        parts.setdefault(kind.one.name.rpartition(".")[0].rpartition(".")[2], []).append(kind.one)
    is_joined = JOINED_PARTS["q_proj"] in parts
    found = {}
    for part in LAYER_PARTS:
        stored = JOINED_PARTS.get(part, part) if is_joined else part
        whole = _largest(stored, parts[stored], quantization)
        found[part] = replace(whole, rows=rows.get(part, whole.rows)) if is_joined else whole
    return found


def _largest(part: str, tensors: list[TensorInfo], quantization: Quantization | None) -> Matrix:
    endings = (f".{part}.weight", f".{part}{PACKED_SUFFIX}")
    found = [_matrix(info, quantization) for info in tensors if info.name.endswith(endings)]
    # Layers may be stored in several forms (a converter skips what it cannot divide): the dearest counts.
    dearest = max(found, key=lambda matrix: (matrix.form != BF16, not matrix.eight_bits, matrix.weights))
    ordered = any(info.name.endswith(f".{part}{ORDER_SUFFIX}") for info in tensors)
    return replace(dearest, ordered=ordered)


def _head(config: ModelConfig, kinds: list[Alike]) -> Matrix:
    """The output head: the table of tokens itself where they are tied."""
    for info in (kind.one for kind in kinds):
        name = info.name
        ours = is_embedding(name) if config.tie_word_embeddings else name.startswith(f"{HEAD}.")
        if ours and name.endswith((".weight", PACKED_SUFFIX)):
            return _matrix(info, config.quantization)
    return Matrix(config.text.vocab_size, config.text.hidden_size, BF16)


def _matrix(info: TensorInfo, quantization: Quantization | None) -> Matrix:
    rows, columns = info.shape
    if info.name.endswith(PACKED_SUFFIX):
        columns *= codes_per_word(info.name, quantization)
    form = narrow_form(info, quantization) or BF16
    fits = form == FP8 and fits_eight_bits(form, columns, _shared(info.name, columns, quantization))
    return Matrix(rows, columns, form, eight_bits=fits)


def _shared(name: str, columns: int, quantization: Quantization | None) -> int:
    """How many inputs of a matrix in FP8 share a scale (``loading/loader.py``)."""
    if isinstance(quantization, Fp8Format):
        return quantization.block_columns
    scheme = None
    if isinstance(quantization, CompressedFormat):
        scheme = quantization.scheme_of(name.removesuffix(".weight"))
    return (scheme.group_size or columns) if scheme is not None else 0
