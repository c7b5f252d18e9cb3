"""From a conversation to what a model of any architecture is given: its processor's template, tokens, pixels.

Knows: processors of transformers, and that a picture is decoded by us before they see it. Does not know: the
model, or what a request may cost (``engine.py`` judges that).

Names of control tokens in a person's text become text, as in ``builder.py``; where this transformers or
this processor cannot do that, such a text is refused.
"""

import json
import math
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from itertools import groupby
from threading import Lock
from typing import Any

import numpy as np
from jinja2 import TemplateError
from PIL import Image

from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, Tool, VideoPart
from vlfit.api.outputs import ImageSeen
from vlfit.backends.transformers.auto_model import has_clips, takes
from vlfit.backends.transformers.model_errors import in_one
from vlfit.errors import CheckpointError, DoesNotFit, InvalidRequest, UsageError
from vlfit.images.decode import decode
from vlfit.models.qwen3_vl.image_processor import LOW_DETAIL, check_clip, decode_frame, naming
from vlfit.prompt.chat_template import ChatTemplate
from vlfit.prompt.control_tokens import as_template_calls, as_template_tool

# Pictures and clips for a processor that nobody here knows: decoded by us, made smaller where they must be.
#
# Knows: that more pixels are more tokens in most processors. Does not know how many.


