"""Frames of videos and animations as pictures: what runs in a media worker.

FFmpeg gets the container's name and a short list of codecs, and nothing else to open, so that a file cannot
lead it to formats that read other files or addresses. What headers say about length and rate is only an
estimate: frames are taken by their own times.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any

from vlfit.errors import NotAPicture, PictureTooLarge
from vlfit.images import sandbox
from vlfit.images.limits import MAX_ASPECT
from vlfit.images.media_kinds import FRAME_PIXELS

if TYPE_CHECKING:
    from PIL import Image

# What phones, cameras, screen recorders and browsers write.
CODECS = frozenset(
    (
        *("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "mpeg4", "msmpeg4", "mpeg2video", "mpeg1video"),
        *("mjpeg", "prores", "dnxhd", "theora", "h263", "wmv2", "wmv3", "vc1", "flv", "dvvideo", "png"),
    )
)
_MAX_FRAME_PIXELS = 36_000_000  # 8K has 33 megapixels
_MAX_DECODED = 200_000  # frames decoded on the way to those taken; the time of a job ends most earlier
_SEEK_SECONDS = 4.0  # frames further apart are sought: between them there are key frames
_WITH_INDEX = ("mov", "matroska")  # in others a seek may end anywhere
_UNKNOWN_RATE = 25.0  # frames per second, for files that state neither times nor a rate
# Of all frames chosen by ``every``, so that a long video fits into RAM here and in the server. Models see
# less: Qwen3-VL's processor scales a clip down to 25 megapixels in all.
_MAX_PIXELS_IN_ALL = 64 * FRAME_PIXELS
_QUALITY = 92

Seconds = float


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as a JPEG file: upright, resized. ``seconds``: its time since the beginning of the video."""

    data: bytes
    seconds: Seconds


# A frame that was decoded but not converted: its time, and what makes a JPEG file of it.
_Decoded = tuple[Seconds, Callable[[], bytes]]
_Shown = tuple[Seconds, Seconds, Callable[[], bytes]]  # the same, from when until when


def sample_frames(
    decoded: Iterator[_Decoded],
    every: Seconds,
    max_frames: int,
    *,
    size: "FrameSize",
    length: Seconds | None = None,
    seek: "Callable[[Seconds], bool] | None" = None,
) -> list[Frame]:
    """Choose at most ``max_frames`` frames over the whole video, ``every`` seconds apart, or further if long.

    ``decoded``: all frames in order, as (seconds, function that makes a JPEG file of the frame); only chosen
    ones are converted. ``size``: what these functions use; made smaller if there are many frames, which all
    get one size. ``length``: of the video in seconds; None if unknown. If it turns out longer, every second
    frame chosen so far is dropped and the distance doubled. ``seek(seconds)``: make ``decoded`` continue from
    a key frame before that time, and return False if that is impossible; None: decode every frame.
    """
    step = max(every, (length or 0.0) / max_frames)
    frames: list[Frame] = []
    target = 0.0
    for seconds, convert in decoded:
        if seconds < target - 1e-6:
            continue
        frames.append(Frame(convert(), seconds))
        if len(frames) > max_frames:
            frames = frames[::2]
            step = max(2 * step, (frames[-1].seconds - frames[0].seconds) / max(len(frames) - 1, 1))
        if len(frames) * size.max_pixels > _MAX_PIXELS_IN_ALL:
            frames = size.halve(frames)
        target = max(frames[-1].seconds + step, seconds + 1e-6)
        if seek is not None and target - seconds > _SEEK_SECONDS and not seek(target):
            seek = None
    return frames


class FrameSize:
    """The one size of all frames of a video, of ``max_pixels`` at most. ``size``: None before the first."""

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.size: tuple[int, int] | None = None

    def encode(self, image: "Image.Image") -> bytes:
        """A JPEG file of ``image``, resized to the size of the first one."""
        if self.size is None:
            self.size = self._within(image.size)
        return jpeg_file(image if image.size == self.size else image.resize(self.size))

    def halve(self, frames: list[Frame]) -> list[Frame]:
        """Halve ``max_pixels`` and return ``frames`` in the new size."""
        from PIL import Image

        self.max_pixels //= 2
        before = self.size
        if before is None or self._within(before) == before:
            return frames
        self.size = self._within(before)
        return [replace(each, data=self.encode(Image.open(BytesIO(each.data)))) for each in frames]

    def _within(self, size: tuple[int, int]) -> tuple[int, int]:
        scale = min(1.0, math.sqrt(self.max_pixels / (size[0] * size[1])))
        return max(round(size[0] * scale), 1), max(round(size[1] * scale), 1)


