"""Offloaded layers on a CUDA device: the same logits to the bit, no slot overwritten too early."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.on_gpu import peak_requested_bytes, requested_bytes, reset_memory_statistics
from tests.engine.test_parity import CONVERSATIONS, run
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.loading.loader import Loader
from vlfit.loading.offload import StreamedLayers
from vlfit.loading.pinned import PinnedBytes
from vlfit.models.decoder import TextModel
from vlfit.plan.native.ram import offload_counts, offload_of
from vlfit.plan.shapes import model_of
from vlfit.quantize.conversion import convert
from vlfit.units import MIB

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ALL = list(CONVERSATIONS.values())


def engine(checkpoint: Checkpoint, offload: int | None = None) -> NativeEngine:
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_batched_tokens=64,
        max_num_seqs=5,
        offload=offload,
        cuda_graphs=False,
        prefix_cache=False,
    )
    return NativeEngine(open_checkpoint(checkpoint.folder), options)


def all_layers(checkpoint: Checkpoint) -> int:
    """As many bytes as can leave the card."""
    model = model_of("", checkpoint.config, checkpoint.tensors, "")
    return offload_of(model, offload_counts(model)[-1]).freed_bytes


def logits_of(built: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Those of every pass, of prompts and of requests that decode together."""
    compute, seen = TextModel.__call__, []

    def noted(model: TextModel, *inputs: Any) -> torch.Tensor:
        seen.append(compute(model, *inputs).clone())
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(TextModel, "__call__", noted)
        run(built, *ALL)
    return seen


def folder_of(weights: str, tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    if weights == "mini":
        return open_checkpoint("mini").folder
    if weights == "bf16":
        return tiny("tied")
    convert(open_checkpoint(tiny("odd_vocab_one_kv_head")), weights, tmp_path / "new")
    return tmp_path / "new"


@pytest.mark.parametrize("weights", ["mini", "bf16", "fp8", "int4"])
def test_logits_are_equal_to_the_bit(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    checkpoint = open_checkpoint(folder_of(weights, tiny, tmp_path))
    expected = logits_of(engine(checkpoint), monkeypatch)
    streamed = engine(checkpoint, all_layers(checkpoint))
    assert isinstance(streamed.runner.text.layers, StreamedLayers)
    for _ in range(2):  # the second time the first layers are there already
        found = logits_of(streamed, monkeypatch)
        assert len(expected) > 20
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def large_layers(count: int, waiting: Sequence[int], size: int = 32 * MIB) -> StreamedLayers[Any]:
    """Layers of one tensor, full of their own number, which take a millisecond or so to copy."""
    with Loader(open_checkpoint("mini"), CUDA, torch.bfloat16) as loader:
        return StreamedLayers(
            lambda index: [torch.full((size,), index, dtype=torch.uint8, device=loader.device)],
            count,
            waiting,
            loader,
        )


@pytest.mark.parametrize("waiting", [(0,), (0, 3), (1, 2, 5), (0, 2, 4, 6), tuple(range(7))])
@pytest.mark.parametrize("busy", [0, 20_000_000])
def test_no_slot_is_overwritten_while_it_is_read_nor_read_before_it_is_full(
    waiting: tuple[int, ...], busy: int
) -> None:
    """``busy``: cycles that the device is held up before it reads each layer, so that copies run ahead."""
    layers = large_layers(7, waiting)
    read = []
    for _ in range(4):
        for (tensor,) in layers:
            torch.cuda._sleep(busy)
            read.append(torch.stack((tensor.amin(), tensor.amax())))
    expected = [[number, number] for number in range(7)] * 4
    assert torch.stack(read).tolist() == expected


def test_a_copy_under_way_when_all_is_dropped_writes_into_nobody_elses_memory() -> None:
    layers = large_layers(4, range(4), 128 * MIB)
    torch.cuda.synchronize()
    for _ in layers:
        pass  # copies of the next pass's layers are under way
    del layers, _
    others = [torch.full((128 * MIB,), 77, dtype=torch.uint8, device=CUDA) for _ in range(3)]
    torch.cuda.synchronize()
    assert all(int(other.amin()) == int(other.amax()) == 77 for other in others)


def test_slots_given_up_and_taken_back_are_filled_again() -> None:
    """As when an engine sleeps: storages are emptied, and their places may move."""
    layers = large_layers(5, (0, 2, 4))
    for _ in layers:
        pass
    layers.reset()
    sizes = [slot.untyped_storage().nbytes() for slot in layers.slots]
    for slot in layers.slots:
        slot.untyped_storage().resize_(0)
    for slot, size in zip(layers.slots, sizes, strict=True):
        slot.untyped_storage().resize_(size)
    assert [int(tensor.amax()) for (tensor,) in layers] == list(range(5))


def test_ram_is_locked_and_given_back() -> None:
    pinned = PinnedBytes(5 * MIB + 3, CUDA)
    assert pinned.bytes.is_pinned()
    del pinned
    for _ in range(20):  # what was not given back would fail here sooner or later
        assert PinnedBytes(64 * MIB, CUDA).bytes.is_pinned()


def test_the_device_holds_what_the_plan_says(tiny: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint("mini")
    model = model_of("", checkpoint.config, checkpoint.tensors, "")
    planned = offload_of(model, offload_counts(model)[-1])
    whole = engine(checkpoint)
    held = whole.account().memory.weights
    del whole
    streamed = engine(checkpoint, planned.freed_bytes)
    now = streamed.account().memory.weights
    assert streamed.account().settings.offload == len(planned.layers)
    assert now["weights.text"] == held["weights.text"] - planned.weight_bytes
    # Norms of queries and keys are one tensor, and aligned once.
    assert 0 <= planned.slots_bytes - now["weights.offload"] <= 2 * 512


def test_loading_leaves_the_device_alone(tiny: Callable[[str], Path]) -> None:
    """Layers that wait are never on the device while they are loaded."""
    checkpoint = open_checkpoint("mini")
    reset_memory_statistics()
    before = requested_bytes()
    streamed = engine(checkpoint, all_layers(checkpoint))
    after = requested_bytes()
    assert peak_requested_bytes() - after < MIB
    counted = sum(streamed.account().memory.weights.values()) + streamed.runner.cache.nbytes
    assert counted <= after - before <= counted + 128 * 1024  # tables that no file holds


def test_asleep_and_awake_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint("mini")
    streamed = engine(checkpoint, all_layers(checkpoint))
    expected = logits_of(streamed, monkeypatch)
    for park in ("ram", "files"):
        streamed.sleeper.fall_asleep(park)
        streamed.sleeper.wake()
        found = logits_of(streamed, monkeypatch)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
