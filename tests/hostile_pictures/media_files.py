"""Hostile documents, videos and camera RAW photos, for media workers. Decode workers refuse them unopened."""

import io
import struct
from fractions import Fraction

import numpy as np

from tests.hostile_pictures.kinds import ifd, kind, noise_bytes, zlib_of_zeros
from tests.media import dng, pdf, pdf_of, video

_PAGE = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %b]/Resources<<%b>>/Contents 4 0 R>>"


def _one_page(
    content: bytes, size: bytes = b"600 800", resources: bytes = b"", *more: bytes, filtered: bytes = b""
) -> bytes:
    return pdf_of(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
            _PAGE % (size, resources),
            b"<</Length %d%b>>stream\n%b\nendstream" % (len(content), filtered, content),
            *more,
        ]
    )


@kind("documents: 100,000 pages", default_format=False)
def pdf_100000_pages() -> bytes:
    return pdf_of(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count 100000/Kids[%b]>>" % (b"3 0 R " * 100_000),
            _PAGE % (b"600 800", b""),
            b"<</Length 0>>stream\n\nendstream",
        ]
    )


@kind("documents: a page of a million by a million points", default_format=False)
def pdf_page_of_a_million_points() -> bytes:
    return _one_page(b"0 0 9 9 re f", b"1000000 1000000")


