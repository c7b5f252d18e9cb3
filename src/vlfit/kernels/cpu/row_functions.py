"""RMSNorm, SwiGLU, GELU, QK norm with RoPE, and attention on a CPU.

Each is one call of compiled code (``rows.c``, ``attention.c``, ``pair_attention.c``), in float32 but for
attention of many queries in bfloat16.

For models whose weights stay as stored: they have the library, and between their products torch's own small
operations would take a tenth of a decode step. A row's result does not depend on the others.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from vlfit.kernels.cpu.library import load_library


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``delta`` to ``hidden`` [rows, width] in place; return the sum's RMSNorm times ``weight`` [width].

    ``delta`` None: nothing is added. All are float32; ``hidden`` and ``weight`` are contiguous.
    """
    hidden_at = _address(hidden)
    delta = None if delta is None else delta.contiguous()
    out = torch.empty_like(hidden)
    _library().vlfit_add_norm(
        hidden_at,
        None if delta is None else _address(delta),
        _address(weight),
        _address(out),
        ctypes.c_int64(len(hidden)),
        ctypes.c_int64(hidden.shape[1]),
        ctypes.c_float(eps),
        torch.get_num_threads(),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [rows, inner] of ``gate_up`` [rows, 2 * inner] float32, contiguous, gates first."""
    rows, both = gate_up.shape
    out = gate_up.new_empty((rows, both // 2))
    _library().vlfit_swiglu(
        _address(gate_up),
        _address(out),
        ctypes.c_int64(rows),
        ctypes.c_int64(both // 2),
        torch.get_num_threads(),
    )
    return out


def gelu_tanh_(x: Tensor) -> Tensor:
    """GELU by tanh of ``x`` [rows, width] float32, contiguous, in place; returns ``x``."""
    _library().vlfit_gelu(
        _address(x), ctypes.c_int64(len(x)), ctypes.c_int64(x.shape[1]), torch.get_num_threads()
    )
    return x


def rotate(
    qkv: Tensor,
    norm_weight: Tensor | None,
    tables: tuple[Tensor, Tensor],
    eps: float,
    kv_heads: int,
    cache: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Apply QK norm and RoPE to ``qkv`` [rows, heads + 2 * kv_heads, head_dim]; return queries and keys.

    Queries are [rows, heads, head_dim]. ``norm_weight`` [heads + kv_heads, head_dim] or None; ``tables``:
    cosines and sines [rows, 1, rotary_dim]. ``cache``: slots [rows] int64, and one layer's keys and values
    [slots, kv_heads, head_dim], into which keys and values are written, and no keys are returned; None: keys
    are [rows, kv_heads, head_dim]. All but slots are float32. Raises ``IndexError`` for a slot that the cache
    does not have.
    """
    rows, all_heads, head_dim = qkv.shape
    heads = all_heads - 2 * kv_heads
    qkv = qkv.contiguous()
    cosines, sines = (table.contiguous() for table in tables)
    query = qkv.new_empty((rows, heads, head_dim))
    keys: Tensor | None = None
    slots: Tensor | None = None
    value_cache: Tensor | None = None
    if cache is None:
        key_cache = keys = qkv.new_empty((rows, kv_heads, head_dim))
    else:
        slots, key_cache, value_cache = cache
        slots = slots.contiguous()
    failed = _library().vlfit_rotate(
        _address(qkv),
        None if norm_weight is None else _address(norm_weight),
        _address(cosines),
        _address(sines),
        None if slots is None else ctypes.c_void_p(slots.data_ptr()),
        ctypes.c_int64(len(key_cache)),
        _address(query),
        _address(key_cache),
        None if value_cache is None else _address(value_cache),
        ctypes.c_int64(rows),
        ctypes.c_int64(heads),
        ctypes.c_int64(kv_heads),
        ctypes.c_int64(head_dim),
        ctypes.c_int64(cosines.shape[-1]),
        ctypes.c_float(eps),
        torch.get_num_threads(),
    )
    if failed:
        raise IndexError(f"a slot outside of 0 to {len(key_cache) - 1}")
    return query, keys


def takes_attention(head_dim: int, cache: Tensor) -> bool:
    """Whether ``decode_attention`` takes heads of ``head_dim`` elements and keys and values as ``cache``."""
    return head_dim % 16 == 0 and head_dim <= 512 and cache.dtype == torch.float32


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    """Attention output [sequences, heads, head_dim] of one token of each sequence over its cached tokens.

    ``query`` in the same shape; ``keys`` and ``values`` [all slots, kv_heads, head_dim]; ``slots``
    [sequences, longest] int64, of which the first ``lengths`` [sequences] int64 count. Floats are float32.
    Raises ``IndexError`` for a slot that the cache does not have, ``MemoryError`` without memory for partial
    results.
    """
    sequences, heads, head_dim = query.shape
    query, slots, lengths = query.contiguous(), slots.contiguous(), lengths.contiguous()
    out = torch.empty_like(query)
    failed = _library().vlfit_decode_attention(
        _address(query),
        _address(keys),
        _address(values),
        ctypes.c_void_p(slots.data_ptr()),
        ctypes.c_void_p(lengths.data_ptr()),
        _address(out),
        ctypes.c_int64(len(keys)),
        ctypes.c_int64(sequences),
        ctypes.c_int64(slots.shape[1]),
        ctypes.c_int64(heads),
        ctypes.c_int64(keys.shape[1]),
        ctypes.c_int64(head_dim),
        ctypes.c_float(head_dim**-0.5),
        torch.get_num_threads(),
    )
    if failed == 1:
        raise MemoryError("no memory for attention")
    if failed:
        raise IndexError(f"a slot outside of 0 to {len(keys) - 1}, or sizes that do not fit")
    return out


def takes_many_queries(head_dim: int) -> bool:
    """Whether ``attend_in_bf16`` is there and takes heads of ``head_dim`` elements."""
    library = load_library()
    return library is not None and head_dim % 2 == 0 and head_dim <= 512 and _has_pairs(library)


@cache
def _has_pairs(library: ctypes.CDLL) -> bool:
    return bool(library.vlfit_attends_in_pairs())


def attend_in_bf16(query: Tensor, keys: Tensor, values: Tensor, past: int | None = None) -> Tensor:
    """Attention output [queries, heads, head_dim] of ``query`` in the same shape, computed in bfloat16.

    ``keys``, ``values``: [count, kv_heads, head_dim]. All are float32, and contiguous in their last
    dimension. ``past``: query i attends to the first ``past`` + i + 1 keys; None: to all. Sums and softmax
    are float32's. Only if ``takes_many_queries``. Raises ``ValueError`` for other dtypes, layouts or sizes,
    ``MemoryError`` without memory for keys and values in bfloat16.
    """
    (queries, heads, head_dim), (count, kv_heads, _) = query.shape, keys.shape
    fits = keys.shape == values.shape == (count, kv_heads, head_dim) and heads % kv_heads == 0 and count > 0
    if not fits or (past is not None and not 0 <= past <= count - queries):
        raise ValueError("queries, keys and values do not fit each other")
    for tensor in (query, keys, values):
        if tensor.dtype != torch.float32 or tensor.stride(2) != 1 or tensor.device.type != "cpu":
            raise ValueError(f"wanted heads in float32 in RAM, not {tensor.dtype} on {tensor.device}")
    out = torch.empty((queries, heads, head_dim), dtype=torch.float32)
    strides = [tensor.stride(at) for tensor in (query, keys, values) for at in (0, 1)]
    failed = _library().vlfit_attend_pairs(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (query, keys, values, out)),
        *(ctypes.c_int64(size) for size in (queries, count, heads, kv_heads, head_dim)),
        (ctypes.c_int64 * 6)(*strides),
        ctypes.c_int64(-1 if past is None else past),
        ctypes.c_float(head_dim**-0.5),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for attention")
    return out


def _library() -> ctypes.CDLL:
    """The library, which a model with stored weights has loaded. Raises ``RuntimeError`` without one."""
    library = load_library()
    if library is None:
        raise RuntimeError("the compiled code is not available")
    return library


def float_address(tensor: Tensor) -> int:
    """Address of ``tensor``'s data. Raises ``ValueError`` unless it is contiguous float32 in RAM."""
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"wanted contiguous float32 in RAM, not {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(float_address(tensor))
