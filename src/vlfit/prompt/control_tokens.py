"""Control tokens (``<|im_start|>``, ``</tool_call>``) in a user's text stay text; only templates write them.

A name in the text is put between two marker characters that the conversation does not use; after rendering,
what stands between markers is encoded as plain text. The token ids are those of transformers'
``apply_chat_template(..., sanitize_control_tokens=True)``, with two differences: more names count as control
tokens (``control_token_names``), and an assistant's message keeps the tags that models write themselves.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from tokenizers import Tokenizer

from vlfit.api.conversation import Conversation, ImagePart, Message, Role, TextPart, Tool, ToolCall
from vlfit.errors import InvalidRequest
from vlfit.prompt.chat_template import TemplateValue
from vlfit.prompt.tokenizer import token_ids

# Frames that many vocabularies have as tokens without calling them special. The first: what models write
# themselves, between their own words.
_MODEL_TAG = re.compile(r"</?(?:\w+:)?(?:tool_calls?|function_calls?|think|thinking|thought|reasoning)>")
_FRAME_TAG = re.compile(
    r"</?(?:\w+:)?(?:tools|tool_(?:response|result|output)s?|function_(?:result|output)s?)>"
)
_BARRED = re.compile(r"<[|\uff5c][^<>]+[|\uff5c]>")  # <|fim_prefix|>; the second bar is DeepSeek's


class AddedToken(Protocol):
    """``AddedToken`` of ``tokenizers`` or ``transformers``: a token beside the trained vocabulary."""

    @property
    def content(self) -> str:
        """The token's text."""
        ...

    @property
    def special(self) -> bool:
        """Whether the tokenizer marks it as special, so that decoding can skip it."""
        ...


def control_token_names(added: Iterable[AddedToken], template_text: str) -> frozenset[str]:
    """Texts of those ``added`` tokens that are control tokens, which only the chat template may write.

    These are special tokens, tokens that occur in ``template_text`` (``ChatTemplate.literals``), names in
    bars (``<|fim_prefix|>``), and tags around tools and thoughts. Other added tokens are ordinary text (Gemma
    has HTML tags).
    """
    return frozenset(
        token.content
        for token in added
        if token.special
        or (token.content.strip() and token.content in template_text)
        or _BARRED.fullmatch(token.content)
        or _FRAME_TAG.fullmatch(token.content)
        or is_model_tag(token.content)
    )


def is_model_tag(name: str) -> bool:
    """Whether ``name`` is a tag that models write around thoughts and tool calls, such as ``</think>``.

    ``ControlTokens.mark`` leaves such tags unmarked in an assistant's message: an earlier answer must become
    the tokens that were generated, and templates look for ``</think>`` to leave out earlier thoughts.
    """
    return _MODEL_TAG.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Markers:
    """Characters before and after each name of a control token in a conversation's text.

    Both are private-use characters that occur nowhere in the conversation.
    """

    start: str
    end: str


