"""One running completion as its reader sees it, over any backend that starts requests and calls a listener.

Knows: the queue between the thread that computes and the one that reads. Does not know what runs.
"""

import queue
from collections.abc import Iterator

from vlfit.backends.base import LocalBackend, Prepared
from vlfit.engine.answer import Answer, Chunk, ImageSeen, TokenLogprob
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import UsageError


class QueuedStream:
    """Started when it is built; read by one thread."""

    def __init__(self, backend: LocalBackend, prepared: Prepared, sampling: SamplingParams) -> None:
        self._images = prepared.images
        self._model = backend.model
        self._arrivals: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        self._done = False
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Chunk | None = None
        self.ticket = backend.start(prepared, sampling, self._arrivals.put)

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        """What the model saw of each picture, as far as anybody told."""
        return self._images

    def __iter__(self) -> Iterator[Chunk]:
        while not self._done:
            arrival = self._arrivals.get()
            if isinstance(arrival, Exception):
                self._done = True
                raise arrival
            self._images = arrival.images or self._images
            self._text.append(arrival.text)
            self._logprobs.extend(arrival.logprobs)
            if arrival.finish_reason is not None:
                self._done = True
                self._last = arrival
            yield arrival

    def answer(self) -> Answer:
        """Read on to the end and give the whole completion, with what was read before."""
        for _ in self:
            pass
        last = self._last
        if last is None or last.finish_reason is None or last.usage is None:
            raise UsageError("the stream was closed before its end", "read it to the end to get an answer")
        return Answer(
            "".join(self._text),
            last.finish_reason,
            last.usage,
            self._model,
            self._images,
            last.timings,
            tuple(self._logprobs),
        )

    def close(self) -> None:
        """End the request now, if it is not over."""
        if not self._done:
            self._done = True
            self.ticket.cancel()
