"""The native backend: threads, streams, cancellation, failures."""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from tests.pictures import picture
from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.engine.execution.encoder_graph import EncoderGraph
from vlfit.errors import DeviceError, DoesNotFit, EngineStopped, InvalidRequest, NotACheckpoint, UsageError
from vlfit.models.interface import VisionFeatures


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("tied")


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[NativeBackend]:
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=512, max_num_seqs=2)) as loaded:
        yield loaded


def free_blocks(backend: NativeBackend) -> int:
    return backend.engine.block_manager.num_free


LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def test_answer_has_images_usage_and_timings(backend: NativeBackend) -> None:
    conversation = single_turn("what is this?", ImagePart(picture(300, 200, seed=1)))
    stream = backend.stream(conversation, SamplingParams(max_tokens=12, ignore_eos=True))
    chunks = list(stream)
    answer = stream.answer()
    assert answer.text == "".join(chunk.text for chunk in chunks)
    assert answer.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    (seen,) = answer.images
    assert (seen.width, seen.height) == (300, 200)
    assert seen.tokens == answer.usage.image_tokens == seen.seen_width * seen.seen_height // 1024
    assert answer.timings is not None
    assert 0 <= answer.timings.queued_s <= answer.timings.first_token_s <= answer.timings.total_s
    assert answer.model == backend.model


def test_requests_beyond_max_num_seqs_wait(backend: NativeBackend) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    streams = [backend.stream(single_turn("the quick brown fox"), sampling) for _ in range(5)]
    answers = [stream.answer().text for stream in streams]
    assert len(set(answers)) == 1
    assert free_blocks(backend) == backend.engine.block_manager.num_blocks


def test_closing_a_stream_frees_its_blocks(backend: NativeBackend) -> None:
    stream = backend.stream(single_turn("the quick brown fox"), LONG)
    next(iter(stream))
    assert free_blocks(backend) < backend.engine.block_manager.num_blocks
    stream.close()
    # What comes after has been admitted by a step that dropped the closed one first.
    backend.stream(single_turn("hello"), SamplingParams(max_tokens=1)).answer()
    assert free_blocks(backend) == backend.engine.block_manager.num_blocks
    with pytest.raises(UsageError):
        stream.answer()


def test_tickets_can_be_cancelled_twice(backend: NativeBackend) -> None:
    heard: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
    ticket = backend.start(backend.prepare(single_turn("hello"), LONG), LONG, heard.put)
    heard.get(timeout=60)
    ticket.cancel()
    ticket.cancel()
    arrival = heard.get(timeout=60)
    while isinstance(arrival, Chunk) and arrival.finish_reason is None:
        arrival = heard.get(timeout=60)
    assert isinstance(arrival, Chunk)
    assert arrival.finish_reason == "cancelled"
    ticket.cancel()


def test_too_long_requests_are_refused_before_they_run(backend: NativeBackend) -> None:
    with pytest.raises(DoesNotFit, match="512"):
        backend.prepare(single_turn("the quick brown fox " * 400), SamplingParams())
    with pytest.raises(DoesNotFit, match="600") as caught:
        backend.prepare(single_turn("hello"), SamplingParams(max_tokens=600))
    assert caught.value.param == "max_tokens"


def test_model_failures_end_one_request(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    before = backend.stream(single_turn("hello"), SamplingParams(max_tokens=5)).answer().text
    with monkeypatch.context() as patch:
        patch.setattr(
            backend.engine.runner,
            "encode_image",
            lambda image: (_ for _ in ()).throw(ValueError("boom")),
        )
        with pytest.raises(ValueError, match="boom"):
            backend.stream(
                single_turn("hello", ImagePart(picture(64, 64, seed=3))), SamplingParams()
            ).answer()
    assert backend.stream(single_turn("hello"), SamplingParams(max_tokens=5)).answer().text == before
    assert free_blocks(backend) == backend.engine.block_manager.num_blocks


def test_failing_listeners_end_their_own_request(
    backend: NativeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    def listener(arrival: Chunk | Exception) -> None:
        raise RuntimeError("the other side is gone")

    backend.start(backend.prepare(single_turn("hello"), LONG), LONG, listener)
    assert backend.stream(single_turn("hello"), SamplingParams(max_tokens=5)).answer().text
    assert free_blocks(backend) == backend.engine.block_manager.num_blocks
    assert "listener failed" in caplog.text


def test_equal_pictures_are_encoded_once(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backend.engine
    calls: list[tuple[int, int, int]] = []
    vision = engine.runner.vision
    assert vision is not None

    def counting(
        patches: Tensor, grid: tuple[int, int, int], recorded: EncoderGraph | None = None
    ) -> VisionFeatures:
        calls.append(grid)
        return vision(patches, grid, recorded)

    monkeypatch.setattr(engine.runner, "vision", counting)
    part = ImagePart(picture(200, 130, seed=77))
    first = backend.stream(single_turn("one", part), SamplingParams(max_tokens=3)).answer()
    again = backend.stream(single_turn("one", part), SamplingParams(max_tokens=3)).answer()
    assert first.text == again.text
    assert len(calls) == 1


def test_closing_ends_requests_and_refuses_new_ones(folder: Path) -> None:
    backend = NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=512))
    stream = backend.stream(single_turn("hello"), LONG)
    next(iter(stream))
    backend.close()
    backend.close()
    with pytest.raises(EngineStopped):
        stream.answer()
    with pytest.raises(EngineStopped):
        backend.stream(single_turn("hello"), SamplingParams())


def test_one_logprob_per_token(backend: NativeBackend) -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, top_logprobs=2)
    answer = backend.stream(single_turn("hello"), sampling).answer()
    assert len(answer.logprobs) == 4
    for entry in answer.logprobs:
        assert entry.logprob == pytest.approx(entry.top[0].logprob)  # greedy: the likeliest
        assert entry.logprob <= 0


def test_seeds_are_reproducible(backend: NativeBackend) -> None:
    def say(seed: int) -> str:
        sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)
        return backend.stream(single_turn("hello"), sampling).answer().text

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(4)}) > 1


def test_invalid_models_and_options(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        NativeBackend.load(tmp_path)
    with pytest.raises(UsageError, match="quantum"):
        NativeBackend.load(folder, EngineOptions(device="quantum"))
    with pytest.raises(DeviceError, match="cuda:7"):
        NativeBackend.load(folder, EngineOptions(device="cuda:7"))
    with pytest.raises(UsageError, match="float8"):
        NativeBackend.load(folder, EngineOptions(device="cpu", dtype="float8"))


def test_progress_ends_at_1(folder: Path) -> None:
    shares: list[float] = []
    options = EngineOptions(device="cpu", max_model_len=64)
    NativeBackend.load(folder, options, lambda what, share: shares.append(share)).close()
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_interrupted_loading_leaves_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())  # other tests' engines among them
    shares: list[float] = []

    def interrupt(what: str, share: float) -> None:
        shares.append(share)
        if len(shares) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: it comes out of the waiting main thread
            time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=64), interrupt)
    assert shares[-1] < 1.0
    started = set(threading.enumerate()) - before
    assert "vlfit-engine" not in {thread.name for thread in started}


def test_interrupt_while_the_thread_starts_leaves_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "vlfit-engine":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=64))
    started = set(threading.enumerate()) - before
    assert "vlfit-engine" not in {thread.name for thread in started}


def test_empty_conversations_are_refused(backend: NativeBackend) -> None:
    with pytest.raises(InvalidRequest):
        backend.prepare((), SamplingParams())
