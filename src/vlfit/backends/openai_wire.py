"""Bodies of requests to an OpenAI server.

A body is encoded in two parts, each the members of a JSON object without its braces: messages or prompt once
(pictures are large), and all else for each completion: ``b"{" + prompt_part + b"," + other_part + b"}"``.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, Literal

from vlfit.api.conversation import Conversation, ImagePart, Message, Part, TextPart, Tool, VideoPart
from vlfit.api.sampling_params import SPACING, Grammar, SamplingParams
from vlfit.errors import InvalidRequest, PictureError
from vlfit.images.file_kinds import DECODED_EVERYWHERE, kind_of
from vlfit.images.spooled_file import EncodedFile

ServerKind = Literal["vlfit", "vllm", "other"]
"""What runs behind a URL, as far as requests to it differ."""

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


def encode_chat_fields(conversation: Conversation, tools: tuple[Tool, ...], server: ServerKind) -> bytes:
    """Encode ``messages`` and ``tools`` of a ``/v1/chat/completions`` body: JSON members without braces.

    ``encode_generation_fields`` encodes the rest of the body. Pictures are decoded to check them, and
    converted if the server might decode them differently. Raises ``PictureError``; ``InvalidRequest`` for no
    messages, or for a video clip if the server is not vlfit's, as OpenAI has no such content part.
    """
    if not conversation:
        raise InvalidRequest("there are no messages", "send at least one", param="messages")
    call_ids = _CallIds()
    fields: dict[str, Any] = {"messages": [_message(each, server, call_ids) for each in conversation]}
    if tools:
        fields["tools"] = [_tool(tool) for tool in tools]
    return _json_fields(fields, "messages")


def encode_prompt_field(prompt: str | tuple[int, ...]) -> bytes:
    """Encode ``prompt``, text or token ids, of a ``/v1/completions`` body: a JSON member without braces.

    ``encode_generation_fields`` encodes the rest of the body. Raises ``InvalidRequest`` if ``prompt`` is
    empty.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty", "send some text", param="prompt")
    return _json_fields({"prompt": prompt}, "prompt")


