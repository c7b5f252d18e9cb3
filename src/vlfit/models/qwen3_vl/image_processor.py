"""Qwen3-VL's image processor: pictures and clips to resized pixels, and pixels to patches.

Sizes are the reference's (multiples of patch x merge within the checkpoint's pixel limits), capped by the
plan. Resampling is the reference's, bit for bit (``Qwen2VLImageProcessorPil``: Pillow, bicubic, 8-bit RGB).
Frames of a clip are resampled the same way; there the reference uses torchvision, whose antialiased bicubic
rounds slightly differently.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.api.outputs import ImageSeen
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.errors import InvalidRequest, PictureTooLarge
from vlfit.images.clips import LOW_DETAIL_TOKENS, check_clip, decode_frame, decode_picture, frame_param
from vlfit.images.decode_pool import DecodedPixels, Size
from vlfit.images.limits import MAX_ASPECT, check_picture_size
from vlfit.models.interface import PreparedImage
from vlfit.units import counted

if TYPE_CHECKING:
    import torch


CheckImage = Callable[[PreparedImage], None]


def prepare_image(
    part: ImagePart,
    processing: ImageProcessorConfig,
    max_tokens: int | None,
    check: CheckImage | None = None,
) -> PreparedImage:
    """Decode a picture and resize it to at most ``max_tokens`` image tokens (None: the checkpoint's limit).

    ``part.detail`` "low": to at most ``LOW_DETAIL_TOKENS``. ``check``: called before decoding with what
    ``image_from_header`` returns; it may raise to refuse the picture. Raises ``NotAPicture``,
    ``PictureTooLarge``, and what ``check`` raises.
    """
    cause = f"the plan allows {max_tokens} tokens per picture"
    if _is_capped_by_detail(part, max_tokens):
        cause = f"detail low means {LOW_DETAIL_TOKENS} tokens at most"

    def choose_size(width: int, height: int) -> Size:
        if check is not None:
            check(image_from_header(part, (width, height), processing, max_tokens))
        return _image_size(part, width, height, processing, max_tokens)

    decoded = decode_picture(part, choose_size)
    notes = [*decoded.notes, *_size_notes(decoded, processing, cause, frames=None)]
    pixels = decoded.pixels[None]
    # At one size a file always gives the same pixels, and being smaller it is hashed sooner.
    source = part.data if isinstance(part.data, bytes) and len(part.data) < pixels.nbytes else None
    return _new_prepared_image(pixels, decoded, processing, notes, frames=1, source=source)


def image_from_header(
    part: ImagePart, size: Size, processing: ImageProcessorConfig, max_tokens: int | None
) -> PreparedImage:
    """What the header tells of ``prepare_image``'s result; ``pixels`` and ``key`` are empty.

    ``size``: (width, height) as stored. As a picture may have to be rotated, it counts as the orientation
    with fewer tokens, so ``tokens`` is a lower bound. Raises ``NotAPicture`` or ``PictureTooLarge``.
    """
    seen = min(
        (
            _image_size(part, *size, processing, max_tokens),
            _image_size(part, *size[::-1], processing, max_tokens),
        ),
        key=math.prod,
    )
    return _without_pixels(size, seen, processing, frames=1)


def video_from_header(
    part: VideoPart, size: Size, processing: ImageProcessorConfig, max_tokens: int | None
) -> PreparedImage:
    """``image_from_header`` for a clip; ``size``: of its first frame.

    Raises ``NotAPicture``, ``PictureTooLarge``, and ``InvalidRequest`` for what ``check_clip`` refuses.
    """
    check_clip(part)
    frames = len(part.frames)
    seen = min(
        (
            _capped_size(*size, processing, max_tokens, frames),
            _capped_size(*size[::-1], processing, max_tokens, frames),
        ),
        key=math.prod,
    )
    return _without_pixels(
        size, seen, processing, frames, _frame_seconds(frames, part.fps, processing.temporal_patch_size)
    )


def _is_capped_by_detail(part: ImagePart, max_tokens: int | None) -> bool:
    return part.detail == "low" and (max_tokens is None or max_tokens > LOW_DETAIL_TOKENS)


def _image_size(
    part: ImagePart, width: int, height: int, processing: ImageProcessorConfig, max_tokens: int | None
) -> Size:
    cap = LOW_DETAIL_TOKENS if _is_capped_by_detail(part, max_tokens) else max_tokens
    return _capped_size(width, height, processing, cap, frames=None)


def prepare_video(
    part: VideoPart,
    processing: ImageProcessorConfig,
    max_tokens: int | None,
    check: CheckImage | None = None,
) -> PreparedImage:
    """Decode the frames of a clip and resize them to one size; the last is repeated to fill a temporal patch.

    ``processing``: settings for clips, whose pixel limits are for all frames together. ``max_tokens`` caps
    each temporal patch (a pair of frames) as it caps a picture. The reference's ``cap_pixels_per_frame`` is
    off, as by default in transformers. ``check``: called before decoding with what ``video_from_header``
    returns; it may raise to refuse the clip.

    Raises ``NotAPicture``, ``PictureTooLarge``, or ``InvalidRequest`` for no frames, more than
    ``MAX_FRAMES``, frames of unequal size, or an ``fps`` that is not a positive number.
    """
    check_clip(part)
    frames = len(part.frames)

    def choose_size(width: int, height: int) -> Size:
        if check is not None:
            check(video_from_header(part, (width, height), processing, max_tokens))
        return _capped_size(width, height, processing, max_tokens, frames)

    first = decode_frame(part, 0, choose_size)
    cause = f"the plan allows {max_tokens} tokens per pair of frames"
    notes = [*first.notes, *_size_notes(first, processing, cause, frames)]
    repeats = -frames % processing.temporal_patch_size
    pixels = np.empty((frames + repeats, *first.pixels.shape), dtype=np.uint8)
    pixels[0] = first.pixels
    for index in range(1, frames):
        frame = decode_frame(part, index, choose_size)
        if (frame.width, frame.height) != (first.width, first.height):
            raise InvalidRequest(
                f"{part.label}: frame {index + 1} is {frame.width}x{frame.height}, "
                f"the first is {first.width}x{first.height}",
                "All frames of a clip must have one size; send others as separate pictures.",
                param=frame_param(part, index) or "messages",
            )
        pixels[index] = frame.pixels
    if repeats:
        pixels[frames:] = pixels[frames - 1]
        notes.append(f"last frame repeated {counted(repeats, 'time')}")
    seconds = _frame_seconds(frames, part.fps, processing.temporal_patch_size)
    return _new_prepared_image(pixels, first, processing, notes, frames, seconds)


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, label: str = "picture"
) -> tuple[int, int]:
    """The (height, width) that a picture of ``height`` x ``width`` pixels is resized to.

    Both are multiples of ``factor``, and their product is between ``min_pixels`` and ``max_pixels``, as
    far as the aspect ratio permits: transformers' ``smart_resize`` (Qwen2-VL), rounding included. Raises
    ``PictureTooLarge`` for aspect ratios above 1:200, as transformers does, and above ``MAX_PIXELS``, and
    ``NotAPicture`` for an empty picture; ``label`` names the picture in the error.
    """
    check_picture_size(width, height, label)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    return _into_limits(rows, columns, 1, (1, height, width), factor, min_pixels, max_pixels)


def smart_resize_video(
    frames: int,
    height: int,
    width: int,
    temporal_factor: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    label: str = "video",
) -> tuple[int, int]:
    """The (height, width) that the ``frames`` frames of a clip are resized to.

    Both are multiples of ``factor``. As in transformers' Qwen3-VL video processor, ``min_pixels`` and
    ``max_pixels`` are for all frames together; fewer than ``temporal_factor`` frames count as that many.
    Raises as ``smart_resize``; ``label`` names the clip.
    """
    check_picture_size(width, height, label)
    frames = max(frames, temporal_factor)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise PictureTooLarge(f"{label}: sides over 1:{MAX_ASPECT}", "Pad the short side.")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    rounded_frames = round(frames / temporal_factor) * temporal_factor
    return _into_limits(
        rows, columns, rounded_frames, (frames, height, width), factor, min_pixels, max_pixels
    )


def patchify(
    pixels: "torch.Tensor", processing: ImageProcessorConfig, dtype: "torch.dtype | None" = None
) -> "torch.Tensor":
    """Normalized patches of one picture or clip, on the device of ``pixels``.

    uint8 [frames, height, width, 3] to ``dtype`` (None: float32) [patches, 3 * temporal * patch * patch].
    Patches are in merge order: time, then rows and columns of ``merge`` x ``merge`` squares, then inside a
    square. Values of a patch: channel, time, row, column. A picture's only frame is repeated to fill the
    temporal patch.
    """
    import torch

    from vlfit import kernels

    dtype = dtype or torch.float32
    frames, height, width, channels = pixels.shape
    patch, merge, temporal = processing.patch_size, processing.merge_size, processing.temporal_patch_size
    if kernels.enabled_for("tower", pixels.device):
        from vlfit.kernels.rows.vision_ops import extract_patches

        numbers = torch.from_numpy(normalized_byte_values(processing)).to(pixels.device, non_blocking=True)
        return extract_patches(pixels, numbers, dtype, patch, merge, temporal)
    depth = min(frames, temporal)
    rows, columns = height // (patch * merge), width // (patch * merge)
    # Split channels while values are bytes: whole rows of a patch then move at once.
    planes = pixels.permute(0, 3, 1, 2).contiguous().to(torch.float32)
    squares = _normalize(planes, processing, 1).view(
        -1, depth, channels, rows, merge, patch, columns, merge, patch
    )
    ordered = squares.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    if frames == 1:
        ordered = ordered.expand(-1, -1, -1, -1, -1, -1, temporal, -1, -1)
    return ordered.reshape(-1, channels * temporal * patch * patch).to(dtype)


def patches_by_time(
    pixels: NDArray[np.uint8], processing: ImageProcessorConfig, device: "torch.device", dtype: "torch.dtype"
) -> "Iterator[torch.Tensor]":
    """Yield ``patchify`` of each temporal patch: of a picture once, of a clip for each pair of frames.

    ``pixels`` [frames, height, width, 3] on the host are copied to ``device`` one temporal patch at a time.
    """
    import torch

    depth = min(len(pixels), processing.temporal_patch_size)
    for first in range(0, len(pixels), depth):
        part = torch.from_numpy(pixels[first : first + depth])
        # From pageable memory CUDA returns once all is read, without waiting for earlier work of the device.
        yield patchify(part.to(device, non_blocking=True), processing, dtype)


@lru_cache(maxsize=4)  # of a checkpoint
def normalized_byte_values(processing: ImageProcessorConfig) -> NDArray[np.float32]:
    """The normalized value of each byte value in each channel: [256, 3]. Cached: do not modify the array."""
    import torch

    ramp = torch.arange(256, dtype=torch.float32)[:, None].repeat(1, len(processing.mean))
    numbers: NDArray[np.float32] = _normalize(ramp, processing, 1).numpy()
    return numbers


def _normalize(values: "torch.Tensor", processing: ImageProcessorConfig, channel: int) -> "torch.Tensor":
    """Normalize float32 byte values in place, as the reference does on a CPU. ``channel``: its dimension."""
    import torch

    shape = [1] * values.dim()
    shape[channel] = -1
    mean, std = (
        torch.tensor(numbers, dtype=torch.float32, device=values.device).view(shape)
        for numbers in (processing.mean, processing.std)
    )
    return values.div_(1.0 / processing.rescale_factor).sub_(mean).div_(std)


def _into_limits(
    rows: int,
    columns: int,
    rounded_frames: int,
    original: tuple[int, int, int],
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Scale the rounded size so that all frames together are within the limits, as the reference does."""
    frames, height, width = original
    if rounded_frames * rows * columns > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rounded_frames * rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def _capped_size(
    width: int, height: int, processing: ImageProcessorConfig, max_tokens: int | None, frames: int | None
) -> Size:
    """The reference's (width, height) under the plan's cap; ``frames``: None for a picture."""
    factor = processing.patch_size * processing.merge_size
    most, least = processing.max_pixels, processing.min_pixels
    if max_tokens is not None:
        counted = 1 if frames is None else max(frames, processing.temporal_patch_size)
        most = min(most, max_tokens * factor * factor * counted)
        least = min(least, most)
    if frames is None:
        height, width = smart_resize(height, width, factor, least, most)
    else:
        temporal = processing.temporal_patch_size
        height, width = smart_resize_video(frames, height, width, temporal, factor, least, most)
    if max_tokens is None:
        return width, height
    # The formula keeps each side at one factor or more and rounds small pictures up, so a long thin one can
    # exceed the cap. The cap is planned memory: shorten the long side.
    if height <= width:
        return min(width, max(max_tokens * factor // height, 1) * factor), height
    return width, min(height, max(max_tokens * factor // width, 1) * factor)


def _size_notes(
    image: DecodedPixels, processing: ImageProcessorConfig, cause: str, frames: int | None
) -> list[str]:
    """Notes on downscaling by the plan's cap (``cause``) or, for a picture, the checkpoint's own limit.

    Enlarging to the smallest size and rounding to patches are not noted.
    """
    uncapped = _capped_size(image.width, image.height, processing, None, frames)
    height, width, _ = image.pixels.shape
    if (width, height) == uncapped:
        if frames is not None or image.height * image.width <= processing.max_pixels:
            return []
        cause = f"the checkpoint takes at most {processing.max_tokens} tokens per picture"
    if height * width < image.height * image.width:
        return [f"scaled down from {image.width}x{image.height} to {width}x{height}: {cause}"]
    # The cap is below the checkpoint's smallest size.
    return [f"seen at {width}x{height} instead of {uncapped[0]}x{uncapped[1]}: {cause}"]


def _new_prepared_image(
    pixels: NDArray[np.uint8],
    original: DecodedPixels,
    processing: ImageProcessorConfig,
    notes: list[str],
    frames: int,
    frame_seconds: tuple[float, ...] = (),
    source: bytes | None = None,
) -> PreparedImage:
    """``source``: the file that ``pixels`` were decoded from; None to tell pictures apart by ``pixels``."""
    _, height, width, _ = pixels.shape
    steps = max(len(frame_seconds), 1)
    grid = (steps, height // processing.patch_size, width // processing.patch_size)
    tokens = math.prod(grid) // processing.merge_size**2
    digest = hashlib.sha256(repr((pixels.shape, source is None)).encode())
    digest.update(pixels.data if source is None else source)
    seen = ImageSeen(original.width, original.height, width, height, tokens, frames, tuple(notes))
    return PreparedImage(pixels, grid, tokens, digest.digest(), seen, bool(frame_seconds), frame_seconds)


def _without_pixels(
    size: Size,
    seen: Size,
    processing: ImageProcessorConfig,
    frames: int,
    frame_seconds: tuple[float, ...] = (),
) -> PreparedImage:
    width, height = seen
    grid = (max(len(frame_seconds), 1), height // processing.patch_size, width // processing.patch_size)
    tokens = math.prod(grid) // processing.merge_size**2
    pixels = np.empty((0, height, width, 3), dtype=np.uint8)
    image = ImageSeen(*size, width, height, tokens, frames)
    return PreparedImage(pixels, grid, tokens, b"", image, bool(frame_seconds), frame_seconds)


def _frame_seconds(frames: int, fps: float, temporal: int) -> tuple[float, ...]:
    """The time of each temporal patch: the mean of its first and last frame's, as the reference has it."""
    indices = [*range(frames), *([frames - 1] * (-frames % temporal))]
    starts = range(0, len(indices), temporal)
    return tuple((indices[i] / fps + indices[i + temporal - 1] / fps) / 2 for i in starts)
