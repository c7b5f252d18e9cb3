"""Decode workers: the bits and errors of one process, hostile files confined, nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.hostile_pictures import KINDS
from tests.hostile_pictures.jpeg_files import jpeg_of_scans
from tests.pictures import (
    animation,
    cmyk_jpeg,
    deep_png,
    encoded,
    gif_claiming_4_gigapixels,
    half_transparent,
    picture,
    png_claiming,
    rotated_by_exif,
    scene,
)
from vlfit.errors import (
    DecodersUnavailable,
    NotAPicture,
    PictureError,
    PictureTooCostly,
    PictureTooLarge,
    QueueFull,
)
from vlfit.images import decode_pool as module
from vlfit.images import decode_process
from vlfit.images.cancellation import Cancelled, cancel_when
from vlfit.images.decode import decode, resize
from vlfit.images.decode_memory import MAX_DECODE_BYTES, MAX_SLOW, WORKER_BYTES, max_bytes_of_workers
from vlfit.images.decode_pool import DecodePool, Size
from vlfit.images.decode_process import ForkServer, Worker
from vlfit.images.decode_wire import Connection
from vlfit.images.limits import (
    CLIENT_PICTURES,
    FORMATS,
    OWN_PICTURES,
    DecodeLimits,
    current_allowance,
    use_limits,
)
from vlfit.units import MIB

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")

SOUND: dict[str, bytes] = {
    **{name: picture(97, 61, name) for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")},
    "JPEG2000": picture(97, 61, "JPEG2000"),
    "QOI": picture(97, 61, "QOI"),
    "progressive": picture(97, 61, "JPEG", progressive=True),
    "cmyk": cmyk_jpeg(),
    "transparent": encoded(half_transparent("RGBA")),
    "transparent grey": encoded(half_transparent("LA")),
    "palette": encoded(scene(64, 48).quantize(16), transparency=3),
    "16 bits": deep_png(np.linspace(0, 65535, 64 * 48).reshape(48, 64).astype(np.uint16)),
    "float": encoded(Image.fromarray(np.linspace(-3, 5, 64 * 48, dtype=np.float32).reshape(48, 64)), "TIFF"),
    "animation": animation("WEBP"),
    "rotated TIFF": picture(96, 64, "TIFF", tiffinfo={0x0112: 6}),
    "rotated PNG": picture(96, 64, "PNG", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03"
                           b"\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00"),
    **{f"rotated {number}": rotated_by_exif(number) for number in range(1, 9)},
    "large": encoded(scene(375, 275).resize((1500, 1100)), "JPEG"),
}  # fmt: skip


# More than the kernel buffers of a file, and of pixels that are decoded before the worker is told to.
NOISE = encoded(Image.effect_noise((1600, 1200), 90).convert("RGB"), compress_level=1)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    pool = DecodePool(2)
    yield pool
    pool.close()


@pytest.fixture
def lone() -> Iterator[DecodePool]:
    """A pool of one worker, to be harmed."""
    pool = DecodePool(1)
    yield pool
    pool.close()


def full(width: int, height: int) -> Size:
    return width, height


def half(width: int, height: int) -> Size:
    return width // 2, height // 2


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def workers(pool: DecodePool) -> list[Worker]:
    return [*pool._idle, *pool._busy]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()


def in_thread(work: Callable[[], Any]) -> "tuple[threading.Thread, list[Any]]":
    """``work`` in a thread, and what it returned or raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


# --- as in one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOUND)
def test_same_bits_and_notes_as_in_one_process(pool: DecodePool, name: str) -> None:
    data = SOUND[name]
    reference = decode(data, "p")
    for choose_size in (full, half):
        found = pool.decode(data, "p", choose_size)
        expected = resize(reference.image, *choose_size(*reference.image.size))
        assert np.array_equal(found.pixels, np.asarray(expected))
        assert (found.width, found.height) == reference.image.size
        assert found.notes == reference.notes
        assert found.pixels.flags.writeable
    assert pool.upright_size(data, "p") == reference.image.size


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        b"%PDF-1.7",
        picture(200, 150, "JPEG")[:2000],
        picture(200, 150, "WEBP")[:900],
        png_claiming(0, 7),
        png_claiming(20000, 20000),
        gif_claiming_4_gigapixels(),
        picture(1, 20000),
    ],
    ids=["empty", "text", "pdf", "half a JPEG", "half a WebP", "no pixels", "400 MP", "4 GP", "thin"],
)
def test_same_errors_as_in_one_process(pool: DecodePool, data: bytes) -> None:
    with pytest.raises(PictureError) as expected:
        decode(data, "photo")
    with pytest.raises(type(expected.value)) as found:
        pool.decode(data, "photo", full)
    assert (found.value.message, found.value.hint) == (expected.value.message, expected.value.hint)
    assert pool.decode(SOUND["PNG"], "p", full).width == 97


