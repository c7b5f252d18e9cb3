"""Measure what the plan cannot compute for a GPU: memory outside torch's allocator, and speeds.

Uses the native engine itself: four text layers and four vision blocks at the shapes of Qwen3-VL-2B with
random weights (1.4 GiB), and mini. Needs no checkpoint and takes well under a minute. Must run in a process
that has not used the GPU before, because the memory of its first CUDA context is measured.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date

import torch
from torch import Tensor

from vlfit.api.engine_options import EngineOptions
from vlfit.api.progress import StatusCallback
from vlfit.checkpoint import catalog
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.source import Checkpoint, mini_folder, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.warmup import (
    full_context_requests,
    full_pool_requests,
    image_prompt,
    run_requests,
    text_prompt,
)
from vlfit.engine.memory.usage import gpu_uuid
from vlfit.errors import DeviceError
from vlfit.loading.loader import Loader
from vlfit.loading.offload import PIECE
from vlfit.loading.pinned import PinnedBytes
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Gpu
from vlfit.plan.allocator import PARTIAL_SEGMENTS
from vlfit.plan.calibration import Calibration, torch_version
from vlfit.tuning.bandwidth import median_seconds
from vlfit.units import GIB, MIB, format_bytes

FREE_BYTES_NEEDED = 3 * GIB  # weights, KV cache and workspaces of the measuring engine
_NUM_LAYERS = 4
_MATRIX_SIDE = 4096  # of the timed GEMM: 69 billion multiply-adds
# The driver takes more memory for a process than it reports: 9 MiB on an H200 with driver 580.
_UNREPORTED_BYTES = 32 * MIB
_FP8_ONE = 0x38  # 1.0 as float8_e4m3fn; the codes below it are numbers from 0 to 1


@dataclass(frozen=True, slots=True)
class MeasuringEngineSettings:
    """Settings of the engine that memory is measured with. ``image_tokens``: of the largest picture."""

    image_tokens: int = 1280
    max_model_len: int = 4096
    max_num_seqs: int = 2
    max_num_batched_tokens: int = 512


SIZES = MeasuringEngineSettings()


class RandomWeightsLoader(Loader):
    """A ``Loader`` that fills tensors with small random numbers and reads no files.

    Memory and speed depend on names, dtypes and shapes only; everything else in loading stays as it is.
    """

    def _copy(self, info: TensorInfo, target: Tensor, *, asynchronous: bool = False) -> None:
        if target.dtype in (torch.int32, torch.int8):
            target.random_()  # codes of 4 or 8 bits
        elif target.dtype == torch.float8_e4m3fn:
            target.view(torch.uint8).random_(0, _FP8_ONE)
        elif "scale" in info.name:
            target.fill_(0.01)
        else:
            target.normal_(0, 0.02)


def calibrate(gpu: Gpu, on_status: StatusCallback) -> Calibration:
    """Check that ``gpu`` can be measured, and return what ``measure_gpu`` measures. Stores nothing.

    ``on_status``: called with a line for each phase. Raises ``DeviceError`` if this process has used a GPU
    already, if torch does not see ``gpu``, or if less than 3 GiB of its memory are free.
    """
    # Before ``torch_device``, which initializes CUDA.
    if torch.cuda.is_initialized():
        raise DeviceError(
            "this process has already used the GPU", "Run vlfit plan --calibrate in a process of its own."
        )
    device = torch_device(gpu)
    if gpu.free < FREE_BYTES_NEEDED:
        raise DeviceError(
            f"calibration takes {format_bytes(FREE_BYTES_NEEDED)} of GPU memory, "
            f"{format_bytes(gpu.free)} are free",
            "Close programs that use the GPU, and measure again.",
        )
    torch.cuda.set_device(device)
    try:
        return measure_gpu(gpu, device, on_status)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the GPU ran out of memory during calibration: {error}",
            "Close programs that use the GPU, and measure again.",
        ) from None


def measure_gpu(gpu: Gpu, device: torch.device, on_status: StatusCallback) -> Calibration:
    """Measure the memory and speeds of a GPU that plans depend on, in well under a minute.

    ``gpu``: read before this process used it, so that its free memory counts; ``device``: the same GPU,
    which this process must not have used. ``on_status``: called with a line for each phase. Raises
    ``DeviceError`` if the GPU no longer responds.
    """
    on_status("memory: CUDA, matrix products, a vision tower, text layers")
    workspace = measure_workspace_bytes(device)
    vision_slack, text_slack = _allocator_slacks(device)
    context = max(measure_bytes_outside_torch(gpu, device), MIB)
    torch.cuda.empty_cache()
    on_status("speed: copying, multiplying, launching")
    copy_speed, link_speed = measure_copy_bandwidth(device), measure_link_bandwidth(device)
    flops = measure_matmul_flops(device)
    return Calibration(
        gpu=gpu.name,
        driver=gpu.driver,
        torch=torch_version(),
        date=date.today().isoformat(),
        context=context,
        workspace=workspace,
        vision_slack=vision_slack,
        text_slack=text_slack,
        copy_bandwidth=copy_speed,
        launch=measure_layer_launch_seconds(device),
        multiplications=flops,
        link_bandwidth=link_speed,
    )


def torch_device(gpu: Gpu) -> torch.device:
    """torch's device for ``gpu``, matched by UUID, as NVML and torch number GPUs differently.

    If torch sees one device only, that one, whatever its UUID. Raises ``DeviceError`` if none matches.
    """
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)]
    for device in devices:
        if gpu.uuid and gpu_uuid(device) == gpu.uuid:
            return device
    if count == 1:
        return devices[0]
    raise DeviceError(
        f"torch {torch.__version__} sees {count} CUDA device(s), and none of them is {gpu.name} ({gpu.uuid})",
        "Install a CUDA build of torch (vlfit doctor says which), or set CUDA_VISIBLE_DEVICES.",
    )


def measure_workspace_bytes(device: torch.device) -> int:
    """Run a GEMM, and return the bytes of the workspace that torch allocates for cuBLAS with the first one.

    0 if this process has run a GEMM before. The workspace stays allocated.
    """
    before = torch.cuda.memory_allocated(device)
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    product = x @ x
    torch.cuda.synchronize(device)
    used = torch.cuda.memory_allocated(device) - before - 2 * max(x.nbytes, 512)
    del product
    return int(max(used, 0))


def _allocator_slacks(device: torch.device) -> tuple[float, float]:
    """Allocator slack of the vision tower and of the text model."""
    engine = four_layer_engine(device)
    return measure_allocator_slack(
        lambda: encode_synthetic_image(engine, SIZES.image_tokens), device
    ), measure_allocator_slack(lambda: prefill_and_decode(engine), device)


def measure_allocator_slack(work: Callable[[], None], device: torch.device) -> float:
    """Peak growth of torch's memory pool while ``work`` runs, divided by the peak growth of its live tensors.

    At least 1; 1 if nothing is allocated. ``PARTIAL_SEGMENTS`` bytes of the pool are subtracted first, as the
    ledger counts them once. Empties torch's cache and resets its peak statistics.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    live_before, pool_before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    work()
    torch.cuda.synchronize(device)
    live_growth = torch.cuda.max_memory_allocated(device) - live_before
    pool_growth = torch.cuda.max_memory_reserved(device) - pool_before - PARTIAL_SEGMENTS
    return max(pool_growth / live_growth, 1.0) if live_growth else 1.0


