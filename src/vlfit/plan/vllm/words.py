"""The words of a ``vllm serve`` command: flags with their values, as vLLM itself reads them.

Knows: underscores for hyphens, ``--flag=value``, ``--flag.key value``, and that 8k is 8000 but 8K is 8192.
Does not know what any flag means (``legacy.py``).
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from vlfit.errors import UsageError

_MOST = 2**50  # no number of vLLM's comes near
_SUFFIXES = {"k": 1000, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# Switches without a value, so that a stray word is not taken for one.
_SWITCHES = {
    *("--enforce-eager", "--disable-v1-engine", "--disable-log-requests", "--disable-mm-preprocessor-cache"),
    *("--calculate-kv-scales", "--use-v2-block-manager", "--worker-use-ray", "--headless"),
}


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Each flag as vLLM spells it, its value (None: a switch), and the words that it was given in.

    Raises ``UsageError`` for a word that belongs to no flag.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if not flag.strip("-") or _is_value(word):
            raise UsageError(f"{word!r} is no flag of vllm serve", "after -- come flags of vLLM, with values")
        given, found = [word], value if equals else None
        while not equals and flag not in _SWITCHES and rest and _is_value(rest[0]):
            given.append(rest.pop(0))  # several: --cudagraph-capture-sizes 1 2 4
            found = found if found is not None else given[-1]
        base, dot, keys = flag.partition(".")
        yield (base, _nested(keys, found), given) if dot else (flag, found, given)


def as_json(flag: str, value: str | None) -> dict[str, Any]:
    """A value that is a JSON object. Raises ``UsageError`` for any other."""
    told = _plain(value)
    if not isinstance(told, dict):
        raise UsageError(f"{flag} is {value!r}", "it is JSON, such as '{\"image\": 1}'")
    return told


def whole_number(flag: str, value: str | None) -> int:
    """A whole number as vLLM reads it. Raises ``UsageError`` for what is none, or is absurd."""
    text = (value or "").strip()
    digits, factor = (text[:-1], _SUFFIXES[text[-1]]) if text[-1:] in _SUFFIXES else (text, 1)
    try:
        number = float(digits) if factor > 1 else int(digits)
    except ValueError:
        says = f"{flag} has no value" if value is None else f"{flag} is {value!r}"
        raise UsageError(says, "it takes a whole number") from None
    if not 0 <= number * factor < _MOST:
        raise UsageError(f"{flag} is {value!r}", "it takes a whole number that a machine could have")
    return round(number * factor)


def _nested(keys: str, value: str | None) -> str:
    """``image.count`` and a value as the JSON that they stand for."""
    told: Any = _plain(value)
    for key in reversed(keys.split(".")):
        told = {key.replace("-", "_"): told}
    return json.dumps(told)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word.lstrip("-").replace(".", "", 1).isdigit()


def _plain(value: str | None) -> Any:
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        return value
