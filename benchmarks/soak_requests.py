"""The requests of the soak: what is sent, and what may come of it, decided before anything is sent.

The same numbers give the same requests. Knows what a server must refuse. Does not know how it is asked.
"""

import math
import random
from dataclasses import dataclass

from benchmarks.asking import HUNG_UP, Reply, body, jpeg, url_of

WHOLE, LEFT, LOW, LARGE, BROKEN, BURST = (
    *("whole answers", "hung up on", "detail low", "far too large", "broken pictures"),
    "bursts past the queue",
)
MOST_TOKENS, MOST_PICTURES = 600, 4
SMALLEST, LARGEST = 64, 4000  # pixels of the longer side
ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 9 / 16, 3 / 4, 3.0)
POOL = 40  # pictures; far more than the cache of pictures holds
WORDS = "What is in these pictures? Say how they differ, and name what is in front. "
# Of a hundred requests; the rest are whole answers. Of those hung up on, all are asked like the others.
SHARES = {LEFT: 33, LOW: 10, LARGE: 4, BROKEN: 3}
EVERY_BURST = 200  # requests between two bursts
BURST_TOKENS = 8  # of each answer


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of a ``kind``, or ``count`` of them at once; ``tokens`` out if it is answered whole.

    ``hang_up_after``: tokens after which the client leaves.
    """

    kind: str
    text: str
    pictures: tuple[str, ...] = ()
    tokens: int = 1
    seed: int = 0
    temperature: float = 0.0
    hang_up_after: int | None = None
    count: int = 1

    def content(self) -> bytes:
        """The body."""
        streaming = {"stream": True, "logprobs": True} if self.hang_up_after is not None else {}
        return body(
            self.text,
            list(self.pictures),
            "low" if self.kind == LOW else "auto",
            max_tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=True,
            **streaming,
        )

    def fits(self, reply: Reply) -> bool:
        """Whether ``reply`` is what has to come of this. A price may be too high for any, and is said so."""
        if self.kind == LARGE:
            return (reply.status, reply.ended) == (400, "context_length_exceeded")
        if self.kind == BROKEN:
            return (reply.status, reply.ended) == (400, "invalid_image")
        if reply.status == 429:
            return reply.ended == "queue_full" and reply.retry_after.isdecimal()
        if self.hang_up_after is not None:
            return (reply.status, reply.ended) == (200, HUNG_UP) and reply.tokens >= self.hang_up_after
        return (reply.status, reply.ended, reply.tokens) == (200, "length", self.tokens)


def requests(count: int, context: int, image_tokens: int, places: int, seed: int) -> list[Wanted]:
    """About ``count`` requests in all, those of bursts included, for a server of these limits.

    ``places``: how many it takes at once. Prices stay under ``context`` but for those that are to be refused.
    """
    chance = random.Random(seed)
    pool = picture_pool(chance)
    at_once = places + places // 4
    work: list[Wanted] = []
    asked = 0
    next_burst = min(EVERY_BURST, count) // 2
    while asked < count:
        if asked >= next_burst and asked + at_once <= count:
            work.append(Wanted(BURST, "Go on.", tokens=BURST_TOKENS, seed=asked, count=at_once))
            next_burst += EVERY_BURST + at_once
        else:
            work.append(one(chance, pool, context, image_tokens, asked))
        asked += work[-1].count
    return work


def one(chance: random.Random, pool: list[str], context: int, image_tokens: int, number: int) -> Wanted:
    kind = chance.choices(list(SHARES), list(SHARES.values()))[0] if chance.random() < _share() else WHOLE
    text = f"{number}: " + WORDS * chance.randint(1, 3)
    if kind == LARGE:
        return too_large(chance, text, pool, context)
    if kind == BROKEN:
        good = chance.choices(pool, k=chance.randint(0, 2))
        return Wanted(kind, text, (*good, broken(chance)), tokens=4)
    most = min(MOST_TOKENS, context // 4)
    tokens = max(round(math.exp(chance.uniform(0, math.log(most)))), 1)
    room = (context - tokens - 160) // (image_tokens + 2)
    pictures = tuple(chance.choices(pool, k=min(chance.randint(1, MOST_PICTURES), max(room, 1))))
    return Wanted(
        kind,
        text,
        pictures,
        tokens,
        seed=number,
        temperature=chance.choice((0.0, 0.7, 1.0)),
        hang_up_after=chance.randrange(tokens) if kind == LEFT else None,
    )


def _share() -> float:
    return sum(SHARES.values()) / 100


def too_large(chance: random.Random, text: str, pool: list[str], context: int) -> Wanted:
    """A prompt, a number of pictures, or an answer that no plan of ``context`` has room for."""
    way = chance.randrange(3)
    if way == 0:
        return Wanted(LARGE, text + "word " * (2 * context))
    if way == 1:
        return Wanted(LARGE, text, tuple(chance.choices(pool, k=2)), tokens=context)
    return Wanted(LARGE, text + "word " * context, tuple(chance.choices(pool, k=MOST_PICTURES)))


def broken(chance: random.Random) -> str:
    """A picture cut off in the middle, bytes that are none, or nothing."""
    whole = jpeg(640, 480, 3)
    ways = (whole[: len(whole) // 2], chance.randbytes(2000), b"")
    return url_of(ways[chance.randrange(len(ways))])


def picture_pool(chance: random.Random) -> list[str]:
    """Pictures of all sizes and shapes as URLs; the smallest and the largest are among them."""
    pool = [url_of(jpeg(SMALLEST, SMALLEST, 0)), url_of(jpeg(LARGEST, LARGEST, 0))]
    for number in range(POOL - len(pool)):
        longer = math.exp(chance.uniform(math.log(SMALLEST), math.log(LARGEST)))
        aspect = chance.choice(ASPECTS)
        width, height = (longer, longer / aspect) if aspect >= 1 else (longer * aspect, longer)
        pool.append(url_of(jpeg(max(round(width), 16), max(round(height), 16), number + 1)))
    return pool
