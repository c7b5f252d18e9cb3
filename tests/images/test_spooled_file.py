"""Files beside the heap: whoever works on pieces finds in them what it finds in bytes."""

import os

import numpy as np
import pytest

from tests.pictures import animation, picture
from vlfit.api.conversation import ImagePart
from vlfit.images.clips import decode_picture
from vlfit.images.media_kinds import is_animation, media_kind_of
from vlfit.images.spooled_file import (
    MIN_SPOOLED,
    PIECE_BYTES,
    EncodedFile,
    FileSpool,
    SpooledFile,
    find_in,
    pieces_of,
    read_at,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there they stay in memory")
PADDING = bytes(2 * MIN_SPOOLED)


def spooled(data: bytes, piece: int = 100_000) -> EncodedFile:
    spool = FileSpool()
    for offset in range(0, len(data), piece):
        spool.write(data[offset : offset + piece])
    assert spool.size == len(data)
    return spool.finish()


def test_a_file_is_what_was_written() -> None:
    data = os.urandom(3 * MIN_SPOOLED + 5)
    file = spooled(data)
    assert isinstance(file, SpooledFile)
    assert (len(file), bytes(file), b"".join(pieces_of(file))) == (len(data), data, data)
    assert read_at(file, 7, 9) == data[7:16]
    assert read_at(file, len(data) - 3, 9) == data[-3:]
    assert file == spooled(data, 77_777)
    assert hash(file) == hash(spooled(data, 77_777))
    assert file != spooled(data[:-1] + bytes([data[-1] ^ 1]))
    assert spooled(data[:MIN_SPOOLED]) == data[:MIN_SPOOLED]  # a small one is bytes


@pytest.mark.parametrize("place", [0, PIECE_BYTES - 3, PIECE_BYTES - 2, PIECE_BYTES, 3 * PIECE_BYTES + 1])
def test_bytes_are_found_across_pieces(place: int) -> None:
    data = bytes(place) + b"acTL" + PADDING
    for file in (data, spooled(data)):
        assert find_in(file, b"acTL") == place
        assert find_in(file, b"acTL", place + 1) == -1
        assert find_in(file, b"IDAT") == -1


@pytest.mark.parametrize(
    "data",
    [
        animation("GIF"),
        animation("PNG"),
        animation("WEBP"),
        picture(64, 48, "GIF"),
        picture(64, 48, "PNG"),
        picture(64, 48, "WEBP"),
        b"\x89PNG\r\n\x1a\n" + PADDING + b"acTLIDAT",
        b"\x89PNG\r\n\x1a\n" + PADDING + b"IDATacTL",
        b"\x89PNG\r\n\x1a\n" + b"acTL",
        b"GIF89a" + PADDING + b"\x21\xf9\x04\x21\xf9\x04",
        b"%PDF-1.7",
        b"\x1aE\xdf\xa3",
    ],
)
def test_kinds_are_known_from_both(data: bytes) -> None:
    data += PADDING
    file = spooled(data)
    assert isinstance(file, SpooledFile)
    assert is_animation(file) == is_animation(data)
    assert media_kind_of(file) == media_kind_of(data)


def test_animations_are_told_from_pictures() -> None:
    png = b"\x89PNG\r\n\x1a\n"
    assert is_animation(spooled(png + PADDING + b"acTLIDAT"))
    assert not is_animation(spooled(png + PADDING + b"IDATacTL"))
    assert not is_animation(spooled(png + PADDING + b"acTL"))
    assert is_animation(spooled(b"GIF89a" + PADDING + b"\x21\xf9\x04\x21\xf9\x04"))
    assert not is_animation(spooled(b"GIF89a" + PADDING + b"\x21\xf9\x04\x21\xf9"))


def test_the_same_pixels_are_decoded_from_both() -> None:
    data = picture(300, 200, "JPEG") + PADDING
    found = [
        decode_picture(ImagePart(file), lambda width, height: (width // 2, height // 2))
        for file in (data, spooled(data))
    ]
    assert np.array_equal(found[0].pixels, found[1].pixels)
    assert found[0].pixels.shape == (100, 150, 3)
