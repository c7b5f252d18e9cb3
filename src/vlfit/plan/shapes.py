"""A model for the planner: its shapes, and the bytes of its weights as the native engine loads them.

The loader keeps FP8 scales in float32, repeats a head's norm for each head, and skips some tensors.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module
from typing import Protocol

from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.config import ModelConfig, VisionConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import FP8, CompressedFormat, Fp8Format, Quantization
from vlfit.checkpoint.tensors import (
    COMPRESSED_SUFFIXES,
    FP8_SCALE_SUFFIX,
    G_IDX_SUFFIX,
    PACKED_SUFFIX,
    TensorGroup,
    count_parameters_of_groups,
    group_tensors,
    is_draft,
    is_embedding,
    is_text_layer,
    is_vision,
    matrix_columns,
    quantized_format,
    weights_format_of_groups,
)
from vlfit.checkpoint.text_config import TextConfig
from vlfit.models import cache_spec
from vlfit.models.cache_spec import CacheSpec, State
from vlfit.models.registry import cache_spec_of, spec_of
from vlfit.plan.allocator import (
    arena_allocation_sizes,
    engine_tensor_sizes,
    reserved_bytes,
    separate_tensor_sizes,
)
from vlfit.units import MIB

HALF = 2  # bytes of bfloat16 and float16, in which everything is computed on a GPU
SINGLE = 4  # bytes of float32
INDEX = 8  # bytes of an int64
# For each logit of a row that is sampled on the host: in float32, scores, order, sorted copies, probabilities
# (``engine/sampling/sampler.py``).
HOST_SAMPLER_BYTES = 68
GROUP = 128  # inputs that share a scale, in rows that are rounded to FP8 and in weights
# Of a layer with a gated delta net.
DELTA_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
LAYER_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
JOINED_PARTS = dict.fromkeys(LAYER_PARTS[:3], "qkv_proj") | dict.fromkeys(LAYER_PARTS[4:6], "gate_up_proj")
_SHARE_INPUTS = ("k_proj", "v_proj", "up_proj")  # with the one before them
HEAD = "lm_head"
FROM_HEADERS = "read from its headers"  # ``Model.known_by`` of a checkpoint whose files were looked at
# Not loaded: redundant shapes, scales of activations, rotary frequencies, which are computed.
_NOT_LOADED = (".weight_shape", ".input_scale", ".inv_freq")
# Tensors from the first size on have segments of their own, in multiples of the second (``allocator.py``).
_ROUNDED_FROM, _ROUNDED_TO = 10 * MIB, 2 * MIB


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weights of a linear layer with ``rows`` outputs and ``columns`` inputs.

    - ``form``: bf16, fp8, int8 or int4.
    - ``act_order``: stored in GPTQ's activation order, so the inputs are reordered before the GEMM.
    - ``fp8_gemm``: FP8 tensor cores can use the scales as stored (``has_fp8_gemm_scales``).
    """

    rows: int
    columns: int
    form: str
    act_order: bool = False
    fp8_gemm: bool = False

    @property
    def num_weights(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, eq=False)  # compared by identity, which makes it a key
