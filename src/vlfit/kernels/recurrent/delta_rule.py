"""The gated delta rule on a GPU: states of linear attention, by slot. Reference: ``layers/gated_delta.py``.

Chooses tiles, allocates outputs and scratch and launches the kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlfit.kernels.gemm.epilogue import PreNormRows
from vlfit.kernels.launch import MAX_TILE_COUNTERS, next_power_of_2, pdl_options, tile_counters
from vlfit.kernels.target import card_of, launches_on

SCALES = 5  # float32 of each row and value head, from ``chunk_system_kernel`` to ``chunk_scan_kernel``
_CONV_ROWS, _CONV_CHANNELS = 32, 128  # tile of the convolution
_NORM_HEADS = 8  # per program of gated_rms_norm


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Parameters of a layer, all float32.

    ``conv`` [channels, kernel]: of the depthwise convolution over query, key and value channels.
    ``decay_log`` [value_heads]: A_log. ``decay_bias`` [value_heads]: dt_bias.
    """

    conv: Tensor
    decay_log: Tensor
    decay_bias: Tensor


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Inputs of a batch; rows may be part of wider ones.

    ``qkv`` [rows, channels]: queries, keys and values, before the convolution. ``a`` and ``b`` [rows,
    value_heads]: inputs of decay and write strength.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class DeltaState:
    """The state of a layer, by slot.

    ``conv`` [slots, channels, kernel - 1]: the convolution's last inputs, newest last. ``recurrent`` [slots,
    value_heads, key_dim, value_dim] float32. ``pending_rows`` [slots, tokens, channels], ``pending_decay``
    and ``pending_beta`` [slots, tokens, value_heads] float32: of tokens that are not in the state yet the
    inputs of the convolution, the decay g and the write strength.
    """

    conv: Tensor
    recurrent: Tensor
    pending_rows: Tensor
    pending_decay: Tensor
    pending_beta: Tensor


@dataclass(frozen=True, slots=True)
class OutputGate:
    """A gated RMSNorm of the outputs: ``z`` [rows, value_heads * value_dim], ``weight`` [value_dim]."""

    z: Tensor
    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class DecayProjection:
    """The linear layer that decay and write strength are computed from, for one row.

    ``x``: its input, [1, hidden]. ``weight`` [2 * value_heads, hidden]: of ``DeltaRows.b``, then of ``a``.
    """

    x: PreNormRows
    weight: Tensor


@dataclass(frozen=True, slots=True)
class StateTiles:
    """Tile of one program: ``values`` columns of a head's state, by ``warps``; pipeline ``stages``."""

    values: int
    warps: int
    stages: int = 1


def step_tiles(sequences: int) -> StateTiles:
    """The default tile of ``gated_delta_steps``: two warps where several sequences fill a card."""
    return StateTiles(32, 4) if sequences <= 2 else StateTiles(32, 2)


def chunk_length(itemsize: int, max_length: int) -> int:
    """Tokens of a prompt that are computed at once, for rows of ``itemsize`` bytes a value.

    As many as fit shared memory (99 KiB on consumer cards) and registers; fewer if the longest prompt, of
    ``max_length`` tokens, fits them: a system of 64 equations takes as long for 20 tokens as for 64.
    """
    return 32 if itemsize == 4 or max_length <= 32 else 64


def scan_tiles(dtype: torch.dtype, device: torch.device) -> StateTiles:
    """The default tile of ``gated_delta_chunks`` for rows of ``dtype``."""
    warps = _warps(dtype, device)
    return StateTiles(16 if dtype == torch.float32 or warps == 2 else 32, warps)


def gated_delta_steps(
    rows: DeltaRows,
    weights: DeltaWeights,
    state: DeltaState,
    spans: Tensor,
    *,
    max_length: int,
    commit: bool = True,
    gate: OutputGate | None = None,
    projection: DecayProjection | None = None,
    tiles: StateTiles | None = None,
) -> Tensor:
    """Run few tokens of each sequence: [rows, value_heads, value_dim] in the dtype of ``rows.qkv``.

    ``spans`` [sequences, 5] int32, on the device: first row, number of rows (``max_length`` at most), slot,
    1 if the sequence has no state yet (the slot is not read), and number of pending tokens that were
    accepted. A negative slot is padding: its rows' outputs are zeros. Rows of no sequence are not written.

    Accepted pending tokens are committed to the state first. ``commit``: the rows go into the state, too;
    False: they become the pending ones. ``gate``: applied to the outputs by the same kernel; None: not.
    ``projection``: of a single row; the kernel computes ``rows.a`` and ``rows.b`` and writes them. ``tiles``
    None: ``step_tiles``. Raises ``ValueError`` if there are more rows than can be pending, or more
    sequences than counters.
    """
    shape = _Shape.of(rows, weights, state)
    sequences, room = len(spans), state.pending_rows.shape[1]
    if not commit and max_length > room:
        raise ValueError(f"{max_length} tokens cannot wait: there is room for {room}")
    if sequences * shape.key_heads > MAX_TILE_COUNTERS:
        raise ValueError(
            f"{sequences} sequences of {shape.key_heads} key heads: more than there are counters"
        )
    out = torch.empty(
        (len(rows.qkv), shape.value_heads, shape.value_dim), dtype=rows.qkv.dtype, device=rows.qkv.device
    )
    if launches_on(out.device) and sequences:
        tiles = tiles or step_tiles(sequences)
        _launch_steps(
            shape, rows, weights, state, spans, out, max_length, commit, False, gate, projection, tiles
        )
    return out


