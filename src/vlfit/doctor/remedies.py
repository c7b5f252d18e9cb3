"""Commands and numbers for remedies: changed ``vllm serve`` commands, plans that fit, memory estimates.

Memory is in GiB, as vLLM prints it.
"""

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from vlfit.checkpoint import catalog
from vlfit.doctor.logs import LogFacts
from vlfit.errors import VlfitError
from vlfit.machine.model import Machine
from vlfit.plan.native.cost import BLOCK_SIZE
from vlfit.plan.plans import Plan
from vlfit.plan.vllm import cost
from vlfit.plan.vllm.flags import FLAG_VERSIONS
from vlfit.units import GIB, counted, format_bytes

_MODEL_PLACEHOLDER = "MODEL"
# Among the arguments in the server's log, but not flags.
_NOT_FLAGS = {"api_server_count", "model_config", "subparser", "dispatch_function"}
_SIZES = ("8B", "4B", "2B")


def vllm_command(
    facts: LogFacts,
    changes: Mapping[str, Any] | None = None,
    *,
    without: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    model: str | None = None,
) -> str:
    """The log's ``vllm serve`` command with changed flags, as a line for a shell.

    ``changes``: new values of flags, named as in ``LogFacts.arguments``; True for a switch, False or None to
    remove a flag. ``without``: names of flags to leave out. ``environment``: variables to set for the
    command. ``model``: None: the log's, else the word ``MODEL``. Flags that the log's version of vLLM does
    not have are left out.
    """
    arguments = {**facts.arguments, **(changes or {})}
    words = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    words += ["vllm", "serve", shlex.quote(model or facts.model or _MODEL_PLACEHOLDER)]
    for name, value in arguments.items():
        if name in without or name in _NOT_FLAGS or not _flag_exists(name, facts):
            continue
        words += _flag(name, value)
    return " ".join(words)


def _flag_exists(name: str, facts: LogFacts) -> bool:
    """Whether the vLLM of the log has this flag; an unknown version counts as recent."""
    versions = FLAG_VERSIONS.get("--" + name.replace("_", "-"))
    return versions is None or facts.version_at_least(*versions.first)


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


def missing_model_note(command: str) -> str:
    """A sentence to append to a remedy if ``command`` has ``MODEL`` in place of a model; else ""."""
    if f"vllm serve {_MODEL_PLACEHOLDER} " not in f"{command} ":
        return ""
    return f" The log does not name the model: put it in place of {_MODEL_PLACEHOLDER}."


def suggest_native_plan(machine: Machine | None, size: str | None) -> tuple[str, str]:
    """What vlfit's own engine can run on ``machine``: a sentence to append to a remedy, and a command.

    They are what ``vlfit plan`` says for that machine: of ``size`` (``"4B"``), or the next smaller Qwen3-VL
    that fits; None: what it recommends of the whole catalog. The command converts the checkpoint first if
    necessary. If nothing fits, the sentence says so, and the command is ``vlfit plan``. Without a machine or
    a GPU the sentence is "".
    """
    if machine is None or not machine.gpus:
        return "", "vlfit plan"
    from vlfit.plan.recommend import commands_to_type

    best = _largest_qwen3_vl(machine, size) if size in _SIZES else _recommended(machine)
    if best is None:
        what = "Qwen3-VL" if size in _SIZES else "model"
        return f" vlfit's own engine fits no {what} on this GPU either, by its plan.", "vlfit plan"
    settings, model = best.settings, best.model
    converted = f" (converted from {model.converted_from} first)" if model.converted_from else ""
    pictures = f"pictures of {settings.image_tokens} tokens, " if settings.image_tokens else ""
    sentence = (
        f" vlfit's own engine runs {model.name} on this GPU{converted}: context {settings.context}, "
        f"{pictures}planned {format_bytes(best.total)} of {format_bytes(best.gpu.total)}."
    )
    return sentence, " && ".join(map(" ".join, commands_to_type(best, ready=not model.converted_from)))


