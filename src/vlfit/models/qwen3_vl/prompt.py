"""Where pictures and clips stand in a prompt: their placeholders in text, then in tokens.

Knows: the placeholders of Qwen3-VL, how often each is repeated, and that a clip is written out with its
times. Does not know: templates, how text becomes tokens (``builder.py``), or pixels beyond preparing them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from vlfit.api.conversation import Conversation, ImagePart, VideoPart
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.processor_files import ImageProcessing
from vlfit.errors import CheckpointError, InvalidRequest
from vlfit.images.cancellation import check_wanted
from vlfit.models.qwen3_vl.image_processor import PreparedImage, prepare_image, prepare_video
from vlfit.prompt.control_tokens import ControlTokens, Markers


class PicturePlaces:
    """Of a checkpoint with eyes. Raises ``CheckpointError`` for picture settings that are missing or that do
    not agree with the rest.
    """

    def __init__(self, folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.processing = ImageProcessing.read(folder)
        self.video_processing = ImageProcessing.read_video(folder)
        _check_processing(self.processing, self.video_processing, config)
        self._image = _Placeholder(tokenizer, config.image_token_id, "image_token_id")
        self._video = _Placeholder(tokenizer, config.video_token_id, "video_token_id")
        self._vision_start = _token(tokenizer, config.vision_start_token_id, "vision_start_token_id")
        self._vision_end = _token(tokenizer, config.vision_end_token_id, "vision_end_token_id")

    @property
    def names(self) -> tuple[str, ...]:
        """The tokens that only a template may write."""
        return self._image.text, self._video.text, self._vision_start, self._vision_end

    def prepare(self, conversation: Conversation, max_tokens: int | None) -> tuple[PreparedImage, ...]:
        """Every picture and clip of ``conversation``, each capped at ``max_tokens``.

        A picture that comes again is prepared once. Raises ``Unwanted`` between two of them.
        """
        return tuple(self._prepare(conversation, max_tokens))

    def _prepare(self, conversation: Conversation, max_tokens: int | None) -> Iterator[PreparedImage]:
        seen: dict[tuple[bytes, str], PreparedImage] = {}
        for message in conversation:
            for part in message.parts:
                if isinstance(part, ImagePart):
                    check_wanted()
                    same = (part.data, part.detail)
                    if same not in seen:
                        seen[same] = prepare_image(part, self.processing, max_tokens)
                    yield seen[same]
                elif isinstance(part, VideoPart):
                    yield prepare_video(part, self.video_processing, max_tokens)

    def write_out_clips(
        self,
        rendered: str,
        images: tuple[PreparedImage, ...],
        control: ControlTokens,
        markers: Markers | None,
    ) -> str:
        """One placeholder for each picture and each temporal patch of a clip, the latter with its time.

        transformers puts the times in the place of the bare placeholder and keeps the ``<|vision_start|>``
        and ``<|vision_end|>`` that the template wrote around it; so do we.
        """
        pieces = re.split(control.unmarked(self._image.text, self._video.text, markers), rendered)
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

    def expand(self, token_ids: list[int], images: tuple[PreparedImage, ...]) -> tuple[int, ...]:
        """Each placeholder as often as its picture (or temporal patch) has tokens."""
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
        return tuple(expanded)


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


def _check_processing(pictures: ImageProcessing, clips: ImageProcessing, config: ModelConfig) -> None:
    """Pictures and clips go through one vision tower: all but their pixel limits must agree with it."""
    vision = config.eyes
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
