"""Take PDF documents, camera RAW photos, videos and animations apart into encoded pictures, in worker
processes.

Every file gets a worker of its own, under the limits of decode workers: memory, CPU and wall time, no writes.
The pictures that come back are as untrusted as the file, and are decoded by decode workers like any others.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vlfit.errors import (
    DecodersUnavailable,
    NotAPicture,
    PictureError,
    PictureNotFound,
    PictureTooCostly,
    PictureTooLarge,
)
from vlfit.images.cancellation import check_cancelled
from vlfit.images.decode_memory import WORKER_BYTES
from vlfit.images.decode_pool import decode_pool
from vlfit.images.decode_process import ForkServer, Worker
from vlfit.images.decode_wire import EXIT_NO_MEMORY, TICK_SECONDS, BrokenProtocol, ConnectionEnded
from vlfit.images.limits import current_allowance
from vlfit.images.media_kinds import (
    FRAME_PIXELS,
    MAX_FRAMES,
    MAX_PAGES,
    PAGE_PIXELS,
    check_installed,
)
from vlfit.units import MIB

MAX_WORKERS = 2
MEDIA_BYTES = 512 * MIB  # of a worker: a page, or the frames that a 4K video refers to
MAX_RESULT_BYTES = 512 * MIB  # of all pictures of one file
_MAX_ITEM_BYTES = 64 * MIB
_MEMORY = f"{(MEDIA_BYTES + WORKER_BYTES) / MIB:,.0f} MiB of RAM"
_MAX_NOTES, _MAX_NOTE, _MAX_LABEL = 8, 300, 1000
_ERRORS: dict[str, type[PictureError]] = {each.__name__: each for each in (NotAPicture, PictureTooLarge)}
_PDF_HINT = "Name fewer pages: FILE.pdf#1-5."
_VIDEO_HINT = "Scale it down first, or cut it: ffmpeg -i FILE -vf scale=1280:-2 new.mp4"
_HINT = "Save it as a plain JPEG or PNG first."

MediaFile = bytes | Path
"""A file in memory, or by its path: then it is opened here and read by the worker."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a PDF. ``pictures``: PNG or JPEG files by page number, from 1.

    ``count``: number of pages in the whole document.
    """

    pictures: dict[int, bytes]
    count: int


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames of a video or animation as JPEG files. ``seconds``: the time of each in the video.

    ``length``: seconds, as the file states; None if unknown, always so for an animation. ``notes``: what is
    damaged or misstated in the file.
    """

    frames: tuple[bytes, ...]
    seconds: tuple[float, ...]
    length: float | None
    notes: tuple[str, ...]


