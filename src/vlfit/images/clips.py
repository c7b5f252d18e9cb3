"""Pictures and clips of a request, whichever model reads them: limits, frames, and where an error was."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.errors import InvalidRequest, PictureError
from vlfit.images.cancellation import check_cancelled
from vlfit.images.decode_pool import ChooseSize, DecodedPixels, decode_pool

MAX_FRAMES = 768  # transformers samples no more from any clip
LOW_DETAIL_TOKENS = 256  # 512x512 pixels, which is what OpenAI's low detail means


def check_clip(part: VideoPart) -> None:
    """Raises ``InvalidRequest`` for no frames, more than ``MAX_FRAMES``, or a rate that is not positive."""
    if not 0 < len(part.frames) <= MAX_FRAMES:
        raise InvalidRequest(
            f"{part.label} has {len(part.frames)} frames",
            f"A clip has 1 to {MAX_FRAMES} frames; 2 per second are usual.",
            param="messages",
        )
    if not (math.isfinite(part.fps) and part.fps > 0):
        raise InvalidRequest(f"{part.label}: fps is {part.fps}", "fps must be above 0", param="messages")


def decode_picture(part: ImagePart, choose_size: ChooseSize) -> DecodedPixels:
    """Decode a picture and resize it (see ``DecodePool.decode``). Errors name its field of the request."""
    with error_param(part.place):
        return decode_pool().decode(part.data, part.label, choose_size)


def decode_frame(part: VideoPart, index: int, choose_size: ChooseSize) -> DecodedPixels:
    """Decode and resize one frame of a clip."""
    check_cancelled()
    with error_param(frame_param(part, index)):
        return decode_pool().decode(part.frames[index], f"{part.label} frame {index + 1}", choose_size)


def frame_param(part: VideoPart, index: int) -> str | None:
    """The field of the request that one frame came in."""
    return None if part.place is None else f"{part.place}[{index}]"


@contextmanager
def error_param(param: str | None) -> Iterator[None]:
    """Errors about a picture name the field of the request that it came in."""
    try:
        yield
    except PictureError as error:
        error.param = error.param or param
        raise
