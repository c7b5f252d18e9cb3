"""One request inside the engine: its tokens, its blocks, how far it has come. No decisions are made here."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vlfit.engine.answer import Chunk
from vlfit.engine.completion import Completion
from vlfit.engine.images import PreparedImage
from vlfit.engine.qwen3_vl.vision import VisionFeatures
from vlfit.engine.sampling import SamplingParams

IntVector = np.ndarray[tuple[int], np.dtype[np.int64]]
IntMatrix = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Listener = Callable[[Chunk | Exception], None]


@dataclass(frozen=True, slots=True)
class PricedPrompt:
    """A prompt ready to run, and what it costs.

    ``positions`` [3, tokens] are its M-RoPE positions, ``next_position`` the first generated token's.
    ``placeholders`` are the indices of the tokens that pictures stand in for: the k-th of them takes the k-th
    feature row of ``images`` in order.
    """

    token_ids: IntVector
    placeholders: IntVector
    positions: IntMatrix
    next_position: int
    images: tuple[PreparedImage, ...]

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(eq=False, slots=True)
class Sequence:
    """``cached`` tokens have keys and values in the cache; the rest of ``tokens`` is still to be computed."""

    prompt: PricedPrompt
    sampling: SamplingParams
    max_tokens: int
    completion: Completion
    listener: Listener
    asked: float  # when its preparation began, on the clock of time.perf_counter
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    cached: int = 0
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slots: Tensor | None = None
    features: dict[int, VisionFeatures] = field(default_factory=dict)
    generator: torch.Generator | None = None
    cancelled: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt.tokens + len(self.generated)

    @property
    def most_tokens(self) -> int:
        """The most cache slots it can ever need; the very last token is never fed back."""
        return self.prompt.tokens + self.max_tokens - 1

    @property
    def decoding(self) -> bool:
        return self.cached >= self.prompt.tokens
