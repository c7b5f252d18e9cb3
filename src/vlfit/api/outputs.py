"""Outputs of a completion: chunks while it runs, one answer at the end. No torch.

Every answer includes what the model saw of each picture (size and tokens), token usage and timings.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from vlfit.api.pooling import Vector

FinishReason = Literal["stop", "length", "loop", "cancelled"]


@dataclass(frozen=True, slots=True)
class ImageSeen:
    """One picture or clip as the model saw it.

    ``width``, ``height``: pixels of the original, upright; ``seen_width``, ``seen_height``: after resizing.
    ``tokens``: image tokens in the prompt. ``frames``: of a clip; 1 for a picture. ``notes``: what was
    changed or left out ("first of 12 frames", ...).
    """

    width: int
    height: int
    seen_width: int
    seen_height: int
    tokens: int
    frames: int = 1
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability (base e). ``top``: the likeliest tokens, if requested."""

    token: str
    token_id: int
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    ``prompt_tokens`` includes ``image_tokens`` (None: unknown) and ``cached_tokens`` (prefix cache hits).
    """

    prompt_tokens: int
    image_tokens: int | None
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a request. ``queued_s``: seconds in the queue; 0 if a remote server does not report it.

    ``first_token_s``, ``total_s``: seconds from the beginning of its preparation to its first token and to
    its end. ``completion_tokens``: how many were generated.
    """

    queued_s: float
    first_token_s: float
    total_s: float
    completion_tokens: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode speed in tokens per second, over the tokens after the first; 0 if there are none."""
        seconds = self.total_s - self.first_token_s
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a streamed completion. ``text`` has whole characters only and may be empty.

    Only the last chunk has ``finish_reason``, ``usage`` and ``timings``. ``images``: set by the ``remote``
    backend alone, in the first and last chunk. ``stop_string``: the one of ``SamplingParams.stop`` that ended
    the completion; None: something else did, or the server behind the backend does not say. ``pooled``: in
    the only chunk of a pooled request its vector, or its score as a vector of one number from 0 to 1.
    ``reasoning``: thoughts before the answer, where they are apart from it (``prompt/reasoning.py``, or the
    server behind the backend).
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    images: tuple[ImageSeen, ...] = ()
    stop_string: str | None = None
    pooled: Vector | None = field(default=None, compare=False)
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole completion: ``text``, and why it ended (``finish_reason``).

    ``model``: the model's name. ``images``: one for each picture and clip, in the order of the prompt.
    ``logprobs``: one for each token, if the request had ``top_logprobs``, else empty. ``timings``: None if
    the server does not report them. ``pooled``, ``reasoning``: as in ``Chunk``.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    model: str
    images: tuple[ImageSeen, ...] = ()
    timings: Timings | None = None
    logprobs: tuple[TokenLogprob, ...] = field(default=())
    pooled: Vector | None = field(default=None, compare=False)
    reasoning: str = ""

    def __str__(self) -> str:
        return self.text


# Called with each chunk of a request, in order; at last with one that has a ``finish_reason``, or the error.
Listener = Callable[[Chunk | Exception], None]
