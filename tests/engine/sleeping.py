"""Helpers for engines that are put to sleep."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.pictures import picture
from vlfit.api.conversation import ImagePart, ask
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


def say(backend: NativeBackend, seed: int = 1, tokens: int = 12) -> str:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return backend.stream(ask("what is this?", ImagePart(picture(96, 64, seed=seed))), sampling).answer().text


def settled(wish: "Future[SleepResult]") -> SleepResult:
    return wish.result(timeout=60)


def held(backend: NativeBackend) -> int:
    """Bytes of all tensors that the engine has."""
    return tensor_bytes(backend._engine_thread.engine.runner)


def pretend_gpu(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may be parked in RAM: as on a GPU, where that frees something."""
    monkeypatch.setattr(Sleeper, "_choose_level", lambda *_: "ram")
