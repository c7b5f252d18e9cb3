"""What is refused before it is loaded, and that the predicted bytes are those that get allocated."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny import TINY
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine import room
from vlfit.engine.convert.convert import convert
from vlfit.engine.engine import Engine
from vlfit.engine.loader import Loader
from vlfit.engine.options import EngineOptions
from vlfit.errors import DoesNotFit
from vlfit.units import GIB

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", TINY)
def test_predicted_weights_are_those_that_are_loaded(tiny: Callable[[str], Path], name: str) -> None:
    checkpoint = open_checkpoint(tiny(name))
    with Loader(checkpoint, CPU, torch.float32) as loader:
        plain = [name for name in checkpoint.tensors if not name.endswith("weight_scale_inv")]
        loaded = sum(loader.tensor(name).nbytes for name in plain)
    assert room.weight_bytes(checkpoint, torch.float32, CPU) == loaded


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_converted_weights_are_predicted_on_both_devices(
    tiny: Callable[[str], Path], tmp_path: Path, weights: str
) -> None:
    plain = open_checkpoint(tiny("vision_head_72"))  # in bfloat16
    convert(plain, weights, tmp_path / "new")
    checkpoint = open_checkpoint(tmp_path / "new")
    wide = room.weight_bytes(plain, torch.float32, CPU)
    assert room.weight_bytes(checkpoint, torch.float32, CPU) == wide  # a CPU widens all
    scales = [info for name, info in checkpoint.tensors.items() if name.endswith("weight_scale_inv")]
    shapes = [info for name, info in checkpoint.tensors.items() if name.endswith("weight_shape")]
    more = sum(info.bytes for info in scales) - sum(info.bytes for info in shapes)  # float32, not loaded
    on_gpu = room.weight_bytes(checkpoint, torch.bfloat16, torch.device("cuda"))
    assert on_gpu == checkpoint.weight_bytes + more


@pytest.mark.parametrize(("sequences", "kv_tokens"), [(1, None), (3, None), (2, 1500), (2, 7)])
def test_predicted_cache_is_the_one_that_is_allocated(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, sequences: int, kv_tokens: int | None
) -> None:
    predicted: list[int] = []

    def note(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        predicted.append(tokens * room.kv_bytes_per_token(checkpoint.config.text, dtype))

    monkeypatch.setattr("vlfit.engine.engine.check_room", note)
    options = EngineOptions(device="cpu", context=1000, sequences=sequences, kv_tokens=kv_tokens)
    engine = Engine(open_checkpoint(tiny("tied")), options)
    assert [engine.runner.cache.nbytes] == predicted
    assert engine.pool.blocks * engine.pool.block_size >= engine.context


def test_too_little_memory_is_said_with_numbers(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny("tied"))
    weights = room.weight_bytes(checkpoint, torch.float32, CPU)
    monkeypatch.setattr(room, "free_bytes", lambda device: weights)
    with pytest.raises(DoesNotFit, match="too few") as caught:
        Engine(checkpoint, EngineOptions(device="cpu"))
    assert "--context" in caught.value.hint
    monkeypatch.setattr(room, "free_bytes", lambda device: GIB)
    Engine(checkpoint, EngineOptions(device="cpu"))


def test_a_pool_larger_than_this_machine_is_refused_at_once(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(DoesNotFit):
        Engine(open_checkpoint(tiny("tied")), EngineOptions(device="cpu", sequences=10**9))
