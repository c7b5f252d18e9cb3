"""Helpers for engines that are put to sleep."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.pictures import picture
from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import SleepResult
from vlfit.backends.native import NativeBackend
from vlfit.engine.memory.sleep import Sleeper
from vlfit.engine.memory.usage import tensor_bytes

SLEEPER = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=2)


@pytest.fixture
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    with NativeBackend.load(tiny("tied"), SLEEPER) as loaded:
        yield loaded


def answer_text(backend: NativeBackend, seed: int = 1, tokens: int = 12) -> str:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return (
        backend.stream(single_turn("what is this?", ImagePart(picture(96, 64, seed=seed))), sampling)
        .answer()
        .text
    )


def sleep_result(future: "Future[SleepResult]") -> SleepResult:
    return future.result(timeout=60)


def engine_tensor_bytes(backend: NativeBackend) -> int:
    """Bytes of all tensors of the engine."""
    return tensor_bytes(backend._engine_thread.engine.runner)


def pretend_gpu(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights move to RAM as on a GPU; on a CPU that is refused, as it frees nothing."""
    monkeypatch.setattr(Sleeper, "_choose_level", lambda *_: "ram")
