"""Qwen3-VL's placeholders of pictures and clips, in the rendered template and in tokens."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from vlfit.api.conversation import Conversation, ImagePart, VideoPart
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.processor_files import ImageProcessing
from vlfit.errors import CheckpointError, InvalidRequest
from vlfit.images.cancellation import check_cancelled
from vlfit.models.base import PreparedImage
from vlfit.models.qwen3_vl.config import read_image_processing, read_video_processing
from vlfit.models.qwen3_vl.image_processor import prepare_image, prepare_video, smart_resize
from vlfit.prompt.control_tokens import ControlTokens, Markers


class Qwen3VLPrompts:
    """Qwen3-VL's ``ImagePrompts``: prepares pictures and clips, and writes their placeholders into a prompt.

    Raises ``CheckpointError`` if the picture settings are missing or contradict config.json.
    """

    def __init__(self, folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.processing = read_image_processing(folder)
        self.video_processing = read_video_processing(folder)
        _check_processing(self.processing, self.video_processing, config)
        self._image = _Placeholder(tokenizer, config.image_token_id, "image_token_id")
        self._video = _Placeholder(tokenizer, config.video_token_id, "video_token_id")
        self._vision_start = _token(tokenizer, config.vision_start_token_id, "vision_start_token_id")
        self._vision_end = _token(tokenizer, config.vision_end_token_id, "vision_end_token_id")

    @property
    def names(self) -> tuple[str, ...]:
        """Control tokens that only a template may write."""
        return self._image.text, self._video.text, self._vision_start, self._vision_end

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Tokens whose embeddings are replaced by features."""
        return frozenset((self._image.token_id, self._video.token_id))

    @property
    def min_tokens(self) -> int:
        """Tokens of the smallest picture."""
        factor = self.processing.patch_size * self.processing.merge_size
        return -(-self.processing.min_pixels // factor**2)

    def size_for_tokens(self, height: int, width: int, max_tokens: int) -> tuple[int, int] | None:
        """Height and width of a picture with about ``max_tokens`` tokens: more only if it is so long and thin
        that the formula gives more. None: the checkpoint would enlarge it.
        """
        factor = self.processing.patch_size * self.processing.merge_size
        least = self.processing.min_pixels
        size = smart_resize(height, width, factor, least, max_tokens * factor**2)
        return None if size[0] * size[1] < least else size

    @property
    def pixels_per_token(self) -> int:
        return (self.processing.patch_size * self.processing.merge_size) ** 2

    def prepare(self, conversation: Conversation, max_tokens: int | None) -> tuple[PreparedImage, ...]:
        """Every picture and clip of ``conversation``, each capped at ``max_tokens``.

        A repeated picture is prepared once. Raises ``Cancelled`` between two pictures.
        """
        return tuple(self._prepare(conversation, max_tokens))

    def _prepare(self, conversation: Conversation, max_tokens: int | None) -> Iterator[PreparedImage]:
        seen: dict[tuple[bytes, str], PreparedImage] = {}
        for message in conversation:
            for part in message.parts:
                if isinstance(part, ImagePart):
                    check_cancelled()
                    same = (part.data, part.detail)
                    if same not in seen:
                        seen[same] = prepare_image(part, self.processing, max_tokens)
                    yield seen[same]
                elif isinstance(part, VideoPart):
                    yield prepare_video(part, self.video_processing, max_tokens)

    def expand_clips(
        self,
        rendered: str,
        images: tuple[PreparedImage, ...],
        control: ControlTokens,
        markers: Markers | None,
    ) -> str:
        """One placeholder for each picture and each temporal patch of a clip, the latter with its time.

        As transformers does: times replace the bare placeholder, inside the ``<|vision_start|>`` and
        ``<|vision_end|>`` that the template wrote around it.
        """
        pieces = re.split(control.unmarked_pattern(self._image.text, self._video.text, markers), rendered)
        placeholders = pieces[1::2]
        wanted = [self._video.text if image.is_video else self._image.text for image in images]
        if placeholders != wanted:
            raise InvalidRequest(
                f"the conversation has {len(wanted)} pictures or clips, "
                f"but the checkpoint's chat template placed {len(placeholders)}",
                "Put pictures into user messages; most templates drop them elsewhere.",
                param="messages",
            )
        for index, image in enumerate(images):
            if image.is_video:
                pieces[2 * index + 1] = "".join(
                    f"<{seconds:.1f} seconds>{self._vision_start}{self._video.text}{self._vision_end}"
                    for seconds in image.frame_seconds
                )
        return "".join(pieces)

    def expand(self, token_ids: list[int], images: tuple[PreparedImage, ...]) -> tuple[int, ...]:
        """Repeat each placeholder once per token of its picture (or temporal patch)."""
        repeats = [image.tokens // image.grid[0] for image in images for _ in range(image.grid[0])]
        placeholders = (self._image.token_id, self._video.token_id)
        places = [place for place, token_id in enumerate(token_ids) if token_id in placeholders]
        if len(places) != len(repeats):
            raise CheckpointError(
                f"the tokenizer produced {len(places)} of {len(repeats)} placeholders",
                "Its added tokens are not Qwen3-VL's; fetch tokenizer.json again.",
            )
        expanded: list[int] = []
        last = 0
        for place, count in zip(places, repeats, strict=True):
            expanded += token_ids[last:place]
            expanded += [token_ids[place]] * count
            last = place + 1
        expanded += token_ids[last:]
        return tuple(expanded)


class _Placeholder:
    def __init__(self, tokenizer: Tokenizer, token_id: int, field: str) -> None:
        self.token_id = token_id
        self.text = _token(tokenizer, token_id, field)


def _token(tokenizer: Tokenizer, token_id: int, field: str) -> str:
    token: str | None = tokenizer.id_to_token(token_id)
    if token is None:
        raise CheckpointError(
            f"config.json: {field} is {token_id}, which tokenizer.json does not have",
            "The two files belong to different models; fetch the checkpoint again.",
        )
    return token


def _check_processing(pictures: ImageProcessing, clips: ImageProcessing, config: ModelConfig) -> None:
    """Pictures and clips share one vision tower: all settings but pixel limits must agree with it."""
    vision = config.required_vision
    if replace(clips, min_pixels=0, max_pixels=0) != replace(pictures, min_pixels=0, max_pixels=0):
        raise CheckpointError(
            "preprocessor_config.json and video_preprocessor_config.json differ in more than sizes",
            "Qwen3-VL has the same patches and normalization in both; fetch the two files again.",
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
