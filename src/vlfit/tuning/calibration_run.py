"""Measures on one GPU what only measurement can give: memory beside tensors, and three speeds.

What is measured is the native engine itself: four layers and a tower of four blocks at the shapes of
Qwen3-VL-2B with made-up weights (1.4 GiB), and mini. No checkpoint is needed; it takes well under a minute.
Knows torch and this process's share of the GPU. Does not know what the plan makes of the numbers
(``plan/calibration.py``) or where they are kept (``plan/calibration.py``).

It has to run in a process that has not used the GPU before: the first context of CUDA is what is measured.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date

import torch
from torch import Tensor

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint import catalog
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.source import Checkpoint, mini_folder, open_checkpoint
from vlfit.engine.engine import Engine
from vlfit.engine.execution.warmup import about_a_picture, answer_all, full_context, full_pool, text
from vlfit.engine.memory.usage import gpu_uuid
from vlfit.errors import DeviceError
from vlfit.loading.loader import Loader
from vlfit.loading.offload import PIECE
from vlfit.loading.pinned import PinnedBytes
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Gpu
from vlfit.plan.allocator import BEGUN
from vlfit.plan.calibration import Measured, torch_version
from vlfit.tuning.bandwidth import seconds_of
from vlfit.units import GIB, MIB, format_bytes

# Weights that nobody trained, made on the device: for measuring what does not depend on their values.
#
# What a process holds and how long a pass takes follow from names, types and shapes alone. Everything of
# loading stays as it is, but for reading: no file is opened. Knows the types that weights are stored in.


_ONE = 0x38  # 1.0 as float8_e4m3fn; the bytes below it are numbers from 0 to 1


class MadeUpLoader(Loader):
    """The real loader, but for reading: small random numbers, the same in every run of a process."""

    def _copy(self, info: TensorInfo, target: Tensor, *, later: bool = False) -> None:
        if target.dtype in (torch.int32, torch.int8):
            target.random_()  # codes of 4 or 8 bits
        elif target.dtype == torch.float8_e4m3fn:
            target.view(torch.uint8).random_(0, _ONE)
        elif "scale" in info.name:
            target.fill_(0.01)
        else:
            target.normal_(0, 0.02)


NEEDED = 3 * GIB  # that must be free: weights, KV cache and workspaces of what is measured with
_LAYERS = 4
_IMAGE_TOKENS, _CONTEXT, _SEQUENCES, _CHUNK = 1280, 4096, 2, 512
_SIDE = 4096  # of the matrices whose product is timed: 69 billion multiplications
# The driver takes more for a process than it lists for it: 9 MiB on an H200 with driver 580.
_UNLISTED = 32 * MIB

Say = Callable[[str], None]


def calibrate(gpu: Gpu, say: Say) -> Measured:
    """The numbers of ``gpu``, which no process of ours has used yet. ``say`` is told what is being done.

    Raises ``DeviceError`` where torch does not see the GPU or too little of it is free.
    """
    # Asked first: torch starts CUDA to tell one device from another.
    if torch.cuda.is_initialized():
        raise DeviceError("this process uses the GPU already", "run vlfit plan --calibrate on its own")
    device = device_of(gpu)
    if gpu.free < NEEDED:
        raise DeviceError(
            f"measuring takes {format_bytes(NEEDED)} of GPU memory; {format_bytes(gpu.free)} are free",
            "close programs that use the GPU, and measure again",
        )
    torch.cuda.set_device(device)
    try:
        return _measured(gpu, device, say)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the GPU ran out of memory while it was measured: {error}",
            "close programs that use the GPU, and measure again",
        ) from None


def _measured(gpu: Gpu, device: torch.device, say: Say) -> Measured:
    say("memory: CUDA, matrix products, a vision tower, text layers")
    workspace = workspace_bytes(device)
    vision_slack, text_slack = _slacks(device)
    context = max(held_beside_torch(gpu, device), MIB)
    torch.cuda.empty_cache()
    say("speed: copying, multiplying, launching")
    copied, linked = copy_bandwidth(device), link_bandwidth(device)
    multiplied = multiplications(device)
    return Measured(
        gpu=gpu.name,
        driver=gpu.driver,
        torch=torch_version(),
        date=date.today().isoformat(),
        context=context,
        workspace=workspace,
        vision_slack=vision_slack,
        text_slack=text_slack,
        copy_bandwidth=copied,
        launch=launch_seconds(device),
        multiplications=multiplied,
        link_bandwidth=linked,
    )


def device_of(gpu: Gpu) -> torch.device:
    """torch's device for ``gpu``: the two count GPUs in different orders."""
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)]
    for device in devices:
        if gpu.uuid and gpu_uuid(device) == gpu.uuid:
            return device
    if count == 1:
        return devices[0]
    raise DeviceError(
        f"torch {torch.__version__} sees {count} CUDA device(s), and none of them is {gpu.name} ({gpu.uuid})",
        "install a CUDA build of torch (vlfit doctor says which), or set CUDA_VISIBLE_DEVICES",
    )


# --- memory ------------------------------------------------------------------------------------------------


def workspace_bytes(device: torch.device) -> int:
    """What torch allocates for the library of matrix products when it is used for the first time."""
    before = torch.cuda.memory_allocated(device)
    small = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    product = small @ small
    torch.cuda.synchronize(device)
    used = torch.cuda.memory_allocated(device) - before - 2 * max(small.nbytes, 512)
    del product
    return int(max(used, 0))


