"""Weights in RAM: table of tokens and text layers offloaded from a GPU, and all weights on a CPU.

A pass reads a few rows of the table of tokens, which kernels read from pinned RAM in place
(``layers/embedding.py``): 8 KiB for each token of a 9B model, 8 MiB for a prefill chunk of 1024. So a table
that is not the output head, too, is always in RAM, unless RAM is short.

Offloaded layers are copied in turn into two slots on the card (``loading/offload.py``), one while others
compute; the first of a pass is copied during the pass before. The layers are spread evenly over the model, so
that each copy overlaps with the same share of computing, and a pass takes as long as all copies or all
computing, whichever is longer. If they were the last layers, their copies would only overlap with each
other's computing.

A CPU that computes in 32 bits keeps large matrices as they are stored (``layers/cpu_stored.py``); without
compiled products in 16 bits, where torch has products for it (``layers/cpu_linear.py``).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import StoredLayout, TensorInfo
from vlfit.checkpoint.quantization import Quantization
from vlfit.checkpoint.tensors import (
    COMPRESSED_SCALE_SUFFIX,
    FP8_SCALE_SUFFIX,
    G_IDX_SUFFIX,
    PACKED_SUFFIX,
    SUPER_SCALE_SUFFIX,
    count_weights,
    is_embedding,
    is_quantization_metadata,
    matrix_columns,
    with_byte_codes,
)
from vlfit.errors import DoesNotFit, UsageError
from vlfit.images.decode_memory import max_bytes_of_workers
from vlfit.machine.model import Gpu, Host
from vlfit.plan.allocator import UNIT, arena_allocation_sizes, reserved_bytes
from vlfit.plan.calibration import EXACT, Constants
from vlfit.plan.ledger import Line, PlanSettings
from vlfit.plan.shapes import HALF, Model, ledger_part
from vlfit.plan.wishes import AUTO
from vlfit.units import GIB, MIB, format_bytes


class Headers(Protocol):
    """Config and tensors of a checkpoint: a ``Checkpoint``, or one of the catalog that is not here."""

    @property
    def config(self) -> ModelConfig:
        """Its config.json."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors of its files, by name."""


SLOTS = 2
ALIGNMENT = UNIT  # of a tensor in a slot, as torch's allocator aligns them
RAM_LEFT = GIB  # a choice: RAM that stays for other programs beside pinned layers
RAM_RESERVE = 512 * MIB  # likewise beside weights that could move to files: of models on a CPU, or asleep

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Offload:
    """Text layers whose weights are kept in RAM, and what that takes.

    - ``layers``: indices of the layers.
    - ``ram_bytes``: their weights in RAM, with every tensor padded. ``weight_bytes``: without padding.
    - ``slot_bytes``: one of the two slots on the card into which layers are copied in turn.
    """

    layers: tuple[int, ...]
    ram_bytes: int
    weight_bytes: int
    slot_bytes: int

    @property
    def slots_bytes(self) -> int:
        """Bytes of both slots on the card."""
        return SLOTS * self.slot_bytes

    @property
    def freed_bytes(self) -> int:
        """Bytes that this frees on the card: ``weight_bytes`` less both slots; negative for few layers."""
        return self.weight_bytes - self.slots_bytes

    @property
    def description(self) -> str:
        """Number of layers and RAM in words: ``12 text layers wait in RAM (3.1 GiB, locked)``."""
        return f"{len(self.layers)} text layers wait in RAM ({format_bytes(self.ram_bytes)}, locked)"


def offload_of(model: Model, count: int) -> Offload:
    """The offload of ``count`` text layers of ``model``, spread evenly; for 0, no layers and 0 bytes."""
    if not count:
        return Offload((), 0, 0, 0)  # the usual case of a search
    exact, packed = _layer_sizes(model)
    layers = spread_layers(len(exact), count)
    return Offload(
        layers,
        ram_bytes=sum(packed[index] for index in layers),
        weight_bytes=sum(exact[index] for index in layers),
        slot_bytes=max((packed[index] for index in layers), default=0),
    )


