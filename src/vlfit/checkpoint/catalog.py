"""Checkpoints that vlfit knows without a network: the official Qwen3-VL, and three text-only models.

Written down are their configs (the numbers of the official ``config.json`` files); every tensor's name, shape
and type follows from them, and so does every size. int4 entries, and FP8 ones of
text-only models, are what ``vlfit convert`` makes of the bf16 ones, ``variants`` what it makes with options
that round more.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import groupby
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from vlfit.checkpoint.config import NO_TOKEN, ModelConfig, VisionConfig
from vlfit.checkpoint.conversions import in_format, roundings
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.checkpoint.tensors import (
    COMPRESSED_SCALE,
    PACKED_SUFFIX,
    SCALE_SUFFIX,
    TensorGroup,
    expected_tensors,
    quantized_format,
)
from vlfit.checkpoint.text_config import TextConfig

BF16 = "bf16"
FORMATS = (BF16, FP8, INT4)  # from the most to the least exact
_SOURCE = Path("catalog")  # these tensors lie in no file
_BYTES = {"BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A checkpoint by its config. ``name`` is its name on the hub, or the folder that convert writes.

    ``family`` is shared by the same model in other formats: ``Qwen3-VL-4B``. ``edition``: Instruct, Thinking
    or "". ``converted_from``: the hub name of the checkpoint that ``vlfit convert`` makes this one of;
    ``convert_options``: what it is told besides ``--weights``.
    """

    name: str
    family: str
    edition: str
    weights: str
    config: ModelConfig
    converted_from: str = ""
    convert_options: str = ""

    @property
    def kinds(self) -> list[TensorGroup]:
        """Every tensor of its files, by kinds."""
        return kinds_of(self.config)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of its files: name, type, shape and bytes; where in a file is not known."""
        return tensors_of(self.config)


def tensors_of(config: ModelConfig) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint with ``config``, as the official files and ``vlfit convert`` have them."""
    tensors: dict[str, TensorInfo] = {}
    for _, kinds in groupby(kinds_of(config), lambda kind: kind.one.name.partition(".0.")[0]):
        alike = list(kinds)
        for names in zip(*(kind.names for kind in alike), strict=True):  # layer by layer
            tensors |= {name: replace(kind.one, name=name) for name, kind in zip(names, alike, strict=True)}
    return tensors


def kinds_of(config: ModelConfig) -> list[TensorGroup]:
    """The kinds of ``tensors_of``: there all layers are stored alike, and so are all blocks of the tower."""
    text, vision = replace(config.text, num_hidden_layers=1), config.vision
    counts = {f"{text.prefix}.layers": config.text.num_hidden_layers}
    if vision is not None:
        counts["model.visual.blocks"] = vision.depth
        vision = replace(vision, depth=1)
    shapes = expected_tensors(replace(config, text=text, vision=vision))
    packed = [name.removesuffix(PACKED_SUFFIX) for name in shapes if name.endswith(PACKED_SUFFIX)]
    shapes |= {f"{module}.weight_shape": (2,) for module in packed}
    kinds = []
    for name, shape in shapes.items():
        info = _info(name, _stored_type(name, shapes), shape)
        layers, _, rest = name.partition(".0.")
        names = (
            [f"{layers}.{index}.{rest}" for index in range(counts[layers])] if layers in counts else [name]
        )
        kinds.append(TensorGroup(info, quantized_format(info, config.quantization), names))
    return kinds


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
    if name.endswith(".weight_shape"):
        return "I64"
    return "I32" if name.endswith((PACKED_SUFFIX, ".weight_zero_point")) else "BF16"


def _entries() -> Iterator[CatalogEntry]:
    for size in ("8B", "4B", "2B"):
        for edition in ("Instruct", "Thinking"):
            name = f"Qwen/Qwen3-VL-{size}-{edition}"
            yield from _in_each_format(name, f"Qwen3-VL-{size}", edition, _QWEN3_VL[size], (BF16, FP8))
    for name, config in _TEXT_ONLY.items():
        yield from _in_each_format(name, name.rpartition("/")[2], "", config, (BF16,))