def gated_delta_chunks(
    rows: DeltaRows,
    weights: DeltaWeights,
    state: DeltaState,
    spans: Tensor,
    *,
    max_length: int,
    gate: OutputGate | None = None,
    tiles: StateTiles | None = None,
) -> Tensor:
    """``gated_delta_steps`` with ``commit`` for many tokens a sequence, ``chunk_length`` at a time.

    Chunks are counted from the sequence's first row in the batch. ``tiles`` None: ``scan_tiles``. Allocates
    the output, and ``chunk_scratch_bytes`` until it returns.
    """
    shape = _Shape.of(rows, weights, state)
    qkv = rows.qkv
    out = torch.empty((len(qkv), shape.value_heads, shape.value_dim), dtype=qkv.dtype, device=qkv.device)
    chunk = chunk_length(qkv.dtype.itemsize, max_length)
    systems = torch.empty((len(qkv), shape.value_heads, 2, chunk), dtype=qkv.dtype, device=qkv.device)
    scales = torch.empty((SCALES, shape.value_heads, len(qkv)), dtype=torch.float32, device=qkv.device)
    mixed = torch.empty((len(qkv), shape.channels), dtype=qkv.dtype, device=qkv.device)
    if launches_on(qkv.device) and len(spans):
        if state.pending_rows.shape[1]:
            tile = step_tiles(len(spans))
            _launch_steps(shape, rows, weights, state, spans, out, 0, True, True, None, None, tile)
        _launch_chunks(
            shape,
            rows,
            weights,
            state,
            spans,
            (mixed, systems, scales, out),
            max_length,
            tiles or scan_tiles(qkv.dtype, qkv.device),
        )
    del systems, scales, mixed
    if gate is not None:
        gated_rms_norm(out, gate.z, gate.weight, gate.eps, out=out)
    return out


