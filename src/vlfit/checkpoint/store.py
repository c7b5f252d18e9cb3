"""vlfit's own folder of models: what ``vlfit convert`` writes, found by name from anywhere.

``VLFIT_HOME``, else ``vlfit`` in ``XDG_DATA_HOME`` (``~/.local/share``); models lie in ``models/NAME``.
"""

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def models_folder() -> Path:
    """The folder that holds a folder per model; it may not exist."""
    home = os.environ.get("VLFIT_HOME")
    if home:
        return Path(home).expanduser().absolute() / "models"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser().absolute() / "vlfit" / "models"


def folder_for(name: str) -> Path:
    """Where a model called ``name`` is written; characters that a name may not have become ``-``."""
    return models_folder() / (re.sub(r"[^\w.-]+", "-", name).lstrip("-._") or "model")


def folders() -> list[Path]:
    """The models in the store, sorted by name; hidden folders are conversions that were cut off."""
    try:
        found = [path for path in models_folder().iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found)


def find(name: str) -> Path | None:
    """The folder of the model ``name``; case does not matter unless two differ in nothing else."""
    if not _NAME.fullmatch(name):
        return None
    alike = [path for path in folders() if path.name.lower() == name.lower()]
    exact = [path for path in alike if path.name == name]
    return next(iter(exact), alike[0] if len(alike) == 1 else None)


def remove(folder: Path) -> None:
    """Delete a model's folder. ``folder`` comes from ``find``; a link is unlinked, not followed."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
