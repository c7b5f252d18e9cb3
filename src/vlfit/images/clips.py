"""Decode the pictures and clips of a request, whichever model reads them; errors name the field."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.errors import InvalidRequest, PictureError
from vlfit.images.cancellation import check_cancelled
from vlfit.images.decode_pool import ChooseSize, DecodedPixels, Size, decode_pool

MAX_FRAMES = 768  # transformers samples no more from any clip
LOW_DETAIL_TOKENS = 256  # 512x512 pixels, which is what OpenAI's low detail means


def check_clip(part: VideoPart) -> None:
    """Raise ``InvalidRequest`` for no frames, more than ``MAX_FRAMES``, or an ``fps`` that is not above 0."""
    if not 0 < len(part.frames) <= MAX_FRAMES:
        raise InvalidRequest(
            f"{part.label} has {len(part.frames)} frames",
            f"A clip has 1 to {MAX_FRAMES} frames; 2 per second are usual.",
            param="messages",
        )
    if not (math.isfinite(part.fps) and part.fps > 0):
        raise InvalidRequest(f"{part.label}: fps is {part.fps}", "fps must be above 0", param="messages")


def decode_picture(part: ImagePart, choose_size: ChooseSize) -> DecodedPixels:
    """Decode and resize a picture as ``DecodePool.decode`` does, in the pool of this process.

    The result has the notes of ``part`` before its own. Picture errors have ``part.place`` as ``param``.
    """
    with with_error_param(part.place):
        return _with_notes(part.notes, decode_pool().decode(part.data, part.label, choose_size))


def header_size(part: ImagePart | VideoPart) -> Size:
    """Width and height of a picture, or of a clip's first frame, as stored: before EXIF rotation.

    Picture errors have the request field of the picture or frame as ``param``.
    """
    if isinstance(part, ImagePart):
        with with_error_param(part.place):
            return decode_pool().header_size(part.data, part.label)
    with with_error_param(frame_param(part, 0)):
        return decode_pool().header_size(part.frames[0], f"{part.label} frame 1")


def decode_frame(part: VideoPart, index: int, choose_size: ChooseSize) -> DecodedPixels:
    """``decode_picture`` for the frame of a clip at ``index``, from 0. Frame 0 gets the notes of the clip.

    Also raises ``Cancelled``.
    """
    check_cancelled()
    with with_error_param(frame_param(part, index)):
        decoded = decode_pool().decode(part.frames[index], f"{part.label} frame {index + 1}", choose_size)
        return decoded if index else _with_notes(part.notes, decoded)


def _with_notes(notes: tuple[str, ...], decoded: DecodedPixels) -> DecodedPixels:
    return replace(decoded, notes=(*notes, *decoded.notes)) if notes else decoded


def frame_param(part: VideoPart, index: int) -> str | None:
    """The request field of the frame at ``index``, ``part.place[index]``; None if ``part.place`` is None."""
    return None if part.place is None else f"{part.place}[{index}]"


@contextmanager
def with_error_param(param: str | None) -> Iterator[None]:
    """Within the block, set ``param`` of picture errors that have none."""
    try:
        yield
    except PictureError as error:
        error.param = error.param or param
        raise
