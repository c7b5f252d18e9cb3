"""Sampling on the GPU: greedy, or temperature, top-k, top-p and min-p with a counter-based random number.

Host side: ``draw.py``. Reference: ``engine/sampling/sampler.py``.
"""

import triton
import triton.language as tl
from triton.language.random import philox_impl

from vlfit.kernels.launch import cache_launches
from vlfit.kernels.primitives import pdl_sync

MIN_FINITE = tl.constexpr(-3e38)  # about the lowest finite float32


@triton.jit
def sort_key(value, BITS: tl.constexpr):
    """The top ``BITS`` bits of an unsigned integer that sorts like the float32 ``value``; 0 is the lowest."""
    word = tl.where(value == 0, 0.0, value).to(tl.uint32, bitcast=True)
    word = tl.where(word >> 31 == 1, word ^ 0xFFFFFFFF, word | 0x80000000)
    return word >> (32 - BITS)


@triton.jit
def store_top_candidates(
    value, token, mask, values, tokens, MAX_CANDIDATES: tl.constexpr, BITS: tl.constexpr
):
    """Store the ``MAX_CANDIDATES`` largest of ``value`` [n] in ``values``, their ``token`` in ``tokens``.

    In the order of ``value``, not sorted; fewer if fewer are in ``mask``. Of values equal to the smallest
    that is stored, the first ones are taken. A binary search over the bits of ``sort_key`` finds that one.
    """
    key = tl.where(mask, sort_key(value, BITS), 0)
    threshold = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << (BITS - 1), tl.uint32)
    for _ in range(BITS):
        trial = threshold | step
        threshold = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= MAX_CANDIDATES, trial, threshold)
        step = step >> 1
    above = key > threshold
    tied = (key == threshold) & mask
    num_ties = MAX_CANDIDATES - tl.sum(above.to(tl.int32), 0)
    chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= num_ties))
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(values + slot, value, mask=chosen)
    tl.store(tokens + slot, token, mask=chosen)


@triton.jit
def accept_or_replace(
    target,
    token,
    rank,
    comes_before,
    draft_token,
    draft_ids,
    draft_probs,
    accept_uniform,
    draw_uniform,
    MAX_CANDIDATES: tl.constexpr,
):
    """Rejection sampling: ``draft_token``, or a token in its place. Reference: ``verification.reject``.

    ``target`` [MAX_CANDIDATES]: probabilities p of the tokens ``token``, which have a ``rank`` in the order
    ``comes_before`` [MAX_CANDIDATES, MAX_CANDIDATES]. ``draft_ids`` and ``draft_probs`` point to the draft's
    distribution q. Accepted with probability min(1, p / q), else drawn from max(0, p - q).
    """
    offs = tl.arange(0, MAX_CANDIDATES)
    ids = tl.load(draft_ids + offs)
    probs = tl.load(draft_probs + offs)
    drawn_from = tl.sum(tl.where(token[:, None] == ids[None, :], probs[None, :], 0.0), 1)
    target_of_draft = tl.sum(tl.where(token == draft_token, target, 0.0), 0)
    prob_of_draft = tl.sum(tl.where(ids == draft_token, probs, 0.0), 0)
    residual = tl.maximum(target - drawn_from, 0.0)
    residual = tl.where(tl.sum(residual, 0) > 0, residual, target)  # p = q but for rounding
    before = tl.sum(tl.where(comes_before, residual[None, :], 0.0), 1)
    possible = residual > 0
    is_passed = before + residual <= draw_uniform * tl.sum(residual, 0)
    first = tl.min(tl.where(possible & (is_passed == 0), rank, MAX_CANDIDATES), 0)
    last = tl.max(tl.where(possible, rank, -1), 0)  # sums may round below the uniform
    replacement = tl.sum(tl.where(possible & (rank == tl.minimum(first, last)), token, 0), 0)
    return tl.where(accept_uniform * prob_of_draft < target_of_draft, draft_token, replacement)


