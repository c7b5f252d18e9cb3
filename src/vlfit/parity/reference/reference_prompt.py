"""Prompts of the reference: the chat template, the tokens, resized pictures and clips, patches, positions.

Written from transformers' ``apply_chat_template`` (its Jinja environment), ``Qwen2VLImageProcessorPil``
(``smart_resize``, Pillow's bicubic, patches), ``Qwen3VLVideoProcessor`` (sizes; frames are resized as
pictures are), ``Qwen3VLProcessor`` (times of frames) and ``get_rope_index``. Jinja and the process that it
runs in, tokenizers and Pillow are shared with the engine, nothing else.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vlfit.api.conversation import Conversation, ImagePart, TextPart
from vlfit.errors import CheckpointError
from vlfit.parity.reference.reference_template import render_reference
from vlfit.prompt.template_process import TemplateFailure, failed
from vlfit.prompt.tokenizer import read_tokenizer

Grid = tuple[int, int, int]  # frames, rows and columns of patches
MAX_ASPECT = 200  # the reference refuses longer pictures


@dataclass(frozen=True)
class ReferencePicture:
    """``pixels`` [height, width, 3] uint8, resized; ``patches`` [n, values] float32 in the model's order.

    A clip's pixels are [frames, height, width, 3], and ``seconds`` the time of each step of its grid.
    """

    pixels: Tensor
    patches: Tensor
    grid: Grid
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class ReferencePrompt:
    """``tokens`` [T] int64, ``positions`` [3, T] int64, and the pictures in their order."""

    tokens: Tensor
    positions: Tensor
    pictures: tuple[ReferencePicture, ...]


class PromptReference:
    """Makes prompts for the checkpoint in ``folder``: its chat template, tokenizer and picture sizes."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.config = config
        self._template = _chat_template(folder)
        self._settings = _json(folder / "tokenizer_config.json")
        # Adjusted as transformers does by family; the tokenizer is shared, and has a check of its own.
        self.tokenizer = read_tokenizer(folder, str(config.get("model_type", "")))
        self.tokenizer.no_truncation()
        self._processor = _json(folder / "preprocessor_config.json")
        if not self._processor:
            self._processor = _json(folder / "processor_config.json").get("image_processor", {})
        self._clip_processor = (
            _json(folder / "video_preprocessor_config.json")
            or _json(folder / "processor_config.json").get("video_processor", {})
            or self._processor
        )

    def build(
        self,
        conversation: Conversation,
        image_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ReferencePrompt:
        """The prompt of ``conversation``, which may have text, pictures and clips.

        ``image_tokens``: most tokens of a picture or a step of a clip; None: the checkpoint's limit.
        ``variables``: further ones of the chat template.
        """
        pictures: list[ReferencePicture] = []
        messages: list[dict[str, Any]] = []
        for message in conversation:
            parts: list[dict[str, Any]] = []
            for part in message.parts:
                if isinstance(part, TextPart):
                    parts.append({"type": "text", "text": part.text})
                elif isinstance(part, ImagePart):
                    pictures.append(self.picture(bytes(part.data), image_tokens))
                    parts.append({"type": "image"})
                else:
                    frames = [bytes(frame) for frame in part.frames]
                    pictures.append(self.clip(frames, part.fps, image_tokens))
                    parts.append({"type": "video"})
            only_text = all(part["type"] == "text" for part in parts)
            content: Any = "".join(part["text"] for part in parts) if only_text else parts
            messages.append({"role": message.role, "content": content})
        text = self._with_times(self._render(messages, variables or {}), pictures)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        merged = int(self._processor.get("merge_size", 2)) ** 2
        # Each step of a clip has its own placeholder, and is to positions what a picture is.
        grids = [
            (1, rows, columns) for each in pictures for time, rows, columns in [each.grid] * each.grid[0]
        ]
        pads = self._pads
        if pictures and (found := sum(token in pads for token in ids)) != len(grids):
            raise CheckpointError(f"the chat template wrote {found} places for {len(grids)} pictures")
        after = iter(grids)
        tokens = [
            each
            for token in ids
            for each in (
                [token] * (math.prod(next(after)) // merged) if pictures and token in pads else [token]
            )
        ]
        return ReferencePrompt(torch.tensor(tokens), self.positions(tokens, grids), tuple(pictures))

    @property
    def _pads(self) -> set[int]:
        return {int(self.config.get(f"{kind}_token_id") or -1) for kind in ("image", "video")}

    def _with_times(self, text: str, pictures: Sequence[ReferencePicture]) -> str:
        """``text`` with a placeholder for each step of a clip, in place of one for the clip."""
        clips = [picture for picture in pictures if picture.seconds]
        if not clips:
            return text
        begin, pad, end = (
            str(self.tokenizer.id_to_token(int(self.config[f"{name}_token_id"])))
            for name in ("vision_start", "video", "vision_end")
        )
        pieces = text.split(pad)
        if len(pieces) != len(clips) + 1:
            raise CheckpointError(f"the chat template wrote {len(pieces) - 1} places for {len(clips)} clips")
        whole = pieces[0]
        for clip, piece in zip(clips, pieces[1:], strict=True):
            whole += "".join(f"<{seconds:.1f} seconds>{begin}{pad}{end}" for seconds in clip.seconds) + piece
        return whole

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        given = {**special, **variables, "messages": messages, "add_generation_prompt": True}
        try:
            return render_reference(self._template, given)
        except TemplateFailure as error:
            raise failed(str(error)) from None

    def picture(self, data: bytes, image_tokens: int | None) -> ReferencePicture:
        """Decode the picture file ``data``, resize it, and cut it into patches.

        ``image_tokens``: as in ``build``.
        """
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        resized = _resized(image, self.size(*image.size, image_tokens))
        return ReferencePicture(resized, *self._patches(resized[None]))

    def clip(self, frames: Sequence[bytes], fps: float, image_tokens: int | None) -> ReferencePicture:
        """Decode the picture files ``frames``, resize them, and cut them into patches, step by step.

        A step is a few frames; the last frame is repeated to fill one. ``fps``: frames per second.
        ``image_tokens``: as in ``build``.
        """
        images = [ImageOps.exif_transpose(Image.open(io.BytesIO(each))).convert("RGB") for each in frames]
        size = self._clip_size(len(images), *images[0].size, image_tokens)
        step = int(self._processor.get("temporal_patch_size", 2))
        numbers = [*range(len(images)), *[len(images) - 1] * (-len(images) % step)]
        resized = torch.stack([_resized(images[number], size) for number in numbers])
        seconds = tuple(
            (numbers[first] / fps + numbers[first + step - 1] / fps) / 2
            for first in range(0, len(numbers), step)
        )
        return ReferencePicture(resized, *self._patches(resized), seconds)

    def _patches(self, pixels: Tensor) -> tuple[Tensor, Grid]:
        """Patches of ``pixels`` [frames, height, width, 3] in the model's order, and their grid.

        One frame alone fills a step by itself.
        """
        settings = self._processor
        values = pixels.float() * float(settings.get("rescale_factor", 1 / 255))
        mean, std = (torch.tensor(settings.get(f"image_{name}", [0.5] * 3)) for name in ("mean", "std"))
        values = (values - mean) / std
        patch, merge = int(settings.get("patch_size", 16)), int(settings.get("merge_size", 2))
        step = int(settings.get("temporal_patch_size", 2))
        if len(values) == 1:
            values = values.expand(step, -1, -1, -1)
        _, height, width, _ = values.shape
        times, rows, columns = len(values) // step, height // patch, width // patch
        cut = values.reshape(times, step, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        # Steps, squares, patches of a square; then channel, frame, row, column.
        cut = cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        grid = (times, rows, columns)
        return cut.reshape(math.prod(grid), 3 * step * patch * patch).contiguous(), grid

    def _clip_size(self, frames: int, width: int, height: int, image_tokens: int | None) -> tuple[int, int]:
        """Width and height that frames are resized to; the limits in area are for all of them together."""
        least, most = _limits(self._clip_processor, 128 * 32 * 32, 768 * 32 * 32)
        unit = int(self._processor.get("patch_size", 16)) * int(self._processor.get("merge_size", 2))
        step = int(self._processor.get("temporal_patch_size", 2))
        frames = max(frames, step)
        if image_tokens is not None:
            most = min(most, image_tokens * unit * unit * frames)
        least = min(least, most)
        if min(width, height) < unit:
            grow = max(unit / width, unit / height)
            width, height = int(width * grow), int(height * grow)
        if max(width, height) / min(width, height) > MAX_ASPECT:
            raise ValueError(f"the clip is {width}x{height}")
        whole = round(frames / step) * step
        wide, high = round(width / unit) * unit, round(height / unit) * unit
        if whole * wide * high > most:
            shrink = math.sqrt(frames * width * height / most)
            wide = max(unit, math.floor(width / shrink / unit) * unit)
            high = max(unit, math.floor(height / shrink / unit) * unit)
        elif whole * wide * high < least:
            grow = math.sqrt(least / (frames * width * height))
            wide, high = math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
        return wide, high

    def size(self, width: int, height: int, image_tokens: int | None) -> tuple[int, int]:
        """Width and height that a picture is resized to: multiples of a merged patch, limited in area.

        ``image_tokens``: as in ``build``. Raises ``ValueError`` for an aspect ratio beyond ``MAX_ASPECT``.
        """
        settings = self._processor
        least, most = _limits(settings, 56 * 56, 28 * 28 * 1280)
        unit = int(settings.get("patch_size", 16)) * int(settings.get("merge_size", 2))
        if image_tokens is not None:
            most = min(most, image_tokens * unit * unit)
        least = min(least, most)
        if max(width, height) / min(width, height) > MAX_ASPECT:
            raise ValueError(f"the picture is {width}x{height}")
        wide, high = round(width / unit) * unit, round(height / unit) * unit
        if wide * high > most:
            shrink = math.sqrt(width * height / most)
            wide = max(unit, math.floor(width / shrink / unit) * unit)
            high = max(unit, math.floor(height / shrink / unit) * unit)
        elif wide * high < least:
            grow = math.sqrt(least / (width * height))
            wide, high = math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
        return wide, high

    def positions(self, tokens: Sequence[int], grids: Sequence[Grid]) -> Tensor:
        """Positions [3, T] of ``tokens`` for multimodal RoPE: time, row, column.

        ``grids``: of the pictures and the steps of clips, in patches. Text goes on after the largest position
        of each.
        """
        merge = int(self._processor.get("merge_size", 2))
        pads = self._pads
        places: list[tuple[int, int, int]] = []
        begin, index, pictures = 0, 0, iter(grids)
        while index < len(tokens):
            if tokens[index] not in pads:
                places.append((begin, begin, begin))
                begin, index = begin + 1, index + 1
                continue
            _, rows, columns = next(pictures)
            rows, columns = rows // merge, columns // merge
            places += [
                (begin, begin + row, begin + column) for row in range(rows) for column in range(columns)
            ]
            index += rows * columns
            begin += max(rows, columns)
        return torch.tensor(places).T.contiguous()


def _limits(settings: Mapping[str, Any], least: int, most: int) -> tuple[int, int]:
    """Fewest and most pixels that ``settings`` of a processor name, else ``least`` and ``most``."""
    edges = settings.get("size") or {}
    return (
        settings.get("min_pixels") or edges.get("shortest_edge") or edges.get("min_pixels") or least,
        settings.get("max_pixels") or edges.get("longest_edge") or edges.get("max_pixels") or most,
    )


def _resized(image: Image.Image, size: tuple[int, int]) -> Tensor:
    return torch.from_numpy(np.array(image.resize(size, Image.Resampling.BICUBIC)))


def _chat_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    for file in ("chat_template.json", "tokenizer_config.json"):
        source = _json(folder / file).get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((each["template"] for each in source if each.get("name") == "default"), None)
        if source:
            return str(source)
    raise CheckpointError(f"{folder} has no chat template", "Fetch the checkpoint again: vlfit pull NAME.")


def _json(path: Path) -> dict[str, Any]:
    loaded = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return loaded if isinstance(loaded, dict) else {}
