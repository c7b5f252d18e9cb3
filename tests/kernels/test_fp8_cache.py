"""Attention over an FP8 KV cache: the kernels against float64 of the values in the cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error
from tests.kernels.test_attention import BATCHES, LARGE, SHAPES, Shape, batch, verify_metadata
from tests.layers.test_fp8_rows import rows_of_many_magnitudes
from vlfit.kernels.attention import paged as attention
from vlfit.kernels.attention.paged import (
    AttentionTiles,
    BlockAttentionMetadata,
    block_attention,
    reference_attention,
)
from vlfit.kernels.launch import tile_counters
from vlfit.kernels.rows import row_ops as fused
from vlfit.kernels.rows.row_ops import PackedQKV
from vlfit.layers.kv_cache import dequantize_kv_rows, quantize_kv_rows

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # of numpy, which interprets
]
# With native conversion and without it; the interpreter has none.
CONVERSIONS = [True, False] if ON_GPU else [False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_rows_are_bit_equal_to_the_cpu(dtype: torch.dtype, device: torch.device) -> None:
    """Two rows are not finite. Values are quantized as they are; keys get RoPE first, and equal those of an
    unquantized cache.
    """
    v_cache = rows_of_many_magnitudes(dtype)[: None if ON_GPU else 40]
    v_cache[1, 5], v_cache[2, 7], v_cache[3] = torch.inf, torch.nan, 0.0
    rows, width = v_cache.shape
    packed = torch.cat([torch.randn(rows, 2, width).to(dtype), v_cache[:, None]], 1).to(device)
    angles = torch.rand(rows, 1, width)
    qkv = PackedQKV(packed, None, angles.cos().to(device, dtype), angles.sin().to(device, dtype), 1e-6)
    slots = torch.randperm(rows + 5)[:rows].to(device)
    slots[9] = -1
    k_cache, codes = torch.full((2, rows + 5, 1, width), 7, dtype=torch.uint8, device=device)
    scales = torch.full((2, rows + 5, 1), 9, dtype=torch.int16, device=device)
    fused.rope_store_kv(qkv, slots, k_cache, codes, (scales[0], scales[1]))
    plain_keys, plain_values = torch.zeros(2, rows + 5, 1, width, dtype=dtype, device=device)
    fused.rope_store_kv(qkv, slots, plain_keys, plain_values)
    expected_codes, expected_scales = quantize_kv_rows(v_cache.to(device))
    stored = (slots >= 0) & expected_scales.view(torch.bfloat16).isfinite()
    assert 2 * int(stored.sum()) > rows
    assert torch.equal(codes[slots[stored], 0], expected_codes[stored])
    written = slots >= 0
    assert torch.equal(scales[1, slots[written], 0], expected_scales[written])
    of_keys = dequantize_kv_rows(*quantize_kv_rows(plain_keys[slots[written]]), torch.float32)
    assert relative_error(
        dequantize_kv_rows(k_cache, scales[0], torch.float32)[slots[written]], of_keys.double()
    ) < (
        TOLERANCES[dtype] if ON_GPU else 1e-9  # two kernels may multiply and add in another order
    )
    others = sorted({*range(rows + 5)} - {*slots.tolist()})
    assert (torch.stack((k_cache, codes))[:, others] == 7).all()
    assert (scales[:, others] == 9).all()


def quantize_cache(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Codes and scales; unwritten slots hold NaN. Values have many magnitudes, some tiny."""
    sizes = torch.randint(-12, 6, v_cache.shape[:2]).float().exp2().to(k_cache.device)
    (key_codes, key_scales), (value_codes, value_scales) = (
        quantize_kv_rows(k_cache),
        quantize_kv_rows(v_cache * sizes[..., None]),
    )
    return key_codes, value_codes, (key_scales, value_scales)


def check(
    shape: Shape, work: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, splits: int = 2
) -> None:
    chosen, tiles = (None, None) if ON_GPU else (splits, AttentionTiles(32, 32, 4, 1))
    torch.manual_seed(0)
    decoding = next((index for index, (tokens, _) in enumerate(work) if tokens > 1), len(work))
    qkv, k_cache, v_cache, metadata = batch(shape, work, decoding, dtype, device)
    unknown = k_cache.isnan()
    k_cache, v_cache, scales = quantize_cache(k_cache, v_cache)
    for _ in range(2 if ON_GPU else 1):
        out = block_attention(qkv, k_cache, v_cache, metadata, scales, splits=chosen, tiles=tiles)
        assert out.dtype == dtype
        assert (
            relative_error(out, expected_attention(qkv, k_cache, v_cache, scales, metadata))
            < TOLERANCES[dtype]
        )
    assert not tile_counters(device).any()
    now_unknown = dequantize_kv_rows(k_cache, scales[0], torch.float32).isnan()
    fresh_slots = unknown & ~now_unknown
    assert fresh_slots.flatten(1).any(1).nonzero().flatten().tolist() == sorted(
        metadata.slot_mapping.tolist()
    )
    of_values = quantize_kv_rows(qkv.qkv[:, -shape.key_heads :])
    assert torch.equal(v_cache[metadata.slot_mapping], of_values[0])
    assert torch.equal(scales[1][metadata.slot_mapping], of_values[1])