def jpeg_file(image: "Image.Image") -> bytes:
    """``image`` as a JPEG file in which no difference is seen."""
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


class VideoFile:
    """An opened video, whose headers are read. Not thread-safe.

    ``container_format``: FFmpeg's name (``media_kinds.video_format``). ``label``: what errors call the video.
    ``max_pixels``: of a frame; larger ones are scaled down. ``length``: seconds, as stated in the headers;
    None if missing or absurd. ``notes``: what is damaged or misstated; complete once frames were taken.
    Raises ``NotAPicture`` for a damaged file, one without pictures or a codec not in ``CODECS``;
    ``PictureTooLarge`` above 36 megapixels or ``MAX_ASPECT``. So do the methods.
    """

    def __init__(self, file: IO[bytes], container_format: str, label: str, max_pixels: int) -> None:
        import av

        self._label = label
        self._size = FrameSize(max_pixels)
        self.notes: list[str] = []
        try:
            self._container: Any = av.open(
                file,
                format=container_format,
                container_options={"codec_whitelist": ",".join(sorted(CODECS)), "protocol_whitelist": "none"},
                io_open=_refuse_to_open,
            )
        except (av.FFmpegError, OSError, ValueError) as error:
            raise self._damaged(error) from None
        streams = self._container.streams.video
        if not streams:
            raise NotAPicture(f"{label} is a recording without pictures", "Name a video.")
        self._stream: Any = streams[0]
        codec = self._stream.codec_context
        if codec is None or codec.name not in CODECS:
            name = "an unknown one" if codec is None else codec.name
            raise NotAPicture(
                f"{label} is a video whose codec vlfit does not take: {name}",
                "Convert it: ffmpeg -i FILE -c:v libx264 new.mp4",
            )
        codec.thread_count = 1
        codec.thread_type = "NONE"
        self._check_size(codec.width, codec.height)
        self.length = self._stated_length()
        self._has_index = container_format in _WITH_INDEX

    def sample_frames(self, every: Seconds, max_frames: int) -> list[Frame]:
        """At most ``max_frames`` frames over the whole video, at least ``every`` seconds apart. Call once."""
        seek = self._seek if self._has_index else None
        size = self._size
        frames = sample_frames(self._decode(), every, max_frames, size=size, length=self.length, seek=seek)
        if not frames:
            raise self._damaged(None)
        last = frames[-1].seconds
        step = max(every, (self.length or 0.0) / max_frames)
        if self.length is not None and self.length - last > 2 * step + 1:
            if len(frames) < max_frames // 2 and self._seek(0.0):  # too far apart, because of a wrong length
                frames = sample_frames(self._decode(), every, max_frames, size=size) or frames
                last = frames[-1].seconds
            self.notes.append(f"its header says {self.length:,.0f} s; the last frame is at {last:,.1f} s")
        return frames

    def frames_at(self, times: list[Seconds]) -> list[Frame]:
        """The frame shown at each of ``times`` (seconds), in that order.

        Raises ``NotAPicture`` for a time after the end.
        """
        found: dict[Seconds, Frame] = {}
        for index, time in enumerate(sorted(set(times))):
            frame, end = None, None
            if time > _SEEK_SECONDS and self._has_index and self._seek(time):
                frame, end = self._shown_at(time)
            if frame is None:
                if index or end is not None:
                    self._seek(0.0)
                frame, end = self._shown_at(time)
            if frame is None:
                raise NotAPicture(
                    f"{self._label} has no frame at {time:g} s: it ends at {end or 0.0:,.1f} s",
                    "Name earlier times.",
                )
            found[time] = frame
        return [found[time] for time in times]

    def _shown_at(self, time: Seconds) -> tuple[Frame | None, Seconds | None]:
        """The frame shown at ``time``, from the present position on; None, and the last time, if there is
        none.
        """
        before: _Decoded | None = None
        for seconds, convert in self._decode():
            if seconds > time + 1e-3:
                shown = before or ((seconds, convert) if time < self._frame_seconds() else None)
                return (Frame(shown[1](), shown[0]), None) if shown else (None, seconds)
            before = (seconds, convert)
        if before is not None and time <= before[0] + max(self._frame_seconds() * 1.5, 0.1):
            return Frame(before[1](), before[0]), None
        return None, before[0] if before else 0.0

    def _decode(self) -> Iterator[_Decoded]:
        """All frames from the present position on, not converted. Damage in the middle is skipped."""
        import av

        stream, count = self._stream, 0
        begin = float((stream.start_time or 0) * stream.time_base) if stream.time_base else 0.0
        packets = self._container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                frames = packet.decode() if packet is not None else []
            except (av.EOFError, StopIteration):
                return
            except av.InvalidDataError as error:  # a damaged packet: decoders resume at the next key frame
                _raise_if_out_of_memory(error)
                count += 1
                frames = []
                packet = True
            except (av.FFmpegError, OSError) as error:
                _raise_if_out_of_memory(error)
                if not count:
                    raise self._damaged(error) from None
                self.notes.append("the file is damaged or truncated; what follows was not read")
                return
            if packet is None:
                return
            for frame in frames:
                count += 1
                if count > _MAX_DECODED:
                    raise PictureTooLarge(
                        f"{self._label} is too long: {_MAX_DECODED:,} frames were decoded",
                        "Name times instead: --at 0:35, or --every 60s.",
                    )
                time = frame.time
                seconds = max(time - begin, 0.0) if time is not None else (count - 1) * self._frame_seconds()
                yield seconds, partial(self._convert, frame)

    def _seek(self, seconds: Seconds) -> bool:
        import av

        stream = self._stream
        if not stream.time_base:
            return False
        try:
            offset = int(seconds / stream.time_base) + (stream.start_time or 0)
            self._container.seek(offset, stream=stream, backward=True)
        except (av.FFmpegError, OSError, OverflowError, ValueError):
            return False
        return True

    def _convert(self, frame: Any) -> bytes:
        """A JPEG file, upright, in the size of the first frame."""
        from PIL import Image

        self._check_size(frame.width, frame.height)
        turned = {
            90: Image.Transpose.ROTATE_90,
            -90: Image.Transpose.ROTATE_270,
            180: Image.Transpose.ROTATE_180,
        }
        transpose = turned.get(_right_angle(frame.rotation))
        width, height = self._shown_size(frame)
        image: Image.Image = frame.to_image(width=width, height=height)
        if transpose is not None:
            image = image.transpose(transpose)
        return self._size.encode(image)

    def _shown_size(self, frame: Any) -> tuple[int, int]:
        """Width and height as shown, within ``max_pixels``: pixels may not be square."""
        width, height = float(frame.width), float(frame.height)
        aspect = self._stream.sample_aspect_ratio
        if aspect and 0.1 < float(aspect) < 10:
            width *= float(aspect)
        scale = min(1.0, math.sqrt(self._size.max_pixels / (width * height)))
        return max(round(width * scale), 1), max(round(height * scale), 1)

    def _check_size(self, width: int, height: int) -> None:
        if width * height > _MAX_FRAME_PIXELS:
            raise PictureTooLarge(
                f"{self._label}: frames of {width:,}x{height:,} pixels; at most "
                f"{_MAX_FRAME_PIXELS / 1e6:.0f} megapixels are decoded",
                "Scale it down first: ffmpeg -i FILE -vf scale=1920:-2 new.mp4",
            )
        if min(width, height) > 0 and max(width, height) > MAX_ASPECT * min(width, height):
            raise PictureTooLarge(
                f"{self._label}: frames of {width:,}x{height:,} pixels; at most 1:{MAX_ASPECT} is supported",
                "Pad the short side.",
            )

    def _stated_length(self) -> Seconds | None:
        stream = self._stream
        length = 0.0
        if stream.duration and stream.time_base:
            length = float(stream.duration * stream.time_base)
        elif self._container.duration:
            length = self._container.duration / 1e6
        return length if 0 < length < 1e6 else None

    def _frame_seconds(self) -> Seconds:
        rate = self._stream.average_rate
        return 1 / float(rate) if rate and 0.01 < float(rate) < 1000 else 1 / _UNKNOWN_RATE

    def _damaged(self, error: Exception | None) -> NotAPicture:
        why = "no frame can be decoded" if error is None else getattr(error, "strerror", None) or str(error)
        return NotAPicture(
            f"{self._label} is a video that is truncated or damaged: {why[:200]}", "Copy it again."
        )


