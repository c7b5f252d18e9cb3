"""What names of GGUF files say: type of the weights, part of a split file, file of a vision tower.

By convention alone: ``MODEL-Q4_K_M.gguf``, ``MODEL-Q8_0-00001-of-00003.gguf`` and ``mmproj-MODEL-F16.gguf``.
Works on names of the hub (with slashes) and of this computer alike.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from vlfit.checkpoint.gguf.advice import KEEP_NAMES
from vlfit.checkpoint.special_files import describe_special
from vlfit.errors import MissingFile, NotACheckpoint

SUFFIX = ".gguf"
MMPROJ_SEPARATOR = "+"  # of a model and its mmproj in one name
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})", re.IGNORECASE)
_MAX_PARTS = 999
# Types at the end of a name: Q4_K_M, UD-Q4_K_XL, IQ4_XS, BF16, MXFP4_MOE, Q4_0_4_4, i1-Q4_K_M.
_TYPE = re.compile(
    r"(?:^|[-._ ])"
    r"(?P<type>(?:UD-|i1-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|B?F(?:16|32)|(?:MX|NV)FP4(?:_[A-Z]+)*))$",
    re.IGNORECASE,
)
# Files beside a model that are none: importance matrices, and models that draft for another.
_OTHER_KINDS = ("imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")


def is_gguf_name(name: str) -> bool:
    """Whether a file is a GGUF file by its name."""
    return name.lower().endswith(SUFFIX)


def is_mmproj_name(name: str) -> bool:
    """Whether a GGUF file holds a vision tower (an mmproj) by its name."""
    return is_gguf_name(name) and "mmproj" in _base(name).lower()


def is_model_name(name: str) -> bool:
    """Whether a GGUF file holds a text model by its name; of a split file only the first part."""
    base = _base(name).lower()
    if not is_gguf_name(base) or "mmproj" in base or any(word in base for word in _OTHER_KINDS):
        return False
    split = _SPLIT.fullmatch(base[: -len(SUFFIX)])
    return split is None or int(split["part"]) == 1


def stem_of(name: str) -> str:
    """The base name without ``.gguf`` and without the number of a part."""
    base = _base(name)
    stem = base[: -len(SUFFIX)] if is_gguf_name(base) else base
    split = _SPLIT.fullmatch(stem)
    return split["stem"] if split else stem


def labels_of_models(names: Iterable[str]) -> dict[str, str]:
    """Models among the files ``names``, each with a label: its type, or its stem if others have that type."""
    types = {name: type_of_name(name) for name in names if is_model_name(name)}
    times = Counter(types.values())
    return {name: kind if kind and times[kind] == 1 else stem_of(name) for name, kind in types.items()}


def type_of_name(name: str) -> str:
    """The type that a file's name ends with, such as ``Q4_K_M`` or ``UD-Q4_K_XL``; "" without one.

    A file may say it by its folder, too: ``Q8_0/MODEL-00001-of-00002.gguf``.
    """
    found = _TYPE.search(stem_of(name))
    if found is None and "/" in name:
        found = _TYPE.search(name.rpartition("/")[0].rpartition("/")[2])
    return _spelt(found["type"]) if found else ""


def type_of_number(number: object) -> str:
    """The name of a ``general.file_type``; "" for a number that the ``gguf`` package does not know."""
    from gguf.constants import LlamaFileType

    try:
        # 1024 is added where the type was guessed from the tensors.
        kind = LlamaFileType(number & ~1024) if type(number) is int else LlamaFileType.GUESSED
    except ValueError:
        return ""
    name = kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return "" if kind is LlamaFileType.GUESSED else name


def same_type(one: str, other: str) -> bool:
    """Whether two types of names are the same, as people write them: ``q4_k_m`` and ``Q4_K_M``."""
    return _spelt(one) == _spelt(other)


def bits_of_type(kind: str) -> int:
    """The first number in a type's name: 4 of ``Q4_K_M``, 16 of ``BF16``; 0 without one."""
    found = re.search(r"\d+", kind.removeprefix("UD-").removeprefix("i1-"))
    return int(found[0]) if found else 0


