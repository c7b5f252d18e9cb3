"""Small work runs on one thread, large work does not; the number of threads is restored."""

from collections.abc import Iterator

import pytest
import torch

from vlfit.engine import device as threads_of_torch
from vlfit.engine.device import MULTITHREADING_MIN_MULTIPLICATIONS, limit_threads_to_cores, threads_for_work

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "multiplications", "threads"),
    [
        (CPU, MULTITHREADING_MIN_MULTIPLICATIONS, 1),
        (CPU, MULTITHREADING_MIN_MULTIPLICATIONS + 1, 2),
        (torch.device("cuda"), 1, 2),
    ],
)
def test_threads_follow_the_work(device: torch.device, multiplications: int, threads: int) -> None:
    with threads_for_work(device, multiplications):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_threads_come_back_after_a_failure() -> None:
    with pytest.raises(ValueError, match="mine"), threads_for_work(CPU, 1):
        raise ValueError("mine")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("cores", "whole", "user", "expected"),
    [(1, 2, None, 1), (9, 9, None, 2), (2, 1, None, 1), (1, 1, "2", 2)],
)
def test_no_more_threads_than_cores_unless_omp_num_threads_is_set(
    monkeypatch: pytest.MonkeyPatch, cores: int, whole: int, user: str | None, expected: int
) -> None:
    monkeypatch.setattr(threads_of_torch, "usable_cores", lambda: cores)
    monkeypatch.setattr(threads_of_torch, "physical_cores", lambda: whole)
    if user is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", user)
    limit_threads_to_cores()
    assert torch.get_num_threads() == expected
