"""JSON files of a checkpoint, read field by field with types checked."""

import json
import sys
from pathlib import Path
from typing import Any

from vlfit.errors import CheckpointError, MissingFile

_REQUIRED: Any = object()
COMPARE_HINT = "Compare the file with the original checkpoint's."


class Fields:
    """A JSON object, whose fields are read by type.

    ``file``, ``prefix``: name of its file and path within it, such as ``text_config.``, for error messages. A
    field that is null counts as missing. Methods that read a field return ``default`` if the field is
    missing, and raise ``CheckpointError`` for a wrong type, or if it is missing and there is no ``default``.
    ``hint``: of these errors.
    """

    def __init__(self, values: dict[str, Any], file: str, prefix: str = "", hint: str = COMPARE_HINT) -> None:
        self.values = values
        self.file = file
        self.prefix = prefix
        self.hint = hint

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Read the JSON object in the file ``path``.

        Raises ``MissingFile``, or ``CheckpointError`` if the file cannot be read or holds no JSON object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MissingFile(
                f"{path.name} is missing in {path.parent}",
                "Fetch the whole checkpoint again: vlfit pull NAME.",
            ) from None
        except (ValueError, OSError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is not readable JSON: {error}", "Fetch this file again; it may be truncated."
            ) from None
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{path} holds {_json_type(values)}, not a JSON object", "Fetch this file again."
            )
        return cls(values, path.name)

    def has(self, name: str) -> bool:
        """Whether the field ``name`` exists and is not null."""
        return self.values.get(name) is not None

    def field_error(self, name: str, problem: str, expected: str) -> CheckpointError:
        """The error to raise for the field ``name``.

        ``problem`` and ``expected``: phrases, such as "is -1" and "an integer of at least 1".
        """
        return CheckpointError(
            f"{self.file}: {self.prefix}{name} {problem}; wanted {expected}",
            self.hint,
        )

    def _get(self, name: str, default: Any, expected: str) -> Any:
        if self.has(name):
            return self.values[name]
        if default is _REQUIRED:
            raise self.field_error(name, "is missing", expected)
        return default

    def integer(self, name: str, default: int = _REQUIRED, *, minimum: int = 1) -> int:
        """An integer of at least ``minimum``; a float without a fraction, such as ``2.0``, is converted."""
        wanted = f"an integer of at least {minimum}"
        value = self._get(name, default, wanted)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.field_error(name, f"is {value!r}", wanted)
        return value

    def number(self, name: str, default: float = _REQUIRED, *, above: float = float("-inf")) -> float:
        """An integer or float greater than ``above``, and finite."""
        wanted = "a number" if above == float("-inf") else f"a number above {above:g}"
        value = self._get(name, default, wanted)
        if not _is_number(value) or not value > above:
            raise self.field_error(name, f"is {value!r}", wanted)
        return float(value)

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        """True or false."""
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.field_error(name, f"is {value!r}", "true or false")
        return value

    def text(self, name: str, default: str = _REQUIRED) -> str:
        """A string."""
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self.field_error(name, f"is {value!r}", "a string")
        return value

    def integers(
        self, name: str, default: tuple[int, ...] = _REQUIRED, *, minimum: int = 0
    ) -> tuple[int, ...]:
        """A list of integers, each at least ``minimum``."""
        wanted = f"a list of integers of at least {minimum}"
        value = self._get(name, default, wanted)
        if not isinstance(value, list | tuple) or not all(
            isinstance(item, int) and not isinstance(item, bool) and item >= minimum for item in value
        ):
            raise self.field_error(name, f"is {value!r}", wanted)
        return tuple(value)

    def numbers(self, name: str, default: tuple[float, ...] = _REQUIRED) -> tuple[float, ...]:
        """A list of integers or floats, as floats."""
        value = self._get(name, default, "a list of numbers")
        if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
            raise self.field_error(name, f"is {value!r}", "a list of numbers")
        return tuple(float(item) for item in value)

    def texts(self, name: str, default: tuple[str, ...] = _REQUIRED) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(name, default, "a list of strings")
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.field_error(name, f"is {value!r}", "a list of strings")
        return tuple(value)

    def section(self, name: str) -> "Fields":
        """The object in the field ``name``, for reading its fields; empty if the field is missing."""
        value = self._get(name, {}, "an object")
        if not isinstance(value, dict):
            raise self.field_error(name, f"is {_json_type(value)}", "an object")
        return Fields(value, self.file, f"{self.prefix}{name}.", self.hint)


def _is_number(value: object) -> bool:
    """Whether ``value`` is a number that a float can hold: JSON's Infinity, NaN and 1e400 are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def _json_type(value: object) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
