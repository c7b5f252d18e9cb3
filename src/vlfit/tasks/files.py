"""Documents, videos, camera RAW photos and animations as parts of a conversation.

``load_file`` turns any source into a part. A PDF or a video becomes a ``MediaFile``; when the request is
prepared, ``fit_conversation`` expands it into as many pages or frames as the context has room for.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vlfit.api.conversation import Conversation, ImagePart, Part, VideoPart, single_turn
from vlfit.api.pooling import PoolingParams
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend
from vlfit.errors import DoesNotFit, InvalidRequest, NotAPicture, UsageError
from vlfit.images.clips import with_error_param
from vlfit.images.media_kinds import (
    FRAMES_PER_SECOND,
    MAX_FRAMES,
    MAX_PAGES,
    MEDIA_EXTENSIONS,
    MediaKind,
    check_installed,
    is_animation,
    media_kind,
    media_kind_of,
)
from vlfit.images.spooled_file import EncodedFile
from vlfit.units import counted, parse_seconds

if TYPE_CHECKING:
    from PIL import Image

    from vlfit.images.media_pool import Frames

_PAGES = re.compile(r"(?P<file>.+)#(?P<pages>[0-9]+(-[0-9]*)?(,[0-9]+(-[0-9]*)?)*)", re.DOTALL)
_TIME = re.compile(r"(?:(?:(\d+):)?(\d{1,2}):)?(\d+(?:\.\d*)?|\.\d+)")
_FIRST_FRAMES = 64  # tried first where the context is not known
_FRAME_TOKENS = 64  # at least, of a frame that is worth looking at
_MIN_FRAMES = 2
_PICTURE_FRAMES = 8  # of a video, for models that take no clips
_PAGE_TOKENS = 2_200  # of an A4 page, if the backend does not count them
_ANSWER_TOKENS = 256  # kept free beside pages
_PAGES_AT_ONCE = 8  # rendered in one go where pages are used one after another
_TIME_WITH_UNIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|min|h)", re.IGNORECASE)
_TIME_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600}  # in seconds
_MAX_TIMES = 100
_MAX_TIME_CHARACTERS = 20

T = TypeVar("T")

logger = logging.getLogger("vlfit")


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """What to take of videos and animations.

    ``every``: seconds between frames; None: two frames a second. Longer videos get fewer, over their whole
    length. ``at``: times in seconds: take the frames at these times as pictures, and no others. ``clip``:
    take an animated picture (GIF, WebP, ...) as a clip, instead of its first frame; ``at``: as a video.
    """

    every: float | None = None
    at: tuple[float, ...] = ()
    clip: bool = False


_DEFAULTS = MediaOptions()


@dataclass(slots=True, eq=False)
class MediaFile:
    """A PDF, video or RAW photo, which stands in a conversation until ``fit_conversation`` decodes it.

    ``file``: its bytes, or its path. ``label`` names it in errors. ``ranges``: the chosen pages of a PDF as
    (first, last), from 1; last 0: to the end. ``max_parts``: pages or frames at most; None: no limit but
    ``MAX_PAGES`` and ``MAX_FRAMES``. ``place``: the request field that held it. ``is_animation``: a ``video``
    that is an animated picture.

    Decoded pages and frames are kept. Methods for another ``kind`` must not be called; all raise
    ``PictureError``.
    """

    kind: MediaKind
    file: EncodedFile | Path
    label: str
    ranges: tuple[tuple[int, int], ...] = ((1, 0),)
    options: MediaOptions = _DEFAULTS
    max_parts: int | None = None
    place: str | None = None
    is_animation: bool = False
    _pages: dict[int, bytes] = field(default_factory=dict)
    _count: int = 0
    _frames: "Frames | None" = None

    def pages(self, limit: int = MAX_PAGES) -> list[ImagePart]:
        """The first ``limit`` of the chosen pages of a PDF, as pictures labelled ``report.pdf#3``.

        If pages are left out, the first picture has a note.
        """
        from vlfit.images.media_pool import media_pool

        limit = min(limit, self.max_parts or MAX_PAGES, MAX_PAGES)
        if len(self._pages) < min(limit, self.num_pages):
            numbers = [number for number in self.page_numbers()[:limit] if number not in self._pages]
            ranges = [(number, number) for number in numbers]
            self._pages |= media_pool().pdf_pages(self.file, self.label, ranges, limit).pictures
        chosen = self.page_numbers()
        parts = [
            ImagePart(self._pages[number], f"{self.label}#{number}", place=self.place)
            for number in chosen[:limit]
        ]
        if len(chosen) > len(parts):
            parts[0] = replace(
                parts[0],
                notes=(
                    f"{self.label}: the first {len(parts)} of {len(chosen):,} pages; the others are left out",
                ),
            )
        return parts

    @property
    def num_pages(self) -> int:
        """How many pages of a PDF ``ranges`` choose. Opens the document, the first time."""
        return len(self.page_numbers())

    def page_numbers(self) -> list[int]:
        """The pages of a PDF that ``ranges`` choose, from 1, each once. Opens the document, the first time.

        Raises ``PictureError``, also for a page that the document does not have.
        """
        from vlfit.images.media_pool import media_pool

        if not self._count:
            self._count = media_pool().pdf_pages(self.file, self.label, []).count
        numbers: list[int] = []
        for first, last in self.ranges:
            if max(first, last) > self._count:
                raise NotAPicture(
                    f"{self.label} has {counted(self._count, 'page')}; there is no page {max(first, last):,}",
                    "Name pages that it has.",
                )
            numbers += range(first, (last or self._count) + 1)
        return list(dict.fromkeys(numbers))

    def frames(self, limit: int = MAX_FRAMES) -> "Frames":
        """At most ``limit`` frames, evenly over the whole video.

        The first call decodes them; later calls choose among these frames, so they never return more.
        """
        from vlfit.images.media_pool import media_pool

        limit = min(limit, self.max_parts or MAX_FRAMES, MAX_FRAMES)
        if self._frames is None:
            every = self.options.every or 1 / FRAMES_PER_SECOND
            if self.is_animation:
                assert not isinstance(self.file, Path)
                self._frames = media_pool().animation_frames(
                    self.file, self.label, every=every, max_frames=limit
                )
            else:
                self._frames = media_pool().video_frames(self.file, self.label, every=every, max_frames=limit)
        return _thinned(self._frames, limit)

    def preview(self) -> ImagePart:
        """The preview that is embedded in a RAW photo, with a note that it is a preview."""
        from vlfit.images.media_pool import media_pool

        data, notes = media_pool().raw_preview(self.file, self.label)
        return ImagePart(data, self.label, place=self.place, notes=notes)

    def clip(self, limit: int = MAX_FRAMES) -> VideoPart:
        """At most ``limit`` frames of a video as a clip, with a note if they are further apart than asked
        for.
        """
        frames = self.frames(limit)
        notes = list(frames.notes)
        first, last = frames.seconds[0], frames.seconds[-1]
        fps = (len(frames.seconds) - 1) / (last - first) if last > first else FRAMES_PER_SECOND
        if fps < 0.99 / (self.options.every or 1 / FRAMES_PER_SECOND):
            notes.append(f"{self.label}: {counted(len(frames.frames), 'frame')}, one every {1 / fps:.3g} s")
        return VideoPart(frames.frames, min(max(fps, 0.001), 1000.0), self.label, self.place, tuple(notes))

    def pictures(self, limit: int = _PICTURE_FRAMES) -> list[ImagePart]:
        """Frames of a video as single pictures: those at ``options.at``; without times, at most ``limit``,
        evenly over the whole video.
        """
        from vlfit.images.media_pool import media_pool

        if self.options.at and self.is_animation:
            assert not isinstance(self.file, Path)
            frames = media_pool().animation_frames(self.file, self.label, at=self.options.at)
        elif self.options.at:
            frames = media_pool().video_frames(self.file, self.label, at=self.options.at)
        else:
            frames = _evenly(self.frames(), limit)
        parts = [
            ImagePart(data, f"{self.label} at {format_time(seconds)}", place=self.place)
            for data, seconds in zip(frames.frames, frames.seconds, strict=True)
        ]
        return [replace(parts[0], notes=frames.notes), *parts[1:]]


# What a request may hold before it is expanded.
FilePart = ImagePart | VideoPart | MediaFile


def load_file(
    source: "str | Path | bytes | Image.Image | ImagePart | VideoPart", options: MediaOptions = _DEFAULTS
) -> FilePart:
    """Load a picture, a PDF (``report.pdf``, ``report.pdf#2-5``), a video, or a camera RAW photo.

    ``source``: a path, an ``http(s):`` or ``data:`` URL, ``-`` for standard input, bytes, or a Pillow image;
    a part is returned as it is. Returns a ``MediaFile`` for a PDF or a video, which is not decoded yet; of a
    RAW photo, its preview. PDFs, videos and RAW photos given by a path are not read into this process.

    Raises as ``pictures.load_picture`` does, ``NotAPicture`` for a kind of file whose package is not
    installed, and ``UsageError`` for pages of a file that is no PDF.
    """
    from vlfit.tasks.pictures import load_picture

    if isinstance(source, ImagePart | VideoPart):
        return source
    if isinstance(source, Path | str):
        local = _local_media(str(source), options)
        if local is not None:
            return _decodable(local)
    name, ranges = split_pages(str(source)) if isinstance(source, Path | str) else (None, ())
    picture = load_picture(name if ranges and name else source, any_file=True)
    part = _decodable(media_part(picture, options, ranges))
    return part.preview() if isinstance(part, MediaFile) and part.kind == "raw" else part


def _decodable(part: FilePart) -> FilePart:
    """``part``. Raises ``NotAPicture`` if the package that decodes its kind is not installed."""
    if isinstance(part, MediaFile) and not part.is_animation:
        check_installed(part.kind, part.label)
    return part


def media_part(
    picture: ImagePart,
    options: MediaOptions = _DEFAULTS,
    ranges: tuple[tuple[int, int], ...] = (),
    max_parts: int | None = None,
) -> FilePart:
    """Return ``picture``, or a ``MediaFile`` if its bytes are a PDF, a video or a RAW photo. Decodes nothing.

    With ``options.clip``, also for an animated picture. ``ranges``, ``max_parts``: as in ``MediaFile``; no
    ranges: all pages. Raises ``UsageError`` for ranges of a picture.
    """
    kind = media_kind_of(picture.data)
    animated = options.clip and kind is None and is_animation(picture.data)
    if kind is None and not animated:
        if ranges:
            raise UsageError(f"{picture.label} is not a PDF document, so it has no pages", "Leave out #...")
        return picture
    return MediaFile(
        *(kind or "video", picture.data, picture.label, ranges or ((1, 0),), options),
        max_parts=max_parts,
        place=picture.place,
        is_animation=animated,
    )


def split_pages(name: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Split ``report.pdf#2-5,9`` into ``report.pdf`` and ((2, 5), (9, 9)), pages from 1.

    ``#3-`` gives (3, 0): to the end. A name without pages, or of another extension, is returned whole, with
    (). Raises ``UsageError`` for page 0, or a range that runs backwards.
    """
    match = _PAGES.fullmatch(name)
    # A fragment of a web page is none of ours.
    if match is None or not re.search(r"\.pdf(\?.*)?$", match["file"], re.IGNORECASE | re.DOTALL):
        return name, ()
    ranges = []
    for text in match["pages"].split(","):
        first, dash, last = text.partition("-")
        begin, end = int(first[:9]), int(last[:9]) if last else 0 if dash else int(first[:9])
        if begin < 1 or (end and end < begin):
            raise UsageError(f"{name}: there are no pages {text}", "Pages count from 1: report.pdf#2-5.")
        ranges.append((begin, end))
    return match["file"], tuple(ranges)


def parse_time(text: str) -> float:
    """Parse a time, ``0:35``, ``1:02:03``, ``35.5`` or ``35s``, as seconds. Raises ``UsageError`` for others.

    Units: ms, s, m, min and h.
    """
    is_short = len(text) <= _MAX_TIME_CHARACTERS
    if is_short and (with_unit := _TIME_WITH_UNIT.fullmatch(text.strip())):
        return float(with_unit[1]) * _TIME_UNITS[with_unit[2].lower()]
    match = _TIME.fullmatch(text.strip()) if is_short else None
    if match is None:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise UsageError(f"{shown!r} is not a time", "Write minutes and seconds, 0:35, or seconds, 35.5.")
    hours, minutes, seconds = match.groups()
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(seconds)


def parse_frame_distance(text: str, name: str) -> float:
    """Parse the time between two frames of a video, ``2s`` or ``500ms``, as seconds.

    ``name``: of the option or field, for errors. Raises ``UsageError`` for other text, and for 0.
    """
    hint = f"Write the time between two frames, such as {name} 2s, or 500ms."
    milliseconds = re.fullmatch(r"(\d{1,9})\s*ms", text.strip())
    if milliseconds is not None:
        text = f"{int(milliseconds[1]) / 1000:f}s"
    try:
        return parse_seconds(text, name)
    except UsageError as error:
        is_zero = re.fullmatch(r"0+(\.0*)?\s*[a-z]*", text.strip()) is not None
        message = f"{name}: frames cannot be {text.strip()} apart" if is_zero else error.message
        raise UsageError(message, hint) from None


def parse_times(texts: Sequence[str]) -> tuple[float, ...]:
    """Parse the values of ``--at`` as seconds; each value is a time, or several separated by commas.

    Raises ``UsageError`` for other text, or more than 100 times.
    """
    times = tuple(parse_time(each) for text in texts for each in text.split(","))
    if len(times) > _MAX_TIMES:
        raise UsageError(f"{len(times)} times are named; at most {_MAX_TIMES} are", "Name fewer.")
    return times


def format_time(seconds: float) -> str:
    """Format seconds as ``0:35`` or ``1:02:03.5``, rounded to tenths."""
    tenths = round(seconds * 10)
    whole, rest = divmod(tenths, 10)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    text = f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{text}.{rest}" if rest else text


def single_parts(part: FilePart, *, clips: bool) -> Iterator[ImagePart | VideoPart | MediaFile]:
    """Split ``part`` for tasks that take one picture at a time: yields ``part`` itself, unless it is a file.

    Of a PDF, yields each chosen page, up to ``MAX_PAGES``; of a video, each frame at ``options.at``. A
    video without times: with ``clips`` the video itself, else its frames every ``options.every`` seconds;
    raises ``UsageError`` if ``options.every`` is None too.
    """
    if not isinstance(part, MediaFile):
        yield part
    elif part.kind == "pdf":
        yield from _pages_one_by_one(part)
    elif part.options.at:
        yield from part.pictures()
    elif clips:
        yield part
    elif part.options.every is not None:
        yield from part.pictures(MAX_FRAMES)
    else:
        raise UsageError(
            f"{part.label} is a video, and this looks at single pictures",
            "Choose frames: --at 0:35, or --every 10s.",
        )


def single_picture(part: FilePart) -> ImagePart:
    """The one picture that ``part`` is: a picture, a PDF with one (chosen) page, or a video with one time.

    Raises ``UsageError`` for any other part, and ``PictureError`` if the file cannot be decoded.
    """
    if isinstance(part, ImagePart):
        return part
    if isinstance(part, MediaFile) and part.kind == "pdf":
        if part.num_pages == 1:
            return part.pages(1)[0]
        raise UsageError(
            f"{part.label} has {part.num_pages:,} pages, and one picture is wanted",
            f"Name one: {part.label}#3.",
        )
    if isinstance(part, MediaFile) and len(part.options.at) == 1:
        return part.pictures()[0]
    raise UsageError(f"{part.label} is a video, and one picture is wanted", "Name a time: --at 0:35.")


def fit_conversation(
    backend: Backend,
    conversation: Conversation,
    run: Callable[[Conversation], T],
    sampling: SamplingParams | None = None,
) -> T:
    """Call ``run`` with ``conversation``, in which every ``MediaFile`` is expanded into pages or frames.

    Takes as many pages and frames as the context has room for: ``run`` is called again with fewer as long
    as it raises ``DoesNotFit``. If it raises ``InvalidRequest``, as for a model that takes no clips, it is
    called with frames as single pictures. Returns what ``run`` returns. What is left out is noted in the
    first page, or the clip; for a server, the notes are logged.

    Raises what the last call raises, such as ``DoesNotFit`` if not even one page or two frames fit.
    ``sampling``: that of the request, to keep room for the answer; None: the default.
    """
    parts = cast("list[FilePart]", [part for message in conversation for part in message.parts])
    media = [part for part in parts if isinstance(part, MediaFile)]
    if not media:
        return run(conversation)
    limits = {id(each): _first_limit(each, backend, media, sampling) for each in media}
    as_pictures = False
    while True:
        try:
            expanded = _expanded(conversation, limits, as_pictures=as_pictures)
            result = run(expanded)
            if not backend.capabilities.counts_tokens:  # a server, which does not report these notes
                for note in _notes(expanded):
                    logger.warning("%s", note)
            return result
        except DoesNotFit:
            if not _shrink(media, limits):
                raise
        except InvalidRequest:
            if as_pictures or not any(each.kind == "video" and not each.options.at for each in media):
                raise
            as_pictures = True  # the model takes no clips


def _notes(conversation: Conversation) -> list[str]:
    parts = [part for message in conversation for part in message.parts]
    return [note for part in parts if isinstance(part, ImagePart | VideoPart) for note in part.notes]


def _first_limit(
    media: MediaFile, backend: Backend, others: list[MediaFile], sampling: SamplingParams | None
) -> int:
    """Pages or frames to try first."""
    context = backend.context
    if media.kind == "raw":
        return 1
    if media.kind == "video":
        return _FIRST_FRAMES if context is None else min(max(context // _FRAME_TOKENS, 8), MAX_FRAMES)
    if context is None:
        return MAX_PAGES
    tokens = _PAGE_TOKENS
    if backend.capabilities.counts_tokens:
        with with_error_param(media.place):
            page = media.pages(1)[0]
        turn, able = single_turn(".", page), backend.capabilities
        probe = (
            backend.prepare(turn, sampling or SamplingParams())
            if able.generates
            else backend.prepare_pooled(turn, PoolingParams("embed" if able.embeds else "score"))
        )
        tokens = probe.image_tokens or tokens
    answer = min((sampling.max_tokens if sampling else None) or _ANSWER_TOKENS, _ANSWER_TOKENS)
    return min(max((context - answer) // tokens // len(others), 1), MAX_PAGES)


def _shrink(media: list[MediaFile], limits: dict[int, int]) -> bool:
    """Lower the limits: one page fewer in ten, half of the frames. False if nothing can be left out."""
    lowered = False
    for each in media:
        before = limits[id(each)]
        if each.kind == "raw" or each.options.at:
            continue
        if each.kind == "pdf":
            before = min(before, each.num_pages)
            after = max(before - max(before // 10, 1), 1)
        else:
            before = min(before, len(each.frames(before).frames))
            after = max(before // 2, _MIN_FRAMES)
        limits[id(each)] = min(after, before)
        lowered = lowered or after < before
    return lowered


def _expanded(conversation: Conversation, limits: dict[int, int], *, as_pictures: bool) -> Conversation:
    def parts(part: Any) -> Sequence[Part]:
        if not isinstance(part, MediaFile):
            return (cast(Part, part),)
        limit = limits[id(part)]
        with with_error_param(part.place):
            if part.kind == "raw":
                return (part.preview(),)
            if part.kind == "pdf":
                return part.pages(limit)
            if part.options.at or as_pictures:
                return part.pictures(min(limit, _PICTURE_FRAMES))
            return (part.clip(limit),)

    return tuple(
        replace(message, parts=tuple(each for part in message.parts for each in parts(part)))
        for message in conversation
    )


def _pages_one_by_one(document: MediaFile) -> Iterator[ImagePart]:
    """Pages, rendered a few at a time; those beyond ``MAX_PAGES`` are noted as left out."""
    numbers = document.page_numbers()
    chosen = numbers[:MAX_PAGES]
    for start in range(0, len(chosen), _PAGES_AT_ONCE):
        group = chosen[start : start + _PAGES_AT_ONCE]
        pages = replace(document, ranges=tuple((number, number) for number in group), _pages={}).pages()
        if not start and len(numbers) > len(chosen):
            shown = f"the first {len(chosen)} of {len(numbers):,} pages"
            note = f"{document.label}: {shown}; the others are left out"
            pages[0] = replace(pages[0], notes=(note,))
        yield from pages


def _thinned(frames: "Frames", limit: int) -> "Frames":
    """Every second frame, or fewer, until there are at most ``limit``."""
    step = 1
    while len(frames.frames[::step]) > max(limit, 1):
        step += 1
    return (
        frames if step == 1 else replace(frames, frames=frames.frames[::step], seconds=frames.seconds[::step])
    )


def _evenly(frames: "Frames", limit: int) -> "Frames":
    """``limit`` frames from the first to the last, as evenly as it goes; all if there are fewer."""
    count = len(frames.frames)
    if count <= limit:
        return frames
    kept = [round(number * (count - 1) / max(limit - 1, 1)) for number in range(limit)]
    return replace(
        frames,
        frames=tuple(frames.frames[index] for index in kept),
        seconds=tuple(frames.seconds[index] for index in kept),
    )


def _local_media(name: str, options: MediaOptions) -> FilePart | None:
    """What a path names, if it is a document, video or RAW photo; None for all else, which need not exist."""
    path = Path(name).expanduser() if not re.match(r"[a-z]{2,}:", name, re.IGNORECASE) else None
    ranges: tuple[tuple[int, int], ...] = ()
    try:
        if path is None or name == "-":
            return None
        if not path.is_file():
            bare, ranges = split_pages(name)
            path = Path(bare).expanduser()
            if not ranges or not path.is_file():
                return None
        kind = kind_of_file(path)
    except (OSError, ValueError, RuntimeError):
        return None  # ``load_picture`` raises the reason
    label = str(path) if len(str(path)) <= 120 else str(path)[:117] + "..."
    if kind is None:
        return None
    if kind == "raw":
        return MediaFile("raw", path, label).preview()
    if kind != "pdf" and ranges:
        raise UsageError(f"{label} is not a PDF document, so it has no pages", "Leave out #...")
    return MediaFile(kind, path, label, ranges or ((1, 0),), options)


def kind_of_file(path: Path) -> MediaKind | None:
    """The kind of a file by its first bytes; None for pictures and other files. Raises ``OSError``."""
    with path.open("rb") as file:

        def read_at(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        return media_kind(read_at)


def kind_by_extension(extension: str) -> MediaKind | None:
    """The kind of files with ``extension`` (lower case, with its dot); None for pictures and other files."""
    return next((kind for kind, names in MEDIA_EXTENSIONS.items() if extension in names), None)
