"""The order of preference: which sizes are tried, the floors that come first, and the margin left free.

Two floors come before anything grows: a context of 4096 and pictures of 1024 tokens. Above them, and below
where they cannot be had, the context counts first, then image tokens, requests at once, exact weights, the
size of the shared KV cache, and last the prefill chunk, which cost only time.
"""

from collections.abc import Iterable

from vlfit.checkpoint.gguf.file_names import bits_of_type
from vlfit.checkpoint.quantization import FP8, INT4, INT8
from vlfit.plan.calibration import MODELLED
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes

CONTEXTS = (16384, 8192, 6144, 4096, 2048)
IMAGE_TOKENS = (2560, 1280, 1024, 768, 512, 256)
SEQUENCES = (8, 4, 2, 1)
# A picture of 1024x1024, and a question about it with a long answer, or two such pictures.
AMPLE_CONTEXT, AMPLE_IMAGE_TOKENS = 4096, 1024
# By how much modelled lines may be wrong. CUDA's context is most of them: the one card that it was measured
# on took 704 MiB, 15 % more than the 614 MiB assumed for others.
MODELLED_ERROR = 0.15
# Of GGUF models, and what most people run without a GPU: a choice.
_USUAL_TYPE, _USUAL_BITS = "Q4_K_M", 4
_BITS = {FP8: 8, INT8: 8, INT4: 4}  # of weights in safetensors; 16 of others

WeightsPreference = tuple[bool, bool, int, int]


def safety_margin(lines: Iterable[Line]) -> int:
    """Bytes to leave free in case the modelled lines are too low: 15 % of their sum, without the reserve."""
    return round(MODELLED_ERROR * modelled_bytes(lines))


def modelled_bytes(lines: Iterable[Line]) -> int:
    """Sum of the lines whose ``how`` is modelled, except the reserve."""
    return sum(line.bytes for line in lines if line.how == MODELLED and line.line != "reserve")


def weights_preference(model: Model) -> WeightsPreference:
    """Sort key of one model's formats on a CPU; see ``preferred_weights``."""
    if model.gguf_type:
        return preferred_weights(model.weights, model.file_bytes, model.gguf_type)
    return preferred_weights(model.weights, model.weight_bytes)


def preferred_weights(weights: str, nbytes: int, gguf_type: str = "") -> WeightsPreference:
    """Sort key of one model's formats on a CPU, the preferred first.

    - Q4_K_M, then GGUF's other types of 4 bits: 2B in Q4_K_M writes 1.3 times as many tokens/s as in FP8 or
      Q8_0, and these 1.5 times as many as bf16 (docs/log.md, 2026-11-23).
    - Then what has more bits, the fewest first: FP8 with GGUF's types of 8, bf16 with those of 16.
    - Then what is less exact: int4, as fast as Q4_K_M, whose more important weights have 6 bits, and
      GGUF's types of 3 bits, 2 and 1, whose speeds were not measured.

    Of two alike in GGUF the larger, which is more exact; else the smaller, which answers as well.
    """
    bits = bits_of_type(gguf_type) if gguf_type else _BITS.get(weights, 16)
    is_coarse = bits < _USUAL_BITS or (weights == INT4 and not gguf_type)
    return is_coarse, gguf_type != _USUAL_TYPE, abs(bits - _USUAL_BITS), -nbytes if gguf_type else nbytes


def is_ample(settings: PlanSettings, model: Model) -> bool:
    """Whether the settings reach both floors: a context of 4096 tokens, and pictures of 1024 image tokens.

    If the checkpoint limits pictures to fewer tokens, that limit is the floor; for a text-only model it is 0.
    """
    return settings.context >= AMPLE_CONTEXT and settings.image_tokens >= _ample_image_tokens(model)


def keeps_floors(settings: PlanSettings, model: Model, wishes: Wishes) -> bool:
    """As ``is_ample``, but a size that ``wishes`` fix counts as reaching its floor."""
    context = wishes.context is not None or settings.context >= AMPLE_CONTEXT
    pictures = wishes.image_tokens is not None or settings.image_tokens >= _ample_image_tokens(model)
    return context and pictures


def _ample_image_tokens(model: Model) -> int:
    """The floor of pictures: at most the checkpoint's own limit, and 0 for a text-only model."""
    if model.vision is None:
        return 0
    if model.max_image_tokens is None:
        return AMPLE_IMAGE_TOKENS
    return min(AMPLE_IMAGE_TOKENS, model.max_image_tokens)
