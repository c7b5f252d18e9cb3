"""Sampling parameters as keyword arguments of the Python API, checked and applied to ``SamplingParams``."""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, TypedDict

from vlfit.api.sampling_params import SamplingParams
from vlfit.errors import InvalidRequest, UsageError


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of ``VLM`` and ``Client``: fields of ``SamplingParams``, all optional.

    By default captions, answers and scenes are greedy, so the same call gives the same text; a chat samples
    as the checkpoint recommends.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    top_logprobs: int | None
    loop_guard: bool


def apply_options(base: SamplingParams, options: SamplingOptions) -> SamplingParams:
    """A copy of ``base`` with the values of ``options``; fields that are not in ``options`` stay.

    Raises ``InvalidRequest`` for a value out of range or of the wrong type, ``UsageError`` for an unknown
    option.
    """
    changes: dict[str, Any] = {**options}
    for name, value in changes.items():
        _check_type(name, value)
    if "stop" in options:
        stop = options["stop"]
        # A single string is one stop string, not a sequence of characters.
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "stop_token_ids" in options:
        changes["stop_token_ids"] = tuple(options["stop_token_ids"])
    return replace(base, **changes)


_INTEGERS = frozenset({"max_tokens", "top_k", "seed", "top_logprobs"})
_OPTIONAL = frozenset({"max_tokens", "seed", "top_logprobs"})
_BOOLEANS = frozenset({"ignore_eos", "loop_guard"})


def _check_type(name: str, value: object) -> None:
    """Check the type at run time: a wrong value would fail far from here."""
    if name not in SamplingOptions.__annotations__:
        known = ", ".join(SamplingOptions.__annotations__)
        raise UsageError(f"unknown option {name!r}", f"the options are {known}")
    if value is None and name in _OPTIONAL:
        return
    number = isinstance(value, Real) and not isinstance(value, bool)
    if name == "stop":
        valid, expected = _is_sequence_of(value, str), "a string, or a list of them"
    elif name == "stop_token_ids":
        valid, expected = (
            not isinstance(value, str) and _is_sequence_of(value, Integral),
            "a list of whole numbers",
        )
    elif name in _BOOLEANS:
        valid, expected = isinstance(value, bool), "True or False"
    elif name in _INTEGERS:
        valid, expected = number and isinstance(value, Integral), "a whole number"
    else:
        valid, expected = number, "a number"
    if not valid:
        raise InvalidRequest(f"{name} is {value!r}", f"{name} must be {expected}", param=name)


def _is_sequence_of(value: object, kind: type) -> bool:
    return isinstance(value, Sequence) and all(isinstance(each, kind) for each in value)
