"""Memory of vLLM while it serves Qwen3-VL: measured constants, and bytes as functions of shapes and settings.

Formulas follow the sources of 0.11 to 0.33, whose profiling run sizes pictures; where a measured start showed
more, the difference is a constant. "Measured" is vLLM 0.22.0 with the older model runner, and 0.26.0 with the
newer one (``has_newer_runner``), with random weights at the true shapes of Qwen3-VL and some 7 GiB. Nothing
was measured on a small card. Tests hold the sums against measured processes.
"""

from functools import lru_cache

from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import MEASURED, MODELLED, Constant
from vlfit.plan.ledger import shared_pool_tokens
from vlfit.plan.shapes import HALF, Matrix, Model, feature_bytes, tower_cost
from vlfit.plan.vllm.args import OLDER_RUNNER, VllmArgs, VllmSettings
from vlfit.plan.vllm.flags import parse_version
from vlfit.units import GIB, MIB

# --- measured constants -------------------------------------------------------------------------------------

MEASURED_WITH = "0.22.0"
NEWER_MEASURED_WITH = "0.26.0"
_H100 = f"vLLM {NEWER_MEASURED_WITH} on one H100, driver 580.159.04, torch 2.11.0, benchmarks.vllm_beside"
_TWO_H200 = f"vLLM {NEWER_MEASURED_WITH} on two H200, by hand"
_H200 = f"vLLM {MEASURED_WITH} on one H200, driver 580.159.04, torch 2.11.0+cu130, 2026-11-21"

