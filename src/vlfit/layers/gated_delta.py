"""The gated delta rule in plain PyTorch: linear attention whose state has one size, whatever the context.

Each value head has a state S [key_dim, value_dim]. A token with query q, key k, value v, decay g <= 0 and
write strength beta changes and reads it:

    S = exp(g) S;  S = S + k (beta (v - k S));  output = q S

q, k and v come out of a causal convolution of a few tokens, whose last inputs are part of the state. All of
it is computed in float32. Source: transformers' ``torch_recurrent_gated_delta_rule`` and
``torch_chunk_gated_delta_rule`` (Qwen3-Next, Qwen3.5). These functions are the reference of the kernels.

Draft tokens: a step may leave its tokens *pending* (``commit=False``). Their inputs are kept beside the
state, which stays as it is, and the next step commits as many of them as were accepted before it reads the
state. So a rejected draft costs nothing, and a step reads and writes a state once.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vlfit import kernels
from vlfit.kernels.recurrent import delta_rule as recurrent
from vlfit.kernels.recurrent.delta_rule import (
    DecayProjection,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    OutputGate,
)

# Columns of ``spans`` [sequences, 5] int32: first row in the batch, number of rows, slot of the state, 1 if
# there is no state yet (the slot is not read), and how many of the pending tokens were accepted.
START, LENGTH, SLOT, IS_NEW, PENDING = range(5)
SPAN_COLUMNS = 5
UNUSED_SLOT = -1  # of a row of ``spans`` without a sequence

CHUNK = 64  # tokens that ``gated_delta_chunks`` computes at once
NORM_EPS = 1e-6  # of the L2 norm of queries and keys


@dataclass(frozen=True, slots=True)
class StateSpans:
    """Rows and states of the sequences of a batch, for layers that keep a state.

    ``table`` [sequences, 5] int32, columns ``START``, ``LENGTH``, ``SLOT``, ``IS_NEW``, ``PENDING``: first
    row in the batch, number of rows, slot of the state, 1 if there is no state yet, and how many of the
    pending tokens were accepted. The first ``num_steps`` sequences decode, perhaps with draft tokens, and
    have the first ``step_rows`` rows; the others are prefill chunks. ``max_step_len``, ``max_chunk_len``:
    most rows of a decoding sequence and of a chunk, 0 without any. ``commit``: whether decoded tokens go into
    the states at once, as they do without drafts.
    """

    table: Tensor
    num_steps: int
    step_rows: int
    max_step_len: int
    max_chunk_len: int
    commit: bool = True


def projects_decays(device: torch.device) -> bool:
    """Whether ``gated_delta`` takes a ``DecayProjection`` on ``device``."""
    return kernels.enabled_for("delta_net", device)


def gated_delta(
    rows: DeltaRows,
    weights: DeltaWeights,
    state: DeltaState,
    spans: StateSpans,
    gate: OutputGate,
    projection: DecayProjection | None = None,
) -> Tensor:
    """Run all rows of a batch, and the gated RMSNorm of the outputs: [rows, value_heads * value_dim].

    Updates ``state``. Decoding sequences go token by token, prefill chunks in chunks. ``projection``: of a
    single row that decodes, to compute its ``rows.a`` and ``rows.b``; only where ``projects_decays``.
    """
    steps, chunks = spans.table[: spans.num_steps], spans.table[spans.num_steps :]
    first = slice(spans.step_rows)
    decoded = DeltaRows(rows.qkv[first], rows.a[first], rows.b[first])
    if kernels.enabled_for("delta_net", rows.qkv.device):
        gate_of_steps = replace(gate, z=gate.z[first])
        longest = spans.max_step_len
        if not len(chunks):
            return recurrent.gated_delta_steps(
                rows,
                weights,
                state,
                steps,
                max_length=longest,
                commit=spans.commit,
                gate=gate,
                projection=projection,
            ).flatten(1)
        output = recurrent.gated_delta_chunks(
            rows, weights, state, chunks, max_length=spans.max_chunk_len, gate=gate
        )
        if len(steps):
            output[first] = recurrent.gated_delta_steps(
                decoded, weights, state, steps, max_length=longest, commit=spans.commit, gate=gate_of_steps
            )
        return output.flatten(1)
    if not len(chunks):
        output = gated_delta_steps(rows, weights, state, steps, commit=spans.commit)
    else:
        output = gated_delta_chunks(rows, weights, state, chunks)
        if len(steps):
            output[first] = gated_delta_steps(decoded, weights, state, steps, commit=spans.commit)
    return gated_rms_norm(output, gate.z.unflatten(1, output.shape[1:]), gate.weight, gate.eps).flatten(1)


def gated_delta_steps(
    rows: DeltaRows, weights: DeltaWeights, state: DeltaState, spans: Tensor, *, commit: bool = True
) -> Tensor:
    """Run few tokens of each sequence, one after the other: [rows, value_heads, value_dim].

    The result has the dtype of ``rows.qkv`` and all its rows; those of no sequence are 0. ``spans``: as
    ``StateSpans.table``; rows with ``UNUSED_SLOT`` are skipped. Accepted pending tokens are committed first.
    ``commit``: the tokens go into the state; False: they become the pending ones. Raises ``ValueError`` if
    there are more of these than ``state`` has room for.
    """
    decay, beta = _gates(rows, weights)
    value_heads, value_dim = state.recurrent.shape[1], state.recurrent.shape[3]
    output = rows.qkv.new_zeros((len(rows.qkv), value_heads, value_dim))
    used = [span for span in spans.tolist() if span[SLOT] >= 0]
    if commit and used and all(_is_plain_step(span) for span in used):
        starts = [span[START] for span in used]
        if starts == list(range(starts[0], starts[0] + len(starts))):
            part = slice(starts[0], starts[0] + len(starts))
            slots = torch.tensor([span[SLOT] for span in used], device=rows.qkv.device)
            output[part] = _step(rows.qkv[part], decay[part], beta[part], weights, state, slots)
            return output
    for span in used:
        part = slice(span[START], span[START] + span[LENGTH])
        qkv = rows.qkv[part].float()
        conv, recurrent = _state_before(span, weights, state)
        slot, room = span[SLOT], state.pending_rows.shape[1]
        if commit:
            mixed, conv = _convolve(qkv, conv, weights.conv)
            output[part] = _recurrent(mixed, decay[part], beta[part], recurrent)
            state.conv[slot], state.recurrent[slot] = conv, recurrent
            continue
        if span[LENGTH] > room:
            raise ValueError(f"{span[LENGTH]} tokens cannot wait: there is room for {room}")
        state.conv[slot], state.recurrent[slot] = conv, recurrent
        mixed, _ = _convolve(qkv, conv, weights.conv)
        output[part] = _recurrent(mixed, decay[part], beta[part], recurrent)
        state.pending_rows[slot, : span[LENGTH]] = qkv
        state.pending_decay[slot, : span[LENGTH]] = decay[part]
        state.pending_beta[slot, : span[LENGTH]] = beta[part]
    return output


def gated_delta_chunks(rows: DeltaRows, weights: DeltaWeights, state: DeltaState, spans: Tensor) -> Tensor:
    """Run many tokens of each sequence, ``CHUNK`` at a time: [rows, value_heads, value_dim].

    Arguments and result are those of ``gated_delta_steps`` with ``commit``, up to rounding. Within a chunk
    the rule is a triangular system of equations, solved for all tokens at once; the state is read and written
    once a chunk.
    """
    decay, beta = _gates(rows, weights)
    value_heads, value_dim = state.recurrent.shape[1], state.recurrent.shape[3]
    output = rows.qkv.new_zeros((len(rows.qkv), value_heads, value_dim))
    for span in spans.tolist():
        if span[SLOT] < 0:
            continue
        conv, recurrent = _state_before(span, weights, state)
        end = span[START] + span[LENGTH]
        for first in range(span[START], end, CHUNK):
            row = slice(first, min(first + CHUNK, end))
            mixed, conv = _convolve(rows.qkv[row].float(), conv, weights.conv)
            query, key, value = (each.transpose(0, 1) for each in _split(mixed, recurrent))
            read, recurrent = _chunk(query, key, value, decay[row].T, beta[row].T, recurrent)
            output[row] = read.transpose(0, 1)
        state.conv[span[SLOT]], state.recurrent[span[SLOT]] = conv, recurrent
    return output


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x`` [..., width] over the last dimension, times ``weight`` [width] and SiLU(``z``).

    Computed in float32; returns a new tensor in the dtype of ``x``.
    """
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * scale).mul_(weight).mul_(F.silu(z.float())).to(x.dtype)


