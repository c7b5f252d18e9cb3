"""What weights take on a CPU: which matrices the engine keeps in 16 bits there, and the bytes of all.

A CPU that computes in 32 bits multiplies with weights in 16 where torch has the products for it
(``engine/layers/halves.py``). Knows their layout and the sizes from which it pays. Does not know whether this
CPU has them: the engine does.
"""

import re
from collections.abc import Iterable, Sequence

from vlfit.checkpoint.cache import count_weights
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import Quantization
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import PACKED_SUFFIX, codes_per_word, is_embedding, is_no_weight
from vlfit.plan.model import ledger_part

HALF = 2  # bytes
# A matrix is laid out in blocks of so many inputs and outputs (FBGEMM, PackedGemmMatrixFP16; of 16 outputs
# without AVX-512). Inputs are padded to whole blocks; matrices whose outputs would be are left as they are.
BLOCK_INPUTS = 512
BLOCK_OUTPUTS = 32
# Weights of the smallest matrix that is laid out so: in 32 bits 4 MiB, more than a core keeps near. What is
# smaller is hardly read faster, and laying it out takes a core 11 ns for each weight. A choice: mini, whose
# matrices are smaller, decodes 13 % faster with it on a CPU with AVX2, and 30 % slower on one with AVX-512.
LEAST_WEIGHTS = 2**20
LEAST_INPUTS = BLOCK_INPUTS  # with fewer, half of what is laid out would be padding

_HALVES = ("BF16", "F16")
_HALVED = (*_HALVES, "F8_E4M3", "I8", "I32")  # stored in 16 bits or fewer
_STACKED = re.compile(r"(\.)(?:[qkv]|gate|up)_proj(\.(?!bias))")  # q, k and v; gate and up: one input


def half_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix [rows, columns] as it is laid out for products."""
    return rows * -(-columns // BLOCK_INPUTS) * BLOCK_INPUTS * HALF


def in_halves(parts: Sequence[TensorInfo], quantization: Quantization | None) -> bool:
    """Whether a linear layer, whose matrices ``parts`` stand on top of one another, is kept in 16 bits.

    Not one that is stored in 32: it would not be the same.
    """
    shapes = [matrix_shape(info, quantization) for info in parts]
    rows, columns = sum(rows for rows, _ in shapes), shapes[0][1]
    return (
        columns >= LEAST_INPUTS
        and rows * columns >= LEAST_WEIGHTS
        and all(rows % BLOCK_OUTPUTS == 0 for rows, _ in shapes)
        and all(info.dtype in _HALVED for info in parts)
    )


def table_in_halves(info: TensorInfo, quantization: Quantization | None) -> bool:
    """Whether the table of tokens stays as it is stored; a head of the same numbers is laid out beside it."""
    return info.dtype in _HALVES and in_halves([info], quantization)


def matrix_shape(info: TensorInfo, quantization: Quantization | None) -> tuple[int, int]:
    """Outputs and inputs of what ``info`` stores; (1, n) of what is no matrix."""
    if len(info.shape) != 2:
        return 1, info.count
    packed = info.name.endswith(PACKED_SUFFIX)
    return info.shape[0], info.shape[1] * (codes_per_word(info.name, quantization) if packed else 1)


def weights_in_ram(checkpoint: Checkpoint, value_bytes: int, *, halves: bool) -> dict[str, int]:
    """Bytes of each part of the ledger. ``halves``: the engine multiplies with weights in 16 bits.

    What is not kept so is widened; the norms of q and k are repeated for each head.
    """
    config = checkpoint.config
    heads = {
        ".q_norm.weight": config.text.num_attention_heads,
        ".k_norm.weight": config.text.num_key_value_heads,
    }
    sizes = {"text": 0, "vision": 0, "embedding": 0}
    for parts in _stacks(checkpoint):
        name = parts[0].name
        if name.startswith("lm_head.") and config.tie_word_embeddings:
            continue
        laid_out = sum(half_bytes(*matrix_shape(info, config.quantization)) for info in parts)
        if halves and is_embedding(name) and table_in_halves(parts[0], config.quantization):
            size = parts[0].bytes + (laid_out if config.tie_word_embeddings else 0)
        elif halves and _is_linear(parts[0]) and in_halves(parts, config.quantization):
            size = laid_out
        else:
            copies = next((count for ending, count in heads.items() if name.endswith(ending)), 1)
            weights = sum(count_weights(info, config.quantization) for info in parts)
            size = copies * weights * value_bytes
        sizes[ledger_part(name)] += size
    return sizes


def _stacks(checkpoint: Checkpoint) -> Iterable[Sequence[TensorInfo]]:
    """All tensors with weights; those that the engine makes one matrix of, together."""
    stacks: dict[str, list[TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        if not is_no_weight(name):
            stacks.setdefault(_STACKED.sub(r"\1together\2", name), []).append(info)
    return stacks.values()


def _is_linear(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and not is_embedding(info.name) and not info.name.endswith("pos_embed.weight")
