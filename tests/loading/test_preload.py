"""Work before torch is imported: the plan uses the card as it was; files are read into RAM once."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.test_memory_fit import CARD, CUDA, WANTED, four_billion, on_card
from tests.machine.nvml import Process, install
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.memory.fit import check_fit
from vlfit.loading import preload
from vlfit.units import MIB

__all__ = ["four_billion"]  # a fixture


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A torch that wants a GPU, and what is made for it."""
    calls: list[object] = []
    monkeypatch.setattr(preload, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(preload, "_create_context", calls.append)
    yield calls
    preload.take_gpus_before_context()


def finish() -> None:
    for thread in threading.enumerate():
        if thread.name in ("vlfit-ahead", "vlfit-cuda", "vlfit-triton"):  # not what another test left
            thread.join()


def test_a_context_that_was_made_beforehand_is_planned_as_if_it_were_not_there(
    made: list[object], monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint
) -> None:
    """Also by a driver that does not tell what of the card is ours."""
    fresh = on_card(monkeypatch, CARD, four_billion, WANTED)
    preload.start_cuda_context("auto")
    finish()
    assert made == [0]
    untold = (Process(1, "python", None),)
    now = replace(CARD, free=CARD.free - 500, compute=untold)
    again = on_card(monkeypatch, now, four_billion, WANTED)
    assert (again.headroom, again.already_allocated, again.free) == (fresh.headroom, 0, fresh.free)
    # The look is of one start: who comes next finds the card as it is.
    install(monkeypatch, now)
    assert check_fit(four_billion, CUDA, torch.bfloat16, WANTED).free == now.free * MIB


def test_none_is_made_for_a_cpu_or_a_card_that_is_not_there(
    made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, CARD)
    assert preload.start_cuda_context("cpu") == ()
    finish()
    assert made == []
    assert len(preload.start_cuda_context("cuda:1")) == 1
    finish()
    assert made == []
    assert preload.take_gpus_before_context() == ()


def test_pieces_of_a_file_that_are_not_in_ram_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preload, "_CHUNK", 1000)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(4500))
    read: list[int] = []

    def preadv(_: int, buffers: list[bytearray], start: int, flags: int = 0) -> int:
        if flags and start in (1000, 4000):
            raise BlockingIOError
        if not flags:
            read.append(start)
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    preload.read_ahead(tmp_path)
    for thread in threading.enumerate():
        if thread.name == "vlfit-ahead":
            thread.join()
    assert read == [1000, 4000]


def test_meta_registrations_are_imported_when_they_are_first_read() -> None:
    """In a process of its own: the engine works without them, and reading one imports the module."""
    program = """
import sys
from vlfit.loading import preload
preload.defer_meta_registrations()
from vlfit.backends.in_process import import_engine
from vlfit.backends.native import NativeBackend
import_engine()
print("torch._refs" in sys.modules)
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
with NativeBackend.load("mini", EngineOptions(device="cpu", max_model_len=256)) as backend:
    backend.stream(single_turn("hello"), SamplingParams(max_tokens=4, temperature=0.7, seed=1)).answer()
print("torch._refs" in sys.modules)
import torch
from torch._meta_registrations import meta_index_Tensor
print("torch._refs" in sys.modules, torch._meta_registrations.meta_index_Tensor is meta_index_Tensor)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["False", "False", "True True"], done.stderr
