"""Chooses the next token of each sequence from its logits: carries out ``SamplingParams``.

The order is that of transformers: penalties, temperature, top-k, top-p, min-p, then one draw. It inverts the
cumulative distribution at a point that the seed and the token's position give (``sampler.py``), so a seed
gives the same tokens whatever else is in the batch. Logprobs are those of the model, before any of it. On a
GPU most tokens are chosen by then (``kernels/sampling/draw.py``).

Where an answer has a form (``grammar.py``), what it does not allow is out before all else but penalties.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from vlfit import kernels
from vlfit.api.outputs import TokenLogprob
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.grammar import Constraint
from vlfit.engine.scheduling.sequence import IntVector
from vlfit.kernels.sampling.draw import choose_tokens, may_draw, written

# Chance by number: the seed of a request and the position of a token say at what point it is drawn.
#
# So a token does not depend on who else is in the batch or on what was drawn before; and a GPU can draw the
# next one without being told anything. Knows Philox 4x32 with 10 rounds (Salmon et al., "Parallel random
# numbers: as easy as 1, 2, 3", 2011), as Triton has it. Does not draw (``sampler.py``,
# ``kernels/sampling/draw.py``).


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


TokenText = Callable[[int], str]
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]

_LOOKED_AT = 128  # tokens of a row, where it is drawn from fewer
_PART = 65536  # tokens


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row is drawn by. ``prompt`` and ``generated`` are the tokens that penalties look at;
    ``constraint`` is where the answer's form stands.
    """

    sampling: SamplingParams
    prompt: Sequence[int] | IntVector
    generated: Sequence[int]
    seed: int
    position: int
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: tuple[TokenLogprob, ...] = ()


def sample(
    logits: Tensor,
    tokens: Sequence[int],
    drawn: Sequence[bool] | None,
    draws: Sequence[Draw],
    token_text: TokenText,
) -> list[Sampled]:
    """One token for each row of ``logits`` [n, vocabulary].

    ``tokens`` are the likeliest ones; or, where ``drawn`` says so, as ``draws`` wish and forms allow.
    None: nobody has tried. Who has and could not looked at a row's likeliest tokens only.
    """
    likely = _likely(logits, draws) if drawn is None else {}
    sampled = []
    for number, (row, draw) in enumerate(zip(logits, draws, strict=True)):
        if _is_chosen(tokens[number], draw) or (drawn is not None and drawn[number]):
            sampled.append(Sampled(tokens[number]))
        elif number in likely and (token_id := likely[number].draw(draw)) is not None:
            sampled.append(Sampled(token_id))
        else:
            sampled.append(_sample_row(row.float(), draw, token_text))
    return sampled


def _is_chosen(likeliest: int, draw: Draw) -> bool:
    """Whether the likeliest token of all is the one that is wished for."""
    return is_plain_greedy(draw.sampling) and (draw.constraint is None or draw.constraint.allows(likeliest))


@dataclass(frozen=True, slots=True)
class Likely:
    """The tokens that a row is drawn from, the likeliest first: ``scores`` float32 and ``token_ids``.

    Or those at the head of them, and then ``everything``: what all weigh, the likeliest's weight being 1.
    """

    scores: Floats
    token_ids: IntVector
    everything: float | None = None

    def draw(self, draw: Draw) -> int | None:
        """None where it comes after all that are here, for all that they say."""
        place = _pick(self.scores, draw.sampling, point(draw.seed, draw.position), self.everything)
        return None if place is None else int(self.token_ids[place])


