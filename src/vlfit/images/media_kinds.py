"""Kinds of files that are taken apart into pictures: PDF documents, camera RAW photos, videos, animations.

Recognized by their first bytes. The packages that decode them are extras, and imported by media workers only.
"""

import struct
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

from vlfit.errors import NotAPicture
from vlfit.images.spooled_file import EncodedFile, find_in, read_at

MediaKind = Literal["pdf", "raw", "video"]

PAGE_DPI = 150  # small print of an A4 page is legible, for some 2,100 image tokens of Qwen3-VL
PAGE_PIXELS = 4_194_304  # of pages larger than A4, such as posters: 2048x2048
MAX_PAGES = 100  # of one document in one request
MAX_FRAMES = 768  # of one video in one request
FRAME_PIXELS = 1_048_576  # of a frame, which the model sees smaller if there are many
FRAMES_PER_SECOND = 2.0  # Qwen3-VL's default

DOCUMENT_EXTENSIONS = frozenset((".pdf",))
VIDEO_EXTENSIONS = frozenset(
    (
        *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".3gp", ".mpg", ".mpeg"),
        *(".ts", ".mts", ".m2ts", ".wmv", ".flv", ".ogv"),
    )
)
RAW_EXTENSIONS = frozenset(
    (
        *(".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".sr2", ".raf", ".rw2", ".orf", ".pef"),
        *(".srw", ".raw", ".3fr", ".iiq", ".x3f", ".mrw", ".kdc", ".dcr", ".erf"),
    )
)
MEDIA_EXTENSIONS: dict[MediaKind, frozenset[str]] = {
    "pdf": DOCUMENT_EXTENSIONS,
    "raw": RAW_EXTENSIONS,
    "video": VIDEO_EXTENSIONS,
}

# What decodes a kind: module, and the extra that installs it.
_PACKAGES: dict[MediaKind, str] = {"pdf": "pypdfium2", "raw": "rawpy", "video": "av"}
_NAMES: dict[MediaKind, str] = {"pdf": "PDF documents", "raw": "camera RAW photos", "video": "videos"}

# Containers by first bytes, with FFmpeg's names: its own guess could be led to formats that open other files.
_VIDEO_SIGNATURES = (
    (b"\x1aE\xdf\xa3", "matroska"),
    (b"\x00\x00\x01\xba", "mpeg"),
    (b"FLV\x01", "flv"),
    (b"OggS", "ogg"),
    (b"0&\xb2u\x8ef\xcf\x11", "asf"),
)
_RAW_SIGNATURES = (b"FUJIFILMCCD-RAW", b"IIU\x00", b"IIRO", b"IIRS", b"MMOR", b"FOVb", b"\x00MRM")
_STILL_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
_TRANSPORT_PACKET = 188  # bytes; the first byte of each packet of MPEG-TS is 0x47
_GIF_CONTROL = b"\x21\xf9\x04"  # graphic control extensions, one for each frame
_MAKE, _NEW_SUBFILE_TYPE, _SUB_IFDS, _DNG_VERSION = 0x010F, 0x00FE, 0x014A, 0xC612

ReadAt = Callable[[int, int], bytes]  # (offset, size) to bytes, fewer at the end of the file


def media_kind(read_at: ReadAt) -> MediaKind | None:
    """The kind of a file by its bytes; None for pictures, animations and everything else."""
    head = read_at(0, 2 * _TRANSPORT_PACKET + 1)
    if head[:1024].lstrip().startswith(b"%PDF"):
        return "pdf"
    if _is_raw(head, read_at):
        return "raw"
    return "video" if video_format(head) else None


def media_kind_of(data: EncodedFile) -> MediaKind | None:
    """``media_kind`` for a whole file in memory; None for pictures, animations and everything else."""
    return media_kind(lambda offset, size: read_at(data, offset, size))


def video_format(head: bytes) -> str | None:
    """FFmpeg's name of a video's container; None if ``head`` is of no supported container.

    ``head``: at least the first 377 bytes of the file.
    """
    if head[4:8] == b"ftyp":
        return None if head[8:12] in (*_STILL_BRANDS, b"crx ") else "mov"
    if head[4:8] in (b"moov", b"mdat", b"wide"):
        return "mov"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    if head[:1] == b"G" and head[_TRANSPORT_PACKET : _TRANSPORT_PACKET + 1] == b"G":
        return "mpegts"
    return next((name for signature, name in _VIDEO_SIGNATURES if head.startswith(signature)), None)


def is_animation(data: EncodedFile) -> bool:
    """Whether ``data`` is a GIF, WebP, PNG or AVIF with several frames. Decodes nothing."""
    head = read_at(data, 0, 32)
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X":
        return len(head) > 20 and bool(head[20] & 0x02)
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return 0 <= find_in(data, b"acTL") <= find_in(data, b"IDAT") - 4
    if head[:4] == b"GIF8":
        first = find_in(data, _GIF_CONTROL)
        return first >= 0 and find_in(data, _GIF_CONTROL, first + len(_GIF_CONTROL)) >= 0
    return head[4:12] == b"ftypavis"


def is_installed(kind: MediaKind) -> bool:
    """Whether the package that decodes files of ``kind`` is installed. Does not import it."""
    return find_spec(_PACKAGES[kind]) is not None


def check_installed(kind: MediaKind, label: str) -> None:
    """Raise ``NotAPicture``, naming the extra to install, if no package that decodes ``kind`` is installed.

    ``label``: what the error calls the file.
    """
    if not is_installed(kind):
        raise NotAPicture(
            f"{label}: {_NAMES[kind]} need the package {_PACKAGES[kind]}, which is not installed",
            f"Install it where vlfit runs: pip install 'vlfit[{kind}]'.",
        )


def _is_raw(head: bytes, read_at: ReadAt) -> bool:
    if head.startswith(_RAW_SIGNATURES) or head[4:12] == b"ftypcrx ":
        return True
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(head[:4])
    if order is None:
        return False
    if head[8:10] == b"CR":
        return True
    tags = _first_tags(order, head, read_at)
    # The first picture of a RAW TIFF is a preview, the sensor's data are in a SubIFD. Ordinary files with
    # SubIFDs (pyramids) begin with the full picture.
    is_preview = tags.get(_NEW_SUBFILE_TYPE) == 1 and _SUB_IFDS in tags and _MAKE in tags
    return _DNG_VERSION in tags or is_preview


def _first_tags(order: str, head: bytes, read_at: ReadAt) -> dict[int, int]:
    """Tags of the first IFD, with their values where these are single numbers."""
    offset = int(struct.unpack(f"{order}I", head[4:8])[0]) if len(head) >= 8 else 0
    start = read_at(offset, 2)
    if len(start) < 2:
        return {}
    (count,) = struct.unpack(f"{order}H", start)
    entries = read_at(offset + 2, 12 * count)
    tags = {}
    for position in range(0, len(entries) - 11, 12):
        tag, kind, _ = struct.unpack(f"{order}HHI", entries[position : position + 8])
        code = "H" if kind == 3 else "I"
        size = struct.calcsize(code)
        tags[tag] = struct.unpack(f"{order}{code}", entries[position + 8 : position + 8 + size])[0]
    return tags
