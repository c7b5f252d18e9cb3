"""Take PDF documents, camera RAW photos, videos and animations apart into encoded pictures, in worker
processes.

Every file gets a worker of its own, under the limits of decode workers: memory, CPU and wall time, no writes.
Files take turns as pictures do (``decode_queue.py``), and a worker gets ``USUAL_BYTES`` first: a file that
needs more is started again with ``MEDIA_BYTES``, in the slow lane. The pictures that come back are as
untrusted as the file, and are decoded by decode workers like any others.
"""

import atexit
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from vlfit.errors import (
    DecodersUnavailable,
    NotAPicture,
    PictureError,
    PictureNotFound,
    PictureTooCostly,
    PictureTooLarge,
    VlfitError,
)
from vlfit.images.cancellation import Cancelled, check_cancelled
from vlfit.images.decode_memory import MAX_MEDIA_WORKERS, WORKER_BYTES
from vlfit.images.decode_pool import DecodeStats, Reason, decode_pool
from vlfit.images.decode_process import ForkServer, NotBegun, Worker, check_has_begun, resident_bytes
from vlfit.images.decode_queue import DecodeQueue, DecodeSlot, Verdict
from vlfit.images.decode_wire import BEGUN, EXIT_NO_MEMORY, BrokenProtocol, ConnectionEnded
from vlfit.images.limits import DecodeAllowance, current_allowance
from vlfit.images.media_kinds import (
    FRAME_PIXELS,
    MAX_FRAMES,
    MAX_PAGES,
    PAGE_PIXELS,
    check_installed,
)
from vlfit.images.spooled_file import EncodedFile
from vlfit.units import MIB

# Of a worker, beside the file. What is usual: measured, no more than ``WORKER_BYTES`` for a scanned page of
# 35 megapixels, and beyond them 112 MiB for a video of 1920x1080, 144 for one of 3840x2160 whose frames refer
# to 16 others.
USUAL_BYTES = 160 * MIB
MEDIA_BYTES = 512 * MIB
_SLOW_SECONDS = 3.0  # an ordinary video takes one or two
# Added for workers of a server's clients, as the engine may need all cores. Not more, even for slow files:
# they would not get on at all beside an engine on the CPU, and their time is limited.
_NICE = 5
MAX_RESULT_BYTES = 512 * MIB  # of all pictures of one file
_MAX_ITEM_BYTES = 64 * MIB
_MEMORY = f"{(MEDIA_BYTES + WORKER_BYTES) / MIB:,.0f} MiB of RAM"
_MAX_NOTES, _MAX_NOTE, _MAX_LABEL = 8, 300, 1000
_ERRORS: dict[str, type[PictureError]] = {each.__name__: each for each in (NotAPicture, PictureTooLarge)}
_PDF_HINT = "Name fewer pages: FILE.pdf#1-5."
_VIDEO_HINT = "Scale it down first, or cut it: ffmpeg -i FILE -vf scale=1280:-2 new.mp4"
_HINT = "Save it as a plain JPEG or PNG first."

MediaFile = EncodedFile | Path
"""A file in memory, or by its path: then it is opened here and read by the worker."""

