"""What a converted checkpoint will hold, before anything is computed: tensors, files and their exact bytes.

Knows: what becomes of each tensor, the names that the forms give their parts, and how tensors fill files.
Does not know: values, or what was chosen and why (``recipe.py``).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from vlfit.checkpoint.headers import SINGLE_FILE, TensorInfo
from vlfit.checkpoint.quantization import FLOAT_FORMAT, PACKED_FORMAT, Fp8Format
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import COMPRESSED_SCALE, SCALE_SUFFIX
from vlfit.engine.convert.recipe import HEAD, Form, Recipe, roundable

_ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the new checkpoint. ``dtype`` is the word of the safetensors format."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor of the old checkpoint and what becomes of it.

    ``form``: its values are rounded, and ``pieces`` stand for them; None: there is one piece, its bytes as
    they are, or in bfloat16 what they mean (``widened``). ``scale``: of a source in FP8, its scales.
    """

    source: TensorInfo
    pieces: tuple[Piece, ...]
    form: Form | None = None
    scale: TensorInfo | None = None
    widened: bool = False

    @property
    def bytes(self) -> int:
        """Written."""
        return sum(piece.bytes for piece in self.pieces)

    @property
    def stays_fp8(self) -> bool:
        """Whether it is a weight in FP8 that keeps its bytes."""
        return self.source.dtype == "F8_E4M3" and self.form is None and not self.widened

    @property
    def bytes_read(self) -> int:
        return self.source.bytes + (self.scale.bytes if self.scale else 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, its jobs, what stands before the first tensor, and where each piece goes."""

    name: str
    jobs: tuple[Job, ...]
    head: bytes
    places: dict[str, tuple[int, int]]  # first byte in the file, and the byte after the last


def jobs(checkpoint: Checkpoint, recipe: Recipe) -> list[Job]:
    """What becomes of each tensor, in the order of the old files."""
    shapes = roundable(checkpoint)
    # A copy of the embedding, which nobody reads, would stay behind in 16 bits.
    copied_head = f"{HEAD}.weight" if checkpoint.config.tie_word_embeddings and recipe.embedding else None
    found: list[Job] = []
    for name, info in checkpoint.tensors.items():
        if name != copied_head:
            found += _jobs(checkpoint, recipe, info, shapes.get(name))
    return found


def _jobs(
    checkpoint: Checkpoint, recipe: Recipe, info: TensorInfo, shape: tuple[int, int] | None
) -> Iterator[Job]:
    """What becomes of one tensor; of the scales of FP8 nothing, unless their weight keeps them."""
    name = info.name
    is_fp8 = info.dtype == "F8_E4M3"
    if recipe.keeps_text and (is_fp8 or name.endswith(SCALE_SUFFIX)):
        new_name = name.replace(f".weight{SCALE_SUFFIX}", COMPRESSED_SCALE)
        yield Job(info, (Piece(new_name, info.dtype, info.shape, info.bytes),))
        return
    if name.endswith(SCALE_SUFFIX):
        return
    scale = checkpoint.tensors[name + SCALE_SUFFIX] if is_fp8 else None
    form = recipe.form_of(name, shape[1]) if shape else None
    if form is not None and shape is not None:
        yield Job(info, tuple(_pieces(form, name, *shape)), form, scale)
    elif is_fp8:
        yield Job(info, (_piece(name, "BF16", info.shape),), None, scale, widened=True)
    else:
        yield Job(info, (Piece(name, info.dtype, info.shape, info.bytes),))


def _pieces(form: Form, name: str, rows: int, columns: int) -> Iterator[Piece]:
    """What stands for a weight: codes, scales, and for packed codes the shape that they do not tell."""
    if isinstance(form, Fp8Format):
        yield _piece(name, "F8_E4M3", (rows, columns))
        yield _piece(name + SCALE_SUFFIX, "BF16", form.scale_shape(rows, columns))
        return
    module = name.removesuffix(".weight")
    dtypes = {
        "weight": "F8_E4M3" if form.kind == FLOAT_FORMAT else "I8",
        "weight_packed": "I32",
        "weight_scale": "BF16",
    }
    for part, shape in form.stored(rows, columns).items():
        yield _piece(f"{module}.{part}", dtypes[part], shape)
    if form.kind == PACKED_FORMAT:
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
