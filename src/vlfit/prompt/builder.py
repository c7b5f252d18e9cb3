"""From a conversation to token ids and prepared pictures, as the checkpoint's own chat template has it.

Knows: the order of the steps, and what a model without eyes or without a template does. Does not know:
where pictures stand (``models/qwen3_vl/prompt.py``), tensors, the model, or what a request may cost
(``engine/scheduling/scheduler.py`` judges that).

The reference is transformers' ``apply_chat_template(..., tokenize=True)``. Names of control
tokens in a person's text are read as text (``prompt/control_tokens.py``): otherwise a question could forge
a turn, or take a picture's place.
"""

import json
import logging
import unicodedata
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vlfit.api.conversation import Conversation, TextPart, Tool
from vlfit.api.outputs import ImageSeen
from vlfit.checkpoint.config import ModelConfig, no_eyes
from vlfit.checkpoint.processor_files import ImageProcessing, read_chat_template
from vlfit.errors import DoesNotFit, InvalidRequest, MissingFile
from vlfit.models.qwen3_vl.image_processor import PreparedImage, smart_resize
from vlfit.models.qwen3_vl.prompt import PicturePlaces
from vlfit.prompt.chat_template import ChatTemplate
from vlfit.prompt.control_tokens import ControlTokens
from vlfit.prompt.tokenizer import Spelling, read_tokenizer, special_tokens

logger = logging.getLogger(__name__)