_Item = tuple[dict[str, Any], bytes]  # what is known about a picture, and the picture as a file


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
    """Worker processes that each take one file apart and end. Thread-safe.

    ``MAX_MEDIA_WORKERS`` run at once, and up to ``MAX_SLOW`` more while as many are busy with slow files.
    Methods that take a file wait for a worker and for its share of ``decode_pool()``'s memory, and obey this
    thread's ``limits.current_allowance``. They raise ``NotAPicture`` for a damaged file, or if the package
    that decodes it is not installed; ``PictureNotFound`` for a path that cannot be read;
    ``PictureTooLarge``, ``PictureTooCostly``, ``QueueFull``, ``DecodersUnavailable`` or ``Cancelled``.
    ``label``: what errors call the file.
    """

    def __init__(self) -> None:
        self._queue = DecodeQueue(MAX_MEDIA_WORKERS, _SLOW_SECONDS)
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        self._busy: set[Worker] = set()
        self._stopped: Counter[Reason] = Counter()
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
        data: EncodedFile,
        label: str,
        *,
        every: float = 0.5,
        at: Sequence[float] = (),
        max_frames: int = MAX_FRAMES,
        max_pixels: int = FRAME_PIXELS,
    ) -> Frames:
        """Frames of an animated GIF, WebP, PNG or AVIF; of a still picture, one.

        ``every`` (seconds), ``at``, ``max_frames`` and ``max_pixels``: as in ``video_frames``. Transparency
        is laid on white.
        """
        options = {"every": every, "at": list(at), "max_frames": max_frames, "max_pixels": max_pixels}
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

    def stats(self) -> DecodeStats:
        """The pool's statistics now; the memory of its files is in those of ``decode_pool()``, and 0 here."""
        with self._lock:
            busy = len(self._busy)
            stopped = {reason: self._stopped[reason] for reason in get_args(Reason)}
        return DecodeStats(busy, busy, self._queue.num_waiting, 0, 0, stopped, self._queue.longest_wait)

    def resident_bytes(self) -> int:
        """RAM in use by the fork server and all workers, in bytes; see ``DecodePool.resident_bytes``."""
        server = self._server
        if server is None:
            return 0
        with self._lock:
            pids = [worker.pid for worker in self._busy]
        return resident_bytes(server.pid, pids)

    # --- one job --------------------------------------------------------------------------------------------

    def _run(
        self, operation: str, file: MediaFile, label: str, options: dict[str, Any], hint: str
    ) -> tuple[list[_Item], dict[str, Any]]:
        """Do one job in a new worker, or several in turn. Returns its items, and what was sent at the end."""
        allowance = current_allowance()
        memory, slow, was_lost = USUAL_BYTES, False, False
        with _opened(file, label) as fd:
            job = _Job(operation, b"" if isinstance(file, Path) else file, fd, label, options, hint)
            while True:
                try:
                    return self._attempt(job, memory, allowance, slow=slow)
                except _NeedsMore:
                    memory, slow = MEDIA_BYTES, True
                except _Yielded:
                    slow = True
                except _WorkerLost as lost:
                    if was_lost:
                        raise lost.error from None
                    was_lost = True

    def _attempt(
        self, job: "_Job", memory: int, allowance: DecodeAllowance, *, slow: bool
    ) -> tuple[list[_Item], dict[str, Any]]:
        """Do ``job`` in one new worker with ``memory`` bytes beside the file."""
        if allowance.wall_seconds <= 0:
            raise PictureTooCostly(f"{job.label}: no time is left for it", "Send fewer files in one request.")
        with allowance.waiting(job.label, adds_up=slow) as check:
            slot = self._queue.acquire(slow=slow, check=check)
        try:
            with self._reserved(job, memory + len(job.data), allowance):
                worker = self._fork()
                with self._lock:
                    self._busy.add(worker)
                run = _Run(worker, slot, job, memory, allowance)
                try:
                    return run.result()
                except _NotDone as failure:
                    if failure.reason is not None:
                        with self._lock:
                            self._stopped[failure.reason] += 1
                    raise failure.error from None
                except Cancelled:
                    with self._lock:
                        self._stopped["cancelled"] += 1
                    raise
                finally:
                    allowance.spend(run.seconds)
                    run.end()
                    with self._lock:
                        self._busy.discard(worker)
        finally:
            slot.release()

    @contextmanager
    def _reserved(self, job: "_Job", count: int, allowance: DecodeAllowance) -> Iterator[None]:
        """``count`` bytes of the memory for pictures."""
        with ExitStack() as stack:
            with allowance.waiting(job.label, adds_up=True) as check:
                stack.enter_context(decode_pool().reserve(count, check))
            yield

    def _fork(self) -> Worker:
        for attempt in range(2):
            with self._lock:
                if self._closed:
                    raise DecodersUnavailable("the media workers are closed", "The program is ending.")
                server = self._server = self._server or ForkServer("vlfit.images.media_worker")
            try:
                return server.fork()
            except DecodersUnavailable:
                if not server.has_failed:  # no file descriptor is left here
                    raise
                with self._lock:
                    if self._server is server:
                        self._server = None
                server.close()
                if attempt:
                    raise
        raise AssertionError


