"""Whether an engine fits its device, before a byte is loaded: the planner's ledger against what is free.

Knows which lines are this process's already, and how many tokens of KV cache what is left over would hold. On
a CPU the ledger is weights and KV cache. Does not know what a line costs (``plan/``) or how a cap is set
(``budget.py``).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from vlfit.checkpoint.cache import count_weights
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import COMPRESSED_SUFFIXES, SCALE_SUFFIX
from vlfit.engine.memory.usage import gpu_uuid
from vlfit.errors import DoesNotFit, UsageError
from vlfit.layers.cpu_linear import halves_on
from vlfit.loading import preload as head_start
from vlfit.machine.gpu import gpu_behind, read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu
from vlfit.plan.actual import expect_in_ram, expect_on_gpu
from vlfit.plan.calibration import EXACT
from vlfit.plan.candidates import AMPLE_IMAGE_TOKENS, IMAGE_TOKENS
from vlfit.plan.ledger import Line, Settings, means_on
from vlfit.plan.native.ram import AUTO, Wish, check_ram, count_for, counts, offload_of
from vlfit.plan.native.tiles import LEAST, Means
from vlfit.plan.shapes import Model, kv_bytes_per_token, model_of
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
    what torch's pool on a GPU may come to; None where no plan tells. ``waiting``: layers that are in RAM.
    ``means``: what there is for prompts and pictures.
    """

    lines: tuple[Line, ...]
    there: int
    free: int
    kv_tokens: int
    image_tokens: int
    limit: int | None = None
    waiting: tuple[int, ...] = ()
    means: Means = LEAST

    @property
    def spare(self) -> int:
        """Bytes that are left over; negative: that are missing."""
        return self.free + self.there - sum(line.bytes for line in self.lines)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine was told.

    ``kv_tokens`` None: a pool of as many as there is room for, at least one context and at most what all
    sequences can fill. ``image_tokens`` None: the largest pictures that there is room for, at most
    ``most_image_tokens``. ``offload``: as in ``EngineOptions``. ``kv_dtype``: fp8, or bf16 for the dtype of
    the computation.
    """

    context: int
    sequences: int
    chunk: int
    kv_tokens: int | None
    image_tokens: int | None
    most_image_tokens: int
    block_size: int
    offload: Wish | None = None
    kv_dtype: str = BF16
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is to be: ``gpu`` as the driver's library told of it once; None on a CPU, or untold."""

    device: torch.device
    dtype: torch.dtype
    gpu: Gpu | None


def find_room(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, wanted: Wanted) -> Room:
    """What an engine takes as it is ``wanted``. Raises ``DoesNotFit`` with the sizes and what is missing."""
    place = Place(device, dtype, _gpu(device))
    if wanted.offload is not None:
        return _with_offload(checkpoint, place, wanted)
    room = _largest_pictures(checkpoint, place, wanted)
    if room.spare < 0:
        raise _too_little(checkpoint, place, room, wanted)
    return room


def _gpu(device: torch.device) -> Gpu | None:
    """The GPU as it is now; as it was before the context, where this start has just made that itself."""
    if device.type == "cpu":
        return None
    before = head_start.gpus_before()
    fresh = before and not torch.cuda.memory_reserved(device)
    gpus = before if before and fresh else read_gpus()[0]
    return gpu_behind(gpus, gpu_uuid(device), str(device))


def _largest_pictures(checkpoint: Checkpoint, place: Place, wanted: Wanted, waiting: int = 0) -> Room:
    """With the largest pictures that there is room for; without room for any, with the smallest."""
    most = wanted.most_image_tokens
    steps = (most, *(step for step in IMAGE_TOKENS if step < most))
    if wanted.image_tokens is not None:
        steps = (min(wanted.image_tokens, most),)
    for image_tokens in steps:
        settings = Settings(
            checkpoint.weights_format,
            wanted.context,
            image_tokens,
            wanted.sequences,
            wanted.chunk,
            offload=waiting,
            kv_dtype=wanted.kv_dtype,
            speculate=wanted.speculate,
        )
        room = _with_pool(checkpoint, place, settings, wanted)
        if room.spare >= 0:
            break
    return room


def _with_offload(checkpoint: Checkpoint, place: Place, wanted: Wanted) -> Room:
    """With layers in RAM: as many as were wished for, or the fewest that make it fit."""
    if place.device.type == "cpu":
        raise UsageError(
            "--offload lets layers wait in RAM for a GPU; on a CPU all weights are in RAM already",
            "leave it out, or add --device cuda",
            param="offload",
        )
    model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "read from its headers")
    if wanted.offload != AUTO and wanted.offload is not None:
        room = _largest_pictures(checkpoint, place, wanted, count_for(model, wanted.offload))
    else:
        room = _largest_pictures(checkpoint, place, wanted)
        if room.spare < 0:
            room = _fewest_waiting(checkpoint, place, wanted, model)
    if room.spare < 0:
        raise _too_little(checkpoint, place, room, wanted)
    check_ram(offload_of(model, len(room.waiting)), read_host())
    return room


