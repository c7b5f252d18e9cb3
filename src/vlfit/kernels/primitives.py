"""How a kernel begins while the one before it still runs, on cards that can do that (from Hopper on).

Each kernel waits for the one before when it begins, and lets the next one be made ready from then on: what a
launch costs is over when its turn comes. Starting more than one ahead, letting the next go later, or fetching
weights before the wait, into registers or the second cache, was slower (docs/log.md). Host code:
``launch.py``.
"""

import triton
import triton.language as tl


@triton.jit
def wait(overlap: tl.constexpr):
    """Go on when the kernel before has ended. The first thing that a kernel does."""
    if overlap:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# How keys and values lie in a cache of FP8: codes, and for each row a scale. Functions for kernels.
#
# The same numbers as ``layers/kv_cache.py`` makes, bit for bit. Codes are multiplied as they are: a key's
# scale is a factor of its score; a value's makes its weight larger or smaller, by its logarithm before the
# largest of them is taken, so that the largest weight is 1 whatever the values are; and the sum of weights
# is taken without it.


# As in ``layers/kv_cache.py``.
LARGEST = tl.constexpr(448.0)
LEAST = tl.constexpr(2.0**-40)
ONE = tl.constexpr(0x3F80)  # 1 as bits of bfloat16
NOT_A_NUMBER = tl.constexpr(0x7FC0)


@triton.jit
def narrowed(rows):
    """Codes [some, width] uint8 and scales [some, 1] int16 of ``rows`` [some, width]: rounded by hand, as
    cards below compute capability 8.9 have no instruction for it.
    """
    wide = rows.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)[:, None]
    bits = tl.maximum(tl.div_rn(largest, LARGEST), LEAST).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    number = wide * tl.div_rn(1.0, (bits << 16).to(tl.float32, bitcast=True))
    sign = (number.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(number), LARGEST)
    code = size.to(tl.int32, bitcast=True)
    # 20 of float32's bits of fraction go, and exponents count from 7 instead of 127.
    normal = ((code + 0x7FFFF + ((code >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count 512ths: beside 2^23 float32 has no bits for less.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = sign | tl.where(size < 0.015625, small, normal)
    # Not by the largest one: a maximum may pass NaN over.
    finite = tl.min(tl.where(tl.abs(wide) < float("inf"), 1, 0), 1)[:, None] == 1
    return code.to(tl.uint8), tl.where(finite, bits, NOT_A_NUMBER).to(tl.int16)


@triton.jit
def numbers(codes, dtype: tl.constexpr, hardware: tl.constexpr, by_hand: tl.constexpr):
    """``codes`` in float16, or in float32 where the computation is: as they are, or a 256th of it where the
    card does not convert float8 itself (``hardware``; see ``unpack.fp8_tile``). ``dtype``: of the rest.

    ``by_hand``: four at a time with instructions of NVIDIA's cards. They count as impure: what is pure Triton
    moves behind the exchange of a tile among threads, which then goes byte by byte.
    """
    if by_hand and hardware:
        half = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [codes],
            tl.float16,
            is_pure=False,
            pack=4,
        )
    elif by_hand:
        half = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high, size;"
            " prmt.b32 low, $2, 0, 0x1404; prmt.b32 high, $2, 0, 0x3424;"
            " shr.u32 size, low, 1; and.b32 size, size, 0x3F803F80;"
            " lop3.b32 $0, low, 0x80008000, size, 0xEA;"
            " shr.u32 size, high, 1; and.b32 size, size, 0x3F803F80;"
            " lop3.b32 $1, high, 0x80008000, size, 0xEA; }",
            "=&r,=r,r",
            [codes],
            tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        wide = codes.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) if dtype == tl.float32 else half


@triton.jit
def factor_of(scale, hardware: tl.constexpr):
    """What ``numbers`` are multiplied by, in float32."""
    factor = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return factor if hardware else factor * 256.0


# A kernel that reads memory and does next to nothing else: how fast a card can read at all.
#
# Sums of whole numbers, so that nothing that was read can be left out. torch's own sum is slower than
# reading is, and so is a copy, which writes as much as it reads. Host code: ``tuning/bandwidth.py``.


@triton.jit
def sum_kernel(numbers, sums, block: tl.constexpr, steps: tl.constexpr):
    """``numbers`` [programs * steps * block] int32 to ``sums`` [programs] int32, which may wrap around."""
    program = tl.program_id(0).to(tl.int64)
    place = program * (steps * block) + tl.arange(0, block)
    total = tl.zeros([block], tl.int32)
    for step in tl.static_range(steps):  # all on their way before the first is needed
        total += tl.load(numbers + place + step * block)
    tl.store(sums + program, tl.sum(total, 0))
