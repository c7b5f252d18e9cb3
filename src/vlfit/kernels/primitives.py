"""Device functions of several kernels: programmatic dependent launch, rows of an FP8 KV cache, bandwidth.

Programmatic dependent launch (PDL, compute capability 9.0 and later): a kernel is launched while the previous
one still runs, and waits for it on the device, which hides the launch latency. Launching more than one kernel
ahead, or prefetching weights before the wait (into registers or L2) was slower with kernels that keep weights
in shared memory (docs/log.md); ``gemm/one_row_kernels.py``, which keeps them in registers, does that.

Triggering the next launch early hides more of its latency, but the next kernel's programs become resident
wherever there is room at that moment, often unevenly across multiprocessors, and stay there. Triggered after
the main loop they are spread evenly, and less latency is hidden. Host side: ``launch.pdl_options``,
``launch.triggers_late``.
"""

import triton
import triton.language as tl


@triton.jit
def pdl_sync(USE_PDL: tl.constexpr, TRIGGER: tl.constexpr = True):
    """Wait until the previous kernel's writes are visible, then ``pdl_trigger``, with ``TRIGGER``.

    Call before the first read of anything that the previous kernel wrote. Does nothing without ``USE_PDL``.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    pdl_trigger(USE_PDL and TRIGGER)


@triton.jit
def pdl_trigger(USE_PDL: tl.constexpr):
    """Trigger the next kernel's launch: it starts once every program has triggered it or ended.

    Call after the wait: before its own wait the next kernel may read what kernels before this one wrote.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


# FP8 KV cache: e4m3 codes and one bfloat16 scale per row (token and KV head), bit-equal to
# ``layers/kv_cache.py``. Attention multiplies codes without dequantizing them: a key's scale multiplies its
# score; log2 of a value's scale is added to the score before the running maximum is taken, so that the
# largest softmax weight stays 1, and is taken out again in the sum of weights.
FP8_MAX = tl.constexpr(448.0)
MIN_KV_SCALE = tl.constexpr(2.0**-40)
BF16_ONE = tl.constexpr(0x3F80)
BF16_NAN = tl.constexpr(0x7FC0)


@triton.jit
def quantize_kv_rows(rows):
    """Quantize ``rows`` [num_rows, width] to FP8: codes [num_rows, width] uint8, scales [num_rows, 1] int16.

    Scales are the bits of bfloat16, NaN for a row with an infinity or NaN. Rounding uses integer arithmetic,
    as compute capability below 8.9 has no instruction for it.
    """
    x = rows.to(tl.float32)
    amax = tl.max(tl.abs(x), 1)[:, None]
    bits = tl.maximum(tl.div_rn(amax, FP8_MAX), MIN_KV_SCALE).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    scaled = x * tl.div_rn(1.0, (bits << 16).to(tl.float32, bitcast=True))
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(scaled), FP8_MAX)
    code = magnitude.to(tl.int32, bitcast=True)
    # Round off 20 of float32's mantissa bits; the exponent bias goes from 127 to 7.
    normal = ((code + 0x7FFFF + ((code >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal below 2^-6: codes count 512ths, and adding 2^23 rounds to whole ones.
    small = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = sign | tl.where(magnitude < 0.015625, small, normal)
    # Not ``amax``: a maximum may ignore NaN.
    finite = tl.min(tl.where(tl.abs(x) < float("inf"), 1, 0), 1)[:, None] == 1
    return code.to(tl.uint8), tl.where(finite, bits, BF16_NAN).to(tl.int16)


@triton.jit
def fp8_to_float(codes, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr, INLINE_PTX: tl.constexpr):
    """Convert e4m3 ``codes`` to float32 if ``dtype`` is float32, otherwise to float16.

    ``NATIVE_FP8`` (only with ``INLINE_PTX``): convert in hardware. Without it the result is 2^-8 of the value
    (see ``unpack.load_fp8``), which ``kv_scale_to_float`` makes up for. ``INLINE_PTX``: convert four codes at
    a time with PTX instructions. They are marked impure because Triton moves pure code behind a layout
    conversion through shared memory, which then goes byte by byte.
    """
    if INLINE_PTX and NATIVE_FP8:
        half = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [codes],
            tl.float16,
            is_pure=False,
            pack=4,
        )
    elif INLINE_PTX:
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
        bits = codes.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) if dtype == tl.float32 else half


@triton.jit
def kv_scale_to_float(scale, NATIVE_FP8: tl.constexpr):
    """Convert a KV cache's scales (bfloat16 bits, int16) to float32.

    Without ``NATIVE_FP8`` multiplied by 2^8, as ``fp8_to_float`` then returns 2^-8 of each value.
    """
    factor = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return factor if NATIVE_FP8 else factor * 256.0


@triton.jit
def read_bandwidth_kernel(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Read-bandwidth benchmark: sums ``x`` [programs * STEPS * BLOCK] int32 into ``out`` [programs].

    Grid: (programs,). The sums, which may wrap around, only keep the compiler from dropping loads. torch's
    own sum is slower than reading, and a copy writes as much as it reads. Host side: ``tuning/bandwidth.py``.
    """
    pid = tl.program_id(0).to(tl.int64)
    offsets = pid * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):  # unrolled: all loads are in flight before the first is used
        total += tl.load(x + offsets + step * BLOCK)
    tl.store(out + pid, tl.sum(total, 0))


@triton.jit
def split_halves(word):
    """The two float16 in each int32 ``word``, the low half first, as float32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)
