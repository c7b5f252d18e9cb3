"""Sampling by the kernel against the host and against the distribution itself."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DTYPES, ON_GPU
from vlfit import kernels
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling import sampler
from vlfit.engine.sampling import sampler as chance
from vlfit.engine.sampling.sampler import SamplingRow, sample_on_host
from vlfit.engine.sampling.verification import verify_draft
from vlfit.engine.scheduling.sequence import Draft, DraftProbabilities
from vlfit.kernels.launch import tile_counters
from vlfit.kernels.sampling import draw
from vlfit.plan.native.cost import MAX_CANDIDATES

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def sample_on_gpu(
    logits: Tensor, sampling: SamplingParams, seed: int, device: torch.device
) -> list[list[int]]:
    """Results of the kernel; row i samples the token at position i + 1."""
    rows = len(logits)
    params = torch.from_numpy(
        np.stack([draw.pack_params_or_greedy(sampling, seed)] * rows, axis=1).copy()
    ).to(device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    return draw.sample_tokens(logits.to(device), params, positions).tolist()


def host_token_ids(logits: Tensor, sampling: SamplingParams, seed: int) -> list[int]:
    rows_params = [SamplingRow(sampling, [], [], seed, row + 1) for row in range(len(logits))]
    tokens = logits.argmax(-1).tolist()
    return [each.token_id for each in sample_on_host(logits, tokens, None, rows_params, str)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy(dtype: torch.dtype, device: torch.device) -> None:
    """Several parts; the first of equals; rows with NaN or infinity."""
    torch.manual_seed(0)
    logits = torch.randn(6, 9001)
    logits[0, 9000] = logits[1, 0] = 50
    logits[2, [8500, 17]] = 50
    logits[3, 4096] = torch.nan
    logits[4, 3] = torch.inf
    logits[5] = -torch.inf
    for _ in range(2):  # what the first leaves behind is what the second begins with
        best, valid, sampled = draw.sample_tokens(logits.to(device, dtype)).tolist()
        assert best[:3] == [9000, 0, 17]
        assert valid == [1, 1, 1, 0, 0, 0]
        assert not any(sampled)
    assert not tile_counters(device).any()


@pytest.mark.parametrize(
    ("wishes", "equal"),
    [
        ({"top_k": 20, "top_p": 0.8, "temperature": 0.7}, False),
        ({"top_k": 64, "min_p": 0.02}, True),
        ({"top_p": 0.6, "temperature": 0.5}, True),
        ({"min_p": 0.05, "temperature": 1.3}, False),
        ({}, False),
    ],
    ids=str,
)
def test_same_tokens_as_the_host(
    wishes: dict[str, Any], equal: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parts, the last one short; ``equal``: rounded logits, so that many are equal."""
    monkeypatch.setattr(draw, "LOGITS_PER_PROGRAM", 256)
    logits = torch.randn(4, 520, generator=torch.Generator().manual_seed(1)) * 4
    logits = logits.round() if equal else logits
    logits[0, :500] = -torch.inf  # of what can be drawn there are fewer than are listed
    sampling = SamplingParams(**({"temperature": 1.0} | wishes))
    tokens, valid, sampled = sample_on_gpu(logits, sampling, -5, device)
    assert valid == [1] * 4
    expected = host_token_ids(logits, sampling, -5)
    assert [token for token, is_sampled in zip(tokens, sampled, strict=True) if is_sampled] == [
        token for token, is_sampled in zip(expected, sampled, strict=True) if is_sampled
    ]
    assert sum(sampled) == 4 or sampling.top_k == 0
    assert sum(sampled) >= 2  # a list says enough where the distribution has a peak


def test_flat_distributions_are_left_to_the_host(device: torch.device) -> None:
    """1,000 equal tokens, of which 64 are candidates: others may be sampled too."""
    flat = torch.zeros(3, 1000)
    for sampling in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.5),
    ):
        tokens, _, sampled = sample_on_gpu(flat, sampling, 3, device)
        expected = host_token_ids(flat, sampling, 3)
        assert all(token < 64 for token, is_sampled in zip(expected, sampled, strict=True) if is_sampled)
        assert [t for t, is_sampled in zip(tokens, sampled, strict=True) if not is_sampled] == [
            0
        ] * sampled.count(0)
        assert sampled.count(0) >= 2
    tokens, _, sampled = sample_on_gpu(flat, SamplingParams(temperature=1.0, top_k=3), 3, device)
    assert sampled == [1] * 3
    assert set(tokens) <= {0, 1, 2}


