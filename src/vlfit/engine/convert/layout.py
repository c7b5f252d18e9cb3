"""What a converted checkpoint will hold, before anything is computed: tensors, files and their exact bytes.

Knows: which layers are converted, the names that both forms give their parts, how tensors fill files, and the
``quantization_config`` that says so. Does not know: values.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from vlfit.checkpoint.headers import SINGLE_FILE, TensorInfo
from vlfit.checkpoint.quantization import (
    COMPRESSED_METHOD,
    FP8,
    FP8_METHOD,
    INT4,
    INT4_METHOD,
    PACKED_FORMAT,
    Fp8Format,
    WeightScheme,
)
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import SCALE_SUFFIX, is_text_layer, linear_weights, plain_tensors
from vlfit.errors import UsageError

_ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "I32": 4, "I64": 8}
HEAD = "lm_head.weight"
_BLOCK = 128  # of the official FP8 checkpoints


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the new checkpoint. ``dtype`` is the word of the safetensors format."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor of the old checkpoint and what becomes of it: itself, or the parts that stand for it."""

    source: TensorInfo
    pieces: tuple[Piece, ...]
    converted: bool

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, its jobs, what stands before the first tensor, and where each piece goes."""

    name: str
    jobs: tuple[Job, ...]
    head: bytes
    places: dict[str, tuple[int, int]]  # first byte in the file, and the byte after the last


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is converted into what: the linear layers of the text model, and if ``head`` the output head."""

    form: Fp8Format | WeightScheme
    head: bool

    def converts(self, name: str, columns: int) -> bool:
        """Whether the linear weight ``name`` with ``columns`` inputs is converted.

        FP8 has partial blocks; int4 has no partial groups, so a layer that they do not divide stays as it is.
        """
        return self.wants(name) and (isinstance(self.form, Fp8Format) or self.form.divides(columns))

    def wants(self, name: str) -> bool:
        """Whether the linear weight ``name`` is one of those that should be converted."""
        return is_text_layer(name) or (self.head and name == HEAD)


def new_recipe(checkpoint: Checkpoint, weights: str, group_size: int, *, head: bool) -> Recipe:
    """The recipe that ``weights`` (``fp8`` or ``int4``) means for ``checkpoint``.

    Raises ``UsageError`` when it has fewer than 16 bits already, no layer that fits the form, or no ``head``
    that the form has a place for.
    """
    if checkpoint.config.quantization is not None or checkpoint.weights_format in (FP8, INT4):
        raise UsageError(
            f"{checkpoint.name} is in {checkpoint.weights_format} already",
            "Convert the original with 16-bit weights: what was rounded once only gets worse.",
        )
    if head and weights == FP8:
        raise UsageError("the FP8 form keeps the output head in 16 bits", "Leave out --head, or take int4.")
    if head and checkpoint.config.tie_word_embeddings:
        raise UsageError(
            f"{checkpoint.name} has no output head of its own: it is the embedding (tied)",
            "Leave out --head.",
        )
    if weights == FP8:
        return Recipe(Fp8Format(_BLOCK, _BLOCK, ()), head)
    recipe = Recipe(WeightScheme(4, group_size), head)
    if not any(recipe.converts(name, columns) for name, (_, columns) in _linears(checkpoint).items()):
        raise UsageError(
            f"no layer of {checkpoint.name} has inputs in whole groups of {group_size}",
            "Try --group-size 32, or --weights fp8.",
        )
    return recipe