class ControlTokens:
    """Encodes control tokens that the template writes, and the same names in a user's text as plain text.

    ``mark`` a conversation, render it with its template, then ``encode`` the result with the same markers.
    ``names``: texts of the control tokens (``control_token_names``). ``in_parts``: whether the template takes
    a message as a list of parts, as for pictures, or as one text.
    """

    def __init__(self, tokenizer: Tokenizer, names: Iterable[str], *, in_parts: bool = True) -> None:
        self._tokenizer = tokenizer
        self._in_parts = in_parts
        every = frozenset(names)
        self._names = any_of(every)
        self._assistant_names = any_of(name for name in every if not is_model_tag(name))

    def mark(
        self, conversation: Conversation, tools: tuple[Tool, ...] = ()
    ) -> tuple[list[TemplateValue], list[TemplateValue], Markers | None]:
        """Mark the names of control tokens in the text of messages, tool calls and tools.

        Returns messages and tools as a template takes them, and the markers for ``encode``; None if no text
        has such a name, so that nothing is marked. In an assistant's message ``is_model_tag`` names are not
        marked. Raises ``InvalidRequest`` if the text uses all private-use characters.
        """
        described = [as_template_tool(tool) for tool in tools]
        called = [as_template_calls(message.calls) for message in conversation]
        texts = [(_text_of(message), self._names_in(message.role)) for message in conversation]
        # Thoughts hold no tag of the model's own: one would end them.
        texts += [(message.reasoning, self._names) for message in conversation if message.reasoning]
        if tools or any(called):
            texts.append((json.dumps([described, called], ensure_ascii=False), self._names))
        markers = None
        if any(names.search(text) for text, names in texts):
            markers = _unused_characters("".join(text for text, _ in texts))
        messages = []
        for message, calls in zip(conversation, called, strict=True):
            as_template = (
                self._as_template_message(message)
                if markers is None
                else self._mark_message(message, markers)
            )
            if message.reasoning:
                as_template["reasoning_content"] = self._marked(message.reasoning, markers)
            messages.append(as_template | ({"tool_calls": self._marked(calls, markers)} if calls else {}))
        return messages, self._marked(described, markers), markers

    def first_name_in(self, text: str) -> str | None:
        """The first name of a control token in ``text``; None if there is none."""
        found = self._names.search(text)
        return found[0] if found else None

    def _names_in(self, role: Role) -> re.Pattern[str]:
        """The names that are text in a message of ``role``."""
        return self._assistant_names if role == "assistant" else self._names

    def _marked(self, value: Any, markers: Markers | None) -> Any:
        """``value`` with the names marked in all strings and keys."""
        if markers is None:
            return value
        if isinstance(value, str):
            return self._names.sub(lambda match: f"{markers.start}{match[0]}{markers.end}", value)
        if isinstance(value, list):
            return [self._marked(each, markers) for each in value]
        if isinstance(value, dict):
            return {self._marked(key, markers): self._marked(each, markers) for key, each in value.items()}
        return value

    def _mark_message(self, message: Message, markers: Markers) -> TemplateValue:
        """Mark names in ``message``, also across parts, because a template may join them."""
        inserts = [
            index
            for match in self._names_in(message.role).finditer(_text_of(message))
            for index in ((match.start(), markers.start), (match.end(), markers.end))
        ]
        parts, offset = [], 0
        for part in message.parts:
            if isinstance(part, TextPart):
                end = offset + len(part.text)
                # A start marker goes to the part with a name's first character, an end marker to the last's.
                mine = [
                    (index - offset, marker)
                    for index, marker in inserts
                    if (offset < index <= end if marker == markers.end else offset <= index < end)
                ]
                part, offset = TextPart(_insert(part.text, mine)), end
            parts.append(part)
        return self._as_template_message(replace(message, parts=tuple(parts)))

    def _as_template_message(self, message: Message) -> TemplateValue:
        if not self._in_parts:
            return {"role": message.role, "content": _text_of(message)}
        return _as_template_message(message)

    def placeholder_pattern(self, image: str, video: str, markers: Markers | None) -> str:
        """Regular expression for the texts ``image`` and ``video`` in a rendered prompt, except marked ones.

        It has one group, the text. ``markers``: as ``mark`` returned them; None: nothing is marked.
        """
        before = f"(?<!{re.escape(markers.start)})" if markers else ""
        return f"{before}({re.escape(image)}|{re.escape(video)})"

    def encode(self, rendered: str, markers: Markers | None) -> list[int]:
        """Token ids of a ``rendered`` prompt: marked names become plain text, markers are removed.

        ``markers``: as ``mark`` returned them. None: nothing is marked, so all names become control tokens.
        """
        if markers is None:
            return self._encode(rendered)
        # Alternates text and name; a marker that lost its partner in the template only splits.
        pattern = f"{markers.start}({self._names.pattern}){markers.end}|[{markers.start}{markers.end}]"
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
        return token_ids(self._tokenizer, text, add_special_tokens=False)

    def _encode_plain(self, text: str) -> list[int]:
        return encode_plain(self._tokenizer, text)


def encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of ``text``, in which names of added tokens are text: the tokenizer's steps without those."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    splits = [text]
    if tokenizer.pre_tokenizer is not None:
        splits = [split for split, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for split in splits for token in tokenizer.model.tokenize(split)]


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any of ``names``, longest first: a name takes priority over those that it contains."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


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
    """``tool`` as chat templates take it: ``{"type": "function", "function": {"name": ..., ...}}``."""
    described = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **described, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def as_template_calls(calls: tuple[ToolCall, ...]) -> list[TemplateValue]:
    """``calls`` as chat templates take them: ``{"type": "function", "function": {"name": ..., ...}}`` each.

    Arguments are parsed, or left as text if they are not JSON or nested too deeply.
    """
    return [
        {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
        for call in calls
    ]


_MAX_LEVELS = 100  # of arguments; Python's stack has room for ten times as many, shared with the template


def _arguments(text: str) -> Any:
    """Arguments parsed, as templates serialize them again; ``text`` itself if it is not JSON or too deep.

    Blank text is a call without arguments.
    """
    if not text.strip():
        return {}
    level = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        level += 1 if bracket in "[{" else -1
        if level > _MAX_LEVELS:
            return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _insert(text: str, inserts: list[tuple[int, str]]) -> str:
    pieces, last = [], 0
    for index, marker in inserts:
        pieces += [text[last:index], marker]
        last = index
    return "".join([*pieces, text[last:]])


def _unused_characters(text: str) -> Markers:
    """Two private-use characters that ``text`` does not use, so that markers cannot be forged."""
    used = set(text)
    unused = list(islice((char for char in map(chr, range(0xF0000, 0x10FFFE)) if char not in used), 2))
    if len(unused) < 2:
        raise InvalidRequest(
            "the text uses every private-use character of Unicode and names of control tokens",
            "Leave out one or the other.",
            param="messages",
        )
    return Markers(*unused)
