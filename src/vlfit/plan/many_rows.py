"""How prompts are multiplied with narrow weights: the engine does it so, and the plan counts what it takes.

Knows: from how many rows on a product is no longer bound by reading weights, and what a card has that decides
how it is done then. Does not know tensors (``engine/kernels/linear.py``, ``eight_bits.py``) or machines.
"""

from dataclasses import dataclass

from vlfit.checkpoint.quantization import FP8
from vlfit.units import GIB, MIB

# Widening moves about 5 bytes a weight (1 read, 2 written, 2 read again; int4 half a byte less), unpacking on
# the fly 1, and computes at a share s of torch's speed. With F operations for each byte that a card moves in
# the same time, they are even at 2 F / (1/s - 1) rows. An H200 has F = 260 and s = 0.45 (FP8) or 0.2 to 0.4
# (int4): 430, and 130 to 350. Cards for games have F = 110 to 130: 200, and 60 to 160.
WIDEN_ROWS = 256
# A slice of so many bytes stays in the L2 cache of newer cards (24 MB and more) until it is multiplied, and
# has tiles enough for torch's product to fill a card with 8 or 16 GB.
SCRATCH_BYTES = 24 * MIB
# Larger cards wait for the host to launch (30 us a kernel, docs/log.md): fewer slices are faster. This
# holds gate and up of 2B whole and of 4B in two, down of 4B whole and of 8B in two.
ROOMY_SCRATCH_BYTES = 48 * MIB
ROOMY = 18 * GIB  # of memory that is free: it does not matter there
MULTIPLIES_FLOAT8 = (8, 9)  # compute capability from which on matrix units do
EIGHT_BIT_ROWS = 16  # rows in FP8 are allocated in multiples of it
GROUP = 128  # inputs that share a scale, in rows that are rounded to FP8 and in weights


@dataclass(frozen=True, slots=True)
class Means:
    """What a card has for prompts and pictures: a buffer of ``scratch`` bytes that slices of weights are
    widened into; ``eight_bits``: matrix units for FP8, which need no widening of such weights; ``tower``:
    room for what the vision tower does to be recorded as CUDA graphs.
    """

    scratch: int = SCRATCH_BYTES
    eight_bits: bool = False
    tower: bool = False


LEAST = Means()


def means_of(free: int, capability: tuple[int, int]) -> Means:
    """The means of a card with ``free`` bytes of memory that nobody else holds."""
    roomy = free >= ROOMY
    scratch = ROOMY_SCRATCH_BYTES if roomy else SCRATCH_BYTES
    return Means(scratch, capability >= MULTIPLIES_FLOAT8, roomy)


def fits_eight_bits(form: str, inputs: int, shared: int) -> bool:
    """Whether weights of so many ``inputs``, of which ``shared`` have one scale, are in FP8 with scales that
    change where those of rows do, or not at all.
    """
    return form == FP8 and inputs % GROUP == 0 and (shared == GROUP or shared >= inputs)
