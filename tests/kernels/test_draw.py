"""Tokens chosen by the kernel, against the host's choices and against the distribution itself."""

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
from vlfit.engine.sampling.sampler import Draw, sample
from vlfit.kernels.launch import arrivals
from vlfit.kernels.sampling import draw

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def chosen(logits: Tensor, sampling: SamplingParams, seed: int, device: torch.device) -> list[list[int]]:
    """What the kernel says of ``logits``; row by row the token drawn stands at position 1, 2, 3..."""
    rows = len(logits)
    words = torch.from_numpy(np.stack([draw.words_of(sampling, seed)] * rows, axis=1).copy()).to(device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    return draw.choose_tokens(logits.to(device), words, positions).tolist()


def by_the_host(logits: Tensor, sampling: SamplingParams, seed: int) -> list[int]:
    draws = [Draw(sampling, [], [], seed, row + 1) for row in range(len(logits))]
    tokens = logits.argmax(-1).tolist()
    return [each.token_id for each in sample(logits, tokens, None, draws, str)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_likeliest_token(dtype: torch.dtype, device: torch.device) -> None:
    """Of several parts; the first of equals; and rows with a number that is none, or too large."""
    torch.manual_seed(0)
    logits = torch.randn(6, 9001)
    logits[0, 9000] = logits[1, 0] = 50
    logits[2, [8500, 17]] = 50
    logits[3, 4096] = torch.nan
    logits[4, 3] = torch.inf
    logits[5] = -torch.inf
    for _ in range(2):  # what the first leaves behind is what the second begins with
        best, usable, drawn = draw.choose_tokens(logits.to(device, dtype)).tolist()
        assert best[:3] == [9000, 0, 17]
        assert usable == [1, 1, 1, 0, 0, 0]
        assert not any(drawn)
    assert not arrivals(device).any()


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
def test_the_kernel_draws_as_the_host_does(
    wishes: dict[str, Any], equal: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of three parts, the last one of few tokens; ``equal``: rounded, so that many scores are alike."""
    monkeypatch.setattr(draw, "_TILE", 256)
    logits = torch.randn(4, 520, generator=torch.Generator().manual_seed(1)) * 4
    logits = logits.round() if equal else logits
    logits[0, :500] = -torch.inf  # of what can be drawn there are fewer than are listed
    sampling = SamplingParams(**({"temperature": 1.0} | wishes))
    tokens, usable, drawn = chosen(logits, sampling, -5, device)
    assert usable == [1] * 4
    wanted = by_the_host(logits, sampling, -5)
    assert [token for token, known in zip(tokens, drawn, strict=True) if known] == [
        token for token, known in zip(wanted, drawn, strict=True) if known
    ]
    assert sum(drawn) == 4 or sampling.top_k == 0
    assert sum(drawn) >= 2  # a list says enough where the distribution has a peak


def test_a_list_that_does_not_say_what_comes_leaves_it_to_the_host(device: torch.device) -> None:
    """All of 1,000 tokens are alike: of those listed are 64, and what lies beyond may be drawn too."""
    flat = torch.zeros(3, 1000)
    for sampling in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.5),
    ):
        tokens, _, drawn = chosen(flat, sampling, 3, device)
        wanted = by_the_host(flat, sampling, 3)
        assert all(token < 64 for token, known in zip(wanted, drawn, strict=True) if known)
        assert [t for t, known in zip(tokens, drawn, strict=True) if not known] == [0] * drawn.count(0)
        assert drawn.count(0) >= 2
    tokens, _, drawn = chosen(flat, SamplingParams(temperature=1.0, top_k=3), 3, device)
    assert drawn == [1] * 3
    assert set(tokens) <= {0, 1, 2}


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_k=3)], ids=["greedy", "drawn"]
)
def test_a_row_that_keeps_to_a_form_is_chosen_among_what_it_allows(
    sampling: SamplingParams, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the host chooses; the row beside it, whose words are the same, has no form."""
    monkeypatch.setattr(draw, "_TILE", 256)
    logits = torch.randn(2, 520, generator=torch.Generator().manual_seed(1)) * 4
    logits[1] = logits[0]
    allowed = np.zeros(520, dtype=np.bool_)
    allowed[[3, 31, 32, 255, 256, 519]] = True
    bits = torch.from_numpy(np.packbits(np.append(allowed, [False] * 24), bitorder="little").view(np.int32))
    words = torch.from_numpy(np.stack([draw.words_of(sampling, 7)] * 2, axis=1).copy())
    words[draw.FORMED, 0] = 1
    positions = torch.zeros(2, dtype=torch.int32)
    tokens, usable, drawn = draw.choose_tokens(
        *(each.to(device) for each in (logits, words, positions, bits.repeat(2, 1)))
    ).tolist()
    masked = logits.where(torch.from_numpy(np.stack([allowed, allowed | True])), float("-inf"))
    wishes = [Draw(sampling, [], [], 7, 1)] * 2
    assert tokens == [e.token_id for e in sample(masked, masked.argmax(-1).tolist(), None, wishes, str)]
    assert allowed[tokens[0]]
    assert not allowed[int(logits[0].argmax())]
    assert usable == [1, 1]
    assert drawn == [0, 0] if sampling.greedy else [1, 1]


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
def test_wishes_that_are_not_for_the_device(sampling: SamplingParams) -> None:
    assert not draw.draws(sampling)
    assert not draw.words_of(sampling, 5).any()


def test_a_row_with_penalties_is_drawn_where_it_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the host would; and where nobody knows without the whole row, the host does."""
    monkeypatch.setattr(draw, "_TILE", 64)
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3)) * 2
    logits[2] /= 100
    sampling = SamplingParams(temperature=1.0, top_k=10, presence_penalty=1.5)
    draws = [Draw(sampling, [1], [5, 7], 2, row) for row in range(3)]
    draws[2] = replace(draws[2], sampling=SamplingParams(temperature=2.0, top_p=0.9, presence_penalty=1.5))
    expected = sample(logits, [0] * 3, None, draws, str)
    monkeypatch.setattr(kernels, "used_on", lambda device: True)
    known = []

    def watched(*of: Tensor) -> Tensor:
        told = draw.choose_tokens(*of)
        known.append(int(told[2]))
        return told

    monkeypatch.setattr(sampler, "choose_tokens", watched)
    assert sample(logits.to(device), [0] * 3, [False] * 3, draws, str) == expected
    assert known == [1, 1, 0]


@pytest.mark.slow
def test_the_share_of_each_token_is_what_was_asked_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pearson's chi-squared of draws by one seed at many positions, out of top-k, top-p and a temperature.

    Above 26 it is once in a thousand times where shares are right (eight degrees of freedom).
    """
    monkeypatch.setattr(draw, "_TILE", 64)
    rows = 4000 if ON_GPU else 48
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 1.5
    sampling = SamplingParams(temperature=0.9, top_k=12, top_p=0.9)
    tokens, _, drawn = chosen(logits.expand(rows, 64).contiguous(), sampling, 11, device)
    assert all(drawn)
    likely = torch.softmax(logits.double() / 0.9, -1).sort(descending=True)
    shares = likely.values[:12] / likely.values[:12].sum()
    kept = int((shares.cumsum(0) - shares < 0.9).sum())
    shares = shares[:kept] / shares[:kept].sum()
    counts = torch.bincount(torch.tensor(tokens), minlength=64)[likely.indices[:kept]]
    assert counts.sum() == rows, "a token that was cut off was drawn"
    expected = shares * rows
    assert kept == 9
    assert float(((counts - expected) ** 2 / expected).sum()) < 26


def test_points_are_philox_and_even() -> None:
    """The first word by the paper's own test vectors (Random123, kat_vectors), and Pearson's chi-squared."""
    assert chance.point(0, 0) == (0x6627E8D5 >> 8) / 2**24
    assert chance.point(0xFFFFFFFF_FFFFFFFF, 0) != chance.point(0, 0)
    counts = np.histogram([chance.point(9, position) for position in range(4000)], 20, (0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 45  # 19 degrees: once in 1,300 times
    assert math.isclose(np.mean([chance.point(seed, 5) for seed in range(4000)]), 0.5, abs_tol=0.02)
