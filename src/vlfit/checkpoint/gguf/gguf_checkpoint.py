"""Open a GGUF model: make the folder that stands for it, read its config and tensors."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.gguf.file_layouts import MODEL_TYPES
from vlfit.checkpoint.gguf.file_names import is_mmproj_name, split_parts, stem_of
from vlfit.checkpoint.gguf.gguf_config import (
    GGUFConfig,
    check_tower,
    read_gguf_config,
)
from vlfit.checkpoint.gguf.gguf_folder import (
    FORMAT,
    SOURCES_FILE,
    GGUFKind,
    Sources,
    cache_folder,
    read_sources,
    sources_text,
    stamp,
)
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader, read_gguf_header
from vlfit.checkpoint.gguf.gguf_names import parse_gguf_config
from vlfit.checkpoint.gguf.gguf_tensors import GGUFFile, check_gguf_tensors, kind_of, normalize_gguf
from vlfit.checkpoint.gguf.gguf_vocabulary import GGUFVocabulary, read_vocabulary
from vlfit.checkpoint.gguf.stored_blocks import exact_form
from vlfit.checkpoint.gguf.tower_inside import has_tower_inside
from vlfit.checkpoint.headers import TensorInfo
from vlfit.errors import (
    BrokenShard,
    CannotWrite,
    CheckpointError,
    MissingFile,
    UnknownWeightsFormat,
    UsageError,
    VlfitError,
)
from vlfit.models.registry import read_config
from vlfit.units import format_bytes

_LAST_MATRIX = "mm.2.weight"  # of a vision tower; its rows are as wide as the text model
_PRECISIONS = ("BF16", "F16", "F32", "Q8_0")  # of vision towers, the most wanted first
_HELD_BYTES = 2  # of a weight that is computed with in 16 bits
_WORTH_SAYING = 1.1  # times the file's size
_MAX_REASONS = 3  # said of files that do not fit
_MAX_SMALL_TENSOR = 2**16  # bytes of a tensor that becomes part of the config


@dataclass(frozen=True, slots=True)
class _Tower:
    """A vision tower that may belong to a model."""

    path: Path
    header: GGUFHeader

    @property
    def precision(self) -> int:
        """Place of its matrices' type in ``_PRECISIONS``."""
        kind = self.header.tensors[_LAST_MATRIX].type
        return _PRECISIONS.index(kind) if kind in _PRECISIONS else len(_PRECISIONS)


def prepare_gguf(model: Path, mmproj: Path | None = None, *, name: str = "", named: bool = True) -> Path:
    """The folder that stands for a GGUF model (``gguf_folder.py``), made if it is not there yet.

    ``model``: its file, or any part of a split one. ``mmproj``: the file of its vision tower; None: the one
    in the same folder that belongs to the model (``find_tower``). ``named``: a person named ``mmproj``, so
    that it must fit; otherwise the model reads text only if neither it nor one beside the model does.
    ``name``: of the folder, as the model will be called; "": the file's name without its ending.

    Raises the errors of ``read_gguf_header``, ``read_gguf_config`` and ``read_vocabulary``; ``UsageError`` if
    several vision towers fit; ``MissingFile`` for a missing part; ``CannotWrite`` if the folder cannot be
    made.
    """
    parts = [path.absolute() for path in split_parts(model)]
    given = None if mmproj is None else mmproj.absolute()
    is_named = named and given is not None
    candidates = [given] if given is not None else []
    if not is_named:
        candidates += mmproj_files(parts[0].parent)
    called = re.sub(r"[^\w.-]+", "-", name or stem_of(parts[0].name)).lstrip(".-") or "model"
    folder = cache_folder() / _key([*parts, *candidates], is_named=is_named) / called
    if (folder / SOURCES_FILE).is_file():
        return folder
    headers = [read_gguf_header(path) for path in parts]
    text = join_headers(headers)
    files = [GGUFFile(path, header) for path, header in zip(parts, headers, strict=True)]
    choice = TowerChoice(given) if is_named else find_tower(text, parts[0].parent, given)
    towers = [] if choice.path is None else [GGUFFile(choice.path, read_gguf_header(choice.path))]
    try:
        config = _read_config(text, files, towers)
        tensors = _read_tensors(config, files, towers)
    except CheckpointError as error:
        if is_named or not towers or not blames(error, towers[0].header):
            raise
        choice, towers = TowerChoice(None, none_fits([error.message])), []
        config = _read_config(text, files, towers)
        tensors = _read_tensors(config, files, towers)
    left_out = [f"{text.name} reads text only, as {choice.left_out}"] if choice.left_out else []
    config = replace(config, notes=(*config.notes, *left_out, *_growth_notes(tensors)))
    no_tower = "" if towers else _why_without(text, choice)
    sources = Sources(tuple(parts), tuple(each.path for each in towers), config.notes, no_tower)
    _write_folder(folder, config, read_vocabulary(text), sources)
    return folder


