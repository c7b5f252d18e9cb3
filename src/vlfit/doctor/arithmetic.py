"""The sums behind remedies: what a flag of vLLM frees, what a share of the GPU is worth, what length fits.

Knows: constants that were measured or counted, each with its source; where the planner has them, they are
the planner's. Does not know logs. All memory in GiB, because that is what vLLM prints. "Measured" means vLLM
0.22.0 on one H200 with random weights at the true shapes and a budget of 7.2 GiB; other cards and versions
differ, so a remedy says what it counted on.
"""

import math
import re
from dataclasses import dataclass

from vlfit.plan.costs import BLOCK_SIZE
from vlfit.plan.vllm import constants
from vlfit.plan.vllm.costs import SAMPLER_ROW as SAMPLER_ROW_BYTES
from vlfit.units import GIB

# A vLLM process ends above its budget: 0.2-0.5 GiB more at the first requests. Here always the upper end.
GROWTH = constants.GROWTH.value / GIB
# Its CUDA context lies outside the budget, too, but inside "used" when vLLM checks.
CONTEXT = constants.CONTEXT.value / GIB
# Peak of profiling: the largest picture (16,384 tokens) 1.92-2.02, a cap of 1,024 0.40-0.45 (measured).
UNCAPPED_PICTURE = 1.5
# CUDA graphs: 256 sequences 0.37-0.39, two sequences 0.01-0.05 (measured).
GRAPHS_OF_MANY = 0.3
SAMPLER_ROW = SAMPLER_ROW_BYTES / GIB
PICTURE_CAP = 1024 * 1024  # pixels; 1,024 image tokens, as a token is 32x32 pixels
CONTEXT_WISHED = 4096
DEFAULT_SEQUENCES = 256
TWO_DIGITS = 0.01  # GiB; what a number in a log may be wrong by


@dataclass(frozen=True, slots=True)
class Model:
    """A Qwen3-VL size: weights in GiB (counted; FP8 is for text linears only), KV bytes per token."""

    bf16: float
    fp8: float
    kv_per_token: int


# Parameters counted on the meta device from the official configs; KV = layers x 2 x 8 heads x 128 x 2 bytes.
QWEN3_VL = {
    "2B": Model(3.96, 2.65, 114_688),
    "4B": Model(8.27, 4.88, 147_456),
    "8B": Model(16.33, 9.86, 147_456),
}


def size_of(model: str | None) -> str | None:
    """``"4B"`` for any name of a Qwen3-VL 4B; None for all else."""
    found = re.search(r"qwen-?_?3-?_?vl-?_?(2b|4b|8b)\b", (model or "").lower())
    return found.group(1).upper() if found else None


def is_quantized(model: str) -> bool:
    """Whether a model's name says that its weights have fewer than 16 bits."""
    return re.search(r"fp8|awq|gptq|int4|int8|4bit|8bit|bnb|nvfp4|w4a16|w8a8|gguf", model.lower()) is not None


def fp8_name(model: str) -> str:
    """The name under which the official FP8 checkpoint of a bf16 one lies on the hub."""
    kind = "Thinking" if "thinking" in model.lower() else "Instruct"
    return f"Qwen/Qwen3-VL-{size_of(model)}-{kind}-FP8"


def in_words(gibibytes: float) -> str:
    """A size that a log prints with two digits of GiB, where so few say anything."""
    if 0 <= gibibytes < TWO_DIGITS:
        return "less than 0.01 GiB"
    return f"{gibibytes:g} GiB"


def floor_share(share: float) -> float:
    """A share rounded down to two digits, as one writes it for ``--gpu-memory-utilization``."""
    return max(math.floor(share * 100 + 1e-9) / 100, 0.0)


def largest_utilization(free: float, total: float) -> float:
    """The largest share of ``total`` that is free with what grows later; ``free`` after the CUDA context."""
    return floor_share((free - GROWTH) / total) if total > 0 else 0.0


def kv_gib(model: Model, tokens: int) -> float:
    """The KV cache of ``tokens`` tokens in bf16."""
    return model.kv_per_token * math.ceil(tokens / BLOCK_SIZE) * BLOCK_SIZE / GIB


def length_that_fits(length: int, needed: float, available: float) -> int:
    """The longest context in whole blocks that fits ``available`` when ``length`` tokens need ``needed``.

    Both were rounded to two digits when they were printed: counted here at their worst.
    """
    if available <= 0 or needed <= 0:
        return 0
    return int(length * (available - 0.005) / (needed + 0.005)) // BLOCK_SIZE * BLOCK_SIZE
