"""What a tile of narrow weights is in numbers: functions that the kernels for linear layers are made of.

Columns past the last input come out as some number, never as NaN; rows of inputs are 0 there.
"""

import triton
import triton.language as tl


@triton.jit
def fp8_tile(
    codes,
    output_index,
    column,
    outputs,
    inputs,
    hardware: tl.constexpr,
    whole: tl.constexpr = False,
):
    """Bytes of ``codes`` [outputs, inputs] as float16: each number itself, or a 256th without ``hardware``.

    Only cards from compute capability 8.9 on convert float8 themselves. Elsewhere sign, exponent and fraction
    are put where float16 has them: its exponent counts from 15 instead of 7, so the number is 2^-8 of what
    the code stands for, exactly, subnormal numbers included. NaN, which no sound file holds, reads as 480.
    """
    inside = (output_index[:, None] < outputs) & (column[None, :] < inputs)
    code = stored(codes, output_index, column, inputs, inside, whole)
    if hardware:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = code.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def stored(codes, output_index, column, columns, inside, whole: tl.constexpr):
    """``codes`` [outputs, columns] at ``output_index`` and ``column``, 0 where not ``inside``.

    They are read once, so the cache need not keep them. ``whole``: all are inside.
    """
    place = output_index[:, None].to(tl.int64) * columns + column[None, :]
    if whole:
        found = tl.load(codes + place, eviction_policy="evict_first")
    else:
        found = tl.load(codes + place, mask=inside, other=0, eviction_policy="evict_first")
    return found


@triton.jit
def int4_tile(
    words,
    zero_point,
    output_index,
    start,
    group,
    outputs,
    inputs,
    groups,
    dtype: tl.constexpr,
    has_zero_point: tl.constexpr,
    shuffled: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    tile_spans: tl.constexpr,
    by_hand: tl.constexpr = False,
    whole: tl.constexpr = False,
):
    """Codes of ``words`` [outputs, inputs / 8] from input ``start`` on less zero points, as ``dtype``."""
    number = marked_codes(
        words,
        output_index,
        start,
        outputs,
        inputs,
        dtype,
        shuffled,
        tile_outputs,
        tile_inputs,
        by_hand,
        False,
    )
    mark: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 8388608.0
    if has_zero_point:
        zero = zero_points(zero_point, output_index, group, outputs, groups) + mark
        return number - spread(zero.to(dtype), shuffled, tile_outputs, tile_inputs, tile_spans)
    return number - (mark + 8)