def measure_bytes_outside_torch(gpu: Gpu, device: torch.device) -> int:
    """Bytes of this process on the GPU outside torch's pool: CUDA context, libraries and loaded kernels.

    Computed from the decrease in free memory since ``gpu`` was read, before this process used it. If the
    driver reports memory per process, counts at least that and at most 32 MiB more: other programs took the
    rest of the decrease. Raises ``DeviceError`` if the GPU no longer responds.
    """
    now = next((card for card in read_gpus()[0] if card.index == gpu.index), None)
    if now is None:
        raise DeviceError(f"{gpu.name} no longer responds", "Run vlfit doctor to find the cause.")
    reported = now.total - now.free - now.desktop
    free_decrease = gpu.free - now.free
    process = (
        max(reported, min(free_decrease, reported + _UNREPORTED_BYTES)) if reported > 0 else free_decrease
    )
    return process - torch.cuda.memory_reserved(device)


def four_layer_engine(
    device: torch.device, sizes: MeasuringEngineSettings = SIZES, config: ModelConfig | None = None
) -> NativeEngine:
    """Build an engine on ``device`` with four text layers, four vision blocks and random weights.

    Shapes are those of ``config`` (None: Qwen3-VL-2B, 1.4 GiB); tokenizer, small files and control tokens are
    mini's. ``sizes``: its options.
    """
    shapes = config or catalog.family_entries("2B")[0].config
    mini = open_checkpoint("mini")
    vision = shapes.required_vision
    levels = len(vision.deepstack_visual_indexes)
    config = replace(
        shapes,
        text=replace(shapes.text, num_hidden_layers=_NUM_LAYERS),
        vision=replace(vision, depth=_NUM_LAYERS, deepstack_visual_indexes=tuple(range(levels))),
        image_token_id=mini.config.image_token_id,
        video_token_id=mini.config.video_token_id,
        vision_start_token_id=mini.config.vision_start_token_id,
        vision_end_token_id=mini.config.vision_end_token_id,
    )
    checkpoint = Checkpoint("four layers", mini_folder(), config, catalog.tensors_of(config))
    options = EngineOptions(
        device=str(device),
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        image_cache_bytes=0,
    )
    return NativeEngine(checkpoint, options, None, RandomWeightsLoader)


