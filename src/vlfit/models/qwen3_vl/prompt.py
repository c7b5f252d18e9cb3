"""Qwen3-VL's placeholders of pictures and clips, in the rendered template and in tokens."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from vlfit.api.conversation import Conversation, ImagePart, TextPart, VideoPart
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.errors import CheckpointError, InvalidRequest
from vlfit.images.cancellation import check_cancelled
from vlfit.images.clips import check_clip, header_size
from vlfit.images.decode_pool import Size
from vlfit.images.spooled_file import EncodedFile
from vlfit.models.interface import CheckImages, PreparedImage
from vlfit.models.qwen3_vl.config import read_image_processor_config, read_video_processor_config
from vlfit.models.qwen3_vl.image_processor import (
    CheckImage,
    image_from_header,
    prepare_image,
    prepare_video,
    smart_resize,
    video_from_header,
)
from vlfit.prompt.control_tokens import ControlTokens, Markers


class Qwen3VLPrompts:
    """Qwen3-VL's ``ImagePrompts``: prepares pictures and clips, and writes their placeholders into a prompt.

    Raises ``CheckpointError`` if image processor settings are missing or contradict config.json.
    """

    def __init__(self, folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.processing = read_image_processor_config(folder)
        self.video_processing = read_video_processor_config(folder)
        _check_processing(self.processing, self.video_processing, config)
        self._image = _Placeholder(tokenizer, config.image_token_id, "image_token_id")
        self._video = _Placeholder(tokenizer, config.video_token_id, "video_token_id")
        self._vision_start = _token(tokenizer, config.vision_start_token_id, "vision_start_token_id")
        self._vision_end = _token(tokenizer, config.vision_end_token_id, "vision_end_token_id")

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the placeholders and of the tokens around them, which only a chat template may write."""
        return self._image.text, self._video.text, self._vision_start, self._vision_end

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids of the placeholders of pictures and of clips."""
        return frozenset((self._image.token_id, self._video.token_id))

    @property
    def min_tokens(self) -> int:
        """Image tokens of the smallest picture; smaller ones are enlarged to it."""
        factor = self.processing.patch_size * self.processing.merge_size
        return -(-self.processing.min_pixels // factor**2)

    def size_for_tokens(self, height: int, width: int, max_tokens: int) -> tuple[int, int] | None:
        """(height, width) to resize a picture of ``height`` x ``width`` pixels to, for about
        ``max_tokens`` image tokens.

        That is at most ``max_tokens`` but for very long and thin pictures, which get more. None if the
        result would be below the checkpoint's smallest size, to which it would be enlarged again. Raises
        ``PictureTooLarge``.
        """
        factor = self.processing.patch_size * self.processing.merge_size
        least = self.processing.min_pixels
        size = smart_resize(height, width, factor, least, max_tokens * factor**2)
        return None if size[0] * size[1] < least else size

    @property
    def pixels_per_token(self) -> int:
        """Pixels of a resized picture for each of its image tokens."""
        return (self.processing.patch_size * self.processing.merge_size) ** 2

    def prepare(
        self, conversation: Conversation, max_tokens: int | None, check: CheckImages | None = None
    ) -> tuple[PreparedImage, ...]:
        """Decode and resize every picture and clip of ``conversation``, in order; see ``ImagePrompts``.

        A repeated picture is prepared once. Raises ``PictureError``, ``InvalidRequest`` for a clip, what
        ``check`` raises, and ``Cancelled`` (before each picture).
        """
        parts = [part for message in conversation for part in message.parts if not isinstance(part, TextPart)]
        if check is not None and len(parts) > 1:
            check(self._from_headers(parts, max_tokens))
            check = None
        # The header of a sole picture is checked on the way, which saves sending it to a worker twice.
        check_one = None if check is None else lambda image: check((image,))
        return tuple(self._prepare(parts, max_tokens, check_one))

    def _from_headers(
        self, parts: Sequence[ImagePart | VideoPart], max_tokens: int | None
    ) -> tuple[PreparedImage, ...]:
        sizes: dict[int, Size] = {}  # by the identity of files, whose hashes would take long
        images = []
        for part in parts:
            check_cancelled()
            if isinstance(part, VideoPart):
                check_clip(part)
            file = id(part.data if isinstance(part, ImagePart) else part.frames[0])
            size = sizes[file] = sizes.get(file) or header_size(part)
            if isinstance(part, ImagePart):
                images.append(image_from_header(part, size, self.processing, max_tokens))
            else:
                images.append(video_from_header(part, size, self.video_processing, max_tokens))
        return tuple(images)

    def _prepare(
        self, parts: Sequence[ImagePart | VideoPart], max_tokens: int | None, check: CheckImage | None
    ) -> Iterator[PreparedImage]:
        seen: dict[tuple[EncodedFile, str], PreparedImage] = {}
        for part in parts:
            if isinstance(part, ImagePart):
                check_cancelled()
                if len(parts) == 1:  # hashing a large file takes long
                    yield prepare_image(part, self.processing, max_tokens, check)
                    return
                same = (part.data, part.detail)
                if same not in seen:
                    seen[same] = prepare_image(part, self.processing, max_tokens, check)
                yield seen[same]
            else:
                yield prepare_video(part, self.video_processing, max_tokens, check)

    def expand_clips(
        self,
        rendered: str,
        images: tuple[PreparedImage, ...],
        control: ControlTokens,
        markers: Markers | None,
    ) -> str:
        """Replace each clip's placeholder in ``rendered`` by one for each of its temporal patches.

        Each becomes ``<1.5 seconds><|vision_start|><|video_pad|><|vision_end|>``, with the time of the patch.
        As in transformers, these are inside the ``<|vision_start|>`` and ``<|vision_end|>`` that the template
        wrote around the placeholder. ``control`` and ``markers`` tell placeholders from the same text in
        messages. Raises ``InvalidRequest`` if the template did not write one placeholder for each of
        ``images``.
        """
        pieces = re.split(control.placeholder_pattern(self._image.text, self._video.text, markers), rendered)
        placeholders = pieces[1::2]
        wanted = [self._video.text if image.is_video else self._image.text for image in images]
        if placeholders != wanted:
            raise InvalidRequest(
                f"the conversation has {len(wanted)} pictures or clips, "
                f"but the checkpoint's chat template placed {len(placeholders)}",
                "Put pictures into user messages: most templates drop them elsewhere. If they are there, the "
                "template is a text model's: get another conversion of the model.",
                param="messages",
            )
        for index, image in enumerate(images):
            if image.is_video:
                pieces[2 * index + 1] = "".join(
                    f"<{seconds:.1f} seconds>{self._vision_start}{self._video.text}{self._vision_end}"
                    for seconds in image.frame_seconds
                )
        return "".join(pieces)

    def repeat_placeholders(self, token_ids: list[int], images: tuple[PreparedImage, ...]) -> tuple[int, ...]:
        """Repeat each placeholder in ``token_ids`` once per image token of its picture or temporal patch.

        Raises ``CheckpointError`` if there is not one placeholder for each picture and temporal patch.
        """
        repeats = [image.tokens // image.grid[0] for image in images for _ in range(image.grid[0])]
        placeholders = (self._image.token_id, self._video.token_id)
        indices = [index for index, token_id in enumerate(token_ids) if token_id in placeholders]
        if len(indices) != len(repeats):
            raise CheckpointError(
                f"the tokenizer produced {len(indices)} of {len(repeats)} placeholders",
                "Its added tokens are not Qwen3-VL's; fetch tokenizer.json again.",
            )
        expanded: list[int] = []
        last = 0
        for index, count in zip(indices, repeats, strict=True):
            expanded += token_ids[last:index]
            expanded += [token_ids[index]] * count
            last = index + 1
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


def _check_processing(
    pictures: ImageProcessorConfig, clips: ImageProcessorConfig, config: ModelConfig
) -> None:
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