def _linears(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    return linear_weights(plain_tensors(checkpoint.config))


def kept_layers(checkpoint: Checkpoint, recipe: Recipe) -> list[str]:
    """The linear layers of the text model that the form cannot hold."""
    return [
        name.removesuffix(".weight")
        for name, (_, columns) in _linears(checkpoint).items()
        if recipe.wants(name) and not recipe.converts(name, columns)
    ]


def jobs(checkpoint: Checkpoint, recipe: Recipe) -> list[Job]:
    """What becomes of each tensor, in the order of the old files."""
    linears = _linears(checkpoint)
    found = []
    for name, info in checkpoint.tensors.items():
        if name in linears and recipe.converts(name, linears[name][1]):
            found.append(Job(info, tuple(_pieces(recipe.form, name, *linears[name])), converted=True))
        else:
            found.append(Job(info, (Piece(name, info.dtype, info.shape, info.bytes),), converted=False))
    return found


def _pieces(form: Fp8Format | WeightScheme, name: str, rows: int, columns: int) -> Iterator[Piece]:
    if isinstance(form, Fp8Format):
        yield _piece(name, "F8_E4M3", (rows, columns))
        yield _piece(name + SCALE_SUFFIX, "BF16", form.scale_shape(rows, columns))
        return
    module = name.removesuffix(".weight")
    dtypes = {"weight_packed": "I32", "weight_scale": "BF16"}
    for part, shape in form.stored(rows, columns).items():
        yield _piece(f"{module}.{part}", dtypes[part], shape)
    yield _piece(f"{module}.weight_shape", "I64", (2,))


def _piece(name: str, dtype: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, dtype, shape, prod(shape) * _ITEM_BYTES[dtype])


def shards(all_jobs: list[Job], limit: int) -> list[Shard]:
    """Files of at most ``limit`` bytes of tensors (more only where one alone takes more), in order."""
    files: list[list[Job]] = []
    filled = limit
    for job in all_jobs:
        if not files or filled + job.bytes > limit:
            files.append([])
            filled = 0
        files[-1].append(job)
        filled += job.bytes
    if len(files) == 1:
        return [_shard(SINGLE_FILE, files[0])]
    count = len(files)
    return [
        _shard(f"model-{number:05d}-of-{count:05d}.safetensors", file) for number, file in enumerate(files, 1)
    ]


def _shard(name: str, file_jobs: list[Job]) -> Shard:
    # Wide types first: then every tensor starts at a multiple of its type's size, as readers like it.
    pieces = [piece for job in file_jobs for piece in job.pieces]
    pieces.sort(key=lambda piece: -piece.bytes // max(prod(piece.shape), 1))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends: dict[str, int] = {}
    end = 0
    for piece in pieces:
        offsets = [end, end + piece.bytes]
        header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": offsets}
        end = ends[piece.name] = end + piece.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    places = {
        piece.name: (len(head) + ends[piece.name] - piece.bytes, len(head) + ends[piece.name])
        for piece in pieces
    }
    return Shard(name, tuple(file_jobs), head, places)


def index(files: list[Shard]) -> dict[str, Any]:
    """What ``model.safetensors.index.json`` says about several files."""
    homes = {name: file.name for file in files for name in file.places}
    total = sum(job.bytes for file in files for job in file.jobs)
    return {"metadata": {"total_size": total}, "weight_map": homes}


def quantization_config(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    """The ``quantization_config`` that other programs recognize the form by."""
    plain = plain_tensors(checkpoint.config)
    linears = linear_weights(plain)
    form = recipe.form
    # A tied head is named too: programs have a module for it all the same.
    kept = [] if recipe.head else ["lm_head"]
    for name, shape in plain.items():
        module = name.removesuffix(".weight")
        is_kept = name not in linears or not recipe.converts(name, shape[1])
        if name.endswith(".weight") and len(shape) > 1 and is_kept and module not in kept:
            kept.append(module)
    if isinstance(form, Fp8Format):
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": kept,
            "quant_method": FP8_METHOD,
            "weight_block_size": [form.block_rows, form.block_columns],
        }
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": form.group_size,
        "num_bits": 4,
        "observer": "mse",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": form.symmetric,
        "type": "int",
    }
    group = {
        "format": PACKED_FORMAT,
        "input_activations": None,
        "output_activations": None,
        # To vLLM the output head is no linear layer: it goes by its name.
        "targets": ["Linear", "re:.*lm_head$"] if recipe.head else ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": PACKED_FORMAT,
        "global_compression_ratio": None,
        "ignore": [module for module in kept if f"{module}.weight" in linears or module == "lm_head"],
        "kv_cache_scheme": None,
        "quant_method": COMPRESSED_METHOD,
        "quantization_status": "compressed",
    }
