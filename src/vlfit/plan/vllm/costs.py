"""What vLLM holds while it serves Qwen3-VL: bytes as functions of shapes and settings.

Knows: what its code allocates (read in the sources of 0.11 to 0.33) and how its trial run sizes pictures.
Does not know: machines. The peaks are arithmetic from the source; where a measured start showed more, the
difference is a constant (``constants.py``). Tests hold the sum against measured processes.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8
from vlfit.plan.costs import feature_bytes, kv_tokens
from vlfit.plan.model import HALF, Model
from vlfit.plan.vllm import constants
from vlfit.plan.vllm.parallel import kv_bytes_of_card
from vlfit.plan.vllm.settings import OLDER_RUNNER, OfVllm
from vlfit.plan.vllm.versions import parse_version
from vlfit.units import MIB

if TYPE_CHECKING:
    from vlfit.plan.ledger import Settings

# vLLM makes its table of rotary positions four times as long as the model's longest context when positions
# have three dimensions (``rotary_embedding/mrope.py``), whatever --max-model-len says.
_POSITIONS_TIMES = 4
SAMPLER_ROW = 4 * MIB  # 151,936 logits in bf16, in fp32, and sorted: the most that it can be
# Tokens of a KV block are 16 on most cards; kernels for attention may want more, and vLLM on a CPU takes 128.
LARGEST_BLOCK = 128
# Pictures of fewer pixels are enlarged to this many by Qwen3-VL's processor (``shortest_edge``).
LEAST_PIXELS = 65536
_NEWER_FROM = (0, 25, 1)


def has_newer_runner(told: OfVllm) -> bool:
    """Whether this vLLM has what it calls its V2 model runner, which runs Qwen3-VL since 0.25.1. A version
    that is not known counts as an older one, which takes more.
    """
    return f"{OLDER_RUNNER}=0" not in told.variables and _is_newer(told.version)


@lru_cache(maxsize=16)
def _is_newer(version: str) -> bool:
    return bool(version) and parse_version(version).number >= _NEWER_FROM


def pixels_of_token(vision: VisionConfig) -> int:
    """Pixels of a picture that become one token: 32 x 32 in all sizes."""
    return (vision.patch_size * vision.spatial_merge_size) ** 2


def kv_bytes(model: Model, kv_dtype: str, told: OfVllm) -> int:
    """Keys and values of one token in all layers, on one card: in FP8, or in what is computed with."""
    values = model.kv_bytes_per_token // HALF
    return kv_bytes_of_card(model, told.tensor, values * (1 if kv_dtype == FP8 else told.value_bytes))


def pool_tokens(settings: "Settings") -> int:
    """Tokens of the KV cache: as in the native engine, in whole blocks, and one that vLLM keeps for nobody.

    From 0.30 on a start ends if one request of full length does not fit beside that block. A pool that was
    asked for is taken as it is, in whole blocks.
    """
    asked = settings.vllm.kv_tokens
    if asked is not None:
        return -(-asked // LARGEST_BLOCK) * LARGEST_BLOCK
    tokens = kv_tokens(settings.context, settings.sequences)
    return -(-tokens // LARGEST_BLOCK) * LARGEST_BLOCK + LARGEST_BLOCK


def pictures_of_prompt(settings: "Settings") -> int:
    """Pictures that are allowed in one prompt: as many of the largest as the context holds beside text."""
    if settings.vllm.pictures is not None:
        return settings.vllm.pictures
    return max((settings.context - 1) // settings.image_tokens, 1)


def tokens_encoded_together(settings: "Settings") -> int:
    """Tokens of the pictures that one pass of the tower may hold (``multimodal/encoder_budget.py``).

    As many whole pictures as a pass of the text model has tokens, at least one.
    """
    size = settings.image_tokens
    pictures = max(settings.chunk, size) // size
    return size * min(pictures, settings.sequences * pictures_of_prompt(settings))


def picture_cache(vision: VisionConfig, settings: "Settings") -> int:
    """Features of pictures that wait for the text model: as many tokens as a pass has, or one picture."""
    features = feature_bytes(vision, max(settings.chunk, settings.image_tokens))
    return features // HALF * settings.vllm.value_bytes


def vision_peak(vision: VisionConfig, settings: "Settings") -> int:
    """What the tower holds beside its results: for each patch two rows of the MLP's inner width, residual and
    norm, pixels, positions, and the deepstack features so far: 28 KiB in 2B in 16 bits. Where the tower is
    shared out each card has its part of the inner width.
    """
    parts = settings.vllm.tensor if settings.vllm.split_tower else 1
    merged = vision.spatial_merge_size**2
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    deepstack = len(vision.deepstack_visual_indexes) * vision.out_hidden_size // merged
    row = 2 * vision.intermediate_size // parts + 3 * vision.hidden_size + values + deepstack
    patches = tokens_encoded_together(settings) * merged
    return patches * row * settings.vllm.value_bytes + constants.BESIDE_PICTURES.bytes


def positions(model: Model, settings: "Settings") -> int:
    """The table of rotary positions, cosines and sines, kept all along: 256 MiB for Qwen3-VL in 16 bits."""
    times = _POSITIONS_TIMES if model.vision is not None else 1
    rows = times * model.text.max_position_embeddings
    return rows * model.text.head_dim * settings.vllm.value_bytes


def deepstack_buffers(model: Model, settings: "Settings") -> int:
    """Rows that the tower's middle layers add to the first text layers, for a whole pass, kept all along."""
    if model.vision is None or not settings.image_tokens:
        return 0
    levels = len(model.vision.deepstack_visual_indexes)
    return levels * settings.chunk * model.text.hidden_size * settings.vllm.value_bytes


def made_with_weights(model: Model, settings: "Settings") -> int:
    """What stands in the workspaces' lines and vLLM counts in its "Model loading took"."""
    return positions(model, settings) + deepstack_buffers(model, settings)


def text_peak(model: Model, settings: "Settings") -> int:
    """The peak of a pass: gate, up and their product, residual and input, embeddings; and the sampler's rows.

    With graphs the model is compiled first, which with the older runner takes more at the first start than
    any pass after it. The memory stays with torch. Cards that share a layer have their part of its inner
    width each.
    """
    text = model.text
    row = 3 * text.intermediate_size // settings.vllm.tensor + 3 * text.hidden_size
    compiles = settings.graphs and not has_newer_runner(settings.vllm)
    compiling = constants.COMPILING.bytes if compiles else 0
    passing = settings.chunk * row * settings.vllm.value_bytes
    return passing + settings.sequences * SAMPLER_ROW + compiling


def growth(settings: "Settings") -> int:
    """What a process holds more once it has answered its first requests."""
    if has_newer_runner(settings.vllm):
        return constants.GROWTH_OF_NEWER.bytes
    few = settings.sequences <= constants.FEW_SEQUENCES
    return (constants.GROWTH_OF_FEW if few else constants.GROWTH).bytes


def graphs(settings: "Settings") -> int:
    """CUDA graphs of batches up to twice the requests at once: between the two numbers that were measured."""
    if not settings.graphs:
        return 0
    few, many = constants.GRAPHS_OF_FEW.bytes, constants.GRAPHS_OF_MANY.bytes
    beyond = max(min(settings.sequences, constants.MANY_GRAPHS) - constants.FEW_GRAPHS, 0)
    return few + (many - few) * beyond // (constants.MANY_GRAPHS - constants.FEW_GRAPHS)
