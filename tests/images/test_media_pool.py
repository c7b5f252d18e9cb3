"""Media workers: pages, frames and previews that are right, and hostile files that end in one clear error."""

import io
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.hostile_pictures import KINDS
from tests.media import COLOURS, animation, dng, pdf, redness, video, written
from vlfit.errors import (
    DecodersUnavailable,
    NotAPicture,
    PictureError,
    PictureNotFound,
    PictureTooCostly,
    PictureTooLarge,
)
from vlfit.images import media_pool as module
from vlfit.images.cancellation import Cancelled, cancel_when
from vlfit.images.decode_memory import MAX_MEDIA_WORKERS, WORKER_BYTES, max_bytes_of_workers
from vlfit.images.decode_pool import decode_pool
from vlfit.images.decode_process import ForkServer, Worker
from vlfit.images.limits import CLIENT_PICTURES, use_limits
from vlfit.images.media_kinds import FRAME_PIXELS, is_animation, media_kind_of
from vlfit.images.media_pool import MediaPool, decoder_resident_bytes, decoder_stats, media_pool
from vlfit.units import MIB

pytest.importorskip("pypdfium2")
pytest.importorskip("rawpy")
pytest.importorskip("av")


@pytest.fixture(scope="module")
def pool() -> Iterator[MediaPool]:
    pool = MediaPool()
    yield pool
    pool.close()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def test_pages_are_rendered_at_150_dots_per_inch(pool: MediaPool) -> None:
    found = pool.pdf_pages(pdf(5), "report.pdf", [(2, 3), (5, 0)])
    assert (found.count, list(found.pictures)) == (5, [2, 3, 5])
    for number, data in found.pictures.items():
        page = opened(data)
        assert page.size == (1240, 1754)
        assert page.getpixel((600, 900)) == Image.new("RGB", (1, 1), COLOURS[number - 1]).getpixel((0, 0))


def test_large_pages_are_smaller_and_small_ones_larger(pool: MediaPool) -> None:
    poster = opened(pool.pdf_pages(pdf(1, (3000, 4000)), "poster", [(1, 1)]).pictures[1])
    assert abs(poster.width * poster.height - 4_194_304) < 10_000
    assert opened(pool.pdf_pages(pdf(1, (6, 6)), "dot", [(1, 1)]).pictures[1]).size == (28, 28)


def test_the_number_of_pages_alone_and_a_limit(pool: MediaPool, tmp_path: Path) -> None:
    path = written(tmp_path, "a.pdf", pdf(4))
    assert pool.pdf_pages(path, "a.pdf", []) == module.Pages({}, 4)
    assert list(pool.pdf_pages(path, "a.pdf", [(1, 0)], max_pages=2).pictures) == [1, 2]
    with pytest.raises(NotAPicture, match=r"4 pages.*9"):
        pool.pdf_pages(path, "a.pdf", [(9, 9)])
    with pytest.raises(PictureNotFound):
        pool.pdf_pages(tmp_path / "gone.pdf", "gone.pdf", [])


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("matroska", "mpeg4"),
        ("webm", "libvpx-vp9"),
        ("avi", "mpeg4"),
        ("mpegts", "mpeg2video"),
    ],
)
def test_frames_are_spread_and_found_by_time(pool: MediaPool, container: str, codec: str) -> None:
    data = video(container=container, codec=codec)
    assert media_kind_of(data) == "video"
    found = pool.video_frames(data, "clip", every=1.0)
    assert found.seconds == pytest.approx((0, 1, 2, 3, 4), abs=0.11)
    for frame, seconds in zip(found.frames, found.seconds, strict=True):
        assert redness(frame) == pytest.approx(seconds / 5, abs=0.06)
        assert opened(frame).size == (160, 96)
    few = pool.video_frames(data, "clip", max_frames=3)
    assert 2 <= len(few.frames) <= 3
    late = pool.video_frames(data, "clip", at=[4.9, 0.0, 2.05])
    assert late.seconds == pytest.approx((4.9, 0.0, 2.0), abs=0.11)
    assert [redness(frame) for frame in late.frames] == pytest.approx([0.98, 0, 0.4], abs=0.06)
    with pytest.raises(NotAPicture, match="35"):
        pool.video_frames(data, "clip", at=[35.0])