def expected_attention(
    qkv: PackedQKV,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: tuple[Tensor, Tensor],
    metadata: BlockAttentionMetadata,
) -> Tensor:
    """In float64, over the cache after the kernels ran: the new token sees itself quantized."""
    others = [torch.empty_like(part) for part in (k_cache, v_cache, *scales)]
    query = fused.rope_store_kv(qkv, metadata.slot_mapping, others[0], others[1], (others[2], others[3]))
    wide_keys, wide_values = (
        dequantize_kv_rows(codes, scale, torch.float64)
        for codes, scale in zip((k_cache, v_cache), scales, strict=True)
    )
    return reference_attention(query.double(), wide_keys, wide_values, metadata)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("native_fp8", CONVERSIONS)
@pytest.mark.parametrize("work", BATCHES if ON_GPU else ["decoding alone", "a chunk with a past"])
@pytest.mark.parametrize("shape", SHAPES if ON_GPU else ["tiny", "one key head, heads of no power of two"])
def test_attention_over_fp8_cache(
    shape: str,
    work: str,
    native_fp8: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "has_native_fp8", lambda device: native_fp8)
    check(SHAPES[shape], BATCHES[work], dtype, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("work", LARGE)
@pytest.mark.parametrize("shape", ["2B", "4B and 8B", "heads of 64"])
def test_long_contexts(shape: str, work: str, device: torch.device) -> None:
    check(SHAPES[shape], LARGE[work], torch.bfloat16, device)


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_row_stores_nothing_and_returns_zeros(splits: int, device: torch.device) -> None:
    qkv, k_cache, v_cache, metadata = batch(SHAPES["tiny"], [(1, 9), (1, 3)], 2, torch.float32, device)
    metadata.query_spans[1, 2] = metadata.slot_mapping[1] = -1
    k_cache, v_cache, scales = quantize_cache(k_cache, v_cache)
    before = [part.clone() for part in (k_cache, v_cache, *scales)]
    out = block_attention(qkv, k_cache, v_cache, metadata, scales, splits=splits)
    assert not out[1].any()
    first = replace(metadata, block_tables=metadata.block_tables[:1], query_spans=metadata.query_spans[:1])
    assert relative_error(out[:1], expected_attention(qkv, k_cache, v_cache, scales, first)[:1]) < 2e-6
    for part, previous in zip((k_cache, v_cache, *scales), before, strict=True):
        changed = (part != previous).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [int(metadata.slot_mapping[0])]


@pytest.mark.parametrize("splits", [1, 3])
def test_consecutive_rows_of_one_sequence(splits: int, device: torch.device) -> None:
    qkv, k_cache, v_cache, chunk_metadata = batch(
        SHAPES["tiny"], [(3, 9), (2, 4), (1, 0)], 0, torch.float32, device
    )
    chunk_metadata.slot_mapping[5] = -1
    k_cache, v_cache, scales = quantize_cache(k_cache, v_cache)
    out = block_attention(qkv, k_cache, v_cache, verify_metadata(chunk_metadata), scales, splits=splits)
    real = replace(
        chunk_metadata,
        block_tables=chunk_metadata.block_tables[:2],
        query_spans=chunk_metadata.query_spans[:2],
    )
    assert relative_error(out[:5], expected_attention(qkv, k_cache, v_cache, scales, real)[:5]) < 2e-6
    assert not out[5].any()


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("work", [[(1, 40)], [(7, 33)]], ids=["decoding", "a prompt"])
def test_nonfinite_values_propagate(work: list[tuple[int, int]], what: str, device: torch.device) -> None:
    shape = SHAPES["tiny"]
    qkv, k_cache, v_cache, metadata = batch(shape, work, int(work[0][0] == 1), torch.float32, device)
    slot = int(metadata.block_tables[0, 1]) * shape.block_size
    (k_cache if what == "key" else v_cache)[slot, 0] = torch.nan
    k_cache, v_cache, scales = quantize_cache(k_cache, v_cache)
    out = block_attention(qkv, k_cache, v_cache, metadata, scales, splits=2).unflatten(
        1, (shape.heads, shape.head_dim)
    )
    group_size = shape.heads // shape.key_heads
    assert not out[:, :group_size].isfinite().any()
    assert out[:, group_size:].isfinite().all()