_LEAST_EDGE = 28  # pixels: no processor makes anything of fewer


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A picture, or the frames of a clip, upright and in RGB, as the processor gets it.

    ``size``: of the original. ``metadata``: of a clip, what processors want to be told; None for a picture.
    """

    part: ImagePart | VideoPart
    frames: tuple[Image.Image, ...]
    size: tuple[int, int]
    notes: tuple[str, ...]
    metadata: dict[str, Any] | None = None

    @property
    def pixels(self) -> Any:
        """A Pillow image, or uint8 [frames, height, width, 3]."""
        return (
            self.frames[0] if self.metadata is None else np.stack([np.asarray(each) for each in self.frames])
        )

    def most(self, limit: int) -> int:
        """Tokens that it may have where ``limit`` is what a picture may have: of a clip, each two frames."""
        if isinstance(self.part, VideoPart):
            return limit * math.ceil(len(self.frames) / 2)
        return min(limit, LOW_DETAIL) if self.part.detail == "low" else limit

    def told(self, tokens: int, size: tuple[int, int] | None) -> ImageSeen:
        """For the caller. ``size``: at which the model sees it; None: nobody told."""
        notes = self.notes
        if size is None:
            size = self.frames[0].size
            notes = (*notes, "the model sees it in pieces, or in a size of its own")
        return ImageSeen(*self.size, *size, tokens, len(self.frames), notes)


def decoded(part: ImagePart | VideoPart) -> Seen:
    """Raises ``PictureError``, or ``InvalidRequest`` for a clip that is none."""
    if isinstance(part, ImagePart):
        with naming(part.place):
            found = decode(part.data, part.label)
        return Seen(part, (found.image,), found.image.size, found.notes)
    check_clip(part)
    frames = [decode_frame(part, index) for index in range(len(part.frames))]
    first = frames[0].image
    for index, frame in enumerate(frames):
        if frame.image.size != first.size:
            raise InvalidRequest(
                f"{part.label}: frame {index + 1} is {frame.image.width}x{frame.image.height}, "
                f"the first is {first.width}x{first.height}",
                "All frames of a clip must have one size; send others as separate pictures.",
                param="messages",
            )
    count = len(frames)
    metadata = {
        "total_num_frames": count,
        "fps": part.fps,
        "duration": count / part.fps,
        "frames_indices": list(range(count)),
        "width": first.width,
        "height": first.height,
    }
    return Seen(part, tuple(each.image for each in frames), first.size, frames[0].notes, metadata)


def smaller(seen: Seen, tokens: int, limit: int, size: tuple[int, int] | None) -> Seen:
    """``seen`` scaled down, so that of its ``tokens`` about as many are left as it may have.

    ``size``: at which the model saw it, perhaps scaled down already; None: nobody told.
    """
    most = seen.most(limit)
    width, height = min(seen.frames[0].size, size or seen.frames[0].size, key=math.prod)
    share = math.sqrt(most / tokens) * 0.97  # sizes are rounded up by processors
    scaled = max(int(width * share), _LEAST_EDGE), max(int(height * share), _LEAST_EDGE)
    frames = tuple(each.resize(scaled, Image.Resampling.BICUBIC) for each in seen.frames)
    what = "each two frames" if seen.metadata is not None else "a picture"
    why = f"at most {min(limit, LOW_DETAIL) if most < limit else limit} tokens for {what}"
    kept = tuple(note for note in seen.notes if not note.startswith("scaled down"))
    metadata = seen.metadata and {**seen.metadata, "width": scaled[0], "height": scaled[1]}
    return replace(
        seen,
        frames=frames,
        notes=(*kept, f"scaled down to {scaled[0]}x{scaled[1]}: {why}"),
        metadata=metadata,
    )


_TRIES = 8  # at a picture's size until its tokens are few enough
# Names by which configs and processors call the tokens that stand for pictures and clips.
_PLACEHOLDERS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")


@dataclass(frozen=True, slots=True, eq=False)
class AnyPrompt:
    """What a model is given: ``inputs`` are tensors of one row, on the CPU."""

    inputs: dict[str, Any]
    token_ids: tuple[int, ...]
    image_tokens: int
    seen: tuple[ImageSeen, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


class Prompts:
    """Makes prompts; any thread may ask. ``config`` is the model's.

    ``image_limit``: most tokens of one picture; larger ones are scaled down, if the processor goes by size.
    """

    def __init__(self, processor: Any, config: Any, context: int, image_limit: int) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._context = context
        self.image_limit = image_limit  # whoever rehearses lowers it where there is no room for more
        # Processors and tokenizers of transformers change settings of their own while they work.
        self._lock = Lock()
        self._placeholders = _placeholders(config) or _placeholders(processor)

    def build(self, conversation: Conversation, tools: tuple[Tool, ...] = ()) -> AnyPrompt:
        """``conversation`` up to where the model is to speak.

        Raises ``InvalidRequest``, ``PictureError``, or ``DoesNotFit`` for text or pictures that cannot fit.
        """
        if not conversation:
            raise InvalidRequest("there are no messages", "Send at least one.", param="messages")
        self._check_texts(conversation, tools)
        parts = [part for message in conversation for part in message.parts]
        if any(isinstance(part, VideoPart) for part in parts) and not has_clips(self._processor):
            raise InvalidRequest(
                "this model's processor takes no clips here",
                "send a few frames as pictures; where it knows clips, the package torchvision is missing",
                param="messages",
            )
        seen = [decoded(part) for part in parts if not isinstance(part, TextPart)]
        inputs = self._encoded(conversation, tools, seen)
        counts = self._counts(inputs, seen)
        if self._placeholders and 0 in counts:
            what = "pictures" if seen[counts.index(0)].metadata is None else "clips"
            raise InvalidRequest(
                f"the checkpoint's chat template has no place for {what}", "leave them out", param="messages"
            )
        for _ in range(_TRIES):
            large = [
                number for number, each in enumerate(seen) if counts[number] > each.most(self.image_limit)
            ]
            if not large:
                break
            sizes = self._sizes(inputs, seen)
            for number in large:
                seen[number] = smaller(seen[number], counts[number], self.image_limit, sizes[number])
            inputs = self._encoded(conversation, tools, seen)
            counts = self._counts(inputs, seen)
        if any(count > each.most(self.image_limit) for count, each in zip(counts, seen, strict=True)):
            raise self._of_any_size(max(counts))
        ids = inputs["input_ids"][0].tolist()
        told = tuple(
            each.told(count, place)
            for each, count, place in zip(seen, counts, self._sizes(inputs, seen), strict=True)
        )
        return AnyPrompt(inputs, tuple(ids), sum(each in self._placeholders for each in ids), told)

    def raw(self, text: str | tuple[int, ...]) -> AnyPrompt:
        """Text, or token ids, that the model goes on with as they are. Raises ``InvalidRequest``."""
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
                "the prompt holds the place of a picture, and no picture comes with it",
                "use /v1/chat/completions for pictures",
                param="prompt",
            )
        ids = torch.tensor([text])
        return AnyPrompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, text, 0)

    @cached_property
    def plain_token(self) -> int:
        """Some token of text, for prompts that nobody reads."""
        with self._lock:
            ids = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        return int(ids[-1])

    def largest(self) -> Conversation:
        """A picture that has as many tokens as one may have, and a word."""
        buffer = BytesIO()
        Image.new("RGB", (4096, 4096), (127, 127, 127)).save(buffer, "PNG")
        return (Message("user", (ImagePart(buffer.getvalue(), "the largest picture"), TextPart("this"))),)

    def _encoded(
        self, conversation: Conversation, tools: tuple[Tool, ...], seen: list[Seen]
    ) -> dict[str, Any]:
        left = iter(seen)
        messages = [_as_template_message(message, left) for message in conversation]
        wishes: dict[str, Any] = {"tools": [as_template_tool(tool) for tool in tools]} if tools else {}
        clips = [each.metadata for each in seen if each.metadata is not None]
        more = {"video_metadata": [clips], "do_sample_frames": False} if clips else {}
        if takes(self._processor.apply_chat_template, "processor_kwargs"):
            wishes["processor_kwargs"] = more
        else:
            wishes |= more
        if self._writes_control_tokens(conversation, tools):
            wishes["sanitize_control_tokens"] = True
        try:
            with self._lock:
                found = self._processor.apply_chat_template(
                    messages,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=True,
                    return_tensors="pt",
                    **wishes,
                )
        except TemplateError as error:
            raise InvalidRequest(
                f"the checkpoint's chat template refuses these messages: {error}",
                "Most templates want an optional system message first, then user and assistant in turn.",
                param="messages",
            ) from error
        except Exception as error:
            if "sanitize_control_tokens" in wishes:
                raise _cannot_tell_apart() from error
            told = in_one(error, "preparing the request")
            if isinstance(error, ValueError):  # what processors raise for pictures that find no place
                raise InvalidRequest(told.message, told.hint, param="messages") from None
            raise told from None
        return dict(found)

    @cached_property
    def _template(self) -> str:
        found = getattr(self._processor, "chat_template", None) or getattr(
            self._tokenizer, "chat_template", None
        )
        if isinstance(found, Mapping):
            found = found.get("default")
        if not isinstance(found, str):
            raise UsageError(
                "this checkpoint has no chat template: nobody says how it is spoken to",
                "send text that it goes on with (/v1/completions), or take an instruct model",
            )
        return found

    @cached_property
    def _takes_tools(self) -> bool:
        with suppress(CheckpointError):
            return ChatTemplate(self._template, {}).takes_tools
        return "tools" in self._template

    @cached_property
    def _control_names(self) -> tuple[str, ...]:
        """What only the template may write."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        names = {token.content for token in added if token.special}
        names |= {
            token.content for token in added if token.content.strip() and token.content in self._template
        }
        marks = (getattr(self._processor, name, None) for name in ("image_token", "video_token"))
        return tuple(names | {mark for mark in marks if isinstance(mark, str)})

    def _writes_control_tokens(self, conversation: Conversation, tools: tuple[Tool, ...]) -> bool:
        """Whether texts spell such names out. Raises ``InvalidRequest`` where that cannot be told apart."""
        text = "".join(_texts(conversation, tools))
        if not any(name in text for name in self._control_names):
            return False
        if not takes(self._processor.apply_chat_template, "sanitize_control_tokens"):
            raise _cannot_tell_apart()
        return True

    def _check_texts(self, conversation: Conversation, tools: tuple[Tool, ...]) -> None:
        texts = _texts(conversation, tools)
        self._check_length(texts)
        said_by_tools = any(message.role == "tool" for message in conversation)
        if (tools or said_by_tools) and not self._takes_tools:
            raise InvalidRequest(
                "the checkpoint's chat template has no place for tools", "leave them out", param="tools"
            )

    def _check_length(self, texts: list[str]) -> None:
        """Refuse half characters, and text that cannot fit, before work that grows with it."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    f"the text holds half a character ({text[error.start]!r}, at {error.start})",
                    "Send whole Unicode characters.",
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
                f"Send at most {self._context - 1:,} tokens, or start with a larger --context.",
                param="messages",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters in which the vocabulary writes its longest token: no fewer than it stands for."""
        with self._lock:
            return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _counts(self, inputs: dict[str, Any], seen: list[Seen]) -> list[int]:
        """Placeholders of each picture: of one all there are, of several the runs, if each has one."""
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
        # In company this processor makes other numbers of each: the same of all, as far as is known.
        least, more = divmod(sum(runs), len(seen))
        return [least + (number < more) for number in range(len(seen))]

    def _alone(self, one: Seen) -> int:
        """Placeholders of one picture by itself."""
        inputs = self._encoded((Message("user", (one.part,)),), (), [one])
        return sum(each in self._placeholders for each in inputs["input_ids"][0].tolist())

    def _sizes(self, inputs: dict[str, Any], seen: list[Seen]) -> list[tuple[int, int] | None]:
        """Width and height at which the model sees each, where what the processor gives tells; else None."""
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
        found = [iter(each) for each in pixels]
        return [next(found[each.metadata is not None], None) for each in seen]

    def _of_any_size(self, tokens: int) -> DoesNotFit:
        return DoesNotFit(
            f"a picture has {tokens} tokens with this model however small it is; "
            f"{self.image_limit} are allowed",
            f"start with --image-tokens {tokens} and a --context with room for it",
            param="messages",
        )


