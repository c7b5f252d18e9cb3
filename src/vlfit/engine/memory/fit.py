"""Whether an engine fits its device, checked before a byte is loaded: the planner's ledger against free
memory.

Memory that this process holds already is counted, and ``auto`` sizes (KV cache, images, offloaded layers) are
chosen here. On a CPU the ledger is weights and KV cache.
"""

import logging
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from vlfit import kernels
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import (
    COMPRESSED_SUFFIXES,
    FP8_SCALE_SUFFIX,
    count_weights,
    has_draft_model,
    is_embedding,
    used_cache_spec,
)
from vlfit.engine.memory.usage import gpu_uuid
from vlfit.errors import DoesNotFit, UsageError
from vlfit.layers.cpu_linear import uses_half_weights
from vlfit.layers.cpu_stored import keeps_stored
from vlfit.loading import preload
from vlfit.machine.gpu import gpu_of_device, read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu
from vlfit.plan.calibration import EXACT, MODELLED
from vlfit.plan.ledger import Line, PlanSettings, state_cache_lines
from vlfit.plan.native.expectation import expect_in_ram, expect_on_gpu
from vlfit.plan.native.lines import dequant_config_on
from vlfit.plan.native.ram import check_ram, holds_table, num_layers_to_free, offload_counts, offload_of
from vlfit.plan.native.tiles import DEFAULT_DEQUANT_CONFIG, DequantConfig
from vlfit.plan.preference import AMPLE_IMAGE_TOKENS, IMAGE_TOKENS, safety_margin
from vlfit.plan.shapes import FROM_HEADERS, Model, kv_bytes_per_token, model_of
from vlfit.plan.wishes import AUTO, OffloadWish
from vlfit.units import format_bytes

logger = logging.getLogger(__name__)

