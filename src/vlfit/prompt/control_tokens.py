"""Control tokens (``<|im_start|>``, ``<|image_pad|>``) in a user's text stay text; only templates write them.

A name in the text is put between two marker characters that the conversation does not use; after rendering,
what stands between markers is encoded as plain text. The token ids are those of transformers'
``apply_chat_template(..., sanitize_control_tokens=True)``.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, Tool, ToolCall
from vlfit.errors import InvalidRequest
from vlfit.prompt.chat_template import TemplateValue


@dataclass(frozen=True, slots=True)
class Markers:
    """Two characters that a conversation does not use, put around control tokens' names in its text."""

    start: str
    end: str


class ControlTokens:
    """Tells control tokens that the template writes from names in a user's text.

    ``names``: control tokens that the tokenizer may not mark special. ``in_parts``: messages are lists of
    parts, as templates with pictures take them; otherwise each is one text.
    """

    def __init__(self, tokenizer: Tokenizer, names: Iterable[str], *, in_parts: bool = True) -> None:
        self._tokenizer = tokenizer
        self._in_parts = in_parts
        added = tokenizer.get_added_tokens_decoder().values()
        every = {*names, *(token.content for token in added if token.special)}
        # Longest first: a name takes priority over those that it contains.
        self._names = "|".join(map(re.escape, sorted(every, key=len, reverse=True)))

    def mark(
        self, conversation: Conversation, tools: tuple[Tool, ...] = ()
    ) -> tuple[list[TemplateValue], list[TemplateValue], Markers | None]:
        """Messages and tools as a template takes them, with control tokens' names in their text marked."""
        described = [as_template_tool(tool) for tool in tools]
        called = [as_template_calls(message.calls) for message in conversation]
        texts = [_text_of(message) for message in conversation]
        texts.append(json.dumps([described, called], ensure_ascii=False) if tools or any(called) else "")
        markers = None
        if self._names and any(re.search(self._names, text) for text in texts):
            markers = _unused_characters("".join(texts))
        messages = []
        for message, calls in zip(conversation, called, strict=True):
            as_template = (
                self._as_template_message(message)
                if markers is None
                else self._mark_message(message, markers)
            )
            messages.append(as_template | ({"tool_calls": self._marked(calls, markers)} if calls else {}))
        return messages, self._marked(described, markers), markers

    def _marked(self, value: Any, markers: Markers | None) -> Any:
        """``value`` with the names marked in all strings and keys."""
        if markers is None:
            return value
        if isinstance(value, str):
            return re.sub(self._names, lambda found: f"{markers.start}{found[0]}{markers.end}", value)
        if isinstance(value, list):
            return [self._marked(each, markers) for each in value]
        if isinstance(value, dict):
            return {self._marked(key, markers): self._marked(each, markers) for key, each in value.items()}
        return value

    def _mark_message(self, message: Message, markers: Markers) -> TemplateValue:
        """Finds names across parts, because a template may join them."""
        inserts = [
            place
            for match in re.finditer(self._names, _text_of(message))
            for place in ((match.start(), markers.start), (match.end(), markers.end))
        ]
        parts, offset = [], 0
        for part in message.parts:
            if isinstance(part, TextPart):
                end = offset + len(part.text)
                # A start marker goes to the part with a name's first character, an end marker to the last's.
                mine = [
                    (place - offset, marker)
                    for place, marker in inserts
                    if (offset < place <= end if marker == markers.end else offset <= place < end)
                ]
                part, offset = TextPart(_insert(part.text, mine)), end
            parts.append(part)
        return self._as_template_message(replace(message, parts=tuple(parts)))

    def _as_template_message(self, message: Message) -> TemplateValue:
        if not self._in_parts:
            return {"role": message.role, "content": _text_of(message)}
        return _as_template_message(message)

    def unmarked(self, image: str, video: str, markers: Markers | None) -> str:
        """A pattern for the placeholders that the template wrote."""
        before = f"(?<!{re.escape(markers.start)})" if markers else ""
        return f"{before}({re.escape(image)}|{re.escape(video)})"

    def encode(self, rendered: str, markers: Markers | None) -> list[int]:
        """Token ids of the rendered prompt; marked names are encoded as plain text."""
        if markers is None:
            return self._encode(rendered)
        # Alternates text and name; a marker that lost its partner in the template only splits.
        pattern = f"{markers.start}({self._names}){markers.end}|[{markers.start}{markers.end}]"
        pieces = re.split(pattern, rendered)
        ids = self._encode(pieces[0])
        for index, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self._encode_piece(piece, self._encode_plain if index % 2 else self._encode)
        return ids

    def _encode_piece(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encode ``piece`` as mid-prompt: after a line break, so that no space is prepended."""
        line_break = self._encode("\n")
        ids = encode(f"\n{piece}")
        return ids[len(line_break) :] if ids[: len(line_break)] == line_break else encode(piece)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """The tokenizer's steps without matching added tokens."""
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        splits = [text]
        if tokenizer.pre_tokenizer is not None:
            splits = [split for split, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in tokenizer.model.tokenize(split)]


def _text_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))


def _as_template_message(message: Message) -> TemplateValue:
    content: list[dict[str, str]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        else:
            kind = "image" if isinstance(part, ImagePart) else "video"
            content.append({"type": kind, kind: kind})
    return {"role": message.role, "content": content}


def as_template_tool(tool: Tool) -> TemplateValue:
    """A function as chat templates take it."""
    described = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **described, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def as_template_calls(calls: tuple[ToolCall, ...]) -> list[TemplateValue]:
    """Tool calls as chat templates take them."""
    return [
        {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
        for call in calls
    ]


def _arguments(text: str) -> Any:
    """Arguments parsed, as templates serialize them again; as they are if they are not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _insert(text: str, places: list[tuple[int, str]]) -> str:
    pieces, last = [], 0
    for place, marker in places:
        pieces += [text[last:place], marker]
        last = place
    return "".join([*pieces, text[last:]])


def _unused_characters(text: str) -> Markers:
    """Two private-use characters that ``text`` does not use, so that markers cannot be forged."""
    used = set(text)
    unused = [char for char in map(chr, range(0xF0000, 0x10FFFE)) if char not in used][:2]
    if len(unused) < 2:
        raise InvalidRequest(
            "the text uses every private-use character of Unicode and names of control tokens",
            "Leave out one or the other.",
            param="messages",
        )
    return Markers(*unused)
