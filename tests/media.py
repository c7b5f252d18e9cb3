"""Small documents, videos and camera RAW photos, made on the spot."""

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor, ImageDraw

COLOURS = ("red", "lime", "blue", "yellow", "black", "cyan")


def pdf(pages: int = 3, size: tuple[float, float] = (595, 842)) -> bytes:
    """A PDF written by hand: each page is filled with one of ``COLOURS``, in turn."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%b]>>"
        % (pages, b" ".join(b"%d 0 R" % (3 + 2 * number) for number in range(pages))),
    ]
    for number in range(pages):
        red, green, blue = (value / 255 for value in ImageColor.getrgb(COLOURS[number % 6])[:3])
        content = b"%g %g %g rg 0 0 %g %g re f" % (red, green, blue, *size)
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %g %g]/Contents %d 0 R>>" % (*size, 4 + 2 * number)
        )
        objects.append(b"<</Length %d>>stream\n%b\nendstream" % (len(content), content))
    return pdf_of(objects)


def pdf_of(objects: list[bytes]) -> bytes:
    """A PDF of ``objects``, numbered from 1; the first is its catalog."""
    body, offsets = b"%PDF-1.7\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    count = len(objects) + 1
    return (
        body
        + b"xref\n0 %d\n0000000000 65535 f \n%btrailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
        % (*(count, table, count, len(body)),)
    )


def video(
    frames: int = 50,
    size: tuple[int, int] = (160, 96),
    *,
    container: str = "mp4",
    codec: str = "mpeg4",
    rate: int = 10,
) -> bytes:
    """A video that becomes redder with every frame: red is 255 * number / frames."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as output:
        stream = output.add_stream(codec, rate=rate)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            pixels = np.zeros((size[1], size[0], 3), np.uint8)
            pixels[..., 0] = 255 * number // frames
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


def redness(data: bytes) -> float:
    """Red of the middle of a picture, from 0 to 1."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    red = image.getpixel((image.width // 2, image.height // 2))
    assert isinstance(red, tuple)
    return red[0] / 255


def animation(file_format: str, frames: int = 10, milliseconds: int = 200) -> bytes:
    """An animated GIF, WebP or PNG that becomes redder with every frame."""
    images = [Image.new("RGB", (64, 48), (255 * number // frames, 0, 0)) for number in range(frames)]
    buffer = io.BytesIO()
    images[0].save(buffer, file_format, save_all=True, append_images=images[1:], duration=milliseconds)
    return buffer.getvalue()


def dng(preview: tuple[int, int] = (120, 80), *, orientation: int = 1, with_preview: bool = True) -> bytes:
    """A camera RAW photo (DNG): a JPEG preview, red left and blue right, and 64x48 values of a sensor."""
    image = Image.new("RGB", preview, "red")
    ImageDraw.Draw(image).rectangle((preview[0] // 2, 0, *preview), fill="blue")
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=95)
    shown, sensor = jpeg.getvalue(), np.full((48, 64), 500, "<u2").tobytes()
    start = 8
    make = b"vlfit\x00"
    data_at = 1024
    shown_at, sensor_at, make_at = data_at, data_at + len(shown), data_at + len(shown) + len(sensor)
    matrix_at = make_at + 8
    raw_at = 512
    matrix = struct.pack("<18i", *(value for row in range(9) for value in (int(row % 4 == 0), 1)))

    def ifd(entries: list[tuple[int, int, int, bytes]]) -> bytes:
        packed = b"".join(
            struct.pack("<HHI", tag, kind, count) + value.ljust(4, b"\x00")
            for tag, kind, count, value in sorted(entries)
        )
        return struct.pack("<H", len(entries)) + packed + struct.pack("<I", 0)

    def short(value: int) -> bytes:
        return struct.pack("<H", value)

    def long(value: int) -> bytes:
        return struct.pack("<I", value)

    first = [
        (0x00FE, 4, 1, long(1)),
        (0x010F, 2, len(make), long(make_at)),
        (0x0110, 2, len(make), long(make_at)),
        (0x0112, 3, 1, short(orientation)),
        (0x014A, 4, 1, long(raw_at)),
        (0xC612, 1, 4, b"\x01\x04\x00\x00"),
        (0xC614, 2, len(make), long(make_at)),
        (0xC621, 10, 9, long(matrix_at)),
    ]
    if with_preview:
        first += [
            *((0x0100, 4, 1, long(preview[0])), (0x0101, 4, 1, long(preview[1]))),
            *((0x0102, 3, 1, short(8)), (0x0103, 3, 1, short(7)), (0x0106, 3, 1, short(6))),
            *((0x0111, 4, 1, long(shown_at)), (0x0115, 3, 1, short(3))),
            *((0x0116, 4, 1, long(preview[1])), (0x0117, 4, 1, long(len(shown)))),
        ]
    raw = [
        *((0x00FE, 4, 1, long(0)), (0x0100, 4, 1, long(64)), (0x0101, 4, 1, long(48))),
        *((0x0102, 3, 1, short(16)), (0x0103, 3, 1, short(1)), (0x0106, 3, 1, short(32803))),
        *((0x0111, 4, 1, long(sensor_at)), (0x0115, 3, 1, short(1)), (0x0116, 4, 1, long(48))),
        *((0x0117, 4, 1, long(len(sensor))), (0x828D, 3, 2, short(2) + short(2))),
        (0x828E, 1, 4, b"\x00\x01\x01\x02"),
    ]
    body = b"II*\x00" + long(start) + ifd(first)
    body = body.ljust(raw_at, b"\x00") + ifd(raw)
    return body.ljust(data_at, b"\x00") + shown + sensor + make.ljust(8, b"\x00") + matrix


def written(folder: Path, name: str, data: bytes) -> Path:
    """``data`` as a file in ``folder``."""
    path = folder / name
    path.write_bytes(data)
    return path