@kind("documents: pages that contain themselves", default_format=False)
def pdf_pages_in_circles() -> bytes:
    return pdf_of(
        [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Count 5/Kids[2 0 R 2 0 R]/Parent 2 0 R>>"]
    )


@kind("documents: 2 billion pages claimed", default_format=False)
def pdf_2_billion_pages_claimed() -> bytes:
    return pdf(1).replace(b"/Count 1", b"/Count 2147483647")


@kind("documents: a page's text of 4 GB, compressed", default_format=False)
def pdf_text_of_4_gigabytes() -> bytes:
    return _one_page(zlib_of_zeros(2**32), filtered=b"/Filter/FlateDecode")


@kind("documents: a picture of 3.6 gigapixels", default_format=False)
def pdf_picture_of_3_gigapixels() -> bytes:
    data = zlib_of_zeros(2**28)
    picture = (
        b"<</Type/XObject/Subtype/Image/Width 60000/Height 60000/ColorSpace/DeviceRGB/BitsPerComponent 8"
    )
    return _one_page(
        b"600 0 0 800 0 0 cm /I Do",
        b"600 800",
        b"/XObject<</I 5 0 R>>",
        b"%b/Filter/FlateDecode/Length %d>>stream\n%b\nendstream" % (picture, len(data), data),
    )


@kind("documents: drawings of drawings, 10 billion in all", default_format=False)
def pdf_of_10_billion_drawings() -> bytes:
    levels = []
    for level in range(10):
        content = b"/F Do " * 10 if level < 9 else b"0 0 500 700 re f"
        resources = b"/Resources<</XObject<</F %d 0 R>>>>" % (6 + level) if level < 9 else b""
        levels.append(
            b"<</Type/XObject/Subtype/Form/BBox[0 0 600 800]%b/Length %d>>stream\n%b\nendstream"
            % (resources, len(content), content)
        )
    return _one_page(b"/F Do", b"600 800", b"/XObject<</F 5 0 R>>", *levels)


@kind("documents: a million curves with a pattern", default_format=False)
def pdf_of_a_million_curves() -> bytes:
    return _one_page(b"0 0 m " + b"9 700 590 20 300 800 c 0 800 600 0 3 3 c " * 500_000 + b"f*")


@kind("documents: cut off in the middle", default_format=False)
def pdf_cut_off() -> bytes:
    whole = pdf(50)
    return whole[: len(whole) // 3]


@kind("documents: nothing but a first line", default_format=False)
def pdf_of_noise() -> bytes:
    return b"%PDF-1.7\n" + noise_bytes(100_000)


@kind("videos: 60,000 frames", default_format=False)
def video_of_60000_frames() -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi", options={"fflags": "+bitexact"}) as output:
        stream = output.add_stream("mpeg4", rate=1000)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        first = bytes(next(iter((*stream.encode(frame), *stream.encode(None)))))
        for number in range(60_000):
            packet = av.Packet(first)
            packet.stream, packet.pts, packet.dts, packet.time_base = (
                stream,
                number,
                number,
                Fraction(1, 1000),
            )
            packet.is_keyframe = True
            output.mux_one(packet)
    return buffer.getvalue()


@kind("videos: 5 seconds that claim to be 10 hours", default_format=False)
def video_of_10_hours_claimed() -> bytes:
    data = bytearray(video(50))
    for box in (b"mdhd", b"mvhd"):
        at = data.index(box) + 4
        (scale,) = struct.unpack(">I", data[at + 12 : at + 16])
        data[at + 16 : at + 20] = struct.pack(">I", 36_000 * scale if scale <= 100_000 else 2**32 - 1)
    at = data.index(b"tkhd") + 4
    data[at + 20 : at + 24] = struct.pack(">I", 36_000_000)
    return bytes(data)


@kind("videos: 5 seconds of Matroska that claim to be 100 hours", default_format=False)
def video_of_100_hours_claimed() -> bytes:
    data = video(50, container="matroska")
    at = data.index(b"\x44\x89\x88") + 3
    return data[:at] + struct.pack(">d", 3.6e8) + data[at + 8 :]


@kind("videos: frames of 37 megapixels", default_format=False)
def video_of_37_megapixels() -> bytes:
    return video(1, (8176, 4512), container="avi", codec="mpeg4")


@kind("videos: a header of 65,535 by 65,535 pixels", default_format=False)
def video_of_4_gigapixels_claimed() -> bytes:
    data = bytearray(video(2, container="avi", codec="mpeg4"))
    at = data.index(b"strf") + 8
    data[at + 4 : at + 12] = struct.pack("<ii", 65_535, 65_535)
    return bytes(data)


@kind("videos: cut off in the middle", default_format=False)
def video_cut_off() -> bytes:
    whole = video(50, container="avi")
    return whole[: len(whole) // 2]


@kind("videos: every second kilobyte is noise", default_format=False)
def video_half_of_noise() -> bytes:
    whole, noise = bytearray(video(200, (640, 480), container="avi")), noise_bytes(1024)
    for start in range(8192, len(whole) - 1024, 2048):
        whole[start : start + 1024] = noise
    return bytes(whole)


@kind("videos: MP4 of noise", default_format=False)
def video_of_noise() -> bytes:
    return b"\x00\x00\x00\x18ftypisom\x00\x00\x00\x00isommp42" + noise_bytes(200_000)


@kind("videos: boxes of an MP4 inside each other", default_format=False)
def video_of_nested_boxes() -> bytes:
    boxes = b"".join(
        struct.pack(">I4s", 2**31 - 1, b"moov" if level % 2 else b"trak") for level in range(50_000)
    )
    return b"\x00\x00\x00\x18ftypisom\x00\x00\x00\x00isommp42" + boxes


@kind("videos: Matroska whose size is 2^56 bytes", default_format=False)
def video_of_64_petabytes_claimed() -> bytes:
    return b"\x1aE\xdf\xa3\x01" + b"\xff" * 6 + b"\xfe" + noise_bytes(50_000)


@kind("photos: RAW of noise", default_format=False)
def raw_of_noise() -> bytes:
    return b"II*\x00\x08\x00\x00\x00" + ifd((0xC612, 1, 4, 0x0401)) + noise_bytes(300_000)


@kind("photos: RAW whose preview claims 4 GB", default_format=False)
def raw_preview_of_4_gigabytes() -> bytes:
    whole = bytearray(dng())
    at = whole.index(struct.pack("<HHI", 0x0117, 4, 1)) + 8
    whole[at : at + 4] = b"\xff\xff\xff\xff"
    return bytes(whole)


@kind("photos: RAW cut off in its preview", default_format=False)
def raw_cut_off() -> bytes:
    return dng()[:1200]
