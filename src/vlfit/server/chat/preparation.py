"""From a chat request of any dialect to a prompt: messages checked, pictures fetched and decoded."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from vlfit.api.conversation import Conversation, ImagePart, Message, Part, Role, TextPart, ToolCall, VideoPart
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared
from vlfit.errors import InvalidRequest, NotAPicture, PictureError, UsageError
from vlfit.images.file_kinds import SERVER_FORMATS_HINT
from vlfit.images.limits import use_limits
from vlfit.server.chat.chat_schema import (
    MAX_PARTS,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FileContent,
    FileData,
    ImageContent,
    TextContent,
    VideoContent,
    VideoURL,
    VideoURLContent,
)
from vlfit.server.chat.inline_files import file_of, release_files
from vlfit.server.chat.request_params import offered_tools
from vlfit.server.chat.validation import parse_body
from vlfit.server.generation import ServerContext
from vlfit.server.http.admission import Slots
from vlfit.server.http.threads import DaemonThreadPool
from vlfit.server.server_settings import ServerSettings
from vlfit.tasks.pictures import InlineFile, load_picture

if TYPE_CHECKING:
    from vlfit.tasks.files import MediaOptions

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
_PDF_BASE64 = "JVBERi"  # base64 of %PDF
_FRAMES_URL = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)  # vLLM's name for frames in one URL


async def build_conversation(
    request: ChatRequest, settings: ServerSettings, fetch_threads: DaemonThreadPool
) -> Conversation:
    """Check the messages and fetch their pictures, concurrently on ``fetch_threads``; nothing is decoded.

    Call it once: it frees the request's inline files (``release_files``). Raises ``InvalidRequest`` for
    invalid roles, parts and too many pictures; if pictures cannot be fetched, the ``PictureError`` of the
    first such picture in the request.
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
    urls = list(picture_urls(request))
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
    release_files()
    return tuple(
        Message(role, _parts(index, message, pictures, settings), _calls(message), _thoughts(message))
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


def _thoughts(message: ChatMessage) -> str:
    return (message.reasoning_content or message.reasoning or "") if message.role == "assistant" else ""


def _check_not_empty(index: int, message: ChatMessage) -> None:
    """An empty user message is a mistake of the client; the model would invent a question."""
    content = [message.content] if isinstance(message.content, str) else message.content or []
    if not any(part.text if isinstance(part, TextContent) else part for part in content):
        raise InvalidRequest(
            f"messages[{index}].content is empty", "Send some text or a picture.", param="messages"
        )


def picture_urls(request: ChatRequest) -> Iterator[tuple[str, str]]:
    """Yield the field's path and the URL of every picture, frame and file, in order.

    Raises ``InvalidRequest`` for a file part without the file itself.
    """
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
                for url in _frames(part.video_url.url) or [part.video_url.url]:
                    yield f"{param}.video_url.url", url
            elif isinstance(part, FileContent):
                yield f"{param}.file.file_data", _file_url(param, part)


def file_urls(request: ChatRequest) -> list[str]:
    """The URLs of all pictures, frames and files; raises like ``picture_urls``."""
    return [url for _, url in picture_urls(request)]


def _file_url(param: str, part: FileContent) -> str:
    if part.file.file_id is not None:
        raise InvalidRequest(
            f"{param}.file.file_id names an uploaded file, which vlfit does not keep",
            "Send the file itself as file_data: data:application/pdf;base64,...",
            param=f"{param}.file.file_id",
        )
    if not part.file.file_data:
        raise InvalidRequest(
            f"{param}.file has no file_data",
            "Send the file as data:application/pdf;base64,...",
            param=f"{param}.file.file_data",
        )
    return part.file.file_data


def _frames(url: str) -> list[str]:
    """Split a clip in one URL, as vLLM writes it, into a URL for each frame; empty for a video file."""
    match = _FRAMES_URL.match(url)
    if match is None:
        return []
    return [f"data:image/jpeg;base64,{frame}" for frame in url[match.end() :].split(",")]


def _check_url(param: str, url: str, settings: ServerSettings) -> None:
    """Allow data:, http: and https:, and file: only with ``settings.files``, so that clients cannot read the
    server's disk.
    """
    if not url[:8].lower().startswith(_SCHEMES if settings.files is None else (*_SCHEMES, "file:")):
        what, example = _kind_sent(param, url)
        raise NotAPicture(
            f"{param} is {url[:60]!r}, which is not a data:, http: or https: URL",
            f"Send the {what} as data:{example};base64,... or give an https: URL.",
            param=param,
        )


def _kind_sent(param: str, url: str) -> tuple[str, str]:
    """What is meant by a bare base64 or another string: a word for it, and the media type of its URL."""
    if param.endswith(".file_data") or url.startswith(_PDF_BASE64):
        return "document", "application/pdf"
    return ("video", "video/mp4") if param.endswith(".video_url.url") else ("picture", "image/jpeg")


async def _fetch_all(
    urls: list[tuple[str, str]], settings: ServerSettings, fetch_threads: DaemonThreadPool
) -> list[ImagePart]:
    """Fetch the pictures, in order; a URL that occurs several times is fetched once."""
    semaphore = asyncio.Semaphore(MAX_FETCHES_PER_REQUEST)
    sources = [file_of(url) or url for _, url in urls]
    first: dict[str | InlineFile, str] = {}
    for (param, _), source in zip(urls, sources, strict=True):
        first.setdefault(source, param)

    async def fetch(source: str | InlineFile, param: str) -> ImagePart:
        try:
            async with semaphore:
                return await fetch_threads.run(_fetch, source, settings)
        except PictureError as error:
            error.param = error.param or param
            raise

    fetched = await asyncio.gather(*(fetch(*each) for each in first.items()), return_exceptions=True)
    failed = next((each for each in fetched if isinstance(each, BaseException)), None)
    if failed is None:
        pictures = dict(zip(first, cast(list[ImagePart], fetched), strict=True))
        return [
            replace(pictures[source], label=_label(number, url, pictures[source]), place=param)
            for number, ((param, url), source) in enumerate(zip(urls, sources, strict=True), 1)
        ]
    try:
        raise failed
    finally:
        del failed, fetched  # break the cycle between the error's traceback and this frame (``threads.py``)


def _label(number: int, url: str, picture: ImagePart) -> str:
    """What decoding errors call the picture; data: URLs are numbered."""
    return f"picture {number}" if url[:5].lower() == "data:" else picture.label


def _fetch(source: str | InlineFile, settings: ServerSettings) -> ImagePart:
    return load_picture(
        source,
        allow_private=settings.allow_private_urls,
        files=settings.files,
        any_file=True,  # refused below, by a better error
    )


def _parts(
    index: int, message: ChatMessage, pictures: Iterator[ImagePart], settings: ServerSettings
) -> tuple[Part, ...]:
    """The parts of a message. Documents and videos are files that are taken apart when it is prepared."""
    if isinstance(message.content, str):
        return (TextPart(message.content),)
    return tuple(
        _part(f"messages[{index}].content[{position}]", part, pictures, settings)
        for position, part in enumerate(message.content or ())
    )


def _part(param: str, part: ContentPart, pictures: Iterator[ImagePart], settings: ServerSettings) -> Part:
    if isinstance(part, TextContent):
        return TextPart(part.text)
    if isinstance(part, ImageContent):
        return _file_part(replace(next(pictures), detail=part.image_url.detail), settings)
    if isinstance(part, FileContent):
        name, ranges = _chosen_pages(param, part.file)
        picture = next(pictures)
        return _file_part(replace(picture, label=name) if name else picture, settings, ranges=ranges)
    if isinstance(part, VideoURLContent):
        count = len(_frames(part.video_url.url))
        options = _frame_options(f"{param}.video_url", part.video_url, settings, is_file=not count)
        if not count:
            return _file_part(next(pictures), settings, options)
        frames = tuple(next(pictures).data for _ in range(count))
        return VideoPart(frames, part.video_url.fps, place=f"{param}.video_url.url")
    frames = tuple(next(pictures).data for _ in part.frames)
    return VideoPart(frames, part.fps, place=f"{param}.frames")


def _chosen_pages(param: str, file: FileData) -> tuple[str | None, tuple[tuple[int, int], ...]]:
    """The file's name, and the pages that it ends with, or that its URL ends with: ``report.pdf#2-5``.

    Raises ``InvalidRequest`` for pages that cannot be.
    """
    from vlfit.tasks.files import split_pages

    name, url = file.filename, file.file_data or ""
    with _usage_as_invalid(f"{param}.file.filename"):
        name, ranges = split_pages(name) if name else (name, ())
    if not ranges and url[:8].lower().startswith(("http://", "https://")):
        with _usage_as_invalid(f"{param}.file.file_data"):
            _, ranges = split_pages(url)
    return name, ranges


def _frame_options(param: str, video: VideoURL, settings: ServerSettings, *, is_file: bool) -> "MediaOptions":
    """Which frames of a video file to take. Raises ``InvalidRequest`` for values that are no times.

    ``is_file``: False for a clip whose frames the URL lists, of which none are chosen here.
    """
    from vlfit.tasks.files import MediaOptions, parse_frame_distance, parse_times

    chosen = [name for name in ("fps", "every", "at") if name in video.model_fields_set]
    chosen = [name for name in chosen if getattr(video, name) is not None]
    if not is_file and chosen not in ([], ["fps"]):
        raise InvalidRequest(
            f"{param} lists the frames themselves: {chosen[-1]} chooses frames of a video file",
            f"Leave {chosen[-1]} out.",
            param=f"{param}.{chosen[-1]}",
        )
    if len(chosen) > 1:
        raise InvalidRequest(
            f"{param} has {' and '.join(chosen)}, which are ways to choose frames",
            "Send one of them.",
            param=f"{param}.{chosen[-1]}",
        )
    if video.at is not None:
        with _usage_as_invalid(f"{param}.at"):
            at = parse_times(video.at)
        if len(at) > settings.picture_limit:
            raise InvalidRequest(
                f"{param}.at names {len(at)} frames; this server accepts at most {settings.picture_limit}",
                "Name fewer times.",
                param=f"{param}.at",
            )
        return MediaOptions(at=at, clip=True)
    if video.every is None:
        return MediaOptions(every=1 / video.fps, clip=True)
    with _usage_as_invalid(f"{param}.every"):
        return MediaOptions(every=parse_frame_distance(video.every, "every"), clip=True)


@contextmanager
def _usage_as_invalid(param: str) -> Iterator[None]:
    """Raise a ``UsageError`` of the block as ``InvalidRequest`` about the field ``param``."""
    try:
        yield
    except UsageError as error:
        raise InvalidRequest(f"{param}: {error.message}", error.hint, param=param) from None


def _file_part(
    picture: ImagePart,
    settings: ServerSettings,
    options: "MediaOptions | None" = None,
    ranges: tuple[tuple[int, int], ...] = (),
) -> Part:
    """``picture``, or the document, video or RAW photo that its bytes are. Decodes nothing.

    ``options``: which frames of a video, and of an animation with ``options.clip``. ``ranges``: pages of a
    PDF. Raises ``NotAPicture`` if the server does not take this kind of file, ``InvalidRequest`` for pages of
    another file.
    """
    from vlfit.tasks.files import MediaFile, MediaOptions, media_part

    with _usage_as_invalid(picture.place or "messages"):
        part = media_part(picture, options or MediaOptions(), ranges, max_parts=settings.picture_limit)
    if isinstance(part, MediaFile) and part.kind not in settings.decode_limits.media:
        kinds = {"pdf": "a PDF document", "raw": "a camera RAW photo", "video": "a video file"}
        what = "an animation sent as a clip" if part.is_animation else kinds[part.kind]
        raise NotAPicture(
            f"{picture.label} is {what}, which this server does not take",
            f"{SERVER_FORMATS_HINT} A server started with --image-formats default,{part.kind} takes it.",
            param=picture.place,
        )
    if isinstance(part, ImagePart) and options is not None and options.at:
        note = f"{picture.label} is a picture, no video: at changes nothing"
        return replace(part, notes=(*part.notes, note))
    return cast(Part, part)


def read_chat(body: bytes | bytearray) -> ChatRequest:
    """Parse a chat request, and refuse fields that vlfit does not support. Raises ``InvalidRequest``."""
    params = parse_body(ChatRequest, body)
    params.refuse_unsupported()
    return params


def limits_from_now(settings: ServerSettings) -> Callable[[], AbstractContextManager[None]]:
    """``use_limits`` with the server's limits, to be called in the thread that is waited for from now on."""
    began = time.monotonic()
    return lambda: use_limits(settings.decode_limits, time.monotonic() - began)


async def prepare_chat(
    context: ServerContext, params: ChatRequest, sampling: SamplingParams, slots: Slots
) -> Prepared:
    """Fetch the pictures, then decode them and tokenize the prompt in a thread.

    PDF pages and video frames that the context has no room for are left out. ``slots`` are held until the
    thread is done, even if the client disconnects. Raises ``InvalidRequest``, ``PictureError``, and what
    ``Backend.prepare`` raises, such as for a prompt that does not fit the context.
    """
    tools = offered_tools(params)
    conversation = await build_conversation(params, context.settings, context.fetch_threads)
    has_pictures = any(not isinstance(part, TextPart) for message in conversation for part in message.parts)
    threads = context.picture_threads if has_pictures else context.prepare_threads
    backend = context.backend  # not in the thread, which does not know the request's model
    limits = limits_from_now(context.settings)

    def prepare() -> Prepared:
        from vlfit.tasks.files import fit_conversation

        with limits():
            return fit_conversation(
                backend, conversation, lambda fitted: backend.prepare(fitted, sampling, tools), sampling
            )

    return await threads.run_with_slots(slots, prepare)
