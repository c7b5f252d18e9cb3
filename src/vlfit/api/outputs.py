"""What comes back: chunks while the model speaks, one answer when it is done. No torch.

Every answer says what the model really saw (size and tokens of each picture) and what it cost.
"""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "loop", "cancelled"]


@dataclass(frozen=True, slots=True)
class ImageSeen:
    """One picture (or clip) as the model saw it.

    ``width`` x ``height`` are the original's pixels after EXIF rotation; ``seen_width`` x ``seen_height``
    what it was resized to; ``tokens`` what it costs in the prompt; ``frames`` is 1 for a picture.
    ``notes`` says in words what was done to it ("rotated by EXIF", "first of 12 frames", ...).
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
    """Tokens of a request. ``image_tokens`` are part of ``prompt_tokens``; None: nobody told how many are.

    So are ``cached_tokens``: those that were not computed, as an earlier prompt began alike.
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
    """Seconds: waiting for admission, from start to the first token (waiting included), and in all."""

    queued_s: float
    first_token_s: float
    total_s: float
    completion_tokens: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, over the time they took; 0 when there was only one."""
        seconds = self.total_s - self.first_token_s
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A step of a completion. ``text`` holds whole characters only and may be empty.

    The last chunk, and no other, has ``finish_reason``, ``usage`` and ``timings``. ``images``: what was seen,
    where the backend could not tell before it answered (``remote``); the first chunk and the last have it.
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