def encode_synthetic_image(engine: NativeEngine, image_tokens: int) -> None:
    """Run the vision tower once, for a made-up picture of ``image_tokens``; the features are dropped.

    Does not wait for the GPU.
    """
    with torch.inference_mode():
        engine.runner.encode_image(image_prompt(engine, image_tokens, 0).images[0])


def prefill_and_decode(engine: NativeEngine) -> None:
    """Run the engine's worst cases: a full context prefilled while others decode, then all decoding."""
    *others, (longest, tokens) = full_context_requests(engine, 4)
    run_requests(engine, [*others, (text_prompt(len(longest.token_ids)), tokens)])
    run_requests(engine, list(full_pool_requests(engine)))


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying 256 MiB within the device's memory, counting bytes read and written."""
    source = torch.ones(256 * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def measure_link_bandwidth(device: torch.device) -> float:
    """Bytes per second of copies from pinned RAM to the GPU, in pieces like those of offloaded layers."""
    locked = PinnedBytes(128 * MIB, device)
    source = locked.bytes.fill_(1)
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        for start in range(0, len(source), PIECE):
            target[start : start + PIECE].copy_(source[start : start + PIECE], non_blocking=True)

    return source.nbytes / median_seconds(copy, device)


def measure_matmul_flops(device: torch.device) -> float:
    """Floating-point operations per second, two per multiply-add, of a 4096 x 4096 x 4096 bfloat16 GEMM."""
    a = torch.randn(_MATRIX_SIDE, _MATRIX_SIDE, dtype=torch.bfloat16, device=device)
    b = torch.randn_like(a)
    out = torch.empty_like(a)
    operations = 2.0 * _MATRIX_SIDE**3
    return operations / median_seconds(lambda: torch.mm(a, b, out=out), device)


def measure_layer_launch_seconds(device: torch.device) -> float:
    """Seconds the CPU takes to launch one text layer's kernels one by one, as in prefill or with offload.

    Measured with mini, whose layers take no time on the GPU, as the difference between steps with all layers
    and with half of them: what occurs once per step (head, sampling, waiting) cancels out.
    """
    options = EngineOptions(device=str(device), max_model_len=512, max_num_seqs=1, cuda_graphs=False)
    engine = NativeEngine(open_checkpoint("mini"), options)
    layers = engine.runner.text.layers
    half = len(layers) // 2
    all_layers = _step_seconds(engine)
    engine.runner.text.layers = layers[:half]
    half_layers = _step_seconds(engine)
    return max((all_layers - half_layers) / (len(layers) - half), 1e-6)


def _step_seconds(engine: NativeEngine) -> float:
    """Median time of a decode step of one request."""
    run_requests(engine, [(text_prompt(8), 16)])  # warm-up: loads the kernels
    times: list[float] = []
    step = engine.step

    def timed() -> None:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)

    engine.step = timed  # type: ignore[method-assign]
    try:
        run_requests(engine, [(text_prompt(8), 64)])
    finally:
        engine.step = step  # type: ignore[method-assign]
    return statistics.median(times[1:])
