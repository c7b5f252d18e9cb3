"""The media workers: small processes that take one PDF, RAW photo, video or animation apart, and end.

``python -m vlfit.images.media_worker FD`` is started with the first such file. It imports what is installed
of pypdfium2, rawpy and PyAV, and forks a worker for every file, under the limits of decode workers.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any

from vlfit.errors import NotAPicture, PictureError
from vlfit.images import sandbox
from vlfit.images.decode_memory import WORKER_BYTES
from vlfit.images.decode_wire import BEGUN, Connection
from vlfit.images.decode_worker import MAX_MESSAGE_CHARACTERS, run_fork_server
from vlfit.images.media_kinds import video_format
from vlfit.images.video import jpeg_file
from vlfit.units import counted

if TYPE_CHECKING:
    from PIL import Image

MODULES = ("vlfit.images.decode", "pypdfium2", "pypdfium2.raw", "rawpy", "av")
_PNG_BYTES = 2 * 2**20  # a page whose PNG is larger holds photos, and becomes a JPEG
_HEAD_BYTES = 512

# A picture for the server, as an encoded file, and what is known about it.
_Item = tuple[dict[str, Any], bytes]


def main() -> None:
    """Import the installed decoders, then fork workers on request until the server closes the socket."""

    def import_all() -> None:
        for name in MODULES:
            with suppress(ImportError):  # not installed, or for another Python: the server has said so
                import_module(name)
        with suppress(ImportError):
            import av

            av.logging.set_level(av.logging.PANIC)

    run_fork_server("vlfit-media", import_all, serve)


def serve(connection: Connection, start: int) -> None:
    """Do one job: send an item for each picture, then ``end``, or an error. Waits for the server to hang up.

    ``start``: bytes of address space mapped before the job. Raises ``ConnectionEnded`` when the server hangs
    up.
    """
    warnings.simplefilter("ignore")
    job = connection.receive()
    connection.send(BEGUN)
    sandbox.limit_cpu(job["cpu_seconds"])
    sandbox.limit_memory(start + WORKER_BYTES + job["memory"] + job["size"])
    try:
        end: dict[str, Any] = {}
        for fields, data in _run_job(job, connection, end):
            connection.send({"item": fields})
            connection.send_chunk(data)
            connection.send_chunk(b"")
        connection.send({"end": end})
    except PictureError as error:
        connection.send(
            {
                "error": type(error).__name__,
                "message": error.message[:MAX_MESSAGE_CHARACTERS],
                "hint": error.hint[:MAX_MESSAGE_CHARACTERS],
            }
        )
    except MemoryError:
        sandbox.limit_memory(start + WORKER_BYTES + 2 * job["memory"] + job["size"])  # to be able to say so
        connection.send({"error": MemoryError.__name__})
    except Exception as error:  # a decoder's, or ours: in both cases this file is not read
        if sandbox.ran_out_of_memory(error):
            connection.send({"error": MemoryError.__name__})
        else:
            message = f"{job['label']} cannot be decoded: {type(error).__name__}: {error}"
            connection.send(
                {"error": NotAPicture.__name__, "message": message[:MAX_MESSAGE_CHARACTERS], "hint": ""}
            )
    connection.receive()  # the server ends the connection, and this process


def _run_job(job: dict[str, Any], connection: Connection, end: dict[str, Any]) -> Iterator[_Item]:
    """The items of ``job``. What is known at the end is put into ``end``."""
    file: IO[bytes] = (
        os.fdopen(connection.receive_fd(), "rb")
        if job["fd"]
        else BytesIO(connection.receive_file(job["size"]))
    )
    sandbox.clear_errno()
    operation, label = job["operation"], job["label"]
    if operation == "pdf":
        yield from _pages(file, label, job, end)
    elif operation == "video":
        yield from _frames(file, label, job, end)
    elif operation == "animation":
        from vlfit.images.video import animation_frames

        limits = job["max_frames"], job["max_pixels"]
        frames = animation_frames(file.read(), label, job["every"], *limits, job["at"])
        for frame in frames:
            yield {"seconds": frame.seconds}, frame.data
    elif operation == "raw":
        from vlfit.images.raw import read_preview

        preview = read_preview(file.read(), label)
        end["notes"] = [f"the preview of {preview.width}x{preview.height} in a camera RAW photo"]
        yield {}, preview.data
    else:
        raise NotAPicture(f"{label}: unknown operation {operation!r}")


def _pages(file: IO[bytes], label: str, job: dict[str, Any], end: dict[str, Any]) -> Iterator[_Item]:
    from vlfit.images.documents import PdfFile

    document = PdfFile(file, label)
    end["pages"] = document.num_pages
    numbers = _page_numbers(job["ranges"], document.num_pages, label)[: job["max_pages"]]
    for number, image in document.pages(numbers, job["max_pixels"]):
        yield {"page": number}, _page_file(image)


def _page_numbers(ranges: list[list[int]], count: int, label: str) -> list[int]:
    """Page numbers in ``ranges`` of (first, last), ``last`` 0: to the end. Raises ``NotAPicture`` beyond
    ``count``.
    """
    numbers: list[int] = []
    for first, last in ranges:
        if first > count or last > count:
            raise NotAPicture(
                f"{label} has {counted(count, 'page')}; there is no page {max(first, last):,}",
                "Name pages that it has.",
            )
        numbers += range(first, (last or count) + 1)
    return numbers


def _frames(file: IO[bytes], label: str, job: dict[str, Any], end: dict[str, Any]) -> Iterator[_Item]:
    from vlfit.images.video import VideoFile

    head = file.read(_HEAD_BYTES)
    file.seek(0)
    video = VideoFile(file, video_format(head) or "", label, job["max_pixels"])
    frames = video.frames_at(job["at"]) if job["at"] else video.sample_frames(job["every"], job["max_frames"])
    end["length"], end["notes"] = video.length, video.notes
    for frame in frames:
        yield {"seconds": frame.seconds}, frame.data


def _page_file(image: "Image.Image") -> bytes:
    """A page as PNG, as text stays sharp; as JPEG if that would be large."""
    buffer = BytesIO()
    image.save(buffer, "PNG", compress_level=3)
    return jpeg_file(image) if buffer.tell() > _PNG_BYTES else buffer.getvalue()


if __name__ == "__main__":
    main()