class ModelFiles:
    """Config and tensors of a checkpoint, from which its RAM on a CPU is counted (``native/ram.py``)."""

    config: ModelConfig
    groups: Sequence[TensorGroup]

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the files by name, in the order of their groups; places in files are made up."""
        return {
            name: replace(group.example, name=name) if name != group.example.name else group.example
            for group in self.groups
            for name in group.names
        }


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint for the planner. Sizes in bytes, as the native engine loads the weights on a GPU.

    - ``family``: one for all formats of a model. ``weights``: the format. ``source``: what commands name to
      load the checkpoint: a folder or a name on the hub. ``known_by``: where the sizes come from, in words.
    - ``vision``: None for a text-only model.
    - ``text_bytes``, ``vision_bytes``, ``embedding_bytes``: weights, by ledger line. The last is the
      embedding table and, if it has weights of its own (``own_head``), the output head.
    - ``table_bytes``: of ``embedding_bytes`` the table of tokens if the output head has weights of its own,
      so that it need not be on a GPU; else 0.
    - ``draft_bytes``: weights that only draft tokens (multi-token prediction), in none of the above;
      ``draft_cache``: what their layers cache, beside ``cache_spec``.
    - ``layer``: the matrices of a text layer with attention by ``LAYER_PARTS``. If layers differ, the
      costliest of each. ``delta``: those of a layer with a gated delta net by ``DELTA_PARTS``, or empty.
      ``text_matrices``: the matrices of all text layers, each with how many there are.
    - ``sizes``: of the engine's tensors by name, in order of allocation.
    - ``rounding``: bytes added if torch rounds each tensor of 10 MiB and more up to 2 MiB.
    - ``pool``: bytes that torch reserves beyond the weights once they are loaded. ``pool_without_table``: the
      same if ``table_bytes`` are not on the GPU. ``separate_pool``: the same in transformers, which does not
      join tensors; 0 unless in bf16.
    - ``converted_from``: the checkpoint that ``vlfit convert`` makes this one of, "" if this one exists;
      ``convert_options``: options of that command beside the format, which cost accuracy.
    - ``tower_is_quantized``: some weights of the vision tower have fewer than 16 bits.
    - ``file_bytes``: bytes of all tensors in the files.
    - ``max_image_tokens``: of a picture, by the checkpoint's own settings; None: unknown.
    - ``gguf_type``: of a GGUF model: its type, such as ``Q4_K_M``, which ``weights`` then is; "" for others.
      ``without_tower``: why no vision tower beside its file fits, a clause; "" if one does, or none is there.
    - ``head_bytes``: of the output head, which may be the embedding table; counted for GGUF models only.
    - ``files``: what all of this was counted from; None only in tests.
    """

    name: str
    family: str
    weights: str
    parameters: int
    text: TextConfig
    cache_spec: CacheSpec
    vision: VisionConfig | None
    text_bytes: int
    vision_bytes: int
    embedding_bytes: int
    rounding: int
    pool: int
    separate_pool: int
    layer: Mapping[str, Matrix]
    head: Matrix
    known_by: str
    converted_from: str = ""
    source: str = ""
    convert_options: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    own_head: bool = True
    tower_is_quantized: bool = False
    max_image_tokens: int | None = None
    file_bytes: int = 0
    gguf_type: str = ""
    without_tower: str = ""
    head_bytes: int = 0
    text_matrices: tuple[tuple[Matrix, int], ...] = ()
    delta: Mapping[str, Matrix] = field(default_factory=dict)
    table_bytes: int = 0
    draft_bytes: int = 0
    draft_cache: CacheSpec = ()
    pool_without_table: int = 0
    files: ModelFiles | None = field(default=None, compare=False, repr=False)

    def caches(self, *, drafts: bool) -> CacheSpec:
        """What all layers cache that the native engine runs, with ``drafts`` those that draft, too."""
        return (*self.cache_spec, *self.draft_cache) if drafts else self.cache_spec

    @property
    def convert_command(self) -> str:
        """The ``vlfit convert`` command that makes this checkpoint; "" if it exists."""
        if not self.converted_from:
            return ""
        words = f"vlfit convert {shlex.quote(self.converted_from)} --weights {self.weights}"
        return f"{words} {self.convert_options}".rstrip()

    @property
    def head_is_rounded(self) -> bool:
        """Whether the output head's weights have fewer than 16 bits."""
        return self.head.form != BF16

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on a GPU, without what the allocator adds."""
        return self.text_bytes + self.vision_bytes + self.embedding_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, in a bf16 KV cache."""
        return kv_bytes_per_token(self.cache_spec, BF16)

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of one sequence's recurrent states; 0 if no layer keeps one."""
        return cache_spec.state_bytes_per_sequence(self.cache_spec)

    @property
    def state_bytes_per_step(self) -> int:
        """Bytes of one sequence's recurrent states that a decode step reads and writes."""
        states = [layer for layer in self.cache_spec if isinstance(layer, State)]
        parts = [part for layer in states for part in layer.tensors if not part.name.startswith("pending_")]
        return 2 * sum(part.nbytes for part in parts)

    @property
    def num_weights_per_token(self) -> int:
        """Number of weights that a token passes through: matrices of all text layers and the output head."""
        return sum(matrix.num_weights * count for matrix, count in self.text_matrices) + self.head.num_weights


