"""The engine's account: bytes held and steps taken; reading it disturbs nothing."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.engine.on_gpu import requested_bytes, reset_memory_statistics
from tests.pictures import picture
from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters, EngineAccount
from vlfit.backends.native import NativeBackend
from vlfit.engine.memory.usage import resident_bytes, tensor_bytes
from vlfit.layers.embedding import DenseEmbedding
from vlfit.machine.gpu import read_gpus
from vlfit.models.registry import cache_spec_of
from vlfit.plan.actual import compare_on_gpu
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.native.expectation import expect_on_gpu
from vlfit.plan.shapes import kv_bytes_per_token


@pytest.fixture(scope="module")
def backend(tiny: Callable[[str], Path]) -> Iterator[NativeBackend]:
    options = EngineOptions(device="cpu", max_model_len=512, max_num_seqs=2)
    with NativeBackend.load(tiny("tied"), options) as loaded:
        yield loaded


def answer(backend: NativeBackend, tokens: int = 8) -> None:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    backend.stream(single_turn("what is this?", ImagePart(picture(96, 64, seed=1))), sampling).answer()


def test_what_is_held(backend: NativeBackend) -> None:
    assert backend.capabilities.account
    account = backend.account()
    memory, settings = account.memory, account.settings
    engine = backend._engine_thread.engine
    per_token = kv_bytes_per_token(cache_spec_of(backend.checkpoint.config), "bf16", 4)
    assert memory.kv_cache == settings.kv_tokens * per_token == account.pool.blocks * 16 * per_token
    table = engine.runner.text.embedding
    assert isinstance(table, DenseEmbedding)
    assert memory.weights["weights.embedding"] == table.weight.nbytes  # tied: head and table
    names = backend.checkpoint.tensors
    vision = sum(info.count for name, info in names.items() if name.startswith("model.visual.")) * 4
    assert memory.weights["weights.vision"] == vision
    assert memory.allocated is memory.peak_reserved is None
    assert (settings.device, settings.dtype, settings.value_bytes) == ("cpu", "float32", 4)
    assert settings.image_tokens < settings.context == 512


def test_counters_add_up(backend: NativeBackend) -> None:
    before = backend.account()
    answer(backend)
    after = backend.account()
    done = after.counters
    assert done.tokens - before.counters.tokens == 8
    assert done.finished - before.counters.finished == 1
    assert done.prompt_tokens > before.counters.prompt_tokens
    # The first token comes out of the step that ends the prompt.
    assert done.decode_steps - before.counters.decode_steps == 7
    assert 0 < done.decode_seconds < done.seconds
    assert after.memory.image_cache > 0
    assert (after.running, after.waiting, after.pool.used) == (0, 0, 0)


def test_running_and_waiting_requests_are_seen(backend: NativeBackend) -> None:
    """Three of two that may run at once; the listener holds the engine's thread so that it stays so."""
    reached, go_on = threading.Event(), threading.Event()

    def listen(_: object) -> None:
        reached.set()
        go_on.wait(10)

    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    prepared = backend.prepare(single_turn("hello"), sampling)
    tickets = [backend.start(prepared, sampling, listen) for _ in range(3)]
    assert reached.wait(10)
    # The engine's thread is in the middle of a step: who comes now has not been seen by it.
    tickets.append(backend.start(prepared, sampling, listen))
    account = backend.account()
    assert account.running + account.waiting == 4
    assert account.pool.used >= 1
    for ticket in tickets:
        ticket.cancel()
    go_on.set()
    answer(backend)
    ended = backend.account()
    assert (ended.running, ended.waiting, ended.pool.used) == (0, 0, 0)
    assert ended.counters.cancelled >= 2


