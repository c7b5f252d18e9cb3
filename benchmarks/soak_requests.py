"""The requests of ``benchmarks.soak``: each with the outcomes that are right, drawn before anything is sent.

The same seed gives the same requests.
"""

import math
import random
from dataclasses import dataclass

from benchmarks.serving import DISCONNECTED, Reply, chat_body, data_url, random_jpeg

WHOLE, DISCONNECT, LOW, TOO_LARGE, BROKEN, BURST = (
    *("whole answers", "hung up on", "detail low", "far too large", "broken pictures"),
    "bursts past the queue",
)
MAX_TOKENS, MAX_PICTURES = 600, 4
SMALLEST, LARGEST = 64, 4000  # pixels of the longer side
ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 9 / 16, 3 / 4, 3.0)
POOL = 40  # pictures; far more than the encoder cache holds
WORDS = "What is in these pictures? Say how they differ, and name what is in front. "
# Of a hundred requests; the rest are whole answers.
SHARES = {DISCONNECT: 33, LOW: 10, TOO_LARGE: 4, BROKEN: 3}
BURST_INTERVAL = 200  # requests between two bursts
BURST_TOKENS = 8  # of each answer


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request of a ``kind``, or ``count`` of them at once; ``tokens`` of a whole answer.

    ``disconnect_after``: tokens after which the client hangs up.
    """

    kind: str
    text: str
    pictures: tuple[str, ...] = ()
    tokens: int = 1
    seed: int = 0
    temperature: float = 0.0
    disconnect_after: int | None = None
    count: int = 1

    def body(self) -> bytes:
        streaming = {"stream": True, "logprobs": True} if self.disconnect_after is not None else {}
        return chat_body(
            self.text,
            list(self.pictures),
            "low" if self.kind == LOW else "auto",
            max_tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=True,
            **streaming,
        )

    def accepts(self, reply: Reply) -> bool:
        """Whether ``reply`` is a right outcome. A full queue is one for all that could be served."""
        if self.kind == TOO_LARGE:
            return (reply.status, reply.ended) == (400, "context_length_exceeded")
        if self.kind == BROKEN:
            return (reply.status, reply.ended) == (400, "invalid_image")
        if reply.status == 429:
            return reply.ended == "queue_full" and reply.retry_after.isdecimal()
        if self.disconnect_after is not None:
            disconnected = (reply.status, reply.ended) == (200, DISCONNECTED)
            return disconnected and reply.tokens >= self.disconnect_after
        return (reply.status, reply.ended, reply.tokens) == (200, "length", self.tokens)


def requests(count: int, context: int, image_tokens: int, places: int, seed: int) -> list[SoakRequest]:
    """About ``count`` requests, those of bursts included, for a server with these limits.

    ``places``: how many it admits at once. Only those that are to be refused need more than ``context``.
    """
    chance = random.Random(seed)
    pool = picture_pool(chance)
    at_once = places + places // 4
    drawn: list[SoakRequest] = []
    number = 0
    next_burst = min(BURST_INTERVAL, count) // 2
    while number < count:
        if number >= next_burst and number + at_once <= count:
            drawn.append(SoakRequest(BURST, "Go on.", tokens=BURST_TOKENS, seed=number, count=at_once))
            next_burst += BURST_INTERVAL + at_once
        else:
            drawn.append(random_request(chance, pool, context, image_tokens, number))
        number += drawn[-1].count
    return drawn


def random_request(
    chance: random.Random, pool: list[str], context: int, image_tokens: int, number: int
) -> SoakRequest:
    kind = chance.choices(list(SHARES), list(SHARES.values()))[0] if chance.random() < _share() else WHOLE
    text = f"{number}: " + WORDS * chance.randint(1, 3)
    if kind == TOO_LARGE:
        return too_large(chance, text, pool, context)
    if kind == BROKEN:
        good = chance.choices(pool, k=chance.randint(0, 2))
        return SoakRequest(kind, text, (*good, broken_picture(chance)), tokens=4)
    most = min(MAX_TOKENS, context // 4)
    tokens = max(round(math.exp(chance.uniform(0, math.log(most)))), 1)
    room = (context - tokens - 160) // (image_tokens + 2)
    pictures = tuple(chance.choices(pool, k=min(chance.randint(1, MAX_PICTURES), max(room, 1))))
    return SoakRequest(
        kind,
        text,
        pictures,
        tokens,
        seed=number,
        temperature=chance.choice((0.0, 0.7, 1.0)),
        disconnect_after=chance.randrange(tokens) if kind == DISCONNECT else None,
    )


def _share() -> float:
    return sum(SHARES.values()) / 100


def too_large(chance: random.Random, text: str, pool: list[str], context: int) -> SoakRequest:
    """A prompt, pictures or an answer that ``context`` has no room for."""
    variant = chance.randrange(3)
    if variant == 0:
        return SoakRequest(TOO_LARGE, text + "word " * (2 * context))
    if variant == 1:
        return SoakRequest(TOO_LARGE, text, tuple(chance.choices(pool, k=2)), tokens=context)
    return SoakRequest(TOO_LARGE, text + "word " * context, tuple(chance.choices(pool, k=MAX_PICTURES)))


def broken_picture(chance: random.Random) -> str:
    """A picture cut off in the middle, bytes that are no picture, or nothing."""
    whole = random_jpeg(640, 480, 3)
    variants = (whole[: len(whole) // 2], chance.randbytes(2000), b"")
    return data_url(variants[chance.randrange(len(variants))])


def picture_pool(chance: random.Random) -> list[str]:
    """URLs of pictures of all sizes and shapes, the smallest and the largest among them."""
    pool = [data_url(random_jpeg(SMALLEST, SMALLEST, 0)), data_url(random_jpeg(LARGEST, LARGEST, 0))]
    for number in range(POOL - len(pool)):
        longer = math.exp(chance.uniform(math.log(SMALLEST), math.log(LARGEST)))
        aspect = chance.choice(ASPECTS)
        width, height = (longer, longer / aspect) if aspect >= 1 else (longer * aspect, longer)
        pool.append(data_url(random_jpeg(max(round(width), 16), max(round(height), 16), number + 1)))
    return pool