def model_of(
    name: str,
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo] | list[TensorGroup],
    known_by: str,
    *,
    family: str = "",
    converted_from: str = "",
    source: str = "",
    convert_options: str = "",
    max_image_tokens: int | None = None,
    gguf_type: str = "",
) -> Model:
    """The ``Model`` of a checkpoint.

    ``tensors``: by name, as in the headers, or groups of equal tensors. ``family``: "" for ``name`` without
    the owner before its slash. ``source``: "" for ``name``. Other parameters become the fields of the same
    name.
    """
    kinds = tensors if isinstance(tensors, list) else group_tensors(tensors, config.quantization)
    text = config.text
    wide = spec_of(config.model_type).float32_tensors
    left_out = (f"{HEAD}.",) if config.tie_word_embeddings else ()  # then it is the embedding
    loaded: dict[str, int] = {}
    parts = {"text": 0, "vision": 0, "embedding": 0, "draft": 0}
    rounding = 0
    for kind in kinds:
        if kind.example.name.endswith(_NOT_LOADED) or kind.example.name.startswith(left_out):
            continue
        size, count = _loaded_bytes(kind.example, text, wide), len(kind.names)
        part = ledger_part(kind.example.name)
        parts[part] += count * size
        if part == "draft":
            continue
        loaded |= dict.fromkeys(kind.names, size)
        rounding += count * (-size % _ROUNDED_TO) if size >= _ROUNDED_FROM else 0
    total, sizes = sum(parts.values()) - parts["draft"], engine_tensor_sizes(loaded)
    table = [] if config.tie_word_embeddings else [name for name in loaded if is_embedding(name)]
    table_bytes = sum(loaded[name] for name in table)
    pool = reserved_bytes(arena_allocation_sizes(sizes)) - total
    elsewhere = {name: size for name, size in sizes.items() if name not in table}
    weights = gguf_type or weights_format_of_groups(kinds)
    head = _head_names(config, loaded) if gguf_type else ()
    return Model(
        name=name,
        family=family or name.rpartition("/")[2],
        weights=weights,
        parameters=count_parameters_of_groups(kinds, config.quantization),
        text=text,
        cache_spec=cache_spec_of(config),
        vision=config.vision,
        text_bytes=parts["text"],
        vision_bytes=parts["vision"],
        embedding_bytes=parts["embedding"],
        rounding=rounding,
        pool=pool,
        separate_pool=reserved_bytes(separate_tensor_sizes(loaded).values()) - total
        if weights == BF16
        else 0,
        layer=_layer_matrices(text, kinds, config.quantization),
        head=_head(config, kinds),
        known_by=known_by,
        converted_from=converted_from,
        source=source or name,
        convert_options=convert_options,
        sizes=sizes,
        file_bytes=sum(kind.example.bytes * len(kind.names) for kind in kinds),
        max_image_tokens=max_image_tokens,
        own_head=not config.tie_word_embeddings,
        tower_is_quantized=any(kind.format and ledger_part(kind.example.name) == "vision" for kind in kinds),
        gguf_type=gguf_type,
        head_bytes=sum(loaded[name] for name in head),
        delta=_delta_matrices(kinds, config.quantization),
        text_matrices=_text_matrices(text, kinds, config.quantization),
        table_bytes=table_bytes,
        draft_bytes=parts["draft"],
        draft_cache=text.draft_cache if parts["draft"] else (),
        pool_without_table=reserved_bytes(arena_allocation_sizes(elsewhere)) - (total - table_bytes)
        if table
        else pool,
        files=ModelFiles(config, kinds),
    )


def kv_bytes_per_token(spec: CacheSpec, kv_dtype: str, value_bytes: int = HALF) -> int:
    """Bytes of one token's keys and values in all layers, in the native engine's KV cache.

    ``kv_dtype`` "fp8": a byte per value, and a scale of two bytes per head (``layers/kv_cache.py``); else
    ``value_bytes`` per value.
    """
    return cache_spec.kv_bytes_per_token(spec, value_bytes, fp8=kv_dtype == FP8)


