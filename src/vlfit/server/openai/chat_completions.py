"""``POST /v1/chat/completions``: from the request's messages to a conversation with its pictures fetched."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from vlfit.api.conversation import Conversation, ImagePart, Message, Part, Role, TextPart, ToolCall, VideoPart
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared
from vlfit.errors import InvalidRequest, NotAPicture, PictureError
from vlfit.images.limits import use_limits
from vlfit.server.http.admission import Slots
from vlfit.server.http.threads import DaemonThreadPool
from vlfit.server.openai.chat_schema import (
    MAX_PARTS,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImageContent,
    TextContent,
    VideoContent,
    VideoURLContent,
)
from vlfit.server.openai.generation import Endpoint, ServerContext
from vlfit.server.openai.replies import ChatResponseWriter
from vlfit.server.openai.request_params import chat_sampling_params, offered_tools, tool_call_reader
from vlfit.server.openai.validation import parse_body
from vlfit.server.server_settings import ServerSettings

_SCHEMES = ("data:", "http://", "https://")
MAX_FETCHES_PER_REQUEST = 8  # so that one request with many slow pictures does not delay the others

# OpenAI renamed "system" to "developer"; clients send either.
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_FRAMES_URL = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)  # vLLM's name for frames in one URL


async def build_conversation(
    request: ChatRequest, settings: ServerSettings, fetch_threads: DaemonThreadPool
) -> Conversation:
    """Build the conversation; its pictures are fetched concurrently on ``fetch_threads``.

    Raises ``InvalidRequest`` for invalid roles and parts, and the ``PictureError`` of the first picture, in
    the order of the request, that cannot be fetched.
    """
    if not request.messages:
        raise InvalidRequest("messages is empty", "Send at least one message.", param="messages")
    _check_count(request.messages)
    roles = [_role(index, message) for index, message in enumerate(request.messages)]
    call_ids: set[str] = set()
    for index, (role, message) in enumerate(zip(roles, request.messages, strict=True)):
        if role == "user":
            _check_not_empty(index, message)
        elif role == "tool":
            _check_tool_call_id(index, message, call_ids)
        call_ids.update(call.id for call in message.tool_calls or ())
    urls = list(_picture_urls(request))
    if len(urls) > settings.picture_limit:
        raise InvalidRequest(
            f"the request has {len(urls)} pictures and frames; this server accepts at most "
            f"{settings.picture_limit}",
            "Send fewer pictures in one request.",
            param="messages",
        )
    for param, url in urls:
        _check_url(param, url, settings)
    pictures = iter(await _fetch_all(urls, settings, fetch_threads))
    return tuple(
        Message(role, _parts(index, message, pictures), _calls(message))
        for index, (role, message) in enumerate(zip(roles, request.messages, strict=True))
    )


def _role(index: int, message: ChatMessage) -> Role:
    param = f"messages[{index}]"
    if message.role == "function" or (message.model_extra or {}).get("function_call"):
        raise InvalidRequest(
            f"{param} uses OpenAI's deprecated function calling", "Use tools and tool_calls.", param=param
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{param} has tool_calls; only assistant messages may have them", param=param)
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{param}.content is missing", "Send some text.", param=f"{param}.content")
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"{param}.role is {message.role[:40]!r}",
            f"Use one of: {', '.join(_ROLES)}.",
            param=f"{param}.role",
        )
    return _ROLES[message.role]


def _check_count(messages: list[ChatMessage]) -> None:
    """Each message and part takes time on the event loop, and no context has room for so many."""
    count = sum(_size(message) for message in messages)
    if count > MAX_PARTS:
        raise InvalidRequest(
            f"the request has {count} messages, content parts and tool calls; at most {MAX_PARTS} fit",
            "Merge adjacent texts into one part.",
            param="messages",
        )


def _size(message: ChatMessage) -> int:
    parts = 0 if isinstance(message.content, str) else len(message.content or ())
    return 1 + parts + len(message.tool_calls or ())


def _check_tool_call_id(index: int, message: ChatMessage, call_ids: set[str]) -> None:
    """A tool message must answer a call in an earlier message."""
    call_id = message.tool_call_id
    if call_id is None or call_id not in call_ids:
        raise InvalidRequest(
            f"messages[{index}] answers tool call {(call_id or '')[:80]!r}, which is in no earlier message",
            "Also send the assistant message with its tool_calls.",
            param=f"messages[{index}].tool_call_id",
        )


def _calls(message: ChatMessage) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.function.name, call.function.arguments) for call in message.tool_calls or ())


def _check_not_empty(index: int, message: ChatMessage) -> None:
    """An empty user message is a mistake of the client; the model would invent a question."""
    content = [message.content] if isinstance(message.content, str) else message.content or []
    if not any(part.text if isinstance(part, TextContent) else part for part in content):
        raise InvalidRequest(
            f"messages[{index}].content is empty", "Send some text or a picture.", param="messages"
        )


def _picture_urls(request: ChatRequest) -> Iterator[tuple[str, str]]:
    """Yield (param, URL) of every picture and frame, in order."""
    for index, message in enumerate(request.messages):
        if isinstance(message.content, str):
            continue
        for position, part in enumerate(message.content or ()):
            param = f"messages[{index}].content[{position}]"
            if isinstance(part, ImageContent):
                yield f"{param}.image_url.url", part.image_url.url
            elif isinstance(part, VideoContent):
                for frame, url in enumerate(part.frames):
                    yield f"{param}.frames[{frame}]", url
            elif isinstance(part, VideoURLContent):
                for url in _frames(param, part.video_url.url):
                    yield f"{param}.video_url.url", url


def _frames(param: str, url: str) -> list[str]:
    """Split a clip in one URL, as vLLM writes it, into a URL for each frame."""
    match = _FRAMES_URL.match(url)
    if match is None:
        raise InvalidRequest(
            f"{param}.video_url.url is {url[:60]!r}; vlfit does not decode video files",
            'Send the frames: {"type": "video", "frames": [picture URLs], "fps": 2}, or '
            "data:video/jpeg;base64, followed by the frames in base64, separated by commas.",
            param=f"{param}.video_url.url",
        )
    return [f"data:image/jpeg;base64,{frame}" for frame in url[match.end() :].split(",")]


def _check_url(param: str, url: str, settings: ServerSettings) -> None:
    """Allow data:, http: and https:, and file: only with ``settings.files``, so that clients cannot read the
    server's disk.
    """
    if not url[:8].lower().startswith(_SCHEMES if settings.files is None else (*_SCHEMES, "file:")):
        raise NotAPicture(
            f"{param} is {url[:60]!r}, which is not a data:, http: or https: URL",
            "Send the picture as data:image/jpeg;base64,... or give an https: URL.",
            param=param,
        )


async def _fetch_all(
    urls: list[tuple[str, str]], settings: ServerSettings, fetch_threads: DaemonThreadPool
) -> list[ImagePart]:
    """Fetch the pictures, in order; a URL that occurs several times is fetched once."""
    semaphore = asyncio.Semaphore(MAX_FETCHES_PER_REQUEST)
    first: dict[str, str] = {}
    for param, url in urls:
        first.setdefault(url, param)

    async def fetch(url: str, param: str) -> ImagePart:
        try:
            async with semaphore:
                return await fetch_threads.run(_fetch, url, settings)
        except PictureError as error:
            error.param = error.param or param
            raise

    fetched = await asyncio.gather(*(fetch(*each) for each in first.items()), return_exceptions=True)
    failed = next((each for each in fetched if isinstance(each, BaseException)), None)
    if failed is None:
        pictures = dict(zip(first, cast(list[ImagePart], fetched), strict=True))
        return [
            replace(pictures[url], label=_label(number, url, pictures[url]), place=param)
            for number, (param, url) in enumerate(urls, 1)
        ]
    try:
        raise failed
    finally:
        del failed, fetched  # break the cycle between the error's traceback and this frame (``threads.py``)


def _label(number: int, url: str, picture: ImagePart) -> str:
    """What decoding errors call the picture; data: URLs are numbered."""
    return f"picture {number}" if url[:5].lower() == "data:" else picture.label


def _fetch(url: str, settings: ServerSettings) -> ImagePart:
    # Imported here, since it imports Pillow and httpx, which only requests with pictures need.
    from vlfit.tasks.pictures import load_picture

    return load_picture(url, allow_private=settings.allow_private_urls, files=settings.files)


def _parts(index: int, message: ChatMessage, pictures: Iterator[ImagePart]) -> tuple[Part, ...]:
    if isinstance(message.content, str):
        return (TextPart(message.content),)
    return tuple(
        _part(f"messages[{index}].content[{position}]", part, pictures)
        for position, part in enumerate(message.content or ())
    )


def _part(param: str, part: ContentPart, pictures: Iterator[ImagePart]) -> Part:
    if isinstance(part, TextContent):
        return TextPart(part.text)
    if isinstance(part, ImageContent):
        return replace(next(pictures), detail=part.image_url.detail)
    if isinstance(part, VideoURLContent):
        frames = tuple(next(pictures).data for _ in _frames(param, part.video_url.url))
        return VideoPart(frames, part.video_url.fps, place=f"{param}.video_url.url")
    frames = tuple(next(pictures).data for _ in part.frames)
    return VideoPart(frames, part.fps, place=f"{param}.frames")


class ChatEndpoint(Endpoint[ChatRequest]):
    def parse(self, body: bytes) -> ChatRequest:
        return read_chat(body)

    def sampling_params(self, params: ChatRequest) -> SamplingParams:
        return chat_sampling_params(params, self.context.backend)

    def num_completions(self, params: ChatRequest) -> int:
        return params.n or 1

    async def prepare(
        self, params: ChatRequest, sampling: SamplingParams, slots: Slots
    ) -> Sequence[Prepared]:
        return [await prepare_chat(self.context, params, sampling, slots)] * self.num_completions(params)

    def response_writer(
        self, params: ChatRequest, prepared: Sequence[Prepared], request_id: str
    ) -> ChatResponseWriter:
        return ChatResponseWriter(
            f"chatcmpl-{request_id}",
            self.context.backend.model,
            len(prepared),
            prompt_tokens=prepared[0].prompt_tokens,
            image_tokens=prepared[0].image_tokens,
            images=prepared[0].images,
            ignored=params.ignored(),
            with_logprobs=bool(params.logprobs),
            with_usage=bool(params.stream_options and params.stream_options.include_usage),
            tool_calls=tool_call_reader(params, self.context.backend),
        )


def read_chat(body: bytes) -> ChatRequest:
    """Parse and validate a chat request. Raises ``InvalidRequest``."""
    params = parse_body(ChatRequest, body)
    params.refuse_unsupported()
    return params


async def prepare_chat(
    context: ServerContext, params: ChatRequest, sampling: SamplingParams, slots: Slots
) -> Prepared:
    """Fetch the pictures, then prepare the prompt in a thread; hold ``slots`` until the thread is done."""
    tools = offered_tools(params)
    conversation = await build_conversation(params, context.settings, context.fetch_threads)
    has_pictures = any(not isinstance(part, TextPart) for message in conversation for part in message.parts)
    threads = context.picture_threads if has_pictures else context.prepare_threads

    def prepare() -> Prepared:
        with use_limits(context.settings.decode_limits):
            return context.backend.prepare(conversation, sampling, tools)

    return await threads.run_with_slots(slots, prepare)
