"""Checkpoints broken on purpose: one field of a JSON file, or some bytes of a shard."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def copy_of(folder: Path, target: Path) -> Path:
    """A checkpoint that may be changed."""
    return Path(shutil.copytree(folder, target))


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` edit the JSON object in ``path``."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` edit the header of a safetensors file; its tensors stay as they are."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
