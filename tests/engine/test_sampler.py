"""Each sampling parameter does what transformers' processor of that name does."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling import sampler
from vlfit.engine.sampling.sampler import SampledToken, SamplingRow, sample_on_host

VOCABULARY = 50


def drawn(rows: Tensor, draws: Sequence[SamplingRow], token_text: Callable[[int], str]) -> list[SampledToken]:
    return sample_on_host(rows, rows.argmax(-1).tolist(), None, draws, token_text)


def logits(seed: int = 0) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(row: Tensor, sampling: SamplingParams, count: int = 3000) -> Tensor:
    """How often each token comes out of ``count`` draws."""
    draws = [SamplingRow(sampling, [], [], 7, position) for position in range(count)]
    tokens = [s.token_id for s in drawn(row.expand(count, -1), draws, str)]
    return torch.bincount(torch.tensor(tokens), minlength=VOCABULARY) / count


@pytest.mark.parametrize(
    ("sampling", "reference"),
    [
        (SamplingParams(temperature=1.0, top_k=5), TopKLogitsWarper(5)),
        (SamplingParams(temperature=1.0, top_p=0.7), TopPLogitsWarper(0.7)),
        (SamplingParams(temperature=1.0, min_p=0.1), MinPLogitsWarper(0.1)),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_truncation_keeps_the_reference_set(sampling: SamplingParams, reference: LogitsProcessor) -> None:
    row = logits()
    expected = torch.softmax(reference(torch.zeros(1, 1, dtype=torch.long), row[None])[0], -1)
    seen = draw_many(row, sampling)
    assert not seen[expected == 0].any()
    assert (seen - expected).abs().max() < 0.03


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_what_is_next_to_no_temperature_is_none(temperature: float) -> None:
    assert SamplingParams(temperature=temperature, top_p=0.9).greedy


def test_temperature_sharpens() -> None:
    row = logits()
    seen = draw_many(row, SamplingParams(temperature=0.5))
    assert (seen - torch.softmax(row / 0.5, -1)).abs().max() < 0.03


def test_repetition_penalty_is_the_reference() -> None:
    row = logits(1)
    prompt, generated = [3, 4, 4], [9]
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt + generated]), row[None].clone())
    sampling = SamplingParams(repetition_penalty=1.8)
    assert (
        drawn(row[None], [SamplingRow(sampling, prompt, generated, 0, 0)], str)[0].token_id
        == expected.argmax()
    )
    assert torch.equal(row, logits(1)), "the model's own logits were changed"


def test_presence_and_frequency_count_the_completion_alone() -> None:
    row = torch.zeros(VOCABULARY)
    row[5], row[6] = 3.0, 2.0
    greedy = SamplingParams(presence_penalty=0.5, frequency_penalty=0.4)
    assert drawn(row[None], [SamplingRow(greedy, [5, 5, 5], [], 0, 0)], str)[0].token_id == 5
    assert drawn(row[None], [SamplingRow(greedy, [], [5], 0, 0)], str)[0].token_id == 5  # 3 - 0.9 = 2.1
    assert drawn(row[None], [SamplingRow(greedy, [], [5, 5], 0, 0)], str)[0].token_id == 6  # 3 - 1.3 = 1.7


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    rows = torch.stack([logits(seed) for seed in range(3)])

    draw = SamplingRow(sampling, [], [], 3, 17)
    alone = drawn(rows[1:2], [draw], str)[0].token_id
    together = drawn(rows, [draw, draw, draw], str)[1].token_id
    assert alone == together


def test_logprobs_are_the_models_own() -> None:
    row = logits(2)
    sampling = SamplingParams(temperature=1.5, top_k=1, top_logprobs=3)
    sampled = drawn(row[None], [SamplingRow(sampling, [], [], 0, 0)], lambda token: f"<{token}>")[0]
    expected = torch.log_softmax(row, -1)
    (entry,) = sampled.logprobs
    assert entry.token == f"<{sampled.token_id}>"
    assert math.isclose(entry.logprob, float(expected[sampled.token_id]), abs_tol=1e-6)
    assert [top.token_id for top in entry.top] == expected.topk(3).indices.tolist()


def test_logprobs_may_be_the_chosen_tokens_alone() -> None:
    sampled = drawn(logits()[None], [SamplingRow(SamplingParams(top_logprobs=0), [], [], 0, 0)], str)[0]
    assert len(sampled.logprobs) == 1
    assert sampled.logprobs[0].top == ()


@pytest.mark.parametrize("places", [0, 1, 3])
@pytest.mark.parametrize(
    "wishes",
    [{"top_k": 1}, {"top_k": 20}, {"top_k": 100}, {}, {"top_p": 0.4}, {"top_p": 1.0}, {"min_p": 0.3}],
    ids=str,
)
def test_a_few_likely_tokens_are_drawn_as_if_all_had_been_sorted(
    places: int, wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to ``places``, many scores are equal, some of them across the border of those looked at."""
    rows = torch.stack([torch.randn(1000, generator=torch.Generator().manual_seed(row)) for row in range(40)])
    rows = (rows * 3).round(decimals=places)
    sampling = SamplingParams(**({"temperature": 0.7, "top_p": 0.95, "seed": 1} | wishes))

    def tokens() -> list[int]:
        draws = [SamplingRow(sampling, [], [], row, 0) for row in range(len(rows))]
        return [each.token_id for each in drawn(rows, draws, str)]

    monkeypatch.setattr(sampler, "_TOPK_CHUNK", 300)
    quick = tokens()
    monkeypatch.setattr(sampler, "_needs_few_candidates", lambda _: False)
    assert tokens() == quick


def test_rows_whose_likely_tokens_are_too_many_alike_are_sorted_whole() -> None:
    """All scores are the same: the first tokens are drawn from, whatever was looked at."""
    sampling = SamplingParams(temperature=1.0, top_k=3, seed=1)
    draws = [SamplingRow(sampling, [], [], row, 0) for row in range(30)]
    assert {each.token_id for each in drawn(torch.zeros(30, 1000), draws, str)} == {0, 1, 2}
