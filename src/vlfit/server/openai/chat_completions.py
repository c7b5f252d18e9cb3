"""``POST /v1/chat/completions``: what its fields mean.

Knows: how a chat is read, prepared and answered. Does not know: the life of a request (``generating``), how a
picture becomes tokens (the backend), how an answer is written (``replies``).
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from vlfit.api.conversation import Conversation, ImagePart, Message, Part, Role, TextPart, ToolCall, VideoPart
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared
from vlfit.errors import InvalidRequest, NotAPicture, PictureError
from vlfit.server.http.admission import Held
from vlfit.server.http.threads import Threads
from vlfit.server.openai.chat_schema import (
    MOST_PARTS,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImageContent,
    TextContent,
    VideoContent,
    VideoURLContent,
)
from vlfit.server.openai.generation import Endpoint, Workshop
from vlfit.server.openai.replies import Reply
from vlfit.server.openai.request_params import forced_tool, sampling_of, tools_of
from vlfit.server.openai.validation import read_body_as
from vlfit.server.server_settings import ServerSettings

# From the messages of a request to a conversation with its pictures fetched.
#
# Knows: roles, parts, which URLs a server may open. Does not know: how pictures are fetched
# (``tasks/pictures.py``) or decoded (the engine), and nothing of HTTP.


_SCHEMES = ("data:", "http://", "https://")
FETCHES_OF_ONE_REQUEST = 8  # so that one request with many slow pictures does not hold up the others

# OpenAI renamed "system"; clients send either.
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_CLIP = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)  # vLLM's name for frames in one URL


async def build_conversation(
    request: ChatRequest, settings: ServerSettings, fetches: Threads
) -> Conversation:
    """The conversation, its pictures fetched side by side on ``fetches``.

    Raises ``InvalidRequest`` for roles and parts that make no sense, ``PictureError`` for a URL that gives no
    picture; the error of the picture that comes first in the request, whichever failed first.
    """
    if not request.messages:
        raise InvalidRequest("messages is empty", "send at least one message", param="messages")
    _check_count(request.messages)
    roles = [_role(index, message) for index, message in enumerate(request.messages)]
    called: set[str] = set()
    for index, (role, message) in enumerate(zip(roles, request.messages, strict=True)):
        if role == "user":
            _check_not_empty(index, message)
        elif role == "tool":
            _check_was_called(index, message, called)
        called.update(call.id for call in message.tool_calls or ())
    places = list(_picture_urls(request))
    if len(places) > settings.picture_limit:
        raise InvalidRequest(
            f"the request holds {len(places)} pictures and frames, and this server takes "
            f"{settings.picture_limit}",
            "send fewer pictures at once",
            param="messages",
        )
    for where, url in places:
        _check_url(where, url, settings)
    pictures = iter(await _fetch_all(places, settings, fetches))
    return tuple(
        Message(role, _parts(index, message, pictures), _calls(message))
        for index, (role, message) in enumerate(zip(roles, request.messages, strict=True))
    )


def _role(index: int, message: ChatMessage) -> Role:
    where = f"messages[{index}]"
    if message.role == "function" or (message.model_extra or {}).get("function_call"):
        raise InvalidRequest(
            f"{where} is of OpenAI's old way to call functions", "use tools and tool_calls", param=where
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where} has tool_calls, and only the assistant calls", param=where)
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{where}.content is missing", "send some text", param=f"{where}.content")
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role is {message.role[:40]!r}",
            f"use one of: {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    return _ROLES[message.role]


def _check_count(messages: list[ChatMessage]) -> None:
    """Each takes its moment of the event loop, on which all others wait, and no context holds so many."""
    count = sum(_size(message) for message in messages)
    if count > MOST_PARTS:
        raise InvalidRequest(
            f"the request holds {count} messages, parts and calls, and this server takes {MOST_PARTS}",
            "put texts that belong together into one",
            param="messages",
        )


def _size(message: ChatMessage) -> int:
    parts = 0 if isinstance(message.content, str) else len(message.content or ())
    return 1 + parts + len(message.tool_calls or ())


def _check_was_called(index: int, message: ChatMessage, called: set[str]) -> None:
    """An answer of a tool belongs to a call before it, or the model would read it as of nothing."""
    wanted = message.tool_call_id
    if wanted is None or wanted not in called:
        raise InvalidRequest(
            f"messages[{index}] answers the call {(wanted or '')[:80]!r}, which is in no message before it",
            "send the assistant's message with its tool_calls, too",
            param=f"messages[{index}].tool_call_id",
        )


def _calls(message: ChatMessage) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.function.name, call.function.arguments) for call in message.tool_calls or ())


def _check_not_empty(index: int, message: ChatMessage) -> None:
    """A question of no words and no picture is a slip of the sender's; the model would make one up."""
    content = [message.content] if isinstance(message.content, str) else message.content or []
    if not any(part.text if isinstance(part, TextContent) else part for part in content):
        raise InvalidRequest(
            f"messages[{index}].content is empty", "send some text or a picture", param="messages"
        )


def _picture_urls(request: ChatRequest) -> Iterator[tuple[str, str]]:
    """Every picture of the request in order: its place, for errors, and its URL."""
    for index, message in enumerate(request.messages):
        if isinstance(message.content, str):
            continue
        for position, part in enumerate(message.content or ()):
            where = f"messages[{index}].content[{position}]"
            if isinstance(part, ImageContent):
                yield f"{where}.image_url.url", part.image_url.url
            elif isinstance(part, VideoContent):
                for frame, url in enumerate(part.frames):
                    yield f"{where}.frames[{frame}]", url
            elif isinstance(part, VideoURLContent):
                for url in _frames(where, part.video_url.url):
                    yield f"{where}.video_url.url", url