class TowerCost(Protocol):
    """Memory and arithmetic of a vision tower that computes in 16 bits.

    Each model family implements it for its own tower (``models/FAMILY/cost.py``); ``tower_cost`` finds it.
    ``image_tokens``: of the one picture that is encoded.
    """

    max_unsplit_patches: int  # images of more patches run the feed-forward in two halves
    min_pixels: int  # the image processor enlarges smaller pictures to this size

    def feature_bytes(self, vision: VisionConfig, image_tokens: int) -> int:
        """Bytes of the features of one encoded picture."""
        ...

    def peak_bytes(self, vision: VisionConfig, image_tokens: int, scratch: int) -> int:
        """Peak bytes of tensors while one picture of at most ``image_tokens`` is encoded, without weights.

        ``scratch``: bytes of the buffer into which quantized weights are dequantized; 0: none.
        """
        ...

    def graph_bytes(self, vision: VisionConfig, image_tokens: int, workspace: int, scratch: int) -> int:
        """Bytes that torch reserves for CUDA graphs of the tower's blocks.

        ``image_tokens``: of the largest picture. ``workspace``: bytes of cuBLAS's workspace. ``scratch``: as
        in ``peak_bytes``.
        """
        ...

    def flops(self, vision: VisionConfig, image_tokens: int) -> float:
        """Floating-point operations to encode one picture."""
        ...

    def vllm_peak_values(self, vision: VisionConfig, image_tokens: int, cards: int) -> int:
        """Number of values (not bytes) on each card at the peak of vLLM's tower.

        ``cards``: over how many the feed-forwards are split; 1: not split.
        """
        ...


def tower_cost(vision: VisionConfig) -> TowerCost:
    """The ``TowerCost`` of the model family that ``vision`` belongs to; imports that family's module."""
    return _tower_cost_of(vision.model_type)


@cache  # a plan asks for it some hundred times
def _tower_cost_of(model_type: str) -> TowerCost:
    cost: TowerCost = import_module(spec_of(model_type).cost).TOWER_COST
    return cost


def feature_bytes(vision: VisionConfig, image_tokens: int) -> int:
    """Bytes of the features of one encoded picture."""
    return tower_cost(vision).feature_bytes(vision, image_tokens)


def pass_input_bytes(model: Model, rows: int, logit_rows: int) -> int:
    """Bytes of the input tensors of a text pass, which live until it ends.

    ``rows``: tokens of the pass; ``logit_rows``: those whose logits are computed. Counts hidden states,
    cosines and sines, and five int64 a token; if the model takes pictures, also ``rows`` rows of image
    features.
    """
    text = model.text
    size = rows * (HALF * text.hidden_size + 2 * HALF * text.head_dim + 5 * INDEX) + (logit_rows + 1) * INDEX
    if model.vision is not None:
        size += feature_bytes(model.vision, rows) + rows * INDEX
    return size


def has_fp8_gemm_scales(form: str, inputs: int, inputs_per_scale: int) -> bool:
    """Whether FP8 tensor cores can multiply a matrix of ``inputs`` inputs with weights in ``form``.

    ``inputs_per_scale``: how many inputs share a scale; it must be ``GROUP``, as for activations, or all of
    them. False for any ``form`` but fp8.
    """
    return form == FP8 and inputs % GROUP == 0 and (inputs_per_scale == GROUP or inputs_per_scale >= inputs)


def _loaded_bytes(info: TensorInfo, text: TextConfig, wide: tuple[str, ...]) -> int:
    """Bytes that the engine allocates for one tensor of the files (``loading/loader.py``).

    ``wide``: endings of names of tensors that are float32.
    """
    value = SINGLE if wide and info.name.endswith(wide) and not is_vision(info.name) else HALF
    if info.name.endswith(".q_norm.weight"):  # a row for each head (``models/decoder.py``)
        return text.num_attention_heads * info.count * value
    if info.name.endswith(".k_norm.weight"):
        return text.num_key_value_heads * info.count * value
    if info.name.endswith(FP8_SCALE_SUFFIX):
        return info.count * SINGLE
    if info.name.endswith(G_IDX_SUFFIX) and any(f".{part}." in info.name for part in _SHARE_INPUTS):
        return 0  # matrices that share their inputs share the order
    if info.dtype in ("F8_E4M3", "I8") or info.name.endswith(COMPRESSED_SUFFIXES):
        return info.loaded_bytes
    return info.count * value


def ledger_part(tensor: str) -> str:
    """The part of the model that a tensor belongs to: ``text``, ``vision``, ``embedding`` or ``draft``.

    Its bytes are on the ledger line ``weights.PART``; the output head counts as ``embedding``. ``draft``:
    multi-token prediction.
    """
    if is_vision(tensor):
        return "vision"
    if is_draft(tensor):
        return "draft"
    return "embedding" if is_embedding(tensor) or tensor.startswith(f"{HEAD}.") else "text"


