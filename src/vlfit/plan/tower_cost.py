"""The cost of a vision tower, which each model family counts for its own (``models/FAMILY/cost.py``)."""

from importlib import import_module
from typing import Protocol

from vlfit.checkpoint.config import VisionConfig
from vlfit.models.registry import spec_of


class TowerCost(Protocol):
    """Bytes and work of a tower as functions of its sizes and an image's tokens; values of 16 bits."""

    max_unsplit_patches: int  # images of more patches run the feed-forward in two halves

    def feature_bytes(self, vision: VisionConfig, image_tokens: int) -> int:
        """What is kept of one encoded image."""
        ...

    def peak_bytes(self, vision: VisionConfig, image_tokens: int, scratch: int) -> int:
        """Peak while one image of up to ``image_tokens`` is encoded. ``scratch``: bytes that products with
        narrow weights dequantize into.
        """
        ...

    def graph_bytes(self, vision: VisionConfig, image_tokens: int, workspace: int, scratch: int) -> int:
        """What torch takes for a CUDA graph of the blocks; ``workspace``: of its matrix products."""
        ...

    def flops(self, vision: VisionConfig, image_tokens: int) -> float:
        """Floating-point operations for one image."""
        ...


def tower_cost(vision: VisionConfig) -> TowerCost:
    """The cost of the family that ``vision`` belongs to."""
    cost: TowerCost = import_module(spec_of(vision.model_type).cost).TOWER_COST
    return cost
