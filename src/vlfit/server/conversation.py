"""From the messages of a request to a conversation with its pictures fetched.

Knows: roles, parts, which URLs a server may open. Does not know: how pictures are fetched
(``tasks/pictures.py``) or decoded (the engine), and nothing of HTTP.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from vlfit.engine.conversation import Conversation, ImagePart, Message, Part, Role, TextPart, VideoPart
from vlfit.errors import InvalidRequest, NotAPicture, PictureError
from vlfit.server.schemas import ChatMessage, ChatRequest, ContentPart, ImageContent, TextContent
from vlfit.server.settings import ServerSettings
from vlfit.server.threads import Threads

FETCHES_OF_ONE_REQUEST = 8  # so that one request with many slow pictures does not hold up the others

# OpenAI renamed "system"; clients send either.
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


async def build_conversation(
    request: ChatRequest, settings: ServerSettings, fetches: Threads
) -> Conversation:
    """The conversation, its pictures fetched side by side on ``fetches``.

    Raises ``InvalidRequest`` for roles and parts that make no sense, ``PictureError`` for a URL that gives no
    picture; the error of the picture that comes first in the request, whichever failed first.
    """
    if not request.messages:
        raise InvalidRequest("messages is empty", "send at least one message", param="messages")
    roles = [_role(index, message) for index, message in enumerate(request.messages)]
    for index, (role, message) in enumerate(zip(roles, request.messages, strict=True)):
        if role == "user":
            _check_not_empty(index, message)
    places = list(_picture_urls(request))
    if len(places) > settings.picture_limit:
        raise InvalidRequest(
            f"the request holds {len(places)} pictures and frames, and this server takes "
            f"{settings.picture_limit}",
            "send fewer pictures at once",
            param="messages",
        )
    for where, url in places:
        _check_url(where, url)
    pictures = iter(await _fetch_all(places, settings.allow_private_urls, fetches))
    return tuple(
        Message(role, _parts(index, message, pictures))
        for index, (role, message) in enumerate(zip(roles, request.messages, strict=True))
    )


def _role(index: int, message: ChatMessage) -> Role:
    where = f"messages[{index}]"
    extra = message.model_extra or {}
    if message.role in ("tool", "function") or extra.get("tool_calls") or extra.get("function_call"):
        raise InvalidRequest(f"{where} belongs to a tool call", "vlfit does not support tools", param=where)
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role is {message.role[:40]!r}",
            f"use one of: {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    return _ROLES[message.role]


def _check_not_empty(index: int, message: ChatMessage) -> None:
    """A question of no words and no picture is a slip of the sender's; the model would make one up."""
    content = [message.content] if isinstance(message.content, str) else message.content
    if not any(part.text if isinstance(part, TextContent) else part for part in content):
        raise InvalidRequest(
            f"messages[{index}].content is empty", "send some text or a picture", param="messages"
        )


def _picture_urls(request: ChatRequest) -> Iterator[tuple[str, str]]:
    """Every picture of the request in order: its place, for errors, and its URL."""
    for index, message in enumerate(request.messages):
        if isinstance(message.content, str):
            continue
        for position, part in enumerate(message.content):
            where = f"messages[{index}].content[{position}]"
            if isinstance(part, ImageContent):
                yield f"{where}.image_url.url", part.image_url.url
            elif not isinstance(part, TextContent):
                for frame, url in enumerate(part.frames):
                    yield f"{where}.frames[{frame}]", url


def _check_url(where: str, url: str) -> None:
    """A server opens no files: a path or ``file:`` URL would hand out what lies on its disk."""
    if not url.lower().startswith(("data:", "http://", "https://")):
        raise NotAPicture(
            f"{where} is {url[:60]!r}, which is no data:, http: or https: URL",
            "send the picture itself as data:image/jpeg;base64,... or give an https: address",
            param=where,
        )


async def _fetch_all(places: list[tuple[str, str]], allow_private: bool, fetches: Threads) -> list[ImagePart]:
    mine = asyncio.Semaphore(FETCHES_OF_ONE_REQUEST)

    async def fetch(number: int, where: str, url: str) -> ImagePart:
        try:
            async with mine:
                picture = await fetches.run(_fetch, url, allow_private)
        except PictureError as error:
            error.param = error.param or where
            raise
        # Many pictures may be data: URLs; an error in decoding one should say which.
        label = f"picture {number}" if url[:5].lower() == "data:" else picture.label
        return replace(picture, label=label, place=where)

    fetched = await asyncio.gather(
        *(fetch(number, *place) for number, place in enumerate(places, 1)), return_exceptions=True
    )
    failed = next((each for each in fetched if isinstance(each, BaseException)), None)
    if failed is None:
        return cast(list[ImagePart], fetched)
    try:
        raise failed
    finally:
        del failed, fetched  # an error holds this frame, which must not hold it (``threads.py``)


def _fetch(url: str, allow_private: bool) -> ImagePart:
    # Imported here: Pillow and httpx are wanted only once the first picture comes.
    from vlfit.tasks.pictures import load_picture

    return load_picture(url, allow_private=allow_private)


def _parts(index: int, message: ChatMessage, pictures: Iterator[ImagePart]) -> tuple[Part, ...]:
    if isinstance(message.content, str):
        return (TextPart(message.content),)
    return tuple(
        _part(f"messages[{index}].content[{position}]", part, pictures)
        for position, part in enumerate(message.content)
    )


def _part(where: str, part: ContentPart, pictures: Iterator[ImagePart]) -> Part:
    if isinstance(part, TextContent):
        return TextPart(part.text)
    if isinstance(part, ImageContent):
        return replace(next(pictures), detail=part.image_url.detail)
    frames = tuple(next(pictures).data for _ in part.frames)
    return VideoPart(frames, part.fps, place=f"{where}.frames")