def spread_layers(layers: int, count: int) -> tuple[int, ...]:
    """``count`` indices below ``layers``, evenly spaced on a circle: after the last comes the next pass."""
    return tuple((2 * number + 1) * layers // (2 * count) for number in range(count))


def offload_counts(model: Model) -> range:
    """Numbers of offloaded layers worth trying, the fewest first: 3 to all.

    Up to 2 layers fill the slots and free nothing. Empty for a model of at most 2 layers.
    """
    return range(SLOTS + 1, model.text.num_hidden_layers + 1)


def num_layers_to_free(model: Model, wanted: int) -> int:
    """The fewest offloaded layers that free ``wanted`` bytes on the card.

    Raises ``UsageError`` if even all layers do not.
    """
    for count in offload_counts(model):
        if offload_of(model, count).freed_bytes >= wanted:
            return count
    most = max((offload_of(model, count).freed_bytes for count in offload_counts(model)), default=0)
    raise UsageError(
        f"--offload {format_bytes(wanted)} is more than can leave the card: {format_bytes(most)} with all "
        f"text layers of {model.name} in RAM",
        f"Ask for less, or for --offload {AUTO}: as much as it takes to fit.",
        param="offload",
    )


def table_bytes_in_ram(model: Model, settings: PlanSettings) -> int:
    """Bytes of the table of tokens if it is in RAM, else 0."""
    return model.table_bytes if settings.table_in_ram else 0


def holds_table(table_bytes: int, host: Host) -> bool:
    """Whether RAM has room for a table of tokens and ``RAM_LEFT`` beside it; else it goes on the card."""
    return table_bytes <= host.ram_available - RAM_LEFT


def check_ram(offload: Offload, host: Host, table_bytes: int = 0) -> None:
    """Raise ``DoesNotFit`` if the offloaded layers would leave less than ``RAM_LEFT`` of RAM available.

    ``table_bytes``: of a table of tokens in RAM.
    """
    room = host.ram_available - RAM_LEFT - table_bytes
    if offload.ram_bytes > room:
        raise DoesNotFit(
            f"{offload.description}; {format_bytes(host.ram_available)} of RAM are available, of "
            f"which {format_bytes(RAM_LEFT)} stay for other programs: "
            f"{format_bytes(offload.ram_bytes - room)} too few",
            "Close programs, let fewer layers wait (a smaller --offload with smaller settings), or take a "
            "smaller checkpoint.",
        )


def torch_reserved_bytes(model: Model, offload: Offload, *, table_in_ram: bool = False) -> int:
    """Bytes that torch reserves on the card for the weights that are not offloaded and both slots.

    Only for an ``offload`` of at least one layer. ``table_in_ram``: without the table of tokens.
    """
    layers = {name: _LAYER.search(name) for name in model.sizes}
    here = [
        size
        for name, size in model.sizes.items()
        if (found := layers[name]) is not None and int(found[1]) not in offload.layers
    ]
    elsewhere = {
        name: size
        for name, size in model.sizes.items()
        if layers[name] is None and not (table_in_ram and is_embedding(name))
    }
    rest = arena_allocation_sizes(elsewhere)
    return reserved_bytes([*here, *[offload.slot_bytes] * SLOTS, *rest])


def copy_seconds(offload: Offload, gpu: Gpu, constants: Constants) -> tuple[float, float, float] | None:
    """Seconds to copy all offloaded layers to the card once: at best, expected, at worst.

    By the link's bandwidth in the calibration, else by the PCIe bandwidth of ``gpu``; None if both are None.
    """
    if constants.link_bandwidth is not None:  # measured on this machine
        speeds = [constants.link_bandwidth.value] * 3
    elif gpu.pcie_bandwidth is not None:
        shares = (constants.link_high, constants.link, constants.link_low)
        speeds = [gpu.pcie_bandwidth * share.value for share in shares]
    else:
        return None
    best, expected, worst = (offload.ram_bytes / speed for speed in speeds)
    return best, expected, worst


def _layer_sizes(model: Model) -> tuple[list[int], list[int]]:
    """Bytes of each text layer, exact and with every tensor aligned."""
    exact = [0] * model.text.num_hidden_layers
    packed = list(exact)
    for name, size in model.sizes.items():
        found = _LAYER.search(name)
        if found is not None:
            exact[int(found[1])] += size
            packed[int(found[1])] += -(-size // ALIGNMENT) * ALIGNMENT
    return exact, packed


def image_decoders_line(*, media: bool = False) -> Line:
    """The ledger line ``image_decoders``: the most RAM that all decode workers together may take.

    ``media``: with the workers that take documents and videos apart.
    """
    return Line(
        "image_decoders",
        max_bytes_of_workers(media=media),
        EXACT,
        "limit of the processes that decode pictures",
    )


def snapshots_in_ram_line(limit: int) -> Line:
    """The ledger line ``snapshots_in_ram`` of a model on a CPU: ``limit`` bytes for the prefix cache."""
    return Line("snapshots_in_ram", limit, EXACT, "limit of copies of states, with which prefixes are reused")


# --- weights on a CPU --------------------------------------------------------------------------------------

# A matrix is laid out in blocks of this size (FBGEMM, PackedGemmMatrixFP16; of 16 outputs
# without AVX-512). Inputs are padded to whole blocks; matrices whose outputs would be are left as they are.
BLOCK_INPUTS = 512
BLOCK_OUTPUTS = 32
# Weights of the smallest matrix that is packed so: in 32 bits 4 MiB, more than a core caches. Smaller ones
# are hardly read faster, and packing takes a core 11 ns for each weight. A choice: mini, whose matrices are
# smaller, decodes 13 % faster with it on a CPU with AVX2, and 30 % slower on one with AVX-512.
LEAST_WEIGHTS = 2**20
LEAST_INPUTS = BLOCK_INPUTS  # with fewer, half would be padding

_STORED_16_BIT = ("BF16", "F16")
_AT_MOST_16_BIT = (*_STORED_16_BIT, "F8_E4M3", "I8", "I32")  # stored in 16 bits or fewer
_ZERO_SUFFIX = ".weight_zero_point"
_STACKED = re.compile(r"(\.)(?:[qkv]|gate|up)_proj(\.(?!bias))")  # q, k and v; gate and up: one input


def packed_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix [rows, columns] packed in 16 bits for FBGEMM, with columns padded to blocks of 512.

    ``rows``: outputs; ``columns``: inputs.
    """
    return rows * -(-columns // BLOCK_INPUTS) * BLOCK_INPUTS * HALF


def is_packed(parts: Sequence[TensorInfo], quantization: Quantization | None) -> bool:
    """Whether a linear layer's weights are kept packed in 16 bits on a CPU that computes in 32 bits.

    ``parts``: the stored matrices that the engine stacks to one layer, such as q, k and v. True if the layer
    has 2^20 weights and 512 inputs or more, each part's outputs fill whole blocks of 32, and each part
    is stored in 16 bits or fewer.
    """
    shapes = [matrix_shape(info, quantization) for info in parts]
    rows, columns = sum(rows for rows, _ in shapes), shapes[0][1]
    return (
        columns >= LEAST_INPUTS
        and rows * columns >= LEAST_WEIGHTS
        and all(rows % BLOCK_OUTPUTS == 0 for rows, _ in shapes)
        and all(info.dtype in _AT_MOST_16_BIT for info in parts)
    )


def is_embedding_packed(info: TensorInfo, quantization: Quantization | None) -> bool:
    """Whether the embedding table ``info`` is kept in 16 bits on a CPU that computes in 32 bits.

    As it is stored, or dequantized to float16. A tied output head then has a packed copy of its own.
    """
    return is_packed([info], quantization)


_STORED_SCALES = ("BF16", "F16", "F32")
GROUP_MULTIPLE = 16  # inputs that compiled products decode together


def is_stored(parts: Sequence[TensorInfo], checkpoint: Headers) -> bool:
    """Whether a linear layer's weights stay as they are stored on a CPU with compiled products.

    ``parts``: the matrices that the engine stacks to one layer, such as q, k and v. True if the layer has
    2^20 weights and 512 inputs or more, and each part is in bfloat16 or float16, or in codes of 8 or 4 bits
    with scales for groups of 16, 32, 64, ... inputs or for whole rows.
    """
    quantization = checkpoint.config.quantization
    shapes = [matrix_shape(info, quantization) for info in parts]
    columns = shapes[0][1]
    return (
        columns >= LEAST_INPUTS
        and sum(rows for rows, _ in shapes) * columns >= LEAST_WEIGHTS
        and all(len(info.shape) == 2 and _has_stored_form(info, checkpoint) for info in parts)
    )


def is_embedding_stored(info: TensorInfo, checkpoint: Headers) -> bool:
    """Whether the embedding table ``info`` stays as it is stored on a CPU with compiled products."""
    return is_stored([info], checkpoint)


def has_stored(checkpoint: Headers) -> bool:
    """Whether any matrix of ``checkpoint`` stays as it is stored on a CPU with compiled products."""
    return any(
        (_is_linear(parts[0]) or is_embedding(parts[0].name)) and is_stored(parts, checkpoint)
        for parts in _stacks(checkpoint)
    )


def stored_bytes(info: TensorInfo, checkpoint: Headers) -> int:
    """Bytes of the matrix ``info`` as stored, with its scales and zero points."""
    return _stored_weights(info, checkpoint).total


def _beside(info: TensorInfo, checkpoint: Headers) -> dict[str, TensorInfo]:
    """Scales, zero points and super scales of the matrix ``info``, by suffix."""
    if info.dtype in _STORED_16_BIT:
        return {}
    module = info.name.removesuffix(PACKED_SUFFIX).removesuffix(".weight")
    suffixes = (f".weight{FP8_SCALE_SUFFIX}", COMPRESSED_SCALE_SUFFIX, SUPER_SCALE_SUFFIX, _ZERO_SUFFIX)
    found = {suffix: checkpoint.tensors.get(f"{module}{suffix}") for suffix in suffixes}
    return {suffix: each for suffix, each in found.items() if each is not None}


def _has_stored_form(info: TensorInfo, checkpoint: Headers) -> bool:
    """Whether the compiled products know the form of the matrix ``info``."""
    if info.dtype not in _AT_MOST_16_BIT:
        return False
    if info.dtype in _STORED_16_BIT:
        return True
    rows, columns = matrix_shape(info, checkpoint.config.quantization)
    beside = _beside(info, checkpoint)
    scale = beside.get(f".weight{FP8_SCALE_SUFFIX}") or beside.get(COMPRESSED_SCALE_SUFFIX)
    if scale is None or len(scale.shape) != 2 or not scale.shape[0] or not scale.shape[1]:
        return False
    if SUPER_SCALE_SUFFIX not in beside and scale.dtype not in _STORED_SCALES:
        return False
    if info.dtype == "F8_E4M3":
        block = _fp8_block(info, columns, checkpoint)
        if block is None or (-(-rows // block[0]), -(-columns // block[1])) != tuple(scale.shape):
            return False
        return is_group(block[1], columns)
    return (
        scale.shape[0] == rows
        and columns % scale.shape[1] == 0
        and is_group(columns // scale.shape[1], columns)
        and (info.dtype == "I8" or columns // scale.shape[1] % GROUP_MULTIPLE == 0)
    )


def _fp8_block(info: TensorInfo, columns: int, checkpoint: Headers) -> tuple[int, int] | None:
    """Rows and columns that share a scale of the FP8 matrix ``info``; None if config.json does not say."""
    config = checkpoint.config
    if config.fp8 is not None:
        return config.fp8.block_rows, config.fp8.block_columns
    scheme = config.compressed.scheme_of(info.name.removesuffix(".weight")) if config.compressed else None
    return None if scheme is None else (scheme.block_rows, scheme.group_size or columns)


def is_group(group: int, columns: int) -> bool:
    """Whether compiled products know rows of ``columns`` weights with a scale for ``group`` of them."""
    return group >= columns or (group % GROUP_MULTIPLE == 0 and group & (group - 1) == 0)


def matrix_shape(info: TensorInfo, quantization: Quantization | None) -> tuple[int, int]:
    """(outputs, inputs) of a stored matrix, in weights, not packed words; else (1, number of values)."""
    if len(info.shape) != 2:
        return 1, info.count
    return info.shape[0], matrix_columns(info, quantization)


@dataclass(frozen=True, slots=True)
class CpuWeights:
    """Bytes of weights on a CPU: ``mapped`` are pages of the files, ``copied`` is memory of the process."""

    mapped: int = 0
    copied: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.mapped + self.copied

    def __add__(self, other: "CpuWeights") -> "CpuWeights":
        return CpuWeights(self.mapped + other.mapped, self.copied + other.copied)


def weight_bytes_in_ram(
    checkpoint: Headers, value_bytes: int, *, cpu_16_bit: bool, cpu_stored: bool = False
) -> dict[str, int]:
    """Bytes of weights on a CPU, by part: the totals of ``weights_in_ram``."""
    found = weights_in_ram(checkpoint, value_bytes, cpu_16_bit=cpu_16_bit, cpu_stored=cpu_stored)
    return {part: weights.total for part, weights in found.items()}


def weights_in_ram(
    checkpoint: Headers, value_bytes: int, *, cpu_16_bit: bool, cpu_stored: bool = False
) -> dict[str, CpuWeights]:
    """Weights on a CPU, by part: ``text``, ``vision``, ``embedding`` and, if any, ``draft``.

    All weights are converted to values of ``value_bytes``, and norms of q and k repeated for each head.
    ``cpu_16_bit``: except large matrices, which are packed in 16 bits (``is_packed``). ``cpu_stored``: except
    large matrices, which stay as they are stored (``is_stored``); this goes before ``cpu_16_bit``.
    """
    config = checkpoint.config
    heads = {
        ".q_norm.weight": config.text.num_attention_heads,
        ".k_norm.weight": config.text.num_key_value_heads,
    }
    sizes = {part: CpuWeights() for part in ("text", "vision", "embedding")}
    for parts in _stacks(checkpoint):
        name = parts[0].name
        if name.startswith("lm_head.") and config.tie_word_embeddings:
            continue
        part = ledger_part(name)
        if cpu_stored and (_is_linear(parts[0]) or is_embedding(name)) and is_stored(parts, checkpoint):
            sizes[part] = sum(
                (_stored_weights(info, checkpoint) for info in parts), sizes.get(part, CpuWeights())
            )
            continue
        packed = sum(packed_bytes(*matrix_shape(info, config.quantization)) for info in parts)
        if cpu_16_bit and is_embedding(name) and is_embedding_packed(parts[0], config.quantization):
            size = count_weights(parts[0], config.quantization) * HALF + (
                packed if config.tie_word_embeddings else 0
            )
        elif cpu_16_bit and _is_linear(parts[0]) and is_packed(parts, config.quantization):
            size = packed
        else:
            copies = next((count for ending, count in heads.items() if name.endswith(ending)), 1)
            weights = sum(count_weights(info, config.quantization) for info in parts)
            size = copies * weights * value_bytes
        sizes[part] = sizes.get(part, CpuWeights()) + CpuWeights(copied=size)
    return sizes


def weight_lines_in_ram(weights: Mapping[str, CpuWeights], note: str, *, how: str = "") -> tuple[Line, ...]:
    """The ledger lines of ``weights`` (``weights_in_ram``): which of their bytes are pages of the files.

    ``note``, ``how``: in what small tensors and large matrices are, in words.
    """
    lines = []
    for part, each in weights.items():
        kept = f"{each.copied / MIB:,.0f} MiB in {note}" if each.mapped else note
        pages = f"{each.mapped / MIB:,.0f} MiB are pages of the files, " if each.mapped else ""
        words = f"{pages}{kept}{f'; {how}' if how else ''}"
        lines.append(Line(f"weights.{part}", each.total, EXACT, words if each.total else "none"))
    return tuple(lines)


def _stored_weights(info: TensorInfo, checkpoint: Headers) -> CpuWeights:
    """The matrix ``info`` as stored: what of it and its scales is mapped (``WeightStreamer.mapped``)."""
    if info.blocks is not None and info.blocks.are_multiplied:
        return CpuWeights(mapped=info.bytes)
    module = info.name.removesuffix(PACKED_SUFFIX)
    reordered = info.name.endswith(PACKED_SUFFIX) and f"{module}{G_IDX_SUFFIX}" in checkpoint.tensors
    found = CpuWeights()
    codes = with_byte_codes(info, checkpoint.config.quantization)
    for each in (codes, *_beside(info, checkpoint).values()):
        size = each.loaded_bytes
        is_plain = each.layout is StoredLayout.PLAIN and each.blocks is None
        if is_plain and not (reordered and each is codes):
            found += CpuWeights(mapped=size)
        else:
            found += CpuWeights(copied=size)
    return found


def _stacks(checkpoint: Headers) -> Iterable[Sequence[TensorInfo]]:
    """All weight tensors, grouped into the matrices that the engine stacks."""
    stacks: dict[str, list[TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        if not is_quantization_metadata(name):
            stacks.setdefault(_STACKED.sub(r"\1together\2", name), []).append(info)
    return stacks.values()


def _is_linear(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and not is_embedding(info.name) and not info.name.endswith("pos_embed.weight")
