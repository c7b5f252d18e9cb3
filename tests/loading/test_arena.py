"""Tensors in an arena: the same values, one storage, each byte read once."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.compressed import Group, compress
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.memory.usage import storages_in, weight_bytes_by_line
from vlfit.loading import loader as loaders
from vlfit.loading.arena import Arena, ArenaSizer
from vlfit.loading.loader import Loader
from vlfit.models.decoder import TextModel
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.quantize.conversion import convert

Tiny = Callable[[str], Path]
CPU = torch.device("cpu")


def as_on_a_gpu(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> Loader:
    """A loader that keeps weights narrow and puts them together, in RAM."""
    made = Loader(checkpoint, torch.device("meta"), torch.bfloat16, progress)
    made.device = CPU
    return made


def test_room_is_given_in_turn_and_aligned() -> None:
    measure = ArenaSizer()
    sizes = [1, 512, 513, 70_000]
    assert [measure.allocate(size).shape for size in sizes] == [(size,) for size in sizes]
    shelf = Arena(torch.empty(measure.size, dtype=torch.uint8))
    assert measure.size == 512 + 512 + 1024 + 70_144
    rooms = [shelf.allocate(size) for size in sizes]
    assert [room.storage_offset() for room in rooms] == [0, 512, 1024, 2048]
    assert len({room.untyped_storage().data_ptr() for room in rooms}) == 1


@pytest.fixture(params=["fp8", "int8", "int4", "plain"])
def folder(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> Path:
    if request.param == "plain":
        return tiny("half_with_biases")
    if request.param == "int8":
        return compress(
            tiny("tied"),
            tmp_path,
            {"group_0": Group(targets=("Linear",))},
            lambda module: None if module.endswith(("embed", "embed_tokens")) else "group_0",
        )[0]
    convert(open_checkpoint(tiny("untied_sharded")), request.param, tmp_path / "new")
    return tmp_path / "new"


def test_the_same_numbers_in_one_allocation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(folder)
    read: dict[int, list[int]] = {}
    # Some operations without bytes import torch's compiler, which takes longer than reading a model.
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)

    def model(least: int) -> tuple[TextModel, VisionTower]:
        monkeypatch.setattr(loaders, "ARENA_MIN_BYTES", least)
        ends = read[least] = []
        with torch.inference_mode(), as_on_a_gpu(checkpoint, lambda done, _: ends.append(done)) as loader:
            text = TextModel(checkpoint.config, loader)
            return text, loader.in_arena(lambda: VisionTower(checkpoint.config.required_vision, loader))

    alone, together = model(1 << 40), model(1)
    assert read[1] == read[1 << 40]  # nothing is read while sizes are added up
    ours, theirs = (dict(named(each)) for each in (together, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    # What is made of what was read stays apart: norms of q and k for each head, several biases in one.
    storages = [storage.nbytes() for storage in storages_in(together[0].layers)]
    assert max(storages) > 0.9 * sum(storages)
    assert len(storages) < len(list(storages_in(alone[0].layers)))
    assert len(list(storages_in(together[1]))) == 1
    held, before = weight_bytes_by_line(*together), weight_bytes_by_line(*alone)
    assert held["weights.embedding"] == before["weights.embedding"]
    tensors = len(ours)
    for line in ("weights.text", "weights.vision"):
        assert before[line] <= held[line] <= before[line] + 512 * 2 * tensors


def named(thing: object, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """Every tensor in ``thing`` with where it stands."""
    if isinstance(thing, torch.Tensor):
        return [(name, thing)]
    if isinstance(thing, dict):
        parts = [(str(key), value) for key, value in thing.items()]
    elif isinstance(thing, list | tuple):
        parts = [(str(index), value) for index, value in enumerate(thing)]
    elif type(thing).__module__.startswith("vlfit."):
        slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
        parts = [*vars(thing).items()] if hasattr(thing, "__dict__") else []
        parts += [(slot, getattr(thing, slot)) for slot in slots]
    else:
        return []
    return [found for key, value in parts for found in named(value, f"{name}.{key}")]


def test_a_cpu_has_no_use_for_it(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("tied"))
    calls: list[int] = []
    with Loader(checkpoint, CPU, torch.float32) as loader:
        assert loader.in_arena(lambda: calls.append(1)) is None
    assert calls == [1]


def test_a_builder_that_fails_leaves_the_loader_as_it_was(tiny: Tiny) -> None:
    loader = as_on_a_gpu(open_checkpoint(tiny("tied")))

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loader.in_arena(fails)
    assert loader.device == CPU
    assert loader.tensor("model.language_model.norm.weight").device == CPU
