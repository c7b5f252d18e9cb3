"""What the routes for vectors and scores share: inputs with pictures, requests in a window, results."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from vlfit.api.conversation import Part
from vlfit.api.outputs import Chunk
from vlfit.api.pooling import Vector
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Prepared
from vlfit.errors import DoesNotFit, PictureError, VlfitError
from vlfit.server.chat.chat_schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImageContent,
    ImageURL,
    TextContent,
)
from vlfit.server.chat.inline_files import bare_file_url
from vlfit.server.chat.preparation import build_conversation, limits_from_now
from vlfit.server.generation import Endpoint, RequestParams
from vlfit.server.http.admission import Slots
from vlfit.tasks.embeddings import float_list
from vlfit.units import counted

MAX_INPUTS = 2048  # of one request; OpenAI's limit
WINDOW = 8  # requests to the engine at a time: enough for full steps, and others soon get their turn
_CONTENT = re.compile(r"messages\[(\d+)\](\.content)?(\[\d+\])?")
_URL = re.compile(r"(data:|https?://|file:)", re.IGNORECASE)

Params = TypeVar("Params", bound=RequestParams)
Item = str | list[ContentPart]


class PooledEndpoint(Endpoint[Params], Generic[Params]):
    """Base of endpoints whose requests have many inputs, each with one result.

    Subclasses define ``num_inputs``, ``check`` and ``prepare``.
    """

    window = WINDOW

    def num_inputs(self, params: Params) -> int:
        """How many results the request has."""
        raise NotImplementedError

    def check(self, params: Params, backend: Backend) -> None:
        """Raise ``InvalidRequest`` or ``UsageError`` if the model cannot do what is asked."""
        raise NotImplementedError

    def sampling_params(self, params: Params) -> SamplingParams:
        """Those of a request without an answer, once ``check`` has passed."""
        self.check(params, self.context.backend)
        return SamplingParams(max_tokens=1)

    def num_completions(self, params: Params) -> int:
        """The slots to take: as many as run at a time, and no more than the server has."""
        limit = self.context.admission.limit
        return min(self.num_inputs(params), WINDOW, limit or WINDOW)

    def streams(self, params: Params) -> bool:
        """Never."""
        return False

    async def prepare_each(
        self,
        items: Sequence[Item],
        place: Callable[[int], str],
        prepare: Callable[[Backend, Sequence[tuple[Part, ...]]], list[Prepared]],
        slots: Slots,
    ) -> list[Prepared]:
        """Fetch the pictures of ``items`` and call ``prepare`` in a thread, with the parts of each.

        ``place``: the field that held an item, for errors. ``slots``: as for ``prepare``.
        """
        context, backend = self.context, self.context.backend
        chat = as_chat(items)
        with places_in_errors(place):
            conversation = await build_conversation(chat, context.settings, context.fetch_threads)
        has_pictures = any(not isinstance(item, str) for item in items)
        threads = context.picture_threads if has_pictures else context.prepare_threads
        limits = limits_from_now(context.settings)

        def run() -> list[Prepared]:
            with limits():
                return prepare(backend, [message.parts for message in conversation])

        return await threads.run_with_slots(slots, run)


def as_chat(items: Sequence[Item]) -> ChatRequest:
    """``items`` as the user messages of a chat request, in which pictures are found and fetched."""
    return ChatRequest(messages=[ChatMessage(role="user", content=item) for item in items])


@contextmanager
def places_in_errors(place: Callable[[int], str]) -> Iterator[None]:
    """Make errors raised in the block name ``place(i)`` instead of the i-th message of ``as_chat``."""

    def renamed(match: re.Match[str]) -> str:
        return place(int(match[1]))

    try:
        yield
    except VlfitError as error:
        if error.param == "messages":  # all of them, such as too many pictures
            error.param = place(0).partition("[")[0]
        error.param = _CONTENT.sub(renamed, error.param) if error.param else error.param
        error.message, error.hint = (_CONTENT.sub(renamed, text) for text in (error.message, error.hint))
        raise


@contextmanager
def item_in_errors(place: str) -> Iterator[None]:
    """Make errors about what does not fit, raised in the block, name the input ``place``."""
    try:
        yield
    except (DoesNotFit, PictureError) as error:
        if isinstance(error, DoesNotFit) and error.param in (None, "messages"):
            error.param = place
        if error.param is not None:
            error.param = _CONTENT.sub(place, error.param)
        raise


def picture_part(url: str) -> ImageContent:
    """The content part of a picture sent as a URL or as plain base64."""
    return ImageContent(
        type="image_url", image_url=ImageURL(url=url if _URL.match(url[:8]) else bare_file_url(url))
    )


def item_of(text: str | None, image: str | None) -> Item:
    """An input of ``text``, a picture (URL or base64), or both."""
    if image is None:
        return text or ""
    parts: list[ContentPart] = [picture_part(image)]
    if text:
        parts.append(TextContent(type="text", text=text))
    return parts


class PooledResults:
    """Collects the results of one request; the methods of a ``ResponseWriter`` that no stream needs.

    ``vlfit`` is the extra object of the reply: what kind of model it was, and what it saw of each picture.
    """

    def __init__(self, backend: Backend, prepared: Sequence[Prepared], ignored: tuple[str, ...]) -> None:
        self._kind = backend.pooling.kind if backend.pooling is not None else None
        self._images = [[asdict(image) for image in each.images] for each in prepared]
        self._ignored = ignored
        self.results: list[Vector | None] = [None] * len(prepared)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.queued_s = 0.0

    def add(self, index: int, chunk: Chunk) -> None:
        """Take the result of input ``index``."""
        self.results[index] = chunk.pooled
        if chunk.usage is not None:
            self.prompt_tokens += chunk.usage.prompt_tokens
            self.cached_tokens += chunk.usage.cached_tokens
        if chunk.timings is not None:
            self.queued_s = max(self.queued_s, chunk.timings.queued_s)

    def extras(self) -> dict[str, Any]:
        """The object ``vlfit`` of the reply."""
        note = (
            {"note": "the model was trained to chat, not for this: expect worse results"}
            if self._kind == "chat"
            else {}
        )
        images = {"images": self._images} if any(self._images) else {}
        ignored = {"ignored": list(self._ignored)} if self._ignored else {}
        return {
            "model_kind": self._kind,
            "pooling": "last token",
            "cached_tokens": self.cached_tokens,
            **note,
            **images,
            **ignored,
        }

    def first_events(self) -> bytes:
        """Empty: there is no stream."""
        return b""

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Empty: there is no stream."""
        return b""

    def ping(self) -> bytes:
        """Empty: there is no stream."""
        return b""

    def error_event(self, error: Exception) -> bytes:
        """Empty: there is no stream."""
        return b""

    def log_note(self) -> str:
        """Inputs and tokens, for the log line."""
        return f"{counted(len(self.results), 'input')}, {counted(self.prompt_tokens, 'token')}"


def encode_floats(vector: Vector) -> str:
    """``vector`` as a JSON list (``float_list``)."""
    return f"[{','.join(map(repr, float_list(vector)))}]"
