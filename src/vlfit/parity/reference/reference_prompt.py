"""Prompts of the reference: the chat template, the tokens, resized pictures, patches, and positions.

Written from transformers' ``apply_chat_template`` (its Jinja environment), ``Qwen2VLImageProcessorPil``
(``smart_resize``, Pillow's bicubic, patches) and ``get_rope_index``. Jinja, tokenizers and Pillow are shared
with the engine, nothing else.
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
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL import Image, ImageOps
from torch import Tensor

from vlfit.api.conversation import Conversation, ImagePart, TextPart
from vlfit.errors import CheckpointError
from vlfit.prompt.tokenizer import read_tokenizer

Grid = tuple[int, int, int]  # frames, rows and columns of patches
MAX_ASPECT = 200  # the reference refuses longer pictures


@dataclass(frozen=True)
class ReferencePicture:
    """``pixels`` [height, width, 3] uint8, resized; ``patches`` [n, values] float32 in the model's order."""

    pixels: Tensor
    patches: Tensor
    grid: Grid


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

    def build(
        self,
        conversation: Conversation,
        image_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ReferencePrompt:
        """The prompt of ``conversation``, which may have text and pictures, no clips.

        ``image_tokens``: most tokens of a picture; None: the checkpoint's limit. ``variables``: further
        ones of the chat template.
        """
        pictures: list[ReferencePicture] = []
        messages: list[dict[str, Any]] = []
        for message in conversation:
            parts: list[dict[str, Any]] = []
            for part in message.parts:
                if isinstance(part, TextPart):
                    parts.append({"type": "text", "text": part.text})
                elif isinstance(part, ImagePart):
                    pictures.append(self.picture(part.data, image_tokens))
                    parts.append({"type": "image"})
                else:
                    raise NotImplementedError("clips have no reference yet")
            only_text = all(part["type"] == "text" for part in parts)
            content: Any = "".join(part["text"] for part in parts) if only_text else parts
            messages.append({"role": message.role, "content": content})
        text = self._render(messages, variables or {})
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        merged = int(self._processor.get("merge_size", 2)) ** 2
        counts = [math.prod(picture.grid) // merged for picture in pictures]
        pad = int(self.config.get("image_token_id", -1))
        if ids.count(pad) != len(pictures) and pictures:
            raise CheckpointError(
                f"the chat template wrote {ids.count(pad)} places for {len(pictures)} pictures"
            )
        after = iter(counts)
        tokens = [
            each
            for token in ids
            for each in ([token] * next(after) if pictures and token == pad else [token])
        ]
        grids = [picture.grid for picture in pictures]
        return ReferencePrompt(torch.tensor(tokens), self.positions(tokens, grids), tuple(pictures))

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        template = environment.from_string(self._template)
        return template.render(**special, **variables, messages=messages, add_generation_prompt=True)

    def picture(self, data: bytes, image_tokens: int | None) -> ReferencePicture:
        """Decode the picture file ``data``, resize it, and cut it into patches.

        ``image_tokens``: as in ``build``.
        """
        settings = self._processor
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        width, height = self.size(*image.size, image_tokens)
        resized = np.array(image.resize((width, height), Image.Resampling.BICUBIC))
        values = torch.from_numpy(resized).float() * float(settings.get("rescale_factor", 1 / 255))
        mean, std = (torch.tensor(settings.get(f"image_{name}", [0.5] * 3)) for name in ("mean", "std"))
        values = ((values - mean) / std).permute(2, 0, 1)
        patch, merge = int(settings.get("patch_size", 16)), int(settings.get("merge_size", 2))
        frames = int(settings.get("temporal_patch_size", 2))
        rows, columns = height // patch, width // patch
        cut = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6)  # squares, patches of a square, channel, row, column
        cut = cut.reshape(rows * columns, 3, 1, patch * patch).expand(-1, -1, frames, -1)
        return ReferencePicture(torch.from_numpy(resized), cut.flatten(1).contiguous(), (1, rows, columns))

    def size(self, width: int, height: int, image_tokens: int | None) -> tuple[int, int]:
        """Width and height that a picture is resized to: multiples of a merged patch, limited in area.

        ``image_tokens``: as in ``build``. Raises ``ValueError`` for an aspect ratio beyond ``MAX_ASPECT``.
        """
        settings = self._processor
        edges = settings.get("size") or {}
        least = settings.get("min_pixels") or edges.get("shortest_edge") or edges.get("min_pixels") or 56 * 56
        most = (
            settings.get("max_pixels")
            or edges.get("longest_edge")
            or edges.get("max_pixels")
            or 28 * 28 * 1280
        )
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

        ``grids``: of the pictures, in patches. Text goes on after the largest position of a picture.
        """
        merge = int(self._processor.get("merge_size", 2))
        pads = {int(self.config.get("image_token_id", -1)), int(self.config.get("video_token_id", -1))}
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


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> None:
    raise TemplateError(message)
