"""The built-in catalog: official Qwen3-VL and three text-only models, known without a network.

It has the numbers of their config.json; names, shapes and dtypes of all tensors follow from them. int4
entries, and FP8 ones of text-only models, are what ``vlfit convert`` makes of the bf16 ones; ``variants`` are
what it makes with options for fewer bytes.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import groupby
from math import prod
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlfit.checkpoint.config import NO_TOKEN, ModelConfig, VisionConfig
from vlfit.checkpoint.conversions import size_saving_options, with_weights_format
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.checkpoint.tensors import (
    COMPRESSED_SCALE_SUFFIX,
    FP8_SCALE_SUFFIX,
    PACKED_SUFFIX,
    TensorGroup,
    expected_tensor_shapes,
    quantized_format,
)
from vlfit.checkpoint.text_config import TextConfig
from vlfit.models.registry import spec_of

BF16 = "bf16"
FORMATS = (BF16, FP8, INT4)  # from the most to the least exact
# Made for vectors and scores, not to chat: no plan proposes them unless one is named.
POOLED_EDITIONS = ("Embedding", "Reranker")
_SOURCE = Path("catalog")  # these tensors lie in no file
_BYTES = {"BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A known checkpoint. ``name``: on the hub, or of the folder that ``vlfit convert`` writes.

    ``family``: name without edition and format, such as ``Qwen3-VL-4B``. ``edition``: Instruct, Thinking,
    Embedding, Reranker or "". ``weights``: bf16, fp8 or int4. ``converted_from``: hub name of the checkpoint
    that ``vlfit convert`` makes this one from; "" for a published one. ``convert_options``: flags for that,
    besides ``--weights``.
    """

    name: str
    family: str
    edition: str
    weights: str
    config: ModelConfig
    converted_from: str = ""
    convert_options: str = ""

    @property
    def convert_command(self) -> str:
        """The ``vlfit convert`` command that makes this checkpoint; "" for a published one."""
        if not self.converted_from:
            return ""
        return f"vlfit convert {self.converted_from} --weights {self.weights} {self.convert_options}".rstrip()

    @property
    def tensor_groups(self) -> list[TensorGroup]:
        """The tensors of the checkpoint's files, grouped over layers; see ``tensor_groups_of``."""
        return tensor_groups_of(self.config)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the checkpoint's files by name; see ``tensors_of``."""
        return tensors_of(self.config)


