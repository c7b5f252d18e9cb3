"""Hostile files end as an error of their own, or as a picture; the decoder is free again for the next one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile_pictures import KINDS, LARGEST
from tests.pictures import picture
from vlfit.errors import NotAPicture, PictureError, PictureTooCostly, PictureTooLarge
from vlfit.images.decode_memory import FORK_SERVER_BYTES, MAX_DECODE_BYTES, WORKER_BYTES
from vlfit.images.decode_pool import DecodePool, Size
from vlfit.images.limits import FORMATS, DecodeLimits, use_limits

LIMITS = DecodeLimits(FORMATS, cpu_seconds=1, wall_seconds=60)
SOUND = picture(97, 61)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    pool = DecodePool(1)
    yield pool
    pool.close()


def half(width: int, height: int) -> Size:
    return max(width // 2, 1), max(height // 2, 1)


def peak_bytes(pid: int) -> int:
    if sys.platform != "linux":
        return 0
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:  # killed
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def outcome(pool: DecodePool, name: str) -> type[PictureError] | None:
    """The class of the error that a kind ends with, None if it is decoded.

    Checks what holds for every kind: code and status of the error, memory of the workers, and that the next
    picture is decoded.
    """
    failure: PictureError | None = None
    try:
        with use_limits(LIMITS):
            found = pool.decode(KINDS[name].file(), "hostile", half)
        assert found.pixels.shape[2] == 3
    except PictureError as error:
        failure = error
    if failure is not None:
        code = "image_too_costly" if isinstance(failure, PictureTooCostly) else "invalid_image"
        assert (failure.code, failure.http_status) == (code, 400)
        assert failure.hint
    for worker in [*pool._idle, *pool._busy]:
        assert peak_bytes(worker.pid) <= MAX_DECODE_BYTES + WORKER_BYTES + FORK_SERVER_BYTES
    assert pool.decode(SOUND, "sound", half).width == 97
    stats = pool.stats()
    assert (stats.busy, stats.waiting, stats.memory_in_use) == (0, 0, 0)
    return None if failure is None else type(failure)


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("jpeg-1500-scans", PictureTooCostly),
        ("jpeg-height-in-dnl", NotAPicture),
        ("jpeg-exif-in-circles", None),
        ("jpeg-exif-of-4-gb", None),
        ("mpo-with-frames-in-circles", None),
        ("png-4-gigapixels-claimed", PictureTooLarge),
        ("png-ztxt-bombs", NotAPicture),
        ("png-2-billion-frames", None),
        ("gif-frame-outside", None),
        ("gif-4-gigapixels-claimed", PictureTooLarge),
        ("webp-169-megapixels-in-34-bytes", PictureTooLarge),
        ("webp-canvas-of-268-megapixels", PictureTooLarge),
        ("bmp-rle8-65000-wide", PictureTooCostly),
        ("bmp-of-negative-height", PictureTooLarge),
        ("avif-frame-larger-than-its-header", PictureTooCostly),
        ("heic-grid-of-4-gigapixels", PictureTooLarge),
        ("heic-of-noise", NotAPicture),
        ("tiff-counts-of-4-billion", NotAPicture),
        ("jp2-16384-components", NotAPicture),
        ("ico-with-a-large-png", NotAPicture),
        ("eps", NotAPicture),
    ],
)
def test_what_hostile_files_end_as(pool: DecodePool, name: str, ended: type[PictureError] | None) -> None:
    if name.startswith("heic"):
        pytest.importorskip("pillow_heif")
    assert outcome(pool, name) is ended


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_ends_as_a_picture_or_an_error_of_its_own(pool: DecodePool, name: str) -> None:
    outcome(pool, name)


def test_there_are_many_kinds_in_all_formats() -> None:
    assert len(KINDS) >= 100
    assert sum(kind.default_format for kind in KINDS.values()) >= 60
    formats = ("jpeg", "png", "gif", "webp", "bmp", "avif", "heic", "tiff", "jp2", "pgm", "qoi")
    assert all(any(name.startswith(each) for name in KINDS) for each in formats)


@pytest.mark.slow
def test_files_are_bounded_and_the_same_every_time() -> None:
    for kind in KINDS.values():
        file = kind.file()
        assert len(file) <= LARGEST
        assert file == kind.file()