def test_looking_takes_no_step_and_wakes_nobody(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(backend)
    woken: list[bool] = []
    monkeypatch.setattr(backend._engine_thread._condition, "notify", lambda: woken.append(True))
    accounts: list[EngineAccount] = []
    looking = threading.Thread(
        target=lambda: accounts.extend(backend.account() for _ in range(50)), daemon=True
    )
    with backend._engine_thread._condition:  # whoever needs the engine's lock waits as long as we hold it
        looking.start()
        looking.join(10)
        assert len(accounts) == 50
    assert woken == []
    assert {account.counters.steps for account in accounts} == {backend.account().counters.steps}


def test_a_failure_is_counted(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backend._engine_thread.engine
    before = engine.counters

    def fail(*_: object) -> None:
        raise RuntimeError("made up")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "run", fail)
        with pytest.raises(RuntimeError, match="made up"):
            answer(backend)
    assert engine.counters.failed == before.failed + 1
    assert engine.counters.steps == before.steps


def test_a_step_with_a_prompt_is_no_decode_step() -> None:
    counters = Counters().after_step(0.5, prompt_tokens=100, sampled=1, cached=0)
    counters = counters.after_step(0.1, prompt_tokens=0, sampled=2, cached=130)
    assert counters == Counters(
        steps=2,
        seconds=0.6,
        prompt_tokens=100,
        tokens=3,
        decode_steps=1,
        decode_seconds=0.1,
        decode_cached_tokens=130,
    )


def test_a_storage_counts_once() -> None:
    matrix = torch.zeros(10, 10)
    assert tensor_bytes([matrix, {"view": matrix[:5]}, (torch.ones(3, dtype=torch.int64),), "text"]) == 424


@dataclass(slots=True)
class Base:
    first: torch.Tensor


@dataclass(slots=True)
class Derived(Base):
    second: torch.Tensor


def test_tensors_are_found_in_slots_too(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Derived(torch.zeros(4), torch.zeros(2))
    assert tensor_bytes(both) == 0  # not one of ours
    for kind in (Base, Derived):
        monkeypatch.setattr(kind, "__module__", "vlfit.made_up")
    assert tensor_bytes([both, both]) == 24


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tied", "fp8"])
def test_what_is_held_on_a_gpu(tiny: Callable[[str], Path], name: str) -> None:
    """Torch's books, the engine's own count and the driver's agree; looking touches no GPU memory."""
    gpus = {gpu.uuid: gpu for gpu in read_gpus()[0]}  # before anything is loaded
    reset_memory_statistics()
    before = requested_bytes()
    # Without graphs, which hold what a step computes.
    options = EngineOptions(
        device="cuda", dtype="bfloat16", max_model_len=512, max_num_seqs=2, cuda_graphs=False
    )
    with NativeBackend.load(tiny(name), options) as backend:
        account = backend.account()
        memory = account.memory
        assert memory.allocated is not None
        assert memory.reserved is not None
        assert memory.peak_reserved is not None
        ours = sum(memory.weights.values()) + memory.kv_cache
        # A layer may keep tables that are no tensor of the file.
        assert ours <= requested_bytes() - before <= ours + 128 * 1024
        assert memory.allocated >= requested_bytes()
        assert memory.peak_reserved >= memory.reserved >= memory.allocated
        at = account.settings
        settings = PlanSettings(
            backend.checkpoint.weights_format, at.context, at.image_tokens, at.sequences, at.chunk
        )
        before_loading = gpus[at.gpu_uuid]
        expectation = expect_on_gpu(
            backend.checkpoint, before_loading, settings, at.value_bytes, at.kv_tokens
        )
        assert expectation.no_lines_reason == ""
        answer(backend)
        now = next(gpu for gpu in read_gpus()[0] if gpu.uuid == at.gpu_uuid)
        memory = backend.account().memory
        found = compare_on_gpu(now, expectation, memory.weights, memory.kv_cache, memory.reserved or 0)
        rows = {row.line: row for row in found}
        for line in ("weights.vision", "weights.embedding", "kv_cache"):
            assert rows[line].actual == rows[line].planned, line
        allocated = torch.cuda.memory_allocated()
        for _ in range(10):
            backend.account()
        assert torch.cuda.memory_allocated() == allocated


def test_ram_of_this_process(tmp_path: Path) -> None:
    resident = resident_bytes()
    assert resident is None or resident > 10_000_000
    assert resident_bytes(tmp_path) is None