def test_what_choose_size_raises_leaves_the_worker_free(lone: DecodePool) -> None:
    def refuse(width: int, height: int) -> Size:
        raise PictureTooLarge(f"{width}x{height}")

    lone.decode(SOUND["JPEG"], "p", full)
    (worker,) = workers(lone)
    with pytest.raises(PictureTooLarge, match="97x61"):
        lone.decode(SOUND["JPEG"], "p", refuse)
    assert lone.decode(SOUND["JPEG"], "p", full).width == 97
    assert workers(lone) == [worker]


def test_a_small_picture_that_is_damaged_leaves_the_worker_free(lone: DecodePool) -> None:
    """It is decoded before the worker is told to: what it is told then is not the next job."""
    lone.decode(SOUND["JPEG"], "p", full)
    (worker,) = workers(lone)
    with pytest.raises(NotAPicture):
        lone.decode(picture(200, 150, "JPEG")[:2000], "damaged", full)
    assert lone.decode(SOUND["JPEG"], "p", half).pixels.shape == (30, 48, 3)
    assert workers(lone) == [worker]


@linux
def test_a_large_picture_that_choose_size_refuses_is_not_decoded(lone: DecodePool) -> None:
    def refuse(width: int, height: int) -> Size:
        raise PictureTooLarge(f"{width}x{height}")

    lone.decode(SOUND["JPEG"], "p", full)
    (worker,) = workers(lone)
    before = peak_bytes(worker.pid)
    with pytest.raises(PictureTooLarge):
        lone.decode(encoded(Image.new("RGB", (8000, 6000)), "JPEG"), "large", refuse)
    assert lone.decode(SOUND["JPEG"], "p", full).width == 97
    assert workers(lone) == [worker]
    assert peak_bytes(worker.pid) - before < 8000 * 6000


def test_a_refused_picture_that_is_decoded_already_keeps_its_limits(lone: DecodePool) -> None:
    def refuse(width: int, height: int) -> Size:
        raise PictureTooLarge(f"{width}x{height}")

    lone.decode(SOUND["JPEG"], "p", full)
    (worker,) = workers(lone)
    with (
        use_limits(DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=0.2)),
        pytest.raises(PictureTooLarge),
    ):
        lone.decode(SLOW_AND_SMALL, "slow", refuse)
    assert lone.decode(SOUND["JPEG"], "p", full).width == 97
    assert worker not in workers(lone)  # it was ended


