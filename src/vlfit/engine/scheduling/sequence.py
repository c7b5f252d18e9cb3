"""One request inside the engine: its tokens, its blocks, how far it has come. No decisions are made here."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.grammar import Constraint
from vlfit.engine.sampling.output_processor import Completion
from vlfit.engine.scheduling.prefix_cache import PromptKeys
from vlfit.models.qwen3_vl.image_processor import PreparedImage
from vlfit.models.qwen3_vl.vision import VisionFeatures

if TYPE_CHECKING:
    from vlfit.engine.scheduling.speculative import Guesser


IntVector = np.ndarray[tuple[int], np.dtype[np.int64]]
IntMatrix = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Listener = Callable[[Chunk | Exception], None]


@dataclass(frozen=True, slots=True)
class PricedPrompt:
    """A prompt ready to run, and what it costs.

    ``positions`` [3, tokens] are its M-RoPE positions, ``next_position`` the first generated token's.
    ``placeholders`` are the indices of the tokens that pictures stand in for: the k-th of them takes the k-th
    feature row of ``images`` in order. ``keys`` say what its KV blocks will hold; None: nothing in them is
    shared with another request, before or after.
    """

    token_ids: IntVector
    placeholders: IntVector
    positions: IntMatrix
    next_position: int
    images: tuple[PreparedImage, ...]
    keys: PromptKeys | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(eq=False, slots=True)
class Sequence:
    """``cached`` tokens have keys and values in the cache; the rest of ``tokens`` is still to be computed.

    When it is admitted some are there already, the last of them perhaps in another's block: ``copy`` says
    which, which of its own they belong in, and how many they are. ``shared``: all of them, the first time.
    ``keys``: what its full blocks hold; when it is paused, what they held. ``guesser``: guesses what it says
    next; None: nobody does.
    """

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
    shared: int = 0
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    copy: tuple[int, int, int] | None = None
    slots: Tensor | None = None
    features: dict[int, VisionFeatures] = field(default_factory=dict)
    seed: int = 0
    constraint: Constraint | None = None
    guesser: "Guesser | None" = None
    cancelled: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt.tokens + len(self.generated)

    @property
    def position(self) -> int:
        """The M-RoPE position of its newest token, whether it was generated or not."""
        return self.prompt.next_position + len(self.generated) - 1

    def token_ids(self, begin: int, end: int) -> IntVector:
        """The tokens from ``begin`` to before ``end``, of the prompt and of what was generated after it."""
        if end <= self.prompt.tokens:
            return self.prompt.token_ids[begin:end]
        generated = self.generated[max(begin - self.prompt.tokens, 0) : end - self.prompt.tokens]
        return np.concatenate((self.prompt.token_ids[begin:], np.array(generated, dtype=np.int64)))

    @property
    def most_tokens(self) -> int:
        """The most cache slots it can ever need; the very last token is never fed back."""
        return self.prompt.tokens + self.max_tokens - 1

    @property
    def decoding(self) -> bool:
        """Whether all is in the cache but the token generated last."""
        return self.cached >= self.prompt.tokens and self.tokens - self.cached == 1

    def positions(self, begin: int, end: int) -> IntMatrix:
        """M-RoPE positions [3, end - begin] of ``token_ids(begin, end)``."""
        behind = self.prompt.next_position - self.prompt.tokens
        generated = np.arange(max(begin, self.prompt.tokens), max(end, self.prompt.tokens)) + behind
        return np.concatenate((self.prompt.positions[:, begin:end], np.tile(generated, (3, 1))), axis=1)

    def pause(self) -> None:
        """Back to the beginning, with all that was said as it is. The blocks have been given back."""
        self.cached = 0
        self.blocks = []
        self.copy = None
        self.slots = None
        self.features.clear()