# For models without a template: the text of all messages, a line after the other.
_PLAIN = "{% for message in messages %}{{ message.content }}{{ '' if loop.last else '\\n' }}{% endfor %}"
# Most text that is worth measuring exactly: no vocabulary has longer tokens on average.
_BYTES_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine runs. ``images`` stand in the order in which they appear.

    The k-th placeholder in ``token_ids`` (of a picture or a clip) takes the k-th row of all images' features,
    concatenated in order. ``image_tokens`` of the tokens are placeholders.
    """

    token_ids: tuple[int, ...]
    images: tuple[PreparedImage, ...]
    image_tokens: int

    @property
    def seen(self) -> tuple[ImageSeen, ...]:
        """How the model saw each picture."""
        return tuple(image.seen for image in self.images)


class PromptBuilder:
    """Reads the small files of a checkpoint once; ``build`` may then be called from any thread.

    Raises ``CheckpointError`` (``MissingFile`` among them) for a tokenizer, template or picture settings
    that are missing or that vlfit does not read.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.tokenizer = read_tokenizer(folder)
        self._spelling = Spelling.of(self.tokenizer)
        self._eyes = PicturePlaces(folder, config, self.tokenizer) if config.vision else None
        self._placeholders = {config.image_token_id, config.video_token_id}
        self._begin: list[int] = []  # what a text begins with that no template begins
        self._template = ChatTemplate(self._read_template(folder), special_tokens(folder))
        names = self._eyes.names if self._eyes else self._written_by_the_template()
        self._control = ControlTokens(self.tokenizer, names, in_parts=self._eyes is not None)

    def _read_template(self, folder: Path) -> str:
        """A text-only model that was never taught to chat has none, which is said."""
        try:
            return read_chat_template(folder)
        except MissingFile:
            if self._eyes is not None:
                raise
        logger.warning(
            "%s has no chat template: it goes on with the text that it is sent, and need not answer", folder
        )
        self._begin = self.tokenizer.encode("", add_special_tokens=True).ids
        return _PLAIN

    def _written_by_the_template(self) -> tuple[str, ...]:
        """Added tokens that are not called special, but that the template writes."""
        added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
        return tuple(name for name in added if name.strip() and name in self._template.literals)

    def build(
        self,
        conversation: Conversation,
        max_image_tokens: int | None = None,
        context: int | None = None,
        tools: tuple[Tool, ...] = (),
    ) -> Prompt:
        """Render and tokenize ``conversation`` up to where the model is to speak.

        ``tools`` are told of first. ``max_image_tokens`` caps each picture (and each pair of frames);
        ``seen.notes`` says where it did.
        ``context`` lets text that cannot fit into so many tokens be refused before any work.

        Raises ``InvalidRequest`` (no messages, an order of roles that the template refuses, a picture where
        the template has no place for one, or where the model has no eyes), ``PictureError``, or
        ``DoesNotFit`` for text far over ``context``.
        """
        if not conversation:
            raise InvalidRequest("there are no messages", "Send at least one.", param="messages")
        texts = [
            part.text for message in conversation for part in message.parts if isinstance(part, TextPart)
        ]
        texts += [call.arguments for message in conversation for call in message.calls]
        texts += [json.dumps([tool.description, tool.parameters], ensure_ascii=False) for tool in tools]
        _check_unicode(texts)
        if context is not None:
            self._check_length(texts, context)
        if self._eyes is None and has_pictures(conversation):
            raise no_eyes()
        if not self._template.takes_tools and (
            tools or any(message.role == "tool" for message in conversation)
        ):
            raise InvalidRequest(
                "the checkpoint's chat template has no place for tools", "leave them out", param="tools"
            )
        marked, described, markers = self._control.mark(conversation, tools)
        rendered = self._template.render(marked, described)
        if self._eyes is None:
            return Prompt((*self._begin, *self._control.encode(rendered, markers)), (), 0)
        images = self._eyes.prepare(conversation, max_image_tokens)
        rendered = self._eyes.write_out_clips(rendered, images, self._control, markers)
        token_ids = self._eyes.expand(self._control.encode(rendered, markers), images)
        return Prompt(token_ids, images, sum(image.tokens for image in images))

    def raw(self, text: str | tuple[int, ...], context: int | None = None) -> Prompt:
        """``text`` as it is, without a template: what a model goes on with. Names of control tokens in it are
        those tokens. It may be token ids.

        Raises ``InvalidRequest`` for ids that there are not and for placeholders of pictures, ``DoesNotFit``.
        """
        if isinstance(text, str):
            _check_unicode([text])
            if context is not None:
                self._check_length([text], context)
            text = tuple(self.tokenizer.encode(text, add_special_tokens=True).ids)
        if not text:
            raise InvalidRequest("the prompt is empty", "send some text", param="prompt")
        size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        wrong = next((each for each in text if not 0 <= each < size), None)
        if wrong is not None:
            raise InvalidRequest(f"there is no token {wrong}", f"tokens are 0 to {size - 1}", param="prompt")
        if self._eyes is not None and not self._placeholders.isdisjoint(text):
            raise InvalidRequest(
                "the prompt holds the place of a picture, and no picture comes with it",
                "use /v1/chat/completions for pictures",
                param="prompt",
            )
        return Prompt(text, (), 0)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones too; bytes that are no whole character show as U+FFFD."""
        token = self.tokenizer.id_to_token(token_id)
        return "" if token is None else self._spelling.bytes_of(token).decode("utf-8", "replace")

    def _check_length(self, texts: list[str], context: int) -> None:
        """Refuse text that cannot fit, before work that grows with it."""
        if sum(map(len, texts)) <= context * _BYTES_PER_TOKEN:
            return
        # The tokenizer composes characters (NFC), which makes some texts shorter.
        size = sum(len(unicodedata.normalize("NFC", text).encode()) for text in texts)
        least = size // self._longest_token
        if least > context:
            raise DoesNotFit(
                f"{size:,} bytes of text are at least {least:,} tokens; the context holds {context:,}",
                f"Send at most {context - 1:,} tokens, or start with a larger --context.",
                param="messages",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token: so many bytes of text take at least one."""
        return max(len(self._spelling.bytes_of(token)) for token in self.tokenizer.get_vocab())


def has_pictures(conversation: Conversation) -> bool:
    """Whether there is anything but text in it."""
    return any(not isinstance(part, TextPart) for message in conversation for part in message.parts)