def test_a_video_by_its_path_is_not_read_into_this_process(pool: MediaPool, tmp_path: Path) -> None:
    path = written(tmp_path, "clip.mp4", video(20))
    assert len(pool.video_frames(path, "clip.mp4", every=1.0).frames) == 2
    assert opened(pool.video_frames(path, "clip.mp4", max_pixels=1500).frames[0]).size == (50, 30)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_animations_are_thinned_by_their_own_times(pool: MediaPool, file_format: str) -> None:
    data = animation(file_format)
    assert is_animation(data)
    found = pool.animation_frames(data, "wave", every=0.4)
    assert found.seconds == pytest.approx((0, 0.4, 0.8, 1.2, 1.6))
    assert [redness(frame) for frame in found.frames] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=0.03)
    at = pool.animation_frames(data, "wave", at=(1.3, 0.0, 1.99))
    assert [redness(frame) for frame in at.frames] == pytest.approx([0.6, 0, 0.9], abs=0.03)
    with pytest.raises(NotAPicture, match=r"2\.0 s"):
        pool.animation_frames(data, "wave", at=(0.1, 2.5))
    still = io.BytesIO()
    Image.new("RGB", (9, 9)).save(still, file_format)
    assert not is_animation(still.getvalue())


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_preview_of_a_raw_photo_is_upright(pool: MediaPool, orientation: int) -> None:
    data = dng(orientation=orientation)
    assert media_kind_of(data) == "raw"
    preview, notes = pool.raw_preview(data, "photo.dng")
    assert len(notes) == 1
    assert "120x80" in notes[0]
    seen = decode_pool().decode(preview, "preview", lambda width, height: (width, height))
    assert (seen.width, seen.height) == ((120, 80) if orientation < 5 else (80, 120))
    first = {1: (5, 5), 3: (114, 74), 6: (74, 5), 8: (5, 114)}[orientation]  # where the red side is
    assert seen.pixels[first[1], first[0], 0] > 200


def test_a_raw_photo_without_a_preview_is_not_developed(pool: MediaPool) -> None:
    with pytest.raises(NotAPicture) as raised:
        pool.raw_preview(dng(with_preview=False), "photo.dng")
    assert raised.value.hint


def test_a_plain_tiff_is_no_raw_photo() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48)).save(buffer, "TIFF")
    assert media_kind_of(buffer.getvalue()) is None


def test_a_missing_package_is_named_with_its_extra(pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlfit.images.media_kinds.find_spec", lambda name: None)
    for run, extra in (
        (lambda: pool.pdf_pages(pdf(1), "a.pdf", []), "vlfit[pdf]"),
        (lambda: pool.video_frames(b"", "a.mp4"), "vlfit[video]"),
        (lambda: pool.raw_preview(b"", "a.dng"), "vlfit[raw]"),
    ):
        with pytest.raises(NotAPicture) as raised:
            run()
        assert extra in raised.value.hint


MEDIA_KINDS = [
    name for name in KINDS if name.startswith(("pdf-", "video-", "raw-")) and name != "pdf-with-a-jpeg"
]
LIMITS = replace(CLIENT_PICTURES, cpu_seconds=2, wall_seconds=20.0)


def take_apart(pool: MediaPool, data: bytes) -> int:
    """The number of pictures in a hostile file."""
    kind = media_kind_of(data)
    if kind == "pdf":
        return len(pool.pdf_pages(data, "hostile", [(1, 0)], max_pages=4).pictures)
    if kind == "video":
        return len(pool.video_frames(data, "hostile", max_frames=16).frames)
    assert kind == "raw"
    return len([pool.raw_preview(data, "hostile")])


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("pdf-100000-pages", 4),
        ("pdf-page-of-a-million-points", PictureTooLarge),
        ("pdf-pages-in-circles", NotAPicture),
        ("pdf-text-of-4-gigabytes", PictureTooCostly),
        ("pdf-of-10-billion-drawings", PictureTooCostly),
        ("pdf-cut-off", NotAPicture),
        ("video-of-60000-frames", 16),
        ("video-of-100-hours-claimed", 10),
        ("video-of-noise", NotAPicture),
        ("video-of-nested-boxes", NotAPicture),
        ("raw-of-noise", NotAPicture),
        ("raw-cut-off", NotAPicture),
    ],
)
def test_what_hostile_files_end_as(pool: MediaPool, name: str, ended: int | type[PictureError]) -> None:
    assert outcome(pool, name) == ended