def _placeholders(thing: Any) -> frozenset[int]:
    """The tokens that stand for pictures and clips, as a config or a processor names them."""
    told = (getattr(thing, name, None) for name in _PLACEHOLDERS)
    return frozenset(each for each in told if isinstance(each, int))


def _cannot_tell_apart() -> InvalidRequest:
    return InvalidRequest(
        "the text spells out control tokens of this model, and its processor cannot read them as text",
        "write such names differently, or upgrade transformers",
        param="messages",
    )


def _texts(conversation: Conversation, tools: tuple[Tool, ...]) -> list[str]:
    texts = [part.text for message in conversation for part in message.parts if isinstance(part, TextPart)]
    texts += [f"{call.name} {call.arguments}" for message in conversation for call in message.calls]
    texts += [
        json.dumps([tool.name, tool.description, tool.parameters], ensure_ascii=False) for tool in tools
    ]
    return texts


def _as_template_message(message: Message, left: Any) -> dict[str, Any]:
    """``left`` gives what was seen of the pictures, in their order."""
    content: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        else:
            kind = "image" if isinstance(part, ImagePart) else "video"
            content.append({"type": kind, kind: next(left).pixels})
    calls = as_template_calls(message.calls)
    return {"role": message.role, "content": content, **({"tool_calls": calls} if calls else {})}
