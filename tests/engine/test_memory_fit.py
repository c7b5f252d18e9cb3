"""What does not fit is refused before loading, and predicted bytes equal allocated ones."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from tests.machine.nvml import FakeCard, Process, install
from tests.tiny import TINY
from tests.wording import figures_in
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.catalog import entries
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory import fit as memory_fit
from vlfit.engine.memory.budget import Budget
from vlfit.engine.memory.fit import MemoryFit, MemoryRequest, check_fit
from vlfit.errors import DoesNotFit
from vlfit.loading.loader import Loader
from vlfit.machine.gpu import read_gpus
from vlfit.models.registry import cache_spec_of
from vlfit.plan.backends import NATIVE
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.native import model_set
from vlfit.plan.preference import IMAGE_TOKENS
from vlfit.plan.shapes import kv_bytes_per_token, model_of
from vlfit.quantize.conversion import convert
from vlfit.units import GIB, MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CARD = FakeCard(free=7200)
WANTED = MemoryRequest(4096, 2, 256, 4096, 1024, 16384, 16)


@pytest.mark.parametrize("name", TINY)
def test_predicted_weights_are_those_that_are_loaded(tiny: Callable[[str], Path], name: str) -> None:
    checkpoint = open_checkpoint(tiny(name))
    with Loader(checkpoint, CPU, torch.float32) as loader:
        plain = [name for name in checkpoint.tensors if not name.endswith("weight_scale_inv")]
        loaded = sum(loader.tensor(name).nbytes for name in plain)
    assert memory_fit.weight_bytes(checkpoint, torch.float32, CPU) == loaded


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_converted_weights_are_predicted_on_both_devices(
    tiny: Callable[[str], Path], tmp_path: Path, weights: str
) -> None:
    plain = open_checkpoint(tiny("vision_head_72"))  # in bfloat16
    convert(plain, weights, tmp_path / "new")
    checkpoint = open_checkpoint(tmp_path / "new")
    wide = memory_fit.weight_bytes(plain, torch.float32, CPU)
    assert memory_fit.weight_bytes(checkpoint, torch.float32, CPU) == wide  # a CPU widens all
    scales = [info for name, info in checkpoint.tensors.items() if name.endswith("weight_scale_inv")]
    shapes = [info for name, info in checkpoint.tensors.items() if name.endswith("weight_shape")]
    more = sum(info.bytes for info in scales) - sum(info.bytes for info in shapes)  # float32, not loaded
    on_gpu = memory_fit.weight_bytes(checkpoint, torch.bfloat16, torch.device("cuda"))
    assert on_gpu == checkpoint.weight_bytes + more


@pytest.mark.parametrize(("sequences", "kv_tokens"), [(1, None), (3, None), (2, 1500), (2, 7), (2, "auto")])
def test_predicted_cache_is_the_one_that_is_allocated(
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    sequences: int,
    kv_tokens: int | Literal["auto"] | None,
) -> None:
    found: list[MemoryFit] = []

    def note(*wishes: Any) -> MemoryFit:
        found.append(check_fit(*wishes))
        return found[-1]

    monkeypatch.setattr("vlfit.engine.engine.check_fit", note)
    options = EngineOptions(device="cpu", max_model_len=1000, max_num_seqs=sequences, kv_tokens=kv_tokens)
    engine = NativeEngine(open_checkpoint(tiny("tied")), options)
    lines = {line.line: line.bytes for line in found[0].lines}
    assert engine.runner.cache.nbytes == lines["kv_cache"]
    assert (
        engine.block_manager.num_blocks * engine.block_manager.block_size
        == found[0].kv_tokens
        >= engine.context
    )
    if kv_tokens == "auto":
        assert found[0].kv_tokens == 2016  # all that two of them can fill, in blocks


def test_too_little_memory_raises_with_numbers(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny("tied"))
    weights = memory_fit.weight_bytes(checkpoint, torch.float32, CPU)
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: weights)
    with pytest.raises(DoesNotFit) as caught:
        NativeEngine(checkpoint, EngineOptions(device="cpu"))
    assert "8192 tokens" in caught.value.message
    assert "--context" in caught.value.hint
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: GIB)
    NativeEngine(checkpoint, EngineOptions(device="cpu"))


@pytest.mark.parametrize(
    "large", [EngineOptions("cpu", max_num_seqs=10**9), EngineOptions("cpu", kv_tokens=10**12)]
)
def test_a_pool_larger_than_this_machine_is_refused_at_once(
    tiny: Callable[[str], Path], large: EngineOptions
) -> None:
    with pytest.raises(DoesNotFit) as caught:
        NativeEngine(open_checkpoint(tiny("tied")), large)
    assert {"--sequences", "--kv"} <= set(caught.value.hint.split())


def test_no_hint_at_fewer_sequences_for_a_kv_cache_of_one_context(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_fit, "free_bytes", lambda device: MIB)
    one_context = EngineOptions("cpu", max_model_len=100, kv_tokens=7)
    for options in (
        EngineOptions("cpu", max_num_seqs=1),
        one_context,
        EngineOptions("cpu", kv_tokens="auto"),
    ):
        with pytest.raises(DoesNotFit) as caught:
            NativeEngine(open_checkpoint(tiny("tied")), options)
        assert "--context" in caught.value.hint
        assert "--sequences" not in caught.value.hint


def test_adjusted_options_are_logged(tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    options = EngineOptions("cpu", max_model_len=256, kv_tokens=10, image_tokens=1_000_000)
    engine = NativeEngine(open_checkpoint(tiny("tied")), options)
    assert engine.block_manager.num_blocks * engine.block_manager.block_size == 256
    for number in (256, 10, engine.image_tokens, 1_000_000):
        assert re.search(rf"\b{number}\b", caplog.text)
    caplog.clear()
    NativeEngine(
        open_checkpoint(tiny("tied")), EngineOptions("cpu", max_model_len=256, kv_tokens=256, image_tokens=64)
    )
    assert not caplog.text


# --- on a GPU, with the driver made up ---------------------------------------------------------------------


@pytest.fixture
def four_billion() -> Checkpoint:
    entry = next(each for each in entries() if each.name == "Qwen/Qwen3-VL-4B-Instruct-FP8")
    assert isinstance(entry.config, ModelConfig)
    return Checkpoint(entry.name, Path("nowhere"), entry.config, entry.tensors)


def on_card(
    monkeypatch: pytest.MonkeyPatch,
    card: FakeCard,
    checkpoint: Checkpoint,
    wanted: MemoryRequest,
    reserved: int = 0,
) -> MemoryFit:
    """The fit on ``card``, of which torch has reserved ``reserved`` bytes and allocated none."""
    install(monkeypatch, card)
    monkeypatch.setattr(memory_fit, "gpu_uuid", lambda device: card.uuid)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    return check_fit(checkpoint, CUDA, torch.bfloat16, wanted)


def planned(checkpoint: Checkpoint, image_tokens: int) -> int:
    """Bytes of the plan without the desktop, for ``WANTED`` with ``image_tokens``."""
    model = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "")
    settings = PlanSettings(model.weights, 4096, image_tokens, 2, 256)
    lines = NATIVE.lines(model, read_gpus({})[0][0], settings)
    return sum(line.bytes for line in lines if line.line != "desktop")


def test_the_whole_ledger_must_fit_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint
) -> None:
    found = on_card(monkeypatch, CARD, four_billion, WANTED)
    whole = sum(line.bytes for line in found.lines)
    assert whole == planned(four_billion, 1024)
    assert found.headroom == 7200 * MIB - whole
    weights_and_cache = sum(
        line.bytes for line in found.lines if line.line == "kv_cache" or line.line.startswith("weights.")
    )
    tight = replace(CARD, free=(weights_and_cache + 200 * MIB) // MIB)
    with pytest.raises(DoesNotFit) as caught:
        on_card(monkeypatch, tight, four_billion, WANTED)
    for part in ("CUDA", "weights", "KV cache", "4096 tokens", "workspaces", "reserve"):
        assert part in caught.value.message
    just_enough = replace(CARD, free=-(-whole // MIB))
    assert on_card(monkeypatch, just_enough, four_billion, WANTED).headroom < MIB


@pytest.mark.parametrize(("free", "image_tokens"), [(7200, 1024), (7200, None), (6550, None)])
def test_a_set_is_planned_as_its_engines_will_find_it(
    monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint, free: int, image_tokens: int | None
) -> None:
    """``vlfit serve A B`` plans models before they are loaded."""
    request = replace(WANTED, image_tokens=image_tokens, max_image_tokens=4095)
    found = on_card(monkeypatch, replace(CARD, free=free), four_billion, request)
    monkeypatch.setattr(model_set, "read_image_processor_config", lambda *_: SimpleNamespace(max_tokens=9999))
    asked = EngineOptions(
        max_model_len=4096,
        max_num_seqs=2,
        max_num_batched_tokens=256,
        kv_tokens=4096,
        image_tokens=image_tokens,
    )
    options, plan = model_set.plan_on_gpu(four_billion, read_gpus({})[0][0], asked)
    assert options.image_tokens == found.image_tokens
    assert [line for line in plan.lines if line.line != "desktop"] == list(found.lines)


def test_memory_of_an_existing_cuda_context_counts_once(
    monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint
) -> None:
    fresh = on_card(monkeypatch, CARD, four_billion, WANTED)
    ours = Process(os.getpid(), "python", 500)
    used = on_card(monkeypatch, replace(CARD, free=6700, compute=(ours,)), four_billion, WANTED)
    assert used.headroom == fresh.headroom
    # Of 500 MiB torch has 100 to spare, for what comes.
    pooled = on_card(monkeypatch, replace(CARD, free=6700, compute=(ours,)), four_billion, WANTED, 100 * MIB)
    assert pooled.headroom == fresh.headroom
    # A driver that does not report memory by process.
    unreported = replace(CARD, free=6500, compute=(replace(ours, mib=None),))
    assert on_card(monkeypatch, unreported, four_billion, WANTED, MIB).already_allocated > 600 * MIB


def test_images_are_as_large_as_fits(monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint) -> None:
    anything = replace(WANTED, image_tokens=None, max_image_tokens=4095)
    install(monkeypatch, CARD)
    needed = {tokens: -(-planned(four_billion, tokens) // MIB) for tokens in (4095, *IMAGE_TOKENS)}
    for tokens, mib in needed.items():
        assert on_card(monkeypatch, replace(CARD, free=mib), four_billion, anything).image_tokens == tokens
    with pytest.raises(DoesNotFit):
        on_card(monkeypatch, replace(CARD, free=needed[256] - 1), four_billion, anything)
    assert on_card(monkeypatch, replace(CARD, free=24000), four_billion, anything).image_tokens == 4095
    fixed = replace(anything, image_tokens=4095)
    with pytest.raises(DoesNotFit):
        on_card(monkeypatch, replace(CARD, free=needed[4095] - 1), four_billion, fixed)


def test_the_pool_takes_what_is_left(monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint) -> None:
    least = on_card(monkeypatch, CARD, four_billion, replace(WANTED, kv_tokens=4096))
    rest = on_card(monkeypatch, CARD, four_billion, replace(WANTED, kv_tokens=None))
    block = 16 * kv_bytes_per_token(cache_spec_of(four_billion.config), "bf16")
    assert rest.kv_tokens == min(4096 + least.headroom // block * 16, 8192) > 4096
    assert (
        on_card(
            monkeypatch, replace(CARD, free=24000), four_billion, replace(WANTED, kv_tokens=None)
        ).kv_tokens
        == 8192
    )
    between = replace(CARD, free=7200 - least.headroom // MIB + 100)
    some = on_card(monkeypatch, between, four_billion, replace(WANTED, kv_tokens=None))
    assert 4096 < some.kv_tokens < 8192
    assert 0 <= some.headroom < block + 8 * MIB
    with pytest.raises(DoesNotFit, match="4096 tokens"):
        on_card(
            monkeypatch,
            replace(CARD, free=7200 - least.headroom // MIB - 10),
            four_billion,
            replace(WANTED, kv_tokens=None),
        )


def test_the_cap_is_the_plan_less_what_is_not_torchs(
    monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint
) -> None:
    found = on_card(monkeypatch, CARD, four_billion, WANTED)
    sizes = {line.line: line.bytes for line in found.lines}
    assert found.limit == sum(sizes.values()) - sizes["context"]
    fractions: list[float] = []
    total = 8151 * MIB - 12345
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share)
    )
    budget = Budget(torch.device("cuda:0"), found.limit)
    # As torch computes it (CUDACachingAllocator.cpp): the share of the card, cut off behind the point.
    assert int(fractions[0] * total) == found.limit
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: found.limit - GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: found.limit - GIB - 5)
    assert budget.available_bytes() == GIB + 5
    assert any(5 <= gib < 7 for gib in figures_in(budget.describe_free()))
    assert Budget(CPU, 5).limit is None


def test_without_a_plan_what_is_exact_must_fit(
    monkeypatch: pytest.MonkeyPatch, four_billion: Checkpoint
) -> None:
    """Values of 32 bits on a GPU, or a driver's library that is not there."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30 * GIB, 32 * GIB))
    install(monkeypatch, CARD)
    monkeypatch.setattr(memory_fit, "gpu_uuid", lambda device: "")
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    found = check_fit(four_billion, CUDA, torch.float32, WANTED)
    assert found.limit is None
    assert sum(line.bytes for line in found.lines) == (
        memory_fit.weight_bytes(four_billion, torch.float32, CUDA)
        + 4096 * kv_bytes_per_token(cache_spec_of(four_billion.config), "bf16", 4)
    )
    install(monkeypatch, failure=15)
    assert check_fit(four_billion, CUDA, torch.bfloat16, WANTED).limit is None


def test_engines_of_one_process_share_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    caps: list[int] = []
    held = 0
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 * GIB))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: caps.append(int(share * 8 * GIB))
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held)
    card = torch.device("cuda:0")
    first = Budget(card, 3 * GIB)
    first.suspend()
    second = Budget(card, 2 * GIB)  # the first sleeps: the pool is the second's alone
    assert caps == [3 * GIB, 2 * GIB]
    second.suspend()
    first.resume()  # as large as before, although the second was smaller
    held = 3 * GIB
    third = Budget(card, held + GIB)  # what it found in the pool is the first one's
    assert caps[2:] == [3 * GIB, 4 * GIB]
    first.suspend()
    assert caps[-1] == third.limit == GIB
    del first, second, third