def _largest_qwen3_vl(machine: Machine, size: str) -> Plan | None:
    """The plan of the largest Qwen3-VL of at most ``size`` that fits; None if none does."""
    from vlfit.plan.model_lookup import find_models
    from vlfit.plan.planner import find_plan
    from vlfit.plan.wishes import Wishes

    for name in _SIZES[_SIZES.index(size) :]:
        found = find_models(name)
        try:
            best = find_plan(found.exact, machine, Wishes(), smaller_variants=found.smaller_variants)
        except VlfitError:
            continue
        if best.fits:
            return best
    return None


def _recommended(machine: Machine) -> Plan | None:
    from vlfit.plan.recommend import catalog_plans, recommended
    from vlfit.plan.wishes import Wishes

    try:
        return recommended(catalog_plans(machine, Wishes()))
    except VlfitError:  # a card without kernels
        return None


def suggest_vllm_plan(
    machine: Machine | None, facts: LogFacts, names: Iterable[str], contexts: Iterable[int]
) -> tuple[str, str] | None:
    """A sentence and a ``vllm serve`` command for the first of the models ``names`` that fits ``machine``.

    The sentence lacks its full stop: callers add to it. The model's context is the first of ``contexts`` with
    which it fits. Flags of the log that the plan does not set are kept. Names outside the catalog are
    skipped. Two "" if nothing fits. None if vlfit cannot plan at all: without a GPU, without a name in the
    catalog, or for tensor parallelism. Sends no request to the hub.
    """
    known = [name for name in names if catalog.find_entry(name) is not None]
    if machine is None or not machine.gpus or not known or facts.int_argument("tensor_parallel_size", 1) > 1:
        return None
    from vlfit.plan.backends import VLLM
    from vlfit.plan.model_lookup import find_exact_models
    from vlfit.plan.planner import find_plan
    from vlfit.plan.wishes import Wishes

    version = None if facts.version is None else ".".join(str(part) for part in facts.version)
    for name, context in product(known, tuple(contexts)):
        copies = facts.int_argument("data_parallel_size", 1)  # as in the log: more are no remedy
        wishes = Wishes(context=context, backend=VLLM.name, vllm_version=version, data_parallel=copies)
        try:
            best = find_plan(find_exact_models(name), machine, wishes)
        except VlfitError:
            continue
        if best.fits:
            changes: dict[str, Any] = {
                flag.flag.removeprefix("--").replace("-", "_"): _flag_value(flag.value)
                for flag in best.flags
                if flag.flag not in best.environment
            }
            settings = best.settings
            sentence = (
                f"{name} fits {best.gpu.name} with a context of {settings.context}, pictures of at most "
                f"{settings.image_tokens} tokens, {counted(settings.sequences, 'request')} at once"
                f"{'' if settings.graphs else ' and no CUDA graphs'}. Planned: {format_bytes(best.total)} of "
                f"{format_bytes(best.gpu.total)}, with other programs and vLLM's growth beyond its budget"
            )
            return sentence, vllm_command(facts, changes, environment=best.environment, model=name)
    return "", ""


def _flag_value(text: str) -> Any:
    """A planned flag's value for ``vllm_command``: True for a switch, a dict for JSON."""
    return True if not text else json.loads(text) if text.startswith("{") else text


# Estimates. Values of the planner are imported from it. "Measured": vLLM 0.22.0 on one H200 with random
# weights of the true shapes and a budget of 7.2 GiB. Other cards and versions differ; remedies say so.

