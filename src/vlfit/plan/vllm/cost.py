"""What vLLM holds while it serves Qwen3-VL: bytes as functions of shapes and settings.

Knows: what its code allocates (read in the sources of 0.11 to 0.33) and how its trial run sizes pictures.
Does not know: machines. The peaks are arithmetic from the source; where a measured start showed more, the
difference is a constant (``plan/vllm/cost.py``). Tests hold the sum against measured processes.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.plan.calibration import MEASURED, MODELLED, Constant
from vlfit.plan.native.cost import feature_bytes, kv_tokens
from vlfit.plan.shapes import HALF, Matrix, Model
from vlfit.plan.vllm.flags import OLDER_RUNNER, OfVllm, parse_version
from vlfit.units import GIB, MIB

if TYPE_CHECKING:
    from vlfit.machine.model import Gpu
    from vlfit.plan.ledger import Settings


# What only measurement can give of vLLM's memory, each number with its source.
#
# Knows numbers. Does not know formulas (``costs.py``). "Measured" is vLLM 0.22.0, whose runner was the
# older one, and 0.26.0, with the newer one (``costs.has_newer_runner``), with random weights at the true
# shapes of Qwen3-VL and some 7 GiB for it. Nothing here was measured on a small card.


MEASURED_WITH = "0.22.0"
NEWER_MEASURED_WITH = "0.26.0"
_H100 = f"vLLM {NEWER_MEASURED_WITH} on one H100, driver 580.159.04, torch 2.11.0, benchmarks.vllm_beside"
_TWO_H200 = f"vLLM {NEWER_MEASURED_WITH} on two H200, by hand"
_H200 = f"vLLM {MEASURED_WITH} on one H200, driver 580.159.04, torch 2.11.0+cu130, 2026-11-21"

# What the process holds on the card before vLLM takes its first look: outside its budget, inside "used".
CONTEXT = Constant(
    0.53 * GIB, MEASURED, f"522-527 MiB; users of small cards report 0.4-0.6 GiB before it counts; {_H200}"
)
# What CUDA's libraries take during the trial run, beside torch's pool: inside the budget.
LIBRARIES = Constant(0.24 * GIB, MEASURED, f"0.22-0.24 GiB of non-torch memory; {_H200}")
# What a running process holds more than after its start. Two requests at once: 160-180 MiB; eight: 344-472.
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
# What compiling takes at the peak of a first start, beside what the pass itself holds: 0.40-0.45 GiB in all;
# with the newer runner nothing of it was seen, at a first start of 2B in FP8 (47 s of compiling, 0.26.0).
COMPILING = Constant(290 * MIB, MEASURED, f"peaks of 0.40-0.45 GiB less 136-264 MiB by shapes; {_H200}")
# The trial run of two pictures of 1024 tokens peaked at 0.27 GiB without graphs, where shapes say 256 MiB.
BESIDE_PICTURES = Constant(36 * MIB, MEASURED, f"0.27 GiB against 256 MiB by shapes, 2B; {_H200}")
# Seconds for each layer of one pass whose kernels lie in a CUDA graph, from pass to pass.
LAUNCH_OF_GRAPHS = Constant(2.17e-3 / 28, MEASURED, f"Qwen3-VL 2B in bf16: 2.17 ms for 28 layers; {_H200}")
LAUNCH_OF_GRAPHS_LOW = Constant(
    (2.17e-3 - 1.295e-3) / 28, MEASURED, f"the same, less 1.295 ms of matrix products alone; {_H200}"
)
# What NCCL holds on each card of a group that shares layers, before vLLM's first look. Linear in its
# channels, of which fast links have more (NCCL's issue 864).
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


# Several cards for vLLM: which may go together, how a model is shared out, and what each then holds.
#
# Knows: vLLM's rules for sharing layers out (``--tensor-parallel-size``), read in its source, and bytes for
# each card. Does not know how many cards to take (``plan/vllm/placement.py``) or how it is spelt
# (``command.py``).


# Which side of a layer's matrices is cut: outputs, or inputs, whose results are then added up over the cards.
_BY_INPUTS = ("o_proj", "down_proj")
_KEYS = ("k_proj", "v_proj")
# What each card's piece must be a multiple of: blocks of FP8 weights (``fp8_utils.py``), tiles of Marlin's
# kernels for int4 (``marlin_utils.py``); outputs and inputs.
_PIECES = {FP8: (128, 128), INT4: (64, 128)}
_FROM_HOPPER = (9, 0)
# Cards with so much memory have NVLink and NCCL's many channels, where they are of Hopper's age or later.
_SERVER_CARD = 70 * 2**30


def why_not(model: Model, tensor: int) -> str:
    """Why vLLM cannot share this model's layers over ``tensor`` cards; "" if it can."""
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