def _check_unicode(texts: list[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text holds half a character ({text[error.start]!r}, at {error.start})",
                "Send whole Unicode characters: JSON writes one beyond U+FFFF as a pair of escapes.",
                param="messages",
            ) from None


# What a prompt longer than the context is told: how much shorter it must be, and which pictures would fit.
#
# Knows: tokens of text and pictures, and how pictures are resized, so that a size it names really fits.
# Does not know: the model, nor who runs.


_AROUND = 2  # tokens that go with each picture, and with each time step of a clip: its start and its end


def too_long(
    prompt: Prompt, context: int, processing: ImageProcessing | None, or_else: str = ""
) -> DoesNotFit:
    """The error for a ``prompt`` that leaves no token for an answer.

    ``processing``: None where the model has no eyes. ``or_else``: what whoever started the engine can do.
    """
    tokens, of_pictures = len(prompt.token_ids), prompt.image_tokens
    text, surplus = tokens - of_pictures, tokens - (context - 1)
    ways = list(_ways_with_pictures(prompt.images, context - 1 - text, processing)) if processing else []
    if text > surplus:
        ways.append(f"shorten the text by {surplus} tokens")
    if or_else:
        ways.append(or_else)
    return DoesNotFit(
        f"the prompt is {tokens} tokens ({of_pictures} of them pictures); "
        f"the context holds {context}, with at least one for the answer",
        ", or ".join(ways) or "send less",
    )


def _ways_with_pictures(images: Many[PreparedImage], room: int, processing: ImageProcessing) -> Iterator[str]:
    """``room`` tokens are left for pictures beside the text: smaller ones, or fewer."""
    least = -(-processing.min_pixels // (processing.patch_size * processing.merge_size) ** 2)
    whole = most_pictures(images, room)
    for count in range(len(images), whole, -1):
        level = largest_level(images[:count], room + _around(images[count:]))
        size = _pixels(images[:count], level, processing) if level >= least else None
        if size is not None:
            yield f"{_first(count, len(images))} with at most {level} tokens{_each(images)}{size}"
            break
    if 0 < whole < len(images):
        yield f"{_first(whole, len(images))} as {'it is' if whole == 1 else 'they are'}"


def _first(count: int, of: int) -> str:
    if of == 1:
        return "the picture fits"
    if count == of:
        return f"all {of} pictures fit"
    return "the first picture fits" if count == 1 else f"the first {count} pictures fit"


def _around(images: Many[PreparedImage]) -> int:
    """Tokens of text that go with ``images``."""
    return sum(_AROUND * image.grid[0] for image in images)


def largest_level(images: Many[PreparedImage], room: int) -> int:
    """The most tokens that each picture (and each time step of a clip) may have so that all together have
    at most ``room``. Smaller ones stay as they are.
    """
    steps = sorted(image.tokens // image.grid[0] for image in images for _ in range(image.grid[0]))
    for index, tokens in enumerate(steps):
        level = max(room, 0) // (len(steps) - index)
        if tokens > level:
            return level
        room -= tokens
    return steps[-1] if steps else 0


def most_pictures(images: Many[PreparedImage], room: int) -> int:
    """How many of ``images``, from the first on, fit as they are if the others are left out."""
    for count in range(len(images), 0, -1):
        if sum(image.tokens for image in images[:count]) <= room + _around(images[count:]):
            return count
    return 0


def _each(images: Many[PreparedImage]) -> str:
    if any(image.is_video for image in images):
        return " each (a clip: for every two frames)"
    return " each" if len(images) > 1 else ""


def _pixels(images: Many[PreparedImage], level: int, processing: ImageProcessing) -> str | None:
    """A size of at most ``level`` tokens, in the shape of the largest picture.

    None: it is below the checkpoint's least, and would be enlarged to more than ``level``.
    """
    factor = processing.patch_size * processing.merge_size
    largest = max(images, key=lambda image: image.tokens // image.grid[0])
    height, width = smart_resize(
        largest.seen.height, largest.seen.width, factor, processing.min_pixels, level * factor**2
    )
    if height * width < processing.min_pixels:
        return None
    if height * width > level * factor**2:
        return ""  # so long and thin that the formula gives more
    return f", {width}x{height} pixels"
