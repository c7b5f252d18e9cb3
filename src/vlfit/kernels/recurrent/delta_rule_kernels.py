"""Kernels of the gated delta rule: linear attention whose cache is one matrix a head, not a row a token.

A head's state S [KEY_DIM, VALUE_DIM] is float32. A token with key k, query q (both L2-normalized, q also
divided by sqrt(KEY_DIM)), value v, log decay g and beta: S = exp(g) S; S += k (beta (v - S^T k))^T; its
output is S^T q (Yang et al., 2024: Gated Delta Networks). q, k and v come from a causal depthwise convolution
over the last KERNEL inputs, with SiLU. All of that is float32, but for what ``chunk_scan_kernel`` multiplies
in the dtype of the rows.

``gated_delta_steps_kernel`` goes token by token: for few tokens a sequence, where reading and writing the
state takes the time. Prompts go 64 tokens at a time: within a chunk, the tokens' updates solve one triangular
system (``chunk_system_kernel``), so that the state is needed only once a chunk (``chunk_scan_kernel``).

``spans`` [sequences, 5] int32: first row, number of rows, slot of the state (negative: padding, whose outputs
are zeros), 1 if the sequence has no state yet (the slot is not read), and number of pending rows.

Host side: ``delta_rule.py``.
"""

import triton
import triton.language as tl

from vlfit.kernels.launch import cache_launches
from vlfit.kernels.primitives import pdl_sync

L2_EPS = tl.constexpr(1e-6)  # under the root in the norm of queries and keys


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to float32's accuracy: decays of thousands of tokens multiply.

    As max(x, 0) + log(1 + u) with u = exp(-|x|), and log(1 + u) = 2 atanh(u / (2 + u)) by its series, whose
    argument is at most 1/3. The hardware's logarithm has an absolute error, which near 1 is a large relative
    one.
    """
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    s2 = s * s
    series = 1.0 / 13.0 + s2 * (1.0 / 15.0)
    series = 1.0 / 9.0 + s2 * (1.0 / 11.0 + s2 * series)
    series = 1.0 / 5.0 + s2 * (1.0 / 7.0 + s2 * series)
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + s2 * (1.0 / 3.0 + s2 * series))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """g = -exp(A_log) * softplus(a + dt_bias), in float32."""
    return -tl.exp(a_log.to(tl.float32)) * softplus(a.to(tl.float32) + dt_bias.to(tl.float32))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), in float32."""
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def silu(x):
    """x * sigmoid(x), in float32."""
    x = x.to(tl.float32)
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gated_norm(x, z, weight, DIM: tl.constexpr, eps):
    """RMSNorm of rows ``x`` [rows, dim] (0 past ``DIM``), times ``weight`` [1, dim], times SiLU(``z``)."""
    x_f32 = x.to(tl.float32)
    rms = tl.rsqrt(tl.sum(x_f32 * x_f32, 1) * (1.0 / DIM) + eps)[:, None]
    return (x_f32 * rms * weight.to(tl.float32) * silu(z)).to(x.dtype)


# --- a few tokens of each sequence -------------------------------------------------------------------------


