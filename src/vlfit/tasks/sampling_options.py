"""How words are chosen, as keyword arguments: what a person writes, turned into ``SamplingParams``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

from vlfit.engine.sampling import SamplingParams


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
    """``base`` with ``options`` on top. Raises ``InvalidRequest`` for a value out of range."""
    changes: dict[str, Any] = {**options}
    if "stop" in options:
        stop = options["stop"]
        # One stop string alone is not a sequence of one-letter ones.
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "stop_token_ids" in options:
        changes["stop_token_ids"] = tuple(options["stop_token_ids"])
    return replace(base, **changes)
