"""What the engine needs of a model, whatever its family: builders, prepared images, features, protocols."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from vlfit.api.conversation import Conversation
from vlfit.api.outputs import ImageSeen
from vlfit.checkpoint.config import ModelConfig, VisionConfig
from vlfit.checkpoint.processor_files import ImageProcessing
from vlfit.models.registry import spec_of

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor

    from vlfit.loading.loader import Loader
    from vlfit.models.decoder import TextModel
    from vlfit.prompt.control_tokens import ControlTokens, Markers

Grid = tuple[int, int, int]  # time, rows and columns in patches
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """A picture or a clip, resized, ready for the vision tower.

    ``pixels``: uint8 [frames, height, width, 3]. ``frames`` is 1 for a picture; for a clip a multiple of
    the checkpoint's ``temporal_patch_size`` (the last frame is repeated). ``grid``: (time, height, width)
    in patches. ``tokens``: placeholders in the prompt. ``key``: SHA-256 over shape and pixels, the same for
    the same content. ``frame_seconds``: for a clip the time of each temporal patch; empty for a picture.
    """

    pixels: npt.NDArray[np.uint8]
    grid: Grid
    tokens: int
    key: bytes
    seen: ImageSeen
    is_video: bool = False
    frame_seconds: tuple[float, ...] = ()

    def steps(self) -> "Iterator[PreparedImage]":
        """What the tower encodes at a time: a picture, or one temporal patch of a clip."""
        time, height, width = self.grid
        if time == 1:
            yield self
            return
        depth = len(self.pixels) // time
        for step in range(time):
            yield replace(
                self,
                pixels=self.pixels[step * depth : (step + 1) * depth],
                grid=(1, height, width),
                tokens=self.tokens // time,
                key=self.key + step.to_bytes(2, "little"),
                frame_seconds=self.frame_seconds[step : step + 1],
            )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class VisionFeatures:
    """An encoded picture: ``rows`` [tokens, hidden] replace its placeholders' embeddings, ``deepstack`` (one
    [tokens, hidden] for each level) is added after the first text layers.
    """

    rows: "Tensor"
    deepstack: "tuple[Tensor, ...]"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.rows, *self.deepstack))


# Output buffer of a level: [patches / merge^2, width of the text model].
LevelOutput = Callable[[int], "Tensor"]
# Run a tower's blocks on embedded patches [patches, hidden] in place, writing each level to its output.
EncoderBlocks = Callable[["Tensor", LevelOutput], None]


class EncoderRunner(Protocol):
    """Runs a tower's blocks, perhaps by replaying a CUDA graph of them."""

    def forward(
        self,
        grid: tuple[int, int],
        hidden: "Tensor",
        output: LevelOutput,
        levels: int,
        run_blocks: EncoderBlocks,
    ) -> None:
        """Run ``run_blocks`` on ``hidden`` [patches, hidden] of an image of ``grid`` (rows, columns).

        The output of each of ``levels`` is written to ``output(level)``.
        """
        ...


class VisionEncoder(Protocol):
    """A vision tower with its weights. CUDA graphs are captured up to ``max_graph_patches``."""

    max_graph_patches: int

    def __call__(
        self, patches: "Iterable[Tensor]", grid: Grid, runner: EncoderRunner | None = None
    ) -> VisionFeatures:
        """Encode one picture or clip. ``patches``: those of each time step by themselves."""
        ...


class ImagePrompts(Protocol):
    """Pictures and clips of a conversation: their placeholders in text and in tokens, their pixels."""

    @property
    def names(self) -> tuple[str, ...]:
        """Control tokens that only a template may write."""
        ...

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Tokens whose embeddings are replaced by features."""
        ...

    def prepare(self, conversation: Conversation, max_tokens: int | None) -> tuple[PreparedImage, ...]:
        """Every picture and clip, each capped at ``max_tokens``. Raises ``PictureError``."""
        ...

    def expand_clips(
        self,
        rendered: str,
        images: tuple[PreparedImage, ...],
        control: "ControlTokens",
        markers: "Markers | None",
    ) -> str:
        """The rendered template with a placeholder for each picture and each time step of a clip."""
        ...

    def expand(self, token_ids: list[int], images: tuple[PreparedImage, ...]) -> tuple[int, ...]:
        """Repeat each placeholder once per image token."""
        ...

    def size_for_tokens(self, height: int, width: int, max_tokens: int) -> tuple[int, int] | None:
        """Height and width of a picture of about ``max_tokens`` tokens; None: it cannot be so small."""
        ...

    @property
    def min_tokens(self) -> int:
        """Tokens of the smallest picture."""
        ...

    @property
    def pixels_per_token(self) -> int: ...


def text_positions(
    config: ModelConfig, is_visual: npt.NDArray[np.bool_], grids: Sequence[Grid]
) -> tuple[Positions, int]:
    """Positions [3, tokens] of a prompt on one axis, and the position of the first token after it."""
    count = len(is_visual)
    return np.tile(np.arange(count), (3, 1)), count


def _plain_text(
    config: ModelConfig, loader: "Loader", offloaded: Collection[int], previous: "TextModel | None"
) -> "TextModel":
    from vlfit.models.decoder import TextModel

    return TextModel(config, loader, offloaded, previous)


BuildText = Callable[[ModelConfig, "Loader", Collection[int], "TextModel | None"], "TextModel"]
BuildVision = Callable[[VisionConfig, "Loader"], VisionEncoder]
BuildImagePrompts = Callable[[Path, ModelConfig, "Tokenizer"], ImagePrompts]
TokenPositions = Callable[[ModelConfig, npt.NDArray[np.bool_], Sequence[Grid]], tuple[Positions, int]]
ImagePatches = Callable[
    [npt.NDArray[np.uint8], ImageProcessing, "torch.device", "torch.dtype"], "Iterator[Tensor]"
]


@dataclass(frozen=True, slots=True)
class TimedCalls:
    """Functions that prepare one picture, each as (module, name)."""

    decode: tuple[str, str]
    prepare: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Builders:
    """How a family is built. The defaults are those of a plain text-only decoder.

    ``text`` takes the config, a loader, the layers that stay in RAM and the model that this one replaces.
    ``positions``: of the tokens of a prompt, [3, tokens] on three axes, all alike for positions on one.
    ``vision``, ``image_prompts`` and ``image_patches`` (pixels to patches, one time step after the other)
    are None without a tower. ``timed_calls``: functions by module and name that decode a picture, and that
    decode and resize it; ``vlfit bench`` times them.
    """

    text: BuildText = _plain_text
    positions: TokenPositions = text_positions
    vision: BuildVision | None = None
    image_prompts: BuildImagePrompts | None = None
    image_patches: ImagePatches | None = None
    timed_calls: TimedCalls | None = None


PLAIN_DECODER = Builders()


def builders_of(config: ModelConfig) -> Builders:
    """The builders of the family that ``config`` belongs to."""
    module = spec_of(config.model_type).builders
    if not module:
        return PLAIN_DECODER
    builders: Builders = import_module(module).BUILDERS
    return builders
