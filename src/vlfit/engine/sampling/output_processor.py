"""From token ids to chunks of text: whole characters, stop rules, the reason it ended. No tensors.

One ``Completion`` follows one sequence. It decides when to stop; the engine only obeys.
"""

from typing import Protocol

from vlfit.api.outputs import Chunk, FinishReason, TokenLogprob
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.detokenizer import StopMatcher

LONGEST_LOOP = 64  # tokens in one round of a loop
LOOP_TOKENS = 96  # a loop must fill this many tokens ...
LOOP_ROUNDS = 4  # ... and go round this many times


class FollowsTokens(Protocol):
    """Turns the tokens of one completion to text, whole characters at a time."""

    def add(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Completion:
    def __init__(
        self,
        detokenizer: FollowsTokens,
        sampling: SamplingParams,
        eos_token_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = StopMatcher(sampling.stop) if sampling.stop else None
        self._stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else eos_token_ids
        )
        self._loop = LoopGuard() if sampling.loop_guard else None
        self._max_tokens = max_tokens
        self.tokens = 0

    def add(self, token_id: int, logprobs: tuple[TokenLogprob, ...]) -> Chunk:
        """Take the next token. The chunk has a ``finish_reason`` if it is the last.

        A stop token counts as a completion token and is not part of the text.
        """
        self.tokens += 1
        if token_id in self._stop_ids:
            return self._finish("", logprobs, "stop")
        text = self._detokenizer.add(token_id)
        if self._stop is not None:
            text, stopped = self._stop.add(text)
            if stopped:
                return Chunk(text, logprobs, "stop")
        if self._loop is not None and self._loop.add(token_id):
            return self._finish(text, logprobs, "loop")
        if self.tokens >= self._max_tokens:
            return self._finish(text, logprobs, "length")
        return Chunk(text, logprobs)

    def _finish(self, text: str, logprobs: tuple[TokenLogprob, ...], reason: FinishReason) -> Chunk:
        """The last chunk, with whatever was held back."""
        tail = self._detokenizer.flush()
        if self._stop is not None:
            emitted, stopped = self._stop.add(tail)
            text += emitted
            if not stopped:
                text += self._stop.flush()
        else:
            text += tail
        return Chunk(text, logprobs, reason)


class LoopGuard:
    """Notices that the tail of a completion is one passage over and over.

    ``matches[p]`` counts for how many tokens each has equalled the one ``p`` before it.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._matches = [0] * (LONGEST_LOOP + 1)

    def add(self, token_id: int) -> bool:
        self._tokens.append(token_id)
        for period in range(1, min(LONGEST_LOOP, len(self._tokens) - 1) + 1):
            if self._tokens[-1 - period] == token_id:
                self._matches[period] += 1
                if self._matches[period] + period >= max(LOOP_TOKENS, LOOP_ROUNDS * period):
                    return True
            else:
                self._matches[period] = 0
        return False
