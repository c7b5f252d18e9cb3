"""Flags typed for ``vllm serve``: those that change memory become wishes, the others go to vLLM.

Flags that a version no longer has are left out with a note (``flags.py``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlfit.errors import UsageError
from vlfit.plan.plans import Plan
from vlfit.plan.vllm.args import FLOAT32, VllmArgs, vllm_args_of
from vlfit.plan.vllm.command import budget_bytes, memory_utilization
from vlfit.plan.vllm.flags import (
    FLAG_HISTORY,
    Version,
    has_flag,
    iter_flags,
    parse_json_object,
    parse_whole_number,
)
from vlfit.plan.vllm.lines import bytes_outside_budget
from vlfit.units import counted, format_bytes

_PIXELS = 1024  # of a token, in all sizes of Qwen3-VL


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    """Flags that a person typed for ``vllm serve``, sorted.

    - ``wishes``: what flags that change memory mean, by field of ``VllmWishes``.
    - ``args``: words to pass on to vLLM as they were typed.
    - ``notes``: sentences for the person: what became of flags that were not simply passed on.
    - ``utilization``: of --gpu-memory-utilization, which is not passed on; None if not typed.
    - ``unset``: names of environment variables to remove: vLLM ignores them, or the plan goes before them.
    """

    args: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    wishes: dict[str, Any] = field(default_factory=dict)
    utilization: float | None = None
    unset: tuple[str, ...] = ()


@dataclass(slots=True)
class _ParseState:
    """What was parsed so far."""

    version: Version
    args: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wishes: dict[str, Any] = field(default_factory=dict)
    utilization: float | None = None

    def wish(self, flag: str, name: str, value: object, words: str) -> None:
        self.wishes[name] = value
        self.notes.append(f"{flag} is taken as {words}: the plan counts with it.")


def parse_flags(
    words: Sequence[str], version: Version, environment: Mapping[str, str] | None = None
) -> ParsedFlags:
    """Parse ``words``, typed for ``vllm serve`` of this version, and vLLM's variables in ``environment``.

    Flags that the version lacks, or that the plan replaces, are left out with a note. Unknown flags are
    passed on. Raises ``UsageError`` for a bad value, and for flags that vlfit sets itself, such as --port.
    """
    state = _ParseState(version)
    for flag, value, given in iter_flags(words):
        _READERS.get(flag, _pass_on)(state, flag, value, given)
    unset = []
    for name, value in (environment or {}).items():
        if name in _VARIABLES and value:
            state.notes.append(f"{name}={value}: {_VARIABLES[name]}.")
            unset.append(name)
    return ParsedFlags(tuple(state.args), tuple(state.notes), state.wishes, state.utilization, tuple(unset))


def describe_utilization(given: float | None, plan: Plan) -> str:
    """A sentence on what a typed --gpu-memory-utilization of ``given`` means for ``plan``; "" for None.

    The plan keeps its own value in any case.
    """
    if given is None:
        return ""
    says = f"--gpu-memory-utilization {given:g}"
    if vllm_args_of(plan.settings).on_cpu:
        return f"{says} means nothing on a processor: the plan gives the KV cache its bytes."
    own, total = memory_utilization(plan.ledger, plan.gpu), plan.gpu.total
    free = plan.gpu.free - bytes_outside_budget(plan.ledger)
    asked = f"{format_bytes(round(given * total))} of {format_bytes(total)}"
    if given * total > free:
        return (
            f"{says} would end the start: it asks for {asked}, and {format_bytes(max(free, 0))} are free "
            f"once vLLM has its CUDA context. The plan takes {own:g}, which is."
        )
    if given < own:
        return (
            f"{says} ({asked}) is less than vLLM comes to hold by this plan: "
            f"{format_bytes(budget_bytes(plan.ledger))}, {own:g} of the card. It stays {own:g}; for less "
            "take a shorter --context, fewer --image-tokens or --sequences."
        )
    return (
        f"{says} ({asked}) is free and holds this plan, which needs {own:g} and says so: with the KV cache "
        "given in bytes a larger share moves nothing."
    )


# --- one flag each ------------------------------------------------------------------------------------------

_Reader = Callable[[_ParseState, str, str | None, list[str]], None]


def _pass_on(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
    """Passed on; a flag that this version lacks would end the start, and is left out with a note."""
    if flag in FLAG_HISTORY and not has_flag(state.version.number, flag):
        state.notes.append(f"{flag} is left out: {FLAG_HISTORY[flag]}.")
    else:
        state.args += given


def _context(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
    if value in ("auto", "-1"):
        state.notes.append(f"{flag} {value}: the plan chooses the context; --context fixes it.")
        return
    state.wish(
        flag, "context", parse_whole_number(flag, value), f"--context {parse_whole_number(flag, value)}"
    )


def _count_reader(name: str, option: str) -> _Reader:
    def read(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
        number = parse_whole_number(flag, value)
        if number < 1:
            raise UsageError(f"{flag} is {value}", "It must be at least 1.", param=flag)
        state.wish(flag, name, number, option.format(number))

    return read


def _eager(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
    state.wish(flag, "eager", True, "no CUDA graphs")


def _utilization(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
    """A check, not a size: the plan sets bytes."""
    try:
        share = float(value or "")
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(
            f"{flag} is {value!r}", "It is a share of all memory of the card, such as 0.8.", param=flag
        )
    state.utilization = share


def _cache_dtype(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
    if value in ("auto", "bfloat16", "float16"):
        return
    if value in ("fp8", "fp8_e4m3"):
        state.wish(flag, "kv_dtype", "fp8", "--kv-dtype fp8")
        return
    state.notes.append(f"{flag} {value} goes to vLLM as it is; the ledger counts 16 bits.")
    state.args += given


def _dtype(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
    if value == "auto":
        return
    name = {"half": "float16", "float": FLOAT32}.get(value or "", value or "")
    if name in ("float16", "bfloat16", FLOAT32):
        price = "twice the bytes" if name == FLOAT32 else "as many bytes"
        state.wish(flag, "vllm", VllmArgs(dtype=name), f"{name}, {price}")
        return
    state.notes.append(f"{flag} {value} goes to vLLM as it is; the ledger counts 16 bits.")
    state.args += given


def _picture_limits(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
    """Pictures in one prompt: JSON, or ``image=2,video=0`` as older versions took it."""
    if (value or "").startswith("{"):
        limits = parse_json_object(flag, value)
    else:
        limits = dict(pair.partition("=")[::2] for pair in (value or "").split(","))
        state.notes.append(f"{flag} {value} is written as JSON today, which the plan does.")
    for name, limit in limits.items():
        count = str(limit.get("count", 1) if isinstance(limit, dict) else limit)
        if name == "image":
            number = parse_whole_number(f"{flag}: image", count)
            if number < 1:
                raise UsageError(
                    f"{flag} forbids pictures", "For text alone take a text-only model.", param=flag
                )
            state.wish(flag, "pictures", number, f"{counted(number, 'picture')} in one prompt")
        elif count != "0":
            state.notes.append(f"{flag}: {name} stays 0, as the plan has no room for its frames or sounds.")


def _processor_kwargs(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
    """The size of pictures."""
    parsed = parse_json_object(flag, value)
    size = parsed.pop("size", None)
    pixels = size.get("longest_edge") if isinstance(size, dict) else parsed.pop("max_pixels", None)
    if pixels is None:
        raise UsageError(
            f"{flag} has no size of pictures",
            "Write it like '{\"max_pixels\": 1048576}', or say --image-tokens 1024.",
            param=flag,
        )
    tokens = parse_whole_number(flag, str(pixels)) // _PIXELS
    state.wish(flag, "image_tokens", tokens, f"--image-tokens {tokens}")
    if parsed:
        state.notes.append(f"{flag}: {', '.join(parsed)} is left out, as the plan writes this flag itself.")


def _not_counted(words: str) -> _Reader:
    def read(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
        state.notes.append(f"{' '.join(given)} goes to vLLM as it is: {words}.")
        state.args += given

    return read


def _removed_flag_reader(words: str) -> _Reader:
    def read(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
        state.notes.append(f"{flag} is left out: {words}.")

    return read


def _set_by_vlfit(option: str) -> _Reader:
    def read(state: _ParseState, flag: str, value: str | None, given: list[str]) -> None:
        raise UsageError(f"vlfit sets {flag} itself", f"Use vlfit's own option: {option}.", param=flag)

    return read


_NO_SWAP = "it is gone since 0.19: a request that finds no room is computed again later"
_GRAPHS_BY_PLAN = "the plan's requests at once decide which graphs there are; --enforce-eager has none"
_READERS: Mapping[str, _Reader] = {
    "--max-model-len": _context,
    "--max-num-seqs": _count_reader("sequences", "--sequences {}"),
    "--max-num-batched-tokens": _count_reader("chunk", "passes of {} tokens"),
    "--kv-cache-memory-bytes": _count_reader("kv_bytes", "a KV cache of at most {} bytes, in whole blocks"),
    "--kv-cache-memory": _count_reader("kv_bytes", "a KV cache of at most {} bytes, in whole blocks"),
    "--tensor-parallel-size": _count_reader("tensor_parallel", "each layer over {} cards"),
    "--tensor-parallel": _count_reader("tensor_parallel", "each layer over {} cards"),  # as vlfit plan has it
    "-tp": _count_reader("tensor_parallel", "each layer over {} cards"),
    "--data-parallel-size": _count_reader("data_parallel", "{} copies of the model"),
    "--data-parallel": _count_reader("data_parallel", "{} copies of the model"),
    "-dp": _count_reader("data_parallel", "{} copies of the model"),
    "--enforce-eager": _eager,
    "--gpu-memory-utilization": _utilization,
    "--device-memory-utilization": _utilization,
    "--kv-cache-dtype": _cache_dtype,
    "--dtype": _dtype,
    "--limit-mm-per-prompt": _picture_limits,
    "--mm-processor-kwargs": _processor_kwargs,
    "--cpu-offload-gb": _not_counted(
        "the ledger does not count what it moves to RAM; vlfit's own is --offload"
    ),
    "--quantization": _not_counted("the ledger counts the weights as they are stored"),
    "-q": _not_counted("the ledger counts the weights as they are stored"),
    "--pipeline-parallel-size": _not_counted("the ledger does not count with it"),
    "-pp": _not_counted("the ledger does not count with it"),
    "--num-gpu-blocks-override": _not_counted("the ledger's KV cache is not what it makes"),
    "--swap-space": _removed_flag_reader(_NO_SWAP),
    "--disable-v1-engine": _removed_flag_reader(
        f"{FLAG_HISTORY['--disable-v1-engine']}; what saves memory is --enforce-eager, few --sequences, "
        "small --image-tokens"
    ),
    "--max-seq-len-to-capture": _removed_flag_reader(_GRAPHS_BY_PLAN),
    "--max-context-len-to-capture": _removed_flag_reader(_GRAPHS_BY_PLAN),
    "--cuda-graph-sizes": _removed_flag_reader(_GRAPHS_BY_PLAN),
    "--disable-mm-preprocessor-cache": _removed_flag_reader(
        "the plan says --mm-processor-cache-gb 0, its heir"
    ),
    "--use-v2-block-manager": _removed_flag_reader(
        "no version of today has it; there is one way to keep blocks"
    ),
    "--worker-use-ray": _removed_flag_reader(
        "no version of today has it; --distributed-executor-backend ray is its heir"
    ),
    "--num-scheduler-steps": _removed_flag_reader("no version of today has it"),
    "--preemption-mode": _removed_flag_reader(
        _NO_SWAP.replace("it is gone since 0.19", "no version of today has it")
    ),
    "--device": _removed_flag_reader("no version of today has it: the build decides"),
    "--host": _set_by_vlfit("--host"),
    "--port": _set_by_vlfit("--port"),
    "--api-key": _set_by_vlfit("--api-key, or VLFIT_API_KEY"),
    "--model": _set_by_vlfit("vlfit serve MODEL"),
    "--served-model-name": _set_by_vlfit("vlfit serve MODEL"),
    "--uds": _set_by_vlfit("--host and --port"),
    "--headless": _set_by_vlfit("vLLM by itself"),
}
_VARIABLES = {
    "VLLM_USE_V1": "there is one engine only since 0.11, and no version from 0.12 on reads it",
    "VLLM_ATTENTION_BACKEND": "today's versions do not read it; --attention-backend is its heir (0.14)",
    "VLLM_CPU_KVCACHE_SPACE": "the plan gives the KV cache its bytes, which go before it",
}
