"""The folder that stands for a GGUF model: the small files of a checkpoint, made from the metadata once.

It lies in ``XDG_CACHE_HOME/vlfit/gguf`` (``~/.cache``); the weights stay where they are, in the files that
``SOURCES_FILE`` lists. Everything that reads a checkpoint's folder (config, tokenizer, chat template, picture
sizes) reads this one. Other programs' folders are never written to.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlfit.checkpoint.fields import Fields
from vlfit.errors import CheckpointError, MissingFile

SOURCES_FILE = "gguf.json"
# Part of a folder's key: raised when the small files are made or checked otherwise, so that older ones are
# not read.
FORMAT = 4


@dataclass(frozen=True, slots=True)
class GGUFKind:
    """What a GGUF model says it is, for people.

    ``architectures``: of its file, then of its mmproj (``clip``), if it has one. ``file_type``: the type of
    its weights, such as ``Q4_K_M``, by ``general.file_type``, else the one that most weights have. ``type``:
    as its file's name has it (``UD-Q4_K_XL``), else ``file_type``. ``max_image_tokens``: of a picture, by the
    mmproj's own limit; None without one, or if it was not read. ``without_tower``: why no vision tower beside
    it fits, a clause; "" if one does, or none is there.
    """

    architectures: tuple[str, ...]
    file_type: str
    type: str
    max_image_tokens: int | None = None
    without_tower: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """The GGUF files that a folder stands for.

    ``model``: all parts of the text model, in order; ``mmproj``: those of the vision tower, () for a
    text-only model. ``notes``: what the files lack and where it was taken from instead, in sentences.
    ``no_tower``: why a model that could have a vision tower has none, a clause; else "".
    """

    model: tuple[Path, ...]
    mmproj: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    no_tower: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        return self.model + self.mmproj


def is_gguf_folder(folder: Path) -> bool:
    """Whether ``folder`` stands for a GGUF model: it has a ``SOURCES_FILE``."""
    return (folder / SOURCES_FILE).is_file()


def read_sources(folder: Path) -> Sources:
    """The files that ``folder`` stands for.

    Raises ``MissingFile`` if one is no longer there, or another one is in its place: then the folder was made
    from other metadata. ``CheckpointError`` for a broken ``SOURCES_FILE``.
    """
    fields = Fields.read(folder / SOURCES_FILE)
    parts = {}
    for name in ("model", "mmproj"):
        stamps = fields.values.get(name)
        if not isinstance(stamps, list):
            raise fields.field_error(name, "is missing", "a list of files")
        parts[name] = tuple(_check(Fields(each, SOURCES_FILE)) for each in stamps if isinstance(each, dict))
    return Sources(parts["model"], parts["mmproj"], fields.texts("notes", ()), fields.text("no_tower", ""))


def why_without_tower(folder: Path) -> str:
    """``Sources.no_tower`` of ``folder``; "" for a folder that stands for no GGUF model. Never raises."""
    if not is_gguf_folder(folder):
        return ""
    try:
        return Fields.read(folder / SOURCES_FILE).text("no_tower", "")
    except CheckpointError:  # its files were removed meanwhile
        return ""


def model_file_name(folder: Path) -> str:
    """The name of the (first) file of the model that ``folder`` stands for; "" without one. Never raises."""
    if not is_gguf_folder(folder):
        return ""
    try:
        files = Fields.read(folder / SOURCES_FILE).values.get("model")
        return Path(files[0]["path"]).name if files else ""
    except (CheckpointError, KeyError, TypeError):
        return ""


def stamp(path: Path) -> dict[str, Any]:
    """Path, bytes and time of the last change of a file, as JSON: another stamp means another file."""
    status = path.stat()
    return {"path": str(path), "size": status.st_size, "changed": status.st_mtime_ns}


def _check(found: Fields) -> Path:
    path = Path(found.text("path"))
    try:
        same = stamp(path) == found.values
    except OSError:
        same = False
    if not same:
        raise MissingFile(
            f"{path} is no longer the file that it was",
            "Name the GGUF file again, not the folder made of it.",
        )
    return path


def cache_folder() -> Path:
    """``XDG_CACHE_HOME/vlfit/gguf``, where the folders of all GGUF models are. May not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The standard ignores a relative path there.
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "vlfit" / "gguf"


def sources_text(sources: Sources) -> str:
    """What ``SOURCES_FILE`` holds: JSON with the stamps of the files, and what is said of them.

    Read by ``read_sources``.
    """
    return json.dumps(
        {
            "format": FORMAT,
            "model": [stamp(path) for path in sources.model],
            "mmproj": [stamp(path) for path in sources.mmproj],
            "notes": list(sources.notes),
            "no_tower": sources.no_tower,
        }
    )