# Names of ledger lines in error messages, by a part of the line's id.
_LINE_NAMES = {
    "context": "CUDA and its libraries",
    "weights": "weights",
    "kv_cache": "KV cache",
    "state_cache": "states",
    "state_snapshots": "snapshots of states",
    "workspace": "workspaces",
    "graphs": "graphs",
    "reserve": "reserve",
}


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The sizes chosen for an engine, its ledger, and the memory that is available for it.

    ``lines``: the ledger without other processes' memory. ``already_allocated``: bytes of these lines that
    this process holds already (CUDA context). ``free``: bytes available on the device. ``kv_tokens``: tokens
    in the KV cache. ``image_tokens``: most tokens of one image. ``limit``: bytes to cap torch's memory pool
    at; None: no cap (on a CPU, or where there is no plan: float32 on a GPU, or no NVML).
    ``offloaded_layers``: indices of the layers kept in RAM. ``table_in_ram``, ``draft_model``: as in
    ``PlanSettings``. ``draft_model_lacks``: bytes more that a draft model needs that was left out; else 0.
    """

    lines: tuple[Line, ...]
    already_allocated: int
    free: int
    kv_tokens: int
    image_tokens: int
    limit: int | None = None
    offloaded_layers: tuple[int, ...] = ()
    dequant_config: DequantConfig = DEFAULT_DEQUANT_CONFIG
    table_in_ram: bool = False
    draft_model: bool = False
    draft_model_lacks: int = 0

    @property
    def headroom(self) -> int:
        """Bytes left on the device after all lines; negative if it does not fit."""
        return self.free + self.already_allocated - sum(line.bytes for line in self.lines)

    @property
    def headroom_beyond_margin(self) -> int:
        """Bytes of headroom less the plan's safety margin; negative if less than the margin stays free."""
        return self.headroom - safety_margin(self.lines)


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """Sizes requested for an engine, some of them left to ``check_fit``.

    ``kv_tokens``: tokens in the KV cache; None: as many as fit, between one context (``max_model_len``) and
    one for each of ``max_num_seqs``. ``image_tokens``: most tokens of one image; None: as many as fit; in
    both cases at most ``max_image_tokens``. ``offload``: as in ``EngineOptions``; None: no offloading.
    ``kv_dtype``: "fp8", or "bf16" for the compute dtype. ``speculate``: as in ``EngineOptions``.
    ``state_snapshots``: as in ``PlanSettings``.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int | None
    image_tokens: int | None
    max_image_tokens: int
    block_size: int
    offload: OffloadWish | None = None
    kv_dtype: str = BF16
    speculate: bool | None = None
    state_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """Device and compute dtype of an engine. ``gpu``: its NVML record; None on a CPU or without NVML.

    ``has_context``: the record was read after this process got its CUDA context. ``table_in_ram``: RAM has
    room for a table of tokens that need not be on the device.
    """

    device: torch.device
    dtype: torch.dtype
    gpu: Gpu | None
    has_context: bool = False
    table_in_ram: bool = True


def check_fit(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, request: MemoryRequest
) -> MemoryFit:
    """Choose the sizes that ``request`` leaves open, so that the engine fits into the memory free now.

    Allocates nothing. The result has ``headroom`` >= 0. Raises ``DoesNotFit``, with ledger and deficit, if
    even the smallest sizes do not fit or offloaded layers exceed the RAM, and ``UsageError`` for offloading
    on a CPU or where there is no plan (float32, or no NVML).
    """
    target = Target(device, dtype, *_gpu(device), table_in_ram=_ram_holds_table(checkpoint, device))
    if request.offload is not None:
        return _with_offload(checkpoint, target, request)
    fit = _with_largest_images(checkpoint, target, request)
    if fit.headroom < 0:
        raise _does_not_fit(checkpoint, target, fit, request)
    return fit


def _ram_holds_table(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether an untied table of tokens is to be in RAM for a GPU; warns if RAM is too short for it."""
    if device.type == "cpu" or checkpoint.config.tie_word_embeddings:
        return False
    table = sum(info.loaded_bytes for name, info in checkpoint.tensors.items() if is_embedding(name))
    host = read_host()
    if not (holds := holds_table(table, host)):
        logger.warning(
            "warning: the table of tokens (%s) goes on the GPU, as only %s of RAM are available",
            format_bytes(table),
            format_bytes(host.ram_available),
        )
    return holds


def _gpu(device: torch.device) -> tuple[Gpu | None, bool]:
    """The GPU as it is now, or as it was before the CUDA context if this start has just created that.

    And whether it is as now, with the context.
    """
    if device.type == "cpu":
        return None, False
    before = preload.take_gpus_before_context()
    context_is_new = before and not torch.cuda.memory_reserved(device)
    if before and context_is_new:
        return gpu_of_device(before, gpu_uuid(device), str(device)), False
    return gpu_of_device(read_gpus()[0], gpu_uuid(device), str(device)), torch.cuda.is_initialized()


def _with_largest_images(
    checkpoint: Checkpoint, target: Target, request: MemoryRequest, offload: int = 0
) -> MemoryFit:
    """The fit with the largest images possible; if none fit, that of the smallest (negative headroom).

    A draft model that ``request`` leaves open is loaded if then, with the same images, the plan's safety
    margin stays free; otherwise it is left out, as ``vlfit plan`` does.
    """
    wished, config = request.speculate, checkpoint.config
    if wished is not None or not has_draft_model(config, checkpoint.tensors):
        return _largest_images(checkpoint, target, request, offload, draft_model=wished is True)
    without = _largest_images(checkpoint, target, request, offload, draft_model=False)
    if without.headroom < 0:
        return without
    least = replace(
        request, image_tokens=without.image_tokens, kv_tokens=request.kv_tokens or _min_kv_tokens(request)
    )
    missing = -_largest_images(checkpoint, target, least, offload, draft_model=True).headroom_beyond_margin
    if missing > 0:
        return replace(without, draft_model_lacks=missing)
    same_images = replace(request, image_tokens=without.image_tokens)
    return _largest_images(checkpoint, target, same_images, offload, draft_model=True)


