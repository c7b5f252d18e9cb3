"""Reading file ranges into tensors on several threads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlfit.errors import CheckpointError
from vlfit.loading import readers
from vlfit.loading.readers import ThreadedReader

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedReader]:
    monkeypatch.setattr(readers, "PIECE_BYTES", 1000)
    made = ThreadedReader(torch.device(request.param))
    yield made
    made.close()


def test_every_byte_is_where_it_belongs(reader: ThreadedReader, tmp_path: Path) -> None:
    """Of several tensors in several files, longer than a piece, of no whole number of pieces, and empty."""
    wanted = []
    for number, count in enumerate((7, 999, 1000, 1001, 25_431, 0)):
        numbers = torch.arange(count, dtype=torch.int32) * (number + 1)
        path = tmp_path / str(number % 2)
        start = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(numbers.numpy().tobytes())
        target = torch.zeros(count, dtype=torch.int32, device=reader._device)
        wanted.append((path, start, target, numbers))
    with torch.inference_mode():
        for path, start, target, _ in wanted:
            reader.read(path, start, target)
        reader.synchronize()
    for _, _, target, numbers in wanted:
        assert torch.equal(target.cpu(), numbers)


def test_a_file_that_ends_too_early_is_named(reader: ThreadedReader, tmp_path: Path) -> None:
    short = tmp_path / "short.safetensors"
    short.write_bytes(bytes(2500))
    reader.read(short, 0, torch.zeros(4000, dtype=torch.uint8, device=reader._device))
    with pytest.raises(CheckpointError, match=r"short\.safetensors.* 2500 "):
        reader.synchronize()


def test_closing_does_not_wait_for_what_has_not_begun(reader: ThreadedReader, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    target = torch.zeros(8000, dtype=torch.uint8, device=reader._device)
    reader.read(path, 0, target)
    reader.close()
    reader.synchronize()
