"""Checkpoints that vlfit knows without a network: the official Qwen3-VL, and three text-only models.

Knows: their configs (the numbers of the official ``config.json`` files), from which every tensor's name,
shape and type follows as in the published files: no size is written down here. int4 entries are what ``vlfit
convert`` makes of the bf16 ones, ``variants`` what it makes with options that round more. Does not know:
whether the files are on this disk, or anything about memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

from vlfit.checkpoint.config import ModelConfig, TextConfig, VisionConfig
from vlfit.checkpoint.conversions import in_format, roundings
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.checkpoint.tensors import COMPRESSED_SCALE, PACKED_SUFFIX, SCALE_SUFFIX, expected_tensors

BF16 = "bf16"
FORMATS = (BF16, FP8, INT4)  # from the most to the least exact
_SOURCE = Path("catalog")  # these tensors lie in no file
_BYTES = {"BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class TextOnlyConfig:
    """A decoder without eyes: Llama's layout. ``attention_bias``: q, k and v have one (Qwen2.5).

    ``window``: a token sees so many back, as in ``decoder.TextConfig``; None: all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A checkpoint by its config. ``name`` is its name on the hub; for int4 the folder that convert writes.

    ``family`` is shared by the same model in other formats: ``Qwen3-VL-4B``. ``edition``: Instruct, Thinking
    or "". ``converted_from``: the hub name of the checkpoint that ``vlfit convert`` makes this one of;
    ``convert_options``: what it is told besides ``--weights``.
    """

    name: str
    family: str
    edition: str
    weights: str
    config: ModelConfig | TextOnlyConfig
    converted_from: str = ""
    convert_options: str = ""

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of its files: name, type, shape and bytes; where in a file is not known."""
        if isinstance(self.config, TextOnlyConfig):
            return {name: _info(name, "BF16", shape) for name, shape in _text_only_tensors(self.config)}
        return tensors_of(self.config)


