"""Conversations to token ids and prepared pictures, by the checkpoint's chat template.

The reference is transformers' ``apply_chat_template(..., tokenize=True)``. Names of control tokens in a
user's text stay text (``control_tokens.py``): otherwise a question could forge a turn or a picture.
"""

import json
import logging
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vlfit.api.conversation import Conversation, ImagePart, TextPart, Tool, VideoPart
from vlfit.api.outputs import ImageSeen
from vlfit.checkpoint.config import ModelConfig, text_only_error
from vlfit.checkpoint.gguf.gguf_folder import model_file_name
from vlfit.checkpoint.gguf.gguf_names import errors_name_gguf
from vlfit.checkpoint.processor_files import read_chat_template
from vlfit.errors import DoesNotFit, InvalidRequest, MissingFile
from vlfit.models.interface import ImagePrompts, PreparedImage, builders_of
from vlfit.prompt.chat_template import ChatTemplate, read_template_variables
from vlfit.prompt.control_tokens import ControlTokens, control_token_names
from vlfit.prompt.template_process import TEMPLATES
from vlfit.prompt.tokenizer import TokenBytes, read_special_tokens, read_tokenizer, token_ids
from vlfit.units import counted

logger = logging.getLogger(__name__)

# For models without a template: the text of all messages, one per line.
_PLAIN = "{% for message in messages %}{{ message.content }}{{ '' if loop.last else '\\n' }}{% endfor %}"
# No vocabulary has longer tokens on average: shorter texts are not measured before they are tokenized.
_BYTES_PER_TOKEN = 16
_MAX_TIME_BYTES = 64  # of the time and the tokens around each step of a clip


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and its pictures and clips (``images``) in order.

    The k-th placeholder token in ``token_ids`` is replaced by the k-th feature row of all images.
    ``image_tokens``: number of placeholders.
    """

    token_ids: tuple[int, ...]
    images: tuple[PreparedImage, ...]
    image_tokens: int

    @property
    def seen(self) -> tuple[ImageSeen, ...]:
        """How each of ``images`` was resized."""
        return tuple(image.seen for image in self.images)


class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer, chat template and picture settings. Thread-safe.

    The constructor reads these files from ``folder``. It raises ``CheckpointError`` for a file that is not
    supported, and its subclass ``MissingFile`` for a missing one. A text-only model may lack a chat template,
    which is logged.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        with errors_name_gguf(folder):
            self._read(folder, config)

    def _read(self, folder: Path, config: ModelConfig) -> None:
        TEMPLATES.start()  # while the tokenizer is read
        self.tokenizer = read_tokenizer(folder, config.model_type)
        self._spelling = TokenBytes.of(self.tokenizer)
        build = builders_of(config).image_prompts
        self._image_prompts = build(folder, config, self.tokenizer) if build and config.vision else None
        self._begin: list[int] = []  # beginning-of-text tokens, without a template
        self._template = ChatTemplate(self._read_template(folder), read_special_tokens(folder))
        added = self.tokenizer.get_added_tokens_decoder().values()
        names = control_token_names(added, self._template.literals).union(
            self._image_prompts.control_tokens if self._image_prompts else ()
        )
        self._control = ControlTokens(self.tokenizer, names, in_parts=self._image_prompts is not None)

    def _read_template(self, folder: Path) -> str:
        """The chat template; base models of text-only families have none, which is logged."""
        try:
            return read_chat_template(folder)
        except MissingFile:
            if self._image_prompts is not None:
                raise
        logger.warning(
            "%s has no chat template: it continues the text that it is sent, and may not answer",
            model_file_name(folder) or folder,
        )
        self._begin = self.tokenizer.encode("", add_special_tokens=True).ids
        return _PLAIN

    def build(
        self,
        conversation: Conversation,
        max_image_tokens: int | None = None,
        context: int | None = None,
        tools: tuple[Tool, ...] = (),
        remedy: str = "",
        template_variables: str | None = None,
    ) -> Prompt:
        """Render and tokenize ``conversation`` with the header of the model's turn; prepare its pictures.

        ``max_image_tokens``: most tokens of a picture, and of each pair of frames of a clip; larger ones are
        scaled down, which the picture's ``ImageSeen.notes`` say. None: only the checkpoint's limits.

        ``context``: raise ``DoesNotFit`` before the work if text (by its length) or pictures (by their
        headers) cannot fit into so many tokens. The result may still exceed it: see ``too_long_error``. None:
        no limit. ``remedy``: as for ``too_long_error``. ``template_variables``: as in ``SamplingParams``.

        Also raises ``PictureError``, and ``InvalidRequest`` for no messages, roles in an order that the
        template refuses, lone surrogates, and pictures or tools that the template or the model does not take.
        """
        if not conversation:
            raise InvalidRequest("there are no messages", "Send at least one.", param="messages")
        texts = [
            part.text for message in conversation for part in message.parts if isinstance(part, TextPart)
        ]
        texts += [call.arguments for message in conversation for call in message.calls]
        texts += [message.reasoning for message in conversation]
        texts += [json.dumps([tool.description, tool.parameters], ensure_ascii=False) for tool in tools]
        _check_unicode(texts)
        if context is not None:
            with_text = sum(
                any(isinstance(p, TextPart) and p.text for p in each.parts) for each in conversation
            )
            self._check_length(texts, context, with_text)
        if self._image_prompts is None and has_pictures(conversation):
            raise text_only_error(folder=self._folder)
        if not self._template.takes_tools and (
            tools or any(message.role == "tool" for message in conversation)
        ):
            raise InvalidRequest(
                "the checkpoint's chat template does not take tools", "Leave them out.", param="tools"
            )
        marked, described, markers = self._control.mark(conversation, tools)
        variables = read_template_variables(template_variables, self._control.first_name_in)
        with errors_name_gguf(self._folder):
            rendered = self._template.render(marked, described, variables)
        if self._image_prompts is None:
            return Prompt((*self._begin, *self._control.encode(rendered, markers)), (), 0)
        prompts, most_text = self._image_prompts, len(rendered.encode())

        def insert_images(images: tuple[PreparedImage, ...]) -> Prompt:
            expanded = prompts.expand_clips(rendered, images, self._control, markers)
            with errors_name_gguf(self._folder):
                token_ids = prompts.repeat_placeholders(self._control.encode(expanded, markers), images)
            return Prompt(token_ids, images, sum(image.tokens for image in images))

        def check(images: tuple[PreparedImage, ...]) -> None:
            steps = sum(len(image.frame_seconds) for image in images)
            text = most_text + _MAX_TIME_BYTES * steps
            if context is None or text + sum(image.tokens for image in images) < context:
                return
            if len((prompt := insert_images(images)).token_ids) >= context:
                raise self.too_long_error(prompt, context, remedy)

        fits = context is None or most_text + _most_image_tokens(conversation, max_image_tokens) < context
        return insert_images(prompts.prepare(conversation, max_image_tokens, None if fits else check))

    def build_raw(self, text: str | tuple[int, ...], context: int | None = None) -> Prompt:
        """Prompt of plain ``text``, or of token ids, without a chat template and without pictures.

        Unlike in ``build``, ``<|im_end|>`` and other control tokens written out in ``text`` become control
        tokens. Raises ``InvalidRequest`` for an empty prompt, unknown ids and image placeholders, and
        ``DoesNotFit`` for text that certainly exceeds ``context`` tokens (None: no limit); token ids are not
        checked for that.
        """
        if isinstance(text, str):
            _check_unicode([text])
            if context is not None:
                self._check_length([text], context)
            text = tuple(token_ids(self.tokenizer, text, add_special_tokens=True))
        if not text:
            raise InvalidRequest("the prompt is empty", "Send some text.", param="prompt")
        size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        unknown = next((each for each in text if not 0 <= each < size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"there is no token {unknown}", f"Token ids are 0 to {size - 1}.", param="prompt"
            )
        if self._image_prompts is not None and not self._image_prompts.placeholder_ids.isdisjoint(text):
            raise InvalidRequest(
                "the prompt has an image placeholder but no picture",
                "Use /v1/chat/completions for pictures.",
                param="prompt",
            )
        return Prompt(text, (), 0)

    def too_long_error(self, prompt: Prompt, context: int, remedy: str = "") -> DoesNotFit:
        """The error for a ``prompt`` that leaves no token of ``context`` free. Does not raise it.

        Its hint says which picture sizes, how many pictures or how much less text would fit. ``remedy``: a
        further clause for the hint, such as "start with a larger --context"; "": none.
        """
        tokens, of_pictures = len(prompt.token_ids), prompt.image_tokens
        text, surplus = tokens - of_pictures, tokens - (context - 1)
        ways: list[str] = []
        if self._image_prompts is not None:
            ways += _picture_remedies(prompt.images, context - 1 - text, self._image_prompts)
        if text > surplus:
            ways.append(f"shorten the text by {counted(surplus, 'token')}")
        if remedy:
            ways.append(remedy)
        hint = ", or ".join(ways) or "send less"
        return DoesNotFit(
            f"the prompt is {tokens} tokens ({of_pictures} of them pictures); "
            f"at most {context - 1} fit the context of {context}",
            f"{hint[0].upper()}{hint[1:]}.",
        )

    def token_text(self, token_id: int) -> str:
        """Text of one token, also of a special one; "" for an unknown id. Incomplete UTF-8 becomes U+FFFD."""
        token = self.tokenizer.id_to_token(token_id)
        return "" if token is None else self._spelling.bytes_of(token).decode("utf-8", "replace")

    def _check_length(self, texts: list[str], context: int, num_messages: int = 1) -> None:
        """Refuse text that cannot fit, before any work that grows with it.

        ``num_messages``: that have text; none shares a token with another.
        """
        if sum(map(len, texts)) <= context * _BYTES_PER_TOKEN and num_messages <= context:
            return
        # The tokenizer normalizes to NFC, which shortens some texts.
        size = sum(len(unicodedata.normalize("NFC", text).encode()) for text in texts)
        least = max(size // self._longest_token, num_messages)
        if least > context:
            raise DoesNotFit(
                f"{size:,} bytes of text in {counted(num_messages, 'message')} are at least {least:,} "
                f"tokens; the context holds {context:,}",
                f"Send at most {context - 1:,} tokens, or start with a larger --context.",
                param="messages",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token, or a few more."""
        vocabulary = self.tokenizer.get_vocab()
        if not self._spelling.byte_level:
            return max(len(self._spelling.bytes_of(token)) for token in vocabulary)
        # A character is a byte, but in added tokens: a second less with 248,000 tokens.
        added = self.tokenizer.get_added_tokens_decoder().values()
        return max(max(map(len, vocabulary)), *(len(token.content.encode()) for token in added), 1)