def test_a_worker_that_keeps_too_much_is_replaced(lone: DecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    lone.decode(SOUND["JPEG"], "p", full)
    (worker,) = workers(lone)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", -(2**40))
    assert lone.decode(SOUND["JPEG"], "p", full).width == 97
    assert worker not in workers(lone)
    assert not any(lone.stats().stopped.values())


@pytest.mark.parametrize("name", ["PNG", "noise"])
def test_a_worker_that_ended_after_its_job_is_nobodys_error(lone: DecodePool, name: str) -> None:
    """However it ended: the next picture has no part in it."""
    lone.decode(SOUND["JPEG"], "p", full)
    assert lone._server is not None
    ours, theirs = socket.socketpair()
    theirs.close()
    ended = Worker(1, Connection(ours, ticks=True), lone._server)
    ended.end_pending = True
    lone._idle.append(ended)
    assert lone.decode({**SOUND, "noise": NOISE}[name], "p", half).pixels.size
    assert ended not in workers(lone)
    assert not any(lone.stats().stopped.values())


def test_plain_pictures_and_new_files(pool: DecodePool) -> None:
    assert pool.is_plain(SOUND["JPEG"], "p")
    assert not pool.is_plain(SOUND["rotated 6"], "p")
    assert not pool.is_plain(SOUND["transparent"], "p")
    with pytest.raises(NotAPicture):
        pool.is_plain(SOUND["large"][:5000], "p")
    for file_format, options in (("PNG", {"compress_level": 1}), ("JPEG", {"quality": 95, "subsampling": 0})):
        reference = decode(SOUND["rotated 6"], "p").image
        file = BytesIO()
        reference.save(file, file_format, **options)
        assert pool.encode(SOUND["rotated 6"], "p", file_format, **options) == file.getvalue()


def test_threads_share_the_workers(pool: DecodePool) -> None:
    expected = np.asarray(decode(SOUND["large"], "p").image)
    running = [in_thread(lambda: pool.decode(SOUND["large"], "p", full).pixels) for _ in range(12)]
    for thread, results in running:
        thread.join(60)
        assert np.array_equal(results[0], expected)
    assert len(workers(pool)) <= pool.num_workers + MAX_SLOW


def test_formats_that_are_not_allowed_are_not_opened(pool: DecodePool) -> None:
    with use_limits(CLIENT_PICTURES):
        for name in ("TIFF", "JPEG2000", "PPM", "QOI"):
            with pytest.raises(NotAPicture) as caught:
                pool.decode(SOUND[name], "p", full)
            assert "--image-formats all" in caught.value.hint
        for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF"):
            assert pool.decode(SOUND[name], "p", full).width == 97
    assert pool.decode(SOUND["TIFF"], "p", full).width == 97


def test_limits_are_of_a_thread_and_its_block() -> None:
    from vlfit.images.limits import current_allowance

    with use_limits(CLIENT_PICTURES):
        thread, results = in_thread(lambda: current_allowance().limits)
        thread.join(60)
        assert (current_allowance().limits, results) == (CLIENT_PICTURES, [OWN_PICTURES])
    assert current_allowance().limits == OWN_PICTURES


def test_slow_pictures_of_a_request_share_its_time() -> None:
    from vlfit.images.limits import current_allowance

    with use_limits(DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=20.0)):
        for _ in range(700):  # frames of a clip
            current_allowance().spend(0.9)
        assert current_allowance().wall_seconds == 20.0
        current_allowance().spend(16.0)
        assert current_allowance().wall_seconds == 5.0
        current_allowance().spend(9.0)
        assert current_allowance().wall_seconds == 1.0
    with use_limits(DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=20.0, request_seconds=60.0)):
        for _ in range(59):
            current_allowance().spend(1.0)
        assert current_allowance().wall_seconds == 1.0
        current_allowance().spend(1.0)
        assert current_allowance().wall_seconds == 0.0
    current_allowance().spend(16.0)
    assert current_allowance().wall_seconds == OWN_PICTURES.wall_seconds


@linux
def test_the_second_slow_picture_of_a_request_has_the_time_that_is_left(lone: DecodePool) -> None:
    with use_limits(DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=1.5)):
        limits = []
        for _ in range(2):
            with pytest.raises(PictureTooCostly) as caught:
                lone.decode(SLOW, "slow", full)
            limits.append(caught.value.message)
    assert "1.5 s" in limits[0]
    assert "1.0 s" in limits[1]


# --- hostile files ------------------------------------------------------------------------------------------


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@linux
@pytest.mark.parametrize(
    "name",
    [
        "jp2-precincts-of-a-pixel",
        "tiff-tile-of-512-megapixels",
        "avif-frame-larger-than-its-header",
        "jpeg-8-million-comments",
    ],
)
def test_a_file_that_takes_more_memory_than_its_header_says(
    lone: DecodePool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(lone._queue, "_slow_seconds", 1e9)  # its worker stays
    lone.decode(SOUND["PNG"], "p", full)
    (worker,) = workers(lone)
    start = peak_bytes(worker.pid)
    with pytest.raises(PictureTooCostly) as caught:
        lone.decode(KINDS[name].file(), "hostile", full)
    assert (caught.value.code, caught.value.http_status) == ("image_too_costly", 400)
    limit = re.search(r" ([\d,]+) MiB", caught.value.message)
    assert limit is not None, caught.value.message
    assert peak_bytes(worker.pid) - start <= int(limit[1].replace(",", "")) * MIB
    assert lone.stats().stopped["memory"] == 1
    assert lone.decode(SOUND["PNG"], "p", full).width == 97


SLOW = KINDS["bmp-rle8-65000-wide"].file()  # half a minute of Python, and half a GiB
MANY_SCANS = KINDS["jpeg-1500-scans"].file()  # as long, with 60 MiB
SLOW_AND_SMALL = jpeg_of_scans(1000, 30_000)


@linux
def test_cpu_seconds_are_limited_by_the_kernel(lone: DecodePool) -> None:
    with (
        use_limits(DecodeLimits(FORMATS, cpu_seconds=0, wall_seconds=600)),
        pytest.raises(PictureTooCostly, match=r"\b0 s\b"),
    ):
        lone.decode(SLOW, "slow", full)
    assert lone.stats().stopped["cpu"] == 1
    assert lone.decode(SOUND["PNG"], "p", full).width == 97


def test_wall_time_is_limited(lone: DecodePool) -> None:
    with (
        use_limits(DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=0.1)),
        pytest.raises(PictureTooCostly) as caught,
    ):
        lone.decode(SLOW, "slow", full)
    assert caught.value.message.endswith(" 0.1 s")
    assert lone.stats().stopped["wall"] == 1
    assert lone.decode(SOUND["PNG"], "p", full).width == 97


