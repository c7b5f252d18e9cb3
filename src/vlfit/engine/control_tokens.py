"""Keeps what a person writes apart from what only a chat template may write. No torch.

Knows: the names of control tokens (``<|im_start|>``, ``<|image_pad|>``), and how to carry text through a
template so that such a name in it comes out as text. Does not know: templates or pictures.

Text without such names goes through untouched. Where there are some, each is put between two characters
that the conversation does not hold; after rendering, what stands between them is encoded as plain text.
That gives the token ids of transformers' ``apply_chat_template(..., sanitize_control_tokens=True)``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from vlfit.engine.chat_template import TemplateMessage
from vlfit.engine.conversation import Conversation, ImagePart, Message, TextPart
from vlfit.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Markers:
    """Two characters that no text of a conversation holds; a name in it stands between them."""

    start: str
    end: str


class ControlTokens:
    """Tells the control tokens that the template writes from those that a person spells out.

    ``names`` are control tokens even where the tokenizer does not call them special.
    """

    def __init__(self, tokenizer: Tokenizer, names: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        every = {*names, *(token.content for token in added if token.special)}
        # The longest first: a name takes priority over those it contains.
        self._names = "|".join(map(re.escape, sorted(every, key=len, reverse=True)))

    def mark(self, conversation: Conversation) -> tuple[list[TemplateMessage], Markers | None]:
        """The messages as a template wants them, with the control tokens' names in their text marked."""
        texts = [_text_of(message) for message in conversation]
        if not any(re.search(self._names, text) for text in texts):
            return [_as_template_message(message) for message in conversation], None
        markers = _unused_characters("".join(texts))
        return [self._mark_message(message, markers) for message in conversation], markers

    def _mark_message(self, message: Message, markers: Markers) -> TemplateMessage:
        """Names are sought across the parts of a message, because a template may join them."""
        inserts = [
            place
            for match in re.finditer(self._names, _text_of(message))
            for place in ((match.start(), markers.start), (match.end(), markers.end))
        ]
        parts, offset = [], 0
        for part in message.parts:
            if isinstance(part, TextPart):
                end = offset + len(part.text)
                # A start mark belongs to the part with the name's first character, an end mark to the last's.
                mine = [
                    (place - offset, marker)
                    for place, marker in inserts
                    if (offset < place <= end if marker == markers.end else offset <= place < end)
                ]
                part, offset = TextPart(_insert(part.text, mine)), end
            parts.append(part)
        return _as_template_message(replace(message, parts=tuple(parts)))

    def unmarked(self, image: str, video: str, markers: Markers | None) -> str:
        """A pattern for the placeholders that the template wrote."""
        before = f"(?<!{re.escape(markers.start)})" if markers else ""
        return f"{before}({re.escape(image)}|{re.escape(video)})"

    def encode(self, rendered: str, markers: Markers | None) -> list[int]:
        """Token ids of the rendered prompt; marked names are encoded as plain text."""
        if markers is None:
            ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False).ids
            return ids
        # Gives text, name, text, name, ..., text; a mark that lost its partner in the template only splits.
        pattern = f"{markers.start}({self._names}){markers.end}|[{markers.start}{markers.end}]"
        ids = []
        for index, piece in enumerate(re.split(pattern, rendered)):
            if piece and index % 2:
                ids.extend(self._encode_plain(piece))
            elif piece:
                ids.extend(self._tokenizer.encode(piece, add_special_tokens=False).ids)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """The tokenizer's steps without the one that looks for added tokens."""
        splits: list[tuple[str, tuple[int, int]]] = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for split, _ in splits for token in self._tokenizer.model.tokenize(split)]


def _text_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))


def _as_template_message(message: Message) -> TemplateMessage:
    content: list[dict[str, str]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        else:
            kind = "image" if isinstance(part, ImagePart) else "video"
            content.append({"type": kind, kind: kind})
    return {"role": message.role, "content": content}


def _insert(text: str, places: list[tuple[int, str]]) -> str:
    pieces, last = [], 0
    for place, marker in places:
        pieces += [text[last:place], marker]
        last = place
    return "".join([*pieces, text[last:]])


def _unused_characters(text: str) -> Markers:
    """Two private-use characters that ``text`` does not hold: nobody can forge a mark."""
    used = set(text)
    unused = [char for char in map(chr, range(0xF0000, 0x10FFFE)) if char not in used][:2]
    if len(unused) < 2:
        raise InvalidRequest(
            "the text holds every private-use character of Unicode and names of control tokens",
            "Leave out one or the other.",
            param="messages",
        )
    return Markers(*unused)
