"""What fits a machine where another program found no room: with vLLM, or with vlfit's own engine."""

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from vlfit.checkpoint import catalog
from vlfit.doctor.logs import Facts
from vlfit.errors import VlfitError
from vlfit.machine.model import Machine
from vlfit.plan.native.cost import BLOCK_SIZE
from vlfit.plan.vllm import cost as constants
from vlfit.plan.vllm.cost import SAMPLER_ROW as SAMPLER_ROW_BYTES
from vlfit.plan.vllm.flags import FLAG_VERSIONS
from vlfit.units import GIB, format_bytes

# The command that a log came from, written again with some of its flags changed.
#


NO_MODEL = "MODEL"
# Named in the log of the server, but no flags of it.
_NO_FLAGS = {"api_server_count", "model_config", "subparser", "dispatch_function"}


def serve(
    facts: Facts,
    changes: Mapping[str, Any] | None = None,
    *,
    without: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    model: str | None = None,
) -> str:
    """``vllm serve`` as the log has it, with ``changes``; a flag that its version lacks is left out."""
    arguments = {**facts.arguments, **(changes or {})}
    words = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    words += ["vllm", "serve", shlex.quote(model or facts.model or NO_MODEL)]
    for name, value in arguments.items():
        if name in without or name in _NO_FLAGS or not _is_there(name, facts):
            continue
        words += _flag(name, value)
    return " ".join(words)


def _is_there(name: str, facts: Facts) -> bool:
    """Whether the version of the log has this flag; an unknown one counts as recent."""
    life = FLAG_VERSIONS.get("--" + name.replace("_", "-"))
    return life is None or facts.at_least(*life.first)


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list | tuple):
        return [flag, *(shlex.quote(str(item)) for item in value)]
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return [flag, shlex.quote(text)]


def without_model(facts: Facts) -> str:
    """What to add to a remedy when the log does not name the model."""
    return "" if facts.model else f" The log does not name the model: put it where {NO_MODEL} stands."


_SIZES = ("8B", "4B", "2B")


def own_plan(machine: Machine | None, size: str | None) -> tuple[str, str]:
    """A sentence and a command for the largest Qwen3-VL, up to ``size``, that fits ``machine``.

    What has to be converted first is: the command does both. Without a machine, or where nothing fits, the
    sentence is "" and the command is the planner's.
    """
    if machine is None or not machine.gpus:
        return "", "vlfit plan"
    from vlfit.plan.search import plan
    from vlfit.plan.subjects import subjects
    from vlfit.plan.wishes import Wishes

    for name in _SIZES[_SIZES.index(size) if size in _SIZES else 0 :]:
        try:
            found = plan(subjects(name), machine, Wishes())
        except VlfitError:
            continue
        if found.fits:
            settings, made_by = found.settings, found.model.made_by
            made = f", made of {found.model.converted_from} first" if made_by else ""
            says = (
                f" vlfit's own engine fits {found.model.name} there{made}: context {settings.context}, "
                f"pictures of {settings.image_tokens} tokens, {format_bytes(found.total)} of "
                f"{format_bytes(found.gpu.total)} by its plan."
            )
            start = shlex.join(found.command or ("vlfit", "plan", found.model.name))
            variables = "".join(f"{name}={shlex.quote(to)} " for name, to in found.environment.items())
            return says, f"{made_by} && {variables}{start}" if made_by else f"{variables}{start}"
    return " vlfit's own engine fits no Qwen3-VL there either, by its plan.", "vlfit plan"


def vllm_plan(
    machine: Machine | None, facts: Facts, names: Iterable[str], contexts: Iterable[int]
) -> tuple[str, str] | None:
    """A sentence and the command of the first of ``names`` that fits ``machine`` with the vLLM of the log,
    with the first of ``contexts`` that it has room for.

    Both are "" where none fits. None where the planner cannot say: without a machine, for models that are not
    in the catalog (no hub is asked here), for several GPUs. Flags that the plan says nothing of stay.
    """
    known = [name for name in names if catalog.find(name) is not None]
    if machine is None or not machine.gpus or not known or facts.whole("tensor_parallel_size", 1) > 1:
        return None
    from vlfit.plan.backends import VLLM
    from vlfit.plan.search import plan
    from vlfit.plan.subjects import subjects
    from vlfit.plan.wishes import Wishes

    version = None if facts.version is None else ".".join(str(part) for part in facts.version)
    for name, context in product(known, tuple(contexts)):
        copies = facts.whole("data_parallel_size", 1)  # as many as there were: more are no remedy
        wishes = Wishes(context=context, backend=VLLM.name, vllm_version=version, data_parallel=copies)
        try:
            made = plan(subjects(name), machine, wishes)
        except VlfitError:
            continue
        if made.fits:
            changes: dict[str, Any] = {
                flag.flag.removeprefix("--").replace("-", "_"): _value(flag.value)
                for flag in made.flags
                if flag.flag not in made.environment
            }
            settings = made.settings
            says = (
                f"{name} fits {made.gpu.name} with a context of {settings.context}, pictures of at most "
                f"{settings.image_tokens} tokens, {settings.sequences} at once"
                f"{'' if settings.graphs else ' and no CUDA graphs'}: {format_bytes(made.total)} of "
                f"{format_bytes(made.gpu.total)} by the planner's sums, with what others hold and what vLLM "
                "takes beyond its budget"
            )
            run = serve(facts, changes, environment=made.environment, model=name)
            return says, run
    return "", ""


def _value(text: str) -> Any:
    """A flag's value as ``serve`` takes it: a switch is True, JSON is an object."""
    return True if not text else json.loads(text) if text.startswith("{") else text


# The sums behind remedies: what a flag of vLLM frees, what a share of the GPU is worth, what length fits.
#
# Constants were measured or counted, each with its source; those that the planner has are the planner's. All
# memory in GiB, because that is what vLLM prints. "Measured" means
# vLLM 0.22.0 on one H200 with random weights at the true shapes and a budget of 7.2 GiB; other cards and
# versions differ, so a remedy says what it counted on.


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
