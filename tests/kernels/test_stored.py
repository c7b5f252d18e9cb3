"""Attention over keys and values in FP8, by the kernels: against float64 of what the cache then holds."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error
from tests.kernels.test_attention import BATCHES, LARGE, SHAPES, Shape, as_rows, batch
from tests.layers.test_float8 import rows_of_many_sizes
from vlfit.kernels.attention import paged as attention
from vlfit.kernels.attention.paged import BlockPlan, Tiles, attend, plain_attention
from vlfit.kernels.launch import arrivals
from vlfit.kernels.rows import row_ops as fused
from vlfit.kernels.rows.row_ops import Fresh
from vlfit.layers.kv_cache import narrowed, widened

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # of numpy, which interprets
]
# With the instruction that a card has, and as cards do that have none; the interpreter is one of these.
CONVERSIONS = [True, False] if ON_GPU else [False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_as_on_a_cpu_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    """Two rows that are not finite among them. Values go in as they are; keys are turned first, which leaves
    the same as in a cache of numbers.
    """
    values = rows_of_many_sizes(dtype)[: None if ON_GPU else 40]
    values[1, 5], values[2, 7], values[3] = torch.inf, torch.nan, 0.0
    rows, width = values.shape
    joined = torch.cat([torch.randn(rows, 2, width).to(dtype), values[:, None]], 1).to(device)
    angles = torch.rand(rows, 1, width)
    fresh = Fresh(joined, None, angles.cos().to(device, dtype), angles.sin().to(device, dtype), 1e-6)
    slots = torch.randperm(rows + 5)[:rows].to(device)
    slots[9] = -1
    keys, codes = torch.full((2, rows + 5, 1, width), 7, dtype=torch.uint8, device=device)
    scales = torch.full((2, rows + 5, 1), 9, dtype=torch.int16, device=device)
    fused.rotate_and_store(fresh, slots, keys, codes, (scales[0], scales[1]))
    plain_keys, plain_values = torch.zeros(2, rows + 5, 1, width, dtype=dtype, device=device)
    fused.rotate_and_store(fresh, slots, plain_keys, plain_values)
    known_codes, known_scales = narrowed(values.to(device))
    stored = (slots >= 0) & known_scales.view(torch.bfloat16).isfinite()
    assert 2 * int(stored.sum()) > rows
    assert torch.equal(codes[slots[stored], 0], known_codes[stored])
    written = slots >= 0
    assert torch.equal(scales[1, slots[written], 0], known_scales[written])
    of_keys = widened(*narrowed(plain_keys[slots[written]]), torch.float32)
    assert relative_error(widened(keys, scales[0], torch.float32)[slots[written]], of_keys.double()) < (
        TOLERANCES[dtype] if ON_GPU else 1e-9  # two kernels may multiply and add in another order
    )
    others = sorted({*range(rows + 5)} - {*slots.tolist()})
    assert (torch.stack((keys, codes))[:, others] == 7).all()
    assert (scales[:, others] == 9).all()


def in_fp8(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Codes and scales; what nobody wrote is NaN. Values are of many sizes, some next to nothing."""
    sizes = torch.randint(-12, 6, values.shape[:2]).float().exp2().to(keys.device)
    (key_codes, key_scales), (value_codes, value_scales) = narrowed(keys), narrowed(values * sizes[..., None])
    return key_codes, value_codes, (key_scales, value_scales)


def check(
    shape: Shape, work: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, splits: int = 2
) -> None:
    chosen, tiles = (None, None) if ON_GPU else (splits, Tiles(32, 32, 4, 1))
    torch.manual_seed(0)
    decoding = next((index for index, (tokens, _) in enumerate(work) if tokens > 1), len(work))
    fresh, keys, values, plan = batch(shape, work, decoding, dtype, device)
    unknown = keys.isnan()
    keys, values, scales = in_fp8(keys, values)
    for _ in range(2 if ON_GPU else 1):
        out = attend(fresh, keys, values, plan, scales, splits=chosen, tiles=tiles)
        assert out.dtype == dtype
        assert relative_error(out, exact_of(fresh, keys, values, scales, plan)) < TOLERANCES[dtype]
    assert not arrivals(device).any()
    now_unknown = widened(keys, scales[0], torch.float32).isnan()
    fresh_slots = unknown & ~now_unknown
    assert fresh_slots.flatten(1).any(1).nonzero().flatten().tolist() == sorted(plan.write_slots.tolist())
    of_values = narrowed(fresh.joined[:, -shape.key_heads :])
    assert torch.equal(values[plan.write_slots], of_values[0])
    assert torch.equal(scales[1][plan.write_slots], of_values[1])


