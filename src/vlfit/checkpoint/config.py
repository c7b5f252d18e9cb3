"""``config.json`` of a checkpoint as frozen records. The fields of each family are read in its own folder
(``models/FAMILY/config.py``), which ``models/registry.py`` lists.
"""

from dataclasses import dataclass
from pathlib import Path

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gguf.advice import PUT_MMPROJ
from vlfit.checkpoint.gguf.gguf_folder import why_without_tower
from vlfit.checkpoint.quantization import CompressedFormat, Fp8Format, Quantization, read_quantization
from vlfit.checkpoint.text_config import DecoderRules, TextConfig, read_decoder
from vlfit.errors import InvalidRequest

NO_TOKEN = -1  # image and video tokens of a text-only model


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of a vision tower, in the fields of config.json.

    ``deepstack_visual_indexes``: the blocks whose output also goes to text layers.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    hidden_act: str
    model_type: str

    @property
    def head_dim(self) -> int:
        """Width of an attention head: ``hidden_size`` over ``num_heads``."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything in ``config.json`` that decides tensors and computation.

    Without a vision tower, ``vision`` is None and the four ``*_token_id`` fields are ``NO_TOKEN``.
    ``quantization``: None for 16- or 32-bit weights.
    """

    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tie_word_embeddings: bool
    quantization: Quantization | None
    model_type: str

    @property
    def required_vision(self) -> VisionConfig:
        """``vision``. Raises ``InvalidRequest`` for a text-only model."""
        if self.vision is None:
            raise text_only_error()
        return self.vision

    @property
    def fp8(self) -> Fp8Format | None:
        """``quantization`` if it is ``Fp8Format``, else None."""
        return self.quantization if isinstance(self.quantization, Fp8Format) else None

    @property
    def compressed(self) -> CompressedFormat | None:
        """``quantization`` if it is ``CompressedFormat``, else None."""
        return self.quantization if isinstance(self.quantization, CompressedFormat) else None


def text_only_error(model: str = "this model", folder: Path | None = None) -> InvalidRequest:
    """The error to raise for a picture sent to a text-only model.

    ``model``: what the message calls it. ``folder``: of its checkpoint; a GGUF model that could have a vision
    tower says there why it has none.
    """
    why = why_without_tower(folder) if folder is not None else ""
    if why:
        return InvalidRequest(f"{model} reads text only, as {why}", PUT_MMPROJ, param="messages")
    return InvalidRequest(
        f"{model} has no vision tower: it reads text only",
        "Leave the pictures out, or load a vision-language model such as Qwen3-VL.",
        param="messages",
    )


def read_text_only(fields: Fields, rules: DecoderRules) -> ModelConfig:
    """The config of a text-only decoder. Raises the errors of ``read_decoder`` and ``read_quantization``."""
    return ModelConfig(
        text=read_decoder(fields, rules),
        vision=None,
        image_token_id=NO_TOKEN,
        video_token_id=NO_TOKEN,
        vision_start_token_id=NO_TOKEN,
        vision_end_token_id=NO_TOKEN,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        quantization=read_quantization(fields),
        model_type=fields.text("model_type"),
    )
