"""Machine files: a machine written down by ``vlfit machine --save``, to plan for it anywhere.

Knows files and JSON. Does not know the fields (``model.py``).
"""

import json
import sys
from pathlib import Path

from vlfit.errors import UsageError
from vlfit.machine.model import Machine

_MOST = 2**20  # real ones have some kilobytes
_HINT = "`vlfit machine --save FILE` writes such a file"


def load_machine(path: Path) -> Machine:
    """The machine in ``path``, - for stdin. Raises ``UsageError`` for what cannot be read or is none."""
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(_MOST + 1)
        else:
            with path.open("rb") as file:
                data = file.read(_MOST + 1)
    except OSError as error:
        raise UsageError(f"cannot read the machine file {path}: {error.strerror}", _HINT) from None
    if len(data) > _MOST:
        raise UsageError(f"{path} is larger than any machine file", _HINT)
    try:
        # Given bytes, json finds out the encoding: a shell of Windows writes UTF-16.
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no machine file: {error}", _HINT) from None
    try:
        return Machine.from_json(facts)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from None


def save_machine(machine: Machine, path: Path) -> None:
    """Write ``machine`` to ``path``, whole or not at all. Raises ``UsageError`` if it cannot be written."""
    text = json.dumps(machine.to_json(), indent=2, ensure_ascii=False) + "\n"
    part = path.with_name(f"{path.name}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write the machine file {path}: {error.strerror}", "choose another place for --save"
        ) from None
