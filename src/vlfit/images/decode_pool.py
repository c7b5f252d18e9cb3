"""Decode pictures in worker processes, so that a file can take down its decoder and nothing else.

A job has two steps. The worker reads the header and says how large the picture is and what decoding takes;
this side reserves that RAM, says to which size to resize it, and receives pixels. A small picture, for which
nothing is reserved, is decoded while that answer is on its way. A worker that hits a limit
of memory or time, breaks the protocol, or whose request was cancelled is killed and replaced. So is one whose
picture is slow while others wait (``decode_queue.py``); that picture is decoded again later.
"""

import atexit
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from vlfit.errors import (
    DecodersUnavailable,
    NotAPicture,
    PictureError,
    PictureTooCostly,
    PictureTooLarge,
    VlfitError,
)
from vlfit.images.cancellation import check_cancelled
from vlfit.images.decode_budget import MemoryBudget
from vlfit.images.decode_memory import MAX_DECODE_BYTES, SMALL_BYTES, WORKER_BYTES, default_num_workers
from vlfit.images.decode_process import (
    MAX_KEPT_BYTES,
    ForkServer,
    NotBegun,
    Worker,
    check_has_begun,
    resident_bytes,
)
from vlfit.images.decode_queue import DecodeQueue, DecodeSlot, Verdict
from vlfit.images.decode_wire import BEGUN, EXIT_NO_MEMORY, BrokenProtocol, ConnectionEnded
from vlfit.images.limits import MAX_PIXELS, DecodeAllowance, current_allowance
from vlfit.images.spooled_file import EncodedFile
from vlfit.units import MIB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SLOW_NICE = 10  # added for a worker whose picture yields when it is slow
_SENT_AT_ONCE = 2**18  # bytes of a file that the kernel buffers, whatever the worker does
_RGB_BYTES = 4  # of a pixel, in Pillow
_ENCODE_BYTES = 10  # of a pixel, while it is written to a file
_FILE_BYTES = 5  # of a pixel in a new JPEG or PNG, at most
_MAX_NOTES, _MAX_NOTE, _MAX_LABEL = 8, 300, 1000
_ERRORS: dict[str, type[PictureError]] = {each.__name__: each for each in (NotAPicture, PictureTooLarge)}
_COSTLY_HINT = "Save it again as a plain JPEG or PNG, or scale it down first."