def why_not_tower(vision: VisionConfig | None, tensor: int) -> str:
    """Why the tower cannot be shared out; "" if it can."""
    if vision is None or tensor == 1:
        return ""
    if vision.num_heads % tensor or vision.intermediate_size % tensor:
        return f"the tower's {vision.num_heads} heads cannot be shared out over {tensor} cards"
    return ""


def keys_of_card(model: Model, tensor: int) -> int:
    """Heads of keys and values that one card keeps; with more cards than heads each keeps one."""
    return max(model.text.num_key_value_heads // tensor, 1)


def kv_bytes_of_card(model: Model, tensor: int, whole: int) -> int:
    """Of ``whole`` bytes of a token's keys and values what one card keeps."""
    return whole * keys_of_card(model, tensor) // model.text.num_key_value_heads


def text_bytes(model: Model, tensor: int) -> int:
    """Weights of the text layers on one card: matrices shared out, norms on each."""
    text = model.text
    norms = HALF * (text.num_hidden_layers * 2 * (text.hidden_size + text.head_dim) + text.hidden_size)
    return norms + _piece(model.text_bytes - norms, tensor) + _more_keys(model, tensor)


def vision_bytes(model: Model, settings: "Settings") -> int:
    """The tower on one card: all of it, or its matrices shared out."""
    vision, tensor = model.vision, settings.vllm.tensor
    if vision is None or tensor == 1 or not settings.vllm.split_tower:
        return model.vision_bytes
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    # Patches, positions, two norms and what is added behind each sum of a block.
    on_each = HALF * vision.hidden_size * (values + vision.num_position_embeddings + 6 * vision.depth)
    return on_each + _piece(model.vision_bytes - on_each, tensor)


def embedding_bytes(model: Model, tensor: int) -> int:
    """Table of tokens and output head on one card: rows shared out."""
    return _piece(model.embedding_bytes, tensor)


def peers(gpu: "Gpu", tensor: int) -> int:
    """What a card holds to work with the others: NCCL and buffers that they read."""
    if tensor == 1:
        return 0
    hopper = gpu.compute_capability >= _FROM_HOPPER
    fast = hopper and gpu.total >= _SERVER_CARD
    nccl = NCCL_OF_HOPPER if fast else NCCL
    return nccl.bytes + ALL_REDUCE.bytes + (SYMMETRIC.bytes if fast else 0)


def peers_note(gpu: "Gpu", tensor: int) -> str:
    """What is known of ``peers``, and where from."""
    fast = gpu.compute_capability >= _FROM_HOPPER and gpu.total >= _SERVER_CARD
    nccl = NCCL_OF_HOPPER if fast else NCCL
    return f"NCCL and all-reduce between {tensor} cards, outside vLLM's budget; {nccl.source}"


def all_reduces(model: Model) -> int:
    """Sums over the cards for one token: two for each layer and one for the table of tokens."""
    return 2 * model.text.num_hidden_layers + 1


def _more_keys(model: Model, tensor: int) -> int:
    """What is kept more than once where there are more cards than heads of keys."""
    keys = model.text.num_key_value_heads
    if tensor <= keys:
        return 0
    more = (1 / keys - 1 / tensor) * sum(_bytes(model.layer[name]) for name in _KEYS)
    return round(more * model.text.num_hidden_layers)


def _bytes(matrix: Matrix) -> float:
    return matrix.weights * {FP8: 1.0, INT4: 0.5 + HALF / 32}.get(matrix.form, HALF)


def _piece(whole: int, tensor: int) -> int:
    return -(-whole // tensor)


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
    return patches * row * settings.vllm.value_bytes + BESIDE_PICTURES.bytes


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
    compiling = COMPILING.bytes if compiles else 0
    passing = settings.chunk * row * settings.vllm.value_bytes
    return passing + settings.sequences * SAMPLER_ROW + compiling


def growth(settings: "Settings") -> int:
    """What a process holds more once it has answered its first requests."""
    if has_newer_runner(settings.vllm):
        return GROWTH_OF_NEWER.bytes
    few = settings.sequences <= FEW_SEQUENCES
    return (GROWTH_OF_FEW if few else GROWTH).bytes


def graphs(settings: "Settings") -> int:
    """CUDA graphs of batches up to twice the requests at once: between the two numbers that were measured."""
    if not settings.graphs:
        return 0
    few, many = GRAPHS_OF_FEW.bytes, GRAPHS_OF_MANY.bytes
    beyond = max(min(settings.sequences, MANY_GRAPHS) - FEW_GRAPHS, 0)
    return few + (many - few) * beyond // (MANY_GRAPHS - FEW_GRAPHS)