def _most_image_tokens(conversation: Conversation, max_image_tokens: int | None) -> float:
    """Upper bound of the tokens of all pictures and clips; infinite without a cap."""
    if max_image_tokens is None:
        return math.inf
    parts = [part for message in conversation for part in message.parts]
    steps = sum(
        len(part.frames) if isinstance(part, VideoPart) else isinstance(part, ImagePart) for part in parts
    )
    return steps * (max_image_tokens + _MAX_TIME_BYTES)


def has_pictures(conversation: Conversation) -> bool:
    """Whether any message has a picture or a clip."""
    return any(not isinstance(part, TextPart) for message in conversation for part in message.parts)


def _check_unicode(texts: list[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has a lone surrogate ({text[error.start]!r}, at {error.start})",
                "Send whole Unicode characters: JSON writes one beyond U+FFFF as a pair of escapes.",
                param="messages",
            ) from None


# A prompt over the context: by how much, and which pictures would fit.

_MARKERS_PER_STEP = 2  # tokens around each picture and each time step of a clip: start and end


def _picture_remedies(images: Sequence[PreparedImage], budget: int, prompts: ImagePrompts) -> Iterator[str]:
    """Clauses for a hint: smaller or fewer pictures that fit into ``budget`` tokens."""
    whole = num_images_that_fit(images, budget)
    for count in range(len(images), whole, -1):
        level = max_tokens_per_image(images[:count], budget + _marker_tokens(images[count:]))
        size = _pixels(images[:count], level, prompts) if level >= prompts.min_tokens else None
        if size is not None:
            fit = _first_fit_text(count, len(images))
            yield f"{fit} with at most {level} tokens{_each_suffix(images)}{size}"
            break
    if 0 < whole < len(images):
        yield f"{_first_fit_text(whole, len(images))} as {'it is' if whole == 1 else 'they are'}"


def _first_fit_text(count: int, of: int) -> str:
    if of == 1:
        return "the picture fits"
    if count == of:
        return f"all {of} pictures fit"
    return "the first picture fits" if count == 1 else f"the first {count} pictures fit"


def _marker_tokens(images: Sequence[PreparedImage]) -> int:
    """Start and end tokens of ``images``."""
    return sum(_MARKERS_PER_STEP * image.grid[0] for image in images)


def max_tokens_per_image(images: Sequence[PreparedImage], budget: int) -> int:
    """Largest limit of tokens per picture with which all ``images`` together have at most ``budget`` tokens.

    Each time step of a clip counts as a picture; pictures below the limit keep their size. If all fit
    without a limit: the tokens of the largest. 0 if there are no images or ``budget`` is too small.
    """
    steps = sorted(image.tokens // image.grid[0] for image in images for _ in range(image.grid[0]))
    for index, tokens in enumerate(steps):
        level = max(budget, 0) // (len(steps) - index)
        if tokens > level:
            return level
        budget -= tokens
    return steps[-1] if steps else 0


def num_images_that_fit(images: Sequence[PreparedImage], budget: int) -> int:
    """How many of ``images``, from the first on, fit at their present size if the others are left out.

    ``budget``: tokens that are left for pictures while all of ``images`` are in the prompt. A picture that
    is left out adds its start and end tokens to the budget.
    """
    for count in range(len(images), 0, -1):
        if sum(image.tokens for image in images[:count]) <= budget + _marker_tokens(images[count:]):
            return count
    return 0


def _each_suffix(images: Sequence[PreparedImage]) -> str:
    if any(image.is_video for image in images):
        return " each (a clip: for every two frames)"
    return " each" if len(images) > 1 else ""


def _pixels(images: Sequence[PreparedImage], level: int, prompts: ImagePrompts) -> str | None:
    """ ", WxH pixels": a size of at most ``level`` tokens, in the shape of the largest picture.

    "" if the picture is so long and thin that there is none. None if that size is below the checkpoint's
    smallest: it would be enlarged to more than ``level``.
    """
    largest = max(images, key=lambda image: image.tokens // image.grid[0])
    size = prompts.size_for_tokens(largest.seen.height, largest.seen.width, level)
    if size is None:
        return None
    height, width = size
    if height * width > level * prompts.pixels_per_token:
        return ""
    return f", {width}x{height} pixels"