def _largest_images(
    checkpoint: Checkpoint, target: Target, request: MemoryRequest, offload: int, *, draft_model: bool
) -> MemoryFit:
    max_tokens = request.max_image_tokens
    steps = (max_tokens, *(step for step in IMAGE_TOKENS if step < max_tokens))
    if request.image_tokens is not None:
        steps = (min(request.image_tokens, max_tokens),)
    for image_tokens in steps:
        settings = PlanSettings(
            checkpoint.weights_format,
            request.max_model_len,
            image_tokens,
            request.max_num_seqs,
            request.max_num_batched_tokens,
            offloaded_layers=offload,
            kv_dtype=request.kv_dtype,
            speculate=request.speculate is not False,
            draft_model=draft_model,
            table_in_ram=target.table_in_ram,
            state_snapshots=request.state_snapshots,
        )
        fit = _with_kv_cache(checkpoint, target, settings, request)
        if fit.headroom >= 0:
            break
    return fit


def _with_offload(checkpoint: Checkpoint, target: Target, request: MemoryRequest) -> MemoryFit:
    """The fit with offloaded layers: as many as requested, or with "auto" the fewest that make it fit."""
    if target.device.type == "cpu":
        raise UsageError(
            "--offload keeps layers in RAM for a GPU; on a CPU all weights are in RAM already",
            "Leave it out, or add --device cuda.",
            param="offload",
        )
    model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, FROM_HEADERS)
    if request.offload != AUTO and request.offload is not None:
        fit = _with_largest_images(checkpoint, target, request, num_layers_to_free(model, request.offload))
    else:
        fit = _with_largest_images(checkpoint, target, request)
        if fit.headroom < 0:
            fit = _with_fewest_offloaded(checkpoint, target, request, model)
    if fit.headroom < 0:
        raise _does_not_fit(checkpoint, target, fit, request)
    table = model.table_bytes if fit.table_in_ram else 0
    check_ram(offload_of(model, len(fit.offloaded_layers)), read_host(), table)
    return fit


def _with_fewest_offloaded(
    checkpoint: Checkpoint, target: Target, request: MemoryRequest, model: Model
) -> MemoryFit:
    """The fit with the fewest offloaded layers that allow ample images or, if none do, small ones."""
    if request.image_tokens is None:
        ample_request = replace(request, image_tokens=AMPLE_IMAGE_TOKENS)
        fit = _with_fewest_offloaded(checkpoint, target, ample_request, model)
        if fit.headroom >= 0:
            return fit

    def fit_with(count: int) -> MemoryFit:
        return _with_largest_images(checkpoint, target, request, count)

    steps = offload_counts(model)
    if not steps:
        return fit_with(0)
    fewest = bisect_left(steps, 0, key=lambda count: fit_with(count).headroom)
    return fit_with(steps[min(fewest, len(steps) - 1)])


def _with_kv_cache(
    checkpoint: Checkpoint, target: Target, settings: PlanSettings, request: MemoryRequest
) -> MemoryFit:
    min_tokens = _min_kv_tokens(request)
    fit = _make_fit(checkpoint, target, settings, request.kv_tokens or min_tokens)
    if request.kv_tokens is None and fit.headroom > 0:
        spec = used_cache_spec(checkpoint.config, checkpoint.tensors, speculate=settings.uses_draft_model)
        value_bytes = target.dtype.itemsize
        block_bytes = kv_bytes_per_token(spec, request.kv_dtype, value_bytes) * request.block_size
        max_tokens = min_tokens + fit.headroom // block_bytes * request.block_size
        fit = _make_fit(checkpoint, target, settings, min(max_tokens, request.max_num_seqs * min_tokens))
    return fit