# How far a vLLM process grows beyond its budget at the first requests: 0.2-0.5 GiB, here the upper end.
VLLM_GROWTH_GIB = cost.GROWTH.value / GIB
# Outside the budget, too, but already part of the used memory when vLLM checks what is free.
CUDA_CONTEXT_GIB = cost.CONTEXT.value / GIB
# Profiling peak for pictures of 16,384 tokens: 1.92-2.02; capped at 1,024: 0.40-0.45 (measured).
UNCAPPED_IMAGE_GIB = 1.5
# CUDA graphs for 256 sequences: 0.37-0.39; for two: 0.01-0.05 (measured).
CUDA_GRAPHS_GIB = 0.3
SAMPLER_ROW_GIB = cost.SAMPLER_ROW / GIB
CAPPED_IMAGE_TOKENS = 1024
DEFAULT_CONTEXT = 4096
VLLM_MAX_NUM_SEQS = 256  # vLLM's default
LOG_PRECISION_GIB = 0.01


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of a Qwen3-VL: weights of its bf16 and its FP8 checkpoint, and a bf16 KV cache per token."""

    bf16_gib: float
    fp8_gib: float
    kv_bytes_per_token: int


@cache
def qwen3_vl_memory(size: str) -> ModelMemory:
    """Memory of the official Qwen3-VL of ``size`` ("2B", "4B" or "8B"), from the catalog, without network."""
    from vlfit.plan.model_lookup import find_exact_models

    models = {model.weights: model for model in find_exact_models(size)}
    bf16, fp8 = models["bf16"], models["fp8"]
    return ModelMemory(bf16.weight_bytes / GIB, fp8.weight_bytes / GIB, bf16.kv_bytes_per_token)


def qwen3_vl_size(model: str | None) -> str | None:
    """``"2B"``, ``"4B"`` or ``"8B"`` if ``model`` names a Qwen3-VL of that size; None if it does not."""
    size = re.search(r"qwen-?_?3-?_?vl-?_?(2b|4b|8b)\b", (model or "").lower())
    return size.group(1).upper() if size else None


def image_cap_kwargs(tokens: int) -> dict[str, Any]:
    """The value of vLLM's ``--mm-processor-kwargs`` that scales pictures down to ``tokens`` image tokens.

    For Qwen3-VL, whose image tokens are 32x32 pixels.
    """
    pixels = tokens * 1024
    return {"size": {"longest_edge": pixels, "shortest_edge": min(65536, pixels)}}


def is_named_quantized(model: str) -> bool:
    """Whether the model name ``model`` says that the weights have fewer than 16 bits."""
    return re.search(r"fp8|awq|gptq|int4|int8|4bit|8bit|bnb|nvfp4|w4a16|w8a8|gguf", model.lower()) is not None


def fp8_model_name(model: str) -> str:
    """Hub name of the official FP8 checkpoint for ``model``, a name of a Qwen3-VL 2B, 4B or 8B."""
    kind = "Thinking" if "thinking" in model.lower() else "Instruct"
    return f"Qwen/Qwen3-VL-{qwen3_vl_size(model)}-{kind}-FP8"


def format_gib(gibibytes: float) -> str:
    """``"1.5 GiB"``; below the precision of vLLM's log, ``"less than 0.01 GiB"``."""
    if 0 <= gibibytes < LOG_PRECISION_GIB:
        return "less than 0.01 GiB"
    return f"{gibibytes:g} GiB"


def largest_utilization(free_gib: float, total_gib: float) -> float:
    """The largest ``--gpu-memory-utilization`` that leaves ``VLLM_GROWTH_GIB`` free, rounded down to 0.01.

    ``free_gib``: the card's free memory after vLLM's CUDA context. ``total_gib``: the card's size. Returns 0
    if nothing is left for vLLM.
    """
    if total_gib <= 0:
        return 0.0
    return max(math.floor((free_gib - VLLM_GROWTH_GIB) / total_gib * 100 + 1e-9) / 100, 0.0)


def kv_cache_gib(model: ModelMemory, tokens: int) -> float:
    """GiB of a bf16 KV cache for ``tokens`` tokens, rounded up to whole blocks."""
    return model.kv_bytes_per_token * math.ceil(tokens / BLOCK_SIZE) * BLOCK_SIZE / GIB


def longest_context(length: int, needed_gib: float, available_gib: float) -> int:
    """The longest context, in whole blocks, whose KV cache fits ``available_gib``; 0 if none does.

    By vLLM's log ``length`` tokens need ``needed_gib``. The log rounds both sizes to two decimals; the
    worst rounding error is assumed.
    """
    if available_gib <= 0 or needed_gib <= 0:
        return 0
    return int(length * (available_gib - 0.005) / (needed_gib + 0.005)) // BLOCK_SIZE * BLOCK_SIZE