def _frames(where: str, url: str) -> list[str]:
    """The frames of a clip in one URL, as vLLM writes it, each as a URL of its own."""
    found = _CLIP.match(url)
    if found is None:
        raise InvalidRequest(
            f"{where}.video_url.url is {url[:60]!r}, and vlfit decodes no files of films",
            'send the frames: {"type": "video", "frames": [picture URLs], "fps": 2}, or '
            "data:video/jpeg;base64, and the frames in base64 with commas between",
            param=f"{where}.video_url.url",
        )
    return [f"data:image/jpeg;base64,{frame}" for frame in url[found.end() :].split(",")]


def _check_url(where: str, url: str, settings: ServerSettings) -> None:
    """A server opens no files unless it was given a folder: a path would hand out what lies on its disk."""
    if not url[:8].lower().startswith(_SCHEMES if settings.files is None else (*_SCHEMES, "file:")):
        raise NotAPicture(
            f"{where} is {url[:60]!r}, which is no data:, http: or https: URL",
            "send the picture itself as data:image/jpeg;base64,... or give an https: address",
            param=where,
        )


async def _fetch_all(
    places: list[tuple[str, str]], settings: ServerSettings, fetches: Threads
) -> list[ImagePart]:
    """In order; one that comes again is fetched once."""
    mine = asyncio.Semaphore(FETCHES_OF_ONE_REQUEST)
    first: dict[str, str] = {}
    for where, url in places:
        first.setdefault(url, where)

    async def fetch(url: str, where: str) -> ImagePart:
        try:
            async with mine:
                return await fetches.run(_fetch, url, settings)
        except PictureError as error:
            error.param = error.param or where
            raise

    fetched = await asyncio.gather(*(fetch(*each) for each in first.items()), return_exceptions=True)
    failed = next((each for each in fetched if isinstance(each, BaseException)), None)
    if failed is None:
        pictures = dict(zip(first, cast(list[ImagePart], fetched), strict=True))
        return [
            replace(pictures[url], label=_label(number, url, pictures[url]), place=where)
            for number, (where, url) in enumerate(places, 1)
        ]
    try:
        raise failed
    finally:
        del failed, fetched  # an error holds this frame, which must not hold it (``threads.py``)


def _label(number: int, url: str, picture: ImagePart) -> str:
    """Many pictures may be data: URLs; an error in decoding one should say which."""
    return f"picture {number}" if url[:5].lower() == "data:" else picture.label


def _fetch(url: str, settings: ServerSettings) -> ImagePart:
    # Imported here: Pillow and httpx are wanted only once the first picture comes.
    from vlfit.tasks.pictures import load_picture

    return load_picture(url, allow_private=settings.allow_private_urls, files=settings.files)


def _parts(index: int, message: ChatMessage, pictures: Iterator[ImagePart]) -> tuple[Part, ...]:
    if isinstance(message.content, str):
        return (TextPart(message.content),)
    return tuple(
        _part(f"messages[{index}].content[{position}]", part, pictures)
        for position, part in enumerate(message.content or ())
    )


def _part(where: str, part: ContentPart, pictures: Iterator[ImagePart]) -> Part:
    if isinstance(part, TextContent):
        return TextPart(part.text)
    if isinstance(part, ImageContent):
        return replace(next(pictures), detail=part.image_url.detail)
    if isinstance(part, VideoURLContent):
        frames = tuple(next(pictures).data for _ in _frames(where, part.video_url.url))
        return VideoPart(frames, part.video_url.fps, place=f"{where}.video_url.url")
    frames = tuple(next(pictures).data for _ in part.frames)
    return VideoPart(frames, part.fps, place=f"{where}.frames")


class ChatEndpoint(Endpoint[ChatRequest]):
    """OpenAI's chat completions."""

    def parse(self, body: bytes) -> ChatRequest:
        return read_chat(body)

    def sampling(self, wishes: ChatRequest) -> SamplingParams:
        return sampling_of(wishes, self.workshop.backend.default_sampling())

    def count(self, wishes: ChatRequest) -> int:
        return wishes.n or 1

    async def prepare(self, wishes: ChatRequest, sampling: SamplingParams, held: Held) -> Sequence[Prepared]:
        return [await prepare_chat(self.workshop, wishes, sampling, held)] * self.count(wishes)

    def reply(self, wishes: ChatRequest, prepared: Sequence[Prepared], request_id: str) -> Reply:
        return Reply(
            f"chatcmpl-{request_id}",
            self.workshop.backend.model,
            len(prepared),
            prompt_tokens=prepared[0].prompt_tokens,
            image_tokens=prepared[0].image_tokens,
            images=prepared[0].images,
            ignored=wishes.ignored(),
            with_logprobs=bool(wishes.logprobs),
            with_usage=bool(wishes.stream_options and wishes.stream_options.include_usage),
            tools=frozenset(tool.name for tool in tools_of(wishes)),
            forced=forced_tool(wishes),
        )


def read_chat(body: bytes) -> ChatRequest:
    """Raises ``InvalidRequest``."""
    wishes = read_body_as(ChatRequest, body)
    wishes.refuse_unsupported()
    return wishes


async def prepare_chat(
    workshop: Workshop, wishes: ChatRequest, sampling: SamplingParams, held: Held
) -> Prepared:
    """Its pictures fetched, then all of it prepared in a thread, for whose time ``held`` is kept."""
    tools = tools_of(wishes)
    conversation = await build_conversation(wishes, workshop.settings, workshop.fetches)
    return await workshop.work.run_holding(held, workshop.backend.prepare, conversation, sampling, tools)
