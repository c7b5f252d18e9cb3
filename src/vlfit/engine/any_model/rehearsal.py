"""The worst requests that the plan admits, run once before any other: what they take is measured then.

Knows: that the largest picture and the longest text are the worst. Does not know what a ledger looks like.
"""

import logging
from typing import TYPE_CHECKING

import torch

from vlfit.engine.any_model.failures import in_words
from vlfit.engine.any_model.prompts import AnyPrompt
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import DoesNotFit, OutOfMemory, VlfitError
from vlfit.plan import any_model as plan
from vlfit.units import format_bytes

if TYPE_CHECKING:
    from vlfit.engine.answer import Chunk
    from vlfit.engine.any_model.engine import AnyEngine

logger = logging.getLogger(__name__)

_ANSWER = SamplingParams(max_tokens=2, ignore_eos=True)


def rehearse(engine: "AnyEngine") -> None:
    """Run the largest picture, then a text as long as the context, on the GPU; the ledger has then what they
    took. What torch keeps of it stays: nobody else may take it before a request comes.

    Raises ``DoesNotFit`` with the numbers where there is no room for them.
    """
    torch.cuda.reset_peak_memory_stats(engine.device)
    for what, prompt in worst(engine).items():
        try:
            with in_words("rehearsing"):
                engine.answer(engine.request(prompt, _ANSWER, _nobody))
        except OutOfMemory as error:
            raise DoesNotFit(
                f"{what} does not fit beside the model: {error.message}; {engine.budget.shortage()}",
                "lower --context or --image-tokens, or let layers wait in RAM: --offload auto",
            ) from None
        engine.budget.release()  # each begins with whole memory, as the peak of the larger one counts
    held = torch.cuda.max_memory_reserved(engine.device)
    weights = sum(engine.weights.values())
    cache = next((line.bytes for line in engine.lines if line.line == "kv_cache"), 0)
    engine.lines = plan.measured(
        engine.lines,
        engine.weights if engine.waiting else {},
        max(held - weights - cache, 0),
        "the largest picture and the longest text, each alone, as they were run at the start",
    )
    engine.forget_what_was_done()


def worst(engine: "AnyEngine") -> dict[str, AnyPrompt]:
    """The largest picture, and a text that leaves room for two tokens; by what they are called."""
    found = {}
    try:
        picture = engine.prompts.build(engine.prompts.largest())
    except VlfitError as error:  # no template, or no room for any picture: requests are told the same
        logger.info("no picture is rehearsed: %s", error)
    else:
        found[f"a picture of {picture.image_tokens} tokens"] = picture
    length = engine.context - 2
    found[f"a prompt of {length} tokens ({format_bytes(engine.kv_bytes)} of KV cache)"] = engine.prompts.raw(
        (engine.prompts.plain_token,) * length
    )
    return found


def _nobody(_: "Chunk | Exception") -> None:
    return None
