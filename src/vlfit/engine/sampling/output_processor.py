"""Text of a completion: chunks, stop rules, finish reason. No torch."""

from typing import Protocol

from vlfit.api.outputs import Chunk, FinishReason, TokenLogprob
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.detokenizer import StopMatcher

MAX_LOOP_PERIOD = 64  # tokens
MIN_LOOP_TOKENS = 96  # of repeated text ...
MIN_LOOP_REPEATS = 4  # ... and at least this many rounds


class IncrementalDetokenizer(Protocol):
    """Turns a completion's token ids into text: ``add`` each id, then ``flush``."""

    def add(self, token_id: int) -> str:
        """Append a token. Returns the characters that it completes; "" in the middle of a character."""
        ...

    def flush(self) -> str:
        """End the completion. Returns the text not returned yet."""
        ...


class Completion:
    """Output state of one completion: detokenizes its tokens and applies the stop rules.

    Stop rules: EOS and stop tokens, stop strings, the loop guard, ``max_tokens``. ``num_tokens``: completion
    tokens so far.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
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
        self.num_tokens = 0

    def add(self, token_id: int, logprobs: tuple[TokenLogprob, ...]) -> Chunk:
        """Append a token. Returns the chunk to send, with the new text and ``logprobs``.

        The last chunk has a ``finish_reason``: "stop", "length" or "loop"; then ``add`` must not be called
        again. The text may be "", inside a character or while it may begin a stop string. A stop token is
        counted in ``num_tokens`` but not part of the text.
        """
        self.num_tokens += 1
        if token_id in self._stop_ids:
            return self._finish("", logprobs, "stop")
        text = self._detokenizer.add(token_id)
        if self._stop is not None:
            text, stopped = self._stop.add(text)
            if stopped:
                return Chunk(text, logprobs, "stop", stop_string=self._stop.found)
        if self._loop is not None and self._loop.add(token_id):
            return self._finish(text, logprobs, "loop")
        if self.num_tokens >= self._max_tokens:
            return self._finish(text, logprobs, "length")
        return Chunk(text, logprobs)

    def _finish(self, text: str, logprobs: tuple[TokenLogprob, ...], reason: FinishReason) -> Chunk:
        """The last chunk, with all text held back."""
        tail = self._detokenizer.flush()
        if self._stop is not None:
            emitted, stopped = self._stop.add(tail)
            text += emitted
            if not stopped:
                text += self._stop.flush()
        else:
            text += tail
        found = self._stop.found if self._stop is not None else None
        return Chunk(text, logprobs, reason, stop_string=found)


class LoopGuard:
    """Detects a completion that repeats one passage over and over."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # By period p: how many tokens in a row equalled the token p places earlier.
        self._matches = [0] * (MAX_LOOP_PERIOD + 1)

    def add(self, token_id: int) -> bool:
        """Append a token. Returns whether the completion now ends in a loop.

        A loop: a passage of at most ``MAX_LOOP_PERIOD`` tokens that occurs at least ``MIN_LOOP_REPEATS``
        times in a row, over at least ``MIN_LOOP_TOKENS`` tokens.
        """
        self._tokens.append(token_id)
        for period in range(1, min(MAX_LOOP_PERIOD, len(self._tokens) - 1) + 1):
            if self._tokens[-1 - period] == token_id:
                self._matches[period] += 1
                if self._matches[period] + period >= max(MIN_LOOP_TOKENS, MIN_LOOP_REPEATS * period):
                    return True
            else:
                self._matches[period] = 0
        return False
