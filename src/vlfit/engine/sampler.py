"""Chooses the next token of each sequence from its logits: carries out ``SamplingParams``.

The order is that of transformers: penalties, temperature, top-k, top-p, min-p, then one draw. It inverts the
cumulative distribution at a number from the sequence's own generator, so a seed gives the same tokens
whatever else is in the batch. Logprobs are those of the model, before any of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlfit.engine.answer import TokenLogprob
from vlfit.engine.sampling import SamplingParams
from vlfit.engine.sequence import IntVector

TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row is drawn by. ``prompt`` and ``generated`` are the tokens that penalties look at."""

    sampling: SamplingParams
    prompt: Sequence[int] | IntVector
    generated: Sequence[int]
    generator: torch.Generator | None


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: tuple[TokenLogprob, ...] = ()


def sample(
    logits: Tensor, best: Sequence[int], draws: Sequence[Draw], token_text: TokenText
) -> list[Sampled]:
    """One token for each row of ``logits`` [n, vocabulary] float32, of which ``best`` are the likeliest."""
    return [
        Sampled(likeliest) if _is_plain_greedy(draw.sampling) else _sample_row(row, draw, token_text)
        for row, likeliest, draw in zip(logits, best, draws, strict=True)
    ]


def _is_plain_greedy(sampling: SamplingParams) -> bool:
    return sampling.greedy and sampling.top_logprobs is None and not _has_penalties(sampling)


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _sample_row(row: Tensor, draw: Draw, token_text: TokenText) -> Sampled:
    sampling = draw.sampling
    adjusted = _penalize(row, draw) if _has_penalties(sampling) else row
    if sampling.greedy:
        token_id = int(adjusted.argmax())
    else:
        token_id = _draw(adjusted / sampling.temperature, sampling, draw.generator)
    return Sampled(token_id, _logprobs(row, token_id, sampling.top_logprobs, token_text))


def _penalize(row: Tensor, draw: Draw) -> Tensor:
    """Repetition counts prompt and completion (as transformers); presence and frequency the completion."""
    sampling = draw.sampling
    row = row.clone()
    if sampling.repetition_penalty != 1.0:
        tokens = np.concatenate((draw.prompt, draw.generated)).astype(np.int64)
        seen = torch.from_numpy(tokens).to(row.device).unique()
        scores = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if draw.generated:
        tokens, counts = torch.tensor(draw.generated, device=row.device).unique(return_counts=True)
        row[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts.float()
    return row


def _draw(scores: Tensor, sampling: SamplingParams, generator: torch.Generator | None) -> int:
    order = scores.argsort(descending=True, stable=True)
    if sampling.top_k:
        order = order[: sampling.top_k]
    probabilities = torch.softmax(scores[order], dim=-1)
    if sampling.top_p < 1.0:
        # Keep the smallest set that reaches top_p: a token stays while those before it have not.
        before = probabilities.cumsum(-1) - probabilities
        kept = int((before < sampling.top_p).sum())
        probabilities = probabilities[:kept]
    if sampling.min_p > 0.0:
        kept = int((probabilities >= sampling.min_p * probabilities[0]).sum())
        probabilities = probabilities[:kept]
    cumulative = probabilities.double().cumsum(-1)
    point = torch.rand((), generator=generator, dtype=torch.float64).item() * cumulative[-1].item()
    index = int((cumulative <= point).sum())
    return int(order[min(index, len(probabilities) - 1)])


def _logprobs(row: Tensor, token_id: int, top: int | None, token_text: TokenText) -> tuple[TokenLogprob, ...]:
    if top is None:
        return ()
    log_probabilities = torch.log_softmax(row, dim=-1)
    values, ids = log_probabilities.topk(top) if top else (row[:0], row[:0].long())
    best = tuple(
        TokenLogprob(token_text(other), other, value)
        for other, value in zip(ids.tolist(), values.tolist(), strict=True)
    )
    chosen = float(log_probabilities[token_id])
    return (TokenLogprob(token_text(token_id), token_id, chosen, best),)
