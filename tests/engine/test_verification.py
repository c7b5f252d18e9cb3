"""Draft tokens change neither a sampled answer's distribution nor, if they were not drawn, its tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.sampler import (
    ACCEPT_WORD,
    DRAFT_WORD,
    DRAW_WORD,
    SamplingRow,
    philox_uniform,
    sample_on_host,
    token_distribution,
)
from vlfit.engine.sampling.verification import reject, verify_draft
from vlfit.engine.scheduling.sequence import Draft, DraftProbabilities

VOCABULARY = 40
SEED = 11


def logits_of(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def verified(
    logits: Tensor, row: SamplingRow, draft: Draft, is_finite: Sequence[bool] | None = None
) -> list[int]:
    tokens = logits.argmax(-1).tolist()
    sampled = verify_draft(logits, tokens, is_finite or [True] * len(logits), None, row, draft, str)
    return [each.token_id for each in sampled]


def one_by_one(logits: Tensor, params: SamplingParams, prompt: list[int], position: int) -> list[int]:
    """Tokens of a sequence whose i-th token has the i-th of ``logits``, whatever was before."""
    generated: list[int] = []
    for number, row in enumerate(logits):
        sampling_row = SamplingRow(params, prompt, list(generated), SEED, position + number)
        (token,) = sample_on_host(row[None], [int(row.argmax())], None, [sampling_row], str)
        generated.append(token.token_id)
    return generated


WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 20, "presence_penalty": 1.5},
    {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.7, "presence_penalty": 2.0},
]


@pytest.mark.parametrize("wishes", WISHES, ids=str)
@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_found_drafts_are_accepted_if_they_would_have_been_drawn(
    wishes: dict[str, Any], num_right: int
) -> None:
    """Penalties of a row count the drafts before it; all rows have alike logits, so that they matter."""
    params = SamplingParams(**wishes)
    for position in range(40):
        logits = logits_of(1, position).expand(6, -1)
        expected = one_by_one(logits, params, [1, 2, 3], position)
        wrong = (expected[num_right] + 1) % VOCABULARY
        tokens = (*expected[:num_right], wrong, *expected[num_right + 1 : 5])[:5]
        row = SamplingRow(params, [1, 2, 3], [], SEED, position)
        assert verified(logits, row, Draft(tokens)) == expected[: num_right + 1]


def test_a_seed_gives_the_tokens_that_it_gives_without_drafts_even_to_drawn_ones() -> None:
    params = SamplingParams(temperature=1.0, seed=SEED)
    for position in range(60):
        logits = logits_of(2, position)
        expected = one_by_one(logits, params, [], position)
        probabilities = DraftProbabilities(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
        for token in (0, 1, expected[0]):
            found = verified(
                logits, SamplingRow(params, [], [], SEED, position), Draft((token,), probabilities)
            )
            assert found == expected[: 1 + (token == expected[0])]


def test_rows_without_numbers_end_a_draft_before_them() -> None:
    logits = logits_of(4)
    greedy = SamplingRow(SamplingParams(), [], [], 0, 0)
    best = logits.argmax(-1).tolist()
    for unusable, tokens in ((0, []), (1, best[:1]), (3, best[:3])):
        is_finite = [number != unusable for number in range(4)]
        assert verified(logits, greedy, Draft(tuple(best[:3])), is_finite) == tokens


def chi_squared(tokens: Any, expected: Any) -> tuple[float, int]:
    """Pearson's statistic of ``tokens`` against probabilities ``expected``, and its degrees of freedom."""
    counts = np.bincount(tokens, minlength=len(expected))
    possible = expected > 0
    assert not counts[~possible].any(), "a token that cannot be drawn was drawn"
    wanted = expected[possible] * len(tokens)
    return float(((counts[possible] - wanted) ** 2 / wanted).sum()), int(possible.sum()) - 1


def assert_distributed(tokens: Any, expected: Any) -> None:
    """Wrong once in some 10,000 times for right distributions; drawn with fixed seeds, so never or always."""
    statistic, freedom = chi_squared(tokens, expected)
    # Wilson and Hilferty's approximation of the quantile at 3.7 standard deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.7 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


def softmax(row: Any) -> Any:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


