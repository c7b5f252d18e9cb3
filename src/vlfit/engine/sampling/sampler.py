"""Sampling by ``SamplingParams`` on the host, for rows of logits whose token the device has not chosen.

The order is that of transformers: grammar mask and penalties, temperature, top-k, top-p, min-p, then one
draw. The draw inverts the cumulative distribution at a Philox uniform of seed and token position, so a seed
gives the same tokens whatever else is in the batch. Logprobs are the model's own, before any of it. On a GPU
most tokens are chosen already (``kernels/sampling/draw.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from vlfit import kernels
from vlfit.api.outputs import TokenLogprob
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.grammar import GrammarMatcher
from vlfit.engine.scheduling.sequence import IntVector
from vlfit.kernels.sampling.draw import DrawnDrafts, can_sample_on_gpu, pack_params, sample_tokens

_MASK_32 = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEYS = 0x9E3779B9, 0xBB67AE85  # added to the halves of the seed in each round
_ROUNDS = 10
BITS = 24  # of a uniform: as many as float32 holds exactly

# What each random number of a position is for: drawing its token, accepting a draft token that was drawn
# from another distribution (``verification.py``), and drawing that draft token.
DRAW_WORD, ACCEPT_WORD, DRAFT_WORD = 0, 1, 2


def philox_uniform(seed: int, position: int, word: int = 0) -> float:
    """A random number in [0, 1), in steps of 2^-24, that depends only on ``seed``, ``position`` and ``word``.

    ``seed`` has 64 bits, ``position`` 32. ``word``: which of the four independent numbers of a position, 0 to
    3: ``DRAW_WORD``, ``ACCEPT_WORD`` or ``DRAFT_WORD``. Philox 4x32 with 10 rounds (Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3", 2011), as in Triton.
    """
    first, second, third, fourth = position & _MASK_32, 0, 0, 0
    low, high = seed & _MASK_32, seed >> 32 & _MASK_32
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIERS[0] * first, _MULTIPLIERS[1] * third
        first, second = product_1 >> 32 ^ second ^ low, product_1 & _MASK_32
        third, fourth = product_0 >> 32 ^ fourth ^ high, product_0 & _MASK_32
        low, high = low + _KEYS[0] & _MASK_32, high + _KEYS[1] & _MASK_32
    return ((first, second, third, fourth)[word] >> 32 - BITS) / (1 << BITS)


TokenText = Callable[[int], str]
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Doubles = np.ndarray[tuple[int], np.dtype[np.float64]]

_NUM_CANDIDATES = 128  # likeliest tokens of a row that are considered
_TOPK_CHUNK = 65536  # tokens


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to sample one row of logits.

    ``prompt`` and ``generated``: token ids, for penalties. ``seed`` (64 bits) and ``position``, the M-RoPE
    position of the token to sample, determine the random number (``philox_uniform``). ``grammar_matcher``:
    allows only some tokens; None: all are allowed.
    """

    params: SamplingParams
    prompt: Sequence[int] | IntVector
    generated: Sequence[int]
    seed: int
    position: int
    grammar_matcher: GrammarMatcher | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of an answer. ``logprobs``: one entry if the request has ``top_logprobs``, else ()."""

    token_id: int
    logprobs: tuple[TokenLogprob, ...] = ()


def sample_on_host(
    logits: Tensor,
    tokens: Sequence[int],
    sampled_on_device: Sequence[bool] | None,
    rows: Sequence[SamplingRow],
    token_text: TokenText,
) -> list[SampledToken]:
    """The next token for each row of ``logits`` [n, vocabulary], sampled on the host where necessary.

    ``tokens``: the device's choice for each row. ``sampled_on_device``: whether that was sampled by the row's
    parameters; otherwise it is the greedy token (None: in all rows). The device's choice is returned if it
    was sampled, or if greedy sampling without penalties and logprobs is requested and the row's grammar
    allows it; for other rows a token is sampled here. Raises ``InvalidRequest`` if a grammar allows no token.
    """
    candidates = _find_candidates(logits, rows) if sampled_on_device is None else {}
    sampled = []
    for number, (row_logits, row) in enumerate(zip(logits, rows, strict=True)):
        if _is_final(tokens[number], row) or (sampled_on_device is not None and sampled_on_device[number]):
            sampled.append(SampledToken(tokens[number]))
        elif number in candidates and (token_id := candidates[number].draw(row)) is not None:
            sampled.append(SampledToken(token_id))
        else:
            sampled.append(_sample_row(row_logits.float(), row, token_text))
    return sampled


def _is_final(greedy_token: int, row: SamplingRow) -> bool:
    """Whether the greedy token is the one to return."""
    return is_plain_greedy(row.params) and (
        row.grammar_matcher is None or row.grammar_matcher.allows(greedy_token)
    )


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of a row of logits, likeliest first.

    ``scores``: logits / temperature, float32. ``total_weight``: sum of exp(score - best score) over the whole
    vocabulary; None if no token but the candidates may be drawn.
    """

    scores: Floats
    token_ids: IntVector
    total_weight: float | None = None

    def draw(self, row: SamplingRow) -> int | None:
        """Draw a token id as ``row`` says; None if the drawn token may not be among the candidates."""
        index = _pick(self.scores, row.params, philox_uniform(row.seed, row.position), self.total_weight)
        return None if index is None else int(self.token_ids[index])

    def distribution(self, params: SamplingParams) -> "TokenDistribution | None":
        """What ``draw`` draws from; None if ``params`` also allow tokens that are not candidates."""
        kept = _kept_probabilities(self.scores, params, self.total_weight)
        if self.total_weight is not None and len(kept) == len(self.scores):
            return None
        return TokenDistribution(self.token_ids[: len(kept)], kept / kept.sum())


@dataclass(frozen=True, slots=True)
class TokenDistribution:
    """The tokens that may be drawn, ``token_ids`` [n], likeliest first, and their ``probabilities`` [n].

    The probabilities sum to 1.
    """

    token_ids: IntVector
    probabilities: Doubles


def token_distribution(logits: Tensor, row: SamplingRow) -> TokenDistribution:
    """The distribution that ``sample_on_host`` draws from for ``row``, with ``logits`` [vocabulary] finite.

    After penalties, temperature, top-k, top-p and min-p. ``row`` has no grammar; greedy: its token alone.
    """
    params = row.params
    scores = _penalize(logits.float(), row) if params.has_penalties else logits.float()
    if params.greedy:
        return TokenDistribution(np.array([int(scores.argmax())]), np.ones(1))
    candidates = _few_candidates(scores, params)
    if candidates is not None and (found := candidates.distribution(params)) is not None:
        return found
    scores, order = _sorted(scores / params.temperature, params)
    kept = _kept_probabilities(scores.cpu().numpy(), params)
    return TokenDistribution(order[: len(kept)].cpu().numpy(), kept / kept.sum())


def likeliest_distribution(logits: Tensor, row: SamplingRow, count: int) -> tuple[TokenDistribution, float]:
    """``token_distribution`` cut off after the ``count`` likeliest tokens, without ever sorting all.

    Also returns the share of all that may be drawn which these have. ``row`` is not greedy.
    """
    params = row.params
    scores = _penalize(logits.float(), row) if params.has_penalties else logits.float()
    largest, ids = (part[0].cpu().numpy() for part in _top_candidates(scores[None]))
    order = np.lexsort((ids, -largest))
    values: Floats = (largest[order] / np.float32(params.temperature)).astype(np.float32)
    total: float | None = None
    if params.top_k:
        values = values[: params.top_k]
    elif len(values) < scores.shape[-1]:
        total = float((scores / params.temperature - float(values[0])).double().exp().sum())
    kept = _kept_probabilities(values, params, total)
    share = float(kept.sum()) if total is not None and len(kept) == len(values) else 1.0
    first = kept[:count]
    share *= float(first.sum() / kept.sum())
    return TokenDistribution(ids[order][: len(first)], first / first.sum()), share


def _find_candidates(logits: Tensor, sampling_rows: Sequence[SamplingRow]) -> dict[int, Candidates]:
    """Candidates of the rows that need few tokens and nothing else, found in one go.

    Sorting a whole vocabulary row by row takes as long as a decode step. Equal scores are in token order, as
    in a full sort; a row is left out if more tokens may be equal than were considered.
    """
    needing_few = {
        number: row.params
        for number, row in enumerate(sampling_rows)
        if row.grammar_matcher is None and not row.params.has_penalties and _needs_few_candidates(row.params)
    }
    return _candidates_of(logits, needing_few)


def _candidates_of(logits: Tensor, params_of: Mapping[int, SamplingParams]) -> dict[int, Candidates]:
    """Candidates of those rows of ``logits`` that ``params_of`` has; these are final but for temperature."""
    if not params_of:
        return {}
    largest, ids = (part.cpu().numpy() for part in _top_candidates(logits))
    count = largest.shape[-1]
    candidates = {}
    for number, params in params_of.items():
        row_values, row_ids = largest[number], ids[number]
        scores = row_values / np.float32(params.temperature)
        order = np.lexsort((row_ids, -scores))
        scores, token_ids = scores[order], row_ids[order]
        if not params.top_k:
            num_certain = count if count == logits.shape[-1] else int((scores > scores[-1]).sum())
            weights = (logits[number].float() / params.temperature - float(scores[0])).double().exp()
            candidates[number] = Candidates(
                scores[:num_certain], token_ids[:num_certain], float(weights.sum())
            )
        elif count == logits.shape[-1] or scores[-1] < scores[params.top_k - 1]:
            candidates[number] = Candidates(scores[: params.top_k], token_ids[: params.top_k])
    return candidates


def _top_candidates(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Values and ids of the ``_NUM_CANDIDATES`` largest of each row of ``logits``.

    In chunks of the vocabulary: torch sorts rows of 100,000 and more entirely.
    """
    chunks = logits.split(_TOPK_CHUNK, dim=-1)
    top = [part.topk(min(_NUM_CANDIDATES, part.shape[-1]), dim=-1) for part in chunks]
    values = torch.cat([part.values for part in top], dim=-1)
    ids = torch.cat([part.indices + number * _TOPK_CHUNK for number, part in enumerate(top)], dim=-1)
    largest = values.topk(min(_NUM_CANDIDATES, values.shape[-1]), dim=-1)
    return largest.values.float(), ids.gather(-1, largest.indices)


def _needs_few_candidates(params: SamplingParams) -> bool:
    return not params.greedy and params.top_k < _NUM_CANDIDATES and params.top_logprobs is None


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the token is the argmax of the logits and nothing else is needed: no logprobs or penalties.

    Does not consider grammars.
    """
    return params.greedy and params.top_logprobs is None and not params.has_penalties


def _sample_row(row: Tensor, sampling_row: SamplingRow, token_text: TokenText) -> SampledToken:
    params = sampling_row.params
    scores = _penalize(row, sampling_row) if params.has_penalties else row
    if sampling_row.grammar_matcher is not None:
        allowed = torch.from_numpy(sampling_row.grammar_matcher.allowed_tokens(len(row)))
        scores = scores.where(allowed.to(row.device), float("-inf"))
    token_id = int(scores.argmax()) if params.greedy else _draw(scores, sampling_row)
    return SampledToken(token_id, _logprobs(row, token_id, params.top_logprobs, token_text))


def _draw(scores: Tensor, row: SamplingRow) -> int:
    """Draw a token by ``scores`` [vocabulary], which have penalties and grammar applied."""
    params = row.params
    token = _sample_on_gpu(scores, row)
    if token is None and (candidates := _few_candidates(scores, params)) is not None:
        token = candidates.draw(row)
    if token is None:  # may be any of the vocabulary
        token = _draw_sorted(scores / params.temperature, params, philox_uniform(row.seed, row.position))
    return token


def _few_candidates(scores: Tensor, params: SamplingParams) -> Candidates | None:
    """Candidates of ``scores`` [vocabulary], which have penalties and grammar applied, if ``params`` need
    few.
    """
    return _candidates_of(scores[None], {0: params}).get(0) if _needs_few_candidates(params) else None


def _sample_on_gpu(row: Tensor, sampling_row: SamplingRow) -> int | None:
    """Token that the GPU samples from ``row`` without a full sort; None if it cannot decide."""
    if not kernels.enabled_for("sampler", row.device) or not can_sample_on_gpu(sampling_row.params):
        return None
    packed = np.append(
        pack_params(sampling_row.params, sampling_row.seed), np.int32(sampling_row.position - 1)
    )
    inputs = torch.from_numpy(packed).to(row.device)
    (token_id,), _, (decided,) = sample_tokens(row[None], inputs[:-1, None], inputs[-1:]).tolist()
    return int(token_id) if decided else None


def _penalize(row: Tensor, sampling_row: SamplingRow) -> Tensor:
    """Apply the repetition penalty to prompt and completion, as transformers does; the others to the
    completion.
    """
    params = sampling_row.params
    row = row.clone()
    if params.repetition_penalty != 1.0:
        tokens = np.concatenate((sampling_row.prompt, sampling_row.generated)).astype(np.int64)
        seen = torch.from_numpy(tokens[tokens < len(row)]).to(row.device).unique()  # the row may be short
        scores = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if sampling_row.generated:
        known = [token for token in sampling_row.generated if token < len(row)]
        tokens, counts = torch.tensor(known, dtype=torch.int64, device=row.device).unique(return_counts=True)
        row[tokens] -= params.presence_penalty + params.frequency_penalty * counts.float()
    return row


def _draw_sorted(scores: Tensor, params: SamplingParams, uniform: float) -> int:
    scores, order = _sorted(scores, params)
    return int(order[_pick(scores.cpu().numpy(), params, uniform)])


def _sorted(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The largest of ``scores`` first, as many as top-k keeps, and their token ids."""
    order = scores.argsort(descending=True, stable=True)
    if params.top_k:
        order = order[: params.top_k]
    return scores[order], order


@overload
def _pick(scores: Floats, params: SamplingParams, uniform: float) -> int: ...


@overload
def _pick(
    scores: Floats, params: SamplingParams, uniform: float, total_weight: float | None
) -> int | None: ...


def _pick(
    scores: Floats, params: SamplingParams, uniform: float, total_weight: float | None = None
) -> int | None:
    """Index that ``uniform`` in [0, 1) draws from ``scores``, largest first.

    ``total_weight``: weight of all tokens if some are missing from ``scores``; else None. Returns None if the
    drawn token may be a missing one.
    """
    probabilities = _kept_probabilities(scores, params, total_weight)
    cumulative = probabilities.cumsum()
    if total_weight is None or len(probabilities) < len(scores):
        return min(int((cumulative <= uniform * cumulative[-1]).sum()), len(probabilities) - 1)
    if params.top_p < 1.0 or params.min_p > 0.0:
        return None  # how many of the other tokens are kept is unknown
    passed = int((cumulative <= uniform).sum())
    return passed if passed < len(probabilities) else None


def _kept_probabilities(scores: Floats, params: SamplingParams, total_weight: float | None = None) -> Doubles:
    """Probabilities of the first of ``scores``, largest first, that top-p and min-p keep.

    They are shares of all tokens, so their sum is less than 1. ``total_weight``: as for ``_pick``.
    """
    with np.errstate(invalid="ignore"):  # rows without finite logits fail in ``step_executor.py``
        weights = np.exp((scores - scores[:1]).astype(np.float64))
        probabilities = weights / (weights.sum() if total_weight is None else total_weight)
    if params.top_p < 1.0:
        # Keep the smallest set that reaches top_p: a token stays while those before it have not reached it.
        before = probabilities.cumsum() - probabilities
        probabilities = probabilities[before < params.top_p]
    if params.min_p > 0.0:
        probabilities = probabilities[probabilities >= params.min_p * probabilities[:1]]
    return probabilities


def _logprobs(row: Tensor, token_id: int, top: int | None, token_text: TokenText) -> tuple[TokenLogprob, ...]:
    if top is None:
        return ()
    log_probabilities = torch.log_softmax(row, dim=-1)
    values, ids = log_probabilities.topk(top) if top else (row[:0], row[:0].long())
    top_logprobs = tuple(
        TokenLogprob(token_text(other), other, value)
        for other, value in zip(ids.tolist(), values.tolist(), strict=True)
    )
    chosen = float(log_probabilities[token_id])
    return (TokenLogprob(token_text(token_id), token_id, chosen, top_logprobs),)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits of a forward pass and the tokens chosen from them on the device.

    ``logits`` [n, vocabulary] in the compute dtype. ``summary`` [2 or 3, n] int64, for each row of logits:

    - row 0: the token.
    - row 1: 1 if the logits are finite, else 0.
    - row 2, only if the device can sample: 1 if the token was sampled by its parameters, else 0 (greedy).

    ``ready``: event after which the host may read ``summary``; None: at once. ``pooled``: for each pooled
    request whose prompt ends in the pass, in order, its hidden state [hidden] or the logits of its score
    tokens.
    """

    logits: Tensor
    summary: Tensor
    ready: torch.cuda.Event | None = None
    pooled: tuple[Tensor, ...] = ()

    def read(self) -> tuple[list[int], list[bool], list[bool] | None]:
        """Wait for the device and return ``summary`` as lists, one entry a row.

        The tokens; whether a row's logits are finite; whether its token was sampled. The third is None if the
        device cannot sample (a CPU).
        """
        if self.ready is not None:
            self.ready.synchronize()
        tokens, is_finite, *sampled = self.summary.tolist()
        return (
            tokens,
            [bool(each) for each in is_finite],
            [bool(each) for each in sampled[0]] if sampled else None,
        )

    def read_pooled(self) -> list[Floats]:
        """``pooled`` as float32 on the host."""
        return [each.float().cpu().numpy() for each in self.pooled]


def select_tokens(
    logits: Tensor,
    sampling_fields: Tensor | None = None,
    positions: Tensor | None = None,
    bitmask: Tensor | None = None,
    *,
    drafts: DrawnDrafts | None = None,
) -> StepOutput:
    """Choose a token for each row of ``logits`` [n, vocabulary] on their device, without waiting for it.

    On a CPU always the greedy token; the other arguments are ignored. On a GPU the arguments are those of
    ``sample_tokens`` (``kernels/sampling/draw.py``): packed sampling parameters (None: greedy), positions of
    the rows' newest tokens, a bitmask of tokens allowed by grammars (None: no row has a grammar), and draft
    tokens for rejection sampling (None: no row has one).
    """
    if kernels.enabled_for("sampler", logits.device):
        return StepOutput(logits, sample_tokens(logits, sampling_fields, positions, bitmask, drafts=drafts))
    largest, greedy = logits.max(-1)
    return StepOutput(logits, torch.stack((greedy, largest.isfinite().long())))
