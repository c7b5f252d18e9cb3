"""The speed of memory: a number that a machine can have, and a refusal where there is no room for it."""

from dataclasses import replace

import pytest
import torch

from vlfit.errors import DeviceError
from vlfit.machine.host import read_host
from vlfit.tuning import bandwidth
from vlfit.units import MIB

CPU = torch.device("cpu")


def test_memory_has_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_MOST", bandwidth._LEAST * 4)
    monkeypatch.setattr(bandwidth, "_ENOUGH", 0.0)
    assert 1e8 < bandwidth.memory_speed(CPU) < 1e13


def test_without_room_there_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    little = replace(read_host(), ram_available=200 * MIB)
    monkeypatch.setattr(bandwidth, "read_host", lambda: little)
    with pytest.raises(DeviceError, match="takes 256 MiB; 200 are free"):
        bandwidth.memory_speed(CPU)


def test_rounds_that_warm_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0] * 3 + [0.1] * 9)
    monkeypatch.setattr(bandwidth, "_on_cpu", lambda work, device: next(times))
    assert bandwidth.seconds_of(lambda: None, CPU) == 0.1


def test_all_of_a_buffer_is_read() -> None:
    numbers = torch.arange(2 * 4 * 64, dtype=torch.int32)
    sums = torch.zeros(8, dtype=torch.int32)
    assert bandwidth.read_all(numbers, sums, 64) == 2
    assert sums.tolist() == [*numbers.view(2, -1).sum(1).tolist(), 0, 0, 0, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_reads_within_what_it_promises() -> None:
    from vlfit.machine.gpu import read_gpus

    promised = read_gpus()[0][0].bandwidth
    assert promised is not None
    assert 0.5 * promised < bandwidth.memory_speed(torch.device("cuda")) <= promised
