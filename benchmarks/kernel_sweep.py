"""Tile sizes tried against one another: where the fixed tables of ``engine/kernels`` come from.

Candidates are compiled beforehand in several processes, into Triton's cache on disk: alone that takes longer
than all measurements.
"""

import contextlib
import io
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.kernel_timing import seconds_of
from benchmarks.kernel_weights import LAYERS, random_quantized_weights
from benchmarks.report import print_rows
from vlfit.kernels.gemm.quantized import QuantizedWeight, quantized_linear
from vlfit.plan.native.tiles import GemmTiles

SIZE = "4B"
FORMS = ("fp8", "int4 of 32")
WORKERS = 12
BEST = 6  # shown of each


@dataclass(frozen=True)
class Candidate:
    """``splits`` None: as the engine would choose."""

    form: str
    rows: int
    tiles: GemmTiles
    splits: int | None = None


def candidates() -> list[Candidate]:
    found = []
    for form in FORMS:
        for outputs, inputs, warps, stages, splits in CANDIDATES_1_ROW:
            found.append(Candidate(form, 1, GemmTiles(8, outputs, inputs, warps, stages), splits))
        for rows, tiles in ((32, CANDIDATES_32_ROWS), (128, CANDIDATES_128_ROWS)):
            for outputs, inputs, warps, stages in tiles:
                found.append(Candidate(form, rows, GemmTiles(rows, outputs, inputs, warps, stages)))
    return found


CANDIDATES_1_ROW = (
    (64, 128, 4, 3, None), (64, 128, 4, 4, None), (64, 128, 4, 5, None), (64, 256, 4, 2, None),
    (64, 256, 4, 3, None), (64, 256, 4, 4, None), (64, 512, 4, 2, None), (32, 128, 2, 4, None),
    (32, 128, 4, 4, None), (32, 256, 2, 3, None), (32, 256, 2, 4, None), (32, 256, 4, 3, None),
    (32, 256, 4, 4, None), (16, 256, 1, 4, None), (16, 512, 1, 3, None), (16, 512, 2, 3, None),
    (128, 128, 8, 3, None), (64, 128, 4, 3, 1), (64, 256, 4, 3, 1), (32, 128, 4, 4, 1),
    (32, 256, 4, 3, 1), (16, 256, 1, 4, 1), (16, 512, 1, 3, 1),
)  # fmt: skip
CANDIDATES_32_ROWS = ((64, 128, 4, 3), (64, 64, 4, 4), (32, 128, 4, 3))
CANDIDATES_128_ROWS = ((64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 2))


def sweep(copy: float) -> list[dict[str, Any]]:
    """Times every candidate on all matrices of a layer and prints the best; ``copy`` in bytes per second."""
    every = candidates()
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_candidate, every, chunksize=-(-len(every) // WORKERS)))
    weights = {
        form: [random_quantized_weights(form, *shape) for shape in LAYERS[SIZE].values()] for form in FORMS
    }
    found = []
    for candidate in every:
        with contextlib.suppress(Exception):  # needs more registers or shared memory than there is
            found.append((_seconds(candidate, weights[candidate.form]), candidate))
    rows = [["form", "rows", "tile", "warps", "stages", "splits", "us a layer", "GB/s", "of copying"]]
    for form in FORMS:
        read = sum(each[0].codes.nbytes + each[0].scale.nbytes for each in weights[form])
        for count in sorted({candidate.rows for _, candidate in found}):
            best = sorted(
                ((s, c) for s, c in found if (c.form, c.rows) == (form, count)), key=lambda pair: pair[0]
            )
            for seconds, candidate in best[:BEST]:
                tiles = candidate.tiles
                rows.append(
                    [
                        form,
                        str(count),
                        f"{tiles.rows} x {tiles.outputs} x {tiles.inputs}",
                        str(tiles.warps),
                        str(tiles.stages),
                        str(candidate.splits or "-"),
                        f"{seconds * 1e6:.1f}",
                        f"{read / seconds / 1e9:.0f}",
                        f"{read / seconds / copy:.0%}",
                    ]
                )
    print(f"\n## The best {BEST} of {len(found)} (of {len(every)}) on a layer of {SIZE}\n")
    print_rows(rows)
    return [{**asdict(candidate), "seconds": seconds} for seconds, candidate in found]


def _seconds(candidate: Candidate, weights: list[list[QuantizedWeight]]) -> float:
    total = 0.0
    for copies in weights:
        x = torch.randn(candidate.rows, copies[0].in_features, dtype=torch.bfloat16, device="cuda")
        total += seconds_of(
            [
                lambda each=each, x=x: quantized_linear(x, each, None, candidate.tiles, candidate.splits)  # type: ignore[misc]
                for each in copies
            ]
        )
    return total


def compile_candidate(candidate: Candidate) -> bool:
    """Runs ``candidate`` once on every matrix of a layer, so that its kernels are in the cache."""
    for outputs, inputs in LAYERS[SIZE].values():
        if candidate.form == "fp8":
            codes = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn, device="cuda")
            scale = torch.ones(outputs // 128, inputs // 128, device="cuda")
            weights = QuantizedWeight(codes, scale, None, (128, 128))
        else:
            group = int(candidate.form.split()[-1])
            words = torch.zeros(outputs, inputs // 8, dtype=torch.int32, device="cuda")
            scale = torch.ones(outputs, inputs // group, dtype=torch.bfloat16, device="cuda")
            weights = QuantizedWeight(words, scale, None, (1, group))
        x = torch.zeros(candidate.rows, inputs, dtype=torch.bfloat16, device="cuda")
        with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
            quantized_linear(x, weights, None, candidate.tiles, candidate.splits)
            torch.cuda.synchronize()
    return True