class MediaPool:
    """Worker processes that each take one file apart and end, ``MAX_WORKERS`` at once. Thread-safe.

    Methods that take a file wait for a worker and for ``MEDIA_BYTES`` of ``decode_pool()``'s memory, and obey
    this thread's ``limits.current_allowance``. They raise ``NotAPicture`` for a damaged file, or if the
    package that decodes it is not installed; ``PictureNotFound`` for a path that cannot be read;
    ``PictureTooLarge``, ``PictureTooCostly``, ``DecodersUnavailable`` or ``Cancelled``. ``label``: what
    errors call the file.
    """

    def __init__(self) -> None:
        self._slots = threading.Semaphore(MAX_WORKERS)
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        self._closed = False

    def pdf_pages(
        self,
        file: MediaFile,
        label: str,
        ranges: Sequence[tuple[int, int]],
        max_pages: int = MAX_PAGES,
        max_pixels: int = PAGE_PIXELS,
    ) -> Pages:
        """Render pages of a PDF, at 150 dots per inch or at most ``max_pixels`` pixels each.

        ``ranges``: (first, last) page numbers, from 1; ``last`` 0: to the end. Without any, no page is
        rendered and only ``Pages.count`` is set. Pages beyond ``max_pages`` are left out without an error.
        Raises ``NotAPicture`` for a page number that the document does not have.
        """
        check_installed("pdf", label)
        options = {
            "ranges": [list(each) for each in ranges],
            "max_pages": max_pages,
            "max_pixels": max_pixels,
        }
        items, end = self._run("pdf", file, label, options, _PDF_HINT)
        pages = {_number(fields, "page"): data for fields, data in items}
        return Pages({int(page): data for page, data in pages.items()}, int(_number(end, "pages")))

    def video_frames(
        self,
        file: MediaFile,
        label: str,
        *,
        every: float = 0.5,
        at: Sequence[float] = (),
        max_frames: int = MAX_FRAMES,
        max_pixels: int = FRAME_PIXELS,
    ) -> Frames:
        """Frames of a video: one ``every`` so many seconds, or those shown at the times ``at``, in seconds.

        ``at``: if not empty, ``every`` and ``max_frames`` are ignored, and a time after the end raises
        ``NotAPicture``. ``max_frames``: a longer video gets frames further apart. All frames have one size,
        of about ``max_pixels`` pixels at most.
        """
        check_installed("video", label)
        options = {"every": every, "at": list(at), "max_frames": max_frames, "max_pixels": max_pixels}
        return _frames(*self._run("video", file, label, options, _VIDEO_HINT))

    def animation_frames(
        self,
        data: bytes,
        label: str,
        *,
        every: float = 0.5,
        max_frames: int = MAX_FRAMES,
        max_pixels: int = FRAME_PIXELS,
    ) -> Frames:
        """Frames of an animated GIF, WebP, PNG or AVIF, chosen as by ``video_frames``.

        A still picture has one frame. Transparency is laid on white.
        """
        options = {"every": every, "max_frames": max_frames, "max_pixels": max_pixels}
        return _frames(*self._run("animation", data, label, options, _HINT))

    def raw_preview(self, file: MediaFile, label: str) -> tuple[bytes, tuple[str, ...]]:
        """The embedded preview of a camera RAW photo as a JPEG file, and notes that say it is a preview.

        Raises ``NotAPicture`` if the photo has none.
        """
        check_installed("raw", label)
        items, end = self._run("raw", file, label, {}, _HINT)
        if len(items) != 1:
            raise _broken(label, "other than one preview")
        return items[0][1], _notes(end)

    def close(self) -> None:
        """End the fork server and all workers. Later calls raise ``DecodersUnavailable``."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def close_inherited(self) -> None:
        """In a fork of this process, close the inherited socket; the parent's fork server goes on."""
        if self._server is not None:
            self._server.close_inherited()

    def _run(
        self, operation: str, file: MediaFile, label: str, options: dict[str, Any], hint: str
    ) -> tuple[list[tuple[dict[str, Any], bytes]], dict[str, Any]]:
        """Do one job in a new worker. Returns its items, and what it sent at the end."""
        allowance = current_allowance()
        if allowance.wall_seconds <= 0:
            raise PictureTooCostly(f"{label}: no time is left for it", "Send fewer files in one request.")
        size = len(file) if isinstance(file, bytes) else 0
        job = {
            "operation": operation,
            "label": label[:_MAX_LABEL],
            "size": size,
            "fd": not isinstance(file, bytes),
            "memory": MEDIA_BYTES,
            "cpu_seconds": allowance.limits.cpu_seconds,
            **options,
        }
        with _opened(file, label) as fd, self._slot(), decode_pool().reserve(MEDIA_BYTES + size):
            began = time.monotonic()
            deadline = began + allowance.wall_seconds
            worker = self._fork()
            status: list[int | None] = []

            def check() -> None:
                check_cancelled()
                if time.monotonic() > deadline:
                    raise PictureTooCostly(
                        f"{label}: taking it apart takes more than {allowance.wall_seconds:g} s", hint
                    )

            worker.connection.on_tick = check
            try:
                worker.connection.send(
                    job, b"" if fd is not None else file if isinstance(file, bytes) else b""
                )
                if fd is not None:
                    worker.connection.send_fd(fd)
                return _receive(worker, label, hint, check)
            except ConnectionEnded:
                status.append(worker.end())
                raise _cause_of_death(status[0], label, hint, allowance.limits.cpu_seconds) from None
            except BrokenProtocol as error:
                raise _broken(label, str(error)) from None
            finally:
                allowance.spend(time.monotonic() - began)
                if not status:
                    worker.end()

    @contextmanager
    def _slot(self) -> Iterator[None]:
        while not self._slots.acquire(timeout=TICK_SECONDS):
            check_cancelled()
        try:
            yield
        finally:
            self._slots.release()

    def _fork(self) -> Worker:
        for attempt in range(2):
            with self._lock:
                if self._closed:
                    raise DecodersUnavailable("the media workers are closed", "The program is ending.")
                server = self._server = self._server or ForkServer("vlfit.images.media_worker")
            try:
                return server.fork()
            except DecodersUnavailable:  # it was killed, perhaps
                with self._lock:
                    if self._server is server:
                        self._server = None
                server.close()
                if attempt:
                    raise
        raise AssertionError


