"""Layers of the text model that wait in RAM: which they are, what that frees, and what it costs.

Two slots on the card take them in turn, so the card holds two layers for all that wait
(``loading/offload.py``). Knows sizes, and the speed of the link. Does not know what fits (``search.py``,
``engine/memory/fit.py``).

Speed: with two slots one layer is copied while others compute, and what comes first in a pass is copied
behind the pass before. Where the layers that wait are spread evenly each has the same share of the others to
hide behind, and a pass takes as long as all copies or all computing, whichever is longer. Were they the last
ones of the model, all but two would be copied with nothing but each other's computing to hide behind.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vlfit.checkpoint.cache import count_weights
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import Quantization
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import PACKED_SUFFIX, codes_per_word, is_embedding, is_no_weight
from vlfit.errors import DoesNotFit, UsageError
from vlfit.machine.model import Gpu, Host
from vlfit.plan.allocator import held_for, shelved
from vlfit.plan.calibration import Constants
from vlfit.plan.shapes import Model, ledger_part
from vlfit.units import GIB, format_bytes, parse_gibibytes

SLOTS = 2
ALIGNMENT = 512  # of a tensor in a slot, as torch's allocator aligns them
AUTO: Literal["auto"] = "auto"
RAM_LEFT = GIB  # a choice: RAM that stays for others when layers, which cannot be swapped, have theirs

Wish = int | Literal["auto"]  # bytes that leave the card, or the least that makes it fit

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Offload:
    """``layers`` that wait, ``ram`` bytes that they take there, ``weights`` without what aligns them, and
    ``slot`` bytes of each of the two slots.
    """

    layers: tuple[int, ...]
    ram: int
    weights: int
    slot: int

    @property
    def slots(self) -> int:
        """Bytes of both slots."""
        return SLOTS * self.slot

    @property
    def frees(self) -> int:
        """By how much less the card holds of weights."""
        return self.weights - self.slots

    @property
    def words(self) -> str:
        return f"{len(self.layers)} text layers wait in RAM ({format_bytes(self.ram)}, locked)"


def offload_of(model: Model, count: int) -> Offload:
    """``count`` layers of ``model`` wait, spread evenly."""
    if not count:
        return Offload((), 0, 0, 0)  # a search asks this a thousand times
    exact, packed = _layer_sizes(model)
    layers = spread(len(exact), count)
    return Offload(
        layers,
        ram=sum(packed[index] for index in layers),
        weights=sum(exact[index] for index in layers),
        slot=max((packed[index] for index in layers), default=0),
    )


def spread(layers: int, count: int) -> tuple[int, ...]:
    """``count`` of ``layers``, as far apart as can be, the last and the first of the next pass too."""
    return tuple((2 * number + 1) * layers // (2 * count) for number in range(count))


def counts(model: Model) -> range:
    """How many layers can wait so that the card holds less for it, the fewest first."""
    return range(SLOTS + 1, model.text.num_hidden_layers + 1)


def count_for(model: Model, wanted: int) -> int:
    """The fewest layers to wait so that the card holds ``wanted`` bytes less. Raises ``UsageError``."""
    for count in counts(model):
        if offload_of(model, count).frees >= wanted:
            return count
    most = max((offload_of(model, count).frees for count in counts(model)), default=0)
    raise UsageError(
        f"--offload {format_bytes(wanted)} is more than can leave the card: {format_bytes(most)} with all "
        f"text layers of {model.name} in RAM",
        f"ask for less, or for --offload {AUTO}: as much as it takes to fit",
        param="offload",
    )


def parse_wish(text: str) -> Wish:
    """``auto``, or a size: a bare number is in GiB. Raises ``UsageError``."""
    if text.strip().lower() == AUTO:
        return AUTO
    wanted = parse_gibibytes(text, "--offload")
    if wanted <= 0:
        raise UsageError(
            f"--offload is {text}", "ask for more than 0, or leave it out: all stays on the card then"
        )
    return wanted


def check_ram(offload: Offload, host: Host) -> None:
    """Raises ``DoesNotFit`` where the layers would not leave enough of the RAM."""
    room = host.ram_available - RAM_LEFT
    if offload.ram > room:
        raise DoesNotFit(
            f"{offload.words}; {format_bytes(host.ram_available)} of RAM are available, of which "
            f"{format_bytes(RAM_LEFT)} stay for other programs: {format_bytes(offload.ram - room)} too few",
            "close programs, let fewer layers wait (a smaller --offload with smaller settings), or take a "
            "smaller checkpoint",
        )


def torch_takes(model: Model, offload: Offload) -> int:
    """Bytes that torch takes from the driver for what stays on the card and the slots, in their order."""
    layers = {name: _LAYER.search(name) for name in model.sizes}
    here = [
        size
        for name, size in model.sizes.items()
        if (found := layers[name]) is not None and int(found[1]) not in offload.layers
    ]
    rest = shelved({name: size for name, size in model.sizes.items() if layers[name] is None})
    return held_for([*here, *[offload.slot] * SLOTS, *rest])


def copy_seconds(offload: Offload, gpu: Gpu, constants: Constants) -> tuple[float, float, float] | None:
    """Seconds in which all layers that wait are copied once: at best, expected, at worst.

    None where nobody knows the link's speed.
    """
    if constants.link_bandwidth is not None:  # measured on this machine
        speeds = [constants.link_bandwidth.value] * 3
    elif gpu.pcie_bandwidth is not None:
        shares = (constants.link_high, constants.link, constants.link_low)
        speeds = [gpu.pcie_bandwidth * share.value for share in shares]
    else:
        return None
    best, expected, worst = (offload.ram / speed for speed in speeds)
    return best, expected, worst


def _layer_sizes(model: Model) -> tuple[list[int], list[int]]:
    """Bytes of each text layer: of its tensors, and with each of them aligned."""
    exact = [0] * model.text.num_hidden_layers
    packed = list(exact)
    for name, size in model.sizes.items():
        found = _LAYER.search(name)
        if found is not None:
            exact[int(found[1])] += size
            packed[int(found[1])] += -(-size // ALIGNMENT) * ALIGNMENT
    return exact, packed


# What weights take on a CPU: which matrices the engine keeps in 16 bits there, and the bytes of all.
#
# A CPU that computes in 32 bits multiplies with weights in 16 where torch has the products for it
# (``layers/cpu_linear.py``). Knows their layout and the sizes from which it pays. Does not know whether
# this CPU has them: the engine does.


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