def _refuse_to_open(url: str, flags: int, options: dict[str, Any]) -> None:
    """What FFmpeg calls for further files and addresses that a file names."""
    raise PermissionError("a video may not open other files")


def _raise_if_out_of_memory(error: Exception) -> None:
    """Raise ``MemoryError`` if that is the cause of ``error``: the file is not called damaged then."""
    if sandbox.ran_out_of_memory(error):
        raise MemoryError from None


def _right_angle(degrees: float | None) -> int:
    """-90, 0, 90 or 180: the nearest to ``degrees``, counterclockwise."""
    turn = round((degrees or 0) / 90) % 4
    return {0: 0, 1: 90, 2: 180, 3: -90}[turn]


def animation_frames(
    data: bytes, label: str, every: Seconds, max_frames: int, max_pixels: int, at: Sequence[Seconds] = ()
) -> list[Frame]:
    """Frames of an animated GIF, WebP, PNG or AVIF, chosen by ``sample_frames``; of a still picture, one.

    ``data``: the file. ``max_pixels``: of a frame; larger ones are scaled down. ``at``: if not empty, the
    frames shown at these times, in that order, and no others. ``label``: what errors call the file. Raises
    ``NotAPicture``, also for a time after the end, ``PictureTooLarge`` and ``MemoryError``, as
    ``PictureFile`` does.
    """
    from vlfit.images.decode import PictureFile

    PictureFile(data, label)  # checks its size
    size = FrameSize(max_pixels)
    decoded = _animation(data, label, size)
    if at:
        return _shown_at_times(decoded, label, at)
    return sample_frames(((begin, convert) for begin, _, convert in decoded), every, max_frames, size=size)


