"""How words are chosen, as keyword arguments: what a person writes, turned into ``SamplingParams``."""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, TypedDict

from vlfit.api.sampling_params import SamplingParams
from vlfit.errors import InvalidRequest, UsageError


class SamplingOptions(TypedDict, total=False):
    """The fields of ``SamplingParams``, each of which may be left out.

    With none of them captions, answers and scenes are greedy, so the same call gives the same words; a chat
    samples by the checkpoint's own settings.
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


def with_options(base: SamplingParams, options: SamplingOptions) -> SamplingParams:
    """``base`` with ``options`` on top.

    Raises ``InvalidRequest`` for a value out of range or of the wrong type, ``UsageError`` for an option that
    there is not.
    """
    changes: dict[str, Any] = {**options}
    for name, value in changes.items():
        _check_type(name, value)
    if "stop" in options:
        stop = options["stop"]
        # One stop string alone is not a sequence of one-letter ones.
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "stop_token_ids" in options:
        changes["stop_token_ids"] = tuple(options["stop_token_ids"])
    return replace(base, **changes)


_WHOLE = frozenset({"max_tokens", "top_k", "seed", "top_logprobs"})
_MAY_BE_NONE = frozenset({"max_tokens", "seed", "top_logprobs"})
_YES_OR_NO = frozenset({"ignore_eos", "loop_guard"})


def _check_type(name: str, value: object) -> None:
    """Type hints hold only for those who run a type checker; a wrong value would fail far from here."""
    if name not in SamplingOptions.__annotations__:
        known = ", ".join(SamplingOptions.__annotations__)
        raise UsageError(f"there is no option {name!r}", f"the options are {known}")
    if value is None and name in _MAY_BE_NONE:
        return
    number = isinstance(value, Real) and not isinstance(value, bool)
    if name == "stop":
        good, wanted = _is_sequence_of(value, str), "a string, or a list of them"
    elif name == "stop_token_ids":
        good, wanted = (
            not isinstance(value, str) and _is_sequence_of(value, Integral),
            "a list of whole numbers",
        )
    elif name in _YES_OR_NO:
        good, wanted = isinstance(value, bool), "True or False"
    elif name in _WHOLE:
        good, wanted = number and isinstance(value, Integral), "a whole number"
    else:
        good, wanted = number, "a number"
    if not good:
        raise InvalidRequest(f"{name} is {value!r}", f"{name} must be {wanted}", param=name)


def _is_sequence_of(value: object, kind: type) -> bool:
    return isinstance(value, Sequence) and all(isinstance(each, kind) for each in value)
