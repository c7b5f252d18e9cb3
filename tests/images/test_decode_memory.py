"""Memory limits of decoding: decompression bombs are refused, concurrent decoding is limited."""

import struct
import sys
import threading
import time
import tracemalloc
from typing import Any

import pytest
from PIL import Image

from tests.pictures import encoded, half_transparent, picture, scene
from vlfit.api.conversation import ImagePart, Message, TextPart, VideoPart
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.errors import PictureTooLarge
from vlfit.images.cancellation import Cancelled, cancel_when
from vlfit.images.clips import decode_picture
from vlfit.images.decode import PictureFile, decode
from vlfit.images.decode_budget import MemoryBudget
from vlfit.images.decode_memory import MAX_DECODE_BYTES
from vlfit.images.decode_pool import ChooseSize, DecodedPixels
from vlfit.models.qwen3_vl import prompt as picture_places
from vlfit.models.qwen3_vl.prompt import Qwen3VLPrompts

PROCESSING = ImageProcessorConfig(65536, 16777216, 16, 2, 2, (0.5,) * 3, (0.5,) * 3, 1 / 255)


def webp_claiming(width: int, height: int) -> bytes:
    """A lossless WebP of 34 bytes: every pixel the same."""
    bits = (width - 1) | (height - 1) << 14
    body = b"\x2f" + struct.pack("<I", bits) + b"\x88\x88\x08\x00\x00\x00\x00\x00\x00"
    return b"RIFF" + struct.pack("<I", len(body) + 12) + b"WEBPVP8L" + struct.pack("<I", len(body)) + body


def test_34_bytes_of_169_megapixels_are_refused_without_memory() -> None:
    assert len(webp_claiming(13000, 13000)) == 34
    assert decode(webp_claiming(130, 130), "p").image.size == (130, 130)  # the same file, but smaller
    tracemalloc.start()
    try:
        with pytest.raises(PictureTooLarge, match=r"2,740 MiB .* 1,024"):
            decode(webp_claiming(13000, 13000), "p")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def priced(file_format: str, mode: str = "RGB", **options: Any) -> float:
    """Bytes a pixel."""
    image = half_transparent(mode) if mode in ("RGBA", "LA") else scene(64, 48).convert(mode)
    opened = PictureFile(encoded(image, file_format, **options), "p")
    return opened.memory / (opened.width * opened.height)


# What was measured at 20 megapixels (see the module), Pillow 13.
@pytest.mark.parametrize(
    ("file_format", "mode", "options", "measured"),
    [
        ("JPEG", "RGB", {}, 4.0),
        ("JPEG", "RGB", {"progressive": True}, 7.0),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0}, 10.0),
        ("JPEG", "CMYK", {"progressive": True, "subsampling": 0}, 12.0),
        ("JPEG", "L", {}, 5.0),
        ("PNG", "RGB", {}, 4.0),
        ("PNG", "RGBA", {}, 8.6),
        ("PNG", "P", {}, 5.0),
        ("WEBP", "RGB", {}, 16.9),
        ("WEBP", "RGBA", {}, 16.7),
        ("GIF", "P", {}, 5.0),
        ("TIFF", "RGB", {}, 4.1),
        ("TIFF", "F", {}, 9.1),
        ("AVIF", "RGBA", {}, 12.4),
        ("JPEG2000", "RGB", {}, 19.4),
        ("JPEG2000", "RGBA", {}, 23.4),
    ],
)
def test_estimates_cover_measurements(
    file_format: str, mode: str, options: dict[str, Any], measured: float
) -> None:
    assert measured <= priced(file_format, mode, **options) <= 2 * measured


def test_largest_phone_pictures_are_accepted() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert priced("JPEG", exif=exif) * 108e6 <= MAX_DECODE_BYTES
    assert priced("JPEG") * 178e6 <= MAX_DECODE_BYTES


def test_slow_formats_are_limited() -> None:
    large = b"qoif" + struct.pack(">IIBB", 4000, 4000, 3, 0) + bytes(100)
    with pytest.raises(PictureTooLarge, match=r"\b16\b.*\bQOI\b.*\b4\b"):
        decode(large, "p")
    with pytest.raises(PictureTooLarge, match=r"\b16\b.*\bPPM\b.*\b4\b"):
        decode(b"P3 4000 4000 255 " + b"1 " * 100, "p")
    assert decode(encoded(scene(64, 48), "QOI"), "p").image.size == (64, 48)


class Taker(threading.Thread):
    """Takes ``count`` bytes of ``room``, and notes it in ``log``."""

    def __init__(self, room: MemoryBudget, count: int, log: list[int]) -> None:
        super().__init__()
        self.room, self.count, self.log = room, count, log
        self.gone = threading.Event()
        before = room.num_waiting
        self.start()
        while self.is_alive() and room.num_waiting == before:
            time.sleep(0.001)

    def run(self) -> None:
        try:
            with cancel_when(self.gone.is_set):
                self.room.take(self.count)
            self.log.append(self.count)
        except Cancelled:
            self.log.append(-self.count)


