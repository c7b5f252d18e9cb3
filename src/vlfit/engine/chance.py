"""Chance by number: the seed of a request and the position of a token say at what point it is drawn.

So a token does not depend on who else is in the batch or on what was drawn before; and a GPU can draw the
next one without being told anything. Knows Philox 4x32 with 10 rounds (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), as Triton has it. Does not draw (``sampler.py``, ``kernels/draw.py``).
"""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEYS = 0x9E3779B9, 0xBB67AE85  # what the two halves of the seed grow by in each round
_ROUNDS = 10
BITS = 24  # of a point: as many as float32 holds exactly


def point(seed: int, position: int) -> float:
    """A number from 0 to below 1 in steps of 2^-24, evenly distributed over seeds and positions.

    ``seed``: 64 bits of it count. ``position``: 32 bits.
    """
    first, second, third, fourth = position & _WORD, 0, 0, 0
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        one, other = _MULTIPLIERS[0] * first, _MULTIPLIERS[1] * third
        first, second = other >> 32 ^ second ^ low, other & _WORD
        third, fourth = one >> 32 ^ fourth ^ high, one & _WORD
        low, high = low + _KEYS[0] & _WORD, high + _KEYS[1] & _WORD
    return (first >> 32 - BITS) / (1 << BITS)