def tensors_of(config: ModelConfig) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint with ``config``, as the official files and ``vlfit convert`` have them."""
    shapes = expected_tensors(config)
    tensors = {name: _info(name, _stored_type(name, shapes), shape) for name, shape in shapes.items()}
    for name in [name for name in tensors if name.endswith(PACKED_SUFFIX)]:
        shape_name = name.removesuffix(PACKED_SUFFIX) + ".weight_shape"
        tensors[shape_name] = _info(shape_name, "I64", (2,))
    return tensors


@lru_cache(maxsize=1)
def entries() -> tuple[CatalogEntry, ...]:
    """The whole catalog: best model first, and of one model the most exact weights first."""
    return tuple(_entries())


@lru_cache(maxsize=1)
def variants() -> tuple[CatalogEntry, ...]:
    """The FP8 and int4 entries in still fewer bytes, by options of ``vlfit convert``, the mildest first."""
    return tuple(_variants())


def _variants() -> Iterator[CatalogEntry]:
    for entry in entries():
        if not isinstance(entry.config, ModelConfig):
            continue
        for rounding in roundings(entry.config, entry.weights):
            name = f"{entry.name.removeprefix('Qwen/')}{rounding.ending}"
            yield replace(
                entry,
                name=name,
                config=in_format(entry.config, entry.weights, rounding),
                converted_from=entry.converted_from or entry.name,
                convert_options=f"{rounding.options(tied=entry.config.tie_word_embeddings)} --out {name}",
            )


def find(name: str) -> CatalogEntry | None:
    """The entry called ``name``: whole, or without what stands before the slash; case does not matter."""
    wanted = name.lower()
    for entry in (*entries(), *variants()):
        if wanted in (entry.name.lower(), entry.name.lower().rpartition("/")[2]):
            return entry
    return None


def family(name: str) -> list[CatalogEntry]:
    """The entries of a model in every format, for names that leave it open: ``Qwen3-VL-4B`` or ``4B``.

    Both editions have the same sizes; the Instruct one stands for both.
    """
    wanted = name.lower().removeprefix("qwen/").removesuffix("-instruct")
    return [
        entry
        for entry in entries()
        if entry.edition == "Instruct"
        and wanted in (entry.family.lower(), entry.family.lower().rpartition("-")[2])
    ]


def _info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype, shape, _SOURCE, 0, prod(shape) * _BYTES[dtype])


def _stored_type(name: str, shapes: dict[str, tuple[int, ...]]) -> str:
    if name + SCALE_SUFFIX in shapes or name.removesuffix(".weight") + COMPRESSED_SCALE in shapes:
        return "F8_E4M3"
    return "I32" if name.endswith((PACKED_SUFFIX, ".weight_zero_point")) else "BF16"


def _entries() -> Iterator[CatalogEntry]:
    for size in ("8B", "4B", "2B"):
        for edition in ("Instruct", "Thinking"):
            for weights in FORMATS:
                plain = f"Qwen/Qwen3-VL-{size}-{edition}"
                name = plain + ("" if weights == BF16 else f"-{weights.upper()}")
                config = in_format(_QWEN3_VL[size], weights)
                if weights == INT4:
                    local = name.removeprefix("Qwen/")
                    yield CatalogEntry(local, f"Qwen3-VL-{size}", edition, weights, config, plain)
                else:
                    yield CatalogEntry(name, f"Qwen3-VL-{size}", edition, weights, config)
    for name, text_only in _TEXT_ONLY.items():
        yield CatalogEntry(name, name.rpartition("/")[2], "", BF16, text_only)


def _qwen3_vl(
    *, hidden: int, intermediate: int, layers: int, heads: int, tied: bool, vision: VisionConfig
) -> ModelConfig:
    """What 2B, 4B and 8B have in common, around what they differ in. ``head_dim`` is 128 in all of them."""
    text = TextConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        mrope_section=(24, 20, 20),
        attention_bias=False,
        hidden_act="silu",
    )
    return ModelConfig(text, vision, 151655, 151656, 151652, 151653, tied, None)


def _vision(
    *, depth: int, hidden: int, intermediate: int, deepstack: tuple[int, ...], out: int
) -> VisionConfig:
    return VisionConfig(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=16,
        in_channels=3,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=out,
        num_position_embeddings=2304,
        deepstack_visual_indexes=deepstack,
        hidden_act="gelu_pytorch_tanh",
    )


_SMALL_TOWER = {"depth": 24, "hidden": 1024, "intermediate": 4096}
# The numbers of config.json of Qwen/Qwen3-VL-{2B,4B,8B}-Instruct; the Thinking editions have the same.
_QWEN3_VL = {
    "2B": _qwen3_vl(
        hidden=2048,
        intermediate=6144,
        layers=28,
        heads=16,
        tied=True,
        vision=_vision(**_SMALL_TOWER, deepstack=(5, 11, 17), out=2048),
    ),
    "4B": _qwen3_vl(
        hidden=2560,
        intermediate=9728,
        layers=36,
        heads=32,
        tied=True,
        vision=_vision(**_SMALL_TOWER, deepstack=(5, 11, 17), out=2560),
    ),
    "8B": _qwen3_vl(
        hidden=4096,
        intermediate=12288,
        layers=36,
        heads=32,
        tied=False,
        vision=_vision(depth=27, hidden=1152, intermediate=4304, deepstack=(8, 16, 24), out=4096),
    ),
}
# Vocabulary, hidden, intermediate, layers, heads, key/value heads, head_dim, positions, tied, bias,
# window: the numbers of their config.json.
# Phi-3's attention slides over 2,047 of its 4,096 positions, so that is the longest context it runs with.
_TEXT_ONLY = {
    "meta-llama/Llama-2-7b-hf": TextOnlyConfig(32000, 4096, 11008, 32, 32, 32, 128, 4096, False, False),
    "microsoft/Phi-3-mini-4k-instruct": TextOnlyConfig(
        32064, 3072, 8192, 32, 32, 32, 96, 2047, False, False, 2047
    ),
    "Qwen/Qwen2.5-3B-Instruct": TextOnlyConfig(151936, 2048, 11008, 36, 16, 2, 128, 32768, True, True),
}


def _text_only_tensors(config: TextOnlyConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Llama's names. Phi-3 joins q, k and v, and gate and up, into one tensor each: the same bytes."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{layer}.self_attn.{name}.weight", (rows, hidden)
            if config.attention_bias:
                yield f"{layer}.self_attn.{name}.bias", (rows,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
