"""Offloaded layers compute the same as resident ones, bit for bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_parity import CONVERSATIONS, run
from tests.tiny import TINY
from vlfit import kernels
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory.usage import weight_bytes_by_line
from vlfit.errors import UsageError
from vlfit.layers.linear import Fp8Linear, PackedLinear
from vlfit.loading import offload
from vlfit.loading.loader import Loader
from vlfit.loading.offload import StreamedLayers
from vlfit.loading.pinned import PinnedBytes
from vlfit.models.decoder import TextModel
from vlfit.plan.native.ram import offload_of
from vlfit.plan.shapes import model_of
from vlfit.quantize.conversion import convert

CPU = torch.device("cpu")
ALL = list(CONVERSATIONS.values())


def engine(checkpoint: Checkpoint, waiting: Sequence[int] = (), chunk: int = 64) -> NativeEngine:
    """On the CPU, where ``--offload`` is refused: the layers are streamed from RAM to RAM."""
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_batched_tokens=chunk, max_num_seqs=5)
    built = NativeEngine(checkpoint, options)
    if waiting:
        with torch.inference_mode(), Loader(checkpoint, CPU, built.dtype) as loader:
            built.runner.text = TextModel(checkpoint.config, loader, waiting)
    return built


@pytest.mark.parametrize("name", TINY)
def test_the_same_words_in_every_architecture(tiny: Callable[[str], Path], name: str) -> None:
    checkpoint = open_checkpoint(tiny(name))
    expected = run(engine(checkpoint), *ALL)
    assert run(engine(checkpoint, (0, 1, 2)), *ALL) == expected


@pytest.mark.parametrize("waiting", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("chunk", [16, 256])
def test_the_same_words_whichever_layers_wait(
    tiny: Callable[[str], Path], waiting: tuple[int, ...], chunk: int
) -> None:
    checkpoint = open_checkpoint(tiny("tied"))
    assert run(engine(checkpoint, waiting, chunk), *ALL) == run(engine(checkpoint, (), chunk), *ALL)


def test_logits_are_equal_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """mini's, of prompts and of several requests that decode; in pieces that cut through tensors."""
    monkeypatch.setattr(offload, "PIECE", 100_003)
    checkpoint = open_checkpoint("mini")
    layers = checkpoint.config.text.num_hidden_layers
    compute = TextModel.__call__
    seen: list[list[torch.Tensor]] = []

    def noted(model: TextModel, *inputs: Any) -> torch.Tensor:
        logits = compute(model, *inputs)
        seen[-1].append(logits.clone())
        return logits

    monkeypatch.setattr(TextModel, "__call__", noted)
    for waiting in ((), tuple(range(0, layers, 2)), tuple(range(layers))):
        seen.append([])
        run(engine(checkpoint, waiting), *ALL, tokens=16)
    assert len(seen[0]) > 20
    for other in seen[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_narrow_weights_stay_narrow_where_they_wait(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """As they lie on a GPU, but computed as on a CPU, which widens them at each call."""
    convert(open_checkpoint(tiny("odd_vocab_one_kv_head")), weights, tmp_path / "new")
    checkpoint = open_checkpoint(tmp_path / "new")
    said = []
    for waiting in ((), (0, 1, 2)):
        built = engine(checkpoint)
        with torch.inference_mode(), monkeypatch.context() as patch:
            patch.setattr(kernels, "enabled_on", lambda device: True)
            with Loader(checkpoint, CPU, built.dtype) as loader:
                built.runner.text = TextModel(checkpoint.config, loader, waiting)
        layer = built.runner.text.layers[0]
        assert isinstance(layer.down, Fp8Linear if weights == "fp8" else PackedLinear)
        said.append(run(built, *ALL[:2], tokens=8))
    assert said[0] == said[1]


def layers_of_numbers(count: int, waiting: Sequence[int]) -> StreamedLayers[list[torch.Tensor]]:
    """Layers that are a tensor each, full of their own number. On the CPU a copy is done when asked for."""
    with Loader(open_checkpoint("mini"), CPU, torch.float32) as loader:
        return StreamedLayers(lambda index: [torch.full((8,), float(index))], count, waiting, loader)


def numbers(layers: StreamedLayers[list[torch.Tensor]]) -> list[float]:
    return [float(tensor.sum()) / 8 for (tensor,) in layers]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_each_layer_is_there_in_its_turn_pass_after_pass(count: int, step: int) -> None:
    layers = layers_of_numbers(count, range(0, count, step))
    assert len(layers) == count
    for _ in range(3):
        assert numbers(layers) == list(range(count))


@pytest.mark.parametrize("broken_at", range(5))
def test_a_pass_that_breaks_off_spoils_nothing(broken_at: int) -> None:
    layers = layers_of_numbers(5, (0, 2, 3))
    for number, (tensor,) in enumerate(layers):
        assert float(tensor[0]) == number
        if number == broken_at:
            break
    assert numbers(layers) == list(range(5))
    assert float(layers[3][0][0]) == 3
    assert float(layers[1][0][0]) == 1
    assert numbers(layers) == list(range(5))


def test_slots_that_held_something_else_meanwhile_are_filled_again() -> None:
    layers = layers_of_numbers(4, (0, 1, 3))
    numbers(layers)
    layers.reset()
    for slot in layers.slots:
        slot.fill_(255)
    assert numbers(layers) == list(range(4))


def test_a_layer_is_copied_while_the_one_before_it_may_still_compute() -> None:
    """At any time at most two layers are on their way, and never into the slot of the layer that computes."""
    layers = layers_of_numbers(6, range(6))
    for number, (tensor,) in enumerate(layers):
        following = layers.slots[1] if tensor.data_ptr() == layers.slots[0].data_ptr() else layers.slots[0]
        assert float(following.view(torch.float32)[0]) == (number + 1) % 6
        assert float(tensor[7]) == number


def test_form_and_sharing_of_tensors_survive() -> None:
    """Views, strides, offsets, and two tensors of one storage."""
    base = torch.arange(24.0).view(4, 6)
    narrow = torch.arange(6, dtype=torch.int32).to(torch.float8_e4m3fn)

    def build(index: int) -> dict[str, torch.Tensor]:
        return {
            "whole": base,
            "turned": base.T,
            "part": base[1:, 2:4],
            "row": base[2].expand(3, 6),
            "narrow": narrow,
        }

    with Loader(open_checkpoint("mini"), CPU, torch.float32) as loader:
        layers = StreamedLayers(build, 3, (0, 1, 2), loader)
    assert layers.offloaded_bytes == 3 * 1024  # 96 and 6 bytes, each aligned
    for layer in layers:
        assert layer["turned"].stride() == (1, 6)
        for name, tensor in build(0).items():
            assert torch.equal(layer[name].float(), tensor.float())


def test_the_device_holds_two_slots_and_what_stays(tiny: Callable[[str], Path]) -> None:
    """As the plan says, which counts in 16 bits: of FP8 the scales alone are wider."""
    checkpoint = open_checkpoint(tiny("untied_sharded"))
    planned = offload_of(model_of("tiny", checkpoint.config, checkpoint.tensors, ""), 2)
    with torch.inference_mode(), Loader(checkpoint, CPU, torch.bfloat16) as loader:
        whole = weight_bytes_by_line(TextModel(checkpoint.config, loader), None)
        text = TextModel(checkpoint.config, loader, planned.layers)
    held = weight_bytes_by_line(text, None)
    assert planned.layers == (0, 2)
    assert held["weights.text"] == whole["weights.text"] - planned.weight_bytes
    assert held["weights.embedding"] == whole["weights.embedding"]
    assert isinstance(text.layers, StreamedLayers)
    # Norms of queries and keys are one tensor, and aligned once.
    assert 0 <= planned.slots_bytes - held["weights.offload"] <= 2 * 512
    assert 0 <= planned.ram_bytes - text.layers.offloaded_bytes <= 2 * 512


def test_what_waits_is_taken_over_when_the_rest_is_read_again(tiny: Callable[[str], Path]) -> None:
    """As after a sleep: the device was given back, and RAM is not taken twice."""
    checkpoint = open_checkpoint(tiny("tied"))
    built = engine(checkpoint, (0, 2))
    expected = run(built, *ALL[:2], tokens=8)
    with torch.inference_mode(), Loader(checkpoint, CPU, built.dtype) as loader:
        again = TextModel(checkpoint.config, loader, (0, 2), built.runner.text)
        read = loader.fraction_read * checkpoint.weight_bytes
    assert read < sum(info.bytes for info in checkpoint.tensors.values() if "visual" not in info.name)
    for mine, theirs in zip(locked(again), locked(built.runner.text), strict=True):
        assert mine is theirs
    built.runner.text = again
    assert run(built, *ALL[:2], tokens=8) == expected


def locked(text: TextModel) -> list[PinnedBytes]:
    assert isinstance(text.layers, StreamedLayers)
    return [each.pinned for each in text.layers._offloaded.values()]


def test_it_is_refused_on_a_cpu(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError) as refused:
        NativeEngine(open_checkpoint(tiny("tied")), EngineOptions(device="cpu", offload="auto"))
    assert refused.value.param == "offload"


@pytest.mark.parametrize("size", [1, 4096, 1_000_001])
def test_locked_bytes_can_be_written_and_read(size: int) -> None:
    pinned = PinnedBytes(size, CPU)
    assert len(pinned.bytes) == size
    pinned.bytes.fill_(7)
    assert int(pinned.bytes.sum()) == 7 * size