def tensors_of(config: ModelConfig) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint with ``config``, by name, computed without any file.

    Dtypes, shapes and order are those of the official files and of ``vlfit convert``. ``TensorInfo.file`` and
    the offsets are made up; ``TensorInfo.bytes`` is right.
    """
    tensors: dict[str, TensorInfo] = {}
    for _, groups in groupby(tensor_groups_of(config), lambda group: group.example.name.partition(".0.")[0]):
        of_layer = list(groups)
        for names in zip(*(group.names for group in of_layer), strict=True):  # layer by layer
            tensors |= {
                name: replace(group.example, name=name) for name, group in zip(names, of_layer, strict=True)
            }
    return tensors


def tensor_groups_of(config: ModelConfig) -> list[TensorGroup]:
    """The tensors of ``tensors_of``, grouped over text layers and vision blocks: much faster to compute."""
    text, vision = replace(config.text, num_hidden_layers=1), config.vision
    counts = {f"{text.prefix}.layers": config.text.num_hidden_layers}
    if vision is not None:
        modules = spec_of(config.model_type).vision_modules
        if modules is not None:
            counts[modules.blocks] = vision.depth
        vision = replace(vision, depth=1)
    shapes = expected_tensor_shapes(replace(config, text=text, vision=vision))
    packed = [name.removesuffix(PACKED_SUFFIX) for name in shapes if name.endswith(PACKED_SUFFIX)]
    shapes |= {f"{module}.weight_shape": (2,) for module in packed}
    groups = []
    for name, shape in shapes.items():
        info = _info(name, _stored_type(name, shapes), shape)
        layers, _, suffix = name.partition(".0.")
        names = (
            [f"{layers}.{index}.{suffix}" for index in range(counts[layers])] if layers in counts else [name]
        )
        groups.append(TensorGroup(info, quantized_format(info, config.quantization), names))
    return groups


@lru_cache(maxsize=1)
def entries() -> tuple[CatalogEntry, ...]:
    """Known models in each weights format, published or made by ``vlfit convert`` with default options.

    Vision models first, large before small; for each model, the most exact weights first. Cached.
    """
    return tuple(_entries())


@lru_cache(maxsize=1)
def variants() -> tuple[CatalogEntry, ...]:
    """For each FP8 and int4 entry, the smaller ones that further options of ``vlfit convert`` make.

    For each entry, the most exact first. Cached.
    """
    return tuple(_variants())


def _variants() -> Iterator[CatalogEntry]:
    for entry in entries():
        for options in size_saving_options(entry.config, entry.weights):
            name = f"{entry.name.rpartition('/')[2]}{options.name_suffix}"
            yield replace(
                entry,
                name=name,
                config=with_weights_format(entry.config, entry.weights, options),
                converted_from=entry.converted_from or entry.name,
                convert_options=options.cli_options(tied=entry.config.tie_word_embeddings),
            )


def find_entry(name: str) -> CatalogEntry | None:
    """The entry or variant ``name``, with or without its owner, in any case; None if it is unknown."""
    wanted = name.lower()
    for entry in (*entries(), *variants()):
        if wanted in (entry.name.lower(), entry.name.lower().rpartition("/")[2]):
            return entry
    return None


def family_entries(name: str) -> list[CatalogEntry]:
    """The Instruct entries of a family in every format, for a name without format: ``Qwen3-VL-4B`` or ``4B``.

    Empty for any other name.
    """
    owner, _, short = name.lower().removesuffix("-instruct").rpartition("/")
    return [
        entry
        for entry in entries()
        if entry.edition == "Instruct"
        and owner in ("", (entry.converted_from or entry.name).lower().partition("/")[0])
        and short in (entry.family.lower(), entry.family.lower().rpartition("-")[2])
    ]


def _info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype, shape, _SOURCE, 0, prod(shape) * _BYTES[dtype])


def _stored_type(name: str, shapes: dict[str, tuple[int, ...]]) -> str:
    if name + FP8_SCALE_SUFFIX in shapes or name.removesuffix(".weight") + COMPRESSED_SCALE_SUFFIX in shapes:
        return "F8_E4M3"
    if name.endswith(".weight_shape"):
        return "I64"
    return "I32" if name.endswith((PACKED_SUFFIX, ".weight_zero_point")) else "BF16"


def _entries() -> Iterator[CatalogEntry]:
    for size in ("8B", "4B", "2B"):
        for edition in ("Instruct", "Thinking"):
            name = f"Qwen/Qwen3-VL-{size}-{edition}"
            yield from _in_each_format(name, f"Qwen3-VL-{size}", edition, _QWEN3_VL[size], (BF16, FP8))
    for kind in POOLED_EDITIONS:
        for size in ("8B", "2B"):
            family = f"Qwen3-VL-{kind}-{size}"
            # An embedding model has no output head in its files, though config.json of 8B says so.
            config = (
                _QWEN3_VL[size] if kind == "Reranker" else replace(_QWEN3_VL[size], tie_word_embeddings=True)
            )
            yield from _in_each_format(f"Qwen/{family}", family, kind, config, (BF16,))
    for name, config in _TEXT_ONLY.items():
        yield from _in_each_format(name, name.rpartition("/")[2], "", config, (BF16,))


def _in_each_format(
    name: str, family: str, edition: str, config: ModelConfig, published: tuple[str, ...]
) -> Iterator[CatalogEntry]:
    """Entries of the model ``name``; formats that are not ``published`` are made by vlfit convert."""
    for weights in FORMATS:
        full_name = name if weights == BF16 else f"{name}-{weights.upper()}"
        converted = weights not in published
        yield CatalogEntry(
            full_name.rpartition("/")[2] if converted else full_name,
            family,
            edition,
            weights,
            with_weights_format(config, weights),
            name if converted else "",
        )


def _qwen3_vl(
    *, hidden: int, intermediate: int, layers: int, heads: int, tied: bool, vision: VisionConfig
) -> ModelConfig:
    """A Qwen3-VL config from what differs between 2B, 4B and 8B."""
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
# The numbers of config.json of Qwen/Qwen3-VL-{2B,4B,8B}-Instruct; the Thinking editions have the same. The
# Embedding and Reranker models were trained from these. Of theirs, 2B's config.json is known from public logs
# and is the same; 8B's is taken to be, and no file of theirs was at hand: not verified. That 8B lacks its
# output head is in QwenLM/Qwen3-VL-Embedding#89.
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


def _text_only(
    model_type: str,
    *,
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    eps: float = 1e-5,
    theta: float = 1e4,
    tied: bool = False,
    attention_bias: bool = False,
    fused_projections: bool = False,
    window: int | None = None,
) -> ModelConfig:
    """A text-only config from what differs between the ones below."""
    text = TextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        rms_norm_eps=eps,
        rope_theta=theta,
        mrope_section=(),
        attention_bias=attention_bias,
        hidden_act="silu",
        prefix="model",
        query_key_norm=False,
        fused_projections=fused_projections,
        sliding_windows=(window,) * layers if window is not None else (),
    )
    return ModelConfig(text, None, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN, tied, None, model_type)


# The numbers of their config.json.
_TEXT_ONLY = {
    "meta-llama/Llama-2-7b-hf": _text_only(
        "llama",
        vocabulary=32000,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=32,
        context=4096,
    ),
    "microsoft/Phi-3-mini-4k-instruct": _text_only(
        "phi3",
        vocabulary=32064,
        hidden=3072,
        intermediate=8192,
        layers=32,
        heads=32,
        kv_heads=32,
        context=4096,
        fused_projections=True,
        window=2047,
    ),
    "Qwen/Qwen2.5-3B-Instruct": _text_only(
        "qwen2",
        vocabulary=151936,
        hidden=2048,
        intermediate=11008,
        layers=36,
        heads=16,
        kv_heads=2,
        context=32768,
        eps=1e-6,
        theta=1e6,
        tied=True,
        attention_bias=True,
    ),
}


# --- names as people write them: a pasted address, a shortened or misspelt name


_HUBS = ("huggingface.co", "www.huggingface.co", "hf.co")
# First segments of the hub's addresses that are not owners of models.
_OTHER_PAGES = ("datasets", "spaces", "docs", "papers", "collections", "blog", "models", "api")
_REVISION_SEGMENTS = ("tree", "blob", "resolve", "raw")
_MIN_SIMILARITY = 0.5  # of ``difflib``: "5B" is as close to "4B", "gpt2" is not


def hub_name_of(name: str) -> str:
    """``org/name`` or ``org/name@revision`` for the address of a model's page or file on the hub.

    Any other ``name`` is returned unchanged. The server in ``HF_ENDPOINT`` counts as the hub, too.
    """
    text = name.strip()
    if "/" not in text:
        return name
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
    except ValueError:  # half an address of IPv6, say
        return name
    path = [unquote(part) for part in parts.path.split("/") if part]
    mirror = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    is_hub = parts.hostname in _HUBS or (mirror and text.startswith(f"{mirror}/"))
    if not is_hub or len(path) < 2 or path[0] in _OTHER_PAGES:
        return name
    repository = "/".join(path[:2]).removesuffix(".git")  # as git clone takes it
    if len(path) > 3 and path[2] in _REVISION_SEGMENTS and path[3] != "main":
        return f"{repository}@{path[3]}"
    return repository


def entries_of_short_name(name: str) -> list[CatalogEntry]:
    """The entries, one per weights format, of the one model that a shortened ``name`` means.

    ``4B-FP8``, ``qwen3-vl:4b`` and ``Phi-3-mini`` are consecutive words of an entry's name; without an
    edition (or ``embedding``, ``reranker``) they mean Instruct. Empty if no model or several models match,
    for a single word, and for a name with its owner (org/name), which the hub may have.
    """
    wanted = _name_words(name)
    if "/" in name or len(wanted) < 2:
        return []
    found = [entry for entry in entries() if _contains_run(_entry_words(entry), wanted)]
    found = found or [entry for entry in variants() if _entry_words(entry)[-len(wanted) :] == wanted]
    unnamed = [each for each in ("Thinking", *POOLED_EDITIONS) if each.lower() not in wanted]
    found = [entry for entry in found if entry.edition not in unnamed]
    return found if len({(entry.family, entry.edition) for entry in found}) == 1 else []


def similar_names(name: str, others: Iterable[str] = ()) -> list[str]:
    """Up to three names, of the catalog or of ``others``, that are spelt similarly to ``name``.

    The closest first; empty if none is similar enough.
    """
    names: dict[str, str] = {}
    for other in others:
        names.setdefault(other.lower().rpartition("/")[2], other)
    for entry in entries():
        names.setdefault("-".join(_name_words(entry.name)), entry.name)
        names.setdefault(entry.name.lower().rpartition("/")[2], entry.name)
        size = entry.family.lower().rpartition("-")[2]
        if entry.edition == "Instruct":
            names.setdefault(size, size.upper())
            names.setdefault(f"{size}-{entry.weights}", f"{size.upper()}-{entry.weights.upper()}")
    wanted = name.partition("@")[0].lower().rpartition("/")[2].replace(":", "-")
    found = [names[key] for key in get_close_matches(wanted, names, 6, cutoff=_MIN_SIMILARITY)]
    return list(dict.fromkeys(found))[:3]


def _name_words(name: str) -> list[str]:
    """Lower-case words of a name, without its owner and without "instruct", the default."""
    words = re.split(r"[^a-z0-9.]+", name.lower().rpartition("/")[2])
    return [word for word in words if word and word != "instruct"]


def _entry_words(entry: CatalogEntry) -> list[str]:
    return [*_name_words(entry.name), *([BF16] if entry.weights == BF16 else [])]


def _contains_run(words: list[str], run: list[str]) -> bool:
    return any(words[start : start + len(run)] == run for start in range(len(words)))
