"""Builders of Qwen3.5: a decoder of its own; positions, vision tower and prompts are Qwen3-VL's.

torch is imported only when a model is built.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from vlfit.checkpoint.config import ModelConfig
from vlfit.models.interface import Builders
from vlfit.models.qwen3_vl.builders import BUILDERS as QWEN3_VL

if TYPE_CHECKING:
    from vlfit.loading.loader import Loader
    from vlfit.models.decoder import TextModel
    from vlfit.models.interface import DraftModel


def build_text(
    config: ModelConfig, loader: "Loader", offloaded: Collection[int], previous: "TextModel | None"
) -> "TextModel":
    """Build the text model, with its weights read by ``loader``; see ``TextModel``."""
    from vlfit.models.decoder import TextModel
    from vlfit.models.qwen3_5.decoder import build_layer, load_norm

    return TextModel(config, loader, offloaded, previous, build_layer, load_norm)


def build_draft(config: ModelConfig, loader: "Loader", text: "TextModel") -> "DraftModel":
    """Build the layer of multi-token prediction; see ``MtpModel``."""
    from vlfit.models.qwen3_5.mtp import MtpModel

    return MtpModel(config, loader, text)


BUILDERS = replace(QWEN3_VL, text=build_text, draft=build_draft)
TEXT_BUILDERS = Builders(text=build_text, draft=build_draft)