def _read_config(text: GGUFHeader, files: list[GGUFFile], towers: list[GGUFFile]) -> GGUFConfig:
    vision = towers[0].header if towers else None
    return read_gguf_config(text, vision, lambda name: _read_small(files, name))


def _read_tensors(
    config: GGUFConfig, files: list[GGUFFile], towers: list[GGUFFile]
) -> Mapping[str, TensorInfo]:
    """The tensors of the model, checked against its config. Raises ``CheckpointError``."""
    tower = towers[0].header if towers else None
    parsed, tensors = normalize_gguf(parse_gguf_config(config.config, files[0].header, tower), files, towers)
    check_gguf_tensors(parsed, tensors, files, towers)
    return tensors


def _growth_notes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """What to say of weights that take more memory than in their file: a sentence, or nothing."""
    in_file = held = 0
    forms: dict[str, str] = {}
    for info in tensors.values():
        kept = exact_form(info.blocks.type) if info.blocks is not None else None
        size = info.loaded_bytes if kept is not None else info.count * _HELD_BYTES
        in_file, held = in_file + info.bytes, held + size
        if info.blocks is not None and size > info.bytes > 0:
            forms[info.blocks.type] = "16 bits" if kept is None else f"int{kept.bits}"
    if held < _WORTH_SAYING * in_file or not forms:
        return []
    names = ", ".join(f"{kind} in {form}" for kind, form in sorted(forms.items()))
    return [
        f"{format_bytes(in_file)} of weights in the file take {format_bytes(held)} on a GPU: "
        f"vlfit holds {names}"
    ]


def read_gguf_checkpoint(folder: Path) -> tuple[ModelConfig, dict[str, TensorInfo], GGUFKind]:
    """Config and tensors of the GGUF model that ``folder`` stands for, checked against each other; its kind.

    Raises ``CheckpointError``, also if its files are not the same any more.
    """
    sources = read_sources(folder)
    text = [GGUFFile(path, read_gguf_header(path)) for path in sources.model]
    mmproj = [GGUFFile(path, read_gguf_header(path)) for path in sources.mmproj]
    config, tensors = normalize_gguf(read_config(folder), text, mmproj)
    check_gguf_tensors(config, tensors, text, mmproj)
    return config, tensors, kind_of(text, mmproj)


def gguf_notes(folder: Path) -> tuple[str, ...]:
    """Notes to show when ``folder`` is opened: what its GGUF files lack, and weights that grow.

    () for any other folder. Raises ``CheckpointError``.
    """
    sources = gguf_sources(folder)
    return () if sources is None else sources.notes


def gguf_sources(folder: Path) -> Sources | None:
    """The GGUF files that ``folder`` stands for; None for any other folder. Raises ``CheckpointError``."""
    return read_sources(folder) if (folder / SOURCES_FILE).is_file() else None


# --- files of a model --------------------------------------------------------------------------------------