def _min_kv_tokens(request: MemoryRequest) -> int:
    """Tokens of the smallest KV cache: one context, in whole blocks."""
    return -(-request.max_model_len // request.block_size) * request.block_size


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a checkpoint's weights after loading, computed from the file headers.

    Weights are loaded in ``dtype``; on a GPU FP8, int8 and int4 weights stay as they are, with their scales.
    """
    return sum(_bytes_loaded(info, checkpoint, dtype, device) for info in checkpoint.tensors.values())


def _bytes_loaded(info: TensorInfo, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        # All is dequantized; scales are no longer needed.
        return count_weights(info, checkpoint.config.quantization) * dtype.itemsize
    if info.name.endswith(FP8_SCALE_SUFFIX):
        return info.count * torch.float32.itemsize
    if info.name.endswith(".weight_shape"):
        return 0  # redundant, and not loaded
    if info.dtype in ("F8_E4M3", "I8") or info.name.endswith(COMPRESSED_SUFFIXES):
        return info.loaded_bytes
    return info.count * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Bytes that no process holds on a GPU; on a CPU the RAM available without swapping."""
    if device.type == "cpu":
        return read_host().ram_available
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def _make_fit(checkpoint: Checkpoint, target: Target, settings: PlanSettings, kv_tokens: int) -> MemoryFit:
    device, dtype, gpu = target.device, target.dtype, target.gpu
    if device.type == "cpu":
        halves = uses_half_weights(device, dtype)
        lines = expect_in_ram(
            checkpoint,
            kv_tokens,
            dtype.itemsize,
            cpu_16_bit=halves,
            cpu_stored=keeps_stored(checkpoint, device, dtype),
            kv_dtype=settings.kv_dtype,
            sequences=settings.sequences,
            speculate=settings.uses_draft_model,
        ).lines
        return MemoryFit(
            lines,
            0,
            free_bytes(device),
            kv_tokens,
            settings.image_tokens,
            draft_model=settings.uses_draft_model,
        )
    reserved = torch.cuda.memory_reserved(device)
    pool_free = reserved - torch.cuda.memory_allocated(device)
    offloaded_layers: tuple[int, ...] = ()
    planned: tuple[Line, ...] = ()
    if gpu is not None:
        expectation = expect_on_gpu(checkpoint, gpu, settings, dtype.itemsize, kv_tokens)
        planned = tuple(line for line in expectation.lines if line.line != "desktop")
        offloaded_layers = expectation.offloaded_layers
    plain = kernels.plain_on(device)
    if planned and "linear" in plain:
        planned = (*planned, _plain_workspace(checkpoint, dtype))
    if (gpu is None or not planned) and settings.offloaded_layers:
        raise UsageError(
            "offloading needs a plan, and there is none for this GPU in 32 bits or without the driver's "
            "library (NVML)",
            "Leave out --offload, or compute in 16 bits: --dtype bfloat16.",
            param="offload",
        )
    if gpu is None or not planned:
        # No plan for 32-bit values or without NVML: only the exact lines.
        lines = _exact_lines(checkpoint, device, dtype, settings, kv_tokens)
        free = free_bytes(device) + pool_free
        return MemoryFit(
            lines, 0, free, kv_tokens, settings.image_tokens, draft_model=settings.uses_draft_model
        )
    context = next(line.bytes for line in planned if line.line == "context")
    return MemoryFit(
        planned,
        _allocated_context(gpu, reserved, context, has_context=target.has_context),
        gpu.free + pool_free,
        kv_tokens,
        settings.image_tokens,
        limit=None if plain else reserved + sum(line.bytes for line in planned) - context,
        offloaded_layers=offloaded_layers,
        dequant_config=dequant_config_on(gpu),
        table_in_ram=settings.table_in_ram,
        draft_model=settings.uses_draft_model,
    )


def _plain_workspace(checkpoint: Checkpoint, dtype: torch.dtype) -> Line:
    """What plain PyTorch takes to dequantize the largest matrix: codes, scales and products in float32."""
    formats = checkpoint.config.quantization
    largest = max(
        (
            count_weights(info, formats)
            for info in checkpoint.tensors.values()
            if info.dtype in ("F8_E4M3", "I8") or info.name.endswith(COMPRESSED_SUFFIXES) or info.blocks
        ),
        default=0,
    )
    size = largest * (3 * torch.float32.itemsize + dtype.itemsize)
    return Line("plain_workspace", size, MODELLED, "a matrix dequantized by PyTorch, without kernels")


def _exact_lines(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    settings: PlanSettings,
    kv_tokens: int,
) -> tuple[Line, ...]:
    weights = weight_bytes(checkpoint, dtype, device)
    spec = used_cache_spec(checkpoint.config, checkpoint.tensors, speculate=settings.uses_draft_model)
    cache = kv_tokens * kv_bytes_per_token(spec, settings.kv_dtype, dtype.itemsize)
    note = f"in {str(dtype).removeprefix('torch.')}"
    return (
        Line("weights.text", weights, EXACT, note),
        Line("kv_cache", cache, EXACT, note),
        *state_cache_lines(spec, settings.sequences, settings.state_snapshots),
    )


def _allocated_context(gpu: Gpu, reserved: int, context: int, *, has_context: bool) -> int:
    """Bytes of the planned CUDA ``context`` that this process holds already.

    Not all drivers report them: then all of it counts if torch has ``reserved`` memory, or if the process
    had its context when ``gpu`` was read (``has_context``), else nothing.
    """
    own_bytes = gpu.total - gpu.free - gpu.desktop
    if own_bytes > 0:
        return min(max(own_bytes - reserved, 0), context)
    return context if reserved or has_context else 0


def _does_not_fit(
    checkpoint: Checkpoint, target: Target, fit: MemoryFit, request: MemoryRequest
) -> DoesNotFit:
    device = target.device
    dtype_hint = " or --dtype bfloat16" if target.dtype == torch.float32 else ""
    dtype_hint += "" if request.kv_dtype == FP8 else ", --kv-dtype fp8"
    changes = f"a smaller --context or --image-tokens{dtype_hint}, a smaller checkpoint, FP8 or int4 weights"
    if request.speculate and has_draft_model(checkpoint.config, checkpoint.tensors):
        changes = f"it without --speculate, {changes}"
    if request.kv_tokens is not None and request.kv_tokens > _min_kv_tokens(request):
        changes = f"fewer --sequences (a smaller --kv where that is given), {changes}"
    on_cpu = " --device cpu" if device.type == "cpu" else ""
    further = f"; vlfit plan {checkpoint.name}{on_cpu} shows what fits"
    if device.type != "cpu" and request.offload is None:
        further = f", or offload layers to RAM, which is slow: --offload auto{further}"
    return DoesNotFit(
        f"{checkpoint.name} does not fit on {device}: {describe_lines(fit)}; {format_bytes(fit.free)} are "
        f"free, {format_bytes(-fit.headroom)} too few",
        f"Try {changes}, or close other programs{further}.",
    )


def describe_lines(fit: MemoryFit) -> str:
    """The lines of ``fit`` for an error message: "4.1 GiB of weights, 0.5 GiB of KV cache for 4096 tokens".

    Adjacent lines of one kind are summed; lines of 0 bytes are left out.
    """
    sizes_by_name = ((_line_name(line.line), line.bytes) for line in fit.lines if line.bytes)
    totals = (
        (name, sum(size for _, size in sizes))
        for name, sizes in groupby(sizes_by_name, key=lambda each: each[0])
    )
    tokens = f" for {fit.kv_tokens} tokens"
    return ", ".join(
        f"{format_bytes(size)} of {name}{tokens if name == _LINE_NAMES['kv_cache'] else ''}"
        for name, size in totals
    )


def _line_name(line: str) -> str:
    return next(words for name, words in _LINE_NAMES.items() if name in line)
