"""Requests, one or several at once, and when each of their tokens came. Knows clocks; no statistics."""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vlfit.backends.base import LocalBackend, Ticket
from vlfit.engine.answer import Chunk
from vlfit.engine.conversation import Conversation
from vlfit.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one request: picture and text to tensors; to the first token; the tokens after the first."""

    preprocess_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Heard:
    """One request on the clock of ``time.perf_counter``: ``asked``, ``prepared``, then when each token came.

    ``token_ids`` are there if log probabilities were asked for.
    """

    asked: float
    prepared: float
    arrived: tuple[float, ...]
    prompt_tokens: int
    image_tokens: int
    token_ids: tuple[int, ...] = ()

    @property
    def round(self) -> Round:
        return Round(
            self.prepared - self.asked, self.arrived[0] - self.prepared, self.arrived[-1] - self.arrived[0]
        )

    @property
    def first_token_s(self) -> float:
        """From the bytes of the picture to the first token."""
        return self.arrived[0] - self.asked

    def spoken(self, moment: float) -> int:
        """How many tokens had come at ``moment``."""
        return sum(arrived <= moment for arrived in self.arrived)


def ask_at_once(
    backend: LocalBackend, conversations: Sequence[Conversation], sampling: SamplingParams
) -> list[Heard]:
    """Ask ``conversations``, each as soon as it is prepared, and listen until all have their answers.

    All are asked at the same moment. Raises what the first of them fails with; the others are cancelled then,
    as by Ctrl-C.
    """
    arrivals: queue.SimpleQueue[tuple[int, float, Chunk | Exception]] = queue.SimpleQueue()
    tickets: list[Ticket] = []
    prepared_at: list[float] = []
    sizes: list[tuple[int, int]] = []
    asked = time.perf_counter()
    try:
        for number, conversation in enumerate(conversations):
            prepared = backend.prepare(conversation, sampling)
            prepared_at.append(time.perf_counter())
            sizes.append((prepared.prompt_tokens, prepared.image_tokens or 0))  # in process all is counted

            def listen(arrival: Chunk | Exception, number: int = number) -> None:
                arrivals.put((number, time.perf_counter(), arrival))

            tickets.append(backend.start(prepared, sampling, listen))
        times, ids = _listen(arrivals, len(conversations))
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise
    return [
        Heard(asked, prepared_at[number], tuple(times[number]), *sizes[number], tuple(ids[number]))
        for number in range(len(conversations))
    ]


def _listen(
    arrivals: "queue.SimpleQueue[tuple[int, float, Chunk | Exception]]", requests: int
) -> tuple[list[list[float]], list[list[int]]]:
    """When each token came, and which they were, until all ``requests`` have ended."""
    times: list[list[float]] = [[] for _ in range(requests)]
    ids: list[list[int]] = [[] for _ in range(requests)]
    speaking = requests
    while speaking:
        number, moment, chunk = arrivals.get()
        if isinstance(chunk, Exception):
            raise chunk
        times[number].append(moment)
        ids[number].extend(token.token_id for token in chunk.logprobs)
        speaking -= chunk.finish_reason is not None
    return times, ids