@pytest.mark.parametrize("kept", [1, 6, 30], ids="q of {} tokens".format)
@pytest.mark.parametrize("likeness", [0.0, 0.8, 1.0])
def test_rejection_sampling_draws_from_the_model(kept: int, likeness: float) -> None:
    """100,000 draws. q is anything from unlike p to p itself, over some of its tokens or others too."""
    rng = np.random.default_rng(3)
    target_logits = rng.normal(size=30) * 1.5
    target = np.where(np.arange(30) < 24, softmax(target_logits), 0.0)  # six tokens are cut off
    target /= target.sum()
    draft = softmax(likeness * target_logits + (1 - likeness) * rng.normal(size=30) * 1.5)
    draft[np.argsort(-draft)[kept:]] = 0.0
    draft /= draft.sum()
    count = 100_000
    drafts = rng.choice(30, size=count, p=draft)
    support = rng.permutation(24)  # the target's tokens, in any order
    rows = (count, len(support))
    tokens, accepted = reject(
        np.broadcast_to(support, rows),
        np.broadcast_to(target[support], rows),
        np.broadcast_to(draft[support], rows),
        drafts,
        draft[drafts],
        rng.random(count),
        rng.random(count),
    )
    assert_distributed(tokens, target)
    assert (tokens[accepted] == drafts[accepted]).all()
    assert (tokens[~accepted] != drafts[~accepted]).all()
    assert abs(accepted.mean() - np.minimum(target, draft).sum()) < 0.01


def test_what_was_drawn_from_the_same_distribution_is_always_accepted() -> None:
    target = softmax(np.random.default_rng(5).normal(size=20))[None]
    for draft in range(20):
        uniforms = np.array([1 - 2**-24])
        of_draft = target[0, draft : draft + 1]
        arguments = np.array([draft]), of_draft, uniforms, uniforms
        tokens, accepted = reject(np.arange(20)[None], target, target, *arguments)
        assert accepted.all()
        assert tokens.tolist() == [draft]


def test_a_replaced_token_is_another_one_even_at_the_ends_of_the_range() -> None:
    """p(0) = 0.2 of q(0) = 1: four of five times replaced, by one of the others."""
    target = np.array([[0.2, 0.0, 0.5, 0.3, 0.0]])
    draft = np.array([[1.0, 0.0, 0.0, 0.0, 0.0]])
    for uniform, token in ((0.0, 2), (0.6, 2), (0.63, 3), (1 - 2**-24, 3)):
        arguments = np.array([0]), np.array([1.0]), np.array([0.2]), np.array([uniform])
        tokens, accepted = reject(np.arange(5)[None], target, draft, *arguments)
        assert not accepted.any()
        assert tokens.tolist() == [token]


PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.95},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 8, "presence_penalty": 1.0},
]


@pytest.mark.parametrize("wishes", PARAMS, ids=str)
def test_drawn_drafts_by_the_random_numbers_of_their_positions(wishes: dict[str, Any]) -> None:
    """At each position a draft token is drawn from another model's six likeliest, and both rows verified."""
    verify_many(wishes, 2500)


@pytest.mark.slow
@pytest.mark.parametrize("wishes", PARAMS[1::2], ids=str)
def test_drawn_drafts_100000_times(wishes: dict[str, Any]) -> None:
    verify_many(wishes, 100_000)


