"""How products with narrow weights are cut into programs: the engine launches them so, and the plan counts.

Knows: which tile a number of rows gets, and among how many programs the inputs of one are shared out. What is
built in is fixed, so no first start waits for a search; what was measured on a card itself goes before it
(``tuned.py``). Does not know tensors; ``engine/kernels/linear.py`` says what a program does with its tile.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vlfit.checkpoint.quantization import FP8, INT4, INT8

SPLIT_ROWS = 64  # up to so many rows the inputs of a product may be shared out among programs
BUSY = 1200  # warps that keep a card reading; programs with fewer share out their inputs
MOST_SPLITS = 16
FORMS = (FP8, INT8, INT4)
REGIMES = (1, 8, 16)  # rows, up to which there is a choice for each form


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program computes: rows x outputs over steps of inputs, by so many warps and load stages.

    With several ``parts``, as many as warps, each warp sums over one part of every step. ``busy``: as many
    warps are launched at least, if there are inputs to share out.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1
    busy: int = BUSY


Table = Mapping[tuple[str, int], Tiles]  # by form and regime

# What `vlfit plan --calibrate` found on one H100; FP8 of up to 8 rows has a stage less, by which steps of 2B
# take a twelfth less and of 4B a fiftieth more (docs/log.md).
BUILT_IN: Table = {
    (FP8, 1): Tiles(8, 64, 128, 4, 3),
    (FP8, 8): Tiles(8, 64, 128, 4, 3),
    (FP8, 16): Tiles(16, 32, 128, 2, 4, busy=640),
    (INT8, 1): Tiles(8, 32, 128, 2, 4),
    (INT8, 8): Tiles(8, 32, 128, 2, 4),
    (INT8, 16): Tiles(16, 32, 128, 2, 6, busy=640),
    # A step of int4 is as many bytes as one of FP8. Busy: o and down of 8B took 6.9 and 14.7 us among four
    # programs, 7.8 and 15.3 among eight.
    (INT4, 1): Tiles(8, 64, 256, 4, 3, busy=1000),
    (INT4, 8): Tiles(8, 32, 256, 2, 3),
    (INT4, 16): Tiles(16, 32, 256, 2, 4),
}


def tiles_for(rows: int, form: str, table: Table = BUILT_IN) -> Tiles:
    """The sizes for ``rows`` rows and weights in ``form``; half precision."""
    for regime in REGIMES:
        if rows <= regime:
            return table[form, regime]
    if rows <= SPLIT_ROWS:
        return Tiles(32 if rows <= 32 else 64, 64, 128, 4, 3)
    return Tiles(128, 64, 64, 4, 3)


def splits_for(rows: int, outputs: int, inputs: int, tiles: Tiles) -> int:
    """Among how many programs the inputs of a tile are shared out: a power of two up to ``MOST_SPLITS``."""
    if rows > SPLIT_ROWS:
        return 1
    warps = -(-outputs // tiles.outputs) * -(-rows // tiles.rows) * tiles.warps
    splits = 1
    while splits < MOST_SPLITS and warps * splits < tiles.busy and inputs >= 4 * splits * tiles.inputs:
        splits *= 2
    return splits