# What the process holds before vLLM first reads free memory: outside its budget, but used.
CONTEXT = Constant(
    0.53 * GIB, MEASURED, f"522-527 MiB; users of small cards report 0.4-0.6 GiB before it counts; {_H200}"
)
# What CUDA's libraries take during the profiling run, beside torch's pool: inside the budget.
LIBRARIES = Constant(0.24 * GIB, MEASURED, f"0.22-0.24 GiB of non-torch memory; {_H200}")
# Growth of a process after its start. Two requests at once: 160-180 MiB; eight: 344-472.
GROWTH_OF_FEW = Constant(
    0.2 * GIB, MEASURED, f"160-180 MiB more after the first requests, two at once; {_H200}"
)
GROWTH = Constant(0.5 * GIB, MEASURED, f"344-472 MiB more after the first requests, eight at once; {_H200}")
FEW_SEQUENCES = 2  # up to which the smaller growth was measured
# With the newer runner: 4B in FP8 without graphs, two at once, 270 MiB at most (138 in the end); 2B in FP8
# with graphs, eight at once, 154.
GROWTH_OF_NEWER = Constant(0.265 * GIB, MEASURED, f"154-270 MiB more at the first requests; {_H100}")
# CUDA graphs: vLLM captures batches of 1, 2, 4, 8, 16, ... up to twice the requests at once.
GRAPHS_OF_FEW = Constant(72 * MIB, MEASURED, f"0.01-0.07 GiB for 2 to 8 sequences; {_H200}")
GRAPHS_OF_MANY = Constant(0.39 * GIB, MEASURED, f"0.37-0.39 GiB for 256 sequences, 86 graphs; {_H200}")
FEW_GRAPHS, MANY_GRAPHS = 8, 256  # sequences for which these two were measured
# Compiling at the peak of a first start, beside the pass itself: 0.40-0.45 GiB in all;
# with the newer runner nothing of it was seen, at a first start of 2B in FP8 (47 s of compiling, 0.26.0).
COMPILING = Constant(290 * MIB, MEASURED, f"peaks of 0.40-0.45 GiB less 136-264 MiB by shapes; {_H200}")
# The profiling run of two pictures of 1024 tokens peaked at 0.27 GiB without graphs, where shapes say 256
# MiB.
BESIDE_PICTURES = Constant(36 * MIB, MEASURED, f"0.27 GiB against 256 MiB by shapes, 2B; {_H200}")
# Seconds for each layer of one pass whose kernels lie in a CUDA graph, from pass to pass.
LAUNCH_OF_GRAPHS = Constant(2.17e-3 / 28, MEASURED, f"Qwen3-VL 2B in bf16: 2.17 ms for 28 layers; {_H200}")
LAUNCH_OF_GRAPHS_LOW = Constant(
    (2.17e-3 - 1.295e-3) / 28, MEASURED, f"the same, less 1.295 ms of matrix products alone; {_H200}"
)
# What NCCL holds on each card of a group that shares layers, before vLLM first reads free memory. Linear in
# its channels, of which fast links have more (NCCL's issue 864).
NCCL = Constant(
    688 * MIB,
    MODELLED,
    "4 A100 with NVLink, one all-reduce of 4 MiB in groups of more than two: NCCL issue 964",
)
# Without multicast over NVLink (NVLS) 953 MiB more than one card's context were gone at vLLM's first look,
# some of them CUDA's libraries, which are counted apart; at the end 592 (2B in bf16) to 711 MiB (mini) were
# missing in the other lines, of which 96 are ``ALL_REDUCE`` and ``SYMMETRIC``. NVLS takes 288 on each card.
NCCL_OF_HOPPER = Constant(
    0.92 * GIB, MODELLED, f"496-615 MiB without NVLS, {_TWO_H200}; NVLS's 288 MiB: NCCL issue 1410"
)
# vLLM's own all-reduce (0.32): a buffer of 8 MiB and one of 16 that the others read, 8 MiB of addresses; and
# from compute capability 9.0 on up to 64 MiB of symmetric memory.
ALL_REDUCE = Constant(32 * MIB, MODELLED, "custom_all_reduce.py of vLLM 0.32, by its source")
SYMMETRIC = Constant(64 * MIB, MODELLED, "SYMM_MEM_ALL_REDUCE_MAX_SIZES of vLLM 0.32, by its source")
# Seconds of one all-reduce of a token's row, some KiB, inside a CUDA graph.
ALL_REDUCE_LOW = Constant(4e-6, MODELLED, "one-shot kernels, 4 KiB, 4 cards: sglang-V100 PR 2; 6 us by NVLS")
ALL_REDUCE_SECONDS = Constant(20e-6, MODELLED, "NCCL over PCIe, 4-8 KiB, 4 cards: 19-20 us, sglang-V100 PR 2")
ALL_REDUCE_HIGH = Constant(
    52e-6, MODELLED, "the same with 128 KiB; cards that cannot read each other: a guess"
)
# RAM of processes that serve, measured by hand with vLLM 0.32 on a processor: 0.84 GB (1.16 at most) for one
# that takes requests, 0.64 for an engine, 1.0 for each worker. A worker of a GPU was not measured.
FRONT_RAM = Constant(1.16e9, MEASURED, "resident memory of vLLM 0.32's API server at most, on a processor")
ENGINE_RAM = Constant(0.64e9, MEASURED, "resident memory of vLLM 0.32's EngineCore, on a processor")
WORKER_RAM = Constant(1.0e9, MEASURED, "resident memory of vLLM 0.32's worker, mini on a processor")


# --- tensor parallelism: rules of vLLM's source, and bytes on each card ------------------------------------

# Matrices that are split by inputs, so that cards add up their results; all others are split by outputs.
_BY_INPUTS = ("o_proj", "down_proj")
_KEYS = ("k_proj", "v_proj")
# Each card's piece must be a multiple of this (outputs, inputs): blocks of FP8 weights (``fp8_utils.py``),
# tiles of Marlin's kernels for int4 (``marlin_utils.py``).
_PIECES = {FP8: (128, 128), INT4: (64, 128)}
_FROM_HOPPER = (9, 0)
# From Hopper on, cards with so much memory have NVLink, for which NCCL opens many channels.
_SERVER_CARD = 70 * 2**30


