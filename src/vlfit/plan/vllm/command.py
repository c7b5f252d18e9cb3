"""The ``vllm serve`` command of a plan (0.11 to 0.33): flags, environment, and the ledger line of each.

Two flags set the memory: the KV cache in bytes, which vLLM allocates; and a share of the whole card. With the
bytes given, the share changes nothing but is still checked against free memory at the start, so it is set to
what the plan counts for vLLM in the end: a start that passes the check has enough memory.
"""

import json
import math
from collections.abc import Iterator, Sequence

from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import MINI, mini_folder
from vlfit.machine.model import Gpu
from vlfit.machine.survey import BFLOAT16_CAPABILITY
from vlfit.plan.ledger import Line
from vlfit.plan.plans import Command, Flag, Remark
from vlfit.plan.shapes import Model
from vlfit.plan.vllm import cost
from vlfit.plan.vllm.args import (
    FLOAT32,
    LOOPBACK,
    NO_PEERS,
    OLDER_RUNNER,
    OLDER_SHARING,
    SOCKETS,
    VllmSettings,
)
from vlfit.plan.vllm.flags import ASSUMED, INSTALLED, NEWEST, PINNED, SIZES_ARE_FIXED_FROM, Version, has_flag
from vlfit.plan.vllm.lines import bytes_outside_budget
from vlfit.units import format_bytes

NO_LINE = "-"  # a flag that moves nothing on the GPU
_OUTSIDE = ("desktop", "reserve")  # lines that are not vLLM's
# The native engine uses this library, too; vLLM refuses the second key for a backend that it chooses itself.
_STRUCTURED_OUTPUTS = {"backend": "guidance", "disable_any_whitespace": True}
_DIGITS = 1000  # a share is written with three digits, rounded down
_UVA = "ends with 'UVA is not available' under WSL2"
_BARRED = "the way that cards take to each other by themselves is barred here"
_WHY = {
    OLDER_SHARING.partition("=")[0]: f"NCCL shares RAM between cards as before 2.24: {_BARRED}",
    SOCKETS.partition("=")[0]: "cards talk over sockets, as /dev/shm is full",
    LOOPBACK.partition("=")[0]: "workers meet on this computer, whatever its network says",
    NO_PEERS.partition("=")[0]: f"cards talk through RAM: {_BARRED}",
}
_FLOAT8_FROM = (8, 9)  # the first compute capability with instructions for it


def serve_command(
    model: Model,
    settings: VllmSettings,
    lines: tuple[Line, ...],
    gpus: Sequence[Gpu],
    version: Version,
    *,
    wsl2: bool,
    name_gpus: bool,
) -> Command:
    """The ``vllm serve`` command of a plan, without host and port.

    ``lines``: the plan's ledger. ``gpus``: the plan's cards, the one of the ledger first. ``wsl2``: set what
    this version needs under WSL2. ``name_gpus``: set CUDA_VISIBLE_DEVICES, as the machine has more cards.
    Flags that ``version`` lacks, and ``settings.vllm.omitted_flags``, are left out.
    """
    every = [
        *_flags(model, settings, lines, gpus[0]),
        *_flags_of_cards(model, settings),
        *_picture_flags(model, settings),
        Flag(
            "--structured-outputs-config",
            json.dumps(_STRUCTURED_OUTPUTS),
            NO_LINE,
            "JSON by schema without blanks between its parts: a model that may set them can go on with them "
            "to the end of the context",
        ),
    ]
    flags = [
        flag
        for flag in every
        if has_flag(version.number, flag.flag) and flag.flag not in settings.vllm.omitted_flags
    ]
    variables = list(_variables(gpus, settings, version, wsl2=wsl2, several=name_gpus))
    words = ["vllm", "serve", str(mini_folder()) if model.source == MINI else model.source]
    for flag in flags:
        words += flag.words
    environment = {variable.flag: variable.value for variable in variables}
    return Command(tuple(words), environment, (*flags, *variables))


def budget_bytes(lines: tuple[Line, ...]) -> int:
    """Bytes of the ledger that vLLM allocates, growth included, after it first reads free memory.

    So many must be free then. Desktop, reserve, CUDA's context and ``peers`` do not count.
    """
    return sum(line.bytes for line in lines if line.line not in _OUTSIDE) - bytes_outside_budget(lines)


def memory_utilization(lines: tuple[Line, ...], gpu: Gpu) -> float:
    """``budget_bytes`` as a share (0 to 1) of all memory of ``gpu``, rounded down to three decimals."""
    return math.floor(budget_bytes(lines) / gpu.total * _DIGITS) / _DIGITS