@pytest.mark.parametrize("wishes", [{}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6}], ids=str)
def test_a_vocabulary_of_248320(wishes: dict[str, Any], device: torch.device) -> None:
    """Sixty-one parts: the last tokens count as the first ones do, and as the host has it."""
    vocabulary = 248320
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(2)) * 3
    logits[0, [70000, 151936, vocabulary - 1]] = torch.tensor([30.0, 29.5, 30.5])
    sampling = SamplingParams(**wishes)
    best, valid, sampled = sample_on_gpu(logits, sampling, 11, device)
    assert valid == [1]
    assert best == host_token_ids(logits, sampling, 11)
    assert sampled == [int(bool(wishes))]
    allowed = np.zeros(vocabulary, dtype=np.bool_)
    allowed[[151936, vocabulary - 1]] = True
    bits = torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32).copy())
    params = torch.from_numpy(draw.pack_params_or_greedy(SamplingParams(), 7)[:, None].copy())
    params[draw.GRAMMAR_FIELD] = 1
    inputs = (logits, params, torch.zeros(1, dtype=torch.int32), bits[None])
    best, valid, _ = draw.sample_tokens(*(each.to(device) for each in inputs)).tolist()
    assert (best, valid) == ([vocabulary - 1], [1])


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_k=3)], ids=["greedy", "drawn"]
)
def test_grammar_bitmask(
    sampling: SamplingParams, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the host samples; the second row has the same logits and no grammar."""
    monkeypatch.setattr(draw, "LOGITS_PER_PROGRAM", 256)
    logits = torch.randn(2, 520, generator=torch.Generator().manual_seed(1)) * 4
    logits[1] = logits[0]
    allowed = np.zeros(520, dtype=np.bool_)
    allowed[[3, 31, 32, 255, 256, 519]] = True
    bits = torch.from_numpy(np.packbits(np.append(allowed, [False] * 24), bitorder="little").view(np.int32))
    params = torch.from_numpy(np.stack([draw.pack_params_or_greedy(sampling, 7)] * 2, axis=1).copy())
    params[draw.GRAMMAR_FIELD, 0] = 1
    positions = torch.zeros(2, dtype=torch.int32)
    tokens, valid, sampled = draw.sample_tokens(
        *(each.to(device) for each in (logits, params, positions, bits.repeat(2, 1)))
    ).tolist()
    masked = logits.where(torch.from_numpy(np.stack([allowed, allowed | True])), float("-inf"))
    wishes = [SamplingRow(sampling, [], [], 7, 1)] * 2
    assert tokens == [
        e.token_id for e in sample_on_host(masked, masked.argmax(-1).tolist(), None, wishes, str)
    ]
    assert allowed[tokens[0]]
    assert not allowed[int(logits[0].argmax())]
    assert valid == [1, 1]
    assert sampled == [0, 0] if sampling.greedy else [1, 1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, top_logprobs=0),
        SamplingParams(temperature=1.0, top_k=65),
        SamplingParams(temperature=1.0, frequency_penalty=0.1),
        SamplingParams(),
    ],
    ids=["logprobs", "top_k", "penalty", "greedy"],
)
def test_parameters_left_to_the_host(sampling: SamplingParams) -> None:
    assert not draw.samples_on_gpu(sampling)
    assert not draw.pack_params_or_greedy(sampling, 5).any()


def test_rows_with_penalties(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the host, which samples the rows whose candidates do not suffice."""
    monkeypatch.setattr(draw, "LOGITS_PER_PROGRAM", 64)
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3)) * 2
    logits[2] /= 100
    sampling = SamplingParams(temperature=1.0, top_k=10, presence_penalty=1.5)
    rows_params = [SamplingRow(sampling, [1], [5, 7], 2, row) for row in range(3)]
    rows_params[2] = replace(
        rows_params[2], params=SamplingParams(temperature=2.0, top_p=0.9, presence_penalty=1.5)
    )
    expected = sample_on_host(logits, [0] * 3, None, rows_params, str)
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    is_sampled = []

    def recorded(*arguments: Tensor) -> Tensor:
        result = draw.sample_tokens(*arguments)
        is_sampled.append(int(result[2]))
        return result

    monkeypatch.setattr(sampler, "sample_tokens", recorded)
    assert sample_on_host(logits.to(device), [0] * 3, [False] * 3, rows_params, str) == expected
    assert is_sampled == [1, 1, 0]


