"""The most that a plan admits, asked of a running engine: what memory it takes then, it never needs more of.

Pictures of the largest size until the cache of pictures is full; then a prompt that fills the context and
ends in such pictures, in whole chunks, while all other sequences decode; and all sequences decoding at once
at the greatest length that the pool holds. On a GPU length takes next to no memory (8 bytes a token), as
kernels read the cache where it lies: there the prompt is no longer than it takes for such chunks to have a
past, and decoding alone is left out. All is sampled, which takes more than greedy. Knows the scheduler's
rules. Does not know how memory is measured, nor tokenizers: prompts are made of token ids that stand for
nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import isqrt
from typing import Any

import numpy as np

from vlfit.engine import kernels
from vlfit.engine.account import Counters
from vlfit.engine.answer import ImageSeen
from vlfit.engine.engine import Engine
from vlfit.engine.images import PreparedImage
from vlfit.engine.prompt import Prompt
from vlfit.engine.qwen3_vl.recorded import IN_A_ROW
from vlfit.engine.sampling import SamplingParams
from vlfit.engine.scheduler import Work
from vlfit.engine.scores import Scores
from vlfit.errors import DoesNotFit, OutOfMemory
from vlfit.plan.costs import VISION_WHOLE

_FILLER = 100  # any ordinary token
_ANSWER = 3  # tokens: the first comes from the prompt's pass, so two passes decode
_MOST_PICTURES = 24
_SHADES = 256  # of pictures that differ


@dataclass
class Rehearsed:
    """What was reached, to be compared with the plan: passes, rows of a pass, tokens, requests at once."""

    passes: int = 0
    most_rows: int = 0
    longest: int = 0
    most_decoding: int = 0
    widest_chunk_with_a_past: int = 0
    pictures: int = 0

    def note(self, batch: Sequence[Work]) -> None:
        """Take one forward pass into account."""
        self.passes += 1
        self.most_rows = max(self.most_rows, sum(work.length for work in batch))
        self.longest = max(self.longest, *(work.sequence.cached + work.length for work in batch))
        self.most_decoding = max(self.most_decoding, sum(work.sequence.decoding for work in batch))
        for work in batch:
            if work.sequence.cached and not work.sequence.decoding:
                self.widest_chunk_with_a_past = max(self.widest_chunk_with_a_past, work.length)


def at_start(engine: Engine) -> Rehearsed:
    """Rehearse before the first request, and leave nothing of it but what torch's pool has grown by.

    Raises ``DoesNotFit`` where the worst case needs more memory than there is, or than the plan allows.
    """
    try:
        seen = rehearse(engine, engine.image_tokens)
        again = engine.counters.again
    except OutOfMemory as error:
        raise too_much(engine, error.message) from None
    if again:
        raise too_much(engine, f"{again} of its passes could only be done request by request")
    engine.runner.image_cache.clear()
    engine.counters = Counters()
    return seen


def too_much(engine: Engine, what: str) -> DoesNotFit:
    """What a start ends with when the worst case has failed, and ``what`` it failed of."""
    return DoesNotFit(
        f"{engine.checkpoint.name} was loaded, but the worst case that its plan admits does not fit: {what}",
        "start with a smaller --image-tokens, --chunk or --sequences; vlfit plan --calibrate measures what "
        "CUDA takes on this machine",
    )


def rehearse(engine: Engine, image_tokens: int) -> Rehearsed:
    """Run the worst case. Raises what a request fails with: that the GPU is out of memory, for example."""
    seen = Rehearsed()
    # A picture has two tokens around it and one of text behind, and an answer follows.
    image_tokens = min(image_tokens, engine.context - 3 - _ANSWER)
    run = engine.runner.run

    def watched(batch: Sequence[Work]) -> Scores:
        seen.note(batch)
        return run(batch)

    engine.runner.run = watched  # type: ignore[method-assign]
    try:
        with engine.pace.rest():
            if engine.runner.recorded is not None and image_tokens:
                # The largest picture that is recorded, until it is: each has a shade of its own.
                tokens = min(
                    image_tokens, VISION_WHOLE // engine.checkpoint.config.eyes.spatial_merge_size**2
                )
                for number in range(IN_A_ROW + 1):
                    answer_all(engine, [(about_a_picture(engine, tokens, _SHADES - 1 - number), 1)])
            for number in range(pictures_to_fill_the_cache(engine, image_tokens)):
                answer_all(engine, [(about_a_picture(engine, image_tokens, number), 1)])
                seen.pictures += 1
            answer_all(engine, list(full_context(engine, image_tokens)))
            if not kernels.used_on(engine.device):
                answer_all(engine, list(full_pool(engine)))
    finally:
        engine.runner.run = run  # type: ignore[method-assign]
    return seen


def pictures_to_fill_the_cache(engine: Engine, image_tokens: int) -> int:
    """At least one; a picture that is larger than the cache is not kept. None without eyes. On a GPU one, as
    the cache lies in RAM.
    """
    vision = engine.checkpoint.config.vision
    if vision is None:
        return 0
    if kernels.used_on(engine.device):
        return 1
    values = image_tokens * vision.out_hidden_size * (1 + len(vision.deepstack_visual_indexes))
    return min(engine.options.image_cache_bytes // (values * engine.dtype.itemsize) + 1, _MOST_PICTURES)


def full_context(engine: Engine, image_tokens: int) -> Iterator[tuple[Prompt, int]]:
    """All requests but one are short and decode all along; the last fills the context, as far as counts."""
    others = engine.options.sequences - 1
    size = engine.pool.block_size
    room = max(engine.options.chunk - others, 1)
    longest = engine.context
    if kernels.used_on(engine.device):
        longest = min(longest, -(-(image_tokens + 3) // room) * room + 2 * room + _ANSWER)
    passes = -(-longest // room) + _ANSWER + 1
    short = min(passes, engine.context - size)
    for _ in range(others):
        yield text(size), short
    held = others * engine.pool.blocks_for(size + short)
    most = min(longest, (engine.pool.blocks - held) * size) - _ANSWER
    # A whole chunk at the end of a context that is nearly full, or part of a chunk at its very end.
    whole = most // room * room or most
    length = max((most, whole), key=lambda tokens: ((tokens - 1) % room + 1) * tokens)
    if image_tokens > 0:
        yield ending_in_pictures(engine, min(image_tokens, length - 3), room, length), _ANSWER
    else:
        yield text(length), _ANSWER


def full_pool(engine: Engine) -> Iterator[tuple[Prompt, int]]:
    """As many requests as may run at once, all as long as the pool allows."""
    sequences = engine.options.sequences
    each = min(engine.context, engine.pool.blocks // sequences * engine.pool.block_size)
    for _ in range(sequences):
        yield text(each - _ANSWER), _ANSWER


def text(tokens: int) -> Prompt:
    """A prompt without a picture."""
    return Prompt((_FILLER,) * tokens, (), 0)


def about_a_picture(engine: Engine, image_tokens: int, shade: int, tokens: int = 0) -> Prompt:
    """A prompt with one picture, in a ``shade`` (0 to 255) of its own, and text up to ``tokens``.

    The picture is the most square one of exactly ``image_tokens``.
    """
    config = engine.checkpoint.config
    merge, patch = config.eyes.spatial_merge_size, config.eyes.patch_size
    rows = next(rows for rows in range(isqrt(image_tokens), 0, -1) if image_tokens % rows == 0)
    grid = (1, rows * merge, image_tokens // rows * merge)
    height, width = grid[1] * patch, grid[2] * patch
    seen = ImageSeen(width, height, width, height, image_tokens)
    pixels = np.full((1, height, width, 3), shade, dtype=np.uint8)
    picture = PreparedImage(pixels, grid, image_tokens, repr((grid, shade)).encode(), seen)
    placeholders = (config.image_token_id,) * image_tokens
    ids = (config.vision_start_token_id, *placeholders, config.vision_end_token_id)
    return Prompt(ids + (_FILLER,) * max(tokens - len(ids), 1), (picture,), image_tokens)


def ending_in_pictures(engine: Engine, image_tokens: int, chunk: int, tokens: int) -> Prompt:
    """Text, then as many pictures as fill the last whole ``chunk`` with nothing else; ``tokens`` in all."""
    each = image_tokens + 3  # with what stands around it, and a token of text
    count = max(min(2 * chunk // each + 1, tokens // each, _SHADES - _MOST_PICTURES), 1)
    pictures = [about_a_picture(engine, image_tokens, _MOST_PICTURES + number) for number in range(count)]
    ids = tuple(token for picture in pictures for token in picture.token_ids)
    images = tuple(image for picture in pictures for image in picture.images)
    return Prompt((_FILLER,) * (tokens - len(ids)) + ids, images, count * image_tokens)


def answer_all(
    engine: Engine,
    requests: Sequence[tuple[Prompt, int]],
    late: Sequence[tuple[Prompt, int]] = (),
    wishes: Sequence[dict[str, Any]] = ({},),
) -> None:
    """Run ``requests`` (each a prompt and how many tokens to answer) to their end, all at once.

    Those that are ``late`` come when the others speak. ``wishes`` of the sampling are dealt out in turn.
    """
    failures: list[Exception] = []

    def listen(arrival: object) -> None:
        # The engine goes on when a listener fails, so failures are kept until it is done.
        if isinstance(arrival, Exception):
            failures.append(arrival)

    turns = cycle(wishes)

    def add(prompt: Prompt, tokens: int) -> None:
        usual = {"temperature": 1.0, "top_p": 0.9, "seed": 1, "ignore_eos": True}
        sampling = SamplingParams(max_tokens=tokens, **(usual | next(turns)))
        # No block of another: what is computed already takes no memory to compute.
        priced = replace(engine.price(prompt), keys=None)
        engine.add(engine.sequence(priced, sampling, listen))

    for each in requests:
        add(*each)
    if late:
        engine.step()
        for each in late:
            add(*each)
    while engine.busy:
        engine.step()
    if failures:
        raise failures[0]
