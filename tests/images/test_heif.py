"""HEIC photos, written by pillow-heif: upright once, in 8 bits, from a grid, on white."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.pictures import half_transparent, scene
from vlfit.errors import NotAPicture
from vlfit.images import decode as module
from vlfit.images.decode import decode
from vlfit.images.decode_pool import decode_pool
from vlfit.images.limits import CLIENT_PICTURES, use_limits

pillow_heif = pytest.importorskip("pillow_heif")


def heic(image: Image.Image, **options: Any) -> bytes:
    """A lossless file but for the conversion of colours."""
    buffer = io.BytesIO()
    image.save(buffer, "HEIF", quality=-1, chroma=444, **options)
    return buffer.getvalue()


def difference(image: Image.Image, expected: Image.Image) -> int:
    assert image.size == expected.size
    return int(np.abs(np.asarray(image, np.int16) - np.asarray(expected, np.int16)).max())


def test_servers_take_them_and_workers_decode_them() -> None:
    image = scene(96, 64)
    with use_limits(CLIENT_PICTURES):
        found = decode_pool().decode(heic(image), "photo", lambda width, height: (width, height))
    assert (found.width, found.height, found.notes) == (96, 64, ())
    assert difference(Image.fromarray(found.pixels), image) <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_upright_once(orientation: int) -> None:
    """Cameras write the rotation twice: as a property of HEIF, and into EXIF, which does not count."""
    image = scene(96, 64)
    image.getexif()[0x0112] = orientation
    data = heic(image)
    assert (b"irot" in data or b"imir" in data) == (orientation != 1)
    upright = ImageOps.exif_transpose(image)
    found = decode(data, "photo")
    assert difference(found.image, upright) <= 2
    assert decode_pool().upright_size(data, "photo") == upright.size


def test_ten_bits_become_eight() -> None:
    image = scene(96, 64)
    values = np.asarray(image).astype(np.uint16) * 257
    buffer = io.BytesIO()
    pillow_heif.encode("RGB;16", image.size, values.tobytes(), buffer, quality=-1, chroma=444)
    found = decode(buffer.getvalue(), "photo")
    assert found.image.mode == "RGB"
    assert difference(found.image, image) <= 3


def test_a_grid_is_one_picture() -> None:
    image = scene(200, 150)
    data = heic(image, tile_size=64)
    assert b"grid" in data
    assert difference(decode(data, "photo").image, image) <= 2


def test_transparency_is_laid_on_white() -> None:
    found = decode(heic(half_transparent()), "photo")
    assert found.image.getpixel((60, 20)) == (255, 255, 255)
    assert difference(found.image.crop((0, 0, 30, 48)), scene(64, 48).crop((0, 0, 30, 48))) <= 2


def test_a_truncated_photo() -> None:
    data = heic(scene(96, 64))
    with pytest.raises(NotAPicture):
        decode(data[: len(data) // 2], "photo")


def test_of_several_pictures_the_main_one_is_decoded() -> None:
    images = [scene(96, 64), ImageOps.invert(scene(96, 64))]
    for primary, image in enumerate(images):
        data = heic(images[0], save_all=True, append_images=images[1:], primary_index=primary)
        found = decode(data, "photo")
        assert found.notes == ("main one of 2 pictures",)
        assert difference(found.image, image) <= 2


def test_its_decoder_has_one_thread_and_looks_at_no_thumbnail() -> None:
    """``is_plain`` decodes at a smaller size where it can, which must be the picture, not its thumbnail."""
    options = pillow_heif.options
    assert module  # registers it
    assert (options.DECODE_THREADS, options.THUMBNAILS) == (1, False)


def test_without_its_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    data = heic(scene(96, 64))
    monkeypatch.delitem(Image.OPEN, "HEIF")
    with pytest.raises(NotAPicture) as caught:
        decode(data, "photo")
    assert "vlfit[heif]" in caught.value.hint


# The fourth channel takes the most; three go the same way.
@pytest.mark.parametrize("mode", [pytest.param("RGB;16", marks=pytest.mark.slow), "RGBA;16"])
def test_the_price_covers_ten_bits_at_full_chroma(mode: str) -> None:
    """Measured at 20 megapixels: 15.5 bytes a pixel, the most of all HEIC."""
    size, channels = (2400, 1600), len(mode) - 3
    values = np.full((size[1], size[0], channels), 30_000, np.uint16)
    buffer = io.BytesIO()
    pillow_heif.encode(mode, size, values.tobytes(), buffer, quality=50, chroma=444)
    found = decode_pool().decode(buffer.getvalue(), "photo", lambda width, height: (width // 4, height // 4))
    assert found.pixels.shape == (400, 600, 3)
    opened = module.PictureFile(buffer.getvalue(), "photo")
    assert 15.5 <= opened.memory / (size[0] * size[1]) <= 2 * 15.5