@pytest.mark.slow
def test_distribution(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pearson's chi-squared of samples with one seed at many positions, with top-k, top-p and temperature.
    Above 26 with a probability of 1 in 1,000 if the distribution is right (eight degrees of freedom).
    """
    monkeypatch.setattr(draw, "LOGITS_PER_PROGRAM", 64)
    rows = 4000 if ON_GPU else 48
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 1.5
    sampling = SamplingParams(temperature=0.9, top_k=12, top_p=0.9)
    tokens, _, sampled = sample_on_gpu(logits.expand(rows, 64).contiguous(), sampling, 11, device)
    assert all(sampled)
    likely = torch.softmax(logits.double() / 0.9, -1).sort(descending=True)
    shares = likely.values[:12] / likely.values[:12].sum()
    kept = int((shares.cumsum(0) - shares < 0.9).sum())
    shares = shares[:kept] / shares[:kept].sum()
    counts = torch.bincount(torch.tensor(tokens), minlength=64)[likely.indices[:kept]]
    assert counts.sum() == rows, "a token that was cut off was drawn"
    expected = shares * rows
    assert kept == 9
    assert float(((counts - expected) ** 2 / expected).sum()) < 26


@pytest.mark.parametrize(
    "wishes",
    [{"top_k": 20, "top_p": 0.9, "temperature": 0.7}, {"top_p": 0.6, "temperature": 0.5}, {"min_p": 0.05}],
    ids=str,
)
def test_drawn_drafts_are_accepted_or_replaced_as_on_the_host(
    wishes: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts. Of every three rows the last has no draft, and its token is drawn."""
    monkeypatch.setattr(draw, "LOGITS_PER_PROGRAM", 256)
    rows, width = 15, 5
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1)).expand(rows, -1) * 4
    params = SamplingParams(**({"temperature": 1.0} | wishes))
    token_ids = logits[0].topk(width).indices.flip(0)  # the least likely of them first
    shares = torch.tensor([0.5, 0.1, 0.1, 0.25, 0.05])
    possible = DraftProbabilities(token_ids[None], shares[None])
    drafted = [int(token_ids[row % width]) if row % 3 < 2 else -1 for row in range(rows)]
    probabilities = torch.zeros(rows, MAX_CANDIDATES)
    columns = torch.zeros(rows, MAX_CANDIDATES, dtype=torch.int32)
    probabilities[:, :width], columns[:, :width] = shares, token_ids.int()
    drafts = draw.DrawnDrafts(
        torch.tensor(drafted, dtype=torch.int32, device=device), columns.to(device), probabilities.to(device)
    )
    packed = torch.from_numpy(np.stack([draw.pack_params(params, 9)] * rows, axis=1).copy()).to(device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    tokens, _, sampled = draw.sample_tokens(
        logits.to(device).contiguous(), packed, positions, drafts=drafts
    ).tolist()
    accepted = 0
    for row, (token, draft_token) in enumerate(zip(tokens, drafted, strict=True)):
        at = SamplingRow(params, [], [], 9, row + 1)
        draft = Draft() if draft_token < 0 else Draft((draft_token,), possible)
        here = logits[[row, row]]
        found = verify_draft(here, here.argmax(-1).tolist(), [True, True], None, at, draft, str)
        assert token == found[0].token_id
        accepted += token == draft_token
    assert all(sampled)
    assert 2 <= accepted <= 8


def test_drawn_drafts_whose_probability_is_unknown_are_left_to_the_host(device: torch.device) -> None:
    """1,000 equal tokens, of which 64 are candidates, and others may be drawn."""
    flat = torch.zeros(2, 1000, device=device)
    packed = [draw.pack_params(SamplingParams(temperature=1.0), 3)] * 2
    params = torch.from_numpy(np.stack(packed, axis=1).copy()).to(device)
    probabilities = torch.zeros(2, MAX_CANDIDATES, device=device)
    probabilities[:, 0] = 1
    drafts = draw.DrawnDrafts(
        torch.tensor([5, 5], dtype=torch.int32, device=device),
        torch.full((2, MAX_CANDIDATES), 5, dtype=torch.int32, device=device),
        probabilities,
    )
    positions = torch.zeros(2, dtype=torch.int32, device=device)
    assert draw.sample_tokens(flat, params, positions, drafts=drafts)[2].tolist() == [0, 0]


def test_random_numbers_are_philox_and_uniform() -> None:
    """The first word against the paper's test vectors (Random123, kat_vectors), and Pearson's chi-squared."""
    assert chance.philox_uniform(0, 0) == (0x6627E8D5 >> 8) / 2**24
    assert chance.philox_uniform(0xFFFFFFFF_FFFFFFFF, 0) != chance.philox_uniform(0, 0)
    counts = np.histogram([chance.philox_uniform(9, position) for position in range(4000)], 20, (0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 45  # 19 degrees: once in 1,300 times
    assert math.isclose(np.mean([chance.philox_uniform(seed, 5) for seed in range(4000)]), 0.5, abs_tol=0.02)