def _is_plain_step(span: list[int]) -> bool:
    return span[LENGTH] == 1 and not span[IS_NEW] and not span[PENDING]


def _gates(rows: DeltaRows, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Decay g and write strength beta of each row, [rows, value_heads] float32."""
    decay = -weights.decay_log.exp() * F.softplus(rows.a.float() + weights.decay_bias)
    return decay, rows.b.float().sigmoid()


def _state_before(span: list[int], weights: DeltaWeights, state: DeltaState) -> tuple[Tensor, Tensor]:
    """Copies of a sequence's ``conv`` and ``recurrent``, with its accepted pending tokens committed."""
    slot, count = span[SLOT], span[PENDING]
    if span[IS_NEW]:
        return torch.zeros_like(state.conv[slot]), torch.zeros_like(state.recurrent[slot])
    conv, recurrent = state.conv[slot].clone(), state.recurrent[slot].clone()
    if count:
        mixed, conv = _convolve(state.pending_rows[slot, :count], conv, weights.conv)
        _recurrent(mixed, state.pending_decay[slot, :count], state.pending_beta[slot, :count], recurrent)
    return conv, recurrent


def _convolve(qkv: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The causal convolution of ``qkv`` [rows, channels] and SiLU, [rows, channels]; and the inputs to keep.

    ``before`` [channels, kernel - 1]: the inputs before the first row; the second result has that shape too.
    """
    inputs = torch.cat((before, qkv.T), dim=1)
    mixed = F.conv1d(inputs[None], weight[:, None], groups=len(weight))[0].T
    return F.silu(mixed), inputs[:, len(qkv) :]


def _split(mixed: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [..., value_heads, key_dim] and values [..., value_heads, value_dim] of ``mixed``.

    Queries and keys are normalized, and repeated for the consecutive value heads that share them; queries are
    scaled. ``recurrent`` [..., value_heads, key_dim, value_dim] has the shapes.
    """
    value_heads, key_dim, value_dim = recurrent.shape[-3:]
    width = (mixed.shape[-1] - value_heads * value_dim) // 2
    query, key, value = mixed.split((width, width, value_heads * value_dim), dim=-1)
    both = torch.stack((query, key)).unflatten(-1, (-1, key_dim))
    both = both * torch.rsqrt((both * both).sum(-1, keepdim=True) + NORM_EPS)
    if (shared := value_heads * key_dim // width) > 1:
        both = both.repeat_interleave(shared, dim=-2)
    return both[0] * key_dim**-0.5, both[1], value.unflatten(-1, (value_heads, value_dim))


def _recurrent(mixed: Tensor, decay: Tensor, beta: Tensor, recurrent: Tensor) -> Tensor:
    """The rule for ``mixed`` [rows, channels], token by token: [rows, value_heads, value_dim].

    Changes ``recurrent`` [value_heads, key_dim, value_dim].
    """
    query, key, value = _split(mixed, recurrent)
    output = torch.empty_like(value)
    for row, kept in enumerate(decay.exp()):
        output[row] = _update(query[row], key[row], value[row], kept, beta[row], recurrent)
    return output


def _update(
    query: Tensor, key: Tensor, value: Tensor, kept: Tensor, beta: Tensor, recurrent: Tensor
) -> Tensor:
    """One token: changes ``recurrent`` [..., key_dim, value_dim], returns its output [..., value_dim].

    ``kept``, ``beta`` [...]: the share of the state that decay leaves, and the write strength.
    """
    recurrent.mul_(kept[..., None, None])
    delta = (value - (key[..., None, :] @ recurrent)[..., 0, :]).mul_(beta[..., None])
    recurrent.addcmul_(key[..., None], delta[..., None, :])
    return (query[..., None, :] @ recurrent)[..., 0, :]


def _step(
    qkv: Tensor, decay: Tensor, beta: Tensor, weights: DeltaWeights, state: DeltaState, slots: Tensor
) -> Tensor:
    """One token of each sequence: all at once. ``slots`` [sequences]."""
    alone = len(slots) == 1
    slot = int(slots[0])
    conv = state.conv[slot : slot + 1] if alone else state.conv[slots]
    recurrent = state.recurrent[slot : slot + 1] if alone else state.recurrent[slots]
    inputs = torch.cat((conv, qkv.float()[..., None]), dim=-1)
    mixed = F.silu((inputs * weights.conv).sum(-1))
    query, key, value = _split(mixed, recurrent)
    output = _update(query, key, value, decay.exp(), beta, recurrent)
    if alone:
        conv.copy_(inputs[..., 1:])
    else:
        state.conv[slots], state.recurrent[slots] = inputs[..., 1:], recurrent
    return output


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, recurrent: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule for one chunk: [heads, tokens, value_dim], and the state after it.

    ``query``, ``key`` and ``value`` [heads, tokens, width]; ``decay``, ``beta`` [heads, tokens];
    ``recurrent`` [heads, key_dim, value_dim] is not changed.
    """
    total = decay.cumsum(-1)
    # How much of what token j wrote is left at token i: 0 for later j, where the exponent may overflow.
    left = (total[:, :, None] - total[:, None]).exp().tril_()
    since = total.exp()[..., None]
    weighted = key * beta[..., None]
    # (1 + L) X = beta (V - decayed K S): what each token writes, given what the earlier ones wrote.
    system = (weighted @ key.transpose(1, 2)).mul_(left)
    wanted = value * beta[..., None] - (weighted * since) @ recurrent
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = (query * since) @ recurrent + (query @ key.transpose(1, 2)).mul_(left) @ written
    remaining = (total[:, -1:] - total).exp()[..., None]
    return output, recurrent * since[:, -1:] + (key * remaining).transpose(1, 2) @ written
