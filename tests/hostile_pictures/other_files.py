"""Netpbm, QOI, formats that are never decoded, and files of two formats."""

import struct

from tests.hostile_pictures.kinds import kind, noise_bytes, small
from tests.hostile_pictures.png_files import png_1_bit_143_megapixels
from tests.hostile_pictures.tiff_jp2_files import jp2_49_megapixels


@kind("CPU and GIL: 40 megapixels with white at 100", default_format=False)
def pgm_white_at_100() -> bytes:
    return b"P5 8000 5000 100\n" + b"\x32" * 40_000_000


@kind("CPU and GIL: the same, small: 2 megapixels", default_format=False)
def pgm_small_white_at_100() -> bytes:
    return b"P5 2000 1000 100\n" + b"\x32" * 2_000_000


@kind("CPU and GIL: 6.6 megapixels in 16 bits", default_format=False)
def ppm_in_16_bits() -> bytes:
    return b"P6 3300 2000 65535\n" + b"\x12\x34" * 19_800_000


@kind("CPU and GIL: 4 megapixels of decimal numbers", default_format=False)
def ppm_plain() -> bytes:
    return b"P3 2000 2000 255\n" + b"7 " * 12_000_000


@kind("CPU and GIL: 20 MB of comment in its header", default_format=False)
def ppm_20_mb_of_comment() -> bytes:
    return b"P6\n#" + b"x" * 20_000_000 + b"\n64 48 255\n" + bytes(64 * 48 * 3)


@kind("memory: floating-point numbers of 144 megapixels that are not there", default_format=False)
def pfm_144_megapixels_claimed() -> bytes:
    return b"Pf\n12000 12000\n-1.0\n" + bytes(1_000)


@kind("CPU and GIL: 4 megapixels of runs out of 65 KB", default_format=False)
def qoi_4_megapixels_of_runs() -> bytes:
    return b"qoif" + struct.pack(">IIBB", 2_000, 2_000, 4, 0) + b"\xfd" * 65_000 + bytes(7) + b"\x01"


@kind("limits: 16 gigapixels in its header", default_format=False)
def qoi_16_gigapixels_claimed() -> bytes:
    return b"qoif" + struct.pack(">IIBB", 2**17, 2**17, 3, 0) + bytes(100)


@kind("formats: PostScript, which would start Ghostscript", default_format=False)
def eps() -> bytes:
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9000 9000\n%%EndComments\n{} loop\n%%EOF\n"


@kind("formats: ICO with a PNG of 143 megapixels inside", default_format=False)
def ico_with_a_large_png() -> bytes:
    inside = png_1_bit_143_megapixels()
    return (
        struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inside), 22) + inside
    )


@kind("formats: ICNS with a JPEG 2000 of 49 megapixels inside", default_format=False)
def icns_with_a_large_jp2() -> bytes:
    inside = jp2_49_megapixels()
    element = b"ic10" + struct.pack(">I", len(inside) + 8) + inside
    return b"icns" + struct.pack(">I", len(element) + 8) + element


@kind("formats: Photoshop of 900 megapixels", default_format=False)
def psd_900_megapixels() -> bytes:
    return b"8BPS" + struct.pack(">H6xHIIHH", 1, 56, 30_000, 30_000, 8, 3) + bytes(2_000)


@kind("formats: TGA run-length encoded, 65535x65535", default_format=False)
def tga_4_gigapixels() -> bytes:
    return (
        struct.pack("<BBBHHBHHHHBB", 0, 0, 10, 0, 0, 0, 0, 0, 65_535, 65_535, 24, 0)
        + b"\xff\x00\x00\x00" * 1_000
    )


@kind("formats: DDS of 16 gigapixels", default_format=False)
def dds_16_gigapixels() -> bytes:
    return (
        b"DDS "
        + struct.pack("<7I44x", 124, 0x1007, 2**17, 2**17, 0, 0, 0)
        + struct.pack("<II4s", 32, 4, b"DXT1")
        + bytes(200)
    )


@kind("formats: SVG whose entities grow to a billion", default_format=False)
def svg_of_a_billion_laughs() -> bytes:
    entities = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    return f'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY l0 "ha">{entities}]><svg>&l9;</svg>'.encode()


@kind("formats: a page that is also a GIF")
def gif_that_is_a_page() -> bytes:
    return b"GIF89a/*" + bytes(2) + b"*/=1;<script>alert(1)</script>" + small("GIF")[6:]


@kind("formats: a JPEG that is also a ZIP archive")
def jpeg_that_is_an_archive() -> bytes:
    return small("JPEG") + b"PK\x03\x04" + noise_bytes(2_000) + b"PK\x05\x06" + bytes(18)


@kind("formats: a PDF document with a JPEG after it")
def pdf_with_a_jpeg() -> bytes:
    return b"%PDF-1.7\n" + small("JPEG")


@kind("formats: 2 MB of noise")
def noise() -> bytes:
    return noise_bytes(2_000_000)


@kind("formats: a single byte")
def one_byte() -> bytes:
    return b"\xff"


@kind("formats: only the first bytes of a JPEG")
def jpeg_of_3_bytes() -> bytes:
    return b"\xff\xd8\xff"
