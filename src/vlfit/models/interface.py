"""The interface of a model family to the engine: builders, prepared images, features, protocols."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from vlfit.api.conversation import Conversation
from vlfit.api.outputs import ImageSeen
from vlfit.checkpoint.config import ModelConfig, VisionConfig
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.models.registry import import_object, spec_of

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor

    from vlfit.layers.attention import AttentionMetadata
    from vlfit.layers.kv_cache import KVCache
    from vlfit.loading.loader import Loader
    from vlfit.models.decoder import TextModel
    from vlfit.prompt.control_tokens import ControlTokens, Markers

Grid = tuple[int, int, int]  # time, rows and columns in patches
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """A resized picture or clip, ready for the vision tower.

    ``pixels``: uint8 [frames, height, width, 3]. ``frames`` is 1 for a picture; for a clip a multiple of
    the checkpoint's ``temporal_patch_size`` (the last frame is repeated). ``grid``: (time, height, width)
    in patches. ``tokens``: image tokens in the prompt. ``key``: for the encoder and prefix caches, SHA-256 of
    the shape and of the file, or of the pixels where these are fewer bytes or there are several files.
    ``seen``: what the answer reports of it. ``frame_seconds``: for a clip the time of each temporal patch;
    empty for a picture.
    """

    pixels: npt.NDArray[np.uint8]
    grid: Grid
    tokens: int
    key: bytes
    seen: ImageSeen
    is_video: bool = False
    frame_seconds: tuple[float, ...] = ()

    def time_steps(self) -> "Iterator[PreparedImage]":
        """Split into what the vision tower encodes at a time: the temporal patches of a clip.

        Each has ``grid`` (1, height, width) and a ``key`` of its own. A picture is yielded as it is.
        """
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
    """The vision tower's output for one picture or clip.

    ``rows`` [tokens, hidden] replace the embeddings of the picture's placeholders. ``deepstack``: [tokens,
    hidden] for each of the first text layers, added to the layer's output at the same tokens; () for towers
    without deepstack.
    """

    rows: "Tensor"
    deepstack: "tuple[Tensor, ...]"

    @property
    def nbytes(self) -> int:
        """Bytes of ``rows`` and ``deepstack``."""
        return sum(tensor.nbytes for tensor in (self.rows, *self.deepstack))


# Maps a level (deepstack levels, then the last) to its output buffer [patches / merge^2, text width].
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
        """Run ``run_blocks`` on ``hidden`` [patches, hidden] of an image of ``grid`` (rows, columns) patches.

        ``hidden`` is overwritten. ``levels``: number of outputs, the deepstack levels and the last; output
        ``level`` is written to the tensor ``output(level)``.
        """
        ...


class VisionEncoder(Protocol):
    """A vision tower with its weights.

    Called with the patches and the grid of one picture or clip, it returns their ``VisionFeatures``.
    ``max_graph_patches``: CUDA graphs are captured for images of at most as many patches.
    ``deepstack_levels``: how many ``VisionFeatures.deepstack`` has.
    """

    max_graph_patches: int

    @property
    def deepstack_levels(self) -> int: ...

    def shortened(self, kind: Callable[[object], Hashable]) -> AbstractContextManager[None]:
        """A context manager: within it only as many blocks run as launch every kernel of the tower.

        Of blocks of the same ``kind`` one is enough, beside those that deepstack needs. Features mean nothing
        then.
        """
        ...

    def __call__(
        self, patches: "Iterable[Tensor]", grid: Grid, runner: EncoderRunner | None = None
    ) -> VisionFeatures:
        """Encode one picture or clip of ``grid`` (time, rows, columns) patches.

        ``patches`` yields the patches of one temporal patch after the other, as ``Builders.image_patches``
        does. ``runner``: runs the tower's blocks; None: the tower runs them eagerly.
        """
        ...


class DraftModel(Protocol):
    """A small model that drafts tokens from the hidden states of a text model (multi-token prediction).

    Its row i takes the hidden state of token i, as the output head takes it, and the embedding of token
    i + 1, and predicts token i + 2. Row i has keys and values of its own, in the slot of token i. To draft
    further, its output takes the place of the hidden state. It shares embedding and output head with the text
    model.
    """

    def store(
        self,
        hidden: "Tensor",
        embedded: "Tensor",
        positions: "Tensor",
        cache: "KVCache",
        metadata: "AttentionMetadata",
    ) -> None:
        """Store the keys and values of rows, without an output: as ``predict``."""
        ...

    def predict(
        self,
        hidden: "Tensor",
        embedded: "Tensor",
        positions: "Tensor",
        cache: "KVCache",
        metadata: "AttentionMetadata",
        rows: "Tensor",
    ) -> "Tensor":
        """Output [n, hidden] of ``rows`` [n], for the text model's head and for the next row.

        ``hidden`` and ``embedded`` [rows, hidden]; ``positions`` [3, rows] of the tokens whose hidden states
        they are. Stores the keys and values of all rows in ``cache``.
        """
        ...


# Called with images of which only headers were read; raises if they are too large.
CheckImages = Callable[[tuple[PreparedImage, ...]], None]


class ImagePrompts(Protocol):
    """Prepares the pictures and clips of conversations, and writes their placeholders into prompts.

    For each prompt: ``prepare`` the images, ``expand_clips`` in the rendered chat template, tokenize it, then
    ``repeat_placeholders`` in its tokens.
    """

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the control tokens for pictures, which only the chat template may write."""
        ...

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids of the tokens whose embeddings are replaced by image features."""
        ...

    def prepare(
        self, conversation: Conversation, max_tokens: int | None, check: CheckImages | None = None
    ) -> tuple[PreparedImage, ...]:
        """Decode and resize every picture and clip, in order, each to at most ``max_tokens`` image tokens.

        ``max_tokens`` None: only the checkpoint's limits. ``check``: called before anything is decoded, with
        all images as their headers describe them: empty ``pixels`` and ``key``, and ``tokens`` that are a
        lower bound. Raises ``PictureError``, and what ``check`` raises.
        """
        ...

    def expand_clips(
        self,
        rendered: str,
        images: tuple[PreparedImage, ...],
        control: "ControlTokens",
        markers: "Markers | None",
    ) -> str:
        """Replace each clip's placeholder in a rendered template by one for each of its temporal patches.

        Raises ``InvalidRequest`` if the template did not write one placeholder per picture and clip.
        """
        ...

    def repeat_placeholders(self, token_ids: list[int], images: tuple[PreparedImage, ...]) -> tuple[int, ...]:
        """Repeat each placeholder in ``token_ids`` once per image token of its picture or temporal patch.

        Raises ``CheckpointError`` if the number of placeholders does not match ``images``.
        """
        ...

    def size_for_tokens(self, height: int, width: int, max_tokens: int) -> tuple[int, int] | None:
        """(height, width) to resize a picture of ``height`` x ``width`` pixels to, for about
        ``max_tokens`` image tokens.

        That is at most ``max_tokens`` but for very long and thin pictures, which get more. None if the
        result would be below the checkpoint's smallest size, to which it would be enlarged again. Raises
        ``PictureTooLarge``.
        """
        ...

    @property
    def min_tokens(self) -> int:
        """Image tokens of the smallest picture; smaller ones are enlarged to it."""
        ...

    @property
    def pixels_per_token(self) -> int:
        """Pixels of a resized picture for each of its image tokens."""
        ...


def text_positions(
    config: ModelConfig, is_visual: npt.NDArray[np.bool_], grids: Sequence[Grid]
) -> tuple[Positions, int]:
    """Positions [3, tokens] of a prompt on a single axis, and that of the first token after it.

    All three rows are 0, 1, 2, ... Of ``is_visual`` [tokens] only the length is used; it, ``config`` and
    ``grids`` are for families with more axes.
    """
    count = len(is_visual)
    return np.tile(np.arange(count), (3, 1)), count


def _plain_text(
    config: ModelConfig, loader: "Loader", offloaded: Collection[int], previous: "TextModel | None"
) -> "TextModel":
    from vlfit.models.decoder import TextModel

    return TextModel(config, loader, offloaded, previous)


BuildText = Callable[[ModelConfig, "Loader", Collection[int], "TextModel | None"], "TextModel"]
BuildDraft = Callable[[ModelConfig, "Loader", "TextModel"], DraftModel]
BuildVision = Callable[[VisionConfig, "Loader"], VisionEncoder]
BuildImagePrompts = Callable[[Path, ModelConfig, "Tokenizer"], ImagePrompts]
TokenPositions = Callable[[ModelConfig, npt.NDArray[np.bool_], Sequence[Grid]], tuple[Positions, int]]
ImagePatches = Callable[
    [npt.NDArray[np.uint8], ImageProcessorConfig, "torch.device", "torch.dtype"], "Iterator[Tensor]"
]


@dataclass(frozen=True, slots=True)
class TimedCalls:
    """Functions that ``vlfit bench`` times, each as (module, name).

    ``decode`` decodes a picture; ``prepare`` decodes and resizes it.
    """

    decode: tuple[str, str]
    prepare: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Builders:
    """The functions that build a family's models. The defaults are those of a plain text-only decoder.

    ``text`` takes the config, a loader, the indices of the layers that stay in RAM, and the model that the
    new one replaces (or None), as ``TextModel`` does. ``positions`` returns token positions [3, tokens] of a
    prompt and the next position (``text_positions``). ``vision``, ``image_prompts``, ``image_patches``
    (pixels to patches, one temporal patch at a time) and ``timed_calls`` are None without a vision tower.
    ``draft``: builds what drafts tokens, of a checkpoint that has it, to a text model; None: no checkpoint
    has.
    """

    text: BuildText = _plain_text
    positions: TokenPositions = text_positions
    vision: BuildVision | None = None
    image_prompts: BuildImagePrompts | None = None
    image_patches: ImagePatches | None = None
    timed_calls: TimedCalls | None = None
    draft: BuildDraft | None = None


PLAIN_DECODER = Builders()


def builders_of(config: ModelConfig) -> Builders:
    """The builders of the family that ``config`` belongs to, imported when first needed.

    Raises ``KeyError`` if its ``model_type`` is not registered.
    """
    module = spec_of(config.model_type).builders
    if not module:
        return PLAIN_DECODER
    builders: Builders = import_object(module, "BUILDERS")
    return builders
