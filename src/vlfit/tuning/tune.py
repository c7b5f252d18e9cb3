"""Measure which GEMM tiles are fastest on a GPU, for few rows and quantized weights (``vlfit plan
--calibrate``).

Candidates are timed on the four matrices of a Qwen3-VL-4B layer, over more weights than caches hold. They are
compiled beforehand by several processes into Triton's cache on disk, which would otherwise take longer than
all measurements. The result is stored by ``plan/native/tiles.py``; nothing is searched at engine start.
"""

import contextlib
import io
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from vlfit.api.progress import StatusCallback
from vlfit.checkpoint.conversions import FP8_BLOCK
from vlfit.checkpoint.quantization import FP8, INT4, INT8
from vlfit.errors import DeviceError
from vlfit.kernels.gemm.quantized import card_for_device, quantized_linear
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.loading.pinned import capture_graph
from vlfit.machine.host import usable_cores
from vlfit.machine.model import Gpu
from vlfit.plan.native.tiles import BUILT_IN, FORMS, REGIMES, GemmTiles, Table, save_tiles, splits_for
from vlfit.tuning.calibration_run import torch_device
from vlfit.units import MIB

# Outputs and inputs. The GEMM of gate and up has SwiGLU in its epilogue.
_MATRICES = {"qkv": (6144, 2560), "output": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
_SWIGLU_MATRIX = "gate_up"
_INT4_GROUP = 32  # as `vlfit convert` makes it
BUSY_WARPS = (640, 1200)
REPLAYS = 5
_MIN_GAIN = 0.02  # the noise between two measurements
_WORKER_BYTES = 600 * MIB  # of GPU memory, at most: a CUDA context and one matrix
_MAX_WORKERS = 12

# Outputs, inputs, warps, stages, parts: the best of larger searches (docs/log.md).
_CANDIDATES_8_ROWS: dict[str, tuple[tuple[int, ...], ...]] = {
    FP8: ((64, 128, 4, 3), (32, 128, 2, 4), (64, 128, 4, 4), (16, 512, 4, 3, 4)),
    INT8: ((64, 128, 4, 3), (32, 256, 2, 3), (32, 128, 2, 4), (64, 256, 4, 3)),
    INT4: ((64, 256, 4, 3), (32, 256, 2, 3), (64, 256, 2, 3), (16, 512, 4, 3, 4)),
}
_CANDIDATES_16_ROWS: dict[str, tuple[tuple[int, ...], ...]] = {
    FP8: ((32, 128, 2, 4), (64, 128, 4, 4), (32, 256, 2, 3)),
    INT8: ((32, 128, 2, 4), (32, 128, 2, 6), (32, 256, 2, 3)),
    INT4: ((32, 256, 2, 4), (32, 128, 2, 4), (32, 256, 2, 4, 2)),
}


@dataclass(frozen=True, slots=True)
class TuningChoice:
    """The ``tiles`` chosen for GEMMs of up to ``regime`` rows with weights in ``weight_format``.

    ``seconds``: of a layer's four GEMMs with ``tiles``; ``built_in_seconds``: with the built-in tiles.
    """

    weight_format: str
    regime: int
    tiles: GemmTiles
    seconds: float
    built_in_seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One GEMM to time: ``regime`` rows times a weight matrix in ``weight_format``, computed with ``tiles``.

    ``matrix``: of a Qwen3-VL-4B layer: ``qkv``, ``output``, ``gate_up`` or ``down``.
    """

    weight_format: str
    regime: int
    matrix: str
    tiles: GemmTiles

    @property
    def splits(self) -> int:
        """Split-K factor that ``tiles`` imply for this GEMM."""
        return splits_for(self.regime, *_MATRICES[self.matrix], self.tiles)

    @property
    def key(self) -> tuple[str, int, str, GemmTiles, int]:
        """Equal for trials that launch the same kernel in the same way."""
        return self.weight_format, self.regime, self.matrix, replace(self.tiles, busy=1), self.splits


def tune_gpu(gpu: Gpu, on_status: StatusCallback) -> Path:
    """Choose the fastest GEMM tiles for ``gpu``, store the table of them, and return its file.

    ``on_status``: called with a line for each phase. Raises ``DeviceError`` if torch does not see ``gpu`` or
    too little of its memory is free.
    """
    device = torch_device(gpu)
    try:
        table, _ = tune(device, on_status)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the GPU ran out of memory while kernels were tuned: {error}",
            "Close programs that use the GPU, and measure again.",
        ) from None
    return save_tiles(card_for_device(device), table)


def tune(device: torch.device, on_status: StatusCallback) -> tuple[Table, list[TuningChoice]]:
    """Time candidate tiles on ``device``; return the table of those chosen, and the choices with their times.

    Stores nothing but compiled kernels, in Triton's cache. ``on_status``: called with a line for each phase.
    """
    candidates = {
        (weight_format, regime): [BUILT_IN[weight_format, regime], *candidate_tiles(weight_format, regime)]
        for weight_format in FORMS
        for regime in REGIMES
    }
    trials = [
        Trial(*key, matrix, tiles)
        for key, options in candidates.items()
        for tiles in options
        for matrix in _MATRICES
    ]
    on_status(f"compiling kernels for {len({trial.key for trial in trials})} GEMMs")
    _compile_all(trials, device)
    choices = []
    for weight_format in FORMS:
        matrices = {
            matrix: _random_weights(weight_format, *shape, device) for matrix, shape in _MATRICES.items()
        }
        for regime in REGIMES:
            options = candidates[weight_format, regime]
            choice = choose_tiles(weight_format, regime, options, matrices, device)
            on_status(
                f"{weight_format}, up to {regime} rows: {choice.seconds * 1e6:.1f} us a layer "
                f"({choice.built_in_seconds * 1e6:.1f} built in): {describe_tiles(choice.tiles)}"
            )
            choices.append(choice)
    return {(choice.weight_format, choice.regime): choice.tiles for choice in choices}, choices


def describe_tiles(tiles: GemmTiles) -> str:
    """``tiles`` in words: ``64 x 128, 4 warps, 3 stages, 640 busy``."""
    parts = f", {tiles.parts} parts" if tiles.parts > 1 else ""
    sizes = f"{tiles.outputs} x {tiles.inputs}"
    return f"{sizes}, {tiles.warps} warps, {tiles.stages} stages{parts}, {tiles.busy} busy"


def candidate_tiles(weight_format: str, regime: int) -> list[GemmTiles]:
    """Tiles to try for GEMMs of up to ``regime`` rows, beside the built-in ones."""
    rows, sizes = (8, _CANDIDATES_8_ROWS) if regime <= 8 else (16, _CANDIDATES_16_ROWS)
    return [
        GemmTiles(rows, outputs, inputs, warps, stages, *parts, busy=busy)  # type: ignore[misc]
        for outputs, inputs, warps, stages, *parts in sizes[weight_format]
        for busy in BUSY_WARPS
    ]


def _compile_all(trials: list[Trial], device: torch.device) -> None:
    free = torch.cuda.mem_get_info(device)[0]
    workers = min(usable_cores(), _MAX_WORKERS, free // (2 * _WORKER_BYTES))
    distinct = list({trial.key: trial for trial in trials}.values())
    if workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(_compile_one, distinct, [str(device)] * len(distinct), chunksize=4))


def _compile_one(trial: Trial, device: str) -> None:
    """Launch ``trial`` once on uninitialized weights, so that its kernel is in the cache."""
    where = torch.device(device)
    # Kernels that fail to compile fail again, and are handled, when they are measured.
    with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
        weights = _random_weights(trial.weight_format, *_MATRICES[trial.matrix], where, count=1)
        _run_gemm(trial, weights[0], torch.zeros((trial.regime, weights[0].in_features), device=where))
        torch.cuda.synchronize(where)


def _run_gemm(trial: Trial, weights: QuantizedWeight, x: torch.Tensor) -> None:
    quantized_linear(
        x.bfloat16(), weights, None, trial.tiles, trial.splits, swiglu=trial.matrix == _SWIGLU_MATRIX
    )


def choose_tiles(
    weight_format: str,
    regime: int,
    candidates: list[GemmTiles],
    matrices: dict[str, list[QuantizedWeight]],
    device: torch.device,
    time_gemm: Callable[[Trial, list[QuantizedWeight], torch.device], float] | None = None,
) -> TuningChoice:
    """Choose the candidate that takes the least time for all GEMMs of a layer.

    ``candidates``: the built-in tiles first; another is chosen only if it is faster by more than 2 %.
    ``matrices``: weights by ``Trial.matrix``, several of each. ``time_gemm``: returns the seconds of a trial;
    None: ``measure_gemm_seconds``.
    """
    time_gemm = time_gemm or measure_gemm_seconds
    seconds: dict[object, float] = {}
    totals = dict.fromkeys(candidates, 0.0)
    for tiles in totals:
        for matrix, weights in matrices.items():
            trial = Trial(weight_format, regime, matrix, tiles)
            if trial.key not in seconds:
                seconds[trial.key] = time_gemm(trial, weights, device)
            totals[tiles] += seconds[trial.key]
    built_in, fastest = candidates[0], min(totals, key=totals.__getitem__)
    if totals[fastest] > totals[built_in] * (1 - _MIN_GAIN):
        fastest = built_in
    return TuningChoice(weight_format, regime, fastest, totals[fastest], totals[built_in])


def measure_gemm_seconds(trial: Trial, matrices: list[QuantizedWeight], device: torch.device) -> float:
    """Seconds of one GEMM, from a CUDA graph that runs it with each of ``matrices`` in turn.

    The median of 5 replays, divided by the number of matrices. ``inf`` if the kernel cannot be compiled or
    launched. Raises ``torch.OutOfMemoryError``.
    """
    x = torch.randn((trial.regime, matrices[0].in_features), device=device).bfloat16()
    try:
        _run_gemm(trial, matrices[0], x)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # Triton and the driver raise many classes for too few registers or too little memory
        return float("inf")

    def products() -> None:
        for weights in matrices:
            _run_gemm(trial, weights, x)

    replay, _ = capture_graph(device, products)
    times = []
    for _ in range(REPLAYS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(times[1:]) / len(matrices)


def _random_weights(
    weight_format: str, outputs: int, inputs: int, device: torch.device, count: int = 0
) -> list[QuantizedWeight]:
    """``count`` random matrices; 0: enough for 192 MiB, twice the largest cache."""
    count = count or -(-192 * MIB // (outputs * inputs // (2 if weight_format == INT4 else 1)))
    scale = torch.full((1, 1), 0.01, device=device)
    if weight_format == FP8:
        codes = torch.randint(0, 256, (count, outputs, inputs), dtype=torch.uint8, device=device)
        codes &= 0xF7  # no NaN
        block_scales = scale.expand(outputs // FP8_BLOCK, inputs // FP8_BLOCK).contiguous()
        return [
            QuantizedWeight(codes[i].view(torch.float8_e4m3fn), block_scales, None, (FP8_BLOCK, FP8_BLOCK))
            for i in range(count)
        ]
    if weight_format == INT8:
        codes = torch.randint(-128, 128, (count, outputs, inputs), dtype=torch.int8, device=device)
        row_scales = scale.bfloat16().expand(outputs, 1).contiguous()
        return [QuantizedWeight(codes[i], row_scales, None, (1, inputs)) for i in range(count)]
    shape = (count, outputs, inputs // 8)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    group_scales = torch.full(
        (count, outputs, inputs // _INT4_GROUP), 0.01, dtype=torch.bfloat16, device=device
    )
    return [QuantizedWeight(words[i], group_scales[i], None, (1, _INT4_GROUP)) for i in range(count)]
