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
_FEWEST = 256  # tokens: fewer in a picture are not worth a model with eyes


def rehearse(engine: "AnyEngine") -> None:
    """Run the largest picture, then a text as long as the context, on the GPU; the ledger has then what they
    took. What torch keeps of it stays: nobody else may take it before a request comes.

    Raises ``DoesNotFit`` with the numbers where there is no room for them.
    """
    torch.cuda.reset_peak_memory_stats(engine.device)
    largest_picture(engine)
    longest_text(engine)
    held = torch.cuda.max_memory_reserved(engine.device)
    weights = sum(engine.weights.values())
    cache = next((line.bytes for line in engine.lines if line.line == "kv_cache"), 0)
    engine.lines = plan.measured(
        engine.lines,
        engine.weights if engine.waiting else {},
        max(held - weights - cache, 0),
        f"a picture of at most {engine.prompts.image_limit} tokens and the longest text, each alone, as they "
        "were run at the start",
    )
    engine.forget_what_was_done()


def largest_picture(engine: "AnyEngine") -> None:
    """Run a picture of as many tokens as one may have. Where there is no room for it, and nobody asked for so
    many, pictures are let have half as many, and it is said.

    Raises ``DoesNotFit`` where somebody did, or where too few are left.
    """
    prompts = engine.prompts
    while True:
        try:
            prompt = prompts.build(prompts.largest())
        except VlfitError as error:  # no template, or no room for any picture: requests are told the same
            logger.info("no picture is rehearsed: %s", error)
            return
        try:
            _run(engine, prompt, f"a picture of {prompt.image_tokens} tokens")
            return
        except DoesNotFit:
            fewer = min(prompt.image_tokens, prompts.image_limit) // 2
            if engine.options.image_tokens is not None or fewer < _FEWEST:
                raise
            prompts.image_limit = fewer
            logger.warning(
                "warning: there is no room for a picture of %d tokens: larger ones are scaled down to %d",
                prompt.image_tokens,
                fewer,
            )


def longest_text(engine: "AnyEngine") -> None:
    """Run a text that leaves room for two tokens. Raises ``DoesNotFit``."""
    length = engine.context - 2
    prompt = engine.prompts.raw((engine.prompts.plain_token,) * length)
    _run(engine, prompt, f"a prompt of {length} tokens ({format_bytes(engine.kv_bytes)} of KV cache)")


def _run(engine: "AnyEngine", prompt: AnyPrompt, what: str) -> None:
    try:
        with in_words("rehearsing"):
            engine.answer(engine.request(prompt, _ANSWER, _nobody))
    except OutOfMemory as error:
        raise DoesNotFit(
            f"{what} does not fit beside the model: {error.message}; {engine.budget.shortage()}",
            "lower --context or --image-tokens, or let layers wait in RAM: --offload auto",
        ) from None
    finally:
        engine.budget.release()  # each begins with whole memory, as the peak of the larger one counts


def _nobody(_: "Chunk | Exception") -> None:
    return None
