"""Memory on a CUDA device: torch's cap, a real failed allocation, a KV cache that shrinks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.test_faults import submit_picture_request, three_streams, tokens
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.warmup import profile_peak_memory as at_start
from vlfit.engine.memory import kv_resize
from vlfit.engine.memory.budget import Budget
from vlfit.engine.memory.kv_resize import KVResizer
from vlfit.errors import OutOfMemory
from vlfit.units import MIB

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_cap_afterwards() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


def engine(tiny: Callable[[str], Path], kv_tokens: int | None = None) -> NativeEngine:
    options = EngineOptions(
        device="cuda", dtype="float32", max_model_len=512, max_num_batched_tokens=64, kv_tokens=kv_tokens
    )
    return NativeEngine(open_checkpoint(tiny("tied")), options)


def run(built: NativeEngine) -> None:
    while built.busy:
        built.step()


def test_torch_takes_no_more_than_the_plan_says(tiny: Callable[[str], Path]) -> None:
    """And the worst case that the plan admits needs no more."""
    options = EngineOptions(
        device="cuda", dtype="bfloat16", max_model_len=512, max_num_seqs=2, enforce_plan=True
    )
    built = NativeEngine(open_checkpoint(tiny("tied")), options)
    limit = built.executor.budget.limit
    assert limit is not None
    at_start(built)
    assert torch.cuda.max_memory_reserved() <= limit
    assert built.executor.budget.available_bytes() <= limit
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(limit, dtype=torch.uint8, device="cuda")
    stream = submit_picture_request(built, 1, SamplingParams(max_tokens=4, ignore_eos=True))
    run(built)
    assert [len(ids) for ids in tokens([stream])] == [4]


def test_free_memory_becomes_one_segment() -> None:
    budget = Budget(torch.device("cuda"))
    tensors = [torch.empty(size * MIB // 2, dtype=torch.uint8, device="cuda") for size in (1, 50, 70, 90)]
    tensors.clear()
    before = torch.cuda.memory_reserved()
    budget.defragment()
    joined = torch.cuda.memory_reserved()
    assert before <= joined <= before + 12 * MIB
    small = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(12)]
    whole = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")  # more than any of the segments had
    assert torch.cuda.memory_reserved() == joined
    del whole, small


def test_an_allocation_that_fails_costs_its_request(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = three_streams(built := engine(tiny))
    run(built)
    built = engine(tiny)
    streams = three_streams(built)
    while not all(stream.received for stream in streams):
        built.step()
    encode = built.runner.encode_image

    def too_much(image: object) -> object:
        return torch.empty(2**45, dtype=torch.uint8, device="cuda")

    for seed in range(20):
        monkeypatch.setattr(built.runner, "encode_image", too_much)
        large = submit_picture_request(built, 100 + seed, SamplingParams(max_tokens=4))
        while not large.has_ended:
            built.step()
        assert isinstance(large.received[-1], OutOfMemory)
        assert "32768.00 GiB" in large.received[-1].message
        monkeypatch.setattr(built.runner, "encode_image", encode)
    run(built)
    assert tokens(streams) == tokens(undisturbed)
    assert built.block_manager.num_free == built.block_manager.num_blocks


def test_a_smaller_pool_gives_its_memory_back_to_the_driver(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = three_streams(built := engine(tiny, 300_000))
    run(built)
    monkeypatch.setattr(kv_resize, "CHECK_INTERVAL_SECONDS", 0.0)
    built = engine(tiny, 300_000)
    least = built.block_manager.blocks_for(512)
    built.kv_resizer = KVResizer(
        built.scheduler, built.runner.cache, least, lambda: 0, built._release_workspaces
    )
    streams = three_streams(built)
    before, large = torch.cuda.memory_reserved(), built.runner.cache.nbytes
    assert large > 200 * MIB
    for _ in range(30):
        built.step()
    small = built.runner.cache.nbytes
    assert small < large / 100
    assert before - torch.cuda.memory_reserved() >= large - small - 8 * MIB
    run(built)
    assert tokens(streams) == tokens(undisturbed)
