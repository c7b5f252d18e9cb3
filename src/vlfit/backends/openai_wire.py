"""OpenAI's chat completions as bytes on the wire, seen from the client: requests written, replies read.

Knows: field names, data URLs, server-sent events, what an error code means. Does not know: connections.
"""

import base64
import json
import math
import re
import time
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from vlfit.engine.answer import FinishReason, ImageSeen, TokenLogprob, Usage
from vlfit.engine.conversation import Conversation, ImagePart, Message, Part, TextPart, VideoPart
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import (
    CannotWake,
    DoesNotFit,
    EngineStopped,
    InvalidRequest,
    PictureError,
    QueueFull,
    RemoteError,
    UnknownModel,
    VlfitError,
    WrongApiKey,
)

# What OpenAI's own servers lack: they refuse a field they do not know, so it is sent only if it does
# something.
_BEYOND_OPENAI: dict[str, object] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": (),
    "ignore_eos": False,
    "loop_guard": False,
}
_SIGNATURES = (
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"BM"), "image/bmp"),
    (re.compile(rb"II\*\0|MM\0\*"), "image/tiff"),
    (re.compile(rb"....ftypavi[fs]", re.DOTALL), "image/avif"),
)
_KEY_HINT = "set VLFIT_API_KEY to the server's key; in Python, give Client its api_key"
_ERRORS: dict[str, type[VlfitError]] = {
    each.code: each
    for each in (
        CannotWake,
        DoesNotFit,
        EngineStopped,
        InvalidRequest,
        PictureError,
        QueueFull,
        UnknownModel,
        WrongApiKey,
    )
}


def chat_body(
    conversation: Conversation, sampling: SamplingParams, model: str, *, vlfit_server: bool
) -> dict[str, Any]:
    """The body of a streaming request.

    A vlfit server is told every wish, so that none of its own defaults fills a gap. Raises
    ``InvalidRequest`` for a clip sent to another server: OpenAI has no such part.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message, vlfit_server) for message in conversation],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    for name, neutral in _BEYOND_OPENAI.items():
        value = getattr(sampling, name)
        if vlfit_server or value != neutral:
            body[name] = value
    if sampling.max_tokens is not None:
        body["max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": sampling.top_logprobs}
    return body


def _message(message: Message, vlfit_server: bool) -> dict[str, Any]:
    if all(isinstance(part, TextPart) for part in message.parts) and len(message.parts) == 1:
        return {"role": message.role, "content": _part(message.parts[0], vlfit_server)["text"]}
    return {"role": message.role, "content": [_part(part, vlfit_server) for part in message.parts]}


def _part(part: Part, vlfit_server: bool) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        detail = {} if part.detail == "auto" else {"detail": part.detail}
        return {"type": "image_url", "image_url": {"url": data_url(part.data), **detail}}
    if isinstance(part, VideoPart) and not vlfit_server:
        raise InvalidRequest(
            "a clip can be sent to vlfit servers only", "send its frames as pictures", param="messages"
        )
    return {"type": "video", "frames": [data_url(frame) for frame in part.frames], "fps": part.fps}


def data_url(data: bytes) -> str:
    """``data``, an encoded picture, as a ``data:`` URL. What is in it shows in its first bytes."""
    mime = next(
        (mime for signature, mime in _SIGNATURES if signature.match(data)), "application/octet-stream"
    )
    return f"data:{mime};base64,{base64.b64encode(data).decode('ascii')}"


def read_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of server-sent events, until ``[DONE]``.

    Raises the error that an event tells of, and ``RemoteError`` if the stream ends before ``[DONE]``.
    """
    for line in lines:
        if not line.startswith("data:"):
            continue  # a comment, a blank line, or a field that this protocol does not use
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = _object(data)
        if event is None:
            raise RemoteError(f"the server sent an event that is no JSON object: {data[:80]!r}")
        if event.get("error"):
            raise error_from(200, data)
        yield event
    raise RemoteError("the connection broke off before the answer was whole", "look at the server's log")


def error_from(status: int, text: str) -> VlfitError:
    """The error that a reply with ``status`` and body ``text`` stands for."""
    body = _object(text) or {}
    error = body.get("error")
    details: dict[str, Any] = error if isinstance(error, dict) else body
    told = details.get("message") or details.get("detail") or text.strip()[:200] or "nothing more"
    message, code, param = str(told), str(details.get("code")), details.get("param")
    kind = _ERRORS.get(code)
    if kind is None and status == 404 and "model" in message.lower() and "exist" in message.lower():
        kind = UnknownModel  # as vLLM and Ollama put it
    if kind is None and status in (401, 403):
        kind = WrongApiKey
    if kind is not None:
        hint = _KEY_HINT if kind is WrongApiKey else ""
        return kind(message, hint, param=param if isinstance(param, str) else None)
    about = f"the server answered {status}" if status != 200 else "the server failed"
    return RemoteError(f"{about}: {message}", _hint(status), status=status)


def _hint(status: int) -> str:
    if status in (404, 405):
        return "is the URL that of an OpenAI API? vlfit adds /v1 if it is not there"
    return "look at the server's log" if status >= 500 or status == 200 else ""


def retry_after(value: str | None) -> float | None:
    """Seconds that the header ``Retry-After`` asks to wait, a number or a date; None if it does not."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def read_usage(event: dict[str, Any]) -> Usage | None:
    """``usage`` of an event, if it has one."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        usage.get("prompt_tokens", 0),
        details.get("image_tokens") or 0,
        usage.get("completion_tokens", 0),
        details.get("cached_tokens") or 0,
    )


def read_images(extras: dict[str, Any]) -> tuple[ImageSeen, ...]:
    """``vlfit.images`` of an event; fields that a newer server may add are left out."""
    return tuple(
        ImageSeen(
            image["width"],
            image["height"],
            image["seen_width"],
            image["seen_height"],
            image["tokens"],
            image.get("frames", 1),
            tuple(image.get("notes", ())),
        )
        for image in extras.get("images", ())
    )


def read_logprobs(choice: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    """The logprobs of a choice. OpenAI does not tell token ids: they are -1 then."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    return tuple(
        _logprob(each, tuple(_logprob(top) for top in each.get("top_logprobs", ()))) for each in content
    )


def _logprob(told: dict[str, Any], top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(told["token"], told.get("token_id", -1), told["logprob"], top)


def read_finish(choice: dict[str, Any], extras: dict[str, Any]) -> FinishReason | None:
    """Why a choice ended. A vlfit server says it in full; of others, all but ``length`` is ``stop``."""
    told = (extras.get("finish_reasons") or [None])[0] or choice.get("finish_reason")
    if told is None or told in ("stop", "length", "loop"):
        return told
    return "stop"


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