def join_headers(headers: Sequence[GGUFHeader]) -> GGUFHeader:
    """One header of all parts of a split model: the first's metadata, the tensors of all.

    Offsets stay those within each part. Raises ``BrokenShard`` if the parts do not belong together.
    """
    for number, header in enumerate(headers):
        count = header.fields.integer("split.count", 1, minimum=0)
        own = header.fields.integer("split.no", number, minimum=0)
        if max(count, 1) != len(headers) or own != number:
            raise BrokenShard(
                f"{header.name} says in its metadata (split.no, split.count) that it is part {own + 1} of "
                f"{max(count, 1)}; by its name it is part {number + 1} of {len(headers)}",
                "Files of a split model keep the names that they were published with. Fetch them again.",
            )
    first = headers[0]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if len(tensors) != sum(len(header.tensors) for header in headers):
        raise BrokenShard(f"parts of {first.name} have the same tensors", "Fetch all parts again.")
    return replace(first, tensors=tensors)


def _read_small(files: Iterable[GGUFFile], name: str) -> npt.NDArray[np.float32]:
    """The values of a small tensor: divisors of rotary frequencies."""
    file = next((each for each in files if name in each.header.tensors), None)
    if file is None:
        raise CheckpointError(f"there is no tensor {name}", "The file is damaged. Fetch it again.")
    tensor = file.header.tensors[name]
    if tensor.type != "F32" or tensor.nbytes > _MAX_SMALL_TENSOR:
        raise UnknownWeightsFormat(
            f"{file.path.name}: {name} is stored as {tensor.type}, {tensor.nbytes:,} bytes",
            "F32 is expected.",
        )
    with file.path.open("rb") as opened:
        opened.seek(tensor.offset)
        return np.frombuffer(opened.read(tensor.nbytes), "<f4")


# --- vision towers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TowerChoice:
    """The file with a model's vision tower. ``path``: None if no file fits.

    ``left_out``: why none of the files that were looked at fits, a clause; "" if one does, or none was there.
    """

    path: Path | None
    left_out: str = ""


def find_tower(text: GGUFHeader, folder: Path, given: Path | None = None) -> TowerChoice:
    """The file with the vision tower of the model ``text``.

    ``given``: the one that a program keeps with the model; it is taken if it fits. Else one of the mmproj
    files in ``folder``: of those that fit, the ones of the same base name and fine-tuning (Instruct,
    Thinking) first, then the one in the most precise 16 bits. Raises ``UsageError`` if towers of several
    models fit and none is of the same name.
    """
    if text.architecture not in MODEL_TYPES or has_tower_inside(text):
        return TowerChoice(None)
    reasons: list[str] = []
    if given is not None and _fitting_tower(text, given, reasons) is not None:
        return TowerChoice(given)
    others = [path for path in mmproj_files(folder) if path != given] if _takes_tower(text) else []
    fitting = [tower for path in others if (tower := _fitting_tower(text, path, reasons)) is not None]
    alike = [tower for tower in fitting if _edition(tower.header) == _edition(text)]
    if not alike and len({_edition(tower.header) for tower in fitting}) > 1:
        names = ", ".join(tower.path.name for tower in fitting)
        raise UsageError(
            f"several vision towers beside {text.name} have its shapes: {names}",
            "Name the one that came with the model: --mmproj FILE.",
        )
    best = min(alike or fitting, key=lambda tower: (tower.precision, tower.path.name), default=None)
    if best is not None:
        return TowerChoice(best.path)
    return TowerChoice(None, none_fits(reasons) if reasons else "")


def _takes_tower(text: GGUFHeader) -> bool:
    """Whether models of this architecture can have a vision tower in a file of its own."""
    return MODEL_TYPES.get(text.architecture, ("", None))[1] is not None and not has_tower_inside(text)


def blames(error: CheckpointError, header: GGUFHeader) -> bool:
    """Whether ``error`` is about the file with ``header``: its message begins with that name."""
    return error.message.startswith(header.name)


