"""Verification of draft tokens (speculative decoding), with the distribution of answers without drafts.

Of a draft without probabilities, as prompt lookup makes it, each row's token is sampled as ever: with its own
position's random number. The draft token is accepted if it is that token. So sampled answers follow the same
distribution, and are even the same for a seed, with and without drafts.

Of a draft that was itself drawn from probabilities q, a token d is accepted with probability
min(1, p(d) / q(d)), and else replaced by a draw from max(0, p - q): rejection sampling (Leviathan et al.,
"Fast inference from transformers via speculative decoding", 2023). The distribution is p again, and more is
accepted, but the tokens would depend on where there were drafts, and so on company. Requests with a seed of
their own are therefore verified as above, whatever q was.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.sampler import (
    ACCEPT_WORD,
    DRAFT_WORD,
    DRAW_WORD,
    Doubles,
    SampledToken,
    SamplingRow,
    TokenText,
    likeliest_distribution,
    philox_uniform,
    sample_on_host,
    token_distribution,
)
from vlfit.engine.scheduling.sequence import Draft, DraftProbabilities, IntMatrix, IntVector, ScheduledChunk
from vlfit.kernels.sampling.draw import DrawnDrafts
from vlfit.plan.native.cost import MAX_CANDIDATES

Rows = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def verify_draft(
    logits: Tensor,
    tokens: Sequence[int],
    is_finite: Sequence[bool],
    sampled_on_device: Sequence[bool] | None,
    first_row: SamplingRow,
    draft: Draft,
    token_text: TokenText,
) -> list[SampledToken]:
    """The next tokens of one sequence: the accepted tokens of ``draft``, and the model's own after them.

    ``logits`` [drafts + 1, vocabulary]: after the newest token, then after each draft token; ``is_finite``,
    ``tokens`` and ``sampled_on_device``: of each row, as for ``sample_on_host``; what the device sampled is
    taken as it is: it had ``drawn_drafts``. ``first_row``: how to sample the first; the next ones count the
    draft tokens before them as generated. Its grammar applies to the first row alone. Ends before the first
    row without finite logits: [] if that is row 0. Raises as ``sample_on_host``.
    """
    rejects = _uses_rejection(first_row.params, draft.probabilities)
    sampled: list[SampledToken] = []
    for number in range(len(draft.token_ids) + 1):
        if not is_finite[number]:
            break
        row = _row_after(first_row, draft.token_ids[:number])
        on_device = sampled_on_device[number] if sampled_on_device is not None else False
        if rejects and not on_device and number < len(draft.token_ids):
            token = SampledToken(_accept_or_replace(logits[number], row, draft, number))
        else:
            here = slice(number, number + 1)
            known = None if sampled_on_device is None else [on_device]
            (token,) = sample_on_host(logits[here], tokens[here], known, [row], token_text)
        sampled.append(token)
        if draft.token_ids[number : number + 1] != (token.token_id,):
            break
    return sampled


def draw_draft(logits: Tensor, row: SamplingRow) -> tuple[int, tuple[Tensor, Tensor] | None]:
    """A token drafted from a draft model's ``logits`` [vocabulary], for the place that ``row`` samples.

    Also the tokens that it was drawn from with their probabilities, each [n], as ``DraftProbabilities`` has
    them; None if it is the likeliest one, as for a greedy request, or drawn with the random number that
    draws the token itself, as for a request with a seed.
    """
    if row.params.greedy:
        return int(token_distribution(logits, row).token_ids[0]), None
    if not bool(logits.isfinite().all()):
        return 0, None  # a draft like any other: the text model decides
    found, share = likeliest_distribution(logits, row, MAX_CANDIDATES)
    cumulative = found.probabilities.cumsum()
    if row.params.seed is not None:
        uniform = philox_uniform(row.seed, row.position, DRAW_WORD) / share
        index = int((cumulative <= uniform).sum())
        return int(found.token_ids[index if index < len(cumulative) else 0]), None
    uniform = philox_uniform(row.seed, row.position, DRAFT_WORD) * cumulative[-1]
    index = min(int((cumulative <= uniform).sum()), len(cumulative) - 1)
    return int(found.token_ids[index]), (
        torch.from_numpy(found.token_ids),
        torch.from_numpy(found.probabilities),
    )


def drawn_drafts(batch: Sequence[ScheduledChunk], rows: int, device: torch.device) -> DrawnDrafts | None:
    """Draft tokens of ``batch`` for rejection sampling on ``device``.

    For ``rows`` rows of logits, the first of which are those of the batch, whose chunks are all sampled. None
    if no draft was drawn, or only for requests that have a seed or are greedy.
    """
    if not any(_uses_rejection(chunk.sequence.params, chunk.draft_probabilities) for chunk in batch):
        return None
    tokens = torch.full((rows,), -1, dtype=torch.int32)
    token_ids = torch.zeros((rows, MAX_CANDIDATES), dtype=torch.int32, device=device)
    probabilities = torch.zeros((rows, MAX_CANDIDATES), dtype=torch.float32, device=device)
    begin = 0
    for chunk in batch:
        drawn_from, count = chunk.draft_probabilities, len(chunk.draft_tokens)
        if drawn_from is not None and _uses_rejection(chunk.sequence.params, drawn_from):
            here, width = slice(begin, begin + count), drawn_from.token_ids.shape[1]
            tokens[here] = torch.tensor(chunk.draft_tokens, dtype=torch.int32)
            token_ids[here, :width].copy_(drawn_from.token_ids[:count], non_blocking=True)
            probabilities[here, :width].copy_(drawn_from.probabilities[:count], non_blocking=True)
        begin += 1 + count
    return DrawnDrafts(tokens.to(device, non_blocking=True), token_ids, probabilities)


def _uses_rejection(params: SamplingParams, probabilities: DraftProbabilities | None) -> bool:
    return probabilities is not None and not params.greedy and params.seed is None


def _row_after(first: SamplingRow, draft_tokens: tuple[int, ...]) -> SamplingRow:
    if not draft_tokens:
        return first
    position = first.position + len(draft_tokens)
    # Without penalties nothing reads the tokens, and a list of a long answer is not copied for each row.
    generated = [*first.generated, *draft_tokens] if first.params.has_penalties else first.generated
    return replace(first, generated=generated, position=position, grammar_matcher=None)


def _accept_or_replace(logits: Tensor, row: SamplingRow, draft: Draft, number: int) -> int:
    """The token of one row by rejection sampling, with the random numbers of the row's position."""
    assert draft.probabilities is not None
    draft_token = draft.token_ids[number]
    target = token_distribution(logits, row)
    drawn_from = _probabilities_of(
        np.append(target.token_ids, draft_token), *_distribution(draft.probabilities, number)
    )
    token_ids, _ = reject(
        target.token_ids[None],
        target.probabilities[None],
        drawn_from[None, :-1],
        np.array([draft_token]),
        drawn_from[-1:],
        np.array([philox_uniform(row.seed, row.position, ACCEPT_WORD)]),
        np.array([philox_uniform(row.seed, row.position)]),
    )
    return int(token_ids[0])