@dataclass(frozen=True, slots=True)
class _Job:
    """``fd``: an open file, or None if it is ``data``."""

    operation: str
    data: EncodedFile
    fd: int | None
    label: str
    options: dict[str, Any]
    hint: str


class _NotDone(Exception):
    """A worker did not do its job. ``reason``: counted, None: not at all. ``error``: raised instead."""

    def __init__(self, reason: Reason | None, error: Exception) -> None:
        super().__init__()
        self.reason = reason
        self.error = error


class _NeedsMore(Exception):
    """The file needs more memory than usual: it gets a worker with all."""


class _Yielded(Exception):
    """A slow file made way for others, and is taken apart again in the slow lane."""


class _WorkerLost(Exception):
    """A worker was killed from outside or never began, which the file is not to blame for."""

    def __init__(self, error: VlfitError) -> None:
        super().__init__()
        self.error = error


class _Run:
    """A job on a worker of its own, with ``memory`` bytes beside the file."""

    def __init__(
        self, worker: Worker, slot: DecodeSlot, job: _Job, memory: int, allowance: DecodeAllowance
    ) -> None:
        self._worker = worker
        self._slot = slot
        self._job = job
        self._memory = memory
        self._allowance = allowance
        self._limits = allowance.limits
        self._wall_seconds = allowance.wall_seconds
        self._has_begun = self._has_ended = self._is_stuck = False
        self._began = time.monotonic()
        worker.connection.on_tick = self._tick
        if self._limits.yields_when_slow:
            worker.lower_priority(_NICE)

    @property
    def seconds(self) -> float:
        """Since the worker was forked; 0 if it never began."""
        return 0.0 if self._is_stuck else time.monotonic() - self._began

    def result(self) -> tuple[list[_Item], dict[str, Any]]:
        """Send the job, and receive its items and what is sent at the end. Raises ``_NotDone``, and picture
        errors that the worker sent.
        """
        try:
            self._send()
            return self._receive()
        except ConnectionEnded:
            raise self._cause_of_death(self.end()) from None
        except BrokenProtocol as error:
            raise _NotDone("crash", _broken(self._job.label, str(error))) from None
        except NotBegun as error:
            self._is_stuck = True
            raise _NotDone("crash", _WorkerLost(error.unavailable)) from None

    def end(self) -> int | None:
        """End the worker, once. Returns its status; None if that is unknown."""
        if self._has_ended:
            return None
        self._has_ended = True
        return self._worker.end()

    def _send(self) -> None:
        job, connection = self._job, self._worker.connection
        fields = {
            "operation": job.operation,
            "label": job.label[:_MAX_LABEL],
            "size": len(job.data),
            "fd": job.fd is not None,
            "memory": self._memory,
            "cpu_seconds": self._limits.cpu_seconds,
            **job.options,
        }
        connection.send(fields, job.data)
        if job.fd is not None:
            with suppress(OSError):  # another worker may have read it; a pipe has no beginning
                os.lseek(job.fd, 0, os.SEEK_SET)
            connection.send_fd(job.fd)

    def _receive(self) -> tuple[list[_Item], dict[str, Any]]:
        connection = self._worker.connection
        if connection.receive() != BEGUN:
            raise BrokenProtocol("another message than that it has begun")
        self._has_begun = True
        items: list[_Item] = []
        total = 0
        while True:
            fields = connection.receive()
            self._tick()
            if "end" in fields:
                end = fields["end"]
                if not isinstance(end, dict):
                    raise BrokenProtocol("an end that is no object")
                return items, end
            self._raise_error(fields)
            item = fields.get("item")
            if not isinstance(item, dict) or len(items) >= max(MAX_PAGES, MAX_FRAMES):
                raise BrokenProtocol("a message that is no item, or too many")
            data = connection.receive_chunks(min(_MAX_ITEM_BYTES, MAX_RESULT_BYTES - total))
            total += len(data)
            items.append((item, data))

    def _raise_error(self, fields: dict[str, Any]) -> None:
        """Raise the error that a message is, if it is one."""
        name = fields.get("error")
        if name is None:
            return
        if name == MemoryError.__name__:
            raise self._out_of_memory()
        message, advice = fields.get("message"), fields.get("hint")
        if name not in _ERRORS or not isinstance(message, str) or not isinstance(advice, str):
            raise BrokenProtocol("an error that is none of a file")
        raise _ERRORS[name](message, advice)

    def _tick(self) -> None:
        check_cancelled()
        seconds = self.seconds
        if not self._has_begun:
            check_has_begun(self._worker.connection, seconds)
        if seconds > self._wall_seconds:
            raise _NotDone("wall", self._too_costly(self._allowance.limit_in_words(self._wall_seconds)))
        verdict = self._slot.check(seconds, yields=self._limits.yields_when_slow)
        if verdict is Verdict.STOP:
            raise _NotDone(None, _Yielded())

    def _cause_of_death(self, status: int | None) -> _NotDone:
        """Why a worker ended with ``status`` in the middle of its job."""
        label = self._job.label
        if status is None:
            return _NotDone("crash", DecodersUnavailable("the media workers were ended", "Try again."))
        number = os.waitstatus_to_exitcode(status)
        if number == -signal.SIGXCPU:
            return _NotDone("cpu", self._too_costly(f"{self._limits.cpu_seconds} s of CPU time"))
        if number == EXIT_NO_MEMORY:
            return self._out_of_memory()
        if number == -signal.SIGKILL:
            return _NotDone("memory", _WorkerLost(self._too_costly("the RAM of this machine")))
        if number in (-signal.SIGABRT, -signal.SIGTRAP):  # how libraries in C++ end for lack of memory
            if self._memory < MEDIA_BYTES:
                return _NotDone(None, _NeedsMore())
            what = f"its decoder gave up: it is damaged, or takes more than {_MEMORY}"
            return _NotDone("memory", PictureTooCostly(f"{label}: {what}", self._job.hint))
        what = signal.Signals(-number).name if number < 0 else f"exit code {number}"
        return _NotDone("crash", _broken(label, f"nothing more and ended ({what})"))

    def _out_of_memory(self) -> _NotDone:
        if self._memory < MEDIA_BYTES:
            return _NotDone(None, _NeedsMore())
        return _NotDone("memory", self._too_costly(_MEMORY))

    def _too_costly(self, limit: str) -> PictureTooCostly:
        return PictureTooCostly(f"{self._job.label}: taking it apart takes more than {limit}", self._job.hint)


