"""Builders of Qwen3-VL: a plain decoder with M-RoPE positions, and a vision tower.

torch is imported only when a model is built; prompts are prepared, and their tokens counted, without it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlfit.checkpoint.config import ModelConfig, VisionConfig
from vlfit.models.interface import Builders, Grid, Positions, TimedCalls, VisionEncoder
from vlfit.models.qwen3_vl.image_processor import patches_by_time
from vlfit.models.qwen3_vl.prompt import Qwen3VLPrompts

if TYPE_CHECKING:
    from vlfit.loading.loader import Loader


def token_positions(
    config: ModelConfig, is_visual: npt.NDArray[np.bool_], grids: Sequence[Grid]
) -> tuple[Positions, int]:
    """``mrope_positions`` with the merge size of ``config``."""
    from vlfit.models.qwen3_vl.mrope import mrope_positions

    return mrope_positions(is_visual, grids, config.required_vision.spatial_merge_size)


def build_vision_tower(config: VisionConfig, loader: "Loader") -> VisionEncoder:
    """Build the vision tower, with its weights read by ``loader``."""
    from vlfit.models.qwen3_vl.vision import VisionTower

    return VisionTower(config, loader)


BUILDERS = Builders(
    positions=token_positions,
    vision=build_vision_tower,
    image_prompts=Qwen3VLPrompts,
    image_patches=patches_by_time,
    timed_calls=TimedCalls(
        decode=("vlfit.models.qwen3_vl.image_processor", "decode_picture"),
        prepare=("vlfit.models.qwen3_vl.prompt", "prepare_image"),
    ),
)
