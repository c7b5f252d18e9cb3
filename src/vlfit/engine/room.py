"""Whether an engine fits its device, before a byte is loaded: the planner's ledger against what is free.

Knows which lines are this process's already, and how many tokens of KV cache what is left over would hold. On
a CPU the ledger is weights and KV cache. Does not know what a line costs (``plan/``) or how a cap is set
(``budget.py``).
"""

from dataclasses import dataclass
from itertools import groupby

import torch

from vlfit.checkpoint.cache import count_weights
from vlfit.checkpoint.config import TextConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import COMPRESSED_SUFFIXES, SCALE_SUFFIX
from vlfit.engine.holdings import gpu_uuid
from vlfit.errors import DoesNotFit
from vlfit.machine.gpu import gpu_behind, read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import EXACT, constants_for
from vlfit.plan.expect import expect_in_ram, expect_on_gpu
from vlfit.plan.ledger import Line, Settings
from vlfit.plan.preference import IMAGE_TOKENS
from vlfit.units import format_bytes

# What a person is told of a ledger, in few words: the first part of a line's name, and what it is called.
_CALLED = {
    "context": "CUDA and its libraries",
    "weights": "weights",
    "kv_cache": "KV cache",
    "workspace": "workspaces",
    "graphs": "graphs",
    "reserve": "reserve",
}


@dataclass(frozen=True, slots=True)
class Room:
    """``lines`` of the ledger as the engine takes them, all but what others hold.

    ``there`` bytes of them this process holds already: CUDA's context, where something used the GPU before.
    ``free`` may be had. ``kv_tokens`` are in the pool, ``image_tokens`` the most of a picture. ``limit``:
    what torch's pool on a GPU may come to; None where no plan tells.
    """

    lines: tuple[Line, ...]
    there: int
    free: int
    kv_tokens: int
    image_tokens: int
    limit: int | None = None

    @property
    def spare(self) -> int:
        """Bytes that are left over; negative: that are missing."""
        return self.free + self.there - sum(line.bytes for line in self.lines)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine was told.

    ``kv_tokens`` None: a pool of as many as there is room for, at least one context and at most what all
    sequences can fill. ``image_tokens`` None: the largest pictures that there is room for, at most
    ``most_image_tokens``.
    """

    context: int
    sequences: int
    chunk: int
    kv_tokens: int | None
    image_tokens: int | None
    most_image_tokens: int
    block_size: int


def find_room(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, wanted: Wanted) -> Room:
    """What an engine takes as it is ``wanted``. Raises ``DoesNotFit`` with the sizes and what is missing."""
    most = wanted.most_image_tokens
    steps = (most, *(step for step in IMAGE_TOKENS if step < most))
    if wanted.image_tokens is not None:
        steps = (min(wanted.image_tokens, most),)
    for image_tokens in steps:
        settings = Settings(
            checkpoint.weights_format, wanted.context, image_tokens, wanted.sequences, wanted.chunk
        )
        room = _with_pool(checkpoint, device, dtype, settings, wanted)
        if room.spare >= 0:
            return room
    raise _too_little(checkpoint, device, dtype, room)


def _with_pool(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, settings: Settings, wanted: Wanted
) -> Room:
    least = -(-wanted.context // wanted.block_size) * wanted.block_size
    room = _room(checkpoint, device, dtype, settings, wanted.kv_tokens or least)
    if wanted.kv_tokens is None and room.spare > 0:
        block = kv_bytes_per_token(checkpoint.config.text, dtype) * wanted.block_size
        most = least + room.spare // block * wanted.block_size
        room = _room(checkpoint, device, dtype, settings, min(most, wanted.sequences * least))
    return room


def kv_bytes_per_token(config: TextConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    """What the weights take once loaded: all in ``dtype``, except FP8, int8, int4 and scales on a GPU."""
    return sum(_bytes_loaded(info, checkpoint, dtype, device) for info in checkpoint.tensors.values())


def _bytes_loaded(info: TensorInfo, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        # All is widened, scales are no longer needed.
        return count_weights(info, checkpoint.config.quantization) * dtype.itemsize
    if info.name.endswith(SCALE_SUFFIX):
        return info.count * torch.float32.itemsize
    if info.name.endswith(".weight_shape"):
        return 0  # says what other shapes say, and is not loaded
    if info.dtype in ("F8_E4M3", "I8") or info.name.endswith(COMPRESSED_SUFFIXES):
        return info.bytes
    return info.count * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory of ``device`` that is free now; on a CPU what may be had without swapping."""
    if device.type == "cpu":
        return read_host().ram_available
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def _room(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, settings: Settings, kv_tokens: int
) -> Room:
    if device.type == "cpu":
        lines = expect_in_ram(checkpoint, kv_tokens, dtype.itemsize).lines
        return Room(lines, 0, free_bytes(device), kv_tokens, settings.image_tokens)
    reserved = torch.cuda.memory_reserved(device)
    pool_spare = reserved - torch.cuda.memory_allocated(device)
    gpu = gpu_behind(read_gpus()[0], gpu_uuid(device), str(device))
    planned: tuple[Line, ...] = ()
    if gpu is not None:
        expectation = expect_on_gpu(checkpoint, gpu, settings, dtype.itemsize, kv_tokens)
        planned = tuple(line for line in expectation.lines if line.line != "desktop")
    if gpu is None or not planned:
        # No plan is made for this (values of 32 bits) or of this (no driver's library): what is exact.
        lines = _exact_lines(checkpoint, device, dtype, kv_tokens)
        return Room(lines, 0, free_bytes(device) + pool_spare, kv_tokens, settings.image_tokens)
    context = next(line.bytes for line in planned if line.line == "context")
    # The workspace of matrix products is counted with the context, and lies in torch's pool.
    outside = context - constants_for(gpu).workspace.bytes
    return Room(
        planned,
        _context_there(gpu, reserved, context),
        gpu.free + pool_spare,
        kv_tokens,
        settings.image_tokens,
        limit=reserved + sum(line.bytes for line in planned) - outside,
    )


