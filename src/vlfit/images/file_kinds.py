"""File types by their first bytes, for errors about files that are not pictures."""

from importlib.util import find_spec

_PICTURES = (
    (b"\xff\xd8\xff", "a JPEG"),
    (b"\x89PNG\r\n\x1a\n", "a PNG"),
    (b"GIF87a", "a GIF"),
    (b"GIF89a", "a GIF"),
    (b"BM", "a BMP"),
    (b"II*\x00", "a TIFF"),
    (b"MM\x00*", "a TIFF"),
)
_NOT_PICTURES = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"PK\x03\x04", "a ZIP archive or an office document"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"Rar!", "a RAR archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"ID3", "an MP3 recording"),
    (b"OggS", "an Ogg recording"),
    (b"\x7fELF", "a program"),
    (b"8BPS", "a Photoshop document"),
)
_SIGNATURES = (*_PICTURES, *_NOT_PICTURES)
_NOT_PICTURE_KINDS = frozenset(
    (
        *("empty", "a web page (HTML)", "an SVG drawing", "XML", "JSON", "text", "a video"),
        *(kind for _, kind in _NOT_PICTURES),
    )
)
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1", b"hevm", b"hevs", b"hevx")

UNKNOWN = "of an unknown type"
HEIC = "a HEIC photo"

# Kinds that every vlfit server decodes (``limits.SERVER_FORMATS``), whatever is installed there.
DECODED_EVERYWHERE = frozenset(("a JPEG", "a PNG", "a WebP", "a GIF", "a BMP", "an AVIF"))
# Packages that decode HEIC, the preferred one first. The second one has no encoder.
HEIF_PACKAGES = ("pillow_heif", "pi_heif")
HEIF_EXTENSIONS = frozenset((".heic", ".heif", ".hif"))

SERVER_FORMATS_HINT = "Give a JPEG, PNG, WebP, GIF, BMP, AVIF or HEIC file."  # of ``SERVER_FORMATS``
FORMATS_HINT = SERVER_FORMATS_HINT.removesuffix(".") + "; commands take TIFF, too."
_HINTS = {
    # If it can be decoded, nobody asks for this hint.
    HEIC: "Install its decoder where vlfit runs, with pip install 'vlfit[heif]', or convert it to"
    " JPEG first (on an iPhone: Settings, Camera, Formats, Most Compatible).",
    "an SVG drawing": "Export it as PNG first.",
    "a PDF document": "Name the file by its path, report.pdf, or a page of it, report.pdf#3.",
    "a web page (HTML)": "Open the page in a browser and copy the address of the picture itself.",
    "a video": "Name the file by its path; or extract frames first (ffmpeg does it) and send them as a clip.",
}


def hint_for(kind: str) -> str:
    """The error hint for a file of ``kind`` (from ``kind_of``): how to make a picture of it."""
    return _HINTS.get(kind, FORMATS_HINT)


def decodes_heif() -> bool:
    """Whether a package that decodes HEIC is installed. Imports none."""
    return any(find_spec(name) is not None for name in HEIF_PACKAGES)


# Extensions of the formats that ``images/decode.py`` decodes.
PICTURE_EXTENSIONS = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib"),
        *(".tif", ".tiff", ".avif", ".jp2", ".j2k", ".jpx", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".qoi"),
        *(HEIF_EXTENSIONS if decodes_heif() else ()),
    )
)


def kind_of(data: bytes) -> str:
    """The type of a file by its first bytes, with its article: "a JPEG", "a web page (HTML)", "text".

    "empty" for no bytes, ``UNKNOWN`` for a type that is not recognized.
    """
    if not data:
        return "empty"
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            return kind
    return _kind_of_container(data) or _kind_of_text(data) or UNKNOWN


def rules_out_picture(kind: str) -> bool:
    """Whether a file of ``kind`` (from ``kind_of``) is certainly not a picture; False for ``UNKNOWN``."""
    return kind in _NOT_PICTURE_KINDS


def _kind_of_container(data: bytes) -> str | None:
    if data[:4] == b"RIFF":
        return {b"WEBP": "a WebP", b"WAVE": "a WAV recording"}.get(data[8:12], "a video")
    if data[4:8] == b"ftyp":
        brand = data[8:12]
        if brand in (b"avif", b"avis"):
            return "an AVIF"
        return HEIC if brand in _HEIF_BRANDS else "a video"
    return None


def _kind_of_text(data: bytes) -> str | None:
    head = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<script")):
        return "a web page (HTML)"
    if head.startswith((b"<svg", b"<?xml", b"<!--", b"<!doctype svg")):
        if b"<svg" in head or b"doctype svg" in head:
            return "an SVG drawing"
        return "a web page (HTML)" if b"<html" in head else "XML"
    if head.startswith((b"{", b"[")):
        return "JSON"
    # Netpbm pictures start with printable bytes too, and may contain nothing else.
    if len(head) > 2 and head[:1] == b"p" and head[1:2] in b"123456f" and head[2:3].isspace():
        return None
    printable = all(byte >= 32 or byte in b"\t\n\r\f" for byte in head)
    return "text" if head and printable and b"\x7f" not in head and _is_utf8(head) else None


def _is_utf8(head: bytes) -> bool:
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        # The sample may end within a character.
        return error.start >= len(head) - 3 and error.reason == "unexpected end of data"
    return True
