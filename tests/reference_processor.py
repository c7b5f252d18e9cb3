"""transformers' own processor for a checkpoint, as far as it goes without torchvision.

Its video processor needs torchvision, so a stand-in gives only the grids; all text handling is transformers'.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlfit.api.conversation import Conversation, ImagePart, TextPart, VideoPart
from vlfit.checkpoint.processor_files import ImageProcessorConfig, read_chat_template
from vlfit.images.decode import decode
from vlfit.models.qwen3_vl.config import read_video_processor_config
from vlfit.models.qwen3_vl.image_processor import prepare_video


class _Clips:
    """What the reference's text handling asks of a video processor: grids and times."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, processing: ImageProcessorConfig) -> None:
        self.processing = processing
        self.merge_size = processing.merge_size
        self.temporal_patch_size = processing.temporal_patch_size
        self.clips: list[VideoPart] = []

    def __call__(self, videos: object, **_: Any) -> dict[str, Any]:
        from transformers.video_utils import VideoMetadata

        metadata = [
            VideoMetadata(len(clip.frames), fps=clip.fps, frames_indices=list(range(len(clip.frames))))
            for clip in self.clips
        ]
        grids = [prepare_video(clip, self.processing, None).grid for clip in self.clips]
        return {"video_grid_thw": torch.tensor(grids), "video_metadata": metadata}


def reference_processor(folder: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class Processor(Qwen3VLProcessor):  # type: ignore[misc]  # mypy does not read transformers
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    make: Any = Processor
    return make(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        video_processor=_Clips(read_video_processor_config(folder)),
        chat_template=read_chat_template(folder),
    )


def reference_ids(processor: Any, conversation: Conversation, **options: Any) -> list[int]:
    """Token ids of ``conversation`` as the reference's ``apply_chat_template`` gives them."""
    processor.video_processor.clips = [
        part for message in conversation for part in message.parts if isinstance(part, VideoPart)
    ]
    result = processor.apply_chat_template(
        _as_messages(conversation), add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )
    ids: list[int] = result["input_ids"][0]
    return ids


def _as_messages(conversation: Conversation) -> list[dict[str, Any]]:
    return [
        {"role": message.role, "content": [_as_content(part) for part in message.parts]}
        for message in conversation
    ]


def _as_content(part: TextPart | ImagePart | VideoPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        return {"type": "image", "image": decode(bytes(part.data), part.label).image}
    frames = [np.asarray(decode(bytes(frame), part.label).image) for frame in part.frames]
    return {"type": "video", "video": np.stack(frames)}