def exact_of(
    fresh: Fresh, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor], plan: BlockPlan
) -> Tensor:
    """By float64, of the cache as it is after the kernels: they see the newest token as it is stored."""
    others = [torch.empty_like(part) for part in (keys, values, *scales)]
    query = fused.rotate_and_store(fresh, plan.write_slots, others[0], others[1], (others[2], others[3]))
    wide_keys, wide_values = (
        widened(codes, scale, torch.float64) for codes, scale in zip((keys, values), scales, strict=True)
    )
    return plain_attention(query.double(), wide_keys, wide_values, plan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hardware", CONVERSIONS)
@pytest.mark.parametrize("work", BATCHES if ON_GPU else ["decoding alone", "a chunk with a past"])
@pytest.mark.parametrize("shape", SHAPES if ON_GPU else ["tiny", "one key head, heads of no power of two"])
def test_every_token_sees_what_the_cache_holds(
    shape: str,
    work: str,
    hardware: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "converts_float8", lambda device: hardware)
    check(SHAPES[shape], BATCHES[work], dtype, device)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("work", LARGE)
@pytest.mark.parametrize("shape", ["2B", "4B and 8B", "heads of 64"])
def test_long_contexts(shape: str, work: str, device: torch.device) -> None:
    check(SHAPES[shape], LARGE[work], torch.bfloat16, device)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_that_nobody_needs_leaves_nothing_and_finds_zeros(splits: int, device: torch.device) -> None:
    fresh, keys, values, plan = batch(SHAPES["tiny"], [(1, 9), (1, 3)], 2, torch.float32, device)
    plan.spans[1, 2] = plan.write_slots[1] = -1
    keys, values, scales = in_fp8(keys, values)
    before = [part.clone() for part in (keys, values, *scales)]
    out = attend(fresh, keys, values, plan, scales, splits=splits)
    assert not out[1].any()
    first = replace(plan, table=plan.table[:1], spans=plan.spans[:1])
    assert relative_error(out[:1], exact_of(fresh, keys, values, scales, first)[:1]) < 2e-6
    for part, then in zip((keys, values, *scales), before, strict=True):
        changed = (part != then).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [int(plan.write_slots[0])]


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_one_sequence_see_each_other(splits: int, device: torch.device) -> None:
    fresh, keys, values, chunks = batch(SHAPES["tiny"], [(3, 9), (2, 4), (1, 0)], 0, torch.float32, device)
    chunks.write_slots[5] = -1
    keys, values, scales = in_fp8(keys, values)
    out = attend(fresh, keys, values, as_rows(chunks), scales, splits=splits)
    real = replace(chunks, table=chunks.table[:2], spans=chunks.spans[:2])
    assert relative_error(out[:5], exact_of(fresh, keys, values, scales, real)[:5]) < 2e-6
    assert not out[5].any()


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("work", [[(1, 40)], [(7, 33)]], ids=["decoding", "a prompt"])
def test_what_is_not_finite_shows(work: list[tuple[int, int]], what: str, device: torch.device) -> None:
    shape = SHAPES["tiny"]
    fresh, keys, values, plan = batch(shape, work, int(work[0][0] == 1), torch.float32, device)
    slot = int(plan.table[0, 1]) * shape.block_size
    (keys if what == "key" else values)[slot, 0] = torch.nan
    keys, values, scales = in_fp8(keys, values)
    out = attend(fresh, keys, values, plan, scales, splits=2).unflatten(1, (shape.heads, shape.head_dim))
    per_key_head = shape.heads // shape.key_heads
    assert not out[:, :per_key_head].isfinite().any()
    assert out[:, per_key_head:].isfinite().all()
