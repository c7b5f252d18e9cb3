"""How products with narrow weights are cut into programs: the engine launches them so, and the plan counts.

Knows: which tile a number of rows gets, and among how many programs the inputs of one are shared out. The
table is fixed, so no first start waits for a search; ``benchmarks/kernels.py --sweep`` measures candidates.
Does not know tensors; ``engine/kernels/linear.py`` says what a program does with its tile.
"""

from dataclasses import dataclass

from vlfit.checkpoint.quantization import INT4

SPLIT_ROWS = 64  # up to so many rows the inputs of a product may be shared out among programs
BUSY = 1200  # warps that keep a card reading; programs with fewer share out their inputs
MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program computes: rows x outputs over steps of inputs, by so many warps and load stages.

    With several ``parts``, as many as warps, each warp sums over one part of every step.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1


def tiles_for(rows: int, form: str) -> Tiles:
    """The sizes for ``rows`` rows and weights in ``form``, by regime and not by card; half precision."""
    if rows <= 8:
        # A step of int4 is as many bytes as one of FP8.
        return Tiles(8, 64, 256, 4, 3) if form == INT4 else Tiles(8, 64, 128, 4, 3)
    if rows <= 16:
        return Tiles(16, 32, 256, 2, 3) if form == INT4 else Tiles(16, 32, 128, 2, 4)
    if rows <= SPLIT_ROWS:
        return Tiles(32 if rows <= 32 else 64, 64, 128, 4, 3)
    return Tiles(128, 64, 64, 4, 3)


def splits_for(rows: int, outputs: int, inputs: int, tiles: Tiles) -> int:
    """Among how many programs the inputs of a tile are shared out: a power of two up to ``MOST_SPLITS``."""
    if rows > SPLIT_ROWS:
        return 1
    warps = -(-outputs // tiles.outputs) * -(-rows // tiles.rows) * tiles.warps
    splits = 1
    while splits < MOST_SPLITS and warps * splits < BUSY and inputs >= 4 * splits * tiles.inputs:
        splits *= 2
    return splits
