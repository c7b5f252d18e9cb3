"""From a conversation to model inputs, through the checkpoint's transformers processor.

Pictures are decoded by vlfit before the processor gets them. Names of control tokens in user text stay text;
if this transformers or this processor cannot do that, such text is refused.
"""

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import BytesIO
from itertools import groupby
from threading import Lock
from typing import Any

import numpy as np
from jinja2 import TemplateError
from PIL import Image

from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, Tool, VideoPart
from vlfit.api.outputs import ImageSeen
from vlfit.backends.transformers.auto_model import has_parameter, takes_clips
from vlfit.backends.transformers.model_errors import model_error
from vlfit.errors import CheckpointError, DoesNotFit, InvalidRequest, UsageError
from vlfit.images.clips import LOW_DETAIL_TOKENS, check_clip, decode_frame, decode_picture
from vlfit.images.decode_pool import DecodedPixels, decode_pool
from vlfit.prompt.chat_template import ChatTemplate, read_template_variables
from vlfit.prompt.control_tokens import (
    as_template_calls,
    as_template_tool,
    control_token_names,
    is_model_tag,
)

_MIN_EDGE = 28  # pixels; processors need at least this
# Of a picture, and of all frames of a clip together: larger ones are scaled down before the processor gets
# them. What the model sees of a picture is smaller (``ProcessorPromptBuilder.largest_conversation``).
MAX_PIXELS = 4096 * 4096
MAX_CLIP_PIXELS = 4 * MAX_PIXELS
_PIXEL_BYTES = 4  # in Pillow


@dataclass(frozen=True, slots=True, eq=False)
class DecodedPicture:
    """A decoded picture, or the frames of a clip: upright, in RGB, scaled down to at most ``MAX_PIXELS``.

    The frames of a clip have at most ``MAX_CLIP_PIXELS`` together. ``size``: width and height of the
    original. ``notes``: what decoding and scaling changed, in sentences. ``metadata``: a clip's metadata as
    processors take it; None for a picture.
    """

    part: ImagePart | VideoPart
    frames: tuple[Image.Image, ...]
    size: tuple[int, int]
    notes: tuple[str, ...]
    metadata: dict[str, Any] | None = None

    @property
    def pixels(self) -> Any:
        """What processors take: a Pillow image; for a clip a uint8 array [frames, height, width, 3]."""
        return (
            self.frames[0] if self.metadata is None else np.stack([np.asarray(each) for each in self.frames])
        )

    def max_tokens(self, limit: int) -> int:
        """Most image tokens that this picture or clip may take.

        ``limit``: most for one picture, or for two frames of a clip. For pictures whose ``part.detail`` is
        ``low`` the limit is at most ``LOW_DETAIL_TOKENS``.
        """
        if isinstance(self.part, VideoPart):
            return limit * math.ceil(len(self.frames) / 2)
        return min(limit, LOW_DETAIL_TOKENS) if self.part.detail == "low" else limit

    def image_seen(self, tokens: int, size: tuple[int, int] | None) -> ImageSeen:
        """The ``ImageSeen`` for the answer.

        ``tokens``: image tokens that the picture takes. ``size``: width and height at which the model sees
        it; None: unknown, which a note then says.
        """
        notes = self.notes
        if size is None:
            size = self.frames[0].size
            notes = (*notes, "the model sees it in tiles or in another size")
        return ImageSeen(*self.size, *size, tokens, len(self.frames), notes)


