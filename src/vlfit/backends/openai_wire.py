"""OpenAI's chat completions as bytes on the wire, seen from the client: how requests are written.

Knows: field names, data URLs, how calls of tools are numbered, and what servers of another kind than ours
lack. Does not know: connections, nor replies (``openai_replies.py``).
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from io import BytesIO
from itertools import count
from typing import Any, Literal

from vlfit.api.conversation import Conversation, ImagePart, Message, Part, TextPart, Tool, VideoPart
from vlfit.api.sampling_params import SPACING, Form, SamplingParams
from vlfit.errors import InvalidRequest, PictureError

Server = Literal["vlfit", "vllm", "other"]
"""Who runs behind the URL, by its own words: only as far as requests differ."""

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


def chat_fields(conversation: Conversation, tools: tuple[Tool, ...], server: Server) -> bytes:
    """What a chat says, as the first fields of a JSON object, without its braces: ``sampling_fields`` follow.

    Pictures are checked before they are sent, as if they were to be seen here. Raises ``PictureError``, and
    ``InvalidRequest`` for a clip that goes to another server than ours: OpenAI has no such part.
    """
    if not conversation:
        raise InvalidRequest("there are no messages", "Send at least one.", param="messages")
    numbers = _Numbers()
    fields: dict[str, Any] = {"messages": [_message(each, server, numbers) for each in conversation]}
    if tools:
        fields["tools"] = [_tool(tool) for tool in tools]
    return _written(fields, "messages")


def text_fields(prompt: str | tuple[int, ...]) -> bytes:
    """The same for text, or token ids, that the model goes on with: for ``/v1/completions``."""
    if not prompt:
        raise InvalidRequest("the prompt is empty", "send some text", param="prompt")
    return _written({"prompt": prompt}, "prompt")


def sampling_fields(
    sampling: SamplingParams, model: str, server: Server, *, chat: bool, grammars: bool = False
) -> bytes:
    """The rest of the object: the model, how words are chosen, and that they are to come one by one.

    A vlfit server is told every wish, so that none of its own defaults fills a gap. Raises ``InvalidRequest``
    for wishes that no such server can carry out. ``grammars``: see ``form_fields``.
    """
    if sampling.loop_guard and server != "vlfit":
        raise InvalidRequest(
            "loop_guard was asked for, and only vlfit servers have it", "leave it out", param="loop_guard"
        )
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    for name, neutral in _BEYOND_OPENAI.items():
        value = getattr(sampling, name)
        if server == "vlfit" or value != neutral:
            body[name] = value
    if sampling.max_tokens is not None:
        body["max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.top_logprobs is not None:
        chosen = {"logprobs": True, "top_logprobs": sampling.top_logprobs}
        body |= chosen if chat else {"logprobs": sampling.top_logprobs}
    return _written(body | form_fields(sampling.form, server, grammars=grammars), "stop")


def form_fields(form: Form | None, server: Server, *, grammars: bool = False) -> dict[str, Any]:
    """How a server is asked to keep to ``form``. ``grammars``: it is a vLLM that follows them by llguidance,
    as our engine does, and so keeps to the very same form.

    What a request asked for itself is always passed on. The form of a task is a help, as its answer is read
    with patience: JSON between fences, as Qwen3-VL was taught to write it, or bare. A server that knows bare
    JSON alone is not told of it: held to that, a small model no longer knows what it sees (docs/backends.md).
    """
    if form is None:
        return {}
    if form.kind == "json":
        schema = json.loads(form.text)
        if grammars:
            return _grammar("%llguidance {}\nstart: %json " + json.dumps({**schema, "x-guidance": SPACING}))
        named = {"name": "answer", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if grammars and (form.place is None or _is_fenced(form)):
        return _grammar(form.text)
    if form.wire is None:
        raise InvalidRequest("a grammar cannot be sent to a server", "use a JSON schema", param=form.place)
    if server == "vlfit":
        return dict(form.wire)
    return {} if form.place is None else _as_openai_has_it(form.wire)


def _is_fenced(form: Form) -> bool:
    """Whether a request asked for JSON that may stand between fences; what it says of calls goes as it is."""
    named = dict(form.wire or {}).get("response_format", {}).get("json_schema", {})
    return form.place == "response_format" and bool(named.get("fenced"))


def _grammar(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": text}}


def _as_openai_has_it(wire: Mapping[str, Any]) -> dict[str, Any]:
    """``fenced`` is a word of ours; without it a schema asks for bare JSON."""
    told = dict(wire)
    named = told.get("response_format", {}).get("json_schema")
    if named is not None:
        kept = {name: value for name, value in named.items() if name != "fenced"}
        told["response_format"] = {**told["response_format"], "json_schema": kept}
    return told


def data_url(data: bytes) -> str:
    """``data``, an encoded picture, as a ``data:`` URL. What is in it shows in its first bytes."""
    mime = next(
        (mime for signature, mime in _SIGNATURES if signature.match(data)), "application/octet-stream"
    )
    return f"data:{mime};base64,{base64.b64encode(data).decode('ascii')}"


class _Numbers:
    """Ids for calls of tools, which a conversation has none of: what tools gave comes in the calls' order."""

    def __init__(self) -> None:
        self._next = count(1)
        self._open: list[str] = []

    def of_calls(self, calls: int) -> list[str]:
        self._open = [f"call_{next(self._next)}" for _ in range(calls)]
        return list(self._open)

    def of_result(self) -> str:
        return self._open.pop(0) if self._open else f"call_{next(self._next)}"


