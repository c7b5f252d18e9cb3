"""An engine asleep on a GPU: only the CUDA context remains, and waking restores everything."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.sleeping import answer_text, sleep_result
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.backends.native import NativeBackend
from vlfit.errors import CannotWake
from vlfit.units import MIB


@pytest.fixture
def gpu() -> Iterator[None]:
    """With nothing left of tests before, and no cap for those behind."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("park", ["ram", "files"])
@pytest.mark.parametrize("name", ["tied", "fp8"])
def test_on_a_gpu_nothing_but_the_context_is_left(
    tiny: Callable[[str], Path], name: str, park: SleepLevel
) -> None:
    """Graphs, workspaces and all; and what is computed afterwards is what it was."""
    elsewhere = torch.cuda.memory_reserved()
    options = EngineOptions(
        device="cuda", dtype="bfloat16", max_model_len=512, max_num_seqs=2, kv_tokens=200_000
    )
    with NativeBackend.load(tiny(name), options) as backend:
        words = [answer_text(backend, seed, tokens=40) for seed in range(3)]
        for _ in range(3):
            account = backend.account().memory
            before = torch.cuda.memory_reserved()
            rest = sleep_result(backend.sleep(park))
            assert rest.asleep is not None
            assert rest.asleep.level == park
            assert rest.asleep.freed_bytes == before - torch.cuda.memory_reserved()
            assert rest.asleep.freed_bytes >= sum(account.weights.values()) + account.kv_cache
            assert torch.cuda.memory_reserved() - elsewhere <= 4 * MIB
            assert [answer_text(backend, seed, tokens=40) for seed in range(3)] == words
            assert torch.cuda.memory_reserved() <= before + 32 * MIB


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("park", ["ram", "files"])
def test_on_a_gpu_an_allocation_truly_fails_halfway(tiny: Callable[[str], Path], park: SleepLevel) -> None:
    """As if others took the rest after it was counted: what was there is given back, then all is there."""
    options = EngineOptions(
        device="cuda", dtype="bfloat16", max_model_len=512, max_num_seqs=2, kv_tokens=200_000
    )
    with NativeBackend.load(tiny("tied"), options) as backend:
        words = answer_text(backend)
        held = backend.account().memory
        size = sum(held.weights.values()) + held.kv_cache
        sleep_result(backend.sleep(park))
        asleep = torch.cuda.memory_reserved()
        whole = torch.cuda.get_device_properties(0).total_memory
        for share in (0.01, 0.5, 0.9):  # before weights, in the pool's keys, in its values
            torch.cuda.set_per_process_memory_fraction((asleep + share * size) / whole)
            with pytest.raises(CannotWake):
                answer_text(backend)
            assert backend.asleep
            assert torch.cuda.memory_reserved() <= asleep + 4 * MIB
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert answer_text(backend) == words