def chunk_scratch_bytes(rows: int, channels: int, value_heads: int, itemsize: int) -> int:
    """Bytes that ``gated_delta_chunks`` allocates beside its output; ``itemsize``: bytes of a row's value."""
    systems = value_heads * 2 * chunk_length(itemsize, rows)
    return rows * (channels + systems) * itemsize + rows * value_heads * SCALES * 4


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm of each head of ``x`` [rows, heads, dim], times ``weight`` [dim], times SiLU(``z``).

    ``z`` [rows, heads * dim]; its rows may be part of wider ones. ``out``: where to write, like ``x`` and
    possibly ``x`` itself; None: a new tensor. In float32 inside.
    """
    rows, heads, dim = x.shape
    out = torch.empty_like(x) if out is None else out
    if launches_on(x.device) and rows:
        from vlfit.kernels.recurrent.delta_rule_kernels import gated_rms_norm_kernel

        gated_rms_norm_kernel[(-(-rows * heads // _NORM_HEADS),)](
            x,
            z,
            weight,
            out,
            rows * heads,
            z.stride(0),
            eps,
            HEADS=heads,
            DIM=dim,
            BLOCK_N=_NORM_HEADS,
            BLOCK_D=next_power_of_2(dim),
            num_warps=4,
            **pdl_options(x.device),
        )
    return out


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a layer. ``channels``: of queries, keys and values together."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int

    @classmethod
    def of(cls, rows: DeltaRows, weights: DeltaWeights, state: DeltaState) -> "_Shape":
        """The sizes that all tensors agree on. Raises ``ValueError`` if they do not, or have gaps."""
        _, value_heads, key_dim, value_dim = state.recurrent.shape
        channels, kernel = weights.conv.shape
        key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
        if (
            key_heads < 1
            or value_heads % key_heads
            or 2 * key_heads * key_dim + value_heads * value_dim != channels
            or rows.qkv.shape[1] != channels
            or state.conv.shape[1:] != (channels, kernel - 1)
        ):
            raise ValueError(
                f"{channels} channels, rows {tuple(rows.qkv.shape)}, convolution {tuple(state.conv.shape)} "
                f"and state {tuple(state.recurrent.shape)} do not belong together"
            )
        for tensor in (state.conv, state.recurrent, state.pending_rows, weights.conv):
            if not tensor.is_contiguous():
                raise ValueError("states and weights have to be contiguous")
        if any(tensor.stride(1) != 1 for tensor in (rows.qkv, rows.a, rows.b)):
            raise ValueError("the values of a row have to be contiguous")
        return cls(key_heads, value_heads, key_dim, value_dim, channels, kernel)

    def constants(self) -> dict[str, int]:
        """What all kernels but the convolution are compiled for."""
        return {
            "KEY_HEADS": self.key_heads,
            "GROUP": self.value_heads // self.key_heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "BLOCK_K": max(next_power_of_2(self.key_dim), 16),
        }


def _launch_steps(
    shape: _Shape,
    rows: DeltaRows,
    weights: DeltaWeights,
    state: DeltaState,
    spans: Tensor,
    out: Tensor,
    max_length: int,
    commit: bool,
    pending_only: bool,
    gate: OutputGate | None,
    projection: DecayProjection | None,
    tiles: StateTiles,
) -> None:
    from vlfit.kernels.recurrent.delta_rule_kernels import gated_delta_steps_kernel

    x = None if projection is None else projection.x
    hidden = 0 if x is None else x.rows.shape[1]
    num_sums = 0 if x is None else x.square_sums.shape[1]
    room = state.pending_rows.shape[1]
    gated_delta_steps_kernel[(-(-shape.value_dim // tiles.values), shape.value_heads, len(spans))](
        rows.qkv,
        rows.a,
        rows.b,
        rows.qkv if gate is None else gate.z,
        weights.conv,
        weights.decay_log,
        weights.decay_bias,
        weights.conv if gate is None else gate.weight,
        state.conv,
        state.recurrent,
        state.pending_rows,
        state.pending_decay,
        state.pending_beta,
        spans,
        tile_counters(rows.qkv.device),
        out,
        rows.qkv if x is None else x.rows,
        rows.qkv if projection is None else projection.weight,
        weights.conv if x is None else x.square_sums,
        rows.qkv.stride(0),
        rows.a.stride(0),
        rows.b.stride(0),
        0 if gate is None else gate.z.stride(0),
        0.0 if gate is None else gate.eps,
        0.0 if x is None else x.eps,
        **shape.constants(),
        KERNEL=shape.kernel,
        MAX_PENDING=room,
        COMMIT=commit,
        PENDING_ONLY=pending_only,
        HAS_NORM=gate is not None,
        SCALE=shape.key_dim**-0.5,
        BLOCK_T=next_power_of_2(max(max_length, 1)),
        BLOCK_V=tiles.values,
        BLOCK_D=next_power_of_2(shape.value_dim),
        BLOCK_J=next_power_of_2(max(shape.kernel - 1, 1)),
        HIDDEN=hidden,
        BLOCK_H=next_power_of_2(max(hidden, 1)),
        NUM_SUMS=num_sums,
        BLOCK_SUMS=next_power_of_2(max(num_sums, 1)),
        num_warps=tiles.warps,
        **pdl_options(rows.qkv.device),
    )


def _launch_chunks(
    shape: _Shape,
    rows: DeltaRows,
    weights: DeltaWeights,
    state: DeltaState,
    spans: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor, Tensor],
    max_length: int,
    tiles: StateTiles,
) -> None:
    from vlfit.kernels.recurrent.delta_rule_kernels import (
        chunk_scan_kernel,
        chunk_system_kernel,
        convolve_rows_kernel,
    )

    mixed, systems, scales, out = scratch
    chunk = systems.shape[-1]
    conv_grid = (-(-max_length // _CONV_ROWS), -(-shape.channels // _CONV_CHANNELS), len(spans))
    convolve_rows_kernel[conv_grid](
        rows.qkv,
        weights.conv,
        state.conv,
        spans,
        mixed,
        rows.qkv.stride(0),
        CONV_DIM=shape.channels,
        KERNEL=shape.kernel,
        BLOCK_R=_CONV_ROWS,
        BLOCK_C=_CONV_CHANNELS,
        BLOCK_J=next_power_of_2(max(shape.kernel - 1, 1)),
        num_warps=4,
    )
    chunk_system_kernel[(-(-max_length // chunk), shape.value_heads, len(spans))](
        mixed,
        rows.a,
        rows.b,
        weights.decay_log,
        weights.decay_bias,
        spans,
        systems,
        scales,
        len(mixed),
        rows.a.stride(0),
        rows.b.stride(0),
        **shape.constants(),
        SCALE=shape.key_dim**-0.5,
        CHUNK=chunk,
        num_warps=_warps(mixed.dtype, mixed.device),
    )
    chunk_scan_kernel[(-(-shape.value_dim // tiles.values), shape.value_heads, len(spans))](
        mixed,
        systems,
        scales,
        state.recurrent,
        spans,
        out,
        len(mixed),
        **shape.constants(),
        CHUNK=chunk,
        BLOCK_V=tiles.values,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _warps(dtype: torch.dtype, device: torch.device) -> int:
    """Warps of the products of chunks: 4, but 2 in half precision on compute capability 9.0.

    There four warps multiply by warpgroup instructions, and what Triton 3.4 to 3.7 makes of such chains of
    products is wrong in some tiles (flash-linear-attention's issues 640 and 984; seen here too, docs/log.md).
    """
    card = card_of(device)
    warpgroups = card is not None and card.capability[0] == 9 and dtype != torch.float32
    return 2 if warpgroups else 4
