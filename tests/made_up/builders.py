"""Builders of the made-up family: another norm in the decoder; tower and prompts as Qwen3-VL's."""

from functools import partial

from torch import Tensor

from vlfit.loading.loader import Loader
from vlfit.models.decoder import AttentionLayer, TextModel
from vlfit.models.interface import Builders
from vlfit.models.qwen3_vl.builders import BUILDERS as QWEN3_VL


def load_norm(loader: Loader, name: str) -> Tensor:
    """The files have the weight's difference from 1."""
    return loader.tensor(name).add_(1)


BUILDERS = Builders(
    text=partial(TextModel, build_layer=partial(AttentionLayer, load_norm=load_norm), load_norm=load_norm),
    vision=QWEN3_VL.vision,
    image_prompts=QWEN3_VL.image_prompts,
    image_patches=QWEN3_VL.image_patches,
    timed_calls=QWEN3_VL.timed_calls,
)