def tensor_parallel_problem(model: Model, tensor: int) -> str:
    """Why vLLM cannot split the text layers over ``tensor`` cards, in words; "" if it can.

    Attention heads, rows of the feed-forward and blocks of quantized weights must divide evenly. The vision
    tower is not checked here but in ``split_tower_problem``.
    """
    if tensor == 1:
        return ""
    text = model.text
    heads, keys = text.num_attention_heads, text.num_key_value_heads
    if heads % tensor:
        return f"{heads} heads cannot be shared out over {tensor} cards"
    if keys % tensor and tensor % keys:
        return f"{keys} heads of keys cannot be shared out over {tensor} cards"
    if text.intermediate_size % tensor:
        return f"{text.intermediate_size} rows of the feed-forward cannot be shared out over {tensor} cards"
    for name, matrix in model.layer.items():
        outputs, inputs = _PIECES.get(matrix.form, (1, 1))
        size = matrix.columns if name in _BY_INPUTS else matrix.rows
        piece = size // tensor
        if name in _KEYS:
            piece = max(piece, text.head_dim)
        least = inputs if name in _BY_INPUTS else outputs
        if piece % least:
            return f"{name} in {matrix.form} is cut in pieces of {least}, and {piece} is no multiple of it"
    return ""


def split_tower_problem(vision: VisionConfig | None, tensor: int) -> str:
    """Why vLLM cannot split the vision tower over ``tensor`` cards, in words; "" if it can, or for None."""
    if vision is None or tensor == 1:
        return ""
    if vision.num_heads % tensor or vision.intermediate_size % tensor:
        return f"the tower's {vision.num_heads} heads cannot be shared out over {tensor} cards"
    return ""


