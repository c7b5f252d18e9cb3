"""Offload on a simulated card: as many layers as requested, or as few as make it fit."""

from dataclasses import replace

import pytest
import torch

from tests.engine.test_memory_fit import CARD, CUDA, WANTED, four_billion, on_card
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.memory import fit as memory_fit
from vlfit.engine.memory.fit import check_fit
from vlfit.errors import DoesNotFit, UsageError
from vlfit.machine.host import read_host
from vlfit.plan.native.ram import num_layers_to_free, offload_of, spread_layers
from vlfit.plan.shapes import model_of
from vlfit.units import GIB, MIB

__all__ = ["four_billion"]  # a fixture
SMALL = replace(CARD, free=4500)


@pytest.fixture(autouse=True)
def plenty_of_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(read_host(), ram_total=64 * GIB, ram_available=48 * GIB)
    monkeypatch.setattr(memory_fit, "read_host", lambda: host)


def test_it_never_happens_by_itself(monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint) -> None:
    with pytest.raises(DoesNotFit) as caught:
        on_card(monkeypatch, SMALL, four_billion, WANTED)
    assert "--offload auto" in caught.value.hint


def test_auto_is_the_least_that_fits(monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint) -> None:
    auto = replace(WANTED, offload="auto")
    assert on_card(monkeypatch, CARD, four_billion, auto).offloaded_layers == ()
    found = on_card(monkeypatch, SMALL, four_billion, auto)
    assert found.headroom >= 0
    assert found.offloaded_layers == spread_layers(36, len(found.offloaded_layers))
    model = model_of("", four_billion.config, four_billion.tensors, "")
    fewer = offload_of(model, len(found.offloaded_layers) - 1).freed_bytes
    with pytest.raises(DoesNotFit):
        on_card(monkeypatch, SMALL, four_billion, replace(WANTED, offload=fewer))
    assert on_card(monkeypatch, SMALL, four_billion, replace(WANTED, offload=fewer + 1)) == found
    assert found.limit is not None
    slots = next(line.bytes for line in found.lines if line.line == "weights.offload")
    assert slots == offload_of(model, 10).slots_bytes


def test_pictures_that_nobody_fixed_are_ample_where_that_can_be(
    monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint
) -> None:
    auto = replace(WANTED, offload="auto", image_tokens=None, max_image_tokens=4095)
    assert on_card(monkeypatch, SMALL, four_billion, auto).image_tokens == 1024


def test_as_many_as_were_wished_for(monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint) -> None:
    plain = on_card(monkeypatch, CARD, four_billion, WANTED)
    found = on_card(monkeypatch, CARD, four_billion, replace(WANTED, offload=GIB))
    model = model_of("", four_billion.config, four_billion.tensors, "")
    assert len(found.offloaded_layers) == num_layers_to_free(model, GIB)
    graphs = next(line.bytes for line in plain.lines if line.line == "graphs")
    assert GIB - 8 * MIB < found.headroom - plain.headroom - graphs < GIB + 110 * MIB


def test_not_even_all_of_them(monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint) -> None:
    with pytest.raises(DoesNotFit) as caught:
        on_card(monkeypatch, replace(CARD, free=2000), four_billion, replace(WANTED, offload="auto"))
    assert "--offload" not in caught.value.hint


def test_too_little_ram(monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint) -> None:
    host = replace(read_host(), ram_available=2 * GIB)
    monkeypatch.setattr(memory_fit, "read_host", lambda: host)
    with pytest.raises(DoesNotFit, match=r"2\.00 GiB"):
        on_card(monkeypatch, SMALL, four_billion, replace(WANTED, offload="auto"))


def test_it_needs_a_plan(monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint) -> None:
    """Which layers wait is the plan's to say, and it counts in 16 bits."""
    on_card(monkeypatch, CARD, four_billion, WANTED)
    with pytest.raises(UsageError) as caught:
        check_fit(four_billion, CUDA, torch.float32, replace(WANTED, offload=GIB))
    assert caught.value.param == "offload"
