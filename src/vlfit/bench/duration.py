"""How long a benchmark takes on a CPU, by the plan, and a shorter one where that is many minutes.

Numbers that somebody asked for stay as they are. On a GPU a benchmark takes a minute or two in any case.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from vlfit.bench.workload import BenchOptions, make_requests
from vlfit.checkpoint.catalog import BF16
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import Checkpoint
from vlfit.machine.model import Processor
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.native.cpu_cost import decode_seconds, first_token_seconds
from vlfit.plan.shapes import Model

MOST_SECONDS = 300.0  # of requests, unless more is asked for; a choice
# What is changed, one after the other, until a benchmark takes no longer.
_SHORTER: tuple[tuple[str, Any], ...] = (
    ("size", (512, 512)),
    ("batches", (1,)),
    ("repeat", 3),
    ("repeat", 1),
)


def expected_seconds(
    checkpoint: Checkpoint, options: BenchOptions, model: Model, processor: Processor
) -> float:
    """Expected seconds of all requests of a benchmark on ``processor``, at most, without loading the model.

    ``model``: ``checkpoint`` as planned. ``processor``: with its speeds. Several requests at once are taken
    for as many one after the other.
    """
    requests = make_requests(checkpoint, options, 1)
    image, prompt = requests.image_tokens, requests.prompt_tokens
    context, chunk = prompt + options.tokens, options.max_num_batched_tokens
    kv_dtype = FP8 if options.kv_dtype == FP8 else BF16
    settings = PlanSettings(model.weights, context, image, 1, chunk, kv_dtype=kv_dtype)
    first = first_token_seconds(model, processor, image, prompt - image, chunk)
    answer = options.tokens * decode_seconds(model, processor, settings, prompt + options.tokens // 2)
    rounds = (1 + options.repeat) * sum(dict.fromkeys(options.batches))  # with a warm-up
    return rounds * (first + answer) + options.repeat * first


def shorten(
    checkpoint: Checkpoint, options: BenchOptions, asked: Collection[str], model: Model, processor: Processor
) -> BenchOptions:
    """``options``, or less of what is not in ``asked`` (names of fields) until it takes ``MOST_SECONDS``.

    First a smaller picture, then one request at a time, then fewer repetitions, down to one.
    """
    for name, value in _SHORTER:
        if expected_seconds(checkpoint, options, model, processor) <= MOST_SECONDS:
            break
        if name not in asked:
            options = replace(options, **{name: value})
    return options
