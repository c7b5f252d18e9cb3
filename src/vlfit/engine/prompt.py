"""From a conversation to token ids and prepared pictures, as the checkpoint's own chat template has it.

Knows: the tokenizer, the chat template, where pictures stand in the text and how many placeholder tokens
each takes. Does not know: tensors, the model, or what a request may cost (``engine/scheduler.py`` judges
that).

The reference is transformers' ``processor.apply_chat_template(..., tokenize=True)``. Names of control
tokens in a person's text are read as text (``engine/control_tokens.py``): otherwise a question could forge
a turn, or take a picture's place.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.sidecar import ImageProcessing, read_chat_template, tokenizer_file
from vlfit.engine.answer import ImageSeen
from vlfit.engine.chat_template import ChatTemplate
from vlfit.engine.control_tokens import ControlTokens, Markers
from vlfit.engine.conversation import Conversation, ImagePart, TextPart, VideoPart
from vlfit.engine.detokenizer import check_byte_level, token_bytes
from vlfit.engine.images import PreparedImage, prepare_image, prepare_video
from vlfit.errors import CheckpointError, DoesNotFit, InvalidRequest

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
        self.tokenizer = _read_tokenizer(folder)
        self.processing = ImageProcessing.read(folder)
        self.video_processing = ImageProcessing.read_video(folder)
        _check_processing(self.processing, self.video_processing, config)
        self._template = ChatTemplate(read_chat_template(folder), _special_tokens(folder))
        self._image = _Placeholder(self.tokenizer, config.image_token_id, "image_token_id")
        self._video = _Placeholder(self.tokenizer, config.video_token_id, "video_token_id")
        self._vision_start = _token(self.tokenizer, config.vision_start_token_id, "vision_start_token_id")
        self._vision_end = _token(self.tokenizer, config.vision_end_token_id, "vision_end_token_id")
        self._control = ControlTokens(
            self.tokenizer, (self._image.text, self._video.text, self._vision_start, self._vision_end)
        )

    def build(
        self, conversation: Conversation, max_image_tokens: int | None = None, context: int | None = None
    ) -> Prompt:
        """Render and tokenize ``conversation`` up to where the model is to speak.

        ``max_image_tokens`` caps each picture (and each pair of frames); ``seen.notes`` says where it did.
        ``context`` lets text that cannot fit into so many tokens be refused before any work.

        Raises ``InvalidRequest`` (no messages, an order of roles that the template refuses, a picture where
        the template has no place for one), ``PictureError``, or ``DoesNotFit`` for text far over
        ``context``.
        """
        if not conversation:
            raise InvalidRequest("there are no messages", "Send at least one.", param="messages")
        texts = [
            part.text for message in conversation for part in message.parts if isinstance(part, TextPart)
        ]
        _check_unicode(texts)
        if context is not None:
            self._check_length(texts, context)
        marked, markers = self._control.mark(conversation)
        rendered = self._template.render(marked)
        images = tuple(self._prepare(conversation, max_image_tokens))
        rendered = self._write_out_clips(rendered, images, markers)
        token_ids = self._control.encode(rendered, markers)
        return self._expand(token_ids, images)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones too; bytes that are no whole character show as U+FFFD."""
        token = self.tokenizer.id_to_token(token_id)
        return "" if token is None else token_bytes(token).decode("utf-8", "replace")

    def _prepare(self, conversation: Conversation, max_tokens: int | None) -> Iterator[PreparedImage]:
        for message in conversation:
            for part in message.parts:
                if isinstance(part, ImagePart):
                    yield prepare_image(part, self.processing, max_tokens)
                elif isinstance(part, VideoPart):
                    yield prepare_video(part, self.video_processing, max_tokens)

    def _write_out_clips(
        self, rendered: str, images: tuple[PreparedImage, ...], markers: Markers | None
    ) -> str:
        """One placeholder for each picture and each temporal patch of a clip, the latter with its time.

        transformers puts the times in the place of the bare placeholder and keeps the ``<|vision_start|>``
        and ``<|vision_end|>`` that the template wrote around it; so do we.
        """
        pieces = re.split(self._control.unmarked(self._image.text, self._video.text, markers), rendered)
        placeholders = pieces[1::2]
        wanted = [self._video.text if image.is_video else self._image.text for image in images]
        if placeholders != wanted:
            raise InvalidRequest(
                f"the conversation has {len(wanted)} pictures or clips, "
                f"the checkpoint's chat template gave {len(placeholders)} a place",
                "Put pictures into user messages; most templates leave them out elsewhere.",
                param="messages",
            )
        for index, image in enumerate(images):
            if image.is_video:
                pieces[2 * index + 1] = "".join(
                    f"<{seconds:.1f} seconds>{self._vision_start}{self._video.text}{self._vision_end}"
                    for seconds in image.frame_seconds
                )
        return "".join(pieces)

    def _expand(self, token_ids: list[int], images: tuple[PreparedImage, ...]) -> Prompt:
        """Repeat each placeholder as often as its picture (or temporal patch) has tokens."""
        repeats = [image.tokens // image.grid[0] for image in images for _ in range(image.grid[0])]
        placeholders = (self._image.token_id, self._video.token_id)
        places = [place for place, token_id in enumerate(token_ids) if token_id in placeholders]
        if len(places) != len(repeats):
            raise CheckpointError(
                f"the tokenizer made {len(places)} placeholders of {len(repeats)}",
                "Its added tokens are not as Qwen3-VL has them; fetch tokenizer.json again.",
            )
        expanded: list[int] = []
        last = 0
        for place, count in zip(places, repeats, strict=True):
            expanded += token_ids[last:place]
            expanded += [token_ids[place]] * count
            last = place + 1
        expanded += token_ids[last:]
        return Prompt(tuple(expanded), images, sum(image.tokens for image in images))

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
        return max(len(token_bytes(token)) for token in self.tokenizer.get_vocab())


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


class _Placeholder:
    def __init__(self, tokenizer: Tokenizer, token_id: int, field: str) -> None:
        self.token_id = token_id
        self.text = _token(tokenizer, token_id, field)


def _token(tokenizer: Tokenizer, token_id: int, field: str) -> str:
    token: str | None = tokenizer.id_to_token(token_id)
    if token is None:
        raise CheckpointError(
            f"config.json: {field} is {token_id}, which is no token of tokenizer.json",
            "The two files belong to different models; fetch the checkpoint again.",
        )
    return token


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = tokenizer_file(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch this file again.") from error
    check_byte_level(tokenizer)
    if tokenizer.pre_tokenizer is None:
        raise CheckpointError(f"{path} has no pre_tokenizer", "Fetch this file again.")
    # Settings of whoever saved it; a prompt is neither cut nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and the like, which templates may write."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    values = Fields.read(path).values
    named = {name: values[name] for name in values if name.endswith("_token")}
    contents = {name: v.get("content") if isinstance(v, dict) else v for name, v in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _check_processing(pictures: ImageProcessing, clips: ImageProcessing, config: ModelConfig) -> None:
    """Pictures and clips go through one vision tower: all but their pixel limits must agree with it."""
    vision = config.vision
    if replace(clips, min_pixels=0, max_pixels=0) != replace(pictures, min_pixels=0, max_pixels=0):
        raise CheckpointError(
            "preprocessor_config.json and video_preprocessor_config.json disagree on more than sizes",
            "Qwen3-VL has the same patches and normalisation in both; fetch the two files again.",
        )
    for name, found, wanted in (
        ("patch_size", pictures.patch_size, vision.patch_size),
        ("temporal_patch_size", pictures.temporal_patch_size, vision.temporal_patch_size),
        ("merge_size", pictures.merge_size, vision.spatial_merge_size),
    ):
        if found != wanted:
            raise CheckpointError(
                f"preprocessor_config.json: {name} is {found}, config.json has {wanted}",
                "The two files belong to different models; fetch the checkpoint again.",
            )
