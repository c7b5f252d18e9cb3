"""Builders of Qwen3-VL: a plain decoder with M-RoPE positions, and a vision tower."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vlfit.checkpoint.config import ModelConfig
from vlfit.models.base import Builders, Grid, Positions
from vlfit.models.qwen3_vl.image_processor import patches_by_time
from vlfit.models.qwen3_vl.mrope import mrope_positions
from vlfit.models.qwen3_vl.prompt import Qwen3VLPrompts
from vlfit.models.qwen3_vl.vision import VisionTower


def positions(
    config: ModelConfig, is_visual: npt.NDArray[np.bool_], grids: Sequence[Grid]
) -> tuple[Positions, int]:
    return mrope_positions(is_visual, grids, config.required_vision.spatial_merge_size)


BUILDERS = Builders(
    positions=positions,
    vision=VisionTower,
    image_prompts=Qwen3VLPrompts,
    image_patches=patches_by_time,
)