def _slacks(device: torch.device) -> tuple[float, float]:
    """Of the vision tower, and of passes of the text model."""
    engine = _few_layers(device)
    return slack(lambda: _look(engine), device), slack(lambda: _read_and_write(engine), device)


def slack(work: Callable[[], None], device: torch.device) -> float:
    """How much more torch's pool grows than what lives in it while ``work`` runs, at least 1.

    Pieces of the pool that are begun and not full are no part of it: the ledger counts them once.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    live, pool = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    work()
    torch.cuda.synchronize(device)
    lived = torch.cuda.max_memory_allocated(device) - live
    grown = torch.cuda.max_memory_reserved(device) - pool - BEGUN
    return max(grown / lived, 1.0) if lived else 1.0


def held_beside_torch(gpu: Gpu, device: torch.device) -> int:
    """The process less torch's pool: context, libraries and the kernels that were loaded on the way.

    It is what is less free than in ``gpu``, which was looked at before. Where the driver tells what this
    process holds, at most a little more than that counts: the rest others have taken meanwhile.
    """
    now = next((each for each in read_gpus()[0] if each.index == gpu.index), None)
    if now is None:
        raise DeviceError(f"{gpu.name} does not answer any more", "vlfit doctor looks for the cause")
    own = now.total - now.free - now.desktop
    taken = gpu.free - now.free
    process = max(own, min(taken, own + _UNLISTED)) if own > 0 else taken
    return process - torch.cuda.memory_reserved(device)


def _few_layers(device: torch.device) -> Engine:
    """The engine at the shapes of 2B, with few layers; small files and control tokens are mini's."""
    entry = catalog.family("2B")[0]
    mini = open_checkpoint("mini")
    if not isinstance(entry.config, ModelConfig):
        raise TypeError("2B has no eyes")
    config = replace(
        entry.config,
        text=replace(entry.config.text, num_hidden_layers=_LAYERS),
        vision=replace(entry.config.eyes, depth=_LAYERS, deepstack_visual_indexes=(0, 1, 2)),
        image_token_id=mini.config.image_token_id,
        video_token_id=mini.config.video_token_id,
        vision_start_token_id=mini.config.vision_start_token_id,
        vision_end_token_id=mini.config.vision_end_token_id,
    )
    checkpoint = Checkpoint("four layers", mini_folder(), config, catalog.tensors_of(config))
    options = EngineOptions(
        device=str(device),
        context=_CONTEXT,
        sequences=_SEQUENCES,
        chunk=_CHUNK,
        image_cache_bytes=0,
    )
    return Engine(checkpoint, options, None, MadeUpLoader)


def _look(engine: Engine) -> None:
    with torch.inference_mode():
        engine.runner.encode(about_a_picture(engine, _IMAGE_TOKENS, 0).images[0])


def _read_and_write(engine: Engine) -> None:
    """A context full of text, read in chunks while others decode, and all of them decoding."""
    *others, (long, tokens) = full_context(engine, 4)
    answer_all(engine, [*others, (text(len(long.token_ids)), tokens)])
    answer_all(engine, list(full_pool(engine)))


# --- speed -------------------------------------------------------------------------------------------------


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, read and written together."""
    source = torch.ones(256 * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def link_bandwidth(device: torch.device) -> float:
    """Bytes per second of copies from locked RAM to the device, as layers that wait there are copied."""
    locked = PinnedBytes(128 * MIB, device)
    source = locked.bytes.fill_(1)
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        for start in range(0, len(source), PIECE):
            target[start : start + PIECE].copy_(source[start : start + PIECE], non_blocking=True)

    return source.nbytes / seconds_of(copy, device)


def multiplications(device: torch.device) -> float:
    """Floating-point operations per second of a large matrix product in bfloat16."""
    left = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=device)
    right = torch.randn_like(left)
    target = torch.empty_like(left)
    operations = 2.0 * _SIDE**3
    return operations / seconds_of(lambda: torch.mm(left, right, out=target), device)


def launch_seconds(device: torch.device) -> float:
    """Seconds to launch one text layer kernel by kernel, as in a prompt or with layers in RAM: mini, whose
    layers take the GPU no time.

    The difference between a step with all layers and one with half of them, so that what comes once a step
    (the head, sampling, waiting) does not count.
    """
    options = EngineOptions(device=str(device), context=512, sequences=1, graphs=False)
    engine = Engine(open_checkpoint("mini"), options)
    layers = engine.runner.text.layers
    half = len(layers) // 2
    whole = _step_seconds(engine)
    engine.runner.text.layers = layers[:half]
    less = _step_seconds(engine)
    return max((whole - less) / (len(layers) - half), 1e-6)


def _step_seconds(engine: Engine) -> float:
    """Median time of a decode step of one request."""
    answer_all(engine, [(text(8), 16)])  # loads the kernels
    times: list[float] = []
    run = engine.step

    def timed() -> None:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)

    engine.step = timed  # type: ignore[method-assign]
    try:
        answer_all(engine, [(text(8), 64)])
    finally:
        engine.step = run  # type: ignore[method-assign]
    return statistics.median(times[1:])
