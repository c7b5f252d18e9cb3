"""The most that a plan admits, asked of a running engine: what memory it takes then, it never needs more of.

Pictures of the largest size until the cache of pictures is full; then a prompt that fills the context and
ends in such pictures, in whole chunks, while all other sequences decode; and all sequences decoding at once
at the greatest length that the pool holds. On a GPU length takes next to no memory (8 bytes a token), as
kernels read the cache where it lies: there the prompt is no longer than it takes for such chunks to have a
past, and decoding alone is left out. All is sampled, which takes more than greedy. Knows the scheduler's
rules. Does not know how memory is measured, nor tokenizers: prompts are made of token ids that stand for
nothing.
"""

from collections.abc import Hashable, Iterator, Sequence
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from math import isqrt
from typing import Any

import numpy as np

from vlfit import kernels
from vlfit.api.outputs import ImageSeen
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters
from vlfit.engine.engine import Engine
from vlfit.engine.execution.encoder_graph import IN_A_ROW
from vlfit.engine.memory.usage import tensors_in
from vlfit.engine.sampling.sampler import Scores
from vlfit.engine.scheduling.scheduler import Work
from vlfit.engine.scheduling.speculative import Guesser
from vlfit.errors import DoesNotFit, OutOfMemory
from vlfit.loading.offload import StreamedLayers
from vlfit.models.qwen3_vl.image_processor import PreparedImage
from vlfit.plan.native.cost import GUESS_ROWS, VISION_WHOLE
from vlfit.prompt.builder import Prompt

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


def profile_peak_memory(engine: Engine) -> Rehearsed:
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


# A pass of every kind before the first request, so that no request waits for a kernel.
#
# A kernel is compiled when it is first launched, which takes a second and some MiB of RAM for good; and it
# is loaded then, which takes up to 2 MiB of the card that nobody planned. Which ones a pass launches
# depends on how many rows it has, how many speak, or decode beside a prompt, how large a picture is, and
# what is asked of the sampler. Layers that are stored alike launch the same, so that a few stand for all.
# Knows what these are. Does not know kernels: what their tables tell apart lies at powers of two, and that
# of ``attention.decode_splits`` at ``TOGETHER`` (``tests/engine/test_every_kind.py``).


_WARM_UP_TOKENS = 2  # tokens: the first comes from the prompt's pass, the second is decoded
_SHORT = 16  # tokens of a prompt
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)  # of a prompt's pass; the largest is the rehearsal's
TOGETHER = (1, 3, 5, 9, 17, 33, 65, 257)  # sequences that speak at once, and then decode beside a prompt
GUESSES = (2, 3, 5, GUESS_ROWS)  # rows of a pass with guesses
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"top_k": 20},
    {"top_k": 500},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "top_logprobs": 5},
)


def warm_up_kernels(engine: Engine) -> None:
    """Leaves nothing behind but kernels. To be called when the worst case has been rehearsed.

    Raises ``DoesNotFit`` where a pass needs more memory than there is, or than the plan allows.
    """
    try:
        with engine.pace.rest(), _few_layers(engine):
            _run(engine)
    except OutOfMemory as error:
        raise too_much(engine, error.message) from None
    engine.runner.image_cache.clear()
    engine.counters = Counters()


@contextmanager
def _few_layers(engine: Engine) -> Iterator[None]:
    """For a while the text model has no more layers than there are kinds of them: those that deepstack is
    added to, one of each way to be stored, and the last. Layers that wait in RAM stay all.
    """
    text = engine.runner.text
    layers = text.layers
    graphs = engine.runner.graphs
    recordings = graphs.recordings if graphs else 0
    vision = engine.checkpoint.config.vision
    if not isinstance(layers, StreamedLayers):
        seen: set[Hashable] = set()
        few = list(layers[: len(vision.deepstack_visual_indexes) if vision else 0])
        for layer in layers[len(few) :]:
            kind = tuple((each.dtype, each.shape) for each in tensors_in(layer))
            if kind not in seen or layer is layers[-1]:
                seen.add(kind)
                few.append(layer)
        text.layers = few
    try:
        yield
    finally:
        text.layers = layers
        if graphs and graphs.recordings > recordings:
            graphs.release()  # memory ran short, and a step was recorded anew with few layers


