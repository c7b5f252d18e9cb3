"""Outputs of a completion: chunks while it runs, one answer at the end. No torch.

Every answer includes what the model saw of each picture (size and tokens), token usage and timings.
"""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "loop", "cancelled"]


@dataclass(frozen=True, slots=True)
class ImageSeen:
    """One picture (or clip) as the model saw it.

    ``width`` x ``height``: the original's pixels after EXIF rotation; ``seen_width`` x ``seen_height``:
    after resizing. ``tokens``: its image tokens in the prompt. ``frames``: 1 for a picture. ``notes``: what
    was done to it ("first of 12 frames", ...).
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
    """One token with its natural-log probability and, if asked for, the likeliest alternatives."""

    token: str
    token_id: int
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    Parts of ``prompt_tokens``: ``image_tokens`` (None: unknown), and ``cached_tokens`` found in the prefix
    cache.
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
    """Seconds: in the queue, until the first token (queue included), and in all."""

    queued_s: float
    first_token_s: float
    total_s: float
    completion_tokens: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode speed over the tokens after the first; 0 if there was only one."""
        seconds = self.total_s - self.first_token_s
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of a completion. ``text`` has whole characters only and may be empty.

    Only the last chunk has ``finish_reason``, ``usage`` and ``timings``. ``images`` is set in the first and
    last chunk of backends that know it only from the response (``remote``).
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    images: tuple[ImageSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole completion."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    model: str
    images: tuple[ImageSeen, ...] = ()
    timings: Timings | None = None
    logprobs: tuple[TokenLogprob, ...] = field(default=())

    def __str__(self) -> str:
        return self.text