def _shown_at_times(decoded: "Iterator[_Shown]", label: str, times: Sequence[Seconds]) -> list[Frame]:
    found: dict[Seconds, Frame] = {}
    wanted, end = sorted(set(times)), 0.0
    for begin, end, convert in decoded:
        shown = [time for time in wanted[len(found) :] if time < end - 1e-6]
        if shown:
            found |= dict.fromkeys(shown, Frame(convert(), begin))
        if len(found) == len(wanted):
            return [found[time] for time in times]
    raise NotAPicture(
        f"{label} has no frame at {wanted[len(found)]:g} s: it ends at {end:,.1f} s", "Name earlier times."
    )


def _animation(data: bytes, label: str, size: FrameSize) -> "Iterator[_Shown]":
    """All frames; each can be converted until the next one is asked for."""
    from PIL import Image

    def convert() -> bytes:
        shown = image.convert("RGBA")
        white = Image.new("RGBA", shown.size, "white")
        return size.encode(Image.alpha_composite(white, shown).convert("RGB"))

    image = Image.open(BytesIO(data))
    seconds = 0.0
    for index in range(_MAX_DECODED):
        try:
            image.seek(index)
            image.load()
        except EOFError:
            return
        except Exception as error:  # decoders raise anything on malformed data
            _raise_if_out_of_memory(error)
            if index:
                return
            raise NotAPicture(f"{label} is truncated or damaged: {error}", "Copy it again.") from None
        milliseconds = image.info.get("duration")
        # Browsers show frames of 10 ms and less for 100 ms.
        begin = seconds
        seconds += milliseconds / 1000 if isinstance(milliseconds, int | float) and milliseconds > 10 else 0.1
        yield begin, seconds, convert