def kv_heads_per_card(model: Model, tensor: int) -> int:
    """Number of KV heads on each of ``tensor`` cards; 1 if there are more cards than heads."""
    return max(model.text.num_key_value_heads // tensor, 1)


def kv_bytes_per_card(model: Model, tensor: int, whole: int) -> int:
    """Bytes of one token's keys and values on each of ``tensor`` cards, if ``whole`` bytes on one card alone.

    With more cards than KV heads that is more than ``whole / tensor``, as heads are replicated.
    """
    return whole * kv_heads_per_card(model, tensor) // model.text.num_key_value_heads


def text_bytes(model: Model, tensor: int) -> int:
    """Bytes of the text layers on each of ``tensor`` cards: matrices are split, norms replicated."""
    text = model.text
    norms = HALF * (text.num_hidden_layers * 2 * (text.hidden_size + text.head_dim) + text.hidden_size)
    return norms + _per_card(model.text_bytes - norms, tensor) + _replicated_kv_bytes(model, tensor)


def vision_bytes(model: Model, settings: VllmSettings) -> int:
    """Bytes of the vision tower on each card: all of it, or a part with ``settings.vllm.split_tower``."""
    vision, tensor = model.vision, settings.vllm.tensor
    if vision is None or tensor == 1 or not settings.vllm.split_tower:
        return model.vision_bytes
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    # Patches, positions, two norms and what is added behind each sum of a block.
    on_each = HALF * vision.hidden_size * (values + vision.num_position_embeddings + 6 * vision.depth)
    return on_each + _per_card(model.vision_bytes - on_each, tensor)


def embedding_bytes(model: Model, tensor: int) -> int:
    """Bytes of embedding table and output head on each of ``tensor`` cards, which split them by rows."""
    return _per_card(model.embedding_bytes, tensor)


def peer_bytes(gpu: Gpu, tensor: int) -> int:
    """Bytes of NCCL and all-reduce buffers on each of ``tensor`` cards like ``gpu``; 0 for one card."""
    if tensor == 1:
        return 0
    hopper = gpu.compute_capability >= _FROM_HOPPER
    fast = hopper and gpu.total >= _SERVER_CARD
    nccl = NCCL_OF_HOPPER if fast else NCCL
    return nccl.bytes + ALL_REDUCE.bytes + (SYMMETRIC.bytes if fast else 0)


def peers_note(gpu: Gpu, tensor: int) -> str:
    """The note of the ledger line ``peers``: what ``peer_bytes`` consists of, and its source."""
    fast = gpu.compute_capability >= _FROM_HOPPER and gpu.total >= _SERVER_CARD
    nccl = NCCL_OF_HOPPER if fast else NCCL
    return f"NCCL and all-reduce between {tensor} cards, outside vLLM's budget; {nccl.source}"


def num_all_reduces(model: Model) -> int:
    """Number of all-reduces in a pass over split layers: two for each layer and one for the embedding."""
    return 2 * model.text.num_hidden_layers + 1


def _replicated_kv_bytes(model: Model, tensor: int) -> int:
    """Bytes of KV projections that are replicated where there are more cards than KV heads."""
    keys = model.text.num_key_value_heads
    if tensor <= keys:
        return 0
    more = (1 / keys - 1 / tensor) * sum(_bytes(model.layer[name]) for name in _KEYS)
    return round(more * model.text.num_hidden_layers)


def _bytes(matrix: Matrix) -> float:
    return matrix.num_weights * {FP8: 1.0, INT4: 0.5 + HALF / 32}.get(matrix.form, HALF)


def _per_card(whole: int, tensor: int) -> int:
    return -(-whole // tensor)


# --- memory by settings
# --------------------------------------------------------------------------------------

# vLLM makes its table of rotary positions four times as long as the model's longest context when positions
# have three dimensions (``rotary_embedding/mrope.py``), whatever --max-model-len says.
_POSITIONS_TIMES = 4
SAMPLER_ROW = 4 * MIB  # 151,936 logits in bf16, in fp32, and sorted: the most that it can be
# Tokens of a KV block are 16 on most cards; kernels for attention may want more, and vLLM on a CPU takes 128.
LARGEST_BLOCK = 128
_NEWER_FROM = (0, 25, 1)


def has_newer_runner(args: VllmArgs) -> bool:
    """Whether vLLM of ``args.version`` runs Qwen3-VL with its V2 model runner, the default since 0.25.1.

    False if ``args.environment`` turns that off, and for an unknown version (""): the older runner takes more
    memory.
    """
    return f"{OLDER_RUNNER}=0" not in args.environment and _is_newer(args.version)


@lru_cache(maxsize=16)
def _is_newer(version: str) -> bool:
    return bool(version) and parse_version(version).number >= _NEWER_FROM


def pixels_per_token(vision: VisionConfig) -> int:
    """How many pixels of a picture become one image token."""
    return (vision.patch_size * vision.spatial_merge_size) ** 2


def min_pixels(vision: VisionConfig) -> int:
    """Number of pixels to which the image processor enlarges smaller pictures."""
    return tower_cost(vision).min_pixels


def min_image_tokens(vision: VisionConfig) -> int:
    """Image tokens of a picture of ``min_pixels``: no picture has fewer."""
    return min_pixels(vision) // pixels_per_token(vision)


def kv_bytes_per_token(model: Model, kv_dtype: str, args: VllmArgs) -> int:
    """Bytes of one token's keys and values in all layers, on one of the cards that share the layers.

    ``kv_dtype``: fp8, or any other name for the dtype of the computation.
    """
    values = model.kv_bytes_per_token // HALF
    return kv_bytes_per_card(model, args.tensor, values * (1 if kv_dtype == FP8 else args.value_bytes))


def pool_tokens(settings: VllmSettings) -> int:
    """How many tokens vLLM's KV cache gets: ``settings.vllm.kv_tokens`` rounded up to whole blocks.

    If that is None: ``shared_pool_tokens`` rounded up, and one block more for vLLM's null block, as from 0.30
    on a start fails unless one request of full length fits beside that.
    """
    fixed = settings.vllm.kv_tokens
    if fixed is not None:
        return -(-fixed // LARGEST_BLOCK) * LARGEST_BLOCK
    tokens = shared_pool_tokens(settings.context, settings.sequences)
    return -(-tokens // LARGEST_BLOCK) * LARGEST_BLOCK + LARGEST_BLOCK


def max_pictures_per_prompt(settings: VllmSettings) -> int:
    """Most pictures in one prompt: ``settings.vllm.pictures``.

    If that is None: as many of ``settings.image_tokens`` as the context holds, at least 1. Only for a model
    that takes pictures.
    """
    if settings.vllm.pictures is not None:
        return settings.vllm.pictures
    return max((settings.context - 1) // settings.image_tokens, 1)


def max_encoder_tokens(settings: VllmSettings) -> int:
    """Most image tokens that the tower encodes at once, as vLLM's ``multimodal/encoder_budget.py`` decides.

    As many pictures of ``settings.image_tokens`` as fit the prefill chunk, at least one, and no more than all
    requests together may have.
    """
    size = settings.image_tokens
    pictures = max(settings.chunk, size) // size
    return size * min(pictures, settings.sequences * max_pictures_per_prompt(settings))


def encoder_cache_bytes(vision: VisionConfig, settings: VllmSettings) -> int:
    """Bytes of vLLM's encoder cache: features of a prefill chunk, or of one picture if that is more."""
    features = feature_bytes(vision, max(settings.chunk, settings.image_tokens))
    return features // HALF * settings.vllm.value_bytes


def vision_peak_bytes(vision: VisionConfig, settings: VllmSettings) -> int:
    """Peak bytes of the vision tower on each card, without weights and the features that it returns."""
    cards = settings.vllm.tensor if settings.vllm.split_tower else 1
    values = tower_cost(vision).vllm_peak_values(vision, max_encoder_tokens(settings), cards)
    return values * settings.vllm.value_bytes + BESIDE_PICTURES.bytes


def position_table_bytes(model: Model, settings: VllmSettings) -> int:
    """Bytes of vLLM's RoPE table, allocated at loading: 256 MiB for Qwen3-VL in 16 bits."""
    times = _POSITIONS_TIMES if model.text.mrope_section else 1
    rows = times * model.text.max_position_embeddings
    return rows * model.text.head_dim * settings.vllm.value_bytes


def deepstack_bytes(model: Model, settings: VllmSettings) -> int:
    """Bytes of the buffers of deepstack features, which early text layers add; allocated at loading.

    0 without pictures.
    """
    if model.vision is None or not settings.image_tokens:
        return 0
    levels = len(model.vision.deepstack_visual_indexes)
    return levels * settings.chunk * model.text.hidden_size * settings.vllm.value_bytes


def bytes_loaded_with_weights(model: Model, settings: VllmSettings) -> int:
    """Bytes of ledger workspaces that vLLM allocates with the weights, and counts in "Model loading took"."""
    return position_table_bytes(model, settings) + deepstack_bytes(model, settings)


def text_peak_bytes(model: Model, settings: VllmSettings) -> int:
    """Peak bytes of a text pass on each card, without weights and KV cache.

    Gate, up and their product (each card has its part), residual, input and embeddings of ``settings.chunk``
    tokens; the sampler's rows; and, with graphs and the older model runner, what compiling takes at the
    first start.
    """
    text = model.text
    row = 3 * text.intermediate_size // settings.vllm.tensor + 3 * text.hidden_size
    compiles = settings.graphs and not has_newer_runner(settings.vllm)
    compiling = COMPILING.bytes if compiles else 0
    passing = settings.chunk * row * settings.vllm.value_bytes
    return passing + settings.sequences * SAMPLER_ROW + compiling


def growth_bytes(settings: VllmSettings) -> int:
    """Bytes that vLLM takes at its first requests, beyond its budget: measured, by requests and runner."""
    if has_newer_runner(settings.vllm):
        return GROWTH_OF_NEWER.bytes
    few = settings.sequences <= FEW_SEQUENCES
    return (GROWTH_OF_FEW if few else GROWTH).bytes


def graph_bytes(settings: VllmSettings) -> int:
    """Bytes of CUDA graphs: interpolated between measurements by ``settings.sequences``; 0 without graphs."""
    if not settings.graphs:
        return 0
    few, many = GRAPHS_OF_FEW.bytes, GRAPHS_OF_MANY.bytes
    beyond = max(min(settings.sequences, MANY_GRAPHS) - FEW_GRAPHS, 0)
    return few + (many - few) * beyond // (MANY_GRAPHS - FEW_GRAPHS)