def decode_part(part: ImagePart | VideoPart, buffers: ExitStack) -> DecodedPicture:
    """Decode a picture or clip. Its pixels count against the decode pool's budget until ``buffers`` closes.

    Raises ``PictureError``, or ``InvalidRequest`` for an invalid clip.
    """
    if isinstance(part, ImagePart):
        picture = decode_picture(part, partial(_size_within, MAX_PIXELS))
        return DecodedPicture(part, (_image(picture, buffers),), *_size_and_notes(picture))
    check_clip(part)
    count = len(part.frames)
    choose_size = partial(_size_within, min(MAX_PIXELS, MAX_CLIP_PIXELS // count))
    frames: list[Image.Image] = []
    for index in range(count):
        frame = decode_frame(part, index, choose_size)
        if not frames:
            size, notes = _size_and_notes(frame)
        elif (frame.width, frame.height) != size:
            raise InvalidRequest(
                f"{part.label}: frame {index + 1} is {frame.width}x{frame.height}, "
                f"the first is {size[0]}x{size[1]}",
                "all frames of a clip must have one size; send others as separate pictures",
                param="messages",
            )
        frames.append(_image(frame, buffers))
    metadata = {
        "total_num_frames": count,
        "fps": part.fps,
        "duration": count / part.fps,
        "frames_indices": list(range(count)),
        "width": frames[0].width,
        "height": frames[0].height,
    }
    return DecodedPicture(part, tuple(frames), size, notes, metadata)


def _image(decoded: DecodedPixels, buffers: ExitStack) -> Image.Image:
    image = Image.fromarray(decoded.pixels)
    buffers.enter_context(decode_pool().hold(_PIXEL_BYTES * image.width * image.height))
    return image


def _size_and_notes(decoded: DecodedPixels) -> tuple[tuple[int, int], tuple[str, ...]]:
    """Size of the original, and notes, with one for a scaling by ``_size_within``."""
    size, notes = (decoded.width, decoded.height), decoded.notes
    height, width, _ = decoded.pixels.shape
    if (width, height) != size:
        notes = (*notes, f"scaled down to {width}x{height} before the processor")
    return size, notes


def _size_within(most: int, width: int, height: int) -> tuple[int, int]:
    """Width and height scaled down to at most ``most`` pixels."""
    if width * height <= most:
        return width, height
    share = math.sqrt(most / (width * height))
    return max(int(width * share), 1), max(int(height * share), 1)


def scale_down(
    picture: DecodedPicture, tokens: int, limit: int, size: tuple[int, int] | None
) -> DecodedPicture:
    """``picture`` scaled down from ``tokens`` to about ``picture.max_tokens(limit)`` tokens, with a note.

    ``tokens``: image tokens that it takes now. ``limit``: as for ``DecodedPicture.max_tokens``. ``size``:
    width and height at which the model sees ``picture``, if known: the processor may have scaled it down
    already.
    """
    most = picture.max_tokens(limit)
    width, height = min(picture.frames[0].size, size or picture.frames[0].size, key=math.prod)
    share = math.sqrt(most / tokens) * 0.97  # processors round sizes up
    scaled = max(int(width * share), _MIN_EDGE), max(int(height * share), _MIN_EDGE)
    frames = tuple(each.resize(scaled, Image.Resampling.BICUBIC) for each in picture.frames)
    what = "each two frames" if picture.metadata is not None else "a picture"
    why = f"at most {min(limit, LOW_DETAIL_TOKENS) if most < limit else limit} tokens for {what}"
    kept = tuple(note for note in picture.notes if not note.startswith("scaled down"))
    metadata = picture.metadata and {**picture.metadata, "width": scaled[0], "height": scaled[1]}
    return replace(
        picture,
        frames=frames,
        notes=(*kept, f"scaled down to {scaled[0]}x{scaled[1]}: {why}"),
        metadata=metadata,
    )


_SCALING_ROUNDS = 8  # until a picture has few enough tokens
# Fields of configs and processors with the placeholder tokens of pictures and clips.
_PLACEHOLDER_FIELDS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")


@dataclass(frozen=True, slots=True, eq=False)
class ProcessorPrompt:
    """A tokenized prompt.

    ``inputs``: keyword arguments of ``generate()``: tensors on the CPU for one sequence.
    ``num_image_tokens``: placeholder tokens of pictures and clips among ``token_ids``.
    """

    inputs: dict[str, Any]
    token_ids: tuple[int, ...]
    num_image_tokens: int
    images: tuple[ImageSeen, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, placeholders of pictures included."""
        return len(self.token_ids)


class ProcessorPromptBuilder:
    """Builder of prompts through a transformers processor. Thread-safe.

    ``context``: most tokens of a prompt with its completion. ``image_limit``: most image tokens of one
    picture, or of two frames of a clip; larger ones are scaled down.
    """

    def __init__(self, processor: Any, config: Any, context: int, image_limit: int) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._context = context
        self.image_limit = image_limit  # the profiling run lowers it if larger pictures do not fit
        # Processors and tokenizers of transformers change their own settings while they work.
        self._lock = Lock()
        self._placeholders = _placeholders(config) or _placeholders(processor)

    def build(
        self,
        conversation: Conversation,
        tools: tuple[Tool, ...] = (),
        template_variables: str | None = None,
    ) -> ProcessorPrompt:
        """The prompt of ``conversation``, up to the model's turn. Decodes and scales its pictures.

        ``template_variables``: as in ``SamplingParams``.

        Whether the prompt fits the context is not checked, except for text that is too long in any case:
        ``DoesNotFit``. The same is raised for pictures that cannot be scaled down to ``image_limit``. Raises
        ``InvalidRequest`` or ``PictureError``.
        """
        if not conversation:
            raise InvalidRequest("there are no messages", "send at least one", param="messages")
        self._check_texts(conversation, tools)
        variables = read_template_variables(template_variables, self._first_control_name)
        parts = [part for message in conversation for part in message.parts]
        if any(isinstance(part, VideoPart) for part in parts) and not takes_clips(self._processor):
            raise InvalidRequest(
                "this model's processor takes no video clips here",
                "send a few frames as pictures; if the model does take clips, install torchvision",
                param="messages",
            )
        with ExitStack() as buffers:
            seen = [decode_part(part, buffers) for part in parts if not isinstance(part, TextPart)]
            return self._build(conversation, tools, seen, variables)

    def _build(
        self,
        conversation: Conversation,
        tools: tuple[Tool, ...],
        seen: list[DecodedPicture],
        variables: Mapping[str, Any],
    ) -> ProcessorPrompt:
        """The prompt with decoded pictures, scaled down until each has few enough tokens."""
        inputs = self._encoded(conversation, tools, seen, variables)
        counts = self._counts(inputs, seen)
        if self._placeholders and 0 in counts:
            what = "pictures" if seen[counts.index(0)].metadata is None else "clips"
            raise InvalidRequest(
                f"the checkpoint's chat template has no place for {what}", "leave them out", param="messages"
            )
        for _ in range(_SCALING_ROUNDS):
            large = [
                number
                for number, each in enumerate(seen)
                if counts[number] > each.max_tokens(self.image_limit)
            ]
            if not large:
                break
            sizes = self._sizes(inputs, seen)
            for number in large:
                seen[number] = scale_down(seen[number], counts[number], self.image_limit, sizes[number])
            inputs = self._encoded(conversation, tools, seen, variables)
            counts = self._counts(inputs, seen)
        if any(count > each.max_tokens(self.image_limit) for count, each in zip(counts, seen, strict=True)):
            raise self._of_any_size(max(counts))
        ids = inputs["input_ids"][0].tolist()
        images = tuple(
            each.image_seen(count, size)
            for each, count, size in zip(seen, counts, self._sizes(inputs, seen), strict=True)
        )
        return ProcessorPrompt(inputs, tuple(ids), sum(each in self._placeholders for each in ids), images)

    def build_raw(self, text: str | tuple[int, ...]) -> ProcessorPrompt:
        """The prompt of plain text or token ids, without a chat template.

        Raises ``InvalidRequest`` for an empty prompt, unknown tokens or picture placeholders, ``DoesNotFit``
        for text that is too long for the context in any case.
        """
        import torch

        if isinstance(text, str):
            self._check_length([text])
            with self._lock:
                text = tuple(self._tokenizer(text)["input_ids"])
        if not text:
            raise InvalidRequest("the prompt is empty", "send some text", param="prompt")
        size = len(self._tokenizer)
        wrong = next((each for each in text if not 0 <= each < size), None)
        if wrong is not None:
            raise InvalidRequest(f"there is no token {wrong}", f"tokens are 0 to {size - 1}", param="prompt")
        if not self._placeholders.isdisjoint(text):
            raise InvalidRequest(
                "the prompt contains the placeholder of a picture, but no picture",
                "use /v1/chat/completions for pictures",
                param="prompt",
            )
        ids = torch.tensor([text])
        return ProcessorPrompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, text, 0)

    @cached_property
    def plain_token(self) -> int:
        """The id of an ordinary text token, to fill the prompt of the profiling run."""
        with self._lock:
            ids = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        return int(ids[-1])

    def largest_conversation(self) -> Conversation:
        """A conversation with one picture of 4096x4096 pixels, for the profiling run."""
        buffer = BytesIO()
        Image.new("RGB", (4096, 4096), (127, 127, 127)).save(buffer, "PNG")
        return (Message("user", (ImagePart(buffer.getvalue(), "the largest picture"), TextPart("this"))),)

    def _encoded(
        self,
        conversation: Conversation,
        tools: tuple[Tool, ...],
        seen: list[DecodedPicture],
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        pictures = iter(seen)
        messages = [_as_template_message(message, pictures) for message in conversation]
        options: dict[str, Any] = {"tools": [as_template_tool(tool) for tool in tools]} if tools else {}
        clips = [each.metadata for each in seen if each.metadata is not None]
        more = {"video_metadata": [clips], "do_sample_frames": False} if clips else {}
        if has_parameter(self._processor.apply_chat_template, "processor_kwargs"):
            options["processor_kwargs"] = more
        else:
            options |= more
        # A variable named like a parameter of transformers is no variable there.
        options |= {
            name: value
            for name, value in variables.items()
            if not has_parameter(self._processor.apply_chat_template, name)
        }
        kept_as_text = self._control_names_in_text(conversation, tools)
        if kept_as_text:
            options["sanitize_control_tokens"] = True
        try:
            with self._lock:
                if kept_as_text:  # read by transformers, which else looks at the template only
                    self._tokenizer.chat_control_tokens = sorted(kept_as_text)
                inputs = self._processor.apply_chat_template(
                    messages,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=True,
                    return_tensors="pt",
                    **options,
                )
        except TemplateError as error:
            raise InvalidRequest(
                f"the checkpoint's chat template refuses these messages: {error}",
                "most templates want an optional system message first, then user and assistant in turn",
                param="messages",
            ) from error
        except Exception as error:
            if "sanitize_control_tokens" in options:
                raise _control_tokens_in_text() from error
            failure = model_error(error, "preparing the request")
            if isinstance(error, ValueError):  # processors raise it for pictures without a placeholder
                raise InvalidRequest(failure.message, failure.hint, param="messages") from None
            raise failure from None
        return dict(inputs)

    @cached_property
    def _template(self) -> str:
        template = getattr(self._processor, "chat_template", None) or getattr(
            self._tokenizer, "chat_template", None
        )
        if isinstance(template, Mapping):
            template = template.get("default")
        if not isinstance(template, str):
            raise UsageError(
                "this checkpoint has no chat template",
                "send plain text to complete (/v1/completions), or use an instruct model",
            )
        return template

    @cached_property
    def _takes_tools(self) -> bool:
        with suppress(CheckpointError):
            return ChatTemplate(self._template, {}).takes_tools
        return "tools" in self._template

    @cached_property
    def _control_names(self) -> frozenset[str]:
        """Tokens that only the template may write."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        marks = (getattr(self._processor, name, None) for name in ("image_token", "video_token"))
        return control_token_names(added, self._template).union(
            mark for mark in marks if isinstance(mark, str)
        )

    def _first_control_name(self, text: str) -> str | None:
        return next((name for name in sorted(self._control_names) if name in text), None)

    def _control_names_in_text(self, conversation: Conversation, tools: tuple[Tool, ...]) -> frozenset[str]:
        """The control tokens to keep as text in this conversation; empty if it contains no name of one.

        An assistant's message keeps the tags that models write themselves, unless another text has them too:
        transformers makes no difference between roles. Raises ``InvalidRequest`` if names cannot be text.
        """
        from_model = "".join(_texts(message for message in conversation if message.role == "assistant"))
        others = (message for message in conversation if message.role != "assistant")
        text = "".join([*_texts(others), *_texts_of_tools(conversation, tools)])
        kept = frozenset(name for name in self._control_names if name in text or not is_model_tag(name))
        if not any(name in text or (name in from_model and name in kept) for name in self._control_names):
            return frozenset()
        if not has_parameter(self._processor.apply_chat_template, "sanitize_control_tokens"):
            raise _control_tokens_in_text()
        return kept

    def _check_texts(self, conversation: Conversation, tools: tuple[Tool, ...]) -> None:
        self._check_length([*_texts(conversation), *_texts_of_tools(conversation, tools)])
        has_tool_results = any(message.role == "tool" for message in conversation)
        if (tools or has_tool_results) and not self._takes_tools:
            raise InvalidRequest(
                "the checkpoint's chat template has no place for tools", "leave them out", param="tools"
            )

    def _check_length(self, texts: list[str]) -> None:
        """Refuse unpaired surrogates and text that cannot fit before any work that grows with its length."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    f"the text contains an unpaired surrogate ({text[error.start]!r}, at {error.start})",
                    "send whole Unicode characters",
                    param="messages",
                ) from None
        if sum(map(len, texts)) <= self._context * 16:
            return
        size = sum(len(unicodedata.normalize("NFC", text)) for text in texts)
        least = size // self._longest_token
        if least > self._context:
            raise DoesNotFit(
                f"{size:,} characters of text are at least {least:,} tokens; "
                f"the context holds {self._context:,}",
                f"send at most {self._context - 1:,} tokens, or start with a larger --context",
                param="messages",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest vocabulary entry: at least as many as the token's text has."""
        with self._lock:
            return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _counts(self, inputs: dict[str, Any], seen: list[DecodedPicture]) -> list[int]:
        """Placeholder tokens of each picture: the lengths of the runs, if there is one for each picture."""
        if not seen:
            return []
        ids = inputs["input_ids"][0].tolist()
        runs = [
            sum(1 for _ in run)
            for is_one, run in groupby(ids, lambda each: each in self._placeholders)
            if is_one
        ]
        if len(seen) == 1:
            return [sum(runs)]
        if len(runs) == len(seen):
            return runs
        alone = [self._alone(each) for each in seen]
        if sum(alone) == sum(runs):
            return alone
        # This processor makes other numbers of tokens of several pictures: assume equal shares.
        least, more = divmod(sum(runs), len(seen))
        return [least + (number < more) for number in range(len(seen))]

    def _alone(self, one: DecodedPicture) -> int:
        """Placeholder tokens of one picture alone."""
        inputs = self._encoded((Message("user", (one.part,)),), (), [one], {})
        return sum(each in self._placeholders for each in inputs["input_ids"][0].tolist())

    def _sizes(self, inputs: dict[str, Any], seen: list[DecodedPicture]) -> list[tuple[int, int] | None]:
        """Width and height at which the model sees each picture; None if the inputs do not show it."""
        pixels = []
        for kind, part in (("image", "image_processor"), ("video", "video_processor")):
            grid, patch = (
                inputs.get(f"{kind}_grid_thw"),
                getattr(getattr(self._processor, part, None), "patch_size", None),
            )
            rows = [] if grid is None or not isinstance(patch, int) else grid.tolist()
            pixels.append([(width * patch, height * patch) for _, height, width in rows])
        values = inputs.get("pixel_values")
        pictures = [each for each in seen if each.metadata is None]
        if not pixels[0] and values is not None and values.dim() == 4 and len(values) == len(pictures):
            pixels[0] = [(values.shape[3], values.shape[2])] * len(pictures)
        sizes = [iter(each) for each in pixels]
        return [next(sizes[each.metadata is not None], None) for each in seen]

    def _of_any_size(self, tokens: int) -> DoesNotFit:
        return DoesNotFit(
            f"a picture of any size has {tokens} tokens with this model; {self.image_limit} are allowed",
            f"start with --image-tokens {tokens} and a --context with room for it",
            param="messages",
        )


def _placeholders(config: Any) -> frozenset[int]:
    """Placeholder tokens of pictures and clips in a config or a processor."""
    ids = (getattr(config, name, None) for name in _PLACEHOLDER_FIELDS)
    return frozenset(each for each in ids if isinstance(each, int))


def _control_tokens_in_text() -> InvalidRequest:
    return InvalidRequest(
        "the text contains names of control tokens of this model, and its processor cannot keep them as text",
        "write the names differently, or upgrade transformers",
        param="messages",
    )


def _texts(messages: Iterable[Message]) -> list[str]:
    return [part.text for message in messages for part in message.parts if isinstance(part, TextPart)]


def _texts_of_tools(conversation: Conversation, tools: tuple[Tool, ...]) -> list[str]:
    """Calls and descriptions of tools; arguments without the escapes of JSON, as templates write them."""
    texts = [json.dumps(as_template_calls(message.calls), ensure_ascii=False) for message in conversation]
    texts += [message.reasoning for message in conversation]
    texts += [
        json.dumps([tool.name, tool.description, tool.parameters], ensure_ascii=False) for tool in tools
    ]
    return texts


def _as_template_message(message: Message, pictures: Iterator[DecodedPicture]) -> dict[str, Any]:
    """``message`` as processors take it. ``pictures``: the rest of the conversation's; it takes its own."""
    content: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        else:
            kind = "image" if isinstance(part, ImagePart) else "video"
            content.append({"type": kind, kind: next(pictures).pixels})
    calls = as_template_calls(message.calls)
    thoughts = {"reasoning_content": message.reasoning} if message.reasoning else {}
    return {
        "role": message.role,
        "content": content,
        **thoughts,
        **({"tool_calls": calls} if calls else {}),
    }
