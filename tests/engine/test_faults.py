"""Allocations that fail: one request ends with the numbers, others go on word for word, nothing is left."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pictures import picture
from tests.plan.on_meta import Live
from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory.budget import is_out_of_memory, requested_bytes
from vlfit.engine.sampling.sampler import StepOutput, sample_on_host
from vlfit.engine.scheduling.sequence import Sequence
from vlfit.errors import EngineLost, OutOfMemory

# As torch 2.11 says it.
NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.65 GiB of which "
    "3.00 MiB is free. Including non-PyTorch memory, this process has 7.10 GiB memory in use."
)
FAULTS = 50
STAGES = ("vision", "prefill", "decode", "sampling")


@dataclass(eq=False)
class RecordedRequest:
    """A request and what its listener received."""

    sequence: Sequence | None = None
    received: list[Chunk | Exception] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        last = self.received[-1] if self.received else None
        return isinstance(last, Exception) or (last is not None and last.finish_reason is not None)


def engine(tiny: Callable[[str], Path]) -> NativeEngine:
    return NativeEngine(
        open_checkpoint(tiny("tied")),
        EngineOptions(device="cpu", max_model_len=512, max_num_batched_tokens=64),
    )


def submit_picture_request(
    built: NativeEngine, seed: int, sampling: SamplingParams, size: tuple[int, int] = (96, 64)
) -> RecordedRequest:
    """Submit a question about a picture that no other request has."""
    request = RecordedRequest()
    words = single_turn(f"what is number {seed}?", ImagePart(picture(*size, seed=seed)))
    prompt = built.prepare_prompt(built.prompts.build(words))
    request.sequence = built.make_sequence(prompt, sampling, request.received.append)
    built.submit(request.sequence)
    return request


def three_streams(built: NativeEngine) -> list[RecordedRequest]:
    """Three requests to run while others fail: greedy, sampled with logprobs, with penalties."""
    all_params = (
        SamplingParams(max_tokens=180, ignore_eos=True),
        SamplingParams(max_tokens=180, ignore_eos=True, temperature=1.0, seed=7, top_logprobs=2),
        SamplingParams(
            max_tokens=180, ignore_eos=True, temperature=0.8, top_p=0.9, seed=8, repetition_penalty=1.3
        ),
    )
    return [submit_picture_request(built, number, params) for number, params in enumerate(all_params)]


def tokens(streams: list[RecordedRequest]) -> list[list[int]]:
    return [stream.sequence.generated for stream in streams if stream.sequence is not None]


@contextmanager
def out_of_memory_for(built: NativeEngine, failing: set[Sequence], stage: str) -> Iterator[None]:
    """Run out of memory at ``stage`` for ``failing`` requests, after the computation and in any batch."""
    run, encode = built.runner.run, built.runner.encode_image

    def refuse(hit: bool) -> None:
        if hit:
            raise torch.OutOfMemoryError(NO_MEMORY)

    def broken_run(batch: Any) -> StepOutput:
        output = run(batch)
        wanted = {"prefill": False, "decode": True}.get(stage)
        refuse(any(chunk.sequence in failing and chunk.sequence.is_decoding is wanted for chunk in batch))
        return output

    def broken_encode(image: Any) -> Any:
        features = encode(image)
        refuse(stage == "vision" and any(image in one.prompt.images for one in failing))
        return features

    def broken_sample(logits: Tensor, tokens: Any, drawn: Any, draws: Any, token_text: Any) -> Any:
        found = sample_on_host(logits, tokens, drawn, draws, token_text)
        theirs = [one.generated for one in failing]
        refuse(stage == "sampling" and any(draw.generated is one for draw in draws for one in theirs))
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(built.runner, "run", broken_run)
        patched.setattr(built.runner, "encode_image", broken_encode)
        patched.setattr("vlfit.engine.execution.step_executor.sample_on_host", broken_sample)
        yield


def tensor_bytes() -> int:
    """Bytes of all live tensors of this process; shared storages count once."""
    gc.collect()
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if issubclass(type(thing), Tensor)
    }
    return sum(storages.values())


@pytest.fixture(scope="module")
def undisturbed(tiny: Callable[[str], Path]) -> list[list[int]]:
    built = engine(tiny)
    streams = three_streams(built)
    while built.busy:
        built.step()
    assert len({tuple(each) for each in tokens(streams)}) == 3
    return tokens(streams)


@pytest.mark.parametrize(
    "stage", [STAGES[0], *(pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES[1:])]
)
def test_fifty_faults_in_a_row_cost_fifty_requests_and_nothing_else(
    tiny: Callable[[str], Path], undisturbed: list[list[int]], stage: str
) -> None:
    built = engine(tiny)
    failed: list[RecordedRequest] = []
    failing: set[Sequence] = set()
    sampling = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    before = tensor_bytes()
    with out_of_memory_for(built, failing, stage):
        streams = three_streams(built)
        while len(failed) < FAULTS or not failed[-1].has_ended:
            if not failed or failed[-1].has_ended:
                # Twice as large as the pictures of the streams: what is left of one would be seen.
                failed.append(submit_picture_request(built, 100 + len(failed), sampling, (192, 96)))
                failing.add(failed[-1].sequence)  # type: ignore[arg-type]
            built.step()
    token_ids = tokens(streams)
    for stream in streams:
        stream.sequence.cancelled = True  # type: ignore[union-attr]
    built.step()
    built.runner.encoder_cache.clear()
    assert tensor_bytes() == before
    assert len(failed) == FAULTS
    for request in failed:
        error = request.received[-1]
        assert isinstance(error, OutOfMemory)
        assert error.http_status == 503
        assert "20.0 MiB" in error.message
    assert min(len(each) for each in token_ids) >= FAULTS
    assert token_ids == [all_of[: len(each)] for all_of, each in zip(undisturbed, token_ids, strict=True)]
    assert built.block_manager.num_free == built.block_manager.num_blocks
    assert (built.counters.failed, built.counters.cancelled) == (FAULTS, 3)
    assert built.scheduler.running == []
    after = submit_picture_request(built, 0, SamplingParams(max_tokens=5, ignore_eos=True))
    while built.busy:
        built.step()
    assert tokens([after]) == [undisturbed[0][:5]]


def test_a_shortage_that_passes_costs_nobody_anything(
    tiny: Callable[[str], Path], undisturbed: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Each third pass fails once: who was in it is done again alone, and says the same. The log is not full
    of it.
    """
    built = engine(tiny)
    run, calls = built.runner.run, iter(range(10**6))

    def sometimes(batch: Any) -> StepOutput:
        output = run(batch)
        if len(batch) > 1 and next(calls) % 3 == 0:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return output

    built.runner.run = sometimes  # type: ignore[method-assign]
    streams = three_streams(built)
    while built.busy:
        built.step()
    assert tokens(streams) == undisturbed
    assert built.counters.failed == 0
    assert built.counters.retried_steps > 30
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("what", ["encode_images", "run"])
def test_the_log_says_that_a_request_alone_was_done_again(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    built = engine(tiny)
    works, calls = getattr(built.runner, what), iter(range(10**6))

    def once(*args: Any, **options: Any) -> Any:
        if next(calls) == 0:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return works(*args, **options)

    monkeypatch.setattr(built.runner, what, once)
    request = submit_picture_request(built, 0, SamplingParams(max_tokens=3, ignore_eos=True))
    while built.busy:
        built.step()
    assert len(tokens([request])[0]) == 3
    (line,) = caplog.messages
    assert "20.0 MiB" in line


def test_a_mistake_of_ours_ends_its_own_request_too(
    tiny: Callable[[str], Path], undisturbed: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    built = engine(tiny)
    streams = three_streams(built)
    wrong = submit_picture_request(built, 9, SamplingParams(max_tokens=4))
    run = built.runner.run

    def broken(batch: Any) -> StepOutput:
        output = run(batch)
        if any(chunk.sequence is wrong.sequence for chunk in batch):
            raise ValueError("made up")
        return output

    before = tensor_bytes()
    built.runner.run = broken  # type: ignore[method-assign]
    while built.busy:
        built.step()
    built.runner.encoder_cache.clear()
    assert tensor_bytes() == before  # although somebody keeps the error
    assert isinstance(wrong.received[-1], ValueError)
    assert "made up" in caplog.text
    assert "Traceback" in caplog.text
    assert tokens(streams) == undisturbed


class Small(Live):
    """A device with ``limit`` bytes for what is made while requests run."""

    def __init__(self, limit: int) -> None:
        super().__init__("cpu")
        self.limit = limit

    def _count(self, tensor: Tensor) -> None:
        super()._count(tensor)
        if self.now > self.limit:
            raise torch.OutOfMemoryError(f"Tried to allocate {tensor.nbytes} bytes")


def test_a_picture_too_large_for_the_device_is_refused_and_the_next_one_is_seen(
    tiny: Callable[[str], Path], undisturbed: list[list[int]]
) -> None:
    """With a limit on what may live at once, kept on every operation as an allocator would."""
    built = engine(tiny)
    with Live("cpu") as needed:
        submit_picture_request(built, 50, SamplingParams(max_tokens=2))
        while built.busy:
            built.step()
    built = engine(tiny)
    with Small(2 * needed.peak):
        streams = three_streams(built)
        large = submit_picture_request(built, 51, SamplingParams(max_tokens=2), (512, 512))
        while not large.has_ended:
            built.step()
        after = submit_picture_request(built, 52, SamplingParams(max_tokens=2))
        while not after.has_ended:
            built.step()
    assert isinstance(large.received[-1], OutOfMemory)
    assert "iB" in large.received[-1].message
    token_ids = tokens(streams)
    assert token_ids == [all_of[: len(each)] for all_of, each in zip(undisturbed, token_ids, strict=True)]
    assert isinstance(after.received[-1], Chunk)


def test_slots_that_find_no_room_are_their_requests_fault(
    tiny: Callable[[str], Path], undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = engine(tiny)
    streams = three_streams(built)
    while not all(stream.received for stream in streams):
        built.step()
    with monkeypatch.context() as patched:

        def no_slots(*_: Any) -> Tensor:
            raise torch.OutOfMemoryError(NO_MEMORY)

        patched.setattr("vlfit.engine.execution.model_runner.slots_of_blocks", no_slots)
        late = submit_picture_request(built, 9, SamplingParams(max_tokens=4))
        built.step()
    while built.busy:
        built.step()
    assert isinstance(late.received[-1], OutOfMemory)
    assert tokens(streams) == undisturbed


@pytest.mark.parametrize(
    ("error", "num_bytes"),
    [
        (torch.OutOfMemoryError(NO_MEMORY), 20 * 2**20),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB."), 3 * 2**29),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), None),
        (RuntimeError("Triton Error [CUDA]: out of memory"), None),
        (MemoryError(), None),
    ],
)
def test_out_of_memory_errors(error: Exception, num_bytes: int | None) -> None:
    assert is_out_of_memory(error)
    assert requested_bytes(error) == num_bytes


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("shapes do not match")])
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_requests_of_a_thread_that_died_get_engine_lost(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait and those that come later."""
    with NativeBackend.load(tiny("tied"), EngineOptions(device="cpu", max_model_len=128)) as backend:

        def fail(engine: object) -> None:
            raise RuntimeError("a mistake")

        monkeypatch.setattr(backend._engine_thread, "_step", fail)
        for _ in range(2):
            with pytest.raises(EngineLost):
                backend.stream(single_turn("hello"), SamplingParams(max_tokens=2)).answer()