Size = tuple[int, int]  # width, height
ChooseSize = Callable[[int, int], Size]
Reason = Literal["memory", "cpu", "wall", "cancelled", "crash"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class DecodedPixels:
    """A decoded picture. ``pixels``: upright RGB, uint8 [rows, columns, 3], resized.

    ``width``, ``height``: of the upright original, before resizing. ``notes``: how the picture was changed
    ("first of 12 frames", ...).
    """

    pixels: "NDArray[np.uint8]"
    width: int
    height: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """Statistics of a ``DecodePool``.

    ``workers``: number of them alive; ``busy``: how many of those have a picture. ``waiting``: pictures that
    wait for a worker or for memory. ``memory_limit``, ``memory_in_use``: bytes for large pictures.
    ``stopped``: pictures whose decoding was cut short since the pool was made, by ``Reason``; every reason
    is a key. ``worker_wait``: seconds that a picture has waited for a worker. ``memory_wait``: the same for
    memory, of a picture that takes at most a quarter of ``memory_limit``. 0 if none waits.
    """

    workers: int
    busy: int
    waiting: int
    memory_limit: int
    memory_in_use: int
    stopped: dict[str, int]
    worker_wait: float
    memory_wait: float = 0.0


@dataclass(frozen=True, slots=True)
class _Job:
    """``options``: further fields of its message."""

    operation: Literal["pixels", "size", "check", "encode"]
    data: EncodedFile
    label: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Header:
    """A picture's ``size`` as stored, and ``memory``: bytes of RAM to decode it."""

    size: Size
    memory: int

    @property
    def pixels(self) -> int:
        return self.size[0] * self.size[1]


@dataclass(frozen=True, slots=True)
class _Order:
    """What to do once the header is read: RAM in bytes, and sizes by size of the upright original."""

    memory: int
    sizes: dict[Size, Size]


class DecodePool:
    """Decode pictures in ``num_workers`` processes, and up to ``MAX_SLOW`` more. Thread-safe.

    Processes start with the first picture, or by ``start``. ``num_workers``: None for
    ``default_num_workers()``. ``memory_limit``: bytes for all large pictures together.

    Methods with a parameter ``data`` (a picture file) wait for a worker and, for a large picture, for memory.
    They obey this thread's ``limits.current_allowance`` and raise ``NotAPicture``, ``PictureTooLarge``,
    ``PictureTooCostly``, ``QueueFull``, ``DecodersUnavailable`` or ``Cancelled``. ``label``: what errors call
    the picture.
    """

    def __init__(self, num_workers: int | None = None, memory_limit: int = MAX_DECODE_BYTES) -> None:
        self.num_workers = num_workers or default_num_workers()
        self._budget = MemoryBudget(memory_limit)
        self._queue = DecodeQueue(self.num_workers)
        self._server: ForkServer | None = None
        self._server_lock = threading.Lock()
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: dict[Worker, DecodeSlot] = {}
        self._starting = 0  # idle ones
        self._stopped: Counter[Reason] = Counter()
        self._closed = False

    def decode(self, data: EncodedFile, label: str, choose_size: ChooseSize) -> DecodedPixels:
        """Decode a picture and resize it to ``choose_size(width, height)`` of the upright original.

        ``choose_size`` is called before decoding, for both orientations, and again if another worker has to
        start over; an error that it raises ends the job and is raised here.
        """
        import numpy as np

        def order(header: _Header) -> _Order:
            # Which side is up may be known only after decoding.
            sizes = {size: choose_size(*size) for size in (header.size, header.size[::-1])}
            most = max(_bytes_to_resize(size, seen) for size, seen in sizes.items())
            return _Order(max(header.memory, most), sizes)

        def read(run: "_Run", order: _Order) -> DecodedPixels:
            most = max(width * height for width, height in order.sizes.values())
            buffer = np.empty(3 * most, dtype=np.uint8)  # before the pixels are there to be received
            size, notes = run.receive_upright(order)
            width, height = order.sizes[size]
            pixels = buffer[: 3 * width * height]
            run.connection.receive_into(pixels.data)
            return DecodedPixels(pixels.reshape(height, width, 3), *size, notes)

        return self._run_job(_Job("pixels", data, label), order, read)

    def header_size(self, data: EncodedFile, label: str) -> Size:
        """Width and height of a picture as stored, before EXIF rotation. Only the header is read."""

        def order(header: _Header) -> _Order:
            raise _HeaderRead(header.size)

        try:
            self._run_job(_Job("size", data, label), order, lambda *_: None)
        except _HeaderRead as read:
            return read.size
        raise AssertionError

    def upright_size(self, data: EncodedFile, label: str) -> Size:
        """Width and height of a picture after EXIF rotation. Decodes it in full to find damage."""

        def read(run: "_Run", order: _Order) -> Size:
            return run.receive_upright(order)[0]

        return self._run_job(_Job("size", data, label), _at_full_size, read)

    def is_plain(self, data: EncodedFile, label: str) -> bool:
        """Whether other programs decode the picture as ``decode`` does.

        True for a common format with 8 bits per channel, no transparency and no EXIF rotation. Decodes the
        picture to find damage, a JPEG at an eighth of its size.
        """

        def read(run: "_Run", _: _Order) -> bool:
            return run.receive().get("plain") is True

        return self._run_job(_Job("check", data, label), _at_full_size, read)

    def encode(self, data: EncodedFile, label: str, file_format: str, **options: Any) -> bytes:
        """Decode a picture and return it as a new file: upright, in full size, RGB, 8 bits.

        ``file_format`` (``JPEG``, ``PNG``, ...) and ``options``: as for Pillow's ``Image.save``.
        """

        def read(run: "_Run", order: _Order) -> bytes:
            (width, height), _ = run.receive_upright(order)
            return run.connection.receive_chunks(_FILE_BYTES * width * height + MIB)

        def order(header: _Header) -> _Order:
            full = _at_full_size(header)
            return replace(full, memory=max(full.memory, _ENCODE_BYTES * header.pixels))

        job = _Job("encode", data, label, {"file_format": file_format, "options": options})
        return self._run_job(job, order, read)

    def hold(self, count: int) -> AbstractContextManager[None]:
        """Context manager that counts ``count`` bytes of pixels in this process as memory in use.

        Does not wait, and may exceed the limit; later large pictures wait instead.
        """
        return self._budget.hold(count)

    @contextmanager
    def reserve(self, count: int, check: Callable[[], None] = check_cancelled) -> Iterator[None]:
        """Within the block, take ``count`` bytes of this pool's memory for a decoder of another pool.

        Waits until they are free. More than the limit counts as the limit. ``check``: called while it waits;
        raises to end the wait.
        """
        count = min(count, self._budget.limit)
        self._budget.take(count, check)
        try:
            yield
        finally:
            self._budget.release(count)

    def start(self) -> None:
        """Start missing workers in the background, so that the first picture does not wait for them."""
        if self._is_short():
            threading.Thread(target=self._fill, name="vlfit-decoders", daemon=True).start()

    def close(self) -> None:
        """End all workers. Running and later jobs raise ``DecodersUnavailable``."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.connection.close()
        with self._server_lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def close_inherited(self) -> None:
        """In a fork of this process, close the inherited sockets; the parent's workers go on."""
        if self._server is not None:
            self._server.close_inherited()

    def stats(self) -> DecodeStats:
        """The pool's statistics now. Starts no process."""
        with self._lock:
            return DecodeStats(
                workers=len(self._idle) + len(self._busy),
                busy=len(self._busy),
                waiting=self._queue.num_waiting + self._budget.num_waiting,
                memory_limit=self._budget.limit,
                memory_in_use=self._budget.in_use,
                stopped={reason: self._stopped[reason] for reason in get_args(Reason)},
                worker_wait=self._queue.longest_wait,
                memory_wait=self._budget.longest_wait,
            )

    def resident_bytes(self) -> int:
        """RAM in use by the fork server and all workers, in bytes; shared pages count once.

        0 if no process runs, or on a system without ``/proc``.
        """
        server = self._server
        if server is None:
            return 0
        with self._lock:
            pids = [worker.pid for worker in (*self._idle, *self._busy)]
        return resident_bytes(server.pid, pids)

    # --- one job --------------------------------------------------------------------------------------------

    def _run_job(
        self,
        job: _Job,
        order_for: Callable[[_Header], _Order],
        read: "Callable[[_Run, _Order], Result]",
    ) -> Result:
        """Do ``job``. A new picture that waits for memory keeps neither a worker nor other memory meanwhile.

        One of the slow lane, whose turn comes late, waits for a worker without memory, and keeps the worker.
        """
        allowance = current_allowance()
        least = _budget_needed(len(job.data), self._budget.limit)
        reserved, wanted = 0, least
        was_lost = slow = False

        def take(count: int) -> None:
            with allowance.waiting(job.label, adds_up=True) as check:
                self._budget.take(count, check)

        try:
            while True:
                if wanted > reserved and not slow:
                    self._budget.release(reserved)
                    reserved = 0
                    take(wanted)
                    reserved = wanted
                try:
                    with self._run(job, allowance, slow=slow, fresh=was_lost) as run:
                        if slow and least > reserved:
                            with run.clock_stopped():
                                take(least)
                            reserved = least
                        order = order_for(run.begin())
                        wanted = _budget_needed(order.memory + len(job.data), self._budget.limit)
                        if wanted > reserved and self._budget.try_take(wanted - reserved):
                            reserved = wanted
                        if wanted > reserved and not slow:
                            run.skip()
                            continue
                        if wanted > reserved:
                            self._budget.release(reserved)
                            reserved = 0
                            with run.clock_stopped():
                                take(wanted)
                            reserved = wanted
                        run.start_decoding(order, reserved)
                        result = read(run, order)
                        run.at_rest = True
                        return result
                except _WorkerLost as lost:
                    if was_lost:
                        raise lost.error from None
                    was_lost = True
                    if slow:
                        self._budget.release(reserved)
                        reserved = 0
                except _NotSettled:
                    continue
                except _Yielded:
                    self._budget.release(reserved)
                    reserved, slow = 0, True
        finally:
            self._budget.release(reserved)

    @contextmanager
    def _run(
        self, job: _Job, allowance: DecodeAllowance, *, slow: bool, fresh: bool = False
    ) -> "Iterator[_Run]":
        """A worker for ``job``, a new one if ``fresh``. It is killed and replaced unless it is at rest at the
        end of the block.
        """
        slot = self._queue.try_acquire(slow=slow)
        if slot is None:
            with allowance.waiting(job.label, adds_up=slow) as check:
                slot = self._queue.acquire(slow=slow, check=check)
        worker = self._take(slot, fresh)
        run = _Run(worker, slot, job, allowance)
        reason: Reason | None = "cancelled"
        try:
            yield run
        except ConnectionEnded:
            status = self._end(run.worker)
            if not run.is_settled:
                reason = None
                raise _NotSettled from None
            reason, error = _cause_of_death(run, status)
            if status is None or os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                raise _WorkerLost(error) from None
            raise error from None
        except BrokenProtocol as error:
            reason = "crash"
            raise NotAPicture(
                f"{job.label} is damaged: its decoder sent {error}", "Copy or download it again."
            ) from None
        except NotBegun as error:
            reason = "crash"
            run.forget_time()  # it was not the picture's
            raise _WorkerLost(error.unavailable) from None
        except _OutOfTime:
            reason = "wall"
            raise run.too_costly(run.wall_limit) from None
        except (_Yielded, _NotSettled):
            reason = None
            raise
        except _OutOfMemory:
            run.at_rest = True
            with self._lock:
                self._stopped["memory"] += 1
            raise run.too_costly(run.memory_limit) from None
        except BaseException:
            if run.awaits_order:  # ``choose_size`` refused it
                with suppress(Exception):  # the worker ended, or is ended now
                    run.skip()
            raise
        finally:
            allowance.spend(run.seconds)
            self._put_back(run, reason)

    def _put_back(self, run: "_Run", reason: Reason | None) -> None:
        """Make a worker free, or end it and fork another. ``reason``: counted if it is not at rest."""
        worker = run.worker
        worker.connection.on_tick = lambda: None
        with self._lock:
            if run.at_rest and not run.slot.is_slow and not self._closed:
                del self._busy[worker]
                self._idle.append(worker)
                run.slot.release()
                return
            if not run.at_rest and reason is not None:
                self._stopped[reason] += 1
        self._end(worker)
        run.slot.release()
        self._fill()

    # --- workers --------------------------------------------------------------------------------------------

    def _take(self, slot: DecodeSlot, fresh: bool) -> Worker:
        """A worker for ``slot``, which is released if there is none. ``fresh``: one that is forked now."""
        try:
            if fresh:
                self._end_oldest()
            worker = (None if fresh else self._idle_worker()) or self._fork()
        except BaseException:
            slot.release()
            raise
        with self._lock:
            self._busy[worker] = slot
        return worker

    def _idle_worker(self) -> Worker | None:
        """A worker that waits; those that have ended before their first job are left out."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                worker = self._idle.pop()
            if worker.end_pending or not worker.connection.has_ended():
                return worker
            self._end(worker)

    def _end_oldest(self) -> None:
        """End an idle worker, if there is one, for one that is forked instead."""
        with self._lock:
            oldest = self._idle.pop(0) if self._idle else None
        if oldest is not None:
            self._end(oldest)

    def _fork(self) -> Worker:
        for attempt in range(2):
            with self._server_lock:
                if self._closed:
                    raise DecodersUnavailable("the decode workers are closed", "The program is ending.")
                server = self._server = self._server or ForkServer()
            try:
                return server.fork()
            except DecodersUnavailable:
                if not server.has_failed:  # no file descriptor is left here
                    raise
                with self._server_lock:
                    if self._server is server:
                        self._server = None
                server.close()
                if attempt:
                    raise
        raise AssertionError

    def _is_short(self) -> bool:
        workers = len(self._idle) + self._queue.num_running + self._starting
        return not self._closed and workers < self.num_workers

    def _fill(self) -> None:
        """Fork workers until there are ``num_workers``; a failure is reported where one is needed."""
        while True:
            with self._lock:
                if not self._is_short():
                    return
                self._starting += 1
            try:
                worker = self._fork()
                with self._lock:
                    self._idle.append(worker)
            except DecodersUnavailable:
                return
            finally:
                with self._lock:
                    self._starting -= 1

    def _end(self, worker: Worker) -> int | None:
        """Kill ``worker`` unless it has ended. Returns the status it ended with, None if that is unknown."""
        try:
            return worker.end()
        finally:
            with self._lock:
                self._busy.pop(worker, None)


class _HeaderRead(Exception):
    """The header is all that the job needs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size


class _OutOfTime(Exception):
    """A worker did not answer in time."""


class _WorkerLost(Exception):
    """A worker was killed from outside, or never began: the picture may be sound, so a new worker tries."""

    def __init__(self, error: VlfitError) -> None:
        super().__init__()
        self.error = error


class _NotSettled(Exception):
    """A worker ended after an earlier picture, or keeps too much of it: another one takes this picture."""


class _OutOfMemory(Exception):
    """A worker could not allocate, and says so."""


class _Yielded(Exception):
    """A slow picture made way for others, and is decoded again in the slow lane."""


class _Run:
    """One job on one worker. ``at_rest``: the worker waits for its next job.

    ``is_settled``: it has ended the job before this one as it should. That is read after this one is sent, so
    that neither side waits for it.
    ``decodes_ahead``: the worker decodes before it is told to, as the picture takes no memory of the budget.
    """

    def __init__(self, worker: Worker, slot: DecodeSlot, job: _Job, allowance: DecodeAllowance) -> None:
        self.worker = worker
        self.slot = slot
        self.connection = worker.connection
        self.job = job
        self._allowance = allowance
        self.limits = allowance.limits
        self.wall_seconds = allowance.wall_seconds
        self.at_rest = True
        self.is_settled = not worker.end_pending
        self.awaits_order = False
        self.decodes_ahead = False
        self.memory = WORKER_BYTES + len(job.data)
        self._has_begun = False
        self._began = time.monotonic()
        self.connection.on_tick = self._tick

    def begin(self) -> _Header:
        """Send the file and receive what its header says."""
        self.at_rest = False
        self.worker.end_pending = True
        job, limits = self.job, self.limits
        may_decode_ahead = job.operation == "pixels" and not self.slot.is_slow
        most_ahead = SMALL_BYTES - len(job.data) if may_decode_ahead else -1
        fields = {
            "operation": job.operation,
            "label": job.label[:_MAX_LABEL],
            "size": len(job.data),
            "formats": limits.formats,
            "cpu_seconds": limits.cpu_seconds,
            "ahead": most_ahead,
            **job.options,
        }
        if len(job.data) > _SENT_AT_ONCE:
            self._settle()  # sending may wait for the worker, which must then have nothing else to say
        self.connection.send(fields, job.data)
        self._settle()
        fields = self.receive()
        self._has_begun = True
        if fields == BEGUN:
            fields = self.receive()
        memory = fields.get("bytes")
        if not isinstance(memory, int) or not 0 <= memory <= MAX_DECODE_BYTES:
            raise BrokenProtocol("a header without bytes")
        header = _Header(_read_size(fields), memory)
        self.awaits_order = True
        self.decodes_ahead = memory <= most_ahead
        return header

    def _settle(self) -> None:
        """Read what ends the job before this one, unless it is read."""
        if not self.is_settled:
            if self.connection.receive_count() > MAX_KEPT_BYTES:
                raise _NotSettled
            self.is_settled = True

    def skip(self) -> None:
        """Leave it at the header. A worker that decodes ahead is waited for, within the picture's limits."""
        self.awaits_order = False
        self.connection.send({"go": False})
        if self.decodes_ahead:
            self.connection.receive()  # that it has skipped it, or an error
        self.at_rest = True

    def start_decoding(self, order: _Order, reserved: int) -> None:
        """Let the worker decode, with ``reserved`` bytes of the budget."""
        self.awaits_order = False
        self.memory = WORKER_BYTES + reserved
        sizes = [{"of": size, "to": seen} for size, seen in order.sizes.items()]
        self.connection.send({"go": True, "bytes": reserved, "sizes": sizes})

    def receive(self) -> dict[str, Any]:
        """The worker's next message. Raises the error that it is."""
        fields = self.connection.receive()
        name = fields.get("error")
        if name is None:
            return fields
        if name == "MemoryError":
            raise _OutOfMemory
        message, hint = fields.get("message"), fields.get("hint")
        if name not in _ERRORS or not isinstance(message, str) or not isinstance(hint, str):
            raise BrokenProtocol("an error that is none of a picture")
        self.at_rest = True
        raise _ERRORS[name](message, hint)

    def receive_upright(self, order: _Order) -> tuple[Size, tuple[str, ...]]:
        """Size and notes of the decoded picture."""
        fields = self.receive()
        size, notes = _read_size(fields), fields.get("notes")
        if size not in order.sizes or not isinstance(notes, list) or len(notes) > _MAX_NOTES:
            raise BrokenProtocol("another picture than its header describes")
        return size, tuple(str(note)[:_MAX_NOTE] for note in notes)

    def too_costly(self, limit: str) -> PictureTooCostly:
        return PictureTooCostly(f"{self.job.label}: decoding it takes more than {limit}", _COSTLY_HINT)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def wall_limit(self) -> str:
        return self._allowance.limit_in_words(self.wall_seconds)

    @property
    def memory_limit(self) -> str:
        return f"{self.memory / MIB:,.0f} MiB of RAM; its header calls for less"

    def forget_time(self) -> None:
        """Set ``seconds`` to 0."""
        self._began = time.monotonic()

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Do not count the time of the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._began += time.monotonic() - began

    def _tick(self) -> None:
        check_cancelled()
        seconds = self.seconds
        if not self._has_begun:
            check_has_begun(self.connection, seconds)
        if seconds > self.wall_seconds:
            raise _OutOfTime
        verdict = self.slot.check(seconds, yields=self.limits.yields_when_slow)
        if verdict is Verdict.STOP:
            raise _Yielded
        if verdict is Verdict.BECOMES_SLOW and self.limits.yields_when_slow:
            self.worker.lower_priority(_SLOW_NICE)


def _cause_of_death(run: _Run, status: int | None) -> tuple[Reason, VlfitError]:
    """Why a worker ended with ``status`` in the middle of a job."""
    number = None if status is None else os.waitstatus_to_exitcode(status)
    if number is None:
        return "crash", DecodersUnavailable("the decode workers were ended", "Try again.")
    if number == -signal.SIGXCPU:
        return "cpu", run.too_costly(f"{run.limits.cpu_seconds} s of CPU time")
    if number == EXIT_NO_MEMORY:
        return "memory", run.too_costly(run.memory_limit)
    if number == -signal.SIGKILL:
        return "memory", run.too_costly("the RAM of this machine")
    what = signal.Signals(-number).name if number < 0 else f"exit code {number}"
    return "crash", NotAPicture(
        f"{run.job.label} is damaged: its decoder ended ({what})", "Copy or download it again."
    )


def _read_size(fields: dict[str, Any]) -> Size:
    width, height = fields.get("width"), fields.get("height")
    if not isinstance(width, int) or not isinstance(height, int) or min(width, height) < 1:
        raise BrokenProtocol("a message without a size")
    if width * height > MAX_PIXELS:
        raise BrokenProtocol("a picture above the limit")
    return width, height


def _at_full_size(header: _Header) -> _Order:
    return _Order(header.memory, {size: size for size in (header.size, header.size[::-1])})


def _bytes_to_resize(size: Size, seen: Size) -> int:
    """RAM for a picture, its rows resampled, and then its columns."""
    (width, height), (new_width, new_height) = size, seen
    if size == seen:
        return 0
    return _RGB_BYTES * (width * height + new_width * height + new_width * new_height)


def _budget_needed(count: int, most: int) -> int:
    """Bytes of the budget for a job that takes ``count``: none for a small picture."""
    return 0 if count <= SMALL_BYTES else min(count, most)


# --- the pool of this process -------------------------------------------------------------------------------

_pool: DecodePool | None = None
_pool_lock = threading.Lock()


def decode_pool() -> DecodePool:
    """The pool of this process, made by the first call; a fork of the process gets one of its own."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = DecodePool()
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