def _flags(model: Model, settings: VllmSettings, lines: tuple[Line, ...], gpu: Gpu) -> Iterator[Flag]:
    pool = next(line.bytes for line in lines if line.line == "kv_cache")
    longest = model.text.max_position_embeddings
    yield Flag(
        "--max-model-len",
        str(settings.context),
        "kv_cache",
        f"without it {longest} tokens must fit, "
        f"{format_bytes(longest * cost.kv_bytes_per_token(model, settings.kv_dtype, settings.vllm))}",
    )
    yield Flag(
        "--kv-cache-memory-bytes",
        str(pool),
        "kv_cache",
        "taken as it is; without it the cache takes "
        + ("nine tenths of the RAM" if settings.vllm.on_cpu else "whatever the share leaves"),
    )
    if settings.kv_dtype == FP8:
        yield Flag("--kv-cache-dtype", "fp8", "kv_cache", "keys and values in FP8: half the bytes")
    if not settings.vllm.on_cpu:
        yield _utilization_flag(settings, lines, gpu)
    yield Flag(
        "--max-num-seqs",
        str(settings.sequences),
        "graphs",
        "requests at once; 256 if not said, with as many sizes of graphs and 1 GiB to choose tokens",
    )
    yield Flag(
        "--max-num-batched-tokens",
        str(settings.chunk),
        "text_workspace",
        "prefill chunk; also how many pictures are encoded together (vision_workspace)",
    )
    if not settings.graphs:
        compiling = 0 if cost.has_newer_runner(settings.vllm) else cost.COMPILING.bytes
        saved = cost.GRAPHS_OF_FEW.bytes + compiling
        why = f"no graphs and no compiling, about {format_bytes(saved)}; slower"
        if settings.vllm.on_cpu:
            why = "compiling for a processor takes minutes, and there are no graphs"
        yield Flag("--enforce-eager", "", "graphs", why)
    if settings.vllm.dtype or gpu.compute_capability < BFLOAT16_CAPABILITY:
        yield _dtype_flag(settings.vllm.dtype or "float16", gpu)


def _dtype_flag(chosen: str, gpu: Gpu) -> Flag:
    if chosen == FLOAT32:
        return Flag(
            "--dtype", chosen, "weights.text", "asked for: weights, KV cache and passes of twice the bytes"
        )
    why = "this card has no bfloat16" if gpu.compute_capability < BFLOAT16_CAPABILITY else "asked for"
    return Flag("--dtype", chosen, NO_LINE, f"{why}; as many bytes")


def _utilization_flag(settings: VllmSettings, lines: tuple[Line, ...], gpu: Gpu) -> Flag:
    """The share of all memory that is checked against what is free."""
    whole, most = memory_utilization(lines, gpu), settings.vllm.max_utilization
    if most is None or most >= whole:
        why = (
            f"{format_bytes(budget_bytes(lines))} of {format_bytes(gpu.total)}, growth included: with the "
            "bytes above it moves nothing, but the start ends unless as much is free"
        )
        return Flag("--gpu-memory-utilization", f"{whole:g}", "total", why)
    why = f"all that is free; the plan counts {whole:g}, what vLLM grows by later included"
    return Flag("--gpu-memory-utilization", f"{most:g}", "total", why)


def _flags_of_cards(model: Model, settings: VllmSettings) -> Iterator[Flag]:
    """Tensor parallelism, and copies of the model."""
    args = settings.vllm
    if args.tensor > 1:
        yield Flag(
            "--tensor-parallel-size",
            str(args.tensor),
            "weights.text",
            f"each layer goes over {args.tensor} cards, which add up {cost.num_all_reduces(model)} times a "
            "token",
        )
        if args.no_peer_access:
            why = "vLLM's own sums over cards want them to read each other's memory"
            yield Flag("--disable-custom-all-reduce", "", NO_LINE, why)
        if model.vision is not None and settings.image_tokens and not args.split_tower:
            yield Flag(
                "--mm-encoder-tp-mode",
                "data",
                "weights.vision",
                "each card has the whole tower and takes pictures of its own, with no sums between cards",
            )
    if args.data > 1:
        yield Flag(
            "--data-parallel-size",
            str(args.data),
            NO_LINE,
            f"{args.data} copies of the model, which share the requests; each has the ledger above",
        )
    if args.single_api_server:
        yield Flag("--api-server-count", "1", NO_LINE, "one process takes requests, not one for each copy")