def _exact_lines(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, kv_tokens: int
) -> tuple[Line, ...]:
    weights = weight_bytes(checkpoint, dtype, device)
    cache = kv_tokens * kv_bytes_per_token(checkpoint.config.text, dtype)
    note = f"in {str(dtype).removeprefix('torch.')}"
    return Line("weights.text", weights, EXACT, note), Line("kv_cache", cache, EXACT, note)


def _context_there(gpu: Gpu, reserved: int, context: int) -> int:
    """How much of the planned ``context`` this process holds already.

    Not all drivers tell what it holds: then torch's pool shows whether the GPU was used.
    """
    ours = gpu.total - gpu.free - gpu.desktop
    if ours > 0:
        return min(max(ours - reserved, 0), context)
    return context if reserved else 0


def _too_little(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, room: Room) -> DoesNotFit:
    half = " or --dtype bfloat16" if dtype == torch.float32 else ""
    fewer = f"try a smaller --context or --image-tokens{half}, a smaller checkpoint, FP8 or int4 weights"
    ask = "" if device.type == "cpu" else f"; vlfit plan {checkpoint.name} says what would fit"
    return DoesNotFit(
        f"{checkpoint.name} does not fit on {device}: {in_words(room)}; {format_bytes(room.free)} are free, "
        f"{format_bytes(-room.spare)} too few",
        f"{fewer}, or close other programs{ask}",
    )


def in_words(room: Room) -> str:
    """The lines in one sentence."""
    named = ((_called(line.line), line.bytes) for line in room.lines if line.bytes)
    sums = (
        (what, sum(size for _, size in sizes)) for what, sizes in groupby(named, key=lambda each: each[0])
    )
    tokens = f" for {room.kv_tokens} tokens"
    return ", ".join(
        f"{format_bytes(size)} of {what}{tokens if what == _CALLED['kv_cache'] else ''}"
        for what, size in sums
    )


def _called(line: str) -> str:
    return next(words for name, words in _CALLED.items() if name in line)