@linux
def test_a_picture_that_nobody_waits_for_is_stopped_at_once(lone: DecodePool) -> None:
    gone = threading.Event()

    def work() -> object:
        with cancel_when(gone.is_set):
            return lone.decode(SLOW, "slow", full)

    thread, results = in_thread(work)
    until(lambda: lone.stats().busy)
    (worker,) = workers(lone)
    waiting, waited = in_thread(work)
    until(lambda: lone.stats().waiting)
    gone.set()
    for each in (thread, waiting):
        each.join(60)
    assert [type(each) for each in (*results, *waited)] == [Cancelled, Cancelled]
    assert not exists(worker.pid)
    stats = lone.stats()
    assert (stats.busy, stats.waiting, stats.stopped["cancelled"]) == (0, 0, 1)
    assert stats.workers == 1  # replaced
    assert lone.decode(SOUND["PNG"], "p", full).width == 97


@linux
@pytest.mark.parametrize(
    ("number", "times", "error", "reason"),
    [(signal.SIGSEGV, 1, NotAPicture, "crash"), (signal.SIGKILL, 2, PictureTooCostly, "memory")],
)
def test_a_decoder_that_dies_is_one_error(
    lone: DecodePool, number: signal.Signals, times: int, error: type[PictureError], reason: str
) -> None:
    """SIGKILL is what Linux sends when the machine is out of memory: tried once more."""
    thread, results = in_thread(lambda: lone.decode(SLOW, "slow", full))
    killed: set[int] = set()

    def busy_but(pids: set[int]) -> set[int]:
        return {each.pid for each in list(lone._busy)} - pids

    for _ in range(times):
        until(partial(busy_but, killed))
        (pid,) = busy_but(killed)
        os.kill(pid, number)
        killed.add(pid)
    thread.join(60)
    assert type(results[0]) is error
    assert lone.stats().stopped[reason] == times


@linux
def test_a_sound_picture_outlives_its_worker(lone: DecodePool) -> None:
    """Killed once while it decodes, the picture is decoded by another worker."""
    large = encoded(Image.effect_noise((4000, 4000), 90).convert("RGB"), compress_level=1)
    thread, results = in_thread(lambda: lone.decode(large, "large", half).pixels.shape)
    until(lambda: lone.stats().busy)
    os.kill(next(iter(lone._busy)).pid, signal.SIGKILL)
    thread.join(60)
    assert results == [(2000, 2000, 3)]
    assert lone.decode(SOUND["PNG"], "p", full).width == 97


@linux
@pytest.mark.parametrize("name", ["PNG", "noise"])
def test_an_idle_worker_that_is_stuck_is_nobodys_error(
    pool: DecodePool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pool.start()
    until(lambda: len(workers(pool)) == 2)
    for thread, _ in [in_thread(lambda: pool.decode(SOUND["large"], "p", full)) for _ in range(4)]:
        thread.join(60)
    monkeypatch.setattr(decode_process, "BEGIN_SECONDS", 0.5)
    before = workers(pool)
    crashes = pool.stats().stopped["crash"]
    for worker in before:
        os.kill(worker.pid, signal.SIGSTOP)
    with use_limits(CLIENT_PICTURES):
        assert pool.decode({**SOUND, "noise": NOISE}[name], "p", half).pixels.size
        assert current_allowance().wall_seconds == CLIENT_PICTURES.wall_seconds
    assert pool.stats().stopped["crash"] == crashes + 1
    until(lambda: not any(exists(worker.pid) for worker in before))


@linux
def test_workers_that_never_begin_are_no_fault_of_the_picture(
    lone: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_process, "BEGIN_SECONDS", 0.2)
    fork = ForkServer.fork

    def fork_stopped(server: ForkServer) -> Worker:
        worker = fork(server)
        os.kill(worker.pid, signal.SIGSTOP)
        return worker

    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "fork", fork_stopped)
        with use_limits(CLIENT_PICTURES), pytest.raises(DecodersUnavailable) as raised:
            lone.decode(SOUND["PNG"], "p", full)
    assert raised.value.http_status == 503
    assert lone.stats().busy == 0
    assert lone.decode(SOUND["PNG"], "p", full).width == 97


