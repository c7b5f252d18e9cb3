"""What is to be measured, and the requests that it takes: pictures, a question, prompts of the right length.

Knows tokens and pictures of one checkpoint before anything of it is loaded. Does not measure.
"""

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Literal

from vlfit.api.conversation import Conversation, ImagePart, ask
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.config import no_eyes
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import DoesNotFit, UsageError

if TYPE_CHECKING:
    from vlfit.prompt.builder import PromptBuilder


# Pictures made up for measuring: areas, edges and grain, the same at every call. Knows Pillow.


QUESTION = "Describe this picture in detail."
_GRAIN = 16  # of 256 shades: as much as makes a JPEG about as large as a photo's


def made_up_picture(width: int, height: int, number: int = 0) -> bytes:
    """A JPEG; another one for each ``number``, so that nothing can be remembered from one to the next."""
    import numpy as np
    from PIL import Image, ImageDraw

    grain = np.random.default_rng(number).integers(0, _GRAIN, (height, width, 3), dtype=np.uint8)
    shades = np.linspace(60, 200, width, dtype=np.uint8)[None, :, None]
    picture = Image.fromarray(shades + grain)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((width // 8, height // 8, width // 2, height // 2), fill=(200, 40, 40))
    if width > 40 and height > 40:
        draw.rectangle((width // 2, height // 2, width - 20, height - 20), fill=(40, 60, 200))
    file = BytesIO()
    picture.save(file, "JPEG", quality=90)
    return file.getvalue()


TEXT_ONLY_PROMPT = 512  # tokens that a model without eyes reads, as other tools have it
MOST_AT_ONCE = 256
_WORD = " and"  # what fills a prompt


@dataclass(frozen=True, slots=True)
class Wanted:
    """``pictures``: files, asked about in turn; none: made up, of ``size`` (width, height) in pixels.

    ``tokens`` are decoded for each request, ``repeat`` times after once to warm up. ``batches``: how many
    requests at once. ``context``: the prompt is filled up with text until it and the answer are so long;
    None: it is as long as it is. The rest is as in ``EngineOptions``.
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
    chunk: int = 1024
    offload: int | Literal["auto"] | None = None
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise UsageError(f"--tokens is {self.tokens}", "decode at least 2: the first is the prompt's")
        if self.repeat < 1:
            raise UsageError(f"--repeat is {self.repeat}", "measure at least once")
        if not self.batches or not all(1 <= count <= MOST_AT_ONCE for count in self.batches):
            named = ",".join(map(str, self.batches))
            raise UsageError(f"--batch is {named!r}", f"write numbers from 1 to {MOST_AT_ONCE}, like 1,4,8")


@dataclass(frozen=True, slots=True)
class Requests:
    """``conversations``, as many as are asked at once at most.

    The longest prompt has ``prompt_tokens``, the largest picture ``image_tokens``, and ``image_limit`` is one
    that leaves it as large. ``alike``: some are about the same picture.
    """

    conversations: tuple[Conversation, ...]
    prompt_tokens: int
    image_tokens: int
    image_limit: int | None
    alike: bool

    def options(self, wanted: Wanted) -> EngineOptions:
        """An engine with room for these requests and for nothing else, that remembers nothing."""
        each = max(self.prompt_tokens + wanted.tokens, 16)
        size = EngineOptions().block_size
        at_once = len(self.conversations)
        return EngineOptions(
            device=wanted.device,
            dtype=wanted.dtype,
            context=each,
            sequences=at_once,
            kv_tokens=at_once * -(-each // size) * size,
            chunk=wanted.chunk,
            image_tokens=self.image_limit,
            image_cache_bytes=0,
            prefix_cache=False,
            speculate=False,  # a step is measured, not what is said
            keep_to_plan=True,
            offload=wanted.offload,
            kv_dtype=wanted.kv_dtype,
        )


def requests_for(checkpoint: Checkpoint, wanted: Wanted, at_once: int) -> Requests:
    """``at_once`` requests as they are ``wanted``.

    Raises ``DoesNotFit`` for a context that they do not fit, ``PictureError``, ``CheckpointError``, and
    ``InvalidRequest`` for a picture where the model has no eyes.
    """
    from vlfit.prompt.builder import PromptBuilder

    _check_length(checkpoint, wanted)
    builder = PromptBuilder(checkpoint.folder, checkpoint.config)
    pictures = _pictures(checkpoint, wanted, at_once)
    bare = [ask(QUESTION, *([picture] if picture else [])) for picture in pictures]
    # Pictures that are made up are of one size.
    distinct = [builder.build(each, wanted.image_tokens) for each in bare[: len(wanted.pictures) or 1]]
    largest = max(distinct, key=lambda prompt: prompt.image_tokens)
    longest, image_tokens = max(len(prompt.token_ids) for prompt in distinct), largest.image_tokens
    limit = wanted.image_tokens
    if limit is None and image_tokens:
        about = bare[distinct.index(largest)]
        # A limit of just its size may make a picture smaller, as the scale is rounded down.
        limit = image_tokens if builder.build(about, image_tokens).image_tokens == image_tokens else None
    context = wanted.context
    if context is None and not checkpoint.config.vision:
        context = TEXT_ONLY_PROMPT + wanted.tokens
    if context is not None:
        room = context - longest - wanted.tokens
        if room < 0:
            raise DoesNotFit(
                f"a prompt of {longest} tokens and {wanted.tokens} more are over --context {context}",
                f"ask for --context {longest + wanted.tokens} or more, a smaller --size, or fewer --tokens",
            )
        text, added = _filled(builder, room)
        bare = [ask(text, *([picture] if picture else [])) for picture in pictures]
        longest += added
    alike = bool(wanted.pictures) and len(wanted.pictures) < at_once
    return Requests(tuple(bare), longest, image_tokens, limit, alike)


def _check_length(checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Before a text of that length is made."""
    most = checkpoint.config.text.max_position_embeddings
    for name, tokens in (("--context", wanted.context or 0), ("--tokens", wanted.tokens)):
        if tokens > most:
            raise UsageError(
                f"{name} is {tokens:,}; {checkpoint.name} runs with at most {most:,}, prompt and answer",
                f"use {name} {most // 2 if name == '--tokens' else most} or less",
            )


def _pictures(checkpoint: Checkpoint, wanted: Wanted, at_once: int) -> list[ImagePart | None]:
    if checkpoint.config.vision is None:
        if wanted.pictures:
            raise no_eyes(checkpoint.name)
        return [None] * at_once
    if wanted.pictures:
        return [wanted.pictures[number % len(wanted.pictures)] for number in range(at_once)]
    return [ImagePart(made_up_picture(*wanted.size, number), "made-up picture") for number in range(at_once)]


def _filled(builder: "PromptBuilder", room: int) -> tuple[str, int]:
    """The question with up to ``room`` tokens of text behind it, and how many they are."""

    def tokens(words: int) -> int:
        return len(builder.tokenizer.encode(QUESTION + _WORD * words).ids)

    none = tokens(0)
    low, high = 0, room
    while low < high:  # the most words that have room
        middle = (low + high + 1) // 2
        if tokens(middle) - none <= room:
            low = middle
        else:
            high = middle - 1
    return QUESTION + _WORD * low, tokens(low) - none
