"""Many requests of all kinds on a device with a limit: the profiling run was the worst case."""

import base64
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import soak_requests
from benchmarks.soak_requests import BROKEN, BURST, DISCONNECT, LOW, TOO_LARGE, WHOLE, SoakRequest
from tests.engine.test_faults import RecordedRequest, Small, tensor_bytes
from tests.pictures import picture
from tests.plan.on_meta import Live
from vlfit.api.conversation import Conversation, ImagePart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.warmup import profile_peak_memory as at_start
from vlfit.errors import DoesNotFit, PictureError, VlfitError
from vlfit.plan.shapes import feature_bytes

REQUESTS = 24
MINIS_REQUESTS, MINIS_CLIENTS, SETTLED = 32, 5, 12


def engine(tiny: Callable[[str], Path]) -> NativeEngine:
    options = EngineOptions(
        device="cpu",
        max_model_len=384,
        max_num_batched_tokens=64,
        max_num_seqs=3,
        image_tokens=64,
        image_cache_bytes=300_000,
    )
    return NativeEngine(open_checkpoint(tiny("tied")), options)


def submit_random_request(built: NativeEngine, chance: random.Random) -> RecordedRequest | None:
    """Submit up to four pictures of any shape, for up to 16 tokens; None if that exceeds the context."""
    pictures = [
        ImagePart(picture(chance.randint(64, 600), chance.randint(64, 600), seed=chance.randint(0, 9)))
        for _ in range(chance.randint(0, 4))
    ]
    conversation: Conversation = single_turn("what is this? " * chance.randint(1, 90), *pictures)
    sampling = SamplingParams(
        max_tokens=chance.randint(1, 16),
        temperature=chance.choice((0.0, 1.0)),
        seed=chance.randint(0, 99),
        top_logprobs=chance.choice((None, 3)),
        repetition_penalty=chance.choice((1.0, 1.2)),
        ignore_eos=True,
    )
    request = RecordedRequest()
    try:
        prompt = built.prepare_prompt(
            built.prompts.build(conversation, max_image_tokens=built.image_limit, context=built.context)
        )
        request.sequence = built.make_sequence(prompt, sampling, request.received.append)
    except DoesNotFit:
        return None
    built.submit(request.sequence)
    return request


def test_whatever_comes_fits_what_was_rehearsed(tiny: Callable[[str], Path]) -> None:
    """A third is cancelled midway. Live bytes never exceed the peak of the profiling run."""
    first = engine(tiny)
    with Live("cpu") as rehearsed:
        at_start(first)
    del first
    chance = random.Random(5)
    built = engine(tiny)
    before = tensor_bytes()
    done: list[RecordedRequest] = []
    running: list[RecordedRequest] = []
    refused = 0
    with Small(rehearsed.peak) as device:
        while len(done) < REQUESTS:
            while len(running) < 5 and len(done) + len(running) < REQUESTS:
                request = submit_random_request(built, chance)
                if request is None:
                    refused += 1
                else:
                    running.append(request)
            built.step()
            for one in running:
                if one.received and one.sequence is not None and chance.random() < 0.06:
                    one.sequence.cancelled = True
            done += [one for one in running if one.has_ended]
            running = [one for one in running if not one.has_ended]
    endings = [
        one.received[-1].finish_reason if isinstance(one.received[-1], Chunk) else one.received[-1]
        for one in done
    ]
    assert set(endings) == {"length", "cancelled"}
    assert REQUESTS / 6 < endings.count("cancelled") < REQUESTS / 2
    assert refused > 1
    assert (built.counters.failed, built.counters.retried_steps) == (0, 0)
    assert built.block_manager.num_free == built.block_manager.num_blocks
    assert device.peak > 0.7 * rehearsed.peak  # the limit was near
    built.runner.encoder_cache.clear()
    assert tensor_bytes() == before


def mini_engine() -> NativeEngine:
    checkpoint = open_checkpoint("mini")
    # Whole pictures of the largest size fill the cache to the byte, as smaller ones may.
    cache = (
        5 * 2 * feature_bytes(checkpoint.config.required_vision, 100)
    )  # in float32, which the plan does not count
    options = EngineOptions(
        device="cpu",
        max_model_len=768,
        max_num_batched_tokens=256,
        max_num_seqs=3,
        image_tokens=100,
        image_cache_bytes=cache,
    )
    return NativeEngine(checkpoint, options)


