"""vlfit's own folder of models: what ``vlfit convert`` writes, found by name from anywhere.

``VLFIT_HOME``, else ``vlfit`` in ``XDG_DATA_HOME`` (``~/.local/share``); models lie in ``models/NAME``.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
# A card may come from anywhere, and the command is shown to be typed: its options are words and numbers.
_CONVERTED = re.compile(
    r"^Converted by vlfit .{1,40}: `vlfit convert ([\w./@ -]+?) (--[a-z][a-z-]*(?: [\w.,-]+)*)`\.$",
    re.MULTILINE,
)
_CARD_BYTES = 4096  # of the model card: the line is at its beginning


def models_folder() -> Path:
    """The folder of the store, which has one folder per model. It may not exist yet."""
    home = os.environ.get("VLFIT_HOME")
    if home:
        return Path(home).expanduser().absolute() / "models"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser().absolute() / "vlfit" / "models"


def folder_for(name: str) -> Path:
    """The folder for a new model called ``name``, which is not created.

    Characters of ``name`` other than letters, digits, ``_``, ``.`` and ``-`` become ``-``.
    """
    return models_folder() / (re.sub(r"[^\w.-]+", "-", name).lstrip("-._") or "model")


def model_folders() -> list[Path]:
    """The folders of the models in the store, sorted. Hidden ones, unfinished conversions, are left out."""
    try:
        found = [path for path in models_folder().iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found)


def find_folder(name: str) -> Path | None:
    """The folder of the model ``name`` in the store, in upper or lower case.

    None if there is none, or if several differ only in case and none is spelt exactly like ``name``.
    """
    if not _NAME.fullmatch(name):
        return None
    alike = [path for path in model_folders() if path.name.lower() == name.lower()]
    exact = [path for path in alike if path.name == name]
    return next(iter(exact), alike[0] if len(alike) == 1 else None)


def convert_command(folder: Path) -> str:
    """The ``vlfit convert`` command that makes the copy in ``folder`` once more, by its model card.

    "" if its card names none, as that of an original, or if it was downloaded. A source that was a folder
    becomes ``path/to/NAME``: where it lies is not known.
    """
    if folder.parent.name == "snapshots":  # of the hub's cache: whoever uploaded it has converted it
        return ""
    try:
        with (folder / "README.md").open("rb") as file:
            found = _CONVERTED.search(file.read(_CARD_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""
    if found is None:
        return ""
    source, options = found.groups()
    named = source == "mini" or "/" in source or find_folder(source) is not None
    words = f"vlfit convert {shlex.quote(source if named else f'path/to/{source}')} {options}"
    place = "" if folder.parent == models_folder() else f" --out {shlex.quote(str(folder))}"
    return f"{words}{place} --force"


def remove_folder(folder: Path) -> None:
    """Delete ``folder``; if it is a symbolic link, only the link. Does not check that it is in the store."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