@triton.jit
def draw_token(
    max_logit,
    vocab_weight,
    values,
    tokens,
    row_params,
    position,
    num_rows,
    vocabulary,
    draft_token,
    draft_ids,
    draft_probs,
    MAX_CANDIDATES: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    """Sample from a row's candidates. Returns the token and 1, or 0 if the candidates do not determine it.

    With 0 the token returned has no meaning. ``values`` and ``tokens`` [MAX_CANDIDATES]: the candidates'
    logits and ids. ``row_params`` points to the row's column of [NUM_FIELDS, num_rows]. ``vocab_weight``: sum
    over the vocabulary of exp((logit - max_logit) / temperature). With ``HAS_DRAFTS`` and a ``draft_token``
    of 0 or more, by ``accept_or_replace``.

    Each candidate computes its own rank and the weight before it, so no sort is needed. The random number is
    Philox at counter ``position``, keyed by the request's seed: the same whatever else is in the batch.
    """
    temperature = tl.load(row_params).to(tl.float32, bitcast=True)
    top_p = tl.load(row_params + num_rows).to(tl.float32, bitcast=True)
    min_p = tl.load(row_params + 2 * num_rows).to(tl.float32, bitcast=True)
    top_k = tl.load(row_params + 3 * num_rows)
    seed_low = tl.load(row_params + 4 * num_rows).to(tl.uint32, bitcast=True)
    seed_high = tl.load(row_params + 5 * num_rows).to(tl.uint32, bitcast=True)
    zero = tl.full([], 0, tl.uint32)
    word, accept_word, _, _ = philox_impl(
        position.to(tl.uint32, bitcast=True), zero, zero, zero, seed_low, seed_high
    )
    uniform = (word >> 8).to(tl.float32) * (1.0 / (1 << 24))  # as in ``engine/sampling/sampler.py``

    offs = tl.arange(0, MAX_CANDIDATES)
    num_candidates = tl.minimum(MAX_CANDIDATES, vocabulary)
    mask = offs < num_candidates
    logit = tl.load(values + offs, mask=mask, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + offs, mask=mask, other=0, cache_modifier=".cg")
    weight = tl.exp((logit - tl.maximum(max_logit, MIN_FINITE)) / temperature)
    higher = logit[None, :] > logit[:, None]
    earlier = (logit[None, :] == logit[:, None]) & (token[None, :] < token[:, None])
    comes_before = (higher | earlier) & mask[None, :]
    rank = tl.sum(comes_before.to(tl.int32), 1)
    weight_before = tl.sum(tl.where(comes_before, weight[None, :], 0.0), 1)

    is_complete = num_candidates == vocabulary
    in_top_k = mask & ((top_k == 0) | (rank < top_k))
    top_k_weight = tl.sum(tl.where(in_top_k, weight, 0.0), 0)
    top_p_total = tl.where((top_k > 0) | is_complete, top_k_weight, vocab_weight)
    top_p_limit = tl.where(top_p >= 1.0, float("inf"), top_p * top_p_total)
    kept = in_top_k & (weight_before < top_p_limit) & (weight >= min_p) & (weight > 0)
    num_kept = tl.sum(kept.to(tl.int32), 0)
    # Whether no token outside the candidates can be sampled.
    is_bounded = is_complete | (num_kept < num_candidates) | (top_k > 0)
    is_unfiltered = (top_k == 0) & (top_p >= 1.0) & (min_p <= 0.0)
    target = uniform * tl.where(is_bounded, tl.sum(tl.where(kept, weight, 0.0), 0), vocab_weight)
    index = tl.sum((kept & (weight_before + weight <= target)).to(tl.int32), 0)
    is_known = (is_bounded | (is_unfiltered & (index < num_kept))) & (num_kept > 0)
    token_id = tl.sum(tl.where(kept & (rank == tl.minimum(index, num_kept - 1)), token, 0), 0)
    if HAS_DRAFTS:  # noqa: SIM102  (known when it is compiled; the other is not)
        if draft_token >= 0:
            # Of tokens outside the candidates p would have to be known, too.
            is_known = is_bounded & (num_kept > 0)
            kept_weight = tl.where(kept, weight, 0.0)
            accept_uniform = (accept_word >> 8).to(tl.float32) * (1.0 / (1 << 24))
            token_id = accept_or_replace(
                kept_weight / tl.maximum(tl.sum(kept_weight, 0), 1e-30),
                token,
                rank,
                comes_before,
                draft_token,
                draft_ids,
                draft_probs,
                accept_uniform,
                uniform,
                MAX_CANDIDATES,
            )
    return token_id, is_known.to(tl.int32)


@triton.jit
def merge_candidates(
    values,
    tokens,
    vocabulary,
    BLOCK,
    num_parts,
    BLOCK_PARTS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    BITS: tl.constexpr,
):
    """Merge the candidate lists of a row's parts into one, stored after them in ``values`` and ``tokens``.

    Both are [num_parts + 1, MAX_CANDIDATES]. A part has ``BLOCK`` logits, the last one those that are left of
    ``vocabulary``.
    """
    slot = tl.arange(0, BLOCK_PARTS * MAX_CANDIDATES)
    part = slot // MAX_CANDIDATES
    mask = (part < num_parts) & (slot % MAX_CANDIDATES < vocabulary - part * BLOCK)
    value = tl.load(values + slot, mask=mask, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + slot, mask=mask, other=0, cache_modifier=".cg")
    target = num_parts * MAX_CANDIDATES
    store_top_candidates(value, token, mask, values + target, tokens + target, MAX_CANDIDATES, BITS)


@cache_launches
@triton.jit(
    do_not_specialize=["num_rows", "bitmask_words"],
    do_not_specialize_on_alignment=["row_params", "positions", "bitmask", "draft_tokens"],
)
def sample_tokens_kernel(
    logits,
    row_params,
    positions,
    bitmask,
    part_max,
    part_argmax,
    part_weights,
    cand_logits,
    cand_tokens,
    draft_tokens,
    draft_ids,
    draft_probs,
    counters,
    out,
    num_rows,
    vocabulary,
    bitmask_words,
    BITS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Choose each row's next token from ``logits`` [num_rows, vocabulary] into ``out`` [3, num_rows] int64.

    Parameters and results are those of ``draw.sample_tokens``. Grid: (num_rows, NUM_PARTS). One program
    reduces ``BLOCK`` logits, masked by ``bitmask`` (structured output), to their maximum, sum of weights and
    candidates; the last program of a row combines the parts and samples. NaN counts as infinite, which shows
    as invalid. ``counters`` per row are zero before and after.
    """
    pdl_sync(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_parts = row * NUM_PARTS
    row_candidates = row * (NUM_PARTS + 1) * MAX_CANDIDATES  # per row NUM_PARTS lists, then the merged one
    temperature = tl.load(row_params + row).to(tl.float32, bitcast=True)
    token = part * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocabulary
    logit = tl.load(logits + row * vocabulary + token, mask=mask, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("inf"))
    if tl.load(row_params + 6 * num_rows + row) == 1:  # structured output
        allowed = tl.load(bitmask + row * bitmask_words + token // 32, mask=mask, other=0)
        logit = tl.where((allowed >> (token % 32)) & 1 == 1, logit, float("-inf"))
    max_logit = tl.max(logit, 0)
    tl.store(part_max + row_parts + part, max_logit)
    tl.store(part_argmax + row_parts + part, tl.min(tl.where(logit == max_logit, token, vocabulary), 0))
    if temperature > 0:
        finite_max = tl.maximum(max_logit, MIN_FINITE)  # a part may be masked out completely
        tl.store(part_weights + row_parts + part, tl.sum(tl.exp((logit - finite_max) / temperature), 0))
        offs = row_candidates + part * MAX_CANDIDATES
        store_top_candidates(logit, token, mask, cand_logits + offs, cand_tokens + offs, MAX_CANDIDATES, BITS)
    tl.debug_barrier()  # every thread has stored its part before the counter is incremented
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == NUM_PARTS - 1:
        offs_part = tl.arange(0, BLOCK_PARTS)
        part_mask = offs_part < NUM_PARTS
        maxima = tl.load(
            part_max + row_parts + offs_part, mask=part_mask, other=float("-inf"), cache_modifier=".cg"
        )
        argmaxima = tl.load(
            part_argmax + row_parts + offs_part, mask=part_mask, other=0, cache_modifier=".cg"
        )
        max_logit = tl.max(maxima, 0)
        best = tl.min(tl.where((maxima == max_logit) & part_mask, argmaxima, vocabulary), 0)
        drawn = tl.full([], 0, tl.int32)
        if temperature > 0:
            weight = tl.load(
                part_weights + row_parts + offs_part, mask=part_mask, other=0.0, cache_modifier=".cg"
            )
            weight = weight * tl.exp((maxima - tl.maximum(max_logit, MIN_FINITE)) / temperature)
            merge_candidates(
                cand_logits + row_candidates,
                cand_tokens + row_candidates,
                vocabulary,
                BLOCK,
                NUM_PARTS,
                BLOCK_PARTS,
                MAX_CANDIDATES,
                BITS,
            )
            tl.debug_barrier()
            offs = row_candidates + NUM_PARTS * MAX_CANDIDATES
            position = tl.load(positions + row) + 1
            draft_token = tl.full([], -1, tl.int32)
            if HAS_DRAFTS:
                draft_token = tl.load(draft_tokens + row)
            sampled, drawn = draw_token(
                max_logit,
                tl.sum(weight, 0),
                cand_logits + offs,
                cand_tokens + offs,
                row_params + row,
                position,
                num_rows,
                vocabulary,
                draft_token,
                draft_ids + row * MAX_CANDIDATES,
                draft_probs + row * MAX_CANDIDATES,
                MAX_CANDIDATES,
                HAS_DRAFTS,
            )
            best = tl.where(drawn == 1, sampled, best)
        tl.store(out + row, best.to(tl.int64))
        is_valid = (max_logit < float("inf")) & (max_logit > float("-inf"))
        tl.store(out + num_rows + row, is_valid.to(tl.int64))
        tl.store(out + 2 * num_rows + row, drawn.to(tl.int64))
        tl.store(counters + row, 0)