def submit_soak_request(built: NativeEngine, wanted: SoakRequest) -> RecordedRequest | VlfitError:
    """Prepare ``wanted`` as the server does and submit it; the error if it is refused."""
    pictures = [
        ImagePart(base64.b64decode(url.partition(",")[2]), detail="low" if wanted.kind == LOW else "auto")
        for url in wanted.pictures
    ]
    sampling = SamplingParams(
        max_tokens=wanted.tokens, temperature=wanted.temperature, seed=wanted.seed, ignore_eos=True
    )
    request = RecordedRequest()
    try:
        words = single_turn(wanted.text, *pictures)
        built_prompt = built.prompts.build(words, max_image_tokens=built.image_limit, context=built.context)
        request.sequence = built.make_sequence(
            built.prepare_prompt(built_prompt), sampling, request.received.append
        )
    except VlfitError as error:
        return error
    built.submit(request.sequence)
    return request


@pytest.mark.slow
def test_the_soak_of_the_benchmarks_on_mini(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer of the requests that `benchmarks.soak` sends to a GPU: some in bursts, a third cancelled.

    Live bytes never exceed the peak of the profiling run, and are the same again whenever nothing runs.
    """
    monkeypatch.setattr(soak_requests, "POOL", 12)
    monkeypatch.setattr(soak_requests, "LARGEST", 1000)
    monkeypatch.setattr(soak_requests, "MAX_TOKENS", 30)
    work = soak_requests.requests(MINIS_REQUESTS, 768, 100, places=4, seed=58)
    first = mini_engine()
    with Live("cpu") as rehearsed:
        at_start(first)
    del first
    built = mini_engine()
    before = tensor_bytes()
    queue = [one for wanted in work for one in [wanted] * wanted.count]
    running: list[tuple[SoakRequest, RecordedRequest]] = []
    done: list[tuple[SoakRequest, RecordedRequest]] = []
    refused: list[tuple[SoakRequest, VlfitError]] = []
    settled = 0
    with Small(rehearsed.peak) as device:
        while queue or running:
            # Live bytes are compared while nothing runs.
            pausing = not settled and len(done) + len(refused) + len(running) >= SETTLED
            while queue and not pausing and (len(running) < MINIS_CLIENTS or queue[0].kind == BURST):
                request = submit_soak_request(built, wanted := queue.pop(0))
                if isinstance(request, VlfitError):
                    refused.append((wanted, request))
                else:
                    running.append((wanted, request))
            built.step()
            for wanted, request in running:
                left = wanted.disconnect_after
                if left is not None and request.sequence is not None and len(request.received) >= left:
                    request.sequence.cancelled = True
            done += [each for each in running if each[1].has_ended]
            running = [each for each in running if not each[1].has_ended]
            if pausing and not running:
                built.runner.encoder_cache.clear()
                settled = tensor_bytes()
    assert settled == before
    for wanted, error in refused:
        expected = {TOO_LARGE: DoesNotFit, BROKEN: PictureError}
        assert isinstance(error, expected[wanted.kind])
    for wanted, request in done:
        last = request.received[-1]
        assert isinstance(last, Chunk)
        assert last.finish_reason == ("cancelled" if wanted.kind == DISCONNECT else "length")
    kinds = {wanted.kind for wanted, _ in [*done, *refused]}
    assert kinds == {WHOLE, DISCONNECT, LOW, TOO_LARGE, BROKEN, BURST}
    assert len(done) + len(refused) == MINIS_REQUESTS
    assert (built.counters.failed, built.counters.retried_steps) == (0, 0)
    assert (built.counters.finished, built.counters.cancelled) == (
        sum(wanted.kind != DISCONNECT for wanted, _ in done),
        sum(wanted.kind == DISCONNECT for wanted, _ in done),
    )
    assert built.block_manager.num_free == built.block_manager.num_blocks
    assert device.peak > 0.5 * rehearsed.peak  # the limit was near
    built.runner.encoder_cache.clear()
    assert tensor_bytes() == before