def encode_generation_fields(
    sampling: SamplingParams, model: str, server: ServerKind, *, chat: bool, llguidance: bool = False
) -> bytes:
    """Encode what a body has besides messages, tools or prompt: JSON members without braces.

    These are the model, streaming (always on), sampling parameters and structured output. ``chat``: for
    ``/v1/chat/completions``, else for ``/v1/completions``. ``llguidance``: as in ``grammar_fields``.

    A vlfit server gets every sampling parameter, so that it fills in no default of its own; other servers get
    those that OpenAI lacks only if they have an effect. Raises ``InvalidRequest`` for ``loop_guard`` or a
    grammar that the server does not take.
    """
    if sampling.loop_guard and server != "vlfit":
        raise InvalidRequest(
            "loop_guard is set, and only vlfit servers have it", "leave it out", param="loop_guard"
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
    if chat and sampling.template_variables is not None:
        body["chat_template_kwargs"] = json.loads(sampling.template_variables)
    return _json_fields(body | grammar_fields(sampling.grammar, server, llguidance=llguidance), "stop")


def grammar_fields(
    grammar: Grammar | None, server: ServerKind, *, llguidance: bool = False
) -> dict[str, Any]:
    """Request fields for structured output; {} without a grammar.

    ``llguidance``: the server is a vLLM that takes llguidance grammars, as the native engine does.

    JSON schemas, and grammars that a client set, are always sent. A grammar that a task set
    (``grammar.place`` is None) is optional, as tasks parse answers leniently: JSON in a code fence, as
    Qwen3-VL was trained to write it, or bare. It is left out ({}) for servers that can only enforce bare
    JSON, which makes small models answer worse (docs/backends.md). Raises ``InvalidRequest`` for a grammar
    that the server cannot take.
    """
    if grammar is None:
        return {}
    if grammar.kind == "json":
        schema = json.loads(grammar.text)
        if llguidance:
            return _grammar("%llguidance {}\nstart: %json " + json.dumps({**schema, "x-guidance": SPACING}))
        named = {"name": "answer", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if llguidance and (grammar.place is None or _is_fenced(grammar)):
        return _grammar(grammar.text)
    if grammar.wire is None:
        raise InvalidRequest("this server takes no grammars", "use a JSON schema", param=grammar.place)
    if server == "vlfit":
        return dict(grammar.wire)
    return {} if grammar.place is None else _without_fenced(grammar.wire)


def _is_fenced(grammar: Grammar) -> bool:
    """Whether a request asked for JSON that may stand in a code fence."""
    schema = dict(grammar.wire or {}).get("response_format", {}).get("json_schema", {})
    return grammar.place == "response_format" and bool(schema.get("fenced"))


def _grammar(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": text}}


def _without_fenced(wire: Mapping[str, Any]) -> dict[str, Any]:
    """Without vlfit's field ``fenced``: the schema then asks for bare JSON."""
    fields = dict(wire)
    schema = fields.get("response_format", {}).get("json_schema")
    if schema is not None:
        kept = {name: value for name, value in schema.items() if name != "fenced"}
        fields["response_format"] = {**fields["response_format"], "json_schema": kept}
    return fields


def data_url(data: bytes) -> str:
    """The ``data:`` URL of an encoded picture, with the type that its first bytes show.

    Unknown types: ``application/octet-stream``.
    """
    mime = next(
        (mime for signature, mime in _SIGNATURES if signature.match(data)), "application/octet-stream"
    )
    return f"data:{mime};base64,{base64.b64encode(data).decode('ascii')}"


class _CallIds:
    """Ids for tool calls, which a conversation lacks; results get them in the order of the calls."""

    def __init__(self) -> None:
        self._next = count(1)
        self._open: list[str] = []

    def of_calls(self, calls: int) -> list[str]:
        self._open = [f"call_{next(self._next)}" for _ in range(calls)]
        return list(self._open)

    def of_result(self) -> str:
        return self._open.pop(0) if self._open else f"call_{next(self._next)}"


def _message(message: Message, server: ServerKind, call_ids: _CallIds) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role}
    if len(message.parts) == 1 and isinstance(message.parts[0], TextPart):
        fields["content"] = message.parts[0].text
    else:
        fields["content"] = [_part(part, server) for part in message.parts]
    if message.reasoning and server != "other":
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["content"] = fields["content"] or None
        fields["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(call_ids.of_calls(len(message.calls)), message.calls, strict=True)
        ]
    if message.role == "tool":
        fields["tool_call_id"] = call_ids.of_result()
    return fields


def _part(part: Part, server: ServerKind) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        detail = {} if part.detail == "auto" else {"detail": part.detail}
        sent = _encoded_for(part.data, part.label, part.place, server)
        return {"type": "image_url", "image_url": {"url": data_url(sent), **detail}}
    if server != "vlfit":
        raise InvalidRequest(
            "only vlfit servers take video clips", "send the frames as pictures", param="messages"
        )
    return {"type": "video", "frames": [data_url(frame) for frame in _frames(part)], "fps": part.fps}


def _frames(part: VideoPart) -> Iterator[bytes]:
    for index, frame in enumerate(part.frames):
        place = None if part.place is None else f"{part.place}[{index}]"
        yield _encoded_for(frame, f"{part.label} frame {index + 1}", place, "vlfit")


def _encoded_for(file: EncodedFile, label: str, place: str | None, server: ServerKind) -> bytes:
    """The picture's file, or a new file if the server might decode it differently.

    The new one is upright, on white, in 8 bits: other servers may ignore the orientation (boxes would be
    rotated), and treat transparency and more than 8 bits in their own ways. vlfit servers may not take all
    formats.
    """
    from vlfit.images.decode_pool import decode_pool

    pool = decode_pool()
    data = bytes(file)  # it is sent as one text
    try:
        is_plain = pool.is_plain(data, label)
        if is_plain or (server == "vlfit" and kind_of(data) in DECODED_EVERYWHERE):
            return data
        if data.startswith(b"\xff\xd8\xff"):
            return pool.encode(data, label, "JPEG", quality=95, subsampling=0)
        return pool.encode(data, label, "PNG", compress_level=1)
    except PictureError as error:
        error.param = error.param or place
        raise


def _tool(tool: Tool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": fields | ({"strict": True} if tool.strict else {})}


def _json_fields(fields: dict[str, Any], param: str) -> bytes:
    """``fields`` as JSON without the braces."""
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))[1:-1].encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "the text contains an unpaired surrogate",
            "send whole Unicode characters: JSON escapes those beyond U+FFFF as a pair",
            param=param,
        ) from None