def _layer_matrices(
    text: TextConfig, kinds: list[TensorGroup], quantization: Quantization | None
) -> dict[str, Matrix]:
    """The matrices of a layer by ``LAYER_PARTS``; files may store some of them joined (Phi-3)."""
    keys = text.num_key_value_heads * text.head_dim
    rows = {"q_proj": text.num_attention_heads * text.head_dim, "k_proj": keys, "v_proj": keys}
    rows |= {"gate_proj": text.intermediate_size, "up_proj": text.intermediate_size}
    parts: dict[str, list[TensorInfo]] = {}
    for kind in kinds:
        if not is_draft(kind.example.name):
            parts.setdefault(kind.example.name.rpartition(".")[0].rpartition(".")[2], []).append(kind.example)
    is_joined = JOINED_PARTS["q_proj"] in parts
    found = {}
    for part in LAYER_PARTS:
        stored = JOINED_PARTS.get(part, part) if is_joined else part
        whole = _costliest_matrix(stored, parts[stored], quantization)
        found[part] = replace(whole, rows=rows.get(part, whole.rows)) if is_joined else whole
    return found


def _delta_matrices(kinds: list[TensorGroup], quantization: Quantization | None) -> dict[str, Matrix]:
    """The matrices of a layer with a gated delta net by ``DELTA_PARTS``; empty if there is none."""
    parts: dict[str, list[TensorInfo]] = {}
    for kind in kinds:
        part = kind.example.name.rpartition(".")[0].rpartition(".")[2]
        if part in DELTA_PARTS and is_text_layer(kind.example.name):
            parts.setdefault(part, []).append(kind.example)
    return {part: _costliest_matrix(part, parts[part], quantization) for part in DELTA_PARTS if part in parts}


def _text_matrices(
    text: TextConfig, kinds: list[TensorGroup], quantization: Quantization | None
) -> tuple[tuple[Matrix, int], ...]:
    """The matrices of all text layers, each with how many layers have it."""
    layers = f"{text.prefix}.layers."
    found: dict[Matrix, int] = {}
    for kind in kinds:
        info = kind.example
        if (
            info.name.startswith(layers)
            and info.name.endswith((".weight", PACKED_SUFFIX))
            and len(info.shape) == 2
        ):
            matrix = _matrix(info, quantization)
            found[matrix] = found.get(matrix, 0) + len(kind.names)
    return tuple(found.items())


def _costliest_matrix(part: str, tensors: list[TensorInfo], quantization: Quantization | None) -> Matrix:
    endings = (f".{part}.weight", f".{part}{PACKED_SUFFIX}")
    found = [_matrix(info, quantization) for info in tensors if info.name.endswith(endings)]
    # Layers may be stored in several formats (a converter skips what it cannot divide): the costliest counts.
    costliest = max(found, key=lambda matrix: (matrix.form != BF16, not matrix.fp8_gemm, matrix.num_weights))
    act_order = any(info.name.endswith(f".{part}{G_IDX_SUFFIX}") for info in tensors)
    return replace(costliest, act_order=act_order)


def _head(config: ModelConfig, kinds: list[TensorGroup]) -> Matrix:
    """The output head: the table of tokens itself where they are tied."""
    for info in (kind.example for kind in kinds):
        name = info.name
        ours = is_embedding(name) if config.tie_word_embeddings else name.startswith(f"{HEAD}.")
        if ours and name.endswith((".weight", PACKED_SUFFIX)):
            return _matrix(info, config.quantization)
    return Matrix(config.text.vocab_size, config.text.hidden_size, BF16)


def _head_names(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """The tensors of the output head among ``names``: those of the table of tokens where they are tied."""
    if config.tie_word_embeddings:
        return [name for name in names if is_embedding(name)]
    return [name for name in names if name.startswith(f"{HEAD}.")]


def _matrix(info: TensorInfo, quantization: Quantization | None) -> Matrix:
    rows, columns = info.shape[0], matrix_columns(info, quantization)
    form = quantized_format(info, quantization) or BF16
    fits = form == FP8 and has_fp8_gemm_scales(
        form, columns, _inputs_per_scale(info.name, columns, quantization)
    )
    return Matrix(rows, columns, form, fp8_gemm=fits)


def _inputs_per_scale(name: str, columns: int, quantization: Quantization | None) -> int:
    """How many inputs of an FP8 matrix share a scale (``loading/loader.py``)."""
    if isinstance(quantization, Fp8Format):
        return quantization.block_columns
    scheme = None
    if isinstance(quantization, CompressedFormat):
        scheme = quantization.scheme_of(name.removesuffix(".weight"))
    return (scheme.group_size or columns) if scheme is not None else 0
