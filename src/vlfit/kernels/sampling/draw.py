"""Sampling on the GPU, where the logits are: greedy, or by temperature, top-k, top-p and min-p.

A row is sampled from its ``MAX_CANDIDATES`` most likely tokens. In the rare case that these do not determine
the token, and for all other sampling parameters, the host samples (``engine/sampling/sampler.py``, the
reference).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlfit.api.sampling_params import SamplingParams
from vlfit.kernels.launch import next_power_of_2, pdl_options, tile_counters
from vlfit.kernels.target import launches_on
from vlfit.plan.native.cost import LOGITS_PER_PROGRAM, MAX_CANDIDATES

NUM_FIELDS = 7  # int32 words of a row's packed sampling parameters
GRAMMAR_FIELD = 6  # index of the field that is 1 if the row has a grammar

PackedParams = np.ndarray[tuple[int], np.dtype[np.int32]]


def samples_on_gpu(sampling: SamplingParams) -> bool:
    """Whether the kernel alone can sample with these parameters: temperature, top-k, top-p and min-p.

    False for greedy, a top-k above ``MAX_CANDIDATES``, penalties and logprobs.
    """
    return can_sample_on_gpu(sampling) and sampling.top_logprobs is None and not sampling.has_penalties


def always_samples_on_gpu(sampling: SamplingParams) -> bool:
    """Whether the kernel always finds the token, so that the host never has to sample it again.

    True for ``samples_on_gpu`` with a top-k; without one, the candidates may not determine the token.
    """
    return samples_on_gpu(sampling) and sampling.top_k > 0


def can_sample_on_gpu(sampling: SamplingParams) -> bool:
    """Whether the kernel can sample with these parameters after the host has applied penalties.

    False for greedy, and for a top-k above ``MAX_CANDIDATES``.
    """
    return not sampling.greedy and sampling.top_k <= MAX_CANDIDATES


def pack_params_or_greedy(sampling: SamplingParams, seed: int) -> PackedParams:
    """``pack_params`` if ``samples_on_gpu``, else zeros, for which the kernel takes the likeliest token."""
    return pack_params(sampling, seed) if samples_on_gpu(sampling) else np.zeros(NUM_FIELDS, dtype=np.int32)


def pack_params(sampling: SamplingParams, seed: int) -> PackedParams:
    """Sampling parameters of a row as the kernel reads them, [NUM_FIELDS] int32.

    Temperature, top-p and min-p as the bits of float32, top-k (0: off), the low and high 32 bits of
    ``seed``, and 0: no grammar. The caller sets ``GRAMMAR_FIELD`` for a row that has one.
    """
    floats = np.array((sampling.temperature, sampling.top_p, sampling.min_p), dtype=np.float32)
    seed_words = np.array((seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), dtype=np.uint32)
    top_k = np.array([sampling.top_k], dtype=np.int32)
    return np.concatenate((floats.view(np.int32), top_k, seed_words.view(np.int32), np.zeros(1, np.int32)))


@dataclass(frozen=True, slots=True)
class DrawnDrafts:
    """Draft tokens to accept or to replace by rejection sampling, and what they were drawn from.

    ``draft_tokens`` [rows] int32: the token that was drafted for a row's result; -1: none. ``token_ids`` and
    ``probabilities`` [rows, MAX_CANDIDATES] int32 and float32: its distribution; unused places have the
    probability 0.
    """

    draft_tokens: Tensor
    token_ids: Tensor
    probabilities: Tensor


def sample_tokens(
    logits: Tensor,
    params: Tensor | None = None,
    positions: Tensor | None = None,
    bitmask: Tensor | None = None,
    *,
    drafts: DrawnDrafts | None = None,
) -> Tensor:
    """Choose the next tokens from ``logits`` [rows, vocabulary]. Returns [3, rows] int64.

    Result row 0: the token. Row 1: 1 if the logits are valid (no NaN, a finite maximum), else 0. Row 2: 1 if
    the token was sampled; if 0, it is the most likely one, the first of equals (greedy, or the candidates do
    not determine the sampled token).

    ``params`` [NUM_FIELDS, rows] int32 (``pack_params``) and ``positions`` [rows] int32, the position of each
    row's last token, which with the seed determine the random number; if either is None, all rows are greedy
    and have no grammar. ``bitmask`` [rows, words] int32 has a bit for each token, lowest first: the tokens
    that a row with a grammar may take, to which its results are limited; None: no row has one. ``drafts``:
    for rows that are not greedy; one that is accepted is the row's token.
    """
    rows, vocabulary = logits.shape
    num_parts = -(-vocabulary // LOGITS_PER_PROGRAM)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    out = empty(3, rows, dtype=torch.int64)
    part_max, part_weights = (empty(rows, num_parts, dtype=torch.float32) for _ in range(2))
    part_argmax = empty(rows, num_parts)
    candidates_shape = rows, num_parts + 1, MAX_CANDIDATES
    cand_logits, cand_tokens = empty(*candidates_shape, dtype=torch.float32), empty(*candidates_shape)
    if params is None or positions is None:
        params = torch.zeros((NUM_FIELDS + 1, rows), dtype=torch.int32, device=logits.device)
        positions = params[NUM_FIELDS]
    if bitmask is None:
        bitmask = params  # a valid pointer, not read
    if launches_on(logits.device) and rows:
        from vlfit.kernels.sampling.draw_kernels import sample_tokens_kernel

        sample_tokens_kernel[(rows, num_parts)](
            logits,
            params,
            positions,
            bitmask,
            part_max,
            part_argmax,
            part_weights,
            cand_logits,
            cand_tokens,
            # Without drafts valid pointers, not read.
            params if drafts is None else drafts.draft_tokens,
            cand_tokens if drafts is None else drafts.token_ids,
            cand_logits if drafts is None else drafts.probabilities,
            tile_counters(logits.device),
            out,
            rows,
            vocabulary,
            bitmask.shape[1],
            BITS=16 if logits.dtype == torch.bfloat16 else 32,  # significant bits of the dtype
            NUM_PARTS=num_parts,
            BLOCK=LOGITS_PER_PROGRAM,
            BLOCK_PARTS=next_power_of_2(num_parts),
            MAX_CANDIDATES=MAX_CANDIDATES,
            HAS_DRAFTS=drafts is not None,
            num_warps=8,
            **pdl_options(logits.device),
        )
    return out
