"""Each row's next token, chosen where the logits are: the likeliest one, or one drawn as a request wishes.

Knows: which wishes are carried out here, how they are written down for the kernel, what it allocates, and how
many programs it gets. Reference, and the way for all other wishes: ``sampler.py``. A row is drawn from a list
of its likeliest tokens; where the list does not say what comes, which is rare, the host is told to draw.
"""

import numpy as np
import torch
from torch import Tensor

from vlfit.api.sampling_params import SamplingParams
from vlfit.kernels.launch import arrivals, overlapping, power_of_two

MOST_LISTED = 64  # tokens of a list; a power of two
FIELDS = 7  # of what is written down for a row
FORMED = 6  # the one that says whether it keeps to a form
_TILE = 4096  # logits that one program looks through; no fewer than are listed

Words = np.ndarray[tuple[int], np.dtype[np.int32]]


def draws(sampling: SamplingParams) -> bool:
    """Whether rows are drawn here as they come: by temperature, top-k, top-p and min-p alone."""
    return may_draw(sampling) and sampling.top_logprobs is None and not sampling.penalizes


def surely_draws(sampling: SamplingParams) -> bool:
    """Whether rows are drawn here whatever they are: without top-k a list may not say what comes."""
    return draws(sampling) and sampling.top_k > 0


def may_draw(sampling: SamplingParams) -> bool:
    """Whether a row that all else has been done to can be drawn here."""
    return not sampling.greedy and sampling.top_k <= MOST_LISTED


def words_of(sampling: SamplingParams, seed: int) -> Words:
    """What is asked of a row, [FIELDS] int32; all 0, which is greedy, where ``draws`` says no."""
    return written(sampling, seed) if draws(sampling) else np.zeros(FIELDS, dtype=np.int32)


def written(sampling: SamplingParams, seed: int) -> Words:
    """[FIELDS] int32: temperature, top-p and min-p as the bits of float32, top-k, the seed's halves, and 0
    for no form.
    """
    shares = np.array((sampling.temperature, sampling.top_p, sampling.min_p), dtype=np.float32)
    halves = np.array((seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), dtype=np.uint32)
    top_k = np.array([sampling.top_k], dtype=np.int32)
    return np.concatenate((shares.view(np.int32), top_k, halves.view(np.int32), np.zeros(1, np.int32)))


def choose_tokens(
    logits: Tensor,
    asked: Tensor | None = None,
    positions: Tensor | None = None,
    forms: Tensor | None = None,
) -> Tensor:
    """[3, rows] int64 of ``logits`` [rows, vocabulary]: the token of each row; 1 where all logits are numbers
    and one is finite, else 0; and 1 where the token was drawn, as ``asked`` [FIELDS, rows] int32 wishes.

    Where it was not drawn it is the likeliest, the first of equals. ``positions`` [rows] int32 are those of
    the tokens that the rows are of: what is drawn stands one further. None: nothing is asked.

    ``forms`` [rows, words] int32 has a bit for each token, the lowest first: which of them rows that keep to
    a form may have. All that is said of such a row is said of those.
    """
    rows, vocabulary = logits.shape
    parts = -(-vocabulary // _TILE)

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    summary = room(3, rows, dtype=torch.int64)
    largest, weights = (room(rows, parts, dtype=torch.float32) for _ in range(2))
    places = room(rows, parts)
    lists = rows, parts + 1, MOST_LISTED
    values, tokens = room(*lists, dtype=torch.float32), room(*lists)
    if asked is None or positions is None:
        asked = torch.zeros((FIELDS + 1, rows), dtype=torch.int32, device=logits.device)
        positions = asked[FIELDS]
    if forms is None:
        forms = asked  # nobody has one: it is not looked at
    if logits.device.type != "meta" and rows:
        from vlfit.kernels.sampling.draw_kernels import choose_tokens as kernel

        kernel[(rows, parts)](
            logits,
            asked,
            positions,
            forms,
            largest,
            places,
            weights,
            values,
            tokens,
            arrivals(logits.device),
            summary,
            rows,
            vocabulary,
            forms.shape[1],
            bits=16 if logits.dtype == torch.bfloat16 else 32,  # that tell one number from another
            parts=parts,
            tile=_TILE,
            tile_parts=power_of_two(parts),
            most=MOST_LISTED,
            num_warps=8,
            **overlapping(logits.device),
        )
    return summary