@triton.jit
def zero_points(zero_point, output_index, group, outputs, groups):
    """The codes that stand for 0 in ``group`` [some], of ``zero_point`` [outputs / 8, groups]: float32."""
    known = (output_index[:, None] < outputs) & (group[None, :] < groups)
    zeros = tl.load(zero_point + (output_index[:, None] // 8) * groups + group[None, :], mask=known, other=0)
    return ((zeros >> ((output_index[:, None] % 8) * 4)) & 15).to(tl.float32)


@triton.jit
def marked_codes(
    words,
    output_index,
    start,
    outputs,
    inputs,
    dtype: tl.constexpr,
    shuffled: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    by_hand: tl.constexpr,
    whole: tl.constexpr,
):
    """Codes of ``words`` [outputs, inputs / 8] from input ``start`` on, plus a number, as ``dtype``.

    A code becomes a number without conversion: in the last bits of 128 (bfloat16), 1024 (float16) or 2^23
    (float32), which stays in it, it counts units. Two codes of a word that are 16 bits apart are treated as
    one register, so two weights cost one instruction and a share of a shift. ``by_hand``: see ``halves``.
    ``whole``: see ``stored``.
    """
    word = start // 8 + tl.arange(0, tile_inputs // 8)
    inside = (output_index[:, None] < outputs) & (word[None, :] < inputs // 8)
    eight = stored(words, output_index, word, inputs // 8, inside, whole)
    shifted = tl.join(eight, eight >> 4)
    number = halves(tl.join(shifted, shifted >> 8), 0x000F000F, dtype, by_hand)
    # [outputs, words, 2, 2, 2]: the last three count a code's place in its word, lowest bit first.
    if shuffled:
        number = tl.reshape(number, (tile_outputs, tile_inputs // 32, 4, 2, 2, 2))
        number = tl.permute(number, (0, 1, 4, 2, 3, 5))
    else:
        number = tl.permute(number, (0, 1, 4, 3, 2))
    return tl.reshape(number, (tile_outputs, tile_inputs))


@triton.jit
def halves(word, mask: tl.constexpr, dtype: tl.constexpr, by_hand: tl.constexpr):
    """The bits ``mask`` of both halves of ``word`` in the last bits of the same large number: [..., 2].

    ``by_hand``: with the one instruction that NVIDIA's cards have for it, of which their assembler makes two,
    because both constants are too long to stand beside each other.
    """
    if dtype == tl.float32:
        low = ((word & mask & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high = (((word & mask) >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
    else:
        mark: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        if by_hand:
            marked = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, $2, $3, 0xEA;",
                "=r,r,r,r",
                [word, mask, mark],
                tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            marked = (word & mask) | mark
        low = (marked & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = ((marked >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def int8_tile(
    words,
    output_index,
    start,
    outputs,
    inputs,
    dtype: tl.constexpr,
    shuffled: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    by_hand: tl.constexpr = False,
    whole: tl.constexpr = False,
):
    """Bytes of ``words`` [outputs, inputs / 4] from input ``start`` on, signed numbers, as ``dtype``.

    Without conversion, as in ``int4_tile``: a signed byte is its lowest seven bits, less 128 if its highest
    is set, and both count units in the last bits of the same large number. Two bytes of a word that are 16
    bits apart are treated as one register, so two weights cost three instructions and a share of a shift.
    """
    word = start // 4 + tl.arange(0, tile_inputs // 4)
    inside = (output_index[:, None] < outputs) & (word[None, :] < inputs // 4)
    four = stored(words, output_index, word, inputs // 4, inside, whole)
    pairs = tl.join(four, four >> 8)  # bytes 0 and 2, and bytes 1 and 3
    number = halves(pairs, 0x007F007F, dtype, by_hand) - halves(pairs, 0x00800080, dtype, by_hand)
    # [outputs, words, 2, 2]: the last two count a byte's place in its word, lowest bit first.
    if not shuffled:
        number = tl.permute(number, (0, 1, 3, 2))
    return tl.reshape(number, (tile_outputs, tile_inputs))


@triton.jit
def shuffle_words(rows, tile_rows: tl.constexpr, tile_inputs: tl.constexpr):
    """``rows`` [tile_rows, tile_inputs] in the order of ``int8_tile(shuffled=True)``: of four 0, 2, 1, 3."""
    parts = tl.reshape(rows, (tile_rows, tile_inputs // 4, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2)), (tile_rows, tile_inputs))


@triton.jit
def shuffle(rows, tile_rows: tl.constexpr, tile_inputs: tl.constexpr):
    """``rows`` [tile_rows, tile_inputs] with its inputs in the order of ``int4_tile(shuffled=True)``.

    A product does not mind the order of its inputs, if both sides have the same. This one is how matrix units
    want weights in registers: a thread holds the codes of a word, no weight moves between threads. Of 32
    inputs, word t's code 4c + 2a + b stands at 16a + 4t + 2b + c.
    """
    parts = tl.reshape(rows, (tile_rows, tile_inputs // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 4, 2, 5, 3)), (tile_rows, tile_inputs))


@triton.jit
def spread(
    value,
    shuffled: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    tile_spans: tl.constexpr,
):
    """``value`` [tile_outputs, tile_spans] for each of the inputs: [tile_outputs, tile_inputs].

    ``shuffled``: in the order of ``shuffle``, for spans of whole words.
    """
    if shuffled:
        in_span: tl.constexpr = tile_inputs // tile_spans // 8
        word = tl.broadcast_to(value[:, :, None], (tile_outputs, tile_spans, in_span))
        word = tl.reshape(word, (tile_outputs, tile_inputs // 32, 4))
        wide = tl.broadcast_to(word[:, :, None, :, None, None], (tile_outputs, tile_inputs // 32, 2, 4, 2, 2))
    else:
        wide = tl.broadcast_to(value[:, :, None], (tile_outputs, tile_spans, tile_inputs // tile_spans))
    return tl.reshape(wide, (tile_outputs, tile_inputs))


@triton.jit
def groups_of(start, scale_width: tl.constexpr, span: tl.constexpr, spans: tl.constexpr):
    """The groups of ``scale_width`` inputs that the ``spans`` of ``span`` inputs from ``start`` on lie in."""
    lane = tl.arange(0, spans)
    # Where each has its own, the compiler sees that they are neighbours, and loads them together.
    return start // span + lane if scale_width == span else (start + lane * span) // scale_width


@triton.jit
def scales(
    scale,
    output_index,
    group,
    outputs,
    groups,
    scale_rows: tl.constexpr,
    whole: tl.constexpr = False,
):
    """Scales [tile_outputs, tile_spans] of the groups ``group``, 0 outside; ``whole``: none is outside."""
    place = (output_index[:, None] // scale_rows) * groups + group[None, :]
    if whole:
        return tl.load(scale + place)
    inside = (output_index[:, None] < outputs) & (group[None, :] < groups)
    return tl.load(scale + place, mask=inside, other=0.0)
