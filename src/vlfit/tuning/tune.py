"""Measures on a GPU which tiles are the fastest for products of few rows with narrow weights.

Candidates are timed on the four matrices of a layer of Qwen3-VL-4B, in turn over more weights than caches
hold. They are compiled beforehand in some processes, into Triton's cache on disk: alone that takes longer
than all measurements. Nothing is searched for at a start: this is done when a person asks for it. Knows
torch. Does not know where the choice is kept (``plan/native/tiles.py``) or what a kernel makes of it
(``kernels/gemm/quantized.py``).
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

from vlfit.checkpoint.quantization import FP8, INT4, INT8
from vlfit.errors import DeviceError
from vlfit.kernels.gemm.quantized import NarrowWeights, card_of, linear
from vlfit.loading.pinned import record
from vlfit.machine.host import own_cores
from vlfit.machine.model import Gpu
from vlfit.plan.native.tiles import BUILT_IN, FORMS, REGIMES, Table, Tiles, save, splits_for
from vlfit.tuning.calibration_run import device_of
from vlfit.units import MIB

# Outputs and inputs; gates and what they are for end in one kernel with their product.
_MATRICES = {"qkv": (6144, 2560), "output": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
_GATED = "gate_up"
_GROUP = 32  # of int4, as `vlfit convert` makes it
_BLOCK = 128  # of FP8, as in the official checkpoints
_BUSY = (640, 1200)  # warps
_REPLAYS = 5
_NOISE = 0.02  # of what is measured twice
_WORKER = 600 * MIB  # of the card's memory, at most: a context of CUDA and one matrix
_MOST_WORKERS = 12

# Outputs, inputs, warps, stages, parts: the best of larger searches (docs/log.md).
_FEW: dict[str, tuple[tuple[int, ...], ...]] = {
    FP8: ((64, 128, 4, 3), (32, 128, 2, 4), (64, 128, 4, 4), (16, 512, 4, 3, 4)),
    INT8: ((64, 128, 4, 3), (32, 256, 2, 3), (32, 128, 2, 4), (64, 256, 4, 3)),
    INT4: ((64, 256, 4, 3), (32, 256, 2, 3), (64, 256, 2, 3), (16, 512, 4, 3, 4)),
}
_SOME: dict[str, tuple[tuple[int, ...], ...]] = {
    FP8: ((32, 128, 2, 4), (64, 128, 4, 4), (32, 256, 2, 3)),
    INT8: ((32, 128, 2, 4), (32, 128, 2, 6), (32, 256, 2, 3)),
    INT4: ((32, 256, 2, 4), (32, 128, 2, 4), (32, 256, 2, 4, 2)),
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest tiles for a form and regime; ``seconds`` of a layer's products, and with ``before``'s."""

    form: str
    regime: int
    tiles: Tiles
    seconds: float
    before: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One product: a matrix of ``form`` times as many rows as the ``regime`` has at most."""

    form: str
    regime: int
    name: str
    tiles: Tiles

    @property
    def splits(self) -> int:
        """Among how many programs it is shared out."""
        return splits_for(self.regime, *_MATRICES[self.name], self.tiles)

    @property
    def key(self) -> tuple[str, int, str, Tiles, int]:
        """The same for trials that launch the same."""
        return self.form, self.regime, self.name, replace(self.tiles, busy=1), self.splits


def tune_gpu(gpu: Gpu, say: Say) -> Path:
    """Measure ``gpu`` and keep what was found; the file. ``say`` is told what is being done.

    Raises ``DeviceError`` where torch does not see the GPU or too little of it is free.
    """
    device = device_of(gpu)
    try:
        table, _ = tune(device, say)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the GPU ran out of memory while its kernels were measured: {error}",
            "close programs that use the GPU, and measure again",
        ) from None
    return save(card_of(device), table)


def tune(device: torch.device, say: Say) -> tuple[Table, list[Found]]:
    """The table for ``device``, and how each choice was found. ``say`` is told what is being done.

    A choice differs from what is built in only where it is faster by more than ``_NOISE``.
    """
    every = {
        (form, regime): [BUILT_IN[form, regime], *_candidates(form, regime)]
        for form in FORMS
        for regime in REGIMES
    }
    trials = [Trial(*of, name, tiles) for of, some in every.items() for tiles in some for name in _MATRICES]
    say(f"compiling kernels for {len({trial.key for trial in trials})} products")
    _compile(trials, device)
    choices = []
    for form in FORMS:
        matrices = {name: _weights(form, *shape, device) for name, shape in _MATRICES.items()}
        for regime in REGIMES:
            found = _fastest(form, regime, every[form, regime], matrices, device)
            faster = f"{found.seconds * 1e6:.1f} us a layer, {found.before * 1e6:.1f} as built in"
            say(f"{form}, up to {regime} rows: {faster}: {in_words(found.tiles)}")
            choices.append(found)
    return {(found.form, found.regime): found.tiles for found in choices}, choices


def in_words(tiles: Tiles) -> str:
    """Short, for a person who measures."""
    parts = f", {tiles.parts} parts" if tiles.parts > 1 else ""
    sizes = f"{tiles.outputs} x {tiles.inputs}"
    return f"{sizes}, {tiles.warps} warps, {tiles.stages} stages{parts}, {tiles.busy} busy"


def _candidates(form: str, regime: int) -> list[Tiles]:
    rows, sizes = (8, _FEW) if regime <= 8 else (16, _SOME)
    return [
        Tiles(rows, outputs, inputs, warps, stages, *parts, busy=busy)  # type: ignore[misc]
        for outputs, inputs, warps, stages, *parts in sizes[form]
        for busy in _BUSY
    ]


def _compile(trials: list[Trial], device: torch.device) -> None:
    free = torch.cuda.mem_get_info(device)[0]
    workers = min(own_cores(), _MOST_WORKERS, free // (2 * _WORKER))
    once = list({trial.key: trial for trial in trials}.values())
    if workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(_compiled, once, [str(device)] * len(once), chunksize=4))


def _compiled(trial: Trial, device: str) -> None:
    """Launched once, on weights that nobody has written, so that its kernel is in the cache."""
    where = torch.device(device)
    # What is said of kernels that cannot be compiled is said again, and heeded, when they are measured.
    with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
        weights = _weights(trial.form, *_MATRICES[trial.name], where, count=1)
        _product(trial, weights[0], torch.zeros((trial.regime, weights[0].inputs), device=where))
        torch.cuda.synchronize(where)


def _product(trial: Trial, weights: NarrowWeights, x: torch.Tensor) -> None:
    linear(x.bfloat16(), weights, None, trial.tiles, trial.splits, gated=trial.name == _GATED)


def _fastest(
    form: str,
    regime: int,
    candidates: list[Tiles],
    matrices: dict[str, list[NarrowWeights]],
    device: torch.device,
) -> Found:
    """Of all products of a layer together. The first of ``candidates`` is what is built in."""
    known: dict[object, float] = {}
    times = dict.fromkeys(candidates, 0.0)
    for tiles in times:
        for name, weights in matrices.items():
            trial = Trial(form, regime, name, tiles)
            if trial.key not in known:
                known[trial.key] = _seconds(trial, weights, device)
            times[tiles] += known[trial.key]
    before, fastest = candidates[0], min(times, key=times.__getitem__)
    if times[fastest] > times[before] * (1 - _NOISE):
        fastest = before
    return Found(form, regime, fastest, times[fastest], times[before])


def _seconds(trial: Trial, matrices: list[NarrowWeights], device: torch.device) -> float:
    """Of one product, over ``matrices`` in turn, recorded as a graph. Infinite if it cannot be compiled."""
    x = torch.randn((trial.regime, matrices[0].inputs), device=device).bfloat16()
    try:
        _product(trial, matrices[0], x)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # Triton and the driver have many words for too few registers or too little memory
        return float("inf")

    def products() -> None:
        for weights in matrices:
            _product(trial, weights, x)

    replay, _ = record(device, products)
    seconds = []
    for _ in range(_REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        seconds.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(seconds[1:]) / len(matrices)


def _weights(
    form: str, outputs: int, inputs: int, device: torch.device, count: int = 0
) -> list[NarrowWeights]:
    """``count`` made-up matrices; 0: as many as no cache holds, twice the largest there is, of 96 MiB."""
    count = count or -(-192 * MIB // (outputs * inputs // (2 if form == INT4 else 1)))
    scale = torch.full((1, 1), 0.01, device=device)
    if form == FP8:
        codes = torch.randint(0, 256, (count, outputs, inputs), dtype=torch.uint8, device=device)
        codes &= 0xF7  # no NaN
        blocks = scale.expand(outputs // _BLOCK, inputs // _BLOCK).contiguous()
        return [
            NarrowWeights(codes[i].view(torch.float8_e4m3fn), blocks, None, (_BLOCK, _BLOCK))
            for i in range(count)
        ]
    if form == INT8:
        codes = torch.randint(-128, 128, (count, outputs, inputs), dtype=torch.int8, device=device)
        rows = scale.bfloat16().expand(outputs, 1).contiguous()
        return [NarrowWeights(codes[i], rows, None, (1, inputs)) for i in range(count)]
    shape = (count, outputs, inputs // 8)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    groups = torch.full((count, outputs, inputs // _GROUP), 0.01, dtype=torch.bfloat16, device=device)
    return [NarrowWeights(words[i], groups[i], None, (1, _GROUP)) for i in range(count)]
