"""Many requests of all kinds on a device with a limit: what was rehearsed is enough for whatever comes."""

import random
from collections.abc import Callable
from pathlib import Path

from tests.engine.test_faults import Asked, Small, tensor_bytes
from tests.pictures import picture
from tests.plan.on_meta import Live
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.answer import Chunk
from vlfit.engine.conversation import Conversation, ImagePart, ask
from vlfit.engine.engine import Engine
from vlfit.engine.options import EngineOptions
from vlfit.engine.rehearsal import at_start
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import DoesNotFit

REQUESTS = 24


def engine(tiny: Callable[[str], Path]) -> Engine:
    options = EngineOptions(
        device="cpu", context=384, chunk=64, sequences=3, image_tokens=64, image_cache_bytes=300_000
    )
    return Engine(open_checkpoint(tiny("tied")), options)


def someone_asks(built: Engine, chance: random.Random) -> Asked | None:
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
        prompt = built.price(
            built.prompts.build(conversation, max_image_tokens=built.image_limit, context=built.context)
        )
        asked.sequence = built.sequence(prompt, sampling, asked.heard.append)
    except DoesNotFit:
        return None
    built.add(asked.sequence)
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
    assert (built.counters.failed, built.counters.again) == (0, 0)
    assert built.pool.free == built.pool.blocks
    assert device.peak > 0.7 * rehearsed.peak  # the limit was near
    built.runner.image_cache.clear()
    assert tensor_bytes() == before
