"""The order of preference: which sizes are tried, the floors that come first, and the margin left free.

Two floors come before anything grows: a context of 4096 and pictures of 1024 tokens. Above them, and below
where they cannot be had, the context counts first, then image tokens, requests at once, exact weights, the
size of the shared KV cache, and last the prefill chunk, which cost only time.
"""

from collections.abc import Iterable

from vlfit.checkpoint.gguf.file_names import bits_of_type
from vlfit.checkpoint.quantization import INT4
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
    """Sort key of one model's formats on a CPU, the preferred first: fewer bytes are faster there.

    Of a GGUF model's types Q4_K_M comes first, then the others by how near they are to its 4 bits, the larger
    of two alike. FP8 answers as well as bf16, and both come after the types of 4 bits; int4 comes last, as
    it is less exact than FP8.
    """
    if gguf_type:
        return False, gguf_type != _USUAL_TYPE, abs(bits_of_type(gguf_type) - _USUAL_BITS), -nbytes
    return weights == INT4, True, 0, nbytes


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