def _likely(logits: Tensor, draws: Sequence[Draw]) -> dict[int, Likely]:
    """The rows that are mostly drawn from a few tokens and nothing else is asked of, all found in one go.

    Sorting a whole vocabulary row by row takes as long as a decode step. Equal scores stand in the order of
    their tokens, as when all are sorted; where more may be equal than were looked at, the row is left out.
    """
    rows = [number for number, draw in enumerate(draws) if draw.constraint is None and _is_cut(draw.sampling)]
    if not rows:
        return {}
    largest, ids = (found.cpu().numpy() for found in _best(logits))
    count = largest.shape[-1]
    found = {}
    for number in rows:
        sampling, row_values, row_ids = draws[number].sampling, largest[number], ids[number]
        scores = row_values / np.float32(sampling.temperature)
        order = np.lexsort((row_ids, -scores))
        scores, token_ids = scores[order], row_ids[order]
        if not sampling.top_k:
            head = count if count == logits.shape[-1] else int((scores > scores[-1]).sum())
            weights = (logits[number].float() / sampling.temperature - float(scores[0])).double().exp()
            found[number] = Likely(scores[:head], token_ids[:head], float(weights.sum()))
        elif count == logits.shape[-1] or scores[-1] < scores[sampling.top_k - 1]:
            found[number] = Likely(scores[: sampling.top_k], token_ids[: sampling.top_k])
    return found


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The ``_LOOKED_AT`` largest of each row of ``logits``, and which they are.

    A part of the vocabulary at a time: torch sorts rows of 100,000 and more whole.
    """
    parts = logits.split(_PART, dim=-1)
    found = [part.topk(min(_LOOKED_AT, part.shape[-1]), dim=-1) for part in parts]
    values = torch.cat([each.values for each in found], dim=-1)
    ids = torch.cat([each.indices + number * _PART for number, each in enumerate(found)], dim=-1)
    largest = values.topk(min(_LOOKED_AT, values.shape[-1]), dim=-1)
    return largest.values.float(), ids.gather(-1, largest.indices)


def _is_cut(sampling: SamplingParams) -> bool:
    return (
        not sampling.greedy
        and sampling.top_k < _LOOKED_AT
        and sampling.top_logprobs is None
        and not sampling.penalizes
    )


def is_plain_greedy(sampling: SamplingParams) -> bool:
    """Whether each token is the likeliest one, and nothing else is asked of its row."""
    return sampling.greedy and sampling.top_logprobs is None and not sampling.penalizes


def _sample_row(row: Tensor, draw: Draw, token_text: TokenText) -> Sampled:
    sampling = draw.sampling
    adjusted = _penalize(row, draw) if sampling.penalizes else row
    if draw.constraint is not None:
        allowed = torch.from_numpy(draw.constraint.allowed(len(row)))
        adjusted = adjusted.where(allowed.to(row.device), float("-inf"))
    if sampling.greedy:
        token_id = int(adjusted.argmax())
    else:
        drawn, at = _drawn_where_it_is(adjusted, draw), point(draw.seed, draw.position)
        token_id = _draw(adjusted / sampling.temperature, sampling, at) if drawn is None else drawn
    return Sampled(token_id, _logprobs(row, token_id, sampling.top_logprobs, token_text))


def _drawn_where_it_is(row: Tensor, draw: Draw) -> int | None:
    """What a GPU draws from ``row``, which is sorted whole otherwise; None where it does not know."""
    if not kernels.used_on(row.device) or not may_draw(draw.sampling):
        return None
    words = np.append(written(draw.sampling, draw.seed), np.int32(draw.position - 1))
    asked = torch.from_numpy(words).to(row.device)
    (token_id,), _, (drawn,) = choose_tokens(row[None], asked[:-1, None], asked[-1:]).tolist()
    return int(token_id) if drawn else None


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


def _draw(scores: Tensor, sampling: SamplingParams, at: float) -> int:
    order = scores.argsort(descending=True, stable=True)
    if sampling.top_k:
        order = order[: sampling.top_k]
    return int(order[_pick(scores[order].cpu().numpy(), sampling, at)])


@overload
def _pick(scores: Floats, sampling: SamplingParams, at: float) -> int: ...


@overload
def _pick(scores: Floats, sampling: SamplingParams, at: float, everything: float | None) -> int | None: ...


def _pick(scores: Floats, sampling: SamplingParams, at: float, everything: float | None = None) -> int | None:
    """Which of ``scores``, the largest first, is drawn ``at`` a point from 0 to below 1.

    ``everything``: what these and others behind them weigh; None: there are no others. Gives None where one
    of the others may be it.
    """
    with np.errstate(
        invalid="ignore"
    ):  # a row that holds no numbers is found and told by ``step_executor.py``
        weights = np.exp((scores - scores[:1]).astype(np.float64))
        probabilities = weights / (weights.sum() if everything is None else everything)
    if sampling.top_p < 1.0:
        # Keep the smallest set that reaches top_p: a token stays while those before it have not.
        before = probabilities.cumsum() - probabilities
        probabilities = probabilities[before < sampling.top_p]
    if sampling.min_p > 0.0:
        probabilities = probabilities[probabilities >= sampling.min_p * probabilities[:1]]
    cumulative = probabilities.cumsum()
    if everything is None or len(probabilities) < len(scores):
        return min(int((cumulative <= at * cumulative[-1]).sum()), len(probabilities) - 1)
    if sampling.top_p < 1.0 or sampling.min_p > 0.0:
        return None  # how much of the others is kept, nobody knows
    passed = int((cumulative <= at).sum())
    return passed if passed < len(probabilities) else None


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


# What a forward pass says of the next tokens: logits, and what of them every request wants to know.
#
# Knows: what is computed on the device, so that one trip to the host brings it all. Does not draw
# (``sampler.py``, ``kernels/sampling/draw.py``).


@dataclass(frozen=True, slots=True)
class Scores:
    """``logits`` [n, vocabulary] in the dtype of the computation; ``summary`` [2 or 3, n] int64: each row's
    token, which is the most likely one if none was drawn; 1 if its logits are numbers, else 0; and 1 if it
    was drawn as it was asked for, else 0, where the device was asked.

    ``ready``: what the host waits for before ``summary``, on its way to RAM, may be read; None: nothing.
    """

    logits: Tensor
    summary: Tensor
    ready: torch.cuda.Event | None = None

    def read(self) -> tuple[list[int], list[bool], list[bool] | None]:
        """Each row's token, whether its logits are usable, and whether it was drawn. Waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, usable, *drawn = self.summary.tolist()
        return tokens, [bool(each) for each in usable], [bool(each) for each in drawn[0]] if drawn else None


def scores_of(
    logits: Tensor,
    asked: Tensor | None = None,
    positions: Tensor | None = None,
    forms: Tensor | None = None,
) -> Scores:
    """The summary of ``logits`` [n, vocabulary], computed where they are.

    A GPU draws as it is ``asked`` to, for rows of tokens at ``positions``, of what ``forms`` allow
    (``kernels/sampling/draw.py``).
    """
    if kernels.used_on(logits.device):
        return Scores(logits, choose_tokens(logits, asked, positions, forms))
    largest, best = logits.max(-1)
    return Scores(logits, torch.stack((best, largest.isfinite().long())))
