"""Pictures and clips for a processor that nobody here knows: decoded by us, made smaller where they must be.

Knows: that more pixels are more tokens in most processors. Does not know how many.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from vlfit.engine.answer import ImageSeen
from vlfit.engine.conversation import ImagePart, VideoPart
from vlfit.engine.images import LOW_DETAIL, check_clip, decode_frame, naming
from vlfit.engine.picture_files import decode
from vlfit.errors import InvalidRequest

_LEAST_EDGE = 28  # pixels: no processor makes anything of fewer


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A picture, or the frames of a clip, upright and in RGB, as the processor gets it.

    ``size``: of the original. ``metadata``: of a clip, what processors want to be told; None for a picture.
    """

    part: ImagePart | VideoPart
    frames: tuple[Image.Image, ...]
    size: tuple[int, int]
    notes: tuple[str, ...]
    metadata: dict[str, Any] | None = None

    @property
    def pixels(self) -> Any:
        """A Pillow image, or uint8 [frames, height, width, 3]."""
        return (
            self.frames[0] if self.metadata is None else np.stack([np.asarray(each) for each in self.frames])
        )

    def most(self, limit: int) -> int:
        """Tokens that it may have where ``limit`` is what a picture may have: of a clip, each two frames."""
        if isinstance(self.part, VideoPart):
            return limit * math.ceil(len(self.frames) / 2)
        return min(limit, LOW_DETAIL) if self.part.detail == "low" else limit

    def told(self, tokens: int, size: tuple[int, int] | None) -> ImageSeen:
        """For the caller. ``size``: at which the model sees it; None: nobody told."""
        notes = self.notes
        if size is None:
            size = self.frames[0].size
            notes = (*notes, "the model sees it in pieces, or in a size of its own")
        return ImageSeen(*self.size, *size, tokens, len(self.frames), notes)


def decoded(part: ImagePart | VideoPart) -> Seen:
    """Raises ``PictureError``, or ``InvalidRequest`` for a clip that is none."""
    if isinstance(part, ImagePart):
        with naming(part.place):
            found = decode(part.data, part.label)
        return Seen(part, (found.image,), found.image.size, found.notes)
    check_clip(part)
    frames = [decode_frame(part, index) for index in range(len(part.frames))]
    first = frames[0].image
    for index, frame in enumerate(frames):
        if frame.image.size != first.size:
            raise InvalidRequest(
                f"{part.label}: frame {index + 1} is {frame.image.width}x{frame.image.height}, "
                f"the first is {first.width}x{first.height}",
                "All frames of a clip must have one size; send others as separate pictures.",
                param="messages",
            )
    count = len(frames)
    metadata = {
        "total_num_frames": count,
        "fps": part.fps,
        "duration": count / part.fps,
        "frames_indices": list(range(count)),
        "width": first.width,
        "height": first.height,
    }
    return Seen(part, tuple(each.image for each in frames), first.size, frames[0].notes, metadata)


def smaller(seen: Seen, tokens: int, limit: int, size: tuple[int, int] | None) -> Seen:
    """``seen`` scaled down, so that of its ``tokens`` about as many are left as it may have.

    ``size``: at which the model saw it, perhaps scaled down already; None: nobody told.
    """
    most = seen.most(limit)
    width, height = min(seen.frames[0].size, size or seen.frames[0].size, key=math.prod)
    share = math.sqrt(most / tokens) * 0.97  # sizes are rounded up by processors
    scaled = max(int(width * share), _LEAST_EDGE), max(int(height * share), _LEAST_EDGE)
    frames = tuple(each.resize(scaled, Image.Resampling.BICUBIC) for each in seen.frames)
    what = "each two frames" if seen.metadata is not None else "a picture"
    why = f"at most {min(limit, LOW_DETAIL) if most < limit else limit} tokens for {what}"
    kept = tuple(note for note in seen.notes if not note.startswith("scaled down"))
    metadata = seen.metadata and {**seen.metadata, "width": scaled[0], "height": scaled[1]}
    return replace(
        seen,
        frames=frames,
        notes=(*kept, f"scaled down to {scaled[0]}x{scaled[1]}: {why}"),
        metadata=metadata,
    )