def _message(message: Message, server: Server, numbers: _Numbers) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role}
    if len(message.parts) == 1 and isinstance(message.parts[0], TextPart):
        told["content"] = message.parts[0].text
    else:
        told["content"] = [_part(part, server) for part in message.parts]
    if message.calls:
        told["content"] = told["content"] or None
        told["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(numbers.of_calls(len(message.calls)), message.calls, strict=True)
        ]
    if message.role == "tool":
        told["tool_call_id"] = numbers.of_result()
    return told


def _part(part: Part, server: Server) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        detail = {} if part.detail == "auto" else {"detail": part.detail}
        sent = _checked(part.data, part.label, part.place, server)
        return {"type": "image_url", "image_url": {"url": data_url(sent), **detail}}
    if server != "vlfit":
        raise InvalidRequest(
            "a clip can be sent to vlfit servers only", "send its frames as pictures", param="messages"
        )
    return {"type": "video", "frames": [data_url(frame) for frame in _frames(part)], "fps": part.fps}


def _frames(part: VideoPart) -> Iterator[bytes]:
    for index, frame in enumerate(part.frames):
        place = None if part.place is None else f"{part.place}[{index}]"
        yield _checked(frame, f"{part.label} frame {index + 1}", place, "vlfit")


def _checked(data: bytes, label: str, place: str | None, server: Server) -> bytes:
    """What is sent of a picture: its file as it is, where the server shows it as we do.

    Else it is drawn anew: turned upright, on white, in 8 bits. Boxes would be those of a picture that lies on
    its side; and what is behind glass, or brighter than 8 bits say, each server shows in its own way.
    """
    # Pillow is wanted only once the first picture comes.
    from vlfit.images.decode import check, decode

    try:
        if check(data, label) or server == "vlfit":
            return data
        image = decode(data, label).image
    except PictureError as error:
        error.param = error.param or place
        raise
    file = BytesIO()
    if data.startswith(b"\xff\xd8\xff"):
        image.save(file, "JPEG", quality=95, subsampling=0)
    else:
        image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _tool(tool: Tool) -> dict[str, Any]:
    told: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": told | ({"strict": True} if tool.strict else {})}


def _written(fields: dict[str, Any], param: str) -> bytes:
    """The fields of an object in JSON, without its braces."""
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))[1:-1].encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "the text holds half a character",
            "Send whole Unicode characters: JSON writes one beyond U+FFFF as a pair of escapes.",
            param=param,
        ) from None
