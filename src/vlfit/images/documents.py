"""PDF pages to pictures: what runs in a media worker. Nothing of a document is run, fetched or followed."""

import ctypes
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from vlfit.errors import NotAPicture, PictureTooLarge
from vlfit.images import sandbox
from vlfit.images.limits import MAX_ASPECT
from vlfit.images.media_kinds import PAGE_DPI, PAGE_PIXELS

if TYPE_CHECKING:
    from PIL import Image

_POINTS_PER_INCH = 72
_MIN_SIDE = 28  # pixels; smaller pages are enlarged
_LARGEST_POINTS = 14_400  # a side of 200 inches, the largest that PDF allows


class PdfFile:
    """An opened PDF. ``label``: what errors call it. ``num_pages``: at least 1.

    Raises ``NotAPicture`` if it is damaged, needs a password or has no pages.
    """

    def __init__(self, file: IO[bytes], label: str) -> None:
        import pypdfium2
        import pypdfium2.raw as raw

        self._label = label
        try:
            # Without its form fields' scripts: the build has no JavaScript, and forms are not initialized.
            self._document: Any = pypdfium2.PdfDocument(file, autoclose=False)
        except pypdfium2.PdfiumError as error:
            code = raw.FPDF_GetLastError()
            if code == raw.FPDF_ERR_PASSWORD or "password" in str(error).lower():
                raise NotAPicture(f"{label} needs a password", "Save it without one first.") from None
            raise NotAPicture(
                f"{label} is a PDF document that is truncated or damaged", "Copy or download it again."
            ) from None
        self.num_pages = len(self._document)
        if self.num_pages < 1:
            raise NotAPicture(f"{label} has no pages", "Copy or download it again.")

    def pages(self, numbers: list[int], max_pixels: int = PAGE_PIXELS) -> "Iterator[tuple[int, Image.Image]]":
        """Render pages one by one, as (number, RGB image), at 150 dots per inch.

        ``numbers``: counted from 1. ``max_pixels``: larger pages are scaled down to it. Very narrow ones are
        enlarged to 28 pixels across, whatever ``max_pixels`` says. Raises ``NotAPicture`` for a page that is
        damaged or does not exist, ``PictureTooLarge`` above 200 inches a side or ``MAX_ASPECT``.
        """
        import pypdfium2

        for number in numbers:
            label = f"{self._label}, page {number}"
            try:
                page = self._document[number - 1]
            except (pypdfium2.PdfiumError, IndexError) as error:
                raise NotAPicture(f"{label} is damaged: {error}", "Name other pages: FILE.pdf#2-5.") from None
            try:
                width, height = _size(page.get_size(), label, max_pixels)
                yield number, _render(page, width, height, label)
            finally:
                page.close()


def _size(points: tuple[float, float], label: str, max_pixels: int) -> tuple[int, int]:
    """Pixels of a page of ``points`` (width, height)."""
    width, height = points
    if not (0 < width <= _LARGEST_POINTS and 0 < height <= _LARGEST_POINTS):
        raise PictureTooLarge(
            f"{label} is {width:,.0f}x{height:,.0f} points; at most {_LARGEST_POINTS:,} are rendered",
            "Print it to a PDF of an ordinary paper size.",
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureTooLarge(
            f"{label} is {width:,.0f}x{height:,.0f} points; at most 1:{MAX_ASPECT} is supported",
            "Print it to a PDF of an ordinary paper size.",
        )
    scale = min(PAGE_DPI / _POINTS_PER_INCH, (max_pixels / (width * height)) ** 0.5)
    scale = max(scale, _MIN_SIDE / min(width, height))
    return max(round(width * scale), 1), max(round(height * scale), 1)


def _render(page: Any, width: int, height: int, label: str) -> "Image.Image":
    """Draw ``page`` on white, with its annotations (stamps, highlights), in ``width`` x ``height`` pixels."""
    import pypdfium2.raw as raw
    from PIL import Image

    stride = 4 * width
    pixels = bytearray(stride * height)
    buffer = (ctypes.c_ubyte * len(pixels)).from_buffer(pixels)
    bitmap = raw.FPDFBitmap_CreateEx(width, height, raw.FPDFBitmap_BGRx, buffer, stride)
    if not bitmap:
        raise MemoryError
    try:
        raw.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, 0xFFFFFFFF)
        raw.FPDF_RenderPageBitmap(bitmap, page, 0, 0, width, height, 0, raw.FPDF_ANNOT)
        if sandbox.lacked_memory():  # PDFium leaves out what it has no memory for, and does not say so
            raise MemoryError
    finally:
        raw.FPDFBitmap_Destroy(bitmap)
    return Image.frombuffer("RGB", (width, height), pixels, "raw", "BGRX", stride, 1)