def _run(engine: Engine) -> None:
    sizes = picture_sizes(engine)
    for rows in ROWS:
        if rows <= min(engine.options.chunk, engine.context - _WARM_UP_TOKENS):
            answer_all(engine, [(text(rows), 1)])
    short = (text(min(_SHORT, engine.context - _WARM_UP_TOKENS)), _WARM_UP_TOKENS)
    for count in TOGETHER:
        if count <= engine.options.sequences:
            late = [short] if count < engine.options.sequences else []
            answer_all(engine, [(text(1), _WARM_UP_TOKENS)] * count, late)
    answer_all(engine, [(about_a_picture(engine, size, number), 1) for number, size in enumerate(sizes)])
    answer_all(engine, [short] * len(SAMPLINGS), wishes=SAMPLINGS)
    if engine.options.speculate and engine.runner.graphs is None:  # else such passes are recorded
        for rows in GUESSES:
            _guess(engine, rows - 1)
    if engine.image_tokens:
        prompt = between_large_ones(engine)
        if len(prompt.token_ids) <= engine.context - _WARM_UP_TOKENS:
            answer_all(engine, [(prompt, 1)])


class _Guesses(Guesser):
    """As many as there may be, up to ``count``, each time."""

    count = 0

    def guess(self, generated: Many[int], most: int) -> tuple[int, ...]:
        return (0,) * min(self.count, most)


def _guess(engine: Engine, count: int) -> None:
    """A request in whose passes ``count`` tokens are guessed."""
    failures: list[Exception] = []

    def listen(arrival: object) -> None:
        if isinstance(arrival, Exception):
            failures.append(arrival)

    prompt = engine.price(text(min(_SHORT, engine.context - count - _WARM_UP_TOKENS)))
    sampling = SamplingParams(max_tokens=count + _WARM_UP_TOKENS, ignore_eos=True)
    sequence = engine.sequence(replace(prompt, keys=None), sampling, listen)
    sequence.guesser = _Guesses(prompt)
    sequence.guesser.count = count
    engine.add(sequence)
    while engine.busy:
        engine.step()
    if failures:
        raise failures[0]


def between_large_ones(engine: Engine) -> Prompt:
    """A prompt with a pass in which no other kind of prompt has more features: it reaches the last token of
    a largest picture, smaller ones, and the first token of another largest one.
    """
    chunk, large = engine.options.chunk, min(engine.image_tokens, engine.context - 3 - _WARM_UP_TOKENS)
    begin = -(-(large + 1) // chunk) * chunk  # of the pass: in it, the first row is the last of a picture
    room = chunk - 3 - 2  # behind that picture, and before the first token of the last one
    sizes = [large]
    while room > 3:
        sizes.append(min(large, room - 3))
        room -= sizes[-1] + 3
    pictures = [about_a_picture(engine, size, number) for number, size in enumerate([*sizes, large])]
    before = text(begin - large).token_ids
    return Prompt(
        before + tuple(token for picture in pictures for token in picture.token_ids),
        tuple(image for picture in pictures for image in picture.images),
        sum(picture.image_tokens for picture in pictures),
    )


def picture_sizes(engine: Engine) -> Iterator[int]:
    """Tokens of pictures, each twice the one before, from the smallest there is up to the plan's cap."""
    processing = engine.processing
    if processing is None or engine.image_tokens == 0:
        return
    tokens = max(processing.min_pixels // (processing.patch_size * processing.merge_size) ** 2, 1)
    most = min(engine.image_tokens, engine.context - 3 - _WARM_UP_TOKENS)
    while tokens < most:
        yield tokens
        tokens *= 2
