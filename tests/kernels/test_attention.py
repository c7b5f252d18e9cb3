"""Paged attention kernels against float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error
from vlfit.kernels.attention.paged import (
    AttentionTiles,
    BlockAttentionMetadata,
    block_attention,
    decode_tiles,
    reference_attention,
    resident_programs,
)
from vlfit.kernels.launch import next_power_of_2, tile_counters
from vlfit.kernels.rows.row_ops import PackedQKV, rope_store_kv
from vlfit.kernels.target import TargetCard
from vlfit.layers.kv_cache import slots_of_blocks
from vlfit.plan.native.cost import num_decode_splits

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


@dataclass(frozen=True)
class Shape:
    heads: int
    key_heads: int
    head_dim: int
    block_size: int = 16
    rotated: int | None = None  # all of them
    has_norm: bool = True


SHAPES = {
    "2B": Shape(16, 8, 128),
    "4B and 8B": Shape(32, 8, 128),
    "heads of 128": Shape(4, 1, 128),
    "heads of 64": Shape(6, 2, 64, has_norm=False),
    "heads of 256, a quarter rotated": Shape(4, 1, 256, rotated=64),
    "one key head, heads of no power of two": Shape(5, 1, 24, block_size=4, rotated=12),
    "tiny": Shape(4, 2, 16, block_size=5),
}
DECODING = [(1, 0), (1, 15), (1, 16), (1, 200), (1, 3)]  # new tokens and past of each sequence
BATCHES = {
    "decoding alone": DECODING,
    "one sequence": [(1, 77)],
    "a prompt without past": [(37, 0)],
    "a chunk with a past": [(17, 90)],
    "several chunks": [(5, 0), (37, 30), (1, 40)],
    "decoding beside chunks": [*DECODING, (9, 45), (32, 0)],
}
LARGE = {
    "decoding": [(1, 8191), (1, 1000), (1, 63)],
    "a chunk": [(1024, 3000)],
    "both": [(1, 4000), (500, 0)],
}


def batch(
    shape: Shape, work: list[tuple[int, int]], decoding: int, dtype: torch.dtype, device: torch.device
) -> tuple[PackedQKV, Tensor, Tensor, BlockAttentionMetadata]:
    """QKV, cache and metadata. Blocks are allocated at random; slots that no token wrote hold NaN."""
    size = shape.block_size
    counts = [-(-(tokens + past) // size) for tokens, past in work]
    permuted = torch.randperm(sum(counts) + 3)[: sum(counts)].split(counts)
    table = torch.zeros(len(work), max(counts), dtype=torch.int32)
    k_cache = torch.full(((sum(counts) + 3) * size, shape.key_heads, shape.head_dim), torch.nan)
    v_cache = k_cache.clone()
    new_slots = []
    for row, blocks, (tokens, past) in zip(table, permuted, work, strict=True):
        row[: len(blocks)] = blocks
        slots = slots_of_blocks(blocks.tolist(), size)[: tokens + past]
        k_cache[slots[:past]] = torch.randn(past, *k_cache.shape[1:])
        v_cache[slots[:past]] = torch.randn(past, *k_cache.shape[1:])
        new_slots.append(slots[past:])
    rows = sum(tokens for tokens, _ in work)
    packed = torch.randn(rows, shape.heads + 2 * shape.key_heads, shape.head_dim).to(device, dtype)
    weight = torch.randn(shape.heads + shape.key_heads, shape.head_dim).to(device, dtype)
    angles = torch.rand(rows, 1, shape.rotated or shape.head_dim)
    tables = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
    qkv = PackedQKV(packed, weight if shape.has_norm else None, *tables, 1e-6)
    starts = torch.tensor([0, *(tokens for tokens, _ in work)]).cumsum(0)[:-1]
    spans = torch.cat([starts[:, None], torch.tensor(work)], 1).to(torch.int32)
    longest = max((tokens for tokens, _ in work[decoding:]), default=0)
    slots = torch.cat(new_slots).to(device)
    metadata = BlockAttentionMetadata(slots, table.to(device), spans.to(device), size, decoding, longest)
    return qkv, k_cache.to(device, dtype), v_cache.to(device, dtype), metadata


def check_attention(
    shape: Shape,
    work: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    splits: int | None = None,
    tiles: AttentionTiles | None = None,
) -> None:
    """By default with the engine's sizes on a GPU, with small ones in the interpreter. New keys and values
    are expected as ``rope_store_kv`` stores them, which ``test_row_ops.py`` tests. Runs twice on a GPU,
    because counters must be zero again.
    """
    if not ON_GPU:
        splits, tiles = splits or 2, tiles or AttentionTiles(32, 32, 4, 1)
    torch.manual_seed(0)
    decoding = next((index for index, (tokens, _) in enumerate(work) if tokens > 1), len(work))
    qkv, k_cache, v_cache, metadata = batch(shape, work, decoding, dtype, device)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    query = rope_store_kv(qkv, metadata.slot_mapping, expected_k, expected_v)
    expected = reference_attention(query.double(), expected_k.double(), expected_v.double(), metadata)
    for _ in range(2 if ON_GPU else 1):
        out = block_attention(qkv, k_cache, v_cache, metadata, splits=splits, tiles=tiles)
        assert out.dtype == dtype
        assert relative_error(out, expected) < TOLERANCES[dtype]
    assert not tile_counters(device).any()
    written = ~expected_k.isnan()
    assert torch.equal(~k_cache.isnan(), written)
    assert relative_error(k_cache[written], expected_k[written].double()) < TOLERANCES[dtype] / 4
    assert torch.equal(v_cache.nan_to_num(9), expected_v.nan_to_num(9))


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_padding_row_stores_nothing_and_returns_zeros(splits: int, device: torch.device) -> None:
    qkv, k_cache, v_cache, metadata = batch(SHAPES["tiny"], [(1, 9), (1, 3)], 2, torch.float32, device)
    metadata.query_spans[1, 2] = metadata.slot_mapping[1] = -1
    before = k_cache.clone()
    out = block_attention(qkv, k_cache, v_cache, metadata, splits=splits)
    expected_k, expected_v = before.clone(), v_cache.clone()
    query = rope_store_kv(qkv, metadata.slot_mapping, expected_k, expected_v)[:1]
    first = replace(metadata, block_tables=metadata.block_tables[:1], query_spans=metadata.query_spans[:1])
    expected = reference_attention(query.double(), expected_k.double(), expected_v.double(), first)
    assert relative_error(out[:1], expected) < TOLERANCES[torch.float32]
    assert not out[1].any()
    changed = (k_cache != before) & ~(k_cache.isnan() & before.isnan())
    assert changed.flatten(1).any(1).nonzero().flatten().tolist() == [int(metadata.slot_mapping[0])]


# The interpreter takes long for wide heads: they do the batches that have sequences of all kinds.
NARROW = ("tiny", "one key head, heads of no power of two")
OF_ALL_KINDS = ("decoding beside chunks", "a chunk with a past")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "work"),
    [
        pytest.param(
            shape, work, marks=() if ON_GPU or shape in NARROW or work in OF_ALL_KINDS else pytest.mark.slow
        )
        for shape in SHAPES
        for work in BATCHES
    ],
)
def test_causal_attention(shape: str, work: str, dtype: torch.dtype, device: torch.device) -> None:
    if not ON_GPU and SHAPES[shape].heads > 6:
        pytest.skip("the interpreter takes long for many heads; fewer go the same way")
    check_attention(SHAPES[shape], BATCHES[work], dtype, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("work", LARGE)
@pytest.mark.parametrize("shape", ["2B", "4B and 8B", "heads of 64"])
def test_long_contexts(shape: str, work: str, device: torch.device) -> None:
    check_attention(SHAPES[shape], LARGE[work], torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 72])
def test_sdpa_does_not_materialize_scores(head_dim: int, device: torch.device) -> None:
    """The vision tower calls it without a mask; the scores of 4096 patches would be 16 times its output."""
    tokens, heads = 4096, 16
    query, key, value = torch.randn(3, 1, heads, tokens, head_dim, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.cuda.synchronize()
    scores = heads * tokens * tokens * 2
    assert torch.cuda.max_memory_allocated() - before < scores / 4


def verify_metadata(chunk_metadata: BlockAttentionMetadata) -> BlockAttentionMetadata:
    """Metadata with a row per token for chunks of 3 tokens after 9, 2 after 4, and a padding row."""
    past = torch.tensor([10, 11, 12, 5, 6, -1], dtype=torch.int32, device=chunk_metadata.query_spans.device)
    rows = torch.arange(6, dtype=torch.int32, device=past.device)
    return replace(
        chunk_metadata,
        block_tables=chunk_metadata.block_tables[[0, 0, 0, 1, 1, 2]],
        query_spans=torch.stack((rows, torch.ones_like(rows), past), 1),
        num_decodes=6,
        max_query_len=0,
        no_store_slots=torch.full_like(rows, -1),
    )


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_consecutive_rows_of_one_sequence(splits: int, device: torch.device) -> None:
    """Three rows of one sequence, two of another and a padding row equal the corresponding chunks."""
    qkv, k_cache, v_cache, chunk_metadata = batch(
        SHAPES["tiny"], [(3, 9), (2, 4), (1, 0)], 0, torch.float32, device
    )
    chunk_metadata.slot_mapping[5] = -1
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    query = rope_store_kv(qkv, chunk_metadata.slot_mapping, expected_k, expected_v)
    real = replace(
        chunk_metadata,
        block_tables=chunk_metadata.block_tables[:2],
        query_spans=chunk_metadata.query_spans[:2],
    )
    expected = reference_attention(query.double(), expected_k.double(), expected_v.double(), real)
    metadata = verify_metadata(chunk_metadata)
    out = block_attention(qkv, k_cache, v_cache, metadata, splits=splits)
    assert relative_error(out[:5], expected[:5]) < TOLERANCES[torch.float32]
    assert not out[5].any()
    assert torch.equal(k_cache.nan_to_num(9), expected_k.nan_to_num(9))
    assert torch.equal(v_cache.nan_to_num(9), expected_v.nan_to_num(9))


CARDS = {
    "30 multiprocessors": TargetCard((9, 0), multiprocessors=30),
    "30 with less shared memory": TargetCard((12, 0), multiprocessors=30),
    "46 with less shared memory": TargetCard((8, 6), multiprocessors=46),
}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("kv_heads", [2, 4, 8])
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_a_few_multiprocessors_have_as_many_programs_as_they_run(
    card: TargetCard, kv_heads: int, fp8_kv: bool
) -> None:
    """Or rounds of them that are three quarters full; never more than the plan counts memory for."""
    for sequences in (1, 2, 4, 8):
        tiles = decode_tiles(torch.bfloat16, 128, sequences, fp8_kv=fp8_kv, few=True)
        resident = resident_programs(card, tiles, 128, fp8_kv=fp8_kv)
        programs = num_decode_splits(sequences, kv_heads, resident) * sequences * kv_heads
        rounds = -(-programs // resident)
        assert rounds == 1 or programs >= 0.75 * rounds * resident
    for sequences in range(1, 300):
        splits = num_decode_splits(sequences, kv_heads, resident)
        assert 1 <= splits <= num_decode_splits(sequences, kv_heads)
        assert splits == num_decode_splits(next_power_of_2(sequences), kv_heads, resident)


@pytest.mark.parametrize(
    ("tiles", "fp8_kv", "shared", "registers"),
    [
        (decode_tiles(torch.bfloat16, 128, 1, fp8_kv=False), False, 34816, 4 * 32 * 148),
        (decode_tiles(torch.bfloat16, 128, 2, fp8_kv=False), False, 34816, 2 * 32 * 255),
        (decode_tiles(torch.bfloat16, 128, 2, fp8_kv=True), True, 49152, 2 * 32 * 255),
        (decode_tiles(torch.bfloat16, 128, 8, fp8_kv=False, few=True), False, 16512, 32 * 255),
        (decode_tiles(torch.bfloat16, 128, 8, fp8_kv=True, few=True), True, 24704, 32 * 255),
    ],
)
@pytest.mark.parametrize(("card", "bytes_of_it"), [((9, 0), 228 << 10), ((12, 0), 100 << 10)])
def test_programs_that_a_multiprocessor_holds(
    tiles: AttentionTiles,
    fp8_kv: bool,
    shared: int,
    registers: int,
    card: tuple[int, int],
    bytes_of_it: int,
) -> None:
    """By what the kernel takes as it is compiled (``compiled.json``), and 1 KiB for each of the driver's."""
    held = min(65536 // registers, bytes_of_it // (shared + 1024))
    assert resident_programs(TargetCard(card, multiprocessors=1), tiles, 128, fp8_kv=fp8_kv) == held


@pytest.mark.parametrize("splits", [3, 7])
@pytest.mark.parametrize("name", ["tiny", "heads of 64", "one key head, heads of no power of two"])
def test_tiles_for_few_multiprocessors(name: str, splits: int, device: torch.device) -> None:
    """Half the size, one or two warps, and contexts split into parts of no power of two."""
    wide = AttentionTiles(16, 16, 2, 2)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    for tiles in (AttentionTiles(16, 32, 1, 3), wide):
        check_attention(SHAPES[name], DECODING, dtype, device, splits, tiles)
    if ON_GPU:
        check_attention(SHAPES["4B and 8B"], DECODING, dtype, device, splits, AttentionTiles(16, 32, 1, 3))
        check_attention(SHAPES["heads of 256, a quarter rotated"], DECODING, dtype, device, splits, wide)