def verify_many(wishes: dict[str, Any], count: int) -> None:
    params = SamplingParams(**wishes)
    logits = logits_of(2, 8)
    other = softmax(logits[0].double().numpy() + logits_of(1, 9)[0].double().numpy() / 2)
    possible = np.argsort(-other)[:6]
    draft_shares = other[possible] / other[possible].sum()
    # Eight columns: the last two are padding, with a token that the row has already.
    columns = torch.tensor([[*possible, possible[0], possible[0]]])
    shares = torch.tensor([[*draft_shares, 0.0, 0.0]])
    firsts, seconds, drafts = [], [], []
    for position in range(count):
        at = int((draft_shares.cumsum() <= philox_uniform(SEED, position, DRAFT_WORD)).sum())
        draft = Draft((int(possible[min(at, 5)]),), DraftProbabilities(columns, shares))
        tokens = verified(logits, SamplingRow(params, [], [], SEED, position), draft)
        firsts.append(tokens[0])
        drafts.append(draft.token_ids[0])
        assert len(tokens) == 1 + (tokens[0] == drafts[-1])
        if len(tokens) == 2 and tokens[0] == possible[0]:
            seconds.append(tokens[1])

    def expected(row: Tensor, generated: list[int]) -> Any:
        found = token_distribution(row, SamplingRow(params, [], generated, 0, 0))
        assert abs(found.probabilities.sum() - 1) < 1e-12
        whole = np.zeros(VOCABULARY)
        whole[found.token_ids] = found.probabilities
        return whole

    wanted = expected(logits[0], [])
    likely = wanted * count >= 5  # the statistic needs five of each; the others count as one
    merged = np.where(likely[firsts], firsts, VOCABULARY)
    assert_distributed(merged, np.append(np.where(likely, wanted, 0.0), wanted[~likely].sum()))
    wanted = expected(logits[1], [int(possible[0])])
    assert len(seconds) > count / 20
    likely = wanted * len(seconds) >= 5
    merged = np.where(likely[seconds], seconds, VOCABULARY)
    assert_distributed(merged, np.append(np.where(likely, wanted, 0.0), wanted[~likely].sum()))
    accepted = np.mean(np.array(firsts) == np.array(drafts))
    overlap = np.minimum(expected(logits[0], [])[possible], draft_shares).sum()
    assert abs(accepted - overlap) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("wishes", PARAMS[1::2], ids=str)
def test_found_drafts_100000_times(wishes: dict[str, Any]) -> None:
    """The same draft token at each position: accepted as often as it is likely, else one of the others."""
    params = SamplingParams(**wishes)
    logits = logits_of(2, 8)
    found = token_distribution(logits[0], SamplingRow(params, [], [], 0, 0))
    draft = Draft((int(found.token_ids[1]),))
    tokens = []
    for position in range(100_000):
        answer = verified(logits, SamplingRow(params, [], [], SEED, position), draft)
        assert len(answer) == 1 + (answer[0] == draft.token_ids[0])
        tokens.append(answer[0])
    expected = np.zeros(VOCABULARY)
    expected[found.token_ids] = found.probabilities
    assert_distributed(tokens, expected)


@pytest.mark.parametrize("wishes", [*PARAMS, {}, {"min_p": 0.1, "temperature": 0.9}], ids=str)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 1000])
def test_the_distribution_is_the_one_that_is_drawn_from(wishes: dict[str, Any], vocabulary: int) -> None:
    """Greedy is the likeliest token alone. Whatever can be drawn has a probability."""
    params = SamplingParams(**wishes)
    logits = logits_of(1, 4, vocabulary)
    found = token_distribution(logits[0], SamplingRow(params, [], [3], 0, 0))
    rows = [SamplingRow(params, [], [3], SEED, position) for position in range(4000)]
    if params.has_penalties:
        rows = rows[:1500]
    tokens = [
        each.token_id
        for each in sample_on_host(
            logits.expand(len(rows), -1), [int(logits.argmax())] * len(rows), None, rows, str
        )
    ]
    assert set(tokens) <= set(found.token_ids.tolist())
    expected = np.zeros(vocabulary + 1)
    expected[found.token_ids] = found.probabilities
    likely = expected * len(tokens) >= 5
    expected[-1] = expected[~likely].sum()
    merged = np.where(likely[tokens], tokens, vocabulary)
    expected[:-1][~likely[:-1]] = 0.0
    if likely.sum() > 1:
        assert_distributed(merged, expected)
    else:
        assert set(tokens) == {int(logits.argmax())}


def test_the_random_numbers_of_a_position_are_four_words_of_philox() -> None:
    """Random123's kat_vectors of zeros; and numbers for drafts that do not follow from those for draws."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [philox_uniform(0, 0, word) for word in range(4)] == [(word >> 8) / 2**24 for word in words]
    draws = [
        [philox_uniform(SEED, position, word) for position in range(4000)]
        for word in (DRAW_WORD, ACCEPT_WORD, DRAFT_WORD)
    ]
    correlations = np.corrcoef(draws) - np.eye(3)
    assert np.abs(correlations).max() < 0.06  # 1/sqrt(4000) is 0.016
