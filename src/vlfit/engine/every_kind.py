"""A pass of every kind before the first request, so that no request waits for a kernel.

A kernel is compiled when it is first launched, which takes a second and some MiB of RAM for good; and it is
loaded then, which takes up to 2 MiB of the card that nobody planned. Which ones a pass launches depends on
how many rows it has, how many speak, or decode beside a prompt, how large a picture is, and what is asked of
the sampler. Layers that are stored alike launch the same, so that a few stand for all. Knows what these are.
Does not know kernels: what their tables tell apart lies at powers of two, and that of
``attention.decode_splits`` at ``TOGETHER`` (``tests/engine/test_every_kind.py``).
"""

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vlfit.engine.account import Counters
from vlfit.engine.engine import Engine
from vlfit.engine.guessing import Guesser
from vlfit.engine.holdings import tensors_in
from vlfit.engine.offload import StreamedLayers
from vlfit.engine.prompt import Prompt
from vlfit.engine.rehearsal import about_a_picture, answer_all, text, too_much
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import OutOfMemory
from vlfit.plan.graphs import GUESS_ROWS

_ANSWER = 2  # tokens: the first comes from the prompt's pass, the second is decoded
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


def at_start(engine: Engine) -> None:
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
        if rows <= min(engine.options.chunk, engine.context - _ANSWER):
            answer_all(engine, [(text(rows), 1)])
    short = (text(min(_SHORT, engine.context - _ANSWER)), _ANSWER)
    for count in TOGETHER:
        if count <= engine.options.sequences:
            late = [short] if count < engine.options.sequences else []
            answer_all(engine, [(text(1), _ANSWER)] * count, late)
    answer_all(engine, [(about_a_picture(engine, size, number), 1) for number, size in enumerate(sizes)])
    answer_all(engine, [short] * len(SAMPLINGS), wishes=SAMPLINGS)
    if engine.options.speculate and engine.runner.graphs is None:  # else such passes are recorded
        for rows in GUESSES:
            _guess(engine, rows - 1)
    if engine.image_tokens:
        prompt = between_large_ones(engine)
        if len(prompt.token_ids) <= engine.context - _ANSWER:
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

    prompt = engine.price(text(min(_SHORT, engine.context - count - _ANSWER)))
    sampling = SamplingParams(max_tokens=count + _ANSWER, ignore_eos=True)
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
    chunk, large = engine.options.chunk, min(engine.image_tokens, engine.context - 3 - _ANSWER)
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
    most = min(engine.image_tokens, engine.context - 3 - _ANSWER)
    while tokens < most:
        yield tokens
        tokens *= 2
