"""Storages offloaded to RAM and restored: tensors and views stay the same objects."""

import mmap

import pytest
import torch
from torch import Tensor

from vlfit.engine.memory import sleep as parking
from vlfit.engine.memory.sleep import OffloadedStorages, cut_transfers
from vlfit.engine.memory.usage import storages_in, tensor_bytes

CPU = torch.device("cpu")


def some_tensors() -> dict[str, Tensor]:
    """Of several dtypes, with views, an odd length, one that is larger than a stage, and an inference one."""
    torch.manual_seed(0)
    with torch.inference_mode():
        matrix = torch.randn(300, 40)
    large = torch.randint(0, 255, (parking.STAGE_BYTES + 4097,), dtype=torch.uint8)
    return {
        "matrix": matrix,
        "rows": matrix[10:20],
        "turned": matrix.T,
        "bytes": large,
        "odd": torch.arange(13, dtype=torch.int8),
        "none": torch.empty(0),
        "half": torch.randn(33).to(torch.bfloat16),
    }


def test_all_that_was_there_is_there_again() -> None:
    tensors = some_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    storages = list(storages_in(tensors))
    assert len(storages) == 5  # views have none of their own
    size = tensor_bytes(tensors)
    parked = OffloadedStorages(storages, CPU)
    assert parked.nbytes == size
    assert tensor_bytes(tensors) == 0
    assert all(tensors[name].shape == before[name].shape for name in tensors)
    for _ in range(2):
        parked.restore()
        assert tensor_bytes(tensors) == size
        assert all(torch.equal(tensors[name], before[name]) for name in tensors)
        with torch.inference_mode():
            tensors["matrix"][12] = 7.0
        assert (tensors["rows"][2] == 7.0).all()
        assert (tensors["turned"][:, 12] == 7.0).all()
        # What waits is what was put away, whatever is written later.
        parking.empty_storages(storages)


def test_where_there_is_no_memory_the_bytes_wait_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = some_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    storages = list(storages_in(tensors))
    parked = OffloadedStorages(storages, CPU)

    def broken(loads: object) -> None:
        raise torch.OutOfMemoryError("made up")

    with monkeypatch.context() as patched:
        patched.setattr(parked, "_copy_back", broken)
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                parked.restore()
            assert tensor_bytes(tensors) == 0
    parked.restore()
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


@pytest.mark.parametrize("fault", ["ram", "copy"])
def test_where_nothing_can_be_put_away_nothing_changes(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    tensors = some_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    if fault == "ram":
        monkeypatch.setattr(mmap, "mmap", refuse)
    else:
        monkeypatch.setattr(OffloadedStorages, "_copy_out", refuse)
    with pytest.raises((MemoryError, OSError)):
        OffloadedStorages(list(storages_in(tensors)), CPU)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_loads_are_full_and_lose_nothing() -> None:
    wholes = [(torch.zeros(size, dtype=torch.uint8), size) for size in (5, 0, 20, 3, 16)]
    loads = cut_transfers(wholes, max_bytes=8)
    assert [load.length for load in loads] == [8, 8, 8, 8, 8, 4]
    assert [load.start for load in loads] == [0, 8, 16, 24, 32, 40]
    for load in loads:
        for piece in load.slices:
            piece.bytes.add_(1)
    assert all((whole == 1).all() for whole, _ in wholes)
    assert cut_transfers([], max_bytes=8) == []


@pytest.mark.gpu
def test_what_is_put_away_is_free_on_a_gpu() -> None:
    device = torch.device("cuda")
    gaps = fill_gaps(max(tensor.nbytes for tensor in some_tensors().values()))
    tensors = {name: tensor.to(device) for name, tensor in some_tensors().items() if name != "rows"}
    tensors["rows"] = tensors["matrix"][10:20]
    before = {name: tensor.cpu() for name, tensor in tensors.items()}
    torch.cuda.empty_cache()
    reserved, size = torch.cuda.memory_reserved(), tensor_bytes(tensors)
    parked = OffloadedStorages(list(storages_in(tensors)), device)
    torch.cuda.empty_cache()
    assert reserved - torch.cuda.memory_reserved() >= size
    parked.restore()
    assert all(torch.equal(tensors[name].cpu(), before[name]) for name in tensors)
    del gaps


def fill_gaps(size: int) -> list[torch.Tensor]:
    """Takes what is free between what other tests left, so that ``size`` bytes get a piece of their own."""
    torch.cuda.empty_cache()
    reserved, gaps = torch.cuda.memory_reserved(), []
    while torch.cuda.memory_reserved() == reserved:
        gaps.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return gaps
