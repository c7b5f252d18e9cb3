"""Several cards for vLLM: which may go together, how a model is shared out, and what each then holds.

Knows: vLLM's rules for sharing layers out (``--tensor-parallel-size``), read in its source, and bytes for
each card. Does not know how many cards to take (``groups.py``) or how it is spelt (``command.py``).
"""

from typing import TYPE_CHECKING

from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.quantization import FP8, INT4
from vlfit.plan.model import HALF, Matrix, Model
from vlfit.plan.vllm import constants

if TYPE_CHECKING:
    from vlfit.machine.model import Gpu
    from vlfit.plan.ledger import Settings

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
    nccl = constants.NCCL_OF_HOPPER if fast else constants.NCCL
    return nccl.bytes + constants.ALL_REDUCE.bytes + (constants.SYMMETRIC.bytes if fast else 0)


def peers_note(gpu: "Gpu", tensor: int) -> str:
    """What is known of ``peers``, and where from."""
    fast = gpu.compute_capability >= _FROM_HOPPER and gpu.total >= _SERVER_CARD
    nccl = constants.NCCL_OF_HOPPER if fast else constants.NCCL
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