@contextmanager
def _opened(file: MediaFile, label: str) -> Iterator[int | None]:
    """A file descriptor of ``file``; None for bytes."""
    if isinstance(file, bytes):
        yield None
        return
    try:
        opened = file.open("rb")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise PictureNotFound(f"{label}: cannot be read: {why}", "Check its name and permissions.") from None
    with opened:
        yield opened.fileno()


def _receive(
    worker: Worker, label: str, hint: str, check: Callable[[], None]
) -> tuple[list[tuple[dict[str, Any], bytes]], dict[str, Any]]:
    items: list[tuple[dict[str, Any], bytes]] = []
    total = 0
    while True:
        fields = worker.connection.receive()
        check()
        if "end" in fields:
            end = fields["end"]
            if not isinstance(end, dict):
                raise BrokenProtocol("an end that is no object")
            return items, end
        name = fields.get("error")
        if name == MemoryError.__name__:
            raise PictureTooCostly(
                f"{label}: taking it apart takes more than {_MEMORY}",
                hint,
            )
        if name is not None:
            message, advice = fields.get("message"), fields.get("hint")
            if name not in _ERRORS or not isinstance(message, str) or not isinstance(advice, str):
                raise BrokenProtocol("an error that is none of a file")
            raise _ERRORS[name](message, advice)
        item = fields.get("item")
        if not isinstance(item, dict) or len(items) >= max(MAX_PAGES, MAX_FRAMES):
            raise BrokenProtocol("a message that is no item, or too many")
        data = worker.connection.receive_chunks(min(_MAX_ITEM_BYTES, MAX_RESULT_BYTES - total))
        total += len(data)
        items.append((item, data))


def _cause_of_death(status: int | None, label: str, hint: str, cpu_seconds: int) -> Exception:
    """The error for a worker that ended with ``status`` in the middle of its job."""
    if status is None:
        return DecodersUnavailable("the media workers were ended", "Try again.")
    number = os.waitstatus_to_exitcode(status)
    if number == -signal.SIGXCPU:
        return PictureTooCostly(f"{label}: taking it apart takes more than {cpu_seconds} s of CPU time", hint)
    if number in (EXIT_NO_MEMORY, -signal.SIGKILL):
        return PictureTooCostly(
            f"{label}: taking it apart takes more than {_MEMORY}",
            hint,
        )
    if number in (-signal.SIGABRT, -signal.SIGTRAP):  # how libraries in C++ end for lack of memory
        return PictureTooCostly(
            f"{label}: its decoder gave up: it is damaged, or takes more than {_MEMORY}", hint
        )
    what = signal.Signals(-number).name if number < 0 else f"exit code {number}"
    return _broken(label, f"nothing more and ended ({what})")


def _broken(label: str, what: str) -> NotAPicture:
    return NotAPicture(f"{label} is damaged: its decoder sent {what}", "Copy or download it again.")


def _number(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise NotAPicture("its decoder sent a message without numbers")
    return value


def _notes(end: dict[str, Any]) -> tuple[str, ...]:
    notes = end.get("notes")
    return tuple(str(note)[:_MAX_NOTE] for note in notes[:_MAX_NOTES]) if isinstance(notes, list) else ()


def _frames(items: list[tuple[dict[str, Any], bytes]], end: dict[str, Any]) -> Frames:
    seconds = tuple(_number(fields, "seconds") for fields, _ in items)
    length = None if end.get("length") is None else _number(end, "length")
    return Frames(tuple(data for _, data in items), seconds, length, _notes(end))


# --- the pool of this process -------------------------------------------------------------------------------

_pool: MediaPool | None = None
_pool_lock = threading.Lock()


def media_pool() -> MediaPool:
    """The pool of this process, made by the first call; a fork of the process gets one of its own."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = MediaPool()
            atexit.register(_pool.close)
        return _pool


def _forget_pool() -> None:
    """A fork of this process has a pool of its own."""
    global _pool, _pool_lock
    _pool_lock = threading.Lock()
    if _pool is not None:
        atexit.unregister(_pool.close)
        _pool.close_inherited()
        _pool = None


os.register_at_fork(after_in_child=_forget_pool)
