"""The folder of a new checkpoint: written beside its place, and put there whole or not at all.

Knows: safetensors files written piece by piece, the small files that go along, and how a folder appears at
once. Does not know: what the pieces are or how they are made.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vlfit.checkpoint.headers import SINGLE_FILE, TensorInfo
from vlfit.checkpoint.quantization import FLOAT_FORMAT, PACKED_FORMAT, Fp8Format
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import COMPRESSED_SCALE, SCALE_SUFFIX
from vlfit.errors import UsageError, VlfitError
from vlfit.quantize.recipe import HEAD, Form, Recipe, roundable
from vlfit.units import MIB, format_bytes

# What a converted checkpoint will hold, before anything is computed: tensors, files and their exact bytes.
#
# Knows: what becomes of each tensor, the names that the forms give their parts, and how tensors fill files.
# Does not know: values, or what was chosen and why (``recipe.py``).


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


ORIGINAL_CARD = "README.original.md"
_SMALL = (".json", ".jinja", ".txt", ".model")
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
_COPIED_AT_ONCE = 16 * MIB
# The card, and that a file takes whole blocks of the disk: a few KiB. The weights' bytes are known exactly.
_RESERVE = MIB // 4


@contextmanager
def new_folder(target: Path, source: Path, *, replace: bool) -> Iterator[Path]:
    """A folder to write into; when the block ends well, it becomes ``target``, else it is removed.

    A program that is killed leaves a folder named ``.NAME.PID.incomplete``, which the next one to write
    ``target`` removes, unless another process of that number runs by then.
    Raises ``UsageError`` when ``target`` is taken and not to be replaced, or must not be.
    """
    target = target.resolve()
    _check_target(target, source.resolve(), replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    work = target.parent / f".{target.name}.{os.getpid()}.incomplete"
    work.mkdir()
    try:
        yield work
        _put_in_place(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already when all went well


def _check_target(target: Path, source: Path, *, replace: bool) -> None:
    if target == source or target in source.parents or source in target.parents:
        raise UsageError(
            f"{target} is, holds, or lies in the checkpoint that is to be converted ({source})",
            "Give another folder with --out.",
        )
    if not os.path.lexists(target) or _is_empty_folder(target):
        return
    if not replace:
        raise UsageError(
            f"{target} is there already", "Give another place with --out, or --force to replace it."
        )
    if not (target / "config.json").is_file():
        raise UsageError(
            f"{target} is no checkpoint: it holds no config.json, so --force does not delete it",
            "Give another place with --out, or remove it yourself.",
        )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _remove_leftovers(target: Path) -> None:
    """Remove what conversions to the same place left that were killed."""
    # An old checkpoint that was being replaced is the only one until the new one is there.
    kinds = ("incomplete", "old") if target.exists() else ("incomplete",)
    for path in target.parent.iterdir():
        number, _, kind = path.name.removeprefix(f".{target.name}.").partition(".")
        if path.name != f".{target.name}.{number}.{kind}" or kind not in kinds or not number.isdecimal():
            continue
        # Ours, too: nothing has been written yet, and in a container numbers come again with every start.
        if int(number) == os.getpid() or not _is_running(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, so there is one
    return True


def _put_in_place(work: Path, target: Path) -> None:
    if not os.path.lexists(target) or _is_empty_folder(target):
        work.rename(target)
        return
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    try:
        target.rename(old)
        work.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_disk(folder: Path, needed: int) -> None:
    """Raises ``VlfitError`` when the disk of ``folder`` has no room for ``needed`` bytes and a few more."""
    free = shutil.disk_usage(folder).free
    if free < needed + _RESERVE:
        raise VlfitError(
            f"{folder.parent} has {format_bytes(free)} free; the new checkpoint takes {format_bytes(needed)} "
            f"(and {format_bytes(_RESERVE)} must be left for its card)",
            "Make room, or give a place on another disk with --out.",
        )


def cannot_write(target: Path, error: OSError) -> VlfitError:
    """What to tell a person when ``error`` ended the writing of ``target``; its folder is removed by then."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Make room, or give a place on another disk with --out. What was written has been removed."
        return VlfitError(f"the disk is full: {target} was not written", hint)
    if error.errno == errno.EFBIG:
        hint = (
            "A single file may not grow so large here (a limit of the shell, see `ulimit -f`, or of the file "
            "system): write smaller ones with --shard-mib, or to another place with --out."
        )
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Give a folder that you may write to with --out."
    else:
        hint = "Nothing was left behind. Try another place with --out."
    named = f" ({error.filename})" if error.filename else ""
    return VlfitError(f"cannot write {target}: {error.strerror or error}{named}", hint)


def small_bytes(source: Path) -> int:
    """What ``copy_small_files`` will write."""
    return sum(path.stat().st_size for path, _ in _small_files(source))


def copy_small_files(source: Path, folder: Path) -> None:
    """Tokenizer, picture settings, templates and licences; not config.json, which changes, nor weights.

    The card is kept under another name: what it says of files and scores is about the original.
    """
    for path, name in _small_files(source):
        shutil.copyfile(path, folder / name)


def _small_files(source: Path) -> Iterator[tuple[Path, str]]:
    """Files that go along, each with its new name."""
    for path in sorted(source.iterdir()):
        name = path.name
        wanted = name.endswith(_SMALL) or name.upper().startswith(_LEGAL)
        if name == "README.md":
            yield path, ORIGINAL_CARD
        elif wanted and path.is_file() and name != "config.json" and not name.endswith(".index.json"):
            yield path, name


class ShardWriter:
    """Writes one safetensors file whose sizes are known before. A context manager.

    Pieces may come in any order, and each in several parts one after the other, so that no more than one part
    has to be in memory. Leaving the block brings the file to the disk.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self._shard = shard
        self._next = {name: start for name, (start, _) in shard.places.items()}
        self._file = (folder / shard.name).open("xb")

    def __enter__(self) -> "ShardWriter":
        self._file.write(self._shard.head)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._check_whole()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def append(self, name: str, part: bytes | memoryview) -> None:
        """The next bytes of the piece ``name``."""
        view = memoryview(part).cast("B")
        start = self._next[name]
        if start + len(view) > self._shard.places[name][1]:
            raise ValueError(f"{name}: more bytes than its place in {self._shard.name} has")
        self._file.seek(start)
        self._file.write(view)
        self._next[name] = start + len(view)

    def copy(self, info: TensorInfo, name: str) -> None:
        """The tensor ``info`` as its file has it, under ``name``."""
        with info.file.open("rb") as source:
            source.seek(info.start)
            left = info.bytes
            while left:
                part = source.read(min(left, _COPIED_AT_ONCE))
                if not part:
                    raise OSError(f"{info.file} ended early: it is being changed")
                self.append(name, part)
                left -= len(part)

    def _check_whole(self) -> None:
        for name, (_, end) in self._shard.places.items():
            if self._next[name] != end:
                raise ValueError(f"{name}: {end - self._next[name]} bytes were never written")


def write_text(path: Path, text: str) -> None:
    """Write a small file that takes part in the promise: on the disk before the folder has its name."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
