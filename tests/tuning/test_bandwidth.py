"""Measured memory bandwidth is plausible, and too little memory is refused."""

from dataclasses import replace

import pytest
import torch

from vlfit.errors import DeviceError
from vlfit.machine.host import read_host
from vlfit.tuning import bandwidth
from vlfit.units import MIB

CPU = torch.device("cpu")


def test_cpu_bandwidth_is_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "MAX_BUFFER", bandwidth.MIN_BUFFER * 4)
    monkeypatch.setattr(bandwidth, "MIN_SECONDS", 0.0)
    assert 1e8 < bandwidth.measure_memory_bandwidth(CPU) < 1e13


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    little = replace(read_host(), ram_available=200 * MIB)
    monkeypatch.setattr(bandwidth, "read_host", lambda: little)
    with pytest.raises(DeviceError, match=r"256 MiB.* 200 MiB"):
        bandwidth.measure_memory_bandwidth(CPU)


def test_warm_up_rounds_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0] * 3 + [0.1] * 9)
    monkeypatch.setattr(bandwidth, "time_on_cpu", lambda work, device: next(times))
    assert bandwidth.median_seconds(lambda: None, CPU) == 0.1


def test_whole_buffer_is_read() -> None:
    numbers = torch.arange(2 * 4 * 64, dtype=torch.int32)
    sums = torch.zeros(8, dtype=torch.int32)
    assert bandwidth.launch_read_kernel(numbers, sums, 64) == 2
    assert sums.tolist() == [*numbers.view(2, -1).sum(1).tolist(), 0, 0, 0, 0, 0, 0]


@pytest.mark.gpu
def test_gpu_bandwidth_is_within_the_data_sheet() -> None:
    from vlfit.machine.gpu import read_gpus

    promised = read_gpus()[0][0].bandwidth
    assert promised is not None
    assert 0.5 * promised < bandwidth.measure_memory_bandwidth(torch.device("cuda")) <= promised