@pytest.mark.slow
@pytest.mark.parametrize("name", MEDIA_KINDS)
def test_every_kind_ends_as_pictures_or_an_error_of_its_own(pool: MediaPool, name: str) -> None:
    outcome(pool, name)


def outcome(pool: MediaPool, name: str) -> int | type[PictureError]:
    """How many pictures a kind gives, or the error that it ends with.

    Checks that the error has its code and a hint, and that the next file is taken apart.
    """
    before = decode_pool().stats().memory_in_use
    found, failure = 0, None
    try:
        with use_limits(LIMITS):
            found = take_apart(pool, KINDS[name].file())
    except PictureError as error:
        failure = error
    if failure is not None:
        code = "image_too_costly" if isinstance(failure, PictureTooCostly) else "invalid_image"
        assert (failure.code, failure.http_status) == (code, 400)
        assert failure.hint
    assert pool.pdf_pages(pdf(2), "sound", []).count == 2
    assert decode_pool().stats().memory_in_use == before
    return found if failure is None else type(failure)


def test_slow_documents_end_by_cpu_time_and_cancelled_ones_at_once(pool: MediaPool) -> None:
    data = KINDS["pdf-of-a-million-curves"].file()
    with use_limits(replace(LIMITS, cpu_seconds=0)), pytest.raises(PictureTooCostly):
        take_apart(pool, data)
    with use_limits(replace(LIMITS, wall_seconds=0.2)), pytest.raises(PictureTooCostly, match=r"0\.2 s"):
        take_apart(pool, data)
    with cancel_when(lambda: True), pytest.raises(Cancelled):
        take_apart(pool, data)


# --- several files at once ----------------------------------------------------------------------------------


@pytest.fixture
def contended() -> Iterator[tuple[MediaPool, threading.Event, list[threading.Thread]]]:
    """A pool that six clients keep busy with slow documents until they hang up, by the event."""
    pool, gone = MediaPool(), threading.Event()
    data = KINDS["pdf-of-10-billion-drawings"].file()

    def work() -> None:
        limits = replace(CLIENT_PICTURES, cpu_seconds=600, wall_seconds=600.0, request_seconds=math.inf)
        with use_limits(limits), cancel_when(gone.is_set), suppress(Cancelled, PictureError):
            take_apart(pool, data)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    yield pool, gone, threads
    gone.set()
    for thread in threads:
        thread.join(60)
    pool.close()


def test_a_sound_document_does_not_wait_for_the_end_of_slow_ones(
    contended: tuple[MediaPool, threading.Event, list[threading.Thread]],
) -> None:
    pool, gone, threads = contended
    until(lambda: pool.stats().busy == MAX_MEDIA_WORKERS and pool.stats().waiting == 4)
    with use_limits(CLIENT_PICTURES):
        assert list(pool.pdf_pages(pdf(2), "sound", [(1, 0)]).pictures) == [1, 2]
    assert pool.stats().busy + pool.stats().waiting >= 2
    # One that is just being moved to the slow lane has no worker to stop.
    until(lambda: pool.stats().busy)
    gone.set()
    for thread in threads:
        thread.join(60)
    stats = pool.stats()
    assert (stats.busy, stats.waiting) == (0, 0)
    assert stats.stopped["cancelled"] >= 1
    assert decode_pool().stats().memory_in_use == 0


