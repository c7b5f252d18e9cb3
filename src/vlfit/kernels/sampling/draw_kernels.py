"""The kernel that chooses each row's next token. Host code, and what it means: ``draw.py``."""

import triton
import triton.language as tl
from triton.language.random import philox_impl

from vlfit.kernels.primitives import wait

LOWEST = tl.constexpr(-3e38)  # about the least finite number of float32


@triton.jit
def sortable(value, bits: tl.constexpr):
    """The first ``bits`` of numbers without sign that are in the order of ``value``, float32; 0 is none."""
    word = tl.where(value == 0, 0.0, value).to(tl.uint32, bitcast=True)
    word = tl.where(word >> 31 == 1, word ^ 0xFFFFFFFF, word | 0x80000000)
    return word >> (32 - bits)


@triton.jit
def list_likeliest(value, token, inside, values, tokens, most: tl.constexpr, bits: tl.constexpr):
    """Write the ``most`` largest of ``value`` [n] and their tokens, in the order they come in; of equals at
    the end of the list the first ones. Fewer where no more are ``inside``.

    Bit by bit a limit is found that so many reach.
    """
    key = tl.where(inside, sortable(value, bits), 0)
    limit = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << (bits - 1), tl.uint32)
    for _ in range(bits):
        trial = limit | step
        limit = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= most, trial, limit)
        step = step >> 1
    above = key > limit
    equal = (key == limit) & inside
    room = most - tl.sum(above.to(tl.int32), 0)
    listed = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    place = tl.cumsum(listed.to(tl.int32), 0) - 1
    tl.store(values + place, value, mask=listed)
    tl.store(tokens + place, token, mask=listed)


@triton.jit
def draw(likeliest, everything, values, tokens, asked, position, rows, vocabulary, most: tl.constexpr):
    """The token that a row is to go on with, and 1; or any, and 0, where the likeliest ones, which are
    listed, do not say which. ``everything``: the weight of the whole vocabulary, the likeliest's being 1.

    Each of those listed finds its own rank, and the weight of those before it.
    """
    temperature = tl.load(asked).to(tl.float32, bitcast=True)
    top_p = tl.load(asked + rows).to(tl.float32, bitcast=True)
    min_p = tl.load(asked + 2 * rows).to(tl.float32, bitcast=True)
    top_k = tl.load(asked + 3 * rows)
    low = tl.load(asked + 4 * rows).to(tl.uint32, bitcast=True)
    high = tl.load(asked + 5 * rows).to(tl.uint32, bitcast=True)
    none = tl.full([], 0, tl.uint32)
    word, _, _, _ = philox_impl(position.to(tl.uint32, bitcast=True), none, none, none, low, high)
    uniform = (word >> 8).to(tl.float32) * (1.0 / (1 << 24))  # as in ``engine/sampling/sampler.py``

    each = tl.arange(0, most)
    count = tl.minimum(most, vocabulary)
    listed = each < count
    value = tl.load(values + each, mask=listed, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + each, mask=listed, other=0, cache_modifier=".cg")
    weight = tl.exp((value - tl.maximum(likeliest, LOWEST)) / temperature)
    higher = value[None, :] > value[:, None]
    earlier = (value[None, :] == value[:, None]) & (token[None, :] < token[:, None])
    comes_before = (higher | earlier) & listed[None, :]
    rank = tl.sum(comes_before.to(tl.int32), 1)
    before = tl.sum(tl.where(comes_before, weight[None, :], 0.0), 1)

    whole = count == vocabulary
    by_rank = listed & ((top_k == 0) | (rank < top_k))
    among = tl.sum(tl.where(by_rank, weight, 0.0), 0)
    total = tl.where((top_k > 0) | whole, among, everything)
    reach = tl.where(top_p >= 1.0, float("inf"), top_p * total)
    kept = by_rank & (before < reach) & (weight >= min_p) & (weight > 0)
    many = tl.sum(kept.to(tl.int32), 0)
    # Whether nothing beyond what is listed may be drawn.
    ended = whole | (many < count) | (top_k > 0)
    without_end = (top_k == 0) & (top_p >= 1.0) & (min_p <= 0.0)
    point = uniform * tl.where(ended, tl.sum(tl.where(kept, weight, 0.0), 0), everything)
    passed = tl.sum((kept & (before + weight <= point)).to(tl.int32), 0)
    known = (ended | (without_end & (passed < many))) & (many > 0)
    chosen = tl.sum(tl.where(kept & (rank == tl.minimum(passed, many - 1)), token, 0), 0)
    return chosen, known.to(tl.int32)