@triton.jit
def load_input(
    qkv_rows,
    pending_rows,
    conv_state,
    position,
    channel,
    mask,
    pending,
    length,
    has_state,
    stride_qkv,
    CONV_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Inputs of the convolution at ``position``, in float32: 0 where not ``mask``.

    Positions from -(KERNEL - 1) are in ``conv_state`` [CONV_DIM, KERNEL - 1], those from 0 in
    ``pending_rows`` [pending, CONV_DIM], those from ``pending`` in ``qkv_rows`` [length, stride_qkv].
    ``position`` and ``channel`` broadcast against each other.
    """
    in_state = mask & (position < 0) & has_state
    state = tl.load(conv_state + channel * (KERNEL - 1) + position + (KERNEL - 1), mask=in_state, other=0.0)
    in_pending = mask & (position >= 0) & (position < pending)
    old = tl.load(pending_rows + position * CONV_DIM + channel, mask=in_pending, other=0.0)
    row = position - pending
    in_rows = mask & (position >= 0) & (row >= 0) & (row < length)
    new = tl.load(qkv_rows + row.to(tl.int64) * stride_qkv + channel, mask=in_rows, other=0.0)
    return state.to(tl.float32) + old.to(tl.float32) + new.to(tl.float32)


@triton.jit
def convolve_token(
    qkv_rows,
    pending_rows,
    conv_state,
    conv_weight,
    position,
    channel,
    mask,
    pending,
    length,
    has_state,
    stride_qkv,
    CONV_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Convolution with SiLU at ``position``: [channels] float32.

    ``channel`` and ``mask`` [channels]. The other arguments are those of ``load_input``; ``conv_weight``
    [CONV_DIM, KERNEL].
    """
    acc = tl.zeros(mask.shape, tl.float32)
    for tap in tl.static_range(KERNEL):
        weight = tl.load(conv_weight + channel * KERNEL + tap, mask=mask, other=0.0).to(tl.float32)
        x = load_input(
            qkv_rows,
            pending_rows,
            conv_state,
            position + (tap - (KERNEL - 1)),
            channel,
            mask,
            pending,
            length,
            has_state,
            stride_qkv,
            CONV_DIM,
            KERNEL,
        )
        acc += x * weight
    return silu(acc)


@triton.jit
def delta_step(state, k, v, decay, beta):
    """Update ``state`` [keys, values] by one token's ``k`` [keys] and ``v`` [values]; ``decay``: exp(g)."""
    state = state * decay
    delta = (v - tl.sum(state * k[:, None], 0)) * beta
    return state + k[:, None] * delta[None, :]


@cache_launches
@triton.jit(do_not_specialize=["spans"])
def gated_delta_steps_kernel(
    qkv,
    a,
    b,
    z,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    conv_states,
    recurrent,
    pending_rows,
    pending_decay,
    pending_beta,
    spans,
    counters,
    out,
    proj_x,
    proj_weight,
    square_sums,
    stride_qkv,
    stride_a,
    stride_b,
    stride_z,
    norm_eps,
    prenorm_eps,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    MAX_PENDING: tl.constexpr,
    COMMIT: tl.constexpr,
    PENDING_ONLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_J: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Commit pending tokens to the states and compute ``out`` [rows, HEADS, VALUE_DIM] of new ones.

    Grid: (slices of BLOCK_V values, HEADS, sequences), HEADS = KEY_HEADS * GROUP: value heads, of which GROUP
    consecutive ones share a key head. Each program holds its slice of the state in registers: read once,
    written once. With ``COMMIT`` the new rows change the states; otherwise only the pending ones do, and the
    new rows' inputs take their place in ``pending_rows`` [slots, MAX_PENDING, CONV_DIM], ``pending_decay``
    and ``pending_beta`` [slots, MAX_PENDING, HEADS] (float32: g and beta). With ``PENDING_ONLY`` (and
    ``COMMIT``) new rows are left alone. BLOCK_T: at least the new rows of a sequence.

    Several programs read the inputs of a key head, so the last of them to finish (``counters``: one for each
    sequence and key head, zero before and after) writes theirs to ``conv_states`` [slots, CONV_DIM, KERNEL -
    1] and as pending. With ``HAS_NORM`` it also applies the gated RMSNorm (``norm_weight`` [VALUE_DIM], gates
    ``z`` [rows, HEADS * VALUE_DIM]) to the outputs.

    With ``HIDDEN`` > 0 each sequence has one new row, and its ``a`` and ``b`` are written here: products of
    ``proj_x`` [rows, HIDDEN] and ``proj_weight`` [2 * HEADS, HIDDEN], ``b`` first, times the RMSNorm's factor
    from ``square_sums`` [rows, NUM_SUMS] float32.
    """
    part, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CONV_DIM: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    start = tl.load(spans + seq * 5).to(tl.int64)
    length = tl.load(spans + seq * 5 + 1)
    slot = tl.load(spans + seq * 5 + 2).to(tl.int64)
    has_state = tl.load(spans + seq * 5 + 3) == 0
    pending = tl.minimum(tl.load(spans + seq * 5 + 4), MAX_PENDING)
    pending = tl.where(has_state, pending, 0)
    if PENDING_ONLY:
        length = 0
        slot = tl.where(pending > 0, slot, -1)
    total = pending + length

    offs_t = tl.arange(0, BLOCK_T)
    offs_v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    out_rows = out + (start * HEADS + head) * VALUE_DIM + offs_v
    v_mask = offs_v < VALUE_DIM
    if slot >= 0:
        offs_k = tl.arange(0, BLOCK_K)
        k_mask = offs_k < KEY_DIM
        # Before ``pdl_sync``: the previous kernel writes the rows, not states and pending tokens.
        state_offs = (
            (slot * HEADS + head) * KEY_DIM * VALUE_DIM + offs_k[:, None] * VALUE_DIM + offs_v[None, :]
        )
        state_mask = k_mask[:, None] & v_mask[None, :]
        state = tl.load(recurrent + state_offs, mask=state_mask & has_state, other=0.0)
        a_scale = tl.load(a_log + head)
        a_bias = tl.load(dt_bias + head)
        if HIDDEN > 0:
            offs_h = tl.arange(0, BLOCK_H)
            h_mask = offs_h < HIDDEN
            b_weight = tl.load(proj_weight + head * HIDDEN + offs_h, mask=h_mask, other=0.0)
            a_weight = tl.load(proj_weight + (HEADS + head) * HIDDEN + offs_h, mask=h_mask, other=0.0)
        key_head = head // GROUP
        qkv_rows = qkv + start * stride_qkv
        old_rows = pending_rows + slot * (MAX_PENDING * CONV_DIM)
        conv_state = conv_states + slot * (CONV_DIM * (KERNEL - 1))
        q_channel = key_head * KEY_DIM + offs_k
        v_channel = 2 * KEYS + head * VALUE_DIM + offs_v
        for t in range(pending):
            k = convolve_token(
                qkv_rows, old_rows, conv_state, conv_weight, t, KEYS + q_channel, k_mask, pending, 0,
                has_state, stride_qkv, CONV_DIM, KERNEL,
            )  # fmt: skip
            v = convolve_token(
                qkv_rows, old_rows, conv_state, conv_weight, t, v_channel, v_mask, pending, 0,
                has_state, stride_qkv, CONV_DIM, KERNEL,
            )  # fmt: skip
            k = k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
            old_offs = (slot * MAX_PENDING + t) * HEADS + head
            decay = tl.exp(tl.load(pending_decay + old_offs))
            state = delta_step(state, k, v, decay, tl.load(pending_beta + old_offs))
        if not COMMIT:
            written = state_mask & ((pending > 0) | (has_state == 0))
            tl.store(recurrent + state_offs, state, mask=written)
        pdl_sync(USE_PDL)

        if HIDDEN > 0:
            inputs = tl.load(proj_x + start * HIDDEN + offs_h, mask=h_mask, other=0.0).to(tl.float32)
            offs_s = tl.arange(0, BLOCK_SUMS)
            sums = tl.load(square_sums + start * NUM_SUMS + offs_s, mask=offs_s < NUM_SUMS, other=0.0)
            factor = tl.rsqrt(tl.sum(sums, 0) / HIDDEN + prenorm_eps)
            new_a = (tl.sum(inputs * a_weight.to(tl.float32), 0) * factor).to(a.dtype.element_ty)
            new_b = (tl.sum(inputs * b_weight.to(tl.float32), 0) * factor).to(b.dtype.element_ty)
            if part == 0:
                tl.store(a + start * stride_a + head, new_a)
                tl.store(b + start * stride_b + head, new_b)
        for t in range(pending, total):
            q = convolve_token(
                qkv_rows, old_rows, conv_state, conv_weight, t, q_channel, k_mask, pending, length,
                has_state, stride_qkv, CONV_DIM, KERNEL,
            )  # fmt: skip
            k = convolve_token(
                qkv_rows, old_rows, conv_state, conv_weight, t, KEYS + q_channel, k_mask, pending, length,
                has_state, stride_qkv, CONV_DIM, KERNEL,
            )  # fmt: skip
            v = convolve_token(
                qkv_rows, old_rows, conv_state, conv_weight, t, v_channel, v_mask, pending, length,
                has_state, stride_qkv, CONV_DIM, KERNEL,
            )  # fmt: skip
            q = q * (tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * SCALE)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
            if HIDDEN == 0:
                row = start + t - pending
                new_a = tl.load(a + row * stride_a + head)
                new_b = tl.load(b + row * stride_b + head)
            state = delta_step(state, k, v, tl.exp(log_decay(new_a, a_scale, a_bias)), sigmoid(new_b))
            output = tl.sum(state * q[:, None], 0)
            out_ptrs = out_rows + (t - pending) * (HEADS * VALUE_DIM)
            tl.store(out_ptrs, output.to(out.dtype.element_ty), mask=v_mask)
        if COMMIT:
            tl.store(recurrent + state_offs, state, mask=state_mask)

        committed = total if COMMIT else pending
        q_window = load_window(
            qkv_rows, old_rows, conv_state, q_channel, k_mask, committed, pending, length, has_state,
            stride_qkv, CONV_DIM, KERNEL, BLOCK_J,
        )  # fmt: skip
        k_window = load_window(
            qkv_rows, old_rows, conv_state, KEYS + q_channel, k_mask, committed, pending, length, has_state,
            stride_qkv, CONV_DIM, KERNEL, BLOCK_J,
        )  # fmt: skip
        v_window = load_window(
            qkv_rows, old_rows, conv_state, v_channel, v_mask, committed, pending, length, has_state,
            stride_qkv, CONV_DIM, KERNEL, BLOCK_J,
        )  # fmt: skip
        tl.debug_barrier()  # every thread has read its inputs and stored its outputs
        store_window(conv_state, v_window, v_channel, v_mask, KERNEL, BLOCK_J)  # no other program reads these
        if not COMMIT:
            store_pending(qkv_rows, old_rows, v_channel, v_mask, offs_t, length, stride_qkv, CONV_DIM)
        counter = counters + seq * KEY_HEADS + key_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == GROUP * tl.num_programs(0) - 1:
            tl.store(counter, 0)
            store_window(conv_state, q_window, q_channel, k_mask, KERNEL, BLOCK_J)
            store_window(conv_state, k_window, KEYS + q_channel, k_mask, KERNEL, BLOCK_J)
            if not COMMIT:
                store_pending(qkv_rows, old_rows, q_channel, k_mask, offs_t, length, stride_qkv, CONV_DIM)
                store_pending(
                    qkv_rows, old_rows, KEYS + q_channel, k_mask, offs_t, length, stride_qkv, CONV_DIM
                )
            offs_d = tl.arange(0, BLOCK_D)
            d_mask = offs_d < VALUE_DIM
            is_row = offs_t < length
            for member in tl.static_range(GROUP):
                value_head = key_head * GROUP + member
                if not COMMIT:
                    a_ptrs = a + (start + offs_t) * stride_a + value_head
                    b_ptrs = b + (start + offs_t) * stride_b + value_head
                    rows_a = tl.load(a_ptrs, mask=is_row, other=0.0, cache_modifier=".cg")
                    rows_b = tl.load(b_ptrs, mask=is_row, other=0.0, cache_modifier=".cg")
                    g = log_decay(rows_a, tl.load(a_log + value_head), tl.load(dt_bias + value_head))
                    offs = (slot * MAX_PENDING + offs_t) * HEADS + value_head
                    tl.store(pending_decay + offs, g, mask=is_row)
                    tl.store(pending_beta + offs, sigmoid(rows_b), mask=is_row)
                if HAS_NORM:
                    norm_row = start + offs_t[:, None]
                    mask = is_row[:, None] & d_mask[None, :]
                    x_ptrs = out + (norm_row * HEADS + value_head) * VALUE_DIM + offs_d[None, :]
                    # Bypass L1, which does not see other multiprocessors' writes.
                    x = tl.load(x_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
                    gate = tl.load(
                        z + norm_row * stride_z + value_head * VALUE_DIM + offs_d[None, :],
                        mask=mask,
                        other=0.0,
                    )
                    weight = tl.load(norm_weight + offs_d, mask=d_mask, other=0.0)[None, :]
                    tl.store(x_ptrs, gated_norm(x, gate, weight, VALUE_DIM, norm_eps), mask=mask)
    else:
        pdl_sync(USE_PDL)
        mask = (offs_t[:, None] < length) & v_mask[None, :]
        zeros = tl.zeros((BLOCK_T, BLOCK_V), out.dtype.element_ty)
        tl.store(out_rows[None, :] + offs_t[:, None] * (HEADS * VALUE_DIM), zeros, mask=mask)


@triton.jit
def load_window(
    qkv_rows,
    pending_rows,
    conv_state,
    channel,
    mask,
    committed,
    pending,
    length,
    has_state,
    stride_qkv,
    CONV_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """The convolution's state after ``committed`` positions: [channels, BLOCK_J] float32.

    ``channel`` and ``mask`` [channels]. The other arguments are those of ``load_input``.
    """
    offs_j = tl.arange(0, BLOCK_J)[None, :]
    return load_input(
        qkv_rows,
        pending_rows,
        conv_state,
        committed - (KERNEL - 1) + offs_j,
        channel[:, None],
        mask[:, None] & (offs_j < KERNEL - 1),
        pending,
        length,
        has_state,
        stride_qkv,
        CONV_DIM,
        KERNEL,
    )


@triton.jit
def store_window(conv_state, window, channel, mask, KERNEL: tl.constexpr, BLOCK_J: tl.constexpr):
    """Write ``window`` (``load_window``) to ``conv_state``, once all threads have read theirs of it."""
    offs_j = tl.arange(0, BLOCK_J)[None, :]
    state_ptrs = conv_state + channel[:, None] * (KERNEL - 1) + offs_j
    state_mask = mask[:, None] & (offs_j < KERNEL - 1)
    tl.store(state_ptrs, window.to(conv_state.dtype.element_ty), mask=state_mask)


@triton.jit
def store_pending(qkv_rows, pending_rows, channel, mask, offs_t, length, stride_qkv, CONV_DIM: tl.constexpr):
    """Keep the rows' ``channel`` [channels] as pending, once all threads have read the old ones."""
    row_mask = (offs_t[:, None] < length) & mask[None, :]
    row_offs = offs_t[:, None].to(tl.int64) * stride_qkv + channel[None, :]
    x = tl.load(qkv_rows + row_offs, mask=row_mask, other=0.0)
    pending_ptrs = pending_rows + offs_t[:, None] * CONV_DIM + channel[None, :]
    tl.store(pending_ptrs, x.to(pending_rows.dtype.element_ty), mask=row_mask)


# --- prompt chunks -----------------------------------------------------------------------------------------


@cache_launches
@triton.jit(do_not_specialize=["spans"])
def convolve_rows_kernel(
    qkv,
    conv_weight,
    conv_states,
    spans,
    out,
    stride_qkv,
    CONV_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Causal convolution with SiLU of each sequence's rows: ``out`` [rows, CONV_DIM] in the rows' dtype.

    Grid: (tiles of BLOCK_R rows of the longest sequence, tiles of BLOCK_C channels, sequences). The first
    tile's program alone reads a sequence's ``conv_states`` [slots, CONV_DIM, KERNEL - 1], and writes the new
    one.
    """
    tile, seq = tl.program_id(0), tl.program_id(2)
    start = tl.load(spans + seq * 5).to(tl.int64)
    length = tl.load(spans + seq * 5 + 1)
    slot = tl.load(spans + seq * 5 + 2).to(tl.int64)
    has_state = tl.load(spans + seq * 5 + 3) == 0
    if (slot >= 0) & (tile * BLOCK_R < length):
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        c_mask = channel < CONV_DIM
        position = tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        mask = (position < length) & c_mask[None, :]
        qkv_rows = qkv + start * stride_qkv
        conv_state = conv_states + slot * (CONV_DIM * (KERNEL - 1))
        acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for tap in tl.static_range(KERNEL):
            weight = tl.load(conv_weight + channel * KERNEL + tap, mask=c_mask, other=0.0).to(tl.float32)
            x = load_input(
                qkv_rows,
                qkv,
                conv_state,
                position + (tap - (KERNEL - 1)),
                channel[None, :],
                mask,
                0,
                length,
                has_state & (tile == 0),
                stride_qkv,
                CONV_DIM,
                KERNEL,
            )
            acc += x * weight[None, :]
        out_ptrs = out + (start + position) * CONV_DIM + channel[None, :]
        tl.store(out_ptrs, silu(acc).to(out.dtype.element_ty), mask=mask)
        if tile == 0:
            window = load_window(
                qkv_rows,
                qkv,
                conv_state,
                channel,
                c_mask,
                length,
                0,
                length,
                has_state,
                stride_qkv,
                CONV_DIM,
                KERNEL,
                BLOCK_J,
            )
            tl.debug_barrier()  # every thread has read the state
            store_window(conv_state, window, channel, c_mask, KERNEL, BLOCK_J)


@triton.jit
def invert_unit_lower(lower, SIZE: tl.constexpr):
    """Inverse of I + ``lower`` [SIZE, SIZE], strictly lower triangular, in float32. SIZE: 32 or 64.

    Diagonal blocks of 16 rows by forward substitution, all at once; then neighbours are merged. (A series of
    powers of ``lower`` would need no substitution, but where keys repeat, its terms grow to 1e18 and cancel.)
    """
    NUM: tl.constexpr = SIZE // 16
    block = tl.arange(0, NUM)
    offs = tl.arange(0, 16)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, tl.reshape(lower, (NUM, 16, NUM, 16)), 0.0), 2)
    row = offs[None, :, None]
    inverses = tl.where(row == offs[None, None, :], 1.0, 0.0) + tl.zeros((NUM, 16, 16), tl.float32)
    for step in range(1, 16):
        # Row ``step`` of an inverse: the unit row less ``lower``'s row times the rows above.
        factors = tl.sum(tl.where(row == step, blocks, 0.0), 1)
        change = tl.sum(factors[:, :, None] * inverses, 1)
        inverses = tl.where(row == step, inverses - change[:, None, :], inverses)
    if NUM == 2:
        whole = merge_inverses(pick_block(inverses, 0), pick_block(inverses, 1), quarter(lower, 1, 0, 16), 16)
    else:
        whole = merge_four(inverses, lower)
    return whole


@triton.jit
def merge_four(inverses, lower):
    """Merge ``inverses`` [4, 16, 16] of the diagonal blocks of I + ``lower`` [64, 64]."""
    first, last = quarter(lower, 0, 0, 32), quarter(lower, 1, 1, 32)
    first = merge_inverses(pick_block(inverses, 0), pick_block(inverses, 1), quarter(first, 1, 0, 16), 16)
    last = merge_inverses(pick_block(inverses, 2), pick_block(inverses, 3), quarter(last, 1, 0, 16), 16)
    return merge_inverses(first, last, quarter(lower, 1, 0, 32), 32)


@triton.jit
def merge_inverses(p, r, q, HALF: tl.constexpr):
    """Inverse of [[P, 0], [Q, R]] from ``p`` and ``r``, the inverses of P and R: [[p, 0], [-r Q p, r]]."""
    q = -tl.dot(r, tl.dot(q, p, input_precision="ieee"), input_precision="ieee")
    index = tl.arange(0, 2)
    top = index[:, None, None, None] == 0
    left = index[None, None, :, None] == 0
    p, q, r = p[None, :, None, :], q[None, :, None, :], r[None, :, None, :]
    joined = tl.where(top, tl.where(left, p, 0.0), tl.where(left, q, r))
    return tl.reshape(joined, (2 * HALF, 2 * HALF))


@triton.jit
def pick_block(blocks, index: tl.constexpr):
    """``blocks`` [NUM, rows, columns] at ``index``."""
    return tl.sum(tl.where(tl.arange(0, blocks.shape[0])[:, None, None] == index, blocks, 0.0), 0)


@triton.jit
def quarter(matrix, ROW: tl.constexpr, COLUMN: tl.constexpr, HALF: tl.constexpr):
    """One of the four blocks [HALF, HALF] of ``matrix``."""
    index = tl.arange(0, 2)
    chosen = (index[:, None, None, None] == ROW) & (index[None, None, :, None] == COLUMN)
    return tl.sum(tl.sum(tl.where(chosen, tl.reshape(matrix, (2, HALF, 2, HALF)), 0.0), 2), 0)


@cache_launches
@triton.jit(do_not_specialize=["spans", "num_rows"])
def chunk_system_kernel(
    qkv,
    a,
    b,
    a_log,
    dt_bias,
    spans,
    systems,
    scales,
    num_rows,
    stride_a,
    stride_b,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What each chunk's updates and outputs are beside the state: triangular systems, solved, and scores.

    Grid: (chunks of the longest sequence, HEADS, sequences). With keys and queries of ``qkv`` [rows,
    CONV_DIM], which are convolved but not normalized, and G the sum of log decays from the chunk's beginning:

    - ``systems`` [rows, HEADS, 2, CHUNK]: rows of T = (I + A)^-1 with A_ij = beta_i exp(G_i - G_j) k_i.k_j
      for j < i; then rows of the scores exp(G_i - G_j) q_i.k_j for j <= i. In the dtype of ``qkv``.
    - ``scales`` [5, HEADS, rows] float32: factors of values (beta), of keys that read the state (beta exp(G)
      / |k|), of queries (exp(G) / |q| / sqrt(KEY_DIM)), of keys that write it (exp(G_last - G) / |k|), and of
      the state (exp(G_last)).
    """
    chunk, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CONV_DIM: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    start = tl.load(spans + seq * 5).to(tl.int64)
    length = tl.load(spans + seq * 5 + 1)
    slot = tl.load(spans + seq * 5 + 2)
    if (slot >= 0) & (chunk * CHUNK < length):
        offs_c = tl.arange(0, CHUNK)
        row_mask = chunk * CHUNK + offs_c < length
        row = start + chunk * CHUNK + offs_c
        offs_k = tl.arange(0, BLOCK_K)[None, :]
        mask = row_mask[:, None] & (offs_k < KEY_DIM)
        q_ptrs = qkv + row[:, None] * CONV_DIM + (head // GROUP) * KEY_DIM + offs_k
        q = tl.load(q_ptrs, mask=mask, other=0.0)
        k = tl.load(q_ptrs + KEYS, mask=mask, other=0.0)
        q_f32 = q.to(tl.float32)
        k_f32 = k.to(tl.float32)
        q_norm = tl.rsqrt(tl.sum(q_f32 * q_f32, 1) + L2_EPS) * SCALE
        k_norm = tl.rsqrt(tl.sum(k_f32 * k_f32, 1) + L2_EPS)
        new_a = tl.load(a + row * stride_a + head, mask=row_mask, other=0.0)
        new_b = tl.load(b + row * stride_b + head, mask=row_mask, other=0.0)
        g = tl.where(row_mask, log_decay(new_a, tl.load(a_log + head), tl.load(dt_bias + head)), 0.0)
        beta = tl.where(row_mask, sigmoid(new_b), 0.0)
        total = tl.cumsum(g, 0)
        last = tl.sum(g, 0)

        keys = tl.trans(k)
        below = offs_c[:, None] - offs_c[None, :]
        difference = tl.where(below >= 0, total[:, None] - total[None, :], 0.0)
        decay = tl.exp(difference) * k_norm[None, :]
        products = tl.dot(k, keys, input_precision="ieee")
        lower = tl.where(below > 0, products * decay * (beta * k_norm)[:, None], 0.0)
        scores = tl.dot(q, keys, input_precision="ieee")
        scores = tl.where(below >= 0, scores * decay * q_norm[:, None], 0.0)

        system_ptrs = systems + (row * HEADS + head)[:, None] * (2 * CHUNK) + offs_c[None, :]
        dtype = systems.dtype.element_ty
        tl.store(system_ptrs + CHUNK, scores.to(dtype), mask=row_mask[:, None])
        growth = tl.exp(total)
        scale_ptrs = scales + head.to(tl.int64) * num_rows + row
        plane = HEADS * (row * 0 + num_rows)  # in 64 bits
        tl.store(scale_ptrs, beta, mask=row_mask)
        tl.store(scale_ptrs + plane, beta * growth * k_norm, mask=row_mask)
        tl.store(scale_ptrs + 2 * plane, growth * q_norm, mask=row_mask)
        tl.store(scale_ptrs + 3 * plane, tl.exp(last - total) * k_norm, mask=row_mask)
        tl.store(scale_ptrs + 4 * plane, tl.exp(last) + 0.0 * g, mask=row_mask)
        tl.store(system_ptrs, invert_unit_lower(lower, CHUNK).to(dtype), mask=row_mask[:, None])


@cache_launches
@triton.jit(do_not_specialize=["spans", "num_rows"])
def chunk_scan_kernel(
    qkv,
    systems,
    scales,
    recurrent,
    spans,
    out,
    num_rows,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Pass the state from chunk to chunk; ``out`` [rows, HEADS, VALUE_DIM].

    Grid: (slices of BLOCK_V values, HEADS, sequences). A program holds its slice of the state in float32 and
    rounds it to the dtype of ``qkv`` for products alone. Inputs are those that ``chunk_system_kernel`` reads
    and writes. ``recurrent`` [slots, HEADS, KEY_DIM, VALUE_DIM] float32: states, read unless the sequence is
    new, and written.
    """
    part, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CONV_DIM: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    start = tl.load(spans + seq * 5).to(tl.int64)
    length = tl.load(spans + seq * 5 + 1)
    slot = tl.load(spans + seq * 5 + 2).to(tl.int64)
    has_state = tl.load(spans + seq * 5 + 3) == 0
    offs_c = tl.arange(0, CHUNK)
    offs_v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    v_mask = offs_v < VALUE_DIM
    dtype = qkv.dtype.element_ty
    if slot >= 0:
        offs_k = tl.arange(0, BLOCK_K)
        k_mask = offs_k < KEY_DIM
        state_ptrs = recurrent + (slot * HEADS + head) * KEY_DIM * VALUE_DIM
        state_ptrs += offs_k[:, None] * VALUE_DIM + offs_v[None, :]
        state_mask = k_mask[:, None] & v_mask[None, :]
        state = tl.load(state_ptrs, mask=state_mask & has_state, other=0.0)
        plane = HEADS * (start * 0 + num_rows)  # in 64 bits
        for first in range(0, length, CHUNK):
            row_mask = first + offs_c < length
            row = start + first + offs_c
            q_ptrs = qkv + row[:, None] * CONV_DIM + (head // GROUP) * KEY_DIM + offs_k[None, :]
            q_mask = row_mask[:, None] & k_mask[None, :]
            k = tl.load(q_ptrs + KEYS, mask=q_mask, other=0.0)
            q = tl.load(q_ptrs, mask=q_mask, other=0.0)
            v_ptrs = qkv + row[:, None] * CONV_DIM + 2 * KEYS + head * VALUE_DIM + offs_v[None, :]
            v = tl.load(v_ptrs, mask=row_mask[:, None] & v_mask[None, :], other=0.0)
            system_ptrs = systems + (row * HEADS + head)[:, None] * (2 * CHUNK) + offs_c[None, :]
            inverse = tl.load(system_ptrs, mask=row_mask[:, None], other=0.0)
            scores = tl.load(system_ptrs + CHUNK, mask=row_mask[:, None], other=0.0)
            scale_ptrs = scales + head.to(tl.int64) * num_rows + row
            beta = tl.load(scale_ptrs, mask=row_mask, other=0.0)
            k_read = tl.load(scale_ptrs + plane, mask=row_mask, other=0.0)
            q_read = tl.load(scale_ptrs + 2 * plane, mask=row_mask, other=0.0)
            k_write = tl.load(scale_ptrs + 3 * plane, mask=row_mask, other=0.0)
            keep = tl.load(scales + 4 * plane + head.to(tl.int64) * num_rows + start + first)

            rounded = state.to(dtype)
            known = tl.dot(k, rounded, input_precision="ieee")
            output = tl.dot(q, rounded, input_precision="ieee") * q_read[:, None]
            missing = v.to(tl.float32) * beta[:, None] - known * k_read[:, None]
            update = tl.dot(inverse, missing.to(dtype), input_precision="ieee")
            output += tl.dot(scores, update.to(dtype), input_precision="ieee")
            written = (update * k_write[:, None]).to(dtype)
            state = state * keep + tl.dot(tl.trans(k), written, input_precision="ieee")
            out_ptrs = out + (row * HEADS + head)[:, None] * VALUE_DIM + offs_v[None, :]
            tl.store(out_ptrs, output.to(out.dtype.element_ty), mask=row_mask[:, None] & v_mask[None, :])
        tl.store(state_ptrs, state, mask=state_mask)
    else:
        zeros = tl.zeros((CHUNK, BLOCK_V), out.dtype.element_ty)
        for first in range(0, length, CHUNK):
            row = start + first + offs_c
            mask = (first + offs_c < length)[:, None] & v_mask[None, :]
            tl.store(out + (row * HEADS + head)[:, None] * VALUE_DIM + offs_v[None, :], zeros, mask=mask)


# --- norm --------------------------------------------------------------------------------------------------


@cache_launches
@triton.jit(do_not_specialize=["num_heads_total"])
def gated_rms_norm_kernel(
    x,
    z,
    weight,
    out,
    num_heads_total,
    stride_z,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """RMSNorm of each head of ``x`` [rows, HEADS, DIM], times ``weight`` [DIM] and SiLU(``z``), to ``out``.

    Grid: (tiles of BLOCK_N of the rows * HEADS = ``num_heads_total`` heads,). ``stride_z``: elements from row
    to row of ``z``, whose heads are contiguous.
    """
    pdl_sync(USE_PDL)
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    d_mask = offs_d < DIM
    mask = (index < num_heads_total) & d_mask
    offs = index.to(tl.int64) * DIM + offs_d
    rows = tl.load(x + offs, mask=mask, other=0.0)
    z_offs = (index // HEADS).to(tl.int64) * stride_z + index % HEADS * DIM + offs_d
    gate = tl.load(z + z_offs, mask=mask, other=0.0)
    w = tl.load(weight + offs_d, mask=d_mask, other=0.0)
    tl.store(out + offs, gated_norm(rows, gate, w, DIM, eps), mask=mask)