@linux
def test_an_idle_worker_that_died_is_nobodys_error(lone: DecodePool) -> None:
    lone.decode(SOUND["PNG"], "p", full)
    (worker,) = workers(lone)
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: worker.connection.has_ended() or not exists(worker.pid))
    assert lone.decode(SOUND["PNG"], "p", full).width == 97


@linux
def test_a_fork_server_that_died_is_started_again(lone: DecodePool) -> None:
    lone.decode(SOUND["PNG"], "p", full)
    (worker,) = workers(lone)
    assert lone._server is not None
    os.kill(lone._server.pid, signal.SIGKILL)
    until(lambda: not exists(worker.pid))
    assert lone.decode(SOUND["PNG"], "p", full).width == 97


@linux
def test_a_slow_picture_does_not_keep_a_small_one_waiting(
    lone: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone._queue, "_slow_seconds", 0.0)
    gone = threading.Event()

    def work() -> object:
        with cancel_when(gone.is_set), use_limits(CLIENT_PICTURES):
            return lone.decode(SLOW, "slow", full)

    thread, _ = in_thread(work)
    until(lambda: any(slot.is_slow for slot in lone._busy.values()))
    (slow,) = lone._busy
    assert os.getpriority(os.PRIO_PROCESS, slow.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    assert lone.decode(SOUND["PNG"], "p", full).width == 97
    gone.set()
    thread.join(60)


# --- RAM ----------------------------------------------------------------------------------------------------


def test_a_picture_that_waits_for_room_keeps_no_worker(lone: DecodePool) -> None:
    large = encoded(Image.new("RGB", (4000, 3000), (9, 9, 9)), compress_level=1)  # priced above SMALL_BYTES
    lone._budget.take(MAX_DECODE_BYTES)
    thread, results = in_thread(lambda: lone.decode(large, "large", half).pixels.shape)
    until(lambda: lone._budget.num_waiting)
    assert lone.stats().busy == 0
    assert lone.decode(SOUND["PNG"], "p", full).width == 97
    lone._budget.release(MAX_DECODE_BYTES)
    thread.join(60)
    assert results == [(1500, 2000, 3)]
    assert lone.stats().memory_in_use == 0


def test_bytes_of_workers_cover_their_limits() -> None:
    assert max_bytes_of_workers(2) - max_bytes_of_workers(1) == WORKER_BYTES
    assert max_bytes_of_workers(1) > MAX_DECODE_BYTES + WORKER_BYTES


def test_how_long_a_picture_waits_for_a_worker(lone: DecodePool) -> None:
    """Workers that end and are replaced meanwhile change nothing."""
    gone, small_gone = threading.Event(), threading.Event()

    def work(data: bytes, gone: threading.Event) -> object:
        with cancel_when(gone.is_set):
            return lone.decode(data, "slow", full)

    slow = [in_thread(partial(work, SLOW, gone))[0]]
    until(lambda: lone.stats().busy == 1)
    assert lone.stats().worker_wait == 0
    slow.append(in_thread(partial(work, SLOW, gone))[0])
    until(lambda: lone.stats().waiting == 1)
    small, _ = in_thread(partial(work, SOUND["PNG"], small_gone))
    until(lambda: lone.stats().waiting == 2)
    until(lambda: lone.stats().worker_wait > 0.05)
    gone.set()
    for thread in slow:
        thread.join(60)
    small.join(60)
    assert lone.stats().worker_wait == 0


def waiting_at_most(seconds: float) -> DecodeLimits:
    return DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=600, wait_seconds=seconds)