def _picture_flags(model: Model, settings: VllmSettings) -> Iterator[Flag]:
    vision = model.vision
    if vision is None:
        return
    most = settings.image_tokens * cost.pixels_per_token(vision)
    size = {"size": {"longest_edge": most, "shortest_edge": cost.min_pixels(vision)}}
    yield Flag(
        "--mm-processor-kwargs",
        json.dumps(size),
        "vision_workspace",
        f"pictures are scaled down to {settings.image_tokens} tokens; else one may have 16384",
    )
    yield Flag(
        "--limit-mm-per-prompt",
        json.dumps({"image": cost.max_pictures_per_prompt(settings), "video": 0}),
        "vision_workspace",
        "no video: its frames are not held to the size above, and the trial run would encode 12288 tokens of "
        "them",
    )
    yield Flag("--mm-processor-cache-gb", "0", NO_LINE, "4 GiB of RAM or more otherwise, nothing on the GPU")


def _variables(
    gpus: Sequence[Gpu], settings: VllmSettings, version: Version, *, wsl2: bool, several: bool
) -> Iterator[Flag]:
    if settings.vllm.on_cpu:
        return
    if several:
        yield Flag("CUDA_DEVICE_ORDER", "PCI_BUS_ID", NO_LINE, "GPUs counted as the driver counts them")
        yield Flag(
            "CUDA_VISIBLE_DEVICES",
            ",".join(str(index) for index in sorted(gpu.index for gpu in gpus)),
            NO_LINE,
            f"the GPU{'s' if len(gpus) > 1 else ''} that {'are' if len(gpus) > 1 else 'is'} planned for: "
            f"{gpus[0].name}",
        )
    variables = dict(each.split("=", 1) for each in sorted(settings.vllm.environment))
    if wsl2 and version.needs_pinned_memory and OLDER_RUNNER not in variables:
        variables = {PINNED: "1", **variables}
    variables |= dict([NO_PEERS.split("=", 1)]) if settings.vllm.no_peer_access else {}
    for name, value in variables.items():
        yield Flag(name, value, NO_LINE, _WHY.get(name) or f"without it vLLM {version.text} {_UVA}")


def version_remarks(version: Version, settings: VllmSettings, gpu: Gpu) -> Iterator[Remark]:
    """Yield remarks for a plan about this version of vLLM: where it is from, how it was measured.

    ``gpu``: the card that is planned for, whose compute capability some remarks depend on.
    """
    capability = gpu.compute_capability
    if settings.vllm.on_cpu:
        yield Remark(
            f"This is for vLLM {version.text} on the processor: every line is RAM, and what is modelled was "
            "read in its source or measured by hand on one computer.",
            "on_processor",
        )
        return
    if version.how == ASSUMED:
        yield Remark(
            f"vLLM is not installed beside vlfit: this is for {version.text}; --vllm-version names another.",
            "version_assumed",
        )
    elif version.how == INSTALLED:
        yield Remark(f"For vLLM {version.text}, which is installed here.", "version_installed")
    if not version.has_known_flags:
        newest = f"{NEWEST[0]}.{NEWEST[1]}"
        yield Remark(
            f"vLLM {version.text} is newer than {newest}, the last whose flags were read: they are taken to "
            "be the same.",
            "version_unread",
        )
    newer = cost.has_newer_runner(settings.vllm)
    measured = f"{cost.NEWER_MEASURED_WITH} on one H100" if newer else f"{cost.MEASURED_WITH} on one H200"
    yield Remark(
        f"Workspaces, graphs and growth were measured with vLLM {measured}; other versions and cards differ "
        "by some hundred MiB, so the first start is a trial.",
        "measured_elsewhere",
    )
    if settings.image_tokens and version.number < SIZES_ARE_FIXED_FROM:
        yield Remark(
            f"vLLM {version.text} lets a request bring sizes of its own (mm_processor_kwargs), beyond this "
            "plan; from 0.31 on it refuses them.",
            "sizes_not_fixed",
        )
    if settings.kv_dtype == FP8 and capability < _FLOAT8_FROM:
        yield Remark(
            "Which of vLLM's kernels read a KV cache in FP8 on a card without float8 of its own was not "
            "looked at: the start may be refused.",
            "fp8_kv_unknown",
        )
    if capability < BFLOAT16_CAPABILITY and settings.image_tokens:
        yield Remark(
            "On a card this old the tower has no flash attention; its workspace there was not measured.",
            "no_flash_attention",
        )