def none_fits(reasons: Sequence[str]) -> str:
    """A clause for all the files that were looked at; ``reasons`` say why each does not fit."""
    more = f"; {len(reasons) - _MAX_REASONS} more do not fit" if len(reasons) > _MAX_REASONS else ""
    return f"no vision tower beside it fits: {'; '.join(reasons[:_MAX_REASONS])}{more}"


def _why_without(text: GGUFHeader, choice: TowerChoice) -> str:
    """Why a model that could have a vision tower has none; "" for any other model."""
    if not _takes_tower(text):
        return ""
    return choice.left_out or f"no mmproj file lies beside {text.name}"


def mmproj_files(folder: Path) -> list[Path]:
    """The files of vision towers in ``folder``, by their names."""
    try:
        return sorted(path for path in folder.iterdir() if is_mmproj_name(path.name) and path.is_file())
    except OSError:
        return []


def _fitting_tower(text: GGUFHeader, path: Path, reasons: list[str]) -> _Tower | None:
    """The vision tower in ``path``, if it can be read and fits; else a sentence is added to ``reasons``."""
    try:
        header = read_gguf_header(path)
        check_tower(text, header)
    except VlfitError as error:
        reasons.append(error.message)
        return None
    return _Tower(path, header)


def _edition(header: GGUFHeader) -> tuple[str, ...]:
    """What tells models of the same shapes apart: base name and fine-tuning (Instruct, Thinking)."""
    named = (header.metadata.get(f"general.{key}") for key in ("basename", "finetune"))
    return tuple(str(value).lower() for value in named)


# --- the folder --------------------------------------------------------------------------------------------


def _key(files: Iterable[Path], *, is_named: bool) -> str:
    """A name for the folder of these files as they are now. ``is_named``: the vision tower must fit."""
    try:
        stamps = [stamp(path) for path in files]
    except OSError as error:
        raise MissingFile(f"{error.filename} cannot be read: {error.strerror}", "Check the path.") from None
    return hashlib.sha256(json.dumps([FORMAT, is_named, *stamps]).encode()).hexdigest()[:24]


def _write_folder(
    folder: Path,
    config: GGUFConfig,
    vocabulary: GGUFVocabulary,
    sources: Sources,
) -> None:
    """Write the small files, all at once: no other process sees half of them."""
    contents: dict[str, Any] = {
        "config.json": config.config,
        "tokenizer.json": vocabulary.tokenizer,
        "tokenizer_config.json": vocabulary.settings,
        "generation_config.json": vocabulary.generation,
        "preprocessor_config.json": config.preprocessor,
        "video_preprocessor_config.json": config.video,
    }
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent.parent)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent.parent) as place:
            made = Path(place) / folder.parent.name / folder.name
            made.mkdir(parents=True)
            for name, content in contents.items():
                if content is not None:
                    (made / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
            if vocabulary.chat_template:
                (made / "chat_template.jinja").write_text(vocabulary.chat_template, "utf-8")
            (made / SOURCES_FILE).write_text(sources_text(sources), "utf-8")
            folder.parent.mkdir(exist_ok=True)
            if not (folder / SOURCES_FILE).is_file():
                made.rename(folder)
    except OSError as error:
        if (folder / SOURCES_FILE).is_file():
            return  # another process made it meanwhile
        raise CannotWrite(
            f"the tokenizer of {sources.model[0].name} cannot be kept in {folder}: {error.strerror}",
            "Set XDG_CACHE_HOME to a folder that can be written.",
        ) from None


def _remove_stale(cache: Path) -> None:
    """Remove the folders of GGUF files that are gone or have changed."""
    with suppress(OSError):  # another process makes and removes folders meanwhile
        for found in cache.glob(f"[!.]*/*/{SOURCES_FILE}"):
            try:
                read_sources(found.parent)
            except VlfitError:
                shutil.rmtree(found.parent.parent, ignore_errors=True)