def test_a_large_picture_does_not_wait_for_memory_for_ever(lone: DecodePool) -> None:
    large = encoded(Image.new("RGB", (4000, 3000), (9, 9, 9)), compress_level=1)
    lone._budget.take(MAX_DECODE_BYTES)
    with use_limits(waiting_at_most(0.3)):
        began = time.monotonic()
        with pytest.raises(QueueFull) as caught:
            lone.decode(large, "large", half)
        assert 0.3 <= time.monotonic() - began < 20
        assert caught.value.retry_after > 0
        assert lone.decode(SOUND["PNG"], "small", full).width == 97  # takes no share of the memory
        began = time.monotonic()
        with pytest.raises(QueueFull):  # the frames of a clip: one after the other
            lone.decode(large, "large", half)
        assert time.monotonic() - began < 0.3
    with use_limits(waiting_at_most(600), 601), pytest.raises(QueueFull):  # it has waited for a thread
        lone.decode(large, "large", half)
    stats = lone.stats()
    assert (stats.waiting, stats.busy, stats.memory_in_use) == (0, 0, MAX_DECODE_BYTES)
    lone._budget.release(MAX_DECODE_BYTES)
    with use_limits(waiting_at_most(0.3)):
        assert lone.decode(large, "large", half).pixels.shape == (1500, 2000, 3)


def test_a_picture_does_not_wait_for_a_worker_for_ever(lone: DecodePool) -> None:
    gone = threading.Event()

    def work() -> None:
        endless = DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=600)
        with cancel_when(gone.is_set), use_limits(endless), suppress(Cancelled):
            lone.decode(MANY_SCANS, "slow", full)

    slow = [in_thread(work)[0] for _ in range(lone.num_workers + MAX_SLOW + 1)]
    until(lambda: lone.stats().waiting == 1)
    with use_limits(waiting_at_most(0.3)), pytest.raises(QueueFull):
        lone.decode(SOUND["PNG"], "small", full)
    gone.set()
    for thread in slow:
        thread.join(60)
    assert (lone.stats().waiting, lone.stats().busy) == (0, 0)


@linux
def test_a_small_picture_waits_for_the_turns_of_slow_ones_not_for_their_ends(
    lone: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone._queue, "_slow_seconds", 0.2)
    gone = threading.Event()
    began = time.monotonic()

    def work(data: bytes, label: str) -> object:
        with (
            cancel_when(gone.is_set),
            use_limits(DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=600, yields_when_slow=True)),
        ):
            return lone.decode(data, label, full).width

    slow = [in_thread(partial(work, MANY_SCANS, "slow")) for _ in range(7)]
    until(lambda: lone.stats().busy + lone.stats().waiting == 7)
    small, results = in_thread(partial(work, SOUND["PNG"], "small"))
    small.join(60)
    assert results == [97]
    assert time.monotonic() - began < 10
    assert sum(lone.stats().stopped.values()) == 0
    gone.set()
    for thread, _ in slow:
        thread.join(60)
    assert lone.stats().busy == lone.stats().waiting == lone.stats().memory_in_use == 0


@linux
def test_a_slow_picture_that_made_way_is_decoded_later(
    lone: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone._queue, "_slow_seconds", 0.1)
    gone = threading.Event()

    def work(data: bytes, label: str) -> object:
        with (
            cancel_when(gone.is_set if label == "slow" else lambda: False),
            use_limits(DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=600, yields_when_slow=True)),
        ):
            return lone.decode(data, label, half).pixels.shape

    # Decoded in about half a second.
    noise, wide = Image.effect_noise((6000, 250), 90).convert("RGB"), Image.new("RGB", (6000, 5000))
    for top in range(0, wide.height, noise.height):
        wide.paste(noise, (0, top))
    large = encoded(wide, compress_level=1)
    slow = [in_thread(partial(work, MANY_SCANS, "slow"))[0] for _ in range(2)]
    until(lambda: sum(slot.is_slow for slot in lone._busy.values()) == 2)
    stopped, results = in_thread(partial(work, large, "large"))
    until(lambda: lone.stats().busy == 3)
    small, small_results = in_thread(partial(work, SOUND["PNG"], "small"))
    small.join(60)
    assert small_results == [(30, 48, 3)]
    until(lambda: lone.stats().waiting == 1)  # in the slow lane
    assert not results
    assert lone.stats().memory_in_use < MAX_DECODE_BYTES
    gone.set()
    for thread in (*slow, stopped):
        thread.join(60)
    assert results == [(2500, 3000, 3)]
    assert lone.stats().memory_in_use == 0