def _fewest_waiting(checkpoint: Checkpoint, place: Place, wanted: Wanted, model: Model) -> Room:
    """The fewest layers that make room for ample pictures or, where not even all do, for small ones."""
    if wanted.image_tokens is None:
        ample = replace(wanted, image_tokens=AMPLE_IMAGE_TOKENS)
        room = _fewest_waiting(checkpoint, place, ample, model)
        if room.spare >= 0:
            return room

    def room_with(count: int) -> Room:
        return _largest_pictures(checkpoint, place, wanted, count)

    steps = counts(model)
    if not steps:
        return room_with(0)
    fewest = bisect_left(steps, 0, key=lambda count: room_with(count).spare)
    return room_with(steps[min(fewest, len(steps) - 1)])


def _with_pool(checkpoint: Checkpoint, place: Place, settings: Settings, wanted: Wanted) -> Room:
    least = _one_context(wanted)
    room = _room(checkpoint, place, settings, wanted.kv_tokens or least)
    if wanted.kv_tokens is None and room.spare > 0:
        text, value_bytes = checkpoint.config.text, place.dtype.itemsize
        block = kv_bytes_per_token(text, wanted.kv_dtype, value_bytes) * wanted.block_size
        most = least + room.spare // block * wanted.block_size
        room = _room(checkpoint, place, settings, min(most, wanted.sequences * least))
    return room


def _one_context(wanted: Wanted) -> int:
    """Tokens of the smallest pool: one context, in whole blocks."""
    return -(-wanted.context // wanted.block_size) * wanted.block_size


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


def _room(checkpoint: Checkpoint, place: Place, settings: Settings, kv_tokens: int) -> Room:
    device, dtype, gpu = place.device, place.dtype, place.gpu
    if device.type == "cpu":
        halves = halves_on(device, dtype)
        lines = expect_in_ram(
            checkpoint, kv_tokens, dtype.itemsize, halves=halves, kv_dtype=settings.kv_dtype
        ).lines
        return Room(lines, 0, free_bytes(device), kv_tokens, settings.image_tokens)
    reserved = torch.cuda.memory_reserved(device)
    pool_spare = reserved - torch.cuda.memory_allocated(device)
    waiting: tuple[int, ...] = ()
    planned: tuple[Line, ...] = ()
    if gpu is not None:
        expectation = expect_on_gpu(checkpoint, gpu, settings, dtype.itemsize, kv_tokens)
        planned = tuple(line for line in expectation.lines if line.line != "desktop")
        waiting = expectation.waiting
    if (gpu is None or not planned) and settings.offload:
        raise UsageError(
            "which layers wait in RAM is the plan's to say, and there is none for this GPU in 32 bits or "
            "without the driver's library (NVML)",
            "leave out --offload, or compute in 16 bits: --dtype bfloat16",
            param="offload",
        )
    if gpu is None or not planned:
        # No plan is made for this (values of 32 bits) or of this (no driver's library): what is exact.
        lines = _exact_lines(checkpoint, device, dtype, settings.kv_dtype, kv_tokens)
        return Room(lines, 0, free_bytes(device) + pool_spare, kv_tokens, settings.image_tokens)
    context = next(line.bytes for line in planned if line.line == "context")
    return Room(
        planned,
        _context_there(gpu, reserved, context),
        gpu.free + pool_spare,
        kv_tokens,
        settings.image_tokens,
        limit=reserved + sum(line.bytes for line in planned) - context,
        waiting=waiting,
        means=means_on(gpu),
    )


def _exact_lines(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, kv_dtype: str, kv_tokens: int
) -> tuple[Line, ...]:
    weights = weight_bytes(checkpoint, dtype, device)
    cache = kv_tokens * kv_bytes_per_token(checkpoint.config.text, kv_dtype, dtype.itemsize)
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


def _too_little(checkpoint: Checkpoint, place: Place, room: Room, wanted: Wanted) -> DoesNotFit:
    device = place.device
    half = " or --dtype bfloat16" if place.dtype == torch.float32 else ""
    half += "" if wanted.kv_dtype == FP8 else ", --kv-dtype fp8"
    fewer = f"a smaller --context or --image-tokens{half}, a smaller checkpoint, FP8 or int4 weights"
    if wanted.kv_tokens is not None and wanted.kv_tokens > _one_context(wanted):
        fewer = f"fewer --sequences (a smaller --kv where that is given), {fewer}"
    ask = "" if device.type == "cpu" else f"; vlfit plan {checkpoint.name} says what would fit"
    if device.type != "cpu" and wanted.offload is None:
        ask = f", or let layers wait in RAM, which is slow: --offload auto{ask}"
    return DoesNotFit(
        f"{checkpoint.name} does not fit on {device}: {in_words(room)}; {format_bytes(room.free)} are free, "
        f"{format_bytes(-room.spare)} too few",
        f"try {fewer}, or close other programs{ask}",
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
