"""An untied token embedding in pinned RAM: the same rows, none of its bytes on the device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gguf_files import as_blocks
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.memory import fit
from vlfit.engine.memory.usage import storages_in, weight_bytes_by_line
from vlfit.layers.embedding import DenseEmbedding, Embedding, EmbeddingInRam, Int8Embedding, PackedEmbedding
from vlfit.loading.loader import Loader
from vlfit.loading.pinned import PinnedBytes
from vlfit.machine.host import read_host
from vlfit.models.decoder import TextModel
from vlfit.plan.native.ram import RAM_LEFT, holds_table
from vlfit.quantize.conversion import convert
from vlfit.units import GIB

Tiny = Callable[[str], Path]
CPU = torch.device("cpu")
NAME = "model.language_model.embed_tokens"


@pytest.fixture(params=["16 bits", "int8", "Q4_1", "Q5_0"])
def checkpoint(
    request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Checkpoint:
    folder = tiny("untied_sharded")
    if request.param.startswith("Q"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return open_checkpoint(as_blocks(folder, tmp_path / "gguf", request.param)[0])
    if request.param == "int8":
        convert(open_checkpoint(folder), "fp8", tmp_path / "new", head="int8", embedding="int8")
        folder = tmp_path / "new"
    return open_checkpoint(folder)


def as_on_a_gpu(checkpoint: Checkpoint, *, table_in_ram: bool) -> Loader:
    """A loader that keeps weights narrow, with RAM for a device."""
    made = Loader(checkpoint, torch.device("meta"), torch.bfloat16, table_in_ram=table_in_ram)
    made.device = CPU
    return made


def load(checkpoint: Checkpoint, *, table_in_ram: bool) -> Embedding:
    with torch.inference_mode(), as_on_a_gpu(checkpoint, table_in_ram=table_in_ram) as loader:
        return loader.embedding(NAME)


def test_the_same_rows(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device, in_ram = (load(checkpoint, table_in_ram=there) for there in (False, True))
    assert isinstance(on_device, DenseEmbedding | Int8Embedding | PackedEmbedding)
    assert isinstance(in_ram, EmbeddingInRam)
    size = len(in_ram.memory.bytes)
    assert size >= sum(storage.nbytes() for storage in storages_in(on_device))
    ids = torch.arange(checkpoint.config.text.vocab_size)
    assert torch.equal(in_ram(ids), on_device(ids))
    assert in_ram(ids[:0]).shape == (0, checkpoint.config.text.hidden_size)


def test_no_byte_of_it_counts_as_the_devices(checkpoint: Checkpoint) -> None:
    models = []
    for there in (False, True):
        with torch.inference_mode(), as_on_a_gpu(checkpoint, table_in_ram=there) as loader:
            models.append(TextModel(checkpoint.config, loader))
    before, after = (weight_bytes_by_line(model, None) for model in models)
    table = sum(storage.nbytes() for storage in storages_in(models[0].embedding))
    assert before["weights.embedding"] - after["weights.embedding"] == table > 0
    assert before["weights.text"] == after["weights.text"]
    assert not list(storages_in(models[1].embedding))  # so that sleep leaves it alone


def test_it_outlives_the_model_that_sleep_replaces(checkpoint: Checkpoint) -> None:
    with torch.inference_mode(), as_on_a_gpu(checkpoint, table_in_ram=True) as loader:
        first = TextModel(checkpoint.config, loader)
    with torch.inference_mode(), as_on_a_gpu(checkpoint, table_in_ram=True) as loader:
        second = TextModel(checkpoint.config, loader, previous=first)
    assert second.embedding is first.embedding


def test_a_tied_table_stays_on_the_device(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("tied"))
    assert isinstance(load(checkpoint, table_in_ram=True), DenseEmbedding)


def test_a_tied_head_cannot_be_in_ram() -> None:
    memory = PinnedBytes(64, CPU)
    table = DenseEmbedding(memory.bytes.view(torch.float32).view(4, 4))
    with pytest.raises(RuntimeError):
        EmbeddingInRam(table, memory).head()


def test_the_rule(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In RAM if it is untied, for a GPU, and RAM has room; else on the card, which a warning says."""
    host = read_host()
    for room, holds in ((GIB, True), (GIB - 1, False)):
        assert holds_table(GIB, replace(host, ram_available=RAM_LEFT + room)) == holds
    cuda = torch.device("cuda")
    untied, tied = (open_checkpoint(tiny(name)) for name in ("untied_sharded", "tied"))
    monkeypatch.setattr(fit, "read_host", lambda: replace(host, ram_available=2 * RAM_LEFT))
    assert fit._ram_holds_table(untied, cuda)
    assert not fit._ram_holds_table(tied, cuda)
    assert not fit._ram_holds_table(untied, CPU)
    assert not caplog.records
    monkeypatch.setattr(fit, "read_host", lambda: replace(host, ram_available=RAM_LEFT))
    assert not fit._ram_holds_table(untied, cuda)
    assert len(caplog.records) == 1


@pytest.mark.gpu
def test_a_gpu_reads_it_in_place_and_in_graphs(checkpoint: Checkpoint) -> None:
    from vlfit.loading.pinned import capture_graph

    cuda, found = torch.device("cuda"), []
    for there in (False, True):
        with torch.inference_mode(), Loader(checkpoint, cuda, torch.bfloat16, table_in_ram=there) as loader:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            found.append(loader.embedding(NAME))
            used = torch.cuda.memory_allocated() - before
            assert (used == 0) == there
    on_card, in_ram = found
    ids = torch.arange(checkpoint.config.text.vocab_size, device=cuda)
    with torch.inference_mode():
        assert torch.equal(in_ram(ids), on_card(ids))
        static = ids[:7].clone()
        in_ram(static)
        replay, rows = capture_graph(cuda, lambda: in_ram(static))
        static.copy_(ids[-7:])
        replay()
        assert torch.equal(rows, on_card(ids[-7:]))
