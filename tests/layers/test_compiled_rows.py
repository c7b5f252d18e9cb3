"""Compiled rows and decode attention on a CPU: error bounds, all layers in one call, helping threads."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.test_parity import CONVERSATIONS, run
from tests.layers.test_cpu_stored import compressed, int4, level, small_matrices_too
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.kernels.cpu import decode_layers, row_functions
from vlfit.kernels.cpu.products import StoredWeight
from vlfit.layers.norm import rms_norm
from vlfit.layers.rope import apply_rope
from vlfit.machine import processor

__all__ = ["level", "small_matrices_too"]

pytestmark = pytest.mark.skipif(processor.find_c_compiler() is None, reason="no C compiler")
ROUNDING = 2.0**-24


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest error in units of float32's rounding of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max() / ROUNDING)


@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (3, 77), (40, 96)])
@pytest.mark.usefixtures("level")
def test_norm(rows: int, width: int) -> None:
    hidden, delta, weight = torch.randn(rows, width), torch.randn(rows, width), torch.rand(width)
    for added in (delta, None):
        after = hidden.clone()
        out = row_functions.add_rms_norm(after, added, weight, 1e-6)
        assert torch.equal(after, hidden if added is None else hidden + added)
        # A sum of squares, of which half a rounding a term stays; a root, a quotient, two products.
        assert relative_error(out, rms_norm(after.double(), weight.double(), 1e-6)) < width / 2 + 4


@pytest.mark.usefixtures("level")
def test_swiglu() -> None:
    gate, up = torch.linspace(-120, 120, 4099).repeat(3, 1), torch.randn(3, 4099)
    out = row_functions.silu_mul(torch.cat((gate, up), dim=1))
    exact = F.silu(gate.double()) * up.double()
    error = (out - exact).abs() / exact.abs().clamp_min(2.0**-126)
    assert float(error[exact.abs() > 2.0**-100].max()) < 8 * ROUNDING
    assert float((out - exact).abs()[exact.abs() <= 2.0**-100].max()) < 2.0**-100


@pytest.mark.usefixtures("level")
def test_gelu() -> None:
    x = torch.cat((torch.linspace(-20, 20, 4099), torch.tensor([torch.nan, 1e30, -1e30]))).repeat(3, 1)
    exact = F.gelu(x.double(), approximate="tanh")
    out = row_functions.gelu_tanh_(x.clone())
    # Where the result is 2**-20 the exponent is 14, and its three roundings count as often.
    error = (out - exact).abs() / exact.abs().clamp_min(2.0**-20)
    assert float(error[:, :4099].max()) < (3 * 14 + 8) * ROUNDING
    assert out[:, 4099].isnan().all()
    assert out[0, 4100] == x[0, 4100]
    assert out[0, 4101] == 0


# Queries, keys, heads, KV heads, elements of a head, keys before the first query (None: it sees all).
ATTENTION = [
    (1024, 1024, 4, 4, 64, None),
    (300, 300, 2, 2, 72, None),
    (275, 275, 8, 4, 128, 0),
    (70, 301, 4, 1, 80, 231),
    (17, 17, 2, 1, 2, 0),
    (5, 600, 3, 3, 512, None),
]


@pytest.mark.parametrize(("queries", "count", "heads", "kv_heads", "dim", "past"), ATTENTION)
@pytest.mark.usefixtures("level")
def test_attention_in_bfloat16(
    queries: int, count: int, heads: int, kv_heads: int, dim: int, past: int | None
) -> None:
    """As near as the definition of which queries, keys, values and weights are rounded to bfloat16."""
    if not row_functions.takes_many_queries(dim):
        pytest.skip("no units for bfloat16")
    torch.manual_seed(count)
    packed = torch.randn(count, heads + 2 * kv_heads, dim)
    query, keys, values = packed.split((heads, kv_heads, kv_heads), dim=1)
    query = query[:queries]
    out = row_functions.attend_in_bf16(query, keys, values, past)
    seen = None
    if past is not None:
        seen = torch.arange(count) <= torch.arange(queries)[:, None] + past

    def exact(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        first, second, third = (part.transpose(0, 1)[None].double() for part in (query, keys, values))
        mixed = F.scaled_dot_product_attention(first, second, third, attn_mask=seen, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    right = exact(query, keys, values)
    error = (out - right).square().mean().sqrt()
    rounded = exact(*(part.bfloat16() for part in (query, keys, values)))
    assert error < 3 * (rounded - right).square().mean().sqrt()
    assert error < 2.0**-7 * right.square().mean().sqrt()


@pytest.mark.usefixtures("level")
def test_attention_in_bfloat16_of_large_scores_and_what_is_no_number() -> None:
    if not row_functions.takes_many_queries(64):
        pytest.skip("no units for bfloat16")
    torch.manual_seed(3)
    query, keys, values = (torch.randn(300, 2, 64) for _ in range(3))
    sharp = row_functions.attend_in_bf16(query * 1000, keys, values)
    best = (query.bfloat16().float().transpose(0, 1) @ keys.bfloat16().float().permute(1, 2, 0)).argmax(2)
    chosen = values.transpose(0, 1).gather(1, best[..., None].expand(-1, -1, 64)).transpose(0, 1)
    near = (sharp - chosen).abs().amax(2) < 0.02
    assert float(near.float().mean()) > 0.95  # all but ties
    query[7, 1, 3] = torch.nan
    finite = row_functions.attend_in_bf16(query, keys, values, 0).isfinite().all(2)
    assert finite.sum() == finite.numel() - 1
    assert not finite[7, 1]
    for wrong in (keys.double(), keys[:, :, :62], keys[:20]):
        with pytest.raises(ValueError, match=r"fit each other|in float32"):
            row_functions.attend_in_bf16(query, wrong, values, 0)


@pytest.mark.usefixtures("level")
def test_swiglu_of_what_is_no_number() -> None:
    gate = torch.tensor([[torch.nan, torch.inf, -torch.inf, -1e38, 1e38, 0.0]])
    out = row_functions.silu_mul(torch.cat((gate, torch.ones(1, 6)), dim=1))[0]
    assert out[0].isnan()
    assert out[1:].tolist() == [torch.inf, 0.0, 0.0, float(torch.tensor(1e38)), 0.0]


@pytest.mark.parametrize("rows", [1, 35])
@pytest.mark.parametrize("rotary", [48, 16])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.usefixtures("level")
def test_rope_and_storing(rows: int, rotary: int, has_norm: bool) -> None:
    heads, kv_heads, dim = 6, 2, 48
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim)
    weight = torch.rand(heads + kv_heads, dim) if has_norm else None
    tables = (torch.randn(rows, 1, rotary), torch.randn(rows, 1, rotary))
    keys, values = torch.zeros(2, 50, kv_heads, dim)
    slots = torch.randperm(50)[:rows]
    both = qkv[:, :-kv_heads].double()
    if weight is not None:
        both = rms_norm(both, weight.double(), 1e-6)
    exact = apply_rope(both, *(table.double() for table in tables))
    query, none = row_functions.rotate(qkv, weight, tables, 1e-6, kv_heads, (slots, keys, values))
    assert none is None
    assert relative_error(query, exact[:, :heads]) < dim
    assert relative_error(keys[slots], exact[:, heads:]) < dim
    assert torch.equal(values[slots], qkv[:, -kv_heads:])
    assert int((keys != 0).any(-1).any(-1).sum()) == rows, "no other slot was written"
    again, alone = row_functions.rotate(qkv, weight, tables, 1e-6, kv_heads, None)
    assert alone is not None
    assert torch.equal(again, query)
    assert torch.equal(alone, keys[slots])


@pytest.mark.parametrize(
    ("sequences", "heads", "kv_heads", "dim", "longest"),
    [(1, 16, 8, 128, 300), (3, 4, 2, 16, 5), (2, 6, 1, 48, 33), (1, 3, 3, 256, 700)],
)
@pytest.mark.usefixtures("level")
def test_decode_attention(sequences: int, heads: int, kv_heads: int, dim: int, longest: int) -> None:
    keys, values = torch.randn(2, 800, kv_heads, dim)
    query = torch.randn(sequences, heads, dim) * 3
    slots = torch.stack([torch.randperm(800)[:longest] for _ in range(sequences)])
    lengths = torch.tensor([max(longest - 2 * number, 1) for number in range(sequences)])
    out = row_functions.decode_attention(query, keys, values, slots, lengths)
    for row, count in enumerate(lengths):
        k, v = (each[slots[row, :count]].transpose(0, 1).double() for each in (keys, values))
        exact = F.scaled_dot_product_attention(query[row, :, None].double(), k, v, enable_gqa=True)[:, 0]
        # Scores reach 3 * sqrt(dim) roundings of dim terms, and weights are e**score; then a sum of them.
        assert relative_error(out[row], exact) < 8 * dim**0.5 + 2 * count**0.5 + 16


def test_a_slot_that_is_not_there() -> None:
    keys, values = torch.zeros(2, 10, 1, 16)
    query, one = torch.ones(1, 1, 16), torch.ones(1, dtype=torch.long)
    for slot in (-1, 10, 2**40):
        slots = torch.tensor([[slot]])
        with pytest.raises(IndexError):
            row_functions.decode_attention(query, keys, values, slots, one)
        tables = (torch.ones(1, 1, 16), torch.ones(1, 1, 16))
        with pytest.raises(IndexError):
            row_functions.rotate(torch.ones(1, 3, 16), None, tables, 1e-6, 1, (slots[0], keys, values))
    with pytest.raises(IndexError):
        row_functions.decode_attention(query, keys, values, torch.zeros(1, 1, dtype=torch.long), one + 1)


# --- all layers in one call --------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_matrices_too")
def test_one_call_says_what_single_calls_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(compressed("4 bits, all else in 8, tied", tmp_path))
    options = EngineOptions(device="cpu", dtype="float32", max_model_len=512, max_num_seqs=2, speculate=False)
    asked = list(CONVERSATIONS.values())[:2]
    rows: list[int] = []
    whole = decode_layers.DecodeLayers.__call__

    def counted(self: decode_layers.DecodeLayers, hidden: Tensor, *others: Any) -> None:
        rows.append(len(hidden))
        whole(self, hidden, *others)

    monkeypatch.setattr(decode_layers.DecodeLayers, "__call__", counted)
    found = []
    for takes in (True, False):
        if not takes:
            monkeypatch.setattr(decode_layers, "takes_cache", lambda _: False)
        engine = NativeEngine(checkpoint, options)
        found.append([run(engine, asked[0], tokens=12), run(engine, *asked, tokens=12)])
        rows.append(0)
    assert found[0] == found[1]
    first, second = " ".join(map(str, rows)).split("0")[:2]
    assert len(first.split()) >= 22
    assert set(first.split()) == {"1", "2"}
    assert not second.split()


# --- threads -----------------------------------------------------------------------------------------------


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def product() -> Callable[[], Tensor]:
    weight, x = StoredWeight(int4(2048, 512, 32, True, torch.bfloat16)), torch.randn(3, 512)
    return lambda: weight(x)


@pytest.mark.usefixtures("four_threads")
def test_callers_at_the_same_time(product: Callable[[], Tensor]) -> None:
    """One has the helpers, the others work alone; results are the same."""
    expected = product()
    with ThreadPoolExecutor(6) as callers:
        for found in callers.map(lambda _: product(), range(300)):
            assert torch.equal(found, expected)


@pytest.mark.usefixtures("four_threads")
def test_helpers_are_few_and_stay(product: Callable[[], Tensor]) -> None:
    product()
    before = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        product()
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.usefixtures("four_threads")
def test_after_a_fork_there_are_new_helpers(product: Callable[[], Tensor]) -> None:
    expected = product()
    child = os.fork()
    if not child:  # a helper of the parent's is waited for in vain
        threading.Timer(30, lambda: os._exit(3)).start()
        os._exit(0 if torch.equal(product(), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
