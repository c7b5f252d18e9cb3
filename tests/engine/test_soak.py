"""Many requests of all kinds on a device with a limit: the profiling run was the worst case."""

import base64
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import soak_requests
from benchmarks.soak_requests import BROKEN, BURST, DISCONNECT, LOW, TOO_LARGE, WHOLE, SoakRequest
from tests.engine.test_faults import Asked, Small, tensor_bytes
from tests.pictures import picture
from tests.plan.on_meta import Live
from vlfit.api.conversation import Conversation, ImagePart, ask
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


def someone_asks(built: NativeEngine, chance: random.Random) -> Asked | None:
    """Up to four pictures of any shape, up to 16 tokens; None if it is refused by its price."""
    pictures = [
        ImagePart(picture(chance.randint(64, 600), chance.randint(64, 600), seed=chance.randint(0, 9)))
        for _ in range(chance.randint(0, 4))
    ]
    conversation: Conversation = ask("what is this? " * chance.randint(1, 90), *pictures)
    sampling = SamplingParams(
        max_tokens=chance.randint(1, 16),
        temperature=chance.choice((0.0, 1.0)),
        seed=chance.randint(0, 99),
        top_logprobs=chance.choice((None, 3)),
        repetition_penalty=chance.choice((1.0, 1.2)),
        ignore_eos=True,
    )
    asked = Asked()
    try:
        prompt = built.prepare_prompt(
            built.prompts.build(conversation, max_image_tokens=built.image_limit, context=built.context)
        )
        asked.sequence = built.sequence(prompt, sampling, asked.heard.append)
    except DoesNotFit:
        return None
    built.submit(asked.sequence)
    return asked


def test_whatever_comes_fits_what_was_rehearsed(tiny: Callable[[str], Path]) -> None:
    """A third hangs up midway. No operation may bring what lives above the peak of the rehearsal."""
    first = engine(tiny)
    with Live("cpu") as rehearsed:
        at_start(first)
    del first
    chance = random.Random(5)
    built = engine(tiny)
    before = tensor_bytes()
    done: list[Asked] = []
    running: list[Asked] = []
    refused = 0
    with Small(rehearsed.peak) as device:
        while len(done) < REQUESTS:
            while len(running) < 5 and len(done) + len(running) < REQUESTS:
                asked = someone_asks(built, chance)
                if asked is None:
                    refused += 1
                else:
                    running.append(asked)
            built.step()
            for one in running:
                if one.heard and one.sequence is not None and chance.random() < 0.06:
                    one.sequence.cancelled = True
            done += [one for one in running if one.over]
            running = [one for one in running if not one.over]
    endings = [
        one.heard[-1].finish_reason if isinstance(one.heard[-1], Chunk) else one.heard[-1] for one in done
    ]
    assert set(endings) == {"length", "cancelled"}
    assert REQUESTS / 6 < endings.count("cancelled") < REQUESTS / 2
    assert refused > 1
    assert (built.counters.failed, built.counters.retried_steps) == (0, 0)
    assert built.block_manager.num_free == built.block_manager.num_blocks
    assert device.peak > 0.7 * rehearsed.peak  # the limit was near
    built.runner.encoder_cache.clear()
    assert tensor_bytes() == before


def of_mini() -> NativeEngine:
    checkpoint = open_checkpoint("mini")
    # Whole pictures of the largest size fill the cache to the byte, as smaller ones may.
    cache = (
        5 * 2 * feature_bytes(checkpoint.config.required_vision, 100)
    )  # in float32, of which the plan knows nothing
    options = EngineOptions(
        device="cpu",
        max_model_len=768,
        max_num_batched_tokens=256,
        max_num_seqs=3,
        image_tokens=100,
        image_cache_bytes=cache,
    )
    return NativeEngine(checkpoint, options)


def enter(built: NativeEngine, wanted: SoakRequest) -> Asked | VlfitError:
    """Prices ``wanted`` as the server does, and adds it; or what it is refused with."""
    pictures = [
        ImagePart(base64.b64decode(url.partition(",")[2]), detail="low" if wanted.kind == LOW else "auto")
        for url in wanted.pictures
    ]
    sampling = SamplingParams(
        max_tokens=wanted.tokens, temperature=wanted.temperature, seed=wanted.seed, ignore_eos=True
    )
    asked = Asked()
    try:
        words = ask(wanted.text, *pictures)
        built_prompt = built.prompts.build(words, max_image_tokens=built.image_limit, context=built.context)
        asked.sequence = built.sequence(built.prepare_prompt(built_prompt), sampling, asked.heard.append)
    except VlfitError as error:
        return error
    built.submit(asked.sequence)
    return asked


@pytest.mark.slow
def test_the_soak_of_the_benchmarks_on_mini(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests as `benchmarks.soak` sends to a GPU, fewer; some clients ask at once, a third leaves.

    What lives on the device stays under the peak of the rehearsal, and comes back to the same bytes whenever
    nobody runs.
    """
    monkeypatch.setattr(soak_requests, "POOL", 12)
    monkeypatch.setattr(soak_requests, "LARGEST", 1000)
    monkeypatch.setattr(soak_requests, "MAX_TOKENS", 30)
    work = soak_requests.requests(MINIS_REQUESTS, 768, 100, places=4, seed=58)
    first = of_mini()
    with Live("cpu") as rehearsed:
        at_start(first)
    del first
    built = of_mini()
    before = tensor_bytes()
    queue = [one for wanted in work for one in [wanted] * wanted.count]
    running: list[tuple[SoakRequest, Asked]] = []
    done: list[tuple[SoakRequest, Asked]] = []
    refused: list[tuple[SoakRequest, VlfitError]] = []
    settled = 0
    with Small(rehearsed.peak) as device:
        while queue or running:
            # What is settled is looked at where nobody runs.
            pausing = not settled and len(done) + len(refused) + len(running) >= SETTLED
            while queue and not pausing and (len(running) < MINIS_CLIENTS or queue[0].kind == BURST):
                asked = enter(built, wanted := queue.pop(0))
                if isinstance(asked, VlfitError):
                    refused.append((wanted, asked))
                else:
                    running.append((wanted, asked))
            built.step()
            for wanted, asked in running:
                left = wanted.disconnect_after
                if left is not None and asked.sequence is not None and len(asked.heard) >= left:
                    asked.sequence.cancelled = True
            done += [each for each in running if each[1].over]
            running = [each for each in running if not each[1].over]
            if pausing and not running:
                built.runner.encoder_cache.clear()
                settled = tensor_bytes()
    assert settled == before
    for wanted, error in refused:
        expected = {TOO_LARGE: DoesNotFit, BROKEN: PictureError}
        assert isinstance(error, expected[wanted.kind])
    for wanted, asked in done:
        last = asked.heard[-1]
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
