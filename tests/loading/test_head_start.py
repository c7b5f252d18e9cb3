"""What begins before torch is there: the plan is made for the card as it was; files come into RAM once."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.test_room import CARD, CUDA, WANTED, four_billion, on_card
from tests.machine.nvml import Process, install
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.memory.fit import find_room
from vlfit.loading import preload as head_start
from vlfit.units import MIB

__all__ = ["four_billion"]  # a fixture


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A torch that wants a GPU, and what is made for it."""
    calls: list[object] = []
    monkeypatch.setattr(head_start, "_torch_wants_one", lambda: True)
    monkeypatch.setattr(head_start, "_make_context", calls.append)
    yield calls
    head_start.gpus_before()


def finish() -> None:
    for thread in threading.enumerate():
        if thread.name in ("vlfit-ahead", "vlfit-cuda", "vlfit-triton"):  # not what another test left
            thread.join()


def test_a_context_that_was_made_beforehand_is_planned_as_if_it_were_not_there(
    made: list[object], monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint
) -> None:
    """Also by a driver that does not tell what of the card is ours."""
    fresh = on_card(monkeypatch, CARD, four_billion, WANTED)
    head_start.make_context("auto")
    finish()
    assert made == [0]
    untold = (Process(1, "python", None),)
    now = replace(CARD, free=CARD.free - 500, compute=untold)
    again = on_card(monkeypatch, now, four_billion, WANTED)
    assert (again.spare, again.there, again.free) == (fresh.spare, 0, fresh.free)
    # The look is of one start: who comes next finds the card as it is.
    install(monkeypatch, now)
    assert find_room(four_billion, CUDA, torch.bfloat16, WANTED).free == now.free * MIB


def test_none_is_made_for_a_cpu_or_a_card_that_is_not_there(
    made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, CARD)
    assert head_start.make_context("cpu") == ()
    finish()
    assert made == []
    assert len(head_start.make_context("cuda:1")) == 1
    finish()
    assert made == []
    assert head_start.gpus_before() == ()


def test_pieces_of_a_file_that_are_not_in_ram_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "_PIECE", 1000)
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
    head_start.read_ahead(tmp_path)
    for thread in threading.enumerate():
        if thread.name == "vlfit-ahead":
            thread.join()
    assert read == [1000, 4000]