@linux
@pytest.mark.parametrize("when", ["it forks", "it ends a worker"])
def test_a_fork_server_that_hangs_is_replaced(
    lone: DecodePool, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(decode_process, "_REPLY_SECONDS", 0.3)
    lone.decode(SOUND["PNG"], "p", full)
    assert lone._server is not None
    pid = lone._server.pid
    os.kill(pid, signal.SIGSTOP)
    if when == "it forks":
        (worker,) = workers(lone)
        os.kill(worker.pid, signal.SIGKILL)
    else:
        with (
            use_limits(DecodeLimits(FORMATS, cpu_seconds=600, wall_seconds=0.1)),
            pytest.raises(PictureTooCostly),
        ):
            lone.decode(SLOW, "slow", full)
    assert lone.decode(SOUND["PNG"], "p", full).width == 97
    assert lone._server.pid != pid
    until(lambda: not exists(pid))


def test_a_pool_closes_although_its_fork_server_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_process, "_REPLY_SECONDS", 0.3)
    pool = DecodePool(1)
    pool.decode(SOUND["PNG"], "p", full)
    assert pool._server is not None
    os.kill(pool._server.pid, signal.SIGSTOP)
    pool.close()


# --- what a worker is ---------------------------------------------------------------------------------------


@linux
def test_a_worker_has_no_secrets_and_few_rights(
    lone: DecodePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLFIT_API_KEY", "sesame")
    monkeypatch.setenv("HF_TOKEN", "sesame")
    with (tmp_path / "open").open("w"):
        lone.decode(SOUND["PNG"], "p", full)
    proc = Path(f"/proc/{workers(lone)[0].pid}")
    assert b"sesame" not in (proc / "environ").read_bytes()
    targets = [os.readlink(each) for each in (proc / "fd").iterdir()]
    assert sum(target != "/dev/null" for target in targets) == 1  # the socket
    limits = {line[:26].strip(): line[26:].split() for line in (proc / "limits").read_text().splitlines()}
    assert limits["Max core file size"][:2] == ["0", "0"]
    assert limits["Max file size"][:2] == ["0", "0"]
    assert int(limits["Max open files"][1]) < 100
    assert int(limits["Max address space"][0]) < int(limits["Max address space"][1]) < 2 * MAX_DECODE_BYTES
    assert limits["Max cpu time"][0] != "unlimited"
    assert "NoNewPrivs:\t1" in (proc / "status").read_text()
    assert "torch" not in (proc / "maps").read_text()
    assert int((proc / "oom_score_adj").read_text()) == 1000


@linux
def test_workers_end_with_a_server_that_is_killed() -> None:
    code = (
        "import sys, threading, time; from vlfit.images.decode_pool import decode_pool\n"
        "pool, slow = decode_pool(), sys.stdin.buffer.read()\n"
        "threading.Thread(target=lambda: pool.decode(slow, 'p', lambda w, h: (w, h)), daemon=True).start()\n"
        "while not pool._busy: time.sleep(0.01)\n"
        "pool._fill()\n"
        "print(pool._server.pid, *(each.pid for each in [*pool._busy, *pool._idle]), flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(SLOW)
        program.stdin.close()
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) >= 2
        assert all(map(exists, pids))
        program.kill()
    until(lambda: not any(map(exists, pids)))


@linux
def test_a_fork_of_the_program_has_workers_of_its_own(lone: DecodePool) -> None:
    module.decode_pool().decode(SOUND["PNG"], "p", full)
    ours = {each.pid for each in workers(module.decode_pool())}
    child = os.fork()
    if not child:
        try:
            pool = module.decode_pool()
            fine = pool.decode(SOUND["PNG"], "p", full).width == 97
            fine &= ours.isdisjoint(each.pid for each in workers(pool))
            pool.close()
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert module.decode_pool().decode(SOUND["PNG"], "p", full).width == 97


def test_a_closed_pool_decodes_nothing(pool: DecodePool) -> None:
    closed = DecodePool(1)
    closed.decode(SOUND["PNG"], "p", full)
    closed.close()
    with pytest.raises(DecodersUnavailable):
        closed.decode(SOUND["PNG"], "p", full)
