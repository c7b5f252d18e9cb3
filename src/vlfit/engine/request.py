"""Requests of any engine: what is prepared ahead, and the state of a running request."""

import time
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from vlfit.api.outputs import Chunk, ImageSeen, Listener, Timings, Usage
from vlfit.api.pooling import PoolingParams
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.grammar import GrammarMatcher
from vlfit.engine.sampling.output_processor import Completion


class TokenizedPrompt(Protocol):
    """A prompt as token ids. Each engine has its own class, with further inputs such as pixels."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, placeholders of pictures included."""
        ...

    @property
    def num_image_tokens(self) -> int:
        """Number of placeholder tokens of pictures and clips."""
        ...


P = TypeVar("P", bound=TokenizedPrompt)


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[P]):
    """A checked prompt: tokens counted, pictures processed, nothing on the device yet.

    ``prompt``: of the engine's own class. ``images``: how each picture was resized. ``max_tokens``: most
    tokens of the completion. ``submitted_at``: when preparation began (``time.perf_counter``). ``pooling``:
    compute a vector or a score instead of a completion; None: a completion.
    """

    prompt: P
    images: tuple[ImageSeen, ...]
    max_tokens: int
    submitted_at: float
    pooling: PoolingParams | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, ``image_tokens`` included."""
        return self.prompt.num_tokens

    @property
    def image_tokens(self) -> int:
        """Placeholder tokens of pictures and clips in the prompt."""
        return self.prompt.num_image_tokens


@dataclass(eq=False, slots=True)
class Request:
    """A request for one completion: prompt, parameters, listener and the tokens generated so far.

    ``listener``: see ``Engine.make_request``. Times are of ``time.perf_counter``; ``admitted_at`` (when it
    first ran) and ``first_token_at`` are None until then. ``num_shared_tokens``: tokens of the prompt that
    came from the prefix cache. ``grammar_matcher``: None without structured output. ``cancelled``: set by
    ``Engine.cancel``. ``pooling``: as in ``PreparedRequest``; such a request ends with its prompt.
    """

    prompt: Any  # the engine's own TokenizedPrompt
    params: SamplingParams
    max_tokens: int
    completion: Completion
    listener: Listener
    submitted_at: float  # when its preparation began
    queued_at: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    first_token_at: float | None = None
    generated: list[int] = field(default_factory=list)
    num_shared_tokens: int = 0
    seed: int = 0
    grammar_matcher: GrammarMatcher | None = None
    cancelled: bool = False
    pooling: PoolingParams | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt plus those generated so far."""
        return int(self.prompt.num_tokens) + len(self.generated)

    def final_chunk(self, chunk: Chunk) -> Chunk:
        """``chunk``, the last of this request, with the usage and timings of the whole request added."""
        now = time.perf_counter()
        usage = Usage(
            self.prompt.num_tokens, self.prompt.num_image_tokens, len(self.generated), self.num_shared_tokens
        )
        timings = Timings(
            queued_s=(self.admitted_at or now) - self.queued_at,
            first_token_s=(self.first_token_at or now) - self.submitted_at,
            total_s=now - self.submitted_at,
            completion_tokens=len(self.generated),
        )
        return replace(chunk, usage=usage, timings=timings)
