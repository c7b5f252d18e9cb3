"""Unusual and damaged picture files: correct colours, or an error that names the problem."""

import tracemalloc
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

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
from tests.wording import figures_in
from vlfit.errors import NotAPicture, PictureTooLarge
from vlfit.images.decode import LAID_ON_WHITE, decode

LOSSLESS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "WEBP": {"lossless": True},
    "BMP": {},
    "TIFF": {},
    "PPM": {},
    "JPEG2000": {},
}


def pixels(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.asarray(decode(data, "p").image)


@pytest.mark.parametrize("file_format", LOSSLESS)
def test_lossless_formats(file_format: str) -> None:
    decoded = decode(picture(97, 61, file_format, **LOSSLESS[file_format]), "p")
    assert decoded.image.mode == "RGB"
    assert np.array_equal(np.asarray(decoded.image), np.asarray(scene(97, 61)))
    assert decoded.notes == ()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_jpeg_equals_pillow(options: dict[str, Any]) -> None:
    data = picture(97, 61, "JPEG", quality=90, **options)
    with Image.open(BytesIO(data)) as image:
        assert np.array_equal(pixels(data), np.asarray(image))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    data = rotated_by_exif(orientation)
    decoded = decode(data, "p")
    with Image.open(BytesIO(data)) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(np.asarray(decoded.image), wanted)
    assert decoded.image.size == ((64, 96) if orientation >= 5 else (96, 64))
    expected = () if orientation == 1 else (f"turned upright (EXIF orientation {orientation})",)
    assert decoded.notes == expected


def test_a_tiff_is_not_turned_twice() -> None:
    data = picture(96, 64, "TIFF", tiffinfo={0x0112: 6})
    assert np.array_equal(pixels(data), np.rot90(np.asarray(scene(96, 64)), -1))


def test_garbage_in_exif_does_not_hide_the_picture() -> None:
    data = picture(96, 64, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff garbage")
    assert decode(data, "p").image.size == (96, 64)


def white_where_transparent(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    rgba = np.asarray(image.convert("RGBA"))
    return np.where(rgba[..., 3:] == 0, np.uint8(255), rgba[..., :3])


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_on_white(mode: str) -> None:
    image = half_transparent(mode)
    decoded = decode(encoded(image), "p")
    assert np.array_equal(np.asarray(decoded.image), white_where_transparent(image))
    assert decoded.notes == (LAID_ON_WHITE,)


def test_half_transparency_is_mixed_with_white() -> None:
    image = Image.new("RGBA", (40, 40), (200, 0, 0, 128))
    assert pixels(encoded(image))[0, 0].tolist() == pytest.approx([228, 127, 127], abs=1)


def test_opaque_alpha_gives_no_note() -> None:
    decoded = decode(encoded(scene(64, 48).convert("RGBA")), "p")
    assert np.array_equal(np.asarray(decoded.image), np.asarray(scene(64, 48)))
    assert decoded.notes == ()


def test_palettes_and_their_transparency() -> None:
    image = scene(64, 48).quantize(16)
    assert np.array_equal(pixels(encoded(image)), np.asarray(image.convert("RGB")))
    for transparency in (3, bytes([255, 255, 255, 0] + [255] * 12)):
        decoded = decode(encoded(image, transparency=transparency), "p")
        clear = np.asarray(image) == 3
        assert clear.any()
        assert (np.asarray(decoded.image)[clear] == 255).all()
        assert decoded.notes == (LAID_ON_WHITE,)


def test_a_transparent_colour_in_a_png() -> None:
    values = np.full((32, 32, 3), (10, 20, 30), dtype=np.uint8)
    values[:16] = (1, 2, 3)
    found = pixels(encoded(Image.fromarray(values), transparency=(1, 2, 3)))
    assert (found[:16] == 255).all()
    assert (found[16:] == (10, 20, 30)).all()


def test_inverted_cmyk_of_adobe_is_not_negative() -> None:
    decoded = decode(cmyk_jpeg(), "p")
    error = np.abs(np.asarray(decoded.image).astype(int) - np.asarray(scene(96, 64)).astype(int)).mean()
    assert error < 30  # a negative would be off by about 100
    (note,) = decoded.notes
    assert "CMYK" in note


def test_one_bit_and_grey() -> None:
    bits = scene(64, 48).convert("1")
    assert np.array_equal(pixels(encoded(bits))[..., 0], np.asarray(bits) * 255)
    grey = scene(64, 48).convert("L")
    assert np.array_equal(pixels(encoded(grey))[..., 1], np.asarray(grey))


def test_16_bit_grey_keeps_its_shades() -> None:
    values = np.linspace(0, 65535, 64 * 48).reshape(48, 64).astype(np.uint16)
    decoded = decode(deep_png(values), "p")
    assert np.array_equal(np.asarray(decoded.image)[..., 2], np.rint(values / 257).astype(np.uint8))
    (note,) = decoded.notes
    assert figures_in(note) == [16, 8]  # bits
    tiff = encoded(Image.fromarray(values), "TIFF")
    assert np.array_equal(pixels(tiff), np.asarray(decoded.image))
    dark = decode(deep_png(values // 300), "p")  # not stretched: dark stays dark
    assert np.asarray(dark.image).max() == 1


@pytest.mark.parametrize(
    ("low", "high", "note"),
    [
        (0.0, 1.0, "floating-point grey reduced to 8 bits"),
        (0.0, 255.0, "floating-point grey reduced to 8 bits"),
        (-3.0, 5.0, "floating-point grey from -3 to 5 stretched to 8 bits"),
        (100.0, 4000.0, "floating-point grey from 100 to 4000 stretched to 8 bits"),
    ],
)
def test_floating_point_grey(low: float, high: float, note: str) -> None:
    values = np.linspace(low, high, 64 * 48, dtype=np.float32).reshape(48, 64)
    decoded = decode(encoded(Image.fromarray(values), "TIFF"), "p")
    assert (np.asarray(decoded.image).min(), np.asarray(decoded.image).max()) == (0, 255)
    assert decoded.notes == (note,)


def test_nan_pixels() -> None:
    values = np.full((32, 32), np.nan, dtype=np.float32)
    assert (pixels(encoded(Image.fromarray(values), "TIFF")) == 0).all()


def test_32_bit_grey() -> None:
    values = np.linspace(0, 100_000, 64 * 48).reshape(48, 64).astype(np.int32)
    decoded = decode(encoded(Image.fromarray(values), "TIFF"), "p")
    assert np.asarray(decoded.image).max() == 255
    (note,) = decoded.notes
    assert figures_in(note) == [32, 0, 100_000, 8]  # bits, what became black and white, bits
    assert (pixels(encoded(Image.fromarray(values), "TIFF"))[0, 0] == 0).all()


@pytest.mark.parametrize(
    ("file_format", "note"),
    [("WEBP", "first of 3 frames"), ("PNG", "first of 3 frames"), ("GIF", "first frame of an animation")],
)
def test_the_first_frame_of_animations(file_format: str, note: str) -> None:
    decoded = decode(animation(file_format), "p")
    error = np.abs(np.asarray(decoded.image).astype(int) - np.asarray(scene(64, 48)).astype(int)).mean()
    assert error < (20 if file_format == "GIF" else 0.001)
    assert note in decoded.notes


def test_a_gif_that_claims_4_gigapixels_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a pixel is decoded, or made."""
    data = gif_claiming_4_gigapixels()
    assert len(data) == 44
    made: list[object] = []
    for name in ("PIL.ImageFile.ImageFile.load", "PIL.Image.core.new", "PIL.Image.core.fill"):
        monkeypatch.setattr(name, lambda *given: made.append(given))
    with pytest.raises(PictureTooLarge, match=r"65535x65535 .* 4,295 megapixels.* 179 "):
        decode(data, "bomb.gif")
    assert made == []


def test_20000_x_20000_is_refused_without_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PictureTooLarge, match=r"20000x20000 .* 400 "):
            decode(png_claiming(20000, 20000), "big.png")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_no_pixels_and_too_thin() -> None:
    for data in (png_claiming(0, 0), b"GIF89a" + bytes(40)):
        with pytest.raises(NotAPicture, match=r"^p: .*0x0 "):
            decode(data, "p")
    with pytest.raises(NotAPicture, match=r"0x7 "):
        decode(png_claiming(0, 7), "p")
    with pytest.raises(PictureTooLarge, match=r"1x20000 .*1:20,000"):
        decode(picture(1, 20000), "p")
    with pytest.raises(PictureTooLarge, match=r"20000x1 .*1:20,000"):
        decode(png_claiming(20000, 1), "p")


@pytest.mark.parametrize(
    ("file_format", "options"),
    [
        *((name, {}) for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")),
        ("JPEG", {"progressive": True}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("PNG", {"compress_level": 0}),
    ],
    ids=str,
)
def test_truncated_files_are_errors(file_format: str, options: dict[str, Any]) -> None:
    data = picture(200, 150, file_format, **options)
    whole = pixels(data)
    refused = 0
    for share in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
        try:
            found = pixels(data[: int(len(data) * share)])
        except NotAPicture:
            refused += 1
            continue
        assert np.array_equal(found, whole), f"half a picture from {share:.0%} of a {file_format}"
    assert refused >= 5


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000"])
def test_pillow_messages_are_not_shown(file_format: str) -> None:
    data = picture(200, 150, file_format)
    for size in (12, 16, 20, 24, 30, 40):
        with pytest.raises(NotAPicture) as caught:
            decode(data[:size], "p")
        assert "driver" not in caught.value.message
        assert "unpack" not in caught.value.message
        assert "unknown" not in caught.value.message
        assert ": )" not in caught.value.message


def test_a_truncated_jpeg() -> None:
    data = picture(200, 150, "JPEG")
    with pytest.raises(NotAPicture, match=rf"^photo\.jpg.* JPEG .*\b{len(data) // 2:,}\b"):
        decode(data[: len(data) // 2], "photo.jpg")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "empty"),
        (b"hello, I am no picture", "text"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "a web page \\(HTML\\)"),
        (b"\n  <html lang='en'>", "a web page \\(HTML\\)"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"<?xml version='1.0'?><svg/>", "an SVG drawing"),
        (b"%PDF-1.7 ...", "a PDF document"),
        (b'{"error": "not found"}', "JSON"),
        (b"PK\x03\x04 zip", "a ZIP archive or an office document"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00", "a HEIC photo"),
        (b"\x00\x00\x00\x18ftypisom\x00\x00\x00\x00", "a video"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "a PostScript document"),
        (b"Py is text too", "text"),
        ("ein schöner Text".encode(), "text"),
        (bytes(range(256)) * 4, "unknown"),
    ],
)
def test_other_file_types_are_named(data: bytes, what: str) -> None:
    with pytest.raises(NotAPicture, match=f"^thing .*{what}") as caught:
        decode(data, "thing")
    assert caught.value.hint


def test_random_damage_never_escapes_as_another_error() -> None:
    random = np.random.default_rng(0)
    for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"):
        good = picture(64, 48, file_format)
        for _ in range(40):
            data = bytearray(good)
            for place in random.integers(0, len(data), size=random.integers(1, 20)):
                data[place] = random.integers(0, 256)
            try:
                image = decode(bytes(data), "p").image
            except (NotAPicture, PictureTooLarge):
                continue
            assert image.mode == "RGB"