def test_a_small_picture_passes_a_large_one_that_waits() -> None:
    room = MemoryBudget(10)
    log: list[int] = []
    room.take(6)
    large, small = Taker(room, 8, log), Taker(room, 2, log)
    small.join(60)
    assert log == [2]
    assert not room.try_take(1)  # the large one waits
    room.release(6)
    large.join(60)
    assert log == [2, 8]
    assert room.in_use == 10


def test_a_large_picture_that_has_waited_is_not_passed_any_more() -> None:
    room = MemoryBudget(10, max_passed_seconds=0.0)
    log: list[int] = []
    room.take(6)
    large, other = Taker(room, 8, log), Taker(room, 4, log)
    assert log == []
    room.release(6)
    large.join(60)
    assert log == [8]
    room.release(8)
    other.join(60)
    assert log == [8, 4]


def test_large_pictures_in_turn_hold_up_a_small_one_once_only() -> None:
    room = MemoryBudget(10, max_passed_seconds=0.0)
    log: list[int] = []
    room.take(9)
    first, second, small = Taker(room, 9, log), Taker(room, 8, log), Taker(room, 2, log)
    assert 0 < room.longest_wait < 60  # of the small one: /ready shows it
    room.release(9)
    small.join(60)
    assert log == [2]  # before those that came earlier
    room.release(2)
    first.join(60)
    assert log == [2, 9]
    room.release(9)
    second.join(60)
    assert log == [2, 9, 8]
    assert room.longest_wait == 0


def test_only_an_ordinary_picture_that_waits_shows_in_the_wait() -> None:
    """Large ones may wait while photos of phones are decoded: then the server is ready."""
    room = MemoryBudget(100)
    log: list[int] = []
    room.take(90)
    large = Taker(room, 26, log)
    assert room.longest_wait == 0
    small = Taker(room, 25, log)
    assert room.longest_wait > 0
    room.release(90)
    for thread in (large, small):
        thread.join(60)


def test_a_cancelled_picture_leaves_the_queue() -> None:
    room = MemoryBudget(10, max_passed_seconds=0.0)
    log: list[int] = []
    room.take(6)
    large, small = Taker(room, 8, log), Taker(room, 2, log)
    large.gone.set()
    for thread in (large, small):
        thread.join(60)
    assert sorted(log) == [-8, 2]
    assert room.num_waiting == 0


def test_pixels_that_stay_make_others_wait_but_one_picture_always_goes_on() -> None:
    room = MemoryBudget(10)
    with room.hold(12):
        room.take(5)
        assert not room.try_take(1)
        assert room.in_use == 17
        room.release(5)
    assert room.try_take(10)


def test_no_picture_is_ever_written_to_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and any(sign in str(arguments[1]) for sign in "wax+"):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)  # for the rest of this process: it cannot be taken away
    for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "QOI"):
        decode(encoded(scene(64, 48), name), "p")
    decode(encoded(scene(64, 48), "TIFF", compression="tiff_lzw"), "p")
    watching = False
    assert opened == []


class Places(Qwen3VLPrompts):
    """Without a checkpoint."""

    def __init__(self) -> None:
        self.processing = self.video_processing = PROCESSING


def said(*parts: ImagePart | VideoPart | TextPart) -> tuple[Message, ...]:
    return (Message("user", parts),)


def test_repeated_pictures_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    real = decode_picture

    def noting(part: ImagePart, choose_size: ChooseSize) -> DecodedPixels:
        decoded.append(part.label)
        return real(part, choose_size)

    monkeypatch.setattr("vlfit.models.qwen3_vl.image_processor.decode_picture", noting)
    one, other = picture(64, 48, seed=1), picture(64, 48, seed=2)
    parts = [ImagePart(one, "1"), ImagePart(other, "2"), ImagePart(one, "3"), ImagePart(one, "4", "low")]
    prepared = Places().prepare(said(*parts), 64)
    assert decoded == ["1", "2", "4"]
    assert prepared[0] is prepared[2]
    assert len({image.key for image in prepared}) == 2  # at this size low detail changes nothing


def test_cancellation_stops_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    monkeypatch.setattr(picture_places, "prepare_image", lambda part, *_: decoded.append(part.label))
    parts = [ImagePart(picture(64, 48, seed=seed), str(seed)) for seed in range(5)]
    with cancel_when(lambda: len(decoded) == 2), pytest.raises(Cancelled):
        Places().prepare(said(*parts), 64)
    assert decoded == ["0", "1"]
    clip = VideoPart(tuple(part.data for part in parts))
    looks = iter([False, False])
    with cancel_when(lambda: next(looks, True)), pytest.raises(Cancelled):
        Places().prepare(said(clip), 64)