@triton.jit
def list_of_parts(
    values, tokens, vocabulary, tile, parts, tile_parts: tl.constexpr, most: tl.constexpr, bits: tl.constexpr
):
    """The list of a row, behind those that its parts have."""
    slot = tl.arange(0, tile_parts * most)
    owner = slot // most
    listed = (owner < parts) & (slot % most < vocabulary - owner * tile)
    value = tl.load(values + slot, mask=listed, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + slot, mask=listed, other=0, cache_modifier=".cg")
    behind = parts * most
    list_likeliest(value, token, listed, values + behind, tokens + behind, most, bits)


@triton.jit(
    do_not_specialize=["rows", "form_words"],
    do_not_specialize_on_alignment=["asked", "positions", "forms"],
)
def choose_tokens(
    logits,
    asked,
    positions,
    forms,
    largest,
    places,
    weights,
    values,
    tokens,
    arrivals,
    summary,
    rows,
    vocabulary,
    form_words,
    bits: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    tile_parts: tl.constexpr,
    most: tl.constexpr,
    overlap: tl.constexpr,
):
    """A program for each row and part of it; the last one of a row to come compares what all have found.

    What is no number counts as infinite. ``arrivals`` counts the programs of each row: 0 before and after.
    """
    wait(overlap)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    here = row * parts
    lists = row * (parts + 1) * most  # the last one of a row is of all its parts
    temperature = tl.load(asked + row).to(tl.float32, bitcast=True)
    token = part * tile + tl.arange(0, tile)
    inside = token < vocabulary
    value = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    if tl.load(asked + 6 * rows + row) == 1:  # it keeps to a form
        allowed = tl.load(forms + row * form_words + token // 32, mask=inside, other=0)
        value = tl.where((allowed >> (token % 32)) & 1 == 1, value, float("-inf"))
    likeliest = tl.max(value, 0)
    tl.store(largest + here + part, likeliest)
    tl.store(places + here + part, tl.min(tl.where(value == likeliest, token, vocabulary), 0))
    if temperature > 0:
        least = tl.maximum(likeliest, LOWEST)  # a part may hold nothing that can be said
        tl.store(weights + here + part, tl.sum(tl.exp((value - least) / temperature), 0))
        own = lists + part * most
        list_likeliest(value, token, inside, values + own, tokens + own, most, bits)
    tl.debug_barrier()  # as in ``kernels/gemm/tile.py``
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == parts - 1:
        other = tl.arange(0, tile_parts)
        there = other < parts
        found = tl.load(largest + here + other, mask=there, other=float("-inf"), cache_modifier=".cg")
        place = tl.load(places + here + other, mask=there, other=0, cache_modifier=".cg")
        likeliest = tl.max(found, 0)
        best = tl.min(tl.where((found == likeliest) & there, place, vocabulary), 0)
        drawn = tl.full([], 0, tl.int32)
        if temperature > 0:
            weight = tl.load(weights + here + other, mask=there, other=0.0, cache_modifier=".cg")
            weight = weight * tl.exp((found - tl.maximum(likeliest, LOWEST)) / temperature)
            list_of_parts(values + lists, tokens + lists, vocabulary, tile, parts, tile_parts, most, bits)
            tl.debug_barrier()
            own = lists + parts * most
            position = tl.load(positions + row) + 1
            chosen, drawn = draw(
                likeliest,
                tl.sum(weight, 0),
                values + own,
                tokens + own,
                asked + row,
                position,
                rows,
                vocabulary,
                most,
            )
            best = tl.where(drawn == 1, chosen, best)
        tl.store(summary + row, best.to(tl.int64))
        usable = (likeliest < float("inf")) & (likeliest > float("-inf"))
        tl.store(summary + rows + row, usable.to(tl.int64))
        tl.store(summary + 2 * rows + row, drawn.to(tl.int64))
        tl.store(arrivals + row, 0)