@contextmanager
def _opened(file: MediaFile, label: str) -> Iterator[int | None]:
    """A file descriptor of ``file``; None for bytes."""
    if not isinstance(file, Path):
        yield None
        return
    try:
        opened = file.open("rb")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise PictureNotFound(f"{label}: cannot be read: {why}", "Check its name and permissions.") from None
    with opened:
        yield opened.fileno()


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


def _frames(items: list[_Item], end: dict[str, Any]) -> Frames:
    seconds = tuple(_number(fields, "seconds") for fields, _ in items)
    length = None if end.get("length") is None else _number(end, "length")
    return Frames(tuple(data for _, data in items), seconds, length, _notes(end))


# --- the pool of this process -------------------------------------------------------------------------------

_pool: MediaPool | None = None
_pool_lock = threading.Lock()


def decoder_stats() -> DecodeStats:
    """Statistics of this process's decode workers and media workers together. Starts no process."""
    pictures = decode_pool().stats()
    if _pool is None:
        return pictures
    media = _pool.stats()
    return replace(
        pictures,
        workers=pictures.workers + media.workers,
        busy=pictures.busy + media.busy,
        waiting=pictures.waiting + media.waiting,
        stopped={reason: count + media.stopped[reason] for reason, count in pictures.stopped.items()},
        worker_wait=max(pictures.worker_wait, media.worker_wait),
    )


def decoder_resident_bytes() -> int:
    """RAM in use by all decode workers and media workers of this process, in bytes."""
    return decode_pool().resident_bytes() + (0 if _pool is None else _pool.resident_bytes())


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
