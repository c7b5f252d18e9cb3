"""The walk of ``delta_scan.py`` and its gradient as Triton kernels: a program for each head of a sequence."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _walk(
    fresh, known, to_end, left, flags, states, news, pieces, heads,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    batch, head = tl.program_id(0), tl.program_id(1)
    row, key, value = tl.arange(0, TOKENS), tl.arange(0, KEYS), tl.arange(0, VALUES)
    by_key = row[:, None] * KEYS + key[None]
    by_value = row[:, None] * VALUES + value[None]
    square = key[:, None] * VALUES + value[None]
    state = tl.zeros((KEYS, VALUES), tl.float32)
    common = tl.zeros((KEYS, VALUES), tl.float32)
    for piece in range(pieces):
        flag = flags + (batch * pieces + piece) * 3
        place = ((batch * pieces + piece) * heads + head).to(tl.int64)
        state = state * tl.load(flag) + common * tl.load(flag + 1)
        tl.store(states + place * KEYS * VALUES + square, state)
        written = tl.load(fresh + place * TOKENS * VALUES + by_value)
        written -= tl.dot(tl.load(known + place * TOKENS * KEYS + by_key), state)
        tl.store(news + place * TOKENS * VALUES + by_value, written)
        ending = tl.load(to_end + place * TOKENS * KEYS + by_key)
        state = state * tl.load(left + place) + tl.dot(tl.trans(ending), written)
        common += tl.load(flag + 2) * (state - common)


@triton.jit
def _walk_back(
    known, to_end, left, flags, states, news, state_grads, new_grads, fresh_grads, known_grads, end_grads,
    left_grads, pieces, heads, TOKENS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    batch, head = tl.program_id(0), tl.program_id(1)
    row, key, value = tl.arange(0, TOKENS), tl.arange(0, KEYS), tl.arange(0, VALUES)
    by_key = row[:, None] * KEYS + key[None]
    by_value = row[:, None] * VALUES + value[None]
    square = key[:, None] * VALUES + value[None]
    after = tl.zeros((KEYS, VALUES), tl.float32)
    common = tl.zeros((KEYS, VALUES), tl.float32)
    for back in range(pieces):
        piece = pieces - 1 - back
        flag = flags + (batch * pieces + piece) * 3
        place = ((batch * pieces + piece) * heads + head).to(tl.int64)
        is_common = tl.load(flag + 2)
        after += is_common * common
        common -= is_common * common
        state = tl.load(states + place * KEYS * VALUES + square)
        written = tl.load(news + place * TOKENS * VALUES + by_value)
        ending = tl.load(to_end + place * TOKENS * KEYS + by_key)
        written_grad = tl.load(new_grads + place * TOKENS * VALUES + by_value) + tl.dot(ending, after)
        tl.store(end_grads + place * TOKENS * KEYS + by_key, tl.dot(written, tl.trans(after)))
        tl.store(left_grads + place, tl.sum(state * after))
        tl.store(fresh_grads + place * TOKENS * VALUES + by_value, written_grad)
        tl.store(known_grads + place * TOKENS * KEYS + by_key, -tl.dot(written_grad, tl.trans(state)))
        old = tl.load(known + place * TOKENS * KEYS + by_key)
        before = after * tl.load(left + place) + tl.load(state_grads + place * KEYS * VALUES + square)
        before -= tl.dot(tl.trans(old), written_grad)
        after = before * tl.load(flag)
        common += before * tl.load(flag + 1)


class ScanByTriton(torch.autograd.Function):
    """``scan_by_torch`` as one kernel each way; widths and tokens are powers of two from 16 on."""

    @staticmethod
    def forward(
        context: Any, fresh: Tensor, known: Tensor, to_end: Tensor, left: Tensor, flags: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``scan_by_torch``."""
        fresh, known, to_end, left, flags = (
            each.contiguous() for each in (fresh, known, to_end, left, flags)
        )
        batch, pieces, heads, tokens, values = fresh.shape
        keys = known.shape[-1]
        states, news = fresh.new_empty(batch, pieces, heads, keys, values), torch.empty_like(fresh)
        _walk[batch, heads](
            fresh, known, to_end, left, flags, states, news, pieces, heads, tokens, keys, values
        )
        context.save_for_backward(known, to_end, left, flags, states, news)
        return states, news

    @staticmethod
    def backward(context: Any, state_grads: Tensor, new_grads: Tensor) -> Any:
        """The gradients of the first four."""
        known, to_end, left, flags, states, news = context.saved_tensors
        batch, pieces, heads, tokens, values = news.shape
        keys = known.shape[-1]
        fresh_grads, known_grads = torch.empty_like(news), torch.empty_like(known)
        end_grads, left_grads = torch.empty_like(to_end), torch.empty_like(left)
        _walk_back[batch, heads](
            known, to_end, left, flags, states, news, state_grads.contiguous(), new_grads.contiguous(),
            fresh_grads, known_grads, end_grads, left_grads, pieces, heads, tokens, keys, values,
        )  # fmt: skip
        return fresh_grads, known_grads, end_grads, left_grads, None
