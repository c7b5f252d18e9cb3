"""The workload of a benchmark: its options, synthetic pictures, and prompts of the right length.

Requests are built and counted before any weights are loaded.
"""

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Literal

from vlfit.api.conversation import Conversation, ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.config import text_only_error
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import DoesNotFit, PictureError, UsageError
from vlfit.images.limits import MAX_ASPECT, MAX_PIXELS, check_picture_size

if TYPE_CHECKING:
    from vlfit.prompt.builder import PromptBuilder


QUESTION = "Describe this picture in detail."
_NOISE = 16  # of 256 shades: makes a JPEG about as large as a photo


def synthetic_picture(width: int, height: int, number: int = 0) -> bytes:
    """A JPEG file of ``width`` x ``height`` pixels with areas, edges and noise, always the same for a
    ``number``.

    Pictures of different numbers differ, so that no cache can help.
    """
    import numpy as np
    from PIL import Image, ImageDraw

    grain = np.random.default_rng(number).integers(0, _NOISE, (height, width, 3), dtype=np.uint8)
    shades = np.linspace(60, 200, width, dtype=np.uint8)[None, :, None]
    picture = Image.fromarray(shades + grain)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((width // 8, height // 8, width // 2, height // 2), fill=(200, 40, 40))
    if width > 40 and height > 40:
        draw.rectangle((width // 2, height // 2, width - 20, height - 20), fill=(40, 60, 200))
    file = BytesIO()
    picture.save(file, "JPEG", quality=90)
    return file.getvalue()


TEXT_ONLY_PROMPT_TOKENS = 512  # prompt of text-only models, as in other tools
MAX_CONCURRENCY = 256
MAX_SIDE = 65_500  # pixels: libjpeg writes no longer ones
_FILLER = " and"  # repeated to fill a prompt


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure, and with which engine options.

    ``pictures``: one per request, used in turn; empty: synthetic pictures of ``size`` (width, height) in
    pixels. ``tokens``: length of each answer. ``batches``: numbers of concurrent requests, measured one after
    another. ``repeat``: repetitions for each of them, after one warm-up. ``context``: fill each prompt with
    text until prompt and answer have so many tokens; None: do not fill it (text-only models: to a prompt of
    512 tokens).

    The other fields are as in ``EngineOptions``. Raises ``UsageError`` for numbers out of range.
    """

    pictures: tuple[ImagePart, ...] = ()
    size: tuple[int, int] = (1024, 768)
    tokens: int = 128
    batches: tuple[int, ...] = (1, 4)
    repeat: int = 5
    context: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    image_tokens: int | None = None
    max_num_batched_tokens: int = 1024
    offload: int | Literal["auto"] | None = None
    kv_dtype: str = "auto"
    kernels: str = "auto"

    def __post_init__(self) -> None:
        _check_size(*self.size)
        if self.tokens < 2:
            raise UsageError(
                f"--tokens is {self.tokens}", "Use at least 2: the first one belongs to the prefill."
            )
        if self.repeat < 1:
            raise UsageError(f"--repeat is {self.repeat}", "Measure at least once.")
        if not self.batches or not all(1 <= count <= MAX_CONCURRENCY for count in self.batches):
            named = ",".join(map(str, self.batches))
            raise UsageError(
                f"--batch is {named!r}", f"Write numbers from 1 to {MAX_CONCURRENCY}, like 1,4,8."
            )


def _check_size(width: int, height: int) -> None:
    """Raise ``UsageError`` for a synthetic picture that could not be made, or decoded again."""
    hint = (
        f"Use at most {MAX_PIXELS / 1e6:,.0f} megapixels, {MAX_SIDE:,} pixels a side, and an aspect ratio of "
        f"1:{MAX_ASPECT}."
    )
    try:
        check_picture_size(width, height, "--size")
    except PictureError as error:
        raise UsageError(error.message, hint) from error
    if max(width, height) > MAX_SIDE:
        raise UsageError(f"--size: {width}x{height} has a side of over {MAX_SIDE:,} pixels", hint)


@dataclass(frozen=True, slots=True)
class BenchRequests:
    """The requests of a benchmark: ``conversations``, as many as run concurrently at most.

    ``prompt_tokens``: of the longest prompt, image tokens included. ``image_tokens``: of the largest picture;
    0 without pictures. ``image_limit``: the engine's ``image_tokens`` limit: that of the options, else one
    that does not shrink the largest picture; None: the engine's default. ``shared_pictures``: whether some
    requests are about the same picture.
    """

    conversations: tuple[Conversation, ...]
    prompt_tokens: int
    image_tokens: int
    image_limit: int | None
    shared_pictures: bool

    def engine_options(self, options: BenchOptions) -> EngineOptions:
        """Engine options for exactly these requests: context, sequences and KV cache; the rest from
        ``options``.

        Prefix cache, encoder cache and speculative decoding are off.
        """
        each = max(self.prompt_tokens + options.tokens, 16)
        size = EngineOptions().block_size
        count = len(self.conversations)
        return EngineOptions(
            device=options.device,
            dtype=options.dtype,
            max_model_len=each,
            max_num_seqs=count,
            kv_tokens=count * -(-each // size) * size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            image_tokens=self.image_limit,
            image_cache_bytes=0,
            prefix_cache=False,
            speculate=False,  # the time of a step is measured, not the text
            enforce_plan=True,
            offload=options.offload,
            kernels=options.kernels,
            kv_dtype=options.kv_dtype,
        )


def make_requests(checkpoint: Checkpoint, options: BenchOptions, count: int) -> BenchRequests:
    """Build ``count`` requests for ``checkpoint``, and count their tokens. Loads no weights.

    Raises ``DoesNotFit`` if prompt and answer exceed ``options.context``, ``UsageError`` for more tokens than
    the model supports, ``PictureError``, ``CheckpointError``, and ``InvalidRequest`` for ``options.pictures``
    with a text-only model.
    """
    from vlfit.prompt.builder import PromptBuilder

    _check_length(checkpoint, options)
    builder = PromptBuilder(checkpoint.folder, checkpoint.config)
    pictures = _pictures(checkpoint, options, count)
    conversations = [single_turn(QUESTION, *([picture] if picture else [])) for picture in pictures]
    # Synthetic pictures have one size, so one prompt is enough to count.
    distinct = [
        builder.build(each, options.image_tokens) for each in conversations[: len(options.pictures) or 1]
    ]
    largest = max(distinct, key=lambda prompt: prompt.image_tokens)
    longest, image_tokens = max(len(prompt.token_ids) for prompt in distinct), largest.image_tokens
    limit = options.image_tokens
    if limit is None and image_tokens:
        about = conversations[distinct.index(largest)]
        # A limit of exactly its size may shrink the picture, as the scale is rounded down.
        limit = image_tokens if builder.build(about, image_tokens).image_tokens == image_tokens else None
    context = options.context
    if context is None and not checkpoint.config.vision:
        context = TEXT_ONLY_PROMPT_TOKENS + options.tokens
    if context is not None:
        room = context - longest - options.tokens
        if room < 0:
            raise DoesNotFit(
                f"a prompt of {longest} tokens and {options.tokens} more exceed --context {context}",
                f"Use --context {longest + options.tokens} or more, a smaller --size, or fewer --tokens.",
            )
        text, added = _filled_question(builder, room)
        conversations = [single_turn(text, *([picture] if picture else [])) for picture in pictures]
        longest += added
    shared_pictures = bool(options.pictures) and len(options.pictures) < count
    return BenchRequests(tuple(conversations), longest, image_tokens, limit, shared_pictures)


def _check_length(checkpoint: Checkpoint, options: BenchOptions) -> None:
    """Raises ``UsageError`` for more tokens than the model supports."""
    most = checkpoint.config.text.max_position_embeddings
    for name, tokens in (("--context", options.context or 0), ("--tokens", options.tokens)):
        if tokens > most:
            raise UsageError(
                f"{name} is {tokens:,}; {checkpoint.name} runs with at most {most:,}, prompt and answer",
                f"Use {name} {most // 2 if name == '--tokens' else most} or less.",
            )


def _pictures(checkpoint: Checkpoint, options: BenchOptions, count: int) -> list[ImagePart | None]:
    if checkpoint.config.vision is None:
        if options.pictures:
            raise text_only_error(checkpoint.name, checkpoint.folder)
        return [None] * count
    if options.pictures:
        return [options.pictures[number % len(options.pictures)] for number in range(count)]
    return [
        ImagePart(synthetic_picture(*options.size, number), "synthetic picture") for number in range(count)
    ]


def _filled_question(builder: "PromptBuilder", room: int) -> tuple[str, int]:
    """The question, followed by up to ``room`` tokens of text, and their number."""

    def tokens(words: int) -> int:
        return len(builder.tokenizer.encode(QUESTION + _FILLER * words).ids)

    question_tokens = tokens(0)
    low, high = 0, room
    while low < high:  # binary search for the most words that fit
        middle = (low + high + 1) // 2
        if tokens(middle) - question_tokens <= room:
            low = middle
        else:
            high = middle - 1
    return QUESTION + _FILLER * low, tokens(low) - question_tokens