def reject(
    token_ids: IntMatrix,
    target: Rows,
    drawn_from: Rows,
    draft_tokens: IntVector,
    draft_probabilities: Doubles,
    accept_uniforms: Doubles,
    draw_uniforms: Doubles,
) -> tuple[IntVector, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Rejection sampling of a draft token per row. Returns the rows' tokens, and which drafts were accepted.

    ``token_ids`` [rows, n]: tokens that may be drawn, ``target`` [rows, n] their probabilities p, and
    ``drawn_from`` [rows, n] those that the draft had for them, q. ``draft_tokens`` [rows] with their
    ``draft_probabilities`` q(d). The uniforms [rows] in [0, 1) must be independent of each other and of the
    one that drew the draft token. The tokens are distributed as p.
    """
    of_draft = np.where(token_ids == draft_tokens[:, None], target, 0.0).sum(1)
    accepted = accept_uniforms * draft_probabilities < of_draft
    residual = np.maximum(target - drawn_from, 0.0)
    # p = q but for rounding, and rejected by it: p is as good.
    residual = np.where(residual.sum(1, keepdims=True) > 0.0, residual, target)
    cumulative = residual.cumsum(1)
    passed = (cumulative <= draw_uniforms[:, None] * cumulative[:, -1:]).sum(1)
    replacement = token_ids[np.arange(len(token_ids)), np.minimum(passed, token_ids.shape[1] - 1)]
    return np.where(accepted, draft_tokens, replacement), accepted


def _distribution(probabilities: DraftProbabilities, number: int) -> tuple[IntVector, Doubles]:
    token_ids = probabilities.token_ids[number].cpu().numpy()
    return token_ids, probabilities.probabilities[number].double().cpu().numpy()


def _probabilities_of(wanted: IntVector, token_ids: IntVector, probabilities: Doubles) -> Doubles:
    """The probability of each of ``wanted``; 0 for tokens that ``token_ids``, in any order, does not have."""
    order = np.argsort(token_ids, kind="stable")
    at = np.minimum(np.searchsorted(token_ids[order], wanted), len(token_ids) - 1)
    return np.where(token_ids[order][at] == wanted, probabilities[order][at], 0.0)
