"""Attention over the paged cache, by the kernels, against float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error
from vlfit.kernels.attention.paged import BlockPlan, Tiles, attend, plain_attention
from vlfit.kernels.launch import arrivals
from vlfit.kernels.rows.row_ops import Fresh, rotate_and_store
from vlfit.layers.kv_cache import slots_of

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
) -> tuple[Fresh, Tensor, Tensor, BlockPlan]:
    """What is new, cache and plan. Blocks are dealt out at random, and what no token wrote is NaN."""
    size = shape.block_size
    counts = [-(-(tokens + past) // size) for tokens, past in work]
    dealt = torch.randperm(sum(counts) + 3)[: sum(counts)].split(counts)
    table = torch.zeros(len(work), max(counts), dtype=torch.int32)
    keys = torch.full(((sum(counts) + 3) * size, shape.key_heads, shape.head_dim), torch.nan)
    values = keys.clone()
    fresh_slots = []
    for row, blocks, (tokens, past) in zip(table, dealt, work, strict=True):
        row[: len(blocks)] = blocks
        slots = slots_of(blocks.tolist(), size)[: tokens + past]
        keys[slots[:past]] = torch.randn(past, *keys.shape[1:])
        values[slots[:past]] = torch.randn(past, *keys.shape[1:])
        fresh_slots.append(slots[past:])
    rows = sum(tokens for tokens, _ in work)
    joined = torch.randn(rows, shape.heads + 2 * shape.key_heads, shape.head_dim).to(device, dtype)
    weight = torch.randn(shape.heads + shape.key_heads, shape.head_dim).to(device, dtype)
    angles = torch.rand(rows, 1, shape.rotated or shape.head_dim)
    tables = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
    fresh = Fresh(joined, weight if shape.has_norm else None, *tables, 1e-6)
    starts = torch.tensor([0, *(tokens for tokens, _ in work)]).cumsum(0)[:-1]
    spans = torch.cat([starts[:, None], torch.tensor(work)], 1).to(torch.int32)
    longest = max((tokens for tokens, _ in work[decoding:]), default=0)
    slots = torch.cat(fresh_slots).to(device)
    plan = BlockPlan(slots, table.to(device), spans.to(device), size, decoding, longest)
    return fresh, keys.to(device, dtype), values.to(device, dtype), plan


def check(shape: Shape, work: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
    """With the sizes that the engine chooses; the interpreter's time goes by programs and rows.

    What is new is turned and stored by ``rotate_and_store``, which ``test_row_steps.py`` holds to PyTorch.
    Twice: what the first leaves behind is what the second begins with.
    """
    splits, tiles = (None, None) if ON_GPU else (2, Tiles(32, 32, 4, 1))
    torch.manual_seed(0)
    decoding = next((index for index, (tokens, _) in enumerate(work) if tokens > 1), len(work))
    fresh, keys, values, plan = batch(shape, work, decoding, dtype, device)
    known_keys, known_values = keys.clone(), values.clone()
    query = rotate_and_store(fresh, plan.write_slots, known_keys, known_values)
    exact = plain_attention(query.double(), known_keys.double(), known_values.double(), plan)
    for _ in range(2 if ON_GPU else 1):
        out = attend(fresh, keys, values, plan, splits=splits, tiles=tiles)
        assert out.dtype == dtype
        assert relative_error(out, exact) < TOLERANCES[dtype]
    assert not arrivals(device).any()
    written = ~known_keys.isnan()
    assert torch.equal(~keys.isnan(), written)
    assert relative_error(keys[written], known_keys[written].double()) < TOLERANCES[dtype] / 4
    assert torch.equal(values.nan_to_num(9), known_values.nan_to_num(9))


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_a_row_that_nobody_needs_leaves_nothing_and_finds_zeros(splits: int, device: torch.device) -> None:
    fresh, keys, values, plan = batch(SHAPES["tiny"], [(1, 9), (1, 3)], 2, torch.float32, device)
    plan.spans[1, 2] = plan.write_slots[1] = -1
    before = keys.clone()
    out = attend(fresh, keys, values, plan, splits=splits)
    known_keys, known_values = before.clone(), values.clone()
    query = rotate_and_store(fresh, plan.write_slots, known_keys, known_values)[:1]
    first = replace(plan, table=plan.table[:1], spans=plan.spans[:1])
    exact = plain_attention(query.double(), known_keys.double(), known_values.double(), first)
    assert relative_error(out[:1], exact) < TOLERANCES[torch.float32]
    assert not out[1].any()
    changed = (keys != before) & ~(keys.isnan() & before.isnan())
    assert changed.flatten(1).any(1).nonzero().flatten().tolist() == [int(plan.write_slots[0])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("work", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_sees_what_came_before_it(
    shape: str, work: str, dtype: torch.dtype, device: torch.device
) -> None:
    if not ON_GPU and SHAPES[shape].heads > 6:
        pytest.skip("the interpreter takes long for many heads; fewer go the same way")
    check(SHAPES[shape], BATCHES[work], dtype, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("work", LARGE)
@pytest.mark.parametrize("shape", ["2B", "4B and 8B", "heads of 64"])
def test_long_contexts(shape: str, work: str, device: torch.device) -> None:
    check(SHAPES[shape], LARGE[work], torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 72])
def test_torchs_own_attention_makes_no_scores_of_a_picture(head_dim: int, device: torch.device) -> None:
    """The vision tower calls it without a mask; scores of 4096 patches would be 16 times its output."""
    tokens, heads = 4096, 16
    query, key, value = torch.randn(3, 1, heads, tokens, head_dim, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.cuda.synchronize()
    scores = heads * tokens * tokens * 2
    assert torch.cuda.max_memory_allocated() - before < scores / 4


def as_rows(chunks: BlockPlan) -> BlockPlan:
    """A plan for chunks of 3 tokens behind 9, 2 behind 4, and 1 that nobody needs, with a row for each."""
    past = torch.tensor([10, 11, 12, 5, 6, -1], dtype=torch.int32, device=chunks.spans.device)
    rows = torch.arange(6, dtype=torch.int32, device=past.device)
    return replace(
        chunks,
        table=chunks.table[[0, 0, 0, 1, 1, 2]],
        spans=torch.stack((rows, torch.ones_like(rows), past), 1),
        decoding=6,
        longest=0,
        stored_before=torch.full_like(rows, -1),
    )


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_rows_of_one_sequence_see_each_other(splits: int, device: torch.device) -> None:
    """Three rows of one, two of another, and one that nobody needs, find what chunks of them do."""
    fresh, keys, values, chunks = batch(SHAPES["tiny"], [(3, 9), (2, 4), (1, 0)], 0, torch.float32, device)
    chunks.write_slots[5] = -1
    known_keys, known_values = keys.clone(), values.clone()
    query = rotate_and_store(fresh, chunks.write_slots, known_keys, known_values)
    real = replace(chunks, table=chunks.table[:2], spans=chunks.spans[:2])
    exact = plain_attention(query.double(), known_keys.double(), known_values.double(), real)
    plan = as_rows(chunks)
    out = attend(fresh, keys, values, plan, splits=splits)
    assert relative_error(out[:5], exact[:5]) < TOLERANCES[torch.float32]
    assert not out[5].any()
    assert torch.equal(keys.nan_to_num(9), known_keys.nan_to_num(9))
    assert torch.equal(values.nan_to_num(9), known_values.nan_to_num(9))