def test_workers_of_clients_leave_the_processor_to_the_engine(
    contended: tuple[MediaPool, threading.Event, list[threading.Thread]],
) -> None:
    pool, _, _ = contended
    until(lambda: pool.stats().busy)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    until(lambda: all(os.getpriority(os.PRIO_PROCESS, each.pid) > ours for each in [*pool._busy]))


def test_a_file_that_needs_more_memory_than_usual_gets_it(
    pool: MediaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pdf(1, (3000, 4000))
    whole = pool.pdf_pages(data, "poster", [(1, 1)])
    monkeypatch.setattr(module, "USUAL_BYTES", -24 * MIB)  # half of what a worker has for itself
    assert pool.pdf_pages(data, "poster", [(1, 1)]) == whole
    monkeypatch.setattr(module, "MEDIA_BYTES", -24 * MIB)
    with pytest.raises(PictureTooCostly, match=r"\d MiB\b"):
        pool.pdf_pages(data, "poster", [(1, 1)])
    assert decode_pool().stats().memory_in_use == 0


def test_a_long_video_has_all_its_frames_in_little_memory(pool: MediaPool) -> None:
    data = video(70, (1280, 720), rate=2)
    found = pool.video_frames(data, "long", max_frames=70)
    assert len(found.frames) == 70
    sizes = {opened(frame).size for frame in found.frames}
    assert len(sizes) == 1
    ((width, height),) = sizes
    assert 70 * width * height <= 64 * FRAME_PIXELS
    assert width / height == pytest.approx(16 / 9, rel=0.02)
    assert redness(found.frames[35]) == pytest.approx(0.5, abs=0.06)


def test_memory_that_is_short_in_the_middle_of_a_video_is_not_called_damage(
    pool: MediaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = video(20, (1920, 1080), codec="libx264")
    for usual in range(0, -40, -8):
        monkeypatch.setattr(module, "MEDIA_BYTES", usual * MIB)
        monkeypatch.setattr(module, "USUAL_BYTES", usual * MIB)
        try:
            found = pool.video_frames(data, "clip")
        except PictureTooCostly:
            continue
        assert len(found.frames) == 4
        assert not found.notes


def test_a_stuck_media_worker_is_replaced(pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlfit.images.decode_process.BEGIN_SECONDS", 0.3)
    fork, stopped = ForkServer.fork, 1

    def fork_stopped(server: ForkServer) -> Worker:
        nonlocal stopped
        worker = fork(server)
        if stopped:
            stopped -= 1
            os.kill(worker.pid, signal.SIGSTOP)
        return worker

    monkeypatch.setattr(ForkServer, "fork", fork_stopped)
    assert list(pool.pdf_pages(pdf(1), "a.pdf", [(1, 1)]).pictures) == [1]
    stopped = 2
    with pytest.raises(DecodersUnavailable):
        pool.pdf_pages(pdf(1), "a.pdf", [(1, 1)])


def test_media_workers_are_counted_with_the_others() -> None:
    before = decoder_stats()
    gone = threading.Event()

    def work() -> None:
        with cancel_when(gone.is_set), suppress(Cancelled):
            take_apart(media_pool(), KINDS["pdf-of-10-billion-drawings"].file())

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: decoder_stats().busy == before.busy + 1)
    assert decoder_resident_bytes() > decode_pool().resident_bytes()
    assert max_bytes_of_workers(media=True) > max_bytes_of_workers() + 4 * WORKER_BYTES
    gone.set()
    thread.join(60)
    assert decoder_stats().busy == before.busy
    assert decoder_stats().stopped["cancelled"] == before.stopped["cancelled"] + 1


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_fork_server_is_replaced(pool: MediaPool) -> None:
    assert pool.pdf_pages(pdf(1), "a.pdf", []).count == 1
    assert pool._server is not None
    os.kill(pool._server.pid, 9)
    assert pool.pdf_pages(pdf(2), "a.pdf", []).count == 2
