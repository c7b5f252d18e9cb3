"""Frozen records as JSON and back, each field checked against its declared type.

Knows the types that the records of ``model.py`` use. Does not know what the fields mean.
"""

import types
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from vlfit.errors import UsageError

Record = TypeVar("Record")

HINT = "`vlfit machine --save FILE` writes a file with every field; the table of cards needs none: --gpu NAME"


def encode(value: Any) -> Any:
    """A record, and what is in it, as JSON has it: records as objects, tuples as lists."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: type[Record], facts: Any, where: str = "") -> Record:
    """An object of JSON as a ``kind``. ``where`` is the way to it, for messages: ``gpus[0]``.

    Raises ``UsageError`` that names the field, if one is missing, unknown or of another type.
    """
    if not isinstance(facts, dict):
        raise wrong(where, "an object", facts)
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in facts:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            meant = f"; is {near[0]!r} meant?" if near else ""
            raise UsageError(f"unknown field {_join(where, str(name))!r} in a machine file{meant}", HINT)
    values = {}
    for name, field in known.items():
        if name in facts:
            values[name] = _value(hints[name], facts[name], _join(where, name))
        elif field.default is MISSING:
            raise UsageError(f"the machine file has no field {_join(where, name)!r}", HINT)
    return kind(**values)


def wrong(where: str, wanted: str, found: Any) -> UsageError:
    """What to raise where the file holds ``found`` and ``wanted`` says in words what belongs there."""
    shown = repr(found)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return UsageError(f"{where or 'a machine file'} must be {wanted}, not {shown}", HINT)


def _value(hint: Any, found: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # "X | None" is the only union that the records use
        return None if found is None else _value(inner[0], found, where)
    if origin is tuple:
        return _tuple(inner, found, where)
    if is_dataclass(hint):
        return decode(hint, found, where)  # type: ignore[arg-type]
    # True is an int to Python, not to a person.
    if not isinstance(found, hint) or (isinstance(found, bool) and hint is not bool):
        raise wrong(where, _WORDS[hint], found)
    return found


def _tuple(inner: tuple[Any, ...], found: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(found, list):
        raise wrong(where, "a list", found)
    if inner[-1] is ...:
        return tuple(_value(inner[0], item, f"{where}[{place}]") for place, item in enumerate(found))
    if len(found) != len(inner):
        raise wrong(where, f"a list of {len(inner)}", found)
    pairs = zip(inner, found, strict=True)
    return tuple(_value(hint, item, f"{where}[{place}]") for place, (hint, item) in enumerate(pairs))


_WORDS = {int: "a whole number", str: "text", bool: "true or false"}


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