def _in_each_format(
    name: str, family: str, edition: str, config: ModelConfig, published: tuple[str, ...]
) -> Iterator[CatalogEntry]:
    """The model ``name`` of the hub, which has the formats ``published``; vlfit convert makes the others."""
    for weights in FORMATS:
        called = name if weights == BF16 else f"{name}-{weights.upper()}"
        made = weights not in published
        yield CatalogEntry(
            called.rpartition("/")[2] if made else called,
            family,
            edition,
            weights,
            in_format(config, weights),
            name if made else "",
        )


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
    return ModelConfig(text, vision, 151655, 151656, 151652, 151653, tied, None, "qwen3_vl")


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
        model_type="qwen3_vl",
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


def _text_only(model_type: str, text: TextConfig, *, tied: bool) -> ModelConfig:
    return ModelConfig(text, None, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN, tied, None, model_type)


# The numbers of their config.json.
_TEXT_ONLY = {
    "meta-llama/Llama-2-7b-hf": _text_only(
        "llama",
        TextConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            head_dim=128,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            mrope_section=(),
            attention_bias=False,
            hidden_act="silu",
            prefix="model",
            query_key_norm=False,
        ),
        tied=False,
    ),
    "microsoft/Phi-3-mini-4k-instruct": _text_only(
        "phi3",
        TextConfig(
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            head_dim=96,
            # Its attention slides over 2,047 of its 4,096 positions: the longest context it runs with.
            max_position_embeddings=2047,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            mrope_section=(),
            attention_bias=False,
            hidden_act="silu",
            prefix="model",
            query_key_norm=False,
            joined=True,
            window=2047,
        ),
        tied=False,
    ),
    "Qwen/Qwen2.5-3B-Instruct": _text_only(
        "qwen2",
        TextConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            mrope_section=(),
            attention_bias=True,
            hidden_act="silu",
            prefix="model",
            query_key_norm=False,
        ),
        tied=True,
    ),
}


# What a person may have meant by a name: a pasted address, a shortened or misspelt name of the catalog.
#
# A name that is not resolved here may still be one on the hub.


_HUBS = ("huggingface.co", "www.huggingface.co", "hf.co")
_REVISION_AFTER = ("tree", "blob", "resolve", "raw")
_CLOSE = 0.55  # of ``difflib``: "Qwen3-VL-4b-Intsruct" is closer, "gpt2" is not


def without_address(name: str) -> str:
    """``org/name`` or ``org/name@revision`` of a pasted page of the hub; anything else as it is."""
    text = name.strip()
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
    except ValueError:  # half an address of IPv6, say
        return name
    path = [part for part in parts.path.split("/") if part]
    if parts.hostname not in _HUBS or len(path) < 2:
        return name
    repository = "/".join(path[:2])
    if len(path) > 3 and path[2] in _REVISION_AFTER and path[3] != "main":
        return f"{repository}@{path[3]}"
    return repository


def meant(name: str) -> list[CatalogEntry]:
    """The entries of the one model of the catalog that a shortened ``name`` means; empty if it is not one.

    ``4B-FP8``, ``qwen3-vl:4b`` and ``Phi-3-mini`` are a run of an entry's own words; without an edition it is
    Instruct. A name with its owner (org/name) is never guessed at: the hub may have it.
    """
    wanted = _words(name)
    if "/" in name or len(wanted) < 2:
        return []
    found = [entry for entry in entries() if _has_run(_words_of(entry), wanted)]
    if "thinking" not in wanted:
        found = [entry for entry in found if entry.edition != "Thinking"]
    return found if len({(entry.family, entry.edition) for entry in found}) == 1 else []


def near(name: str) -> list[str]:
    """Names of the catalog that look like ``name``, the nearest first; at most three."""
    names: dict[str, str] = {}
    for entry in entries():
        names.setdefault("-".join(_words(entry.name)), entry.name)
        names.setdefault(entry.name.lower().rpartition("/")[2], entry.name)
    wanted = name.partition("@")[0].lower().rpartition("/")[2]
    found = [names[key] for key in get_close_matches(wanted, names, 6, cutoff=_CLOSE)]
    return list(dict.fromkeys(found))[:3]


def _words(name: str) -> list[str]:
    """The words of a name without its owner; "instruct" is what everything is that is not said otherwise."""
    words = re.split(r"[^a-z0-9.]+", name.lower().rpartition("/")[2])
    return [word for word in words if word and word != "instruct"]


def _words_of(entry: CatalogEntry) -> list[str]:
    return [*_words(entry.name), *([BF16] if entry.weights == BF16 else [])]


def _has_run(words: list[str], run: list[str]) -> bool:
    return any(words[start : start + len(run)] == run for start in range(len(words)))
