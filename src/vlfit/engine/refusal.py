"""What a prompt longer than the context is told: how much shorter it must be, and which pictures would fit.

Knows: tokens of text and pictures, and how pictures are resized, so that a size it names really fits. Does
not know: the model, nor who runs.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many

from vlfit.checkpoint.sidecar import ImageProcessing
from vlfit.engine.images import PreparedImage, smart_resize
from vlfit.engine.prompt import Prompt
from vlfit.errors import DoesNotFit

_AROUND = 2  # tokens that go with each picture, and with each time step of a clip: its start and its end


def too_long(
    prompt: Prompt, context: int, processing: ImageProcessing | None, or_else: str = ""
) -> DoesNotFit:
    """The error for a ``prompt`` that leaves no token for an answer.

    ``processing``: None where the model has no eyes. ``or_else``: what whoever started the engine can do.
    """
    tokens, of_pictures = len(prompt.token_ids), prompt.image_tokens
    text, surplus = tokens - of_pictures, tokens - (context - 1)
    ways = list(_ways_with_pictures(prompt.images, context - 1 - text, processing)) if processing else []
    if text > surplus:
        ways.append(f"shorten the text by {surplus} tokens")
    if or_else:
        ways.append(or_else)
    return DoesNotFit(
        f"the prompt is {tokens} tokens ({of_pictures} of them pictures); "
        f"the context holds {context}, with at least one for the answer",
        ", or ".join(ways) or "send less",
    )


def _ways_with_pictures(images: Many[PreparedImage], room: int, processing: ImageProcessing) -> Iterator[str]:
    """``room`` tokens are left for pictures beside the text: smaller ones, or fewer."""
    least = -(-processing.min_pixels // (processing.patch_size * processing.merge_size) ** 2)
    whole = most_pictures(images, room)
    for count in range(len(images), whole, -1):
        level = largest_level(images[:count], room + _around(images[count:]))
        size = _pixels(images[:count], level, processing) if level >= least else None
        if size is not None:
            yield f"{_first(count, len(images))} with at most {level} tokens{_each(images)}{size}"
            break
    if 0 < whole < len(images):
        yield f"{_first(whole, len(images))} as {'it is' if whole == 1 else 'they are'}"


def _first(count: int, of: int) -> str:
    if of == 1:
        return "the picture fits"
    if count == of:
        return f"all {of} pictures fit"
    return "the first picture fits" if count == 1 else f"the first {count} pictures fit"


def _around(images: Many[PreparedImage]) -> int:
    """Tokens of text that go with ``images``."""
    return sum(_AROUND * image.grid[0] for image in images)


def largest_level(images: Many[PreparedImage], room: int) -> int:
    """The most tokens that each picture (and each time step of a clip) may have so that all together have
    at most ``room``. Smaller ones stay as they are.
    """
    steps = sorted(image.tokens // image.grid[0] for image in images for _ in range(image.grid[0]))
    for index, tokens in enumerate(steps):
        level = max(room, 0) // (len(steps) - index)
        if tokens > level:
            return level
        room -= tokens
    return steps[-1] if steps else 0


def most_pictures(images: Many[PreparedImage], room: int) -> int:
    """How many of ``images``, from the first on, fit as they are if the others are left out."""
    for count in range(len(images), 0, -1):
        if sum(image.tokens for image in images[:count]) <= room + _around(images[count:]):
            return count
    return 0


def _each(images: Many[PreparedImage]) -> str:
    if any(image.is_video for image in images):
        return " each (a clip: for every two frames)"
    return " each" if len(images) > 1 else ""


def _pixels(images: Many[PreparedImage], level: int, processing: ImageProcessing) -> str | None:
    """A size of at most ``level`` tokens, in the shape of the largest picture.

    None: it is below the checkpoint's least, and would be enlarged to more than ``level``.
    """
    factor = processing.patch_size * processing.merge_size
    largest = max(images, key=lambda image: image.tokens // image.grid[0])
    height, width = smart_resize(
        largest.seen.height, largest.seen.width, factor, processing.min_pixels, level * factor**2
    )
    if height * width < processing.min_pixels:
        return None
    if height * width > level * factor**2:
        return ""  # so long and thin that the formula gives more
    return f", {width}x{height} pixels"
