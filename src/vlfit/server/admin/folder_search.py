"""``/v1/vlfit/search``: search in the folder of ``--search``, and small pictures of what was found.

The index is read, never written: ``vlfit search FOLDER`` makes it and keeps it up to date.
"""

import asyncio
import math
import os
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.errors import InvalidRequest, PictureNotFound, QueueFull, UnknownModel, UsageError
from vlfit.images.clips import decode_frame, decode_picture
from vlfit.images.limits import use_limits
from vlfit.images.media_kinds import MEDIA_EXTENSIONS, is_installed
from vlfit.server.error_replies import JSONReply
from vlfit.server.generation import ServerContext
from vlfit.tasks.batch.items import file_name_of_key
from vlfit.tasks.batch.media_items import file_items
from vlfit.tasks.files import MediaOptions
from vlfit.tasks.search.searching import BackendEmbedder, Query, find
from vlfit.tasks.search.vector_index import Hit, VectorIndex, index_path

MAX_HITS = 100
_MAX_DIGITS = 9  # of ``n``; Python refuses to read some thousands
_EDGE = 320  # pixels of a small picture
_AT_ONCE = 4  # small pictures being decoded
_MAX_WAITING = 2 * MAX_HITS
T = TypeVar("T")


class NoSearch(UsageError):
    """The server was started without ``--search``."""

    http_status = 404
    code = "not_offered"


class FolderSearch:
    """The endpoints ``search`` and ``picture``."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._decoding = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    async def search(self, request: Request) -> Response:
        """Reply with the pictures that are most like the query ``q``: at most ``n``, best first.

        Raises ``NoSearch``, ``InvalidRequest`` for a wrong query, ``UsageError`` if the folder has no index,
        ``UnknownModel`` if its model is not served, and as ``/v1/embeddings`` does.
        """
        context, folder = self._context, self._folder()
        context.shutdown.check_accepting()
        query, n = _query(request)
        path = index_path(folder)

        def in_index(work: Callable[[VectorIndex], T]) -> T:
            with VectorIndex(path, folder, create=False) as index:
                return work(index)

        indexed = await context.prepare_threads.run(in_index, lambda index: index.model)
        if indexed is None:
            raise UsageError("the index of the folder is empty", f"Fill it: vlfit search {folder}")
        try:
            context.use_model(indexed.name)
        except UnknownModel as error:
            raise UnknownModel(
                f"the folder was indexed with {indexed.name}, which is not served here",
                f"Serve it, too: --models {indexed.name}.",
            ) from error
        backend = context.backend  # not in the thread, which does not know the request's model

        def look(index: VectorIndex) -> list[Hit]:
            return find(index, BackendEmbedder(backend), query, n)

        with context.admission.acquire(1) as slots:
            await context.models.load(context.model)
            async with context.models.acquire(context.model, 1) as hold:
                hits = await context.prepare_threads.run_with_slots(slots, in_index, look)
                hold.release_one()
        return JSONReply(
            {
                "model": indexed.name,
                "results": [{"path": hit.path, "key": hit.key, "score": hit.score} for hit in hits],
            }
        )

    async def picture(self, request: Request) -> Response:
        """Reply with the indexed picture ``key`` of the file ``path`` as a JPEG of at most 320 pixels a side.

        Raises ``NoSearch``, ``PictureNotFound`` for what is not in the index or not in the folder, and as
        decoding does; ``QueueFull`` if too many wait.
        """
        folder = self._folder()
        self._context.shutdown.check_accepting()
        path, key = request.query_params.get("path", ""), request.query_params.get("key", "")
        if self._waiting >= _MAX_WAITING:
            raise QueueFull(f"{_MAX_WAITING} small pictures are waited for", "Try again in a second.")
        self._waiting += 1
        try:
            async with self._decoding:
                data = await self._context.picture_threads.run(self._small_picture, folder, path, key)
        finally:
            self._waiting -= 1
        return Response(
            data,
            media_type="image/jpeg",
            headers={"Cache-Control": "private, max-age=600", "X-Content-Type-Options": "nosniff"},
        )

    def _folder(self) -> Path:
        folder = self._context.settings.search
        if folder is None:
            raise NoSearch("this server searches no folder", "Start it with --search FOLDER.")
        return folder

    def _small_picture(self, folder: Path, path: str, key: str) -> bytes:
        with VectorIndex(index_path(folder), folder, create=False) as index:
            is_known = index.has(path, key)
        real = Path(os.path.realpath(folder / file_name_of_key(path))) if is_known else folder
        # A link in the folder may lead anywhere.
        if not is_known or not real.is_relative_to(os.path.realpath(folder)):
            raise PictureNotFound("no such picture in the indexed folder", "Search again.")
        limits = self._context.settings.decode_limits
        media = tuple(kind for kind in MEDIA_EXTENSIONS if is_installed(kind))
        with use_limits(replace(limits, media=media)):
            for item in file_items(path, str(real), real, MediaOptions()):
                if item.key == key:
                    return _as_jpeg(item.read())
        raise PictureNotFound("the picture is not in the file any more", "Search again.")


def _query(request: Request) -> tuple[Query, int]:
    number = request.query_params.get("n", "24")
    if not (number.isdecimal() and len(number) <= _MAX_DIGITS and 1 <= int(number) <= MAX_HITS):
        raise InvalidRequest(f"n is {number[:40]!r}", f"Use 1 to {MAX_HITS}.", param="n")
    text = request.query_params.get("q", "")
    try:
        return Query(text), int(number)
    except UsageError as error:
        raise InvalidRequest(error.message, error.hint, param="q") from error


def _as_jpeg(content: bytes | ImagePart | VideoPart) -> bytes:
    from PIL import Image

    part = ImagePart(content) if isinstance(content, bytes) else content
    decoded = decode_picture(part, _small) if isinstance(part, ImagePart) else decode_frame(part, 0, _small)
    buffer = BytesIO()
    Image.fromarray(decoded.pixels).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def _small(width: int, height: int) -> tuple[int, int]:
    scale = min(_EDGE / max(width, height), 1.0)
    return max(math.floor(width * scale), 1), max(math.floor(height * scale), 1)
