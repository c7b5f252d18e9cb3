"""The built-in catalog: official Qwen3-VL, Qwen3.5 and three text-only models, known without a network.

It has the numbers of their config.json (``catalog_configs.py``); names, shapes and dtypes of all tensors
follow from them. int4 entries, and FP8 ones of all but Qwen3-VL, are what ``vlfit convert`` makes of the bf16
ones; ``variants`` are what it makes with options for fewer bytes.
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

from vlfit.checkpoint.catalog_configs import QWEN3_VL, TEXT_ONLY, qwen3_5
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.conversions import size_saving_options, with_weights_format
from vlfit.checkpoint.headers import TensorInfo, dtype_bytes
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.checkpoint.tensors import (
    COMPRESSED_SCALE_SUFFIX,
    FP8_SCALE_SUFFIX,
    PACKED_SUFFIX,
    TensorGroup,
    expected_tensor_shapes,
    quantized_format,
)
from vlfit.models.registry import spec_of

BF16 = "bf16"
FORMATS = (BF16, FP8, INT4)  # from the most to the least exact
# Made for vectors and scores, not to chat: no plan proposes them unless one is named.
POOLED_EDITIONS = ("Embedding", "Reranker")
CHAT_EDITIONS = ("", "Instruct")  # what a name without an edition means
_SOURCE = Path("catalog")  # these tensors lie in no file
_LAYER_NUMBER = re.compile(r"\.\d+\.")


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
    def series(self) -> str:
        """The family's name without its size: ``Qwen3-VL``."""
        return self.family.rpartition("-")[0]

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
    for _, groups in groupby(tensor_groups_of(config), lambda group: _list_and_number(group.example.name)[0]):
        of_list = [(name, group.example) for group in groups for name in group.names]
        of_list.sort(key=lambda each: _list_and_number(each[0])[1])  # layer by layer
        tensors |= {name: replace(example, name=name) for name, example in of_list}
    return tensors


def _list_and_number(name: str) -> tuple[str, int]:
    """The list of layers or blocks that a tensor is in, and its layer's number; else ``name`` and 0."""
    found = _LAYER_NUMBER.search(name)
    return (name[: found.start()], int(found[0].strip("."))) if found else (name, 0)


def tensor_groups_of(config: ModelConfig) -> list[TensorGroup]:
    """The tensors of ``tensors_of``, grouped over text layers and vision blocks: much faster to compute."""
    text, vision, counts = config.text, config.vision, {}
    if len(set(text.cache_spec)) == 1:  # else layers differ, and all are needed
        counts[f"{text.prefix}.layers"] = text.num_hidden_layers
        text = replace(text, num_hidden_layers=1)
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
    return groups if counts.get(f"{text.prefix}.layers") else _joined_groups(groups)


def _joined_groups(groups: list[TensorGroup]) -> list[TensorGroup]:
    """``groups`` of single tensors, with those of equal layers in one; order of first appearance."""
    joined: dict[tuple[str, TensorInfo], TensorGroup] = {}
    for group in groups:
        key = _LAYER_NUMBER.sub(".*.", group.example.name), replace(group.example, name="")
        if key in joined:
            joined[key].names.extend(group.names)
        else:
            joined[key] = group
    return list(joined.values())


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
    """The entries of a vision family in every format, for a name without format: ``Qwen3-VL-4B`` or ``4B``.

    A size that several series have means the first of the catalog: ``4B`` is Qwen3-VL. Empty for any other
    name.
    """
    owner, _, short = name.lower().removesuffix("-instruct").rpartition("/")
    found = [
        entry
        for entry in entries()
        if entry.edition in CHAT_EDITIONS
        and entry.config.vision is not None
        and owner in ("", (entry.converted_from or entry.name).lower().partition("/")[0])
        and short in (entry.family.lower(), entry.family.lower().rpartition("-")[2])
    ]
    return [entry for entry in found if entry.family == found[0].family]


def _info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype, shape, _SOURCE, 0, dtype_bytes(dtype, prod(shape)))


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
            yield from _in_each_format(name, f"Qwen3-VL-{size}", edition, QWEN3_VL[size], (BF16, FP8))
    for size, config in qwen3_5().items():
        yield from _in_each_format(f"Qwen/Qwen3.5-{size}", f"Qwen3.5-{size}", "", config, (BF16,))
    for kind in POOLED_EDITIONS:
        for size in ("8B", "2B"):
            family = f"Qwen3-VL-{kind}-{size}"
            # An embedding model has no output head in its files, though config.json of 8B says so.
            config = (
                QWEN3_VL[size] if kind == "Reranker" else replace(QWEN3_VL[size], tie_word_embeddings=True)
            )
            yield from _in_each_format(f"Qwen/{family}", family, kind, config, (BF16,))
    for name, config in TEXT_ONLY.items():
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

    ``4B-FP8``, ``qwen3-vl:4b`` and ``Phi-3-mini`` are consecutive words of an entry's name, the first perhaps
    without its letters (``3.5-4B``); without an edition (or ``embedding``, ``reranker``) they mean Instruct.
    Of several series the first of the catalog is meant. Empty if no model or several models match, for a
    single word, and for a name with its owner (org/name), which the hub may have.
    """
    wanted = _name_words(name)
    if "/" in name or len(wanted) < 2:
        return []
    found = [entry for entry in entries() if _contains_run(_entry_words(entry), wanted)]
    found = found or [entry for entry in variants() if _entry_words(entry)[-len(wanted) :] == wanted]
    unnamed = [each for each in ("Thinking", *POOLED_EDITIONS) if each.lower() not in wanted]
    found = [entry for entry in found if entry.edition not in unnamed]
    found = [entry for entry in found if entry.series == found[0].series]
    return found if len({(entry.family, entry.edition) for entry in found}) == 1 else []


def vision_sizes() -> list[str]:
    """The sizes of the models that chat and take pictures, as short names have them, the smallest first."""
    found = {
        entry.family.rpartition("-")[2].upper()
        for entry in entries()
        if entry.edition in CHAT_EDITIONS and entry.config.vision is not None
    }
    return sorted(found, key=lambda size: float(size.removesuffix("B")))


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
        if entry.edition in CHAT_EDITIONS and entry.config.vision is not None:
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
    """Whether ``run`` are consecutive ``words``; its first may be the number at the end of a word."""
    return any(
        words[start + 1 : start + len(run)] == run[1:]
        and run[0] in (words[start], words[start].lstrip("abcdefghijklmnopqrstuvwxyz"))
        for start in range(len(words))
    )