def names_of_parts(name: str) -> list[str]:
    """The names of all parts of the split file that ``name`` is a part of, in order; else ``name`` alone.

    Raises ``NotACheckpoint`` for a part of none, or of more than 999.
    """
    folder, slash, base = name.rpartition("/")
    stem, suffix = (base[: -len(SUFFIX)], base[-len(SUFFIX) :]) if is_gguf_name(base) else (base, "")
    split = _SPLIT.fullmatch(stem)
    if split is None:
        return [name]
    count = int(split["count"])
    if not 1 <= int(split["part"]) <= count <= _MAX_PARTS:
        hint = "Name the first part; llama.cpp's gguf-split writes such files."
        if count > _MAX_PARTS:
            hint = (
                f"There are {_MAX_PARTS} parts at most. If it is a whole model, give the file another name."
            )
        raise NotACheckpoint(f"{base} says that it is part {int(split['part'])} of {count}", hint)
    return [
        f"{folder}{slash}{split['stem']}-{part:05d}-of-{split['count']}{suffix}"
        for part in range(1, count + 1)
    ]


def split_parts(path: Path) -> tuple[Path, ...]:
    """The files of all parts of the model that ``path`` is a part of, in order; ``path`` alone if not split.

    Raises ``NotACheckpoint`` if there is no such file, ``MissingFile`` if a part is missing.
    """
    path = path.absolute()
    if not path.is_file():
        special = describe_special(path)
        if special is not None:
            raise NotACheckpoint(f"{path} is {special[0]}", special[1])
        raise NotACheckpoint(f"there is no file {path}", "Check the path.")
    parts = tuple(path.with_name(name) for name in names_of_parts(path.name))
    missing = [part for part in parts if not part.is_file()]
    if missing:
        names = ", ".join(_with_kind(part) for part in missing[:5])
        raise MissingFile(
            f"{len(missing)} of {len(parts)} parts are missing in {path.parent}: {names}", KEEP_NAMES
        )
    return parts


def _with_kind(path: Path) -> str:
    """The name of a missing file, with what is there in its place."""
    special = describe_special(path)
    return path.name if special is None else f"{path.name} ({special[0]})"


def best_mmproj(model: str, names: Iterable[str]) -> str | None:
    """The mmproj among ``names`` for the file ``model``; None if there is none.

    The names are paths with slashes. Taken is what lies deepest in the folders above ``model``, then what
    shares most words of its name, then what has the fewest bits from 16 up (an F16 before an F32),
    as those of 8 bits are no better known; of several BF16 goes before F16.
    """
    folder = model.rpartition("/")[0]
    found = []
    for name in names:
        place = name.rpartition("/")[0]
        is_above = place == folder or folder.startswith(f"{place}/" if place else "")
        if is_mmproj_name(name) and is_above:
            kind = type_of_name(name)
            bits = bits_of_type(kind)
            rank = (bits < 16, bits, kind != "BF16")
            found.append((-place.count("/") - bool(place), -_shared_words(model, name), rank, name))
    return min(found)[-1] if found else None


def with_mmproj(model: str, mmproj: str | Path | None) -> str:
    """The name of ``model`` with the file of its vision tower, for what takes one name only.

    Raises ``NotACheckpoint`` if there is no such file.
    """
    if mmproj is None:
        return model
    if not _is_file(mmproj):
        special = describe_special(Path(mmproj).expanduser())
        if special is not None:
            raise NotACheckpoint(f"{str(mmproj)!r} behind --mmproj is {special[0]}", special[1])
        raise NotACheckpoint(
            f"there is no file {str(mmproj)!r} with a vision tower", "Check the path behind --mmproj."
        )
    return f"{model}{MMPROJ_SEPARATOR}{mmproj}"


def split_mmproj(model: str) -> tuple[str, str | None]:
    """The model and the mmproj of a name that ``with_mmproj`` made; None for a name without one."""
    head, separator, tail = model.rpartition(MMPROJ_SEPARATOR)
    return (head, tail) if separator and head and (is_gguf_name(tail) or _is_file(tail)) else (model, None)


def _is_file(path: str | Path) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _shared_words(model: str, mmproj: str) -> int:
    """How many words of ``mmproj`` are in ``model``. Without types: Q4_0 shares the 0 of Q8_0."""
    ours, words = (re.split(r"[-_. ]+", _TYPE.sub("", stem_of(each)).lower()) for each in (model, mmproj))
    return sum(word in ours for word in words)


def _spelt(kind: str) -> str:
    upper = kind.upper()
    return upper.replace("I1-", "i1-", 1) if upper.startswith("I1-") else upper


def _base(name: str) -> str:
    return name.rpartition("/")[2]
