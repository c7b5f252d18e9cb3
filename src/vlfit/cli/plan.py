"""``vlfit plan``: what fits on a machine, where every MiB goes, how fast it will be, what to change."""

import os
import re
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.machine import machine_from_options
from vlfit.cli.options import MACHINE, CommandOptions, complete_model, takes_options
from vlfit.cli.printing import Printer, stdout_error
from vlfit.errors import DeviceError, DoesNotFit, UnknownArchitecture, UsageError, VlfitError
from vlfit.units import MIB, format_bandwidth

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.machine.model import Gpu, Machine
    from vlfit.plan.calibration import Calibration
    from vlfit.plan.ledger import Line
    from vlfit.plan.plans import Plan
    from vlfit.plan.wishes import Wishes


EXAMPLES = """\b
Examples:
  vlfit plan
  vlfit plan 4B-FP8 --context 4096
  vlfit plan 4B-FP8 2B-FP8
  vlfit plan --compare 8B 9B
  vlfit plan 4B --gpu "RTX 5060" --desktop 951MiB --wsl2
  vlfit plan --gpu "2x RTX 3090" --all
  vlfit plan unsloth/Qwen3-VL-4B-Instruct-GGUF --gpu "RTX 5060"
  vlfit plan ~/models/my-qwen3-vl --weights int4 --json
  vlfit plan 8B --gpu "RTX 4090" --svg plan.svg
  vlfit plan --calibrate
  vlfit plan 4B --backend vllm --vllm-version 0.22
  vlfit plan 8B --weights fp8 --gpu "RTX 5060" --desktop 951MiB --offload auto
  vlfit plan 4B --kv-dtype fp8 --context 16384
  vlfit plan --device cpu
"""


class PlannedWeights(StrEnum):
    """What ``--weights`` takes."""

    bf16 = "bf16"
    fp8 = "fp8"
    int4 = "int4"


class BackendName(StrEnum):
    """What ``--backend`` takes."""

    native = "native"
    vllm = "vllm"
    transformers = "transformers"


@takes_options(
    *("device", "context", "image_tokens", "sequences", "weights", "kv_dtype", "backend", "vllm_version"),
    *(
        "tensor_parallel",
        "data_parallel",
        "offload",
        "speculate",
        *MACHINE,
        "what_if",
        "compare",
        "calibrate",
        "with_text",
        "json",
        "svg",
    ),
    planned=("context", "image_tokens", "sequences", "offload", "speculate"),
    image_tokens="Max tokens per picture (1024x1024 pixels: 1024).",
    sequences="Max requests running at once.",
    device="auto (GPU if there is one), cpu, cuda, or cuda:1.",
    offload="Keep text layers of this size in RAM (2, 800MiB); auto: as few as make the model fit, if nothing"
    " else does.",
    speculate="Plan with multi-token prediction or without any drafts.  [default: with it where it takes"
    " nothing from the rest]",
    json="Print JSON, in bytes and seconds.",
)
def plan(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            autocompletion=complete_model,
            help="A folder, a GGUF file, a hub id or URL, mini, or a name of the catalog; 4B leaves the"
            " weights to the plan, and so does a repository of GGUF files its type. Several: what fits"
            " together.  [default: the whole catalog]",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        PlannedWeights | None, typer.Option("--weights", "-w", help="Weights format.", show_default=False)
    ] = None,
    backend: Annotated[
        BackendName | None,
        typer.Option(help="native, vllm or transformers.  [default: native]"),
    ] = None,
    vllm_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="With --backend vllm: version to plan for.  [default: the installed one]"
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --backend vllm: GPUs per model.  [default: as few as hold it]",
        ),
    ] = None,
    data_parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --backend vllm: copies of the model.  [default: as many as fit]",
        ),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also plan for more free memory, and for other cards.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Show several MODELs side by side, each alone on the card."),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="First measure this GPU (under a minute), or without one the processor, and keep that.",
        ),
    ] = False,
    with_text: Annotated[
        bool, typer.Option("--all", help="Without MODEL: list text-only models, too.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the ledger of MODEL as SVG.")] = None,
    *,
    options: CommandOptions,
) -> None:
    """Say which model to take on a GPU or CPU, before downloading anything.

    Without a GPU, or with --device cpu, the plan is for the processor and RAM.

    Prints what to take, whether it fits, and what to type; then what else fits or, of MODEL, where every MiB
    goes. What you set stays set. The rest is chosen in this order: the better model, a longer context, more
    image tokens, more requests at once, more exact weights; a context of 4096 and pictures of 1024 tokens
    before either grows. Without MODEL, ready-made checkpoints come before those that must be converted. Reads
    only headers.

    Exit code 0: it fits; 3: it does not, and the cheapest changes are listed.
    """
    from vlfit.plan.backends import CPU, check_wishes, cost_model_on
    from vlfit.plan.wishes import Wishes, parse_offload

    wishes = Wishes(
        options.context,
        options.image_tokens,
        options.sequences,
        weights.value if weights else None,
        backend.value if backend else None,
        vllm_version,
        parse_offload(options.offload) if options.offload is not None else None,
        _kv_dtype(options),
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        device=_device(options),
        speculate=_speculate(options, backend),
    )
    check_wishes(wishes)
    names = list(dict.fromkeys(models or ()))
    model = names[0] if names else None
    if compare and len(names) < 2:
        raise UsageError("--compare needs several models", "Write vlfit plan --compare 8B 9B.")
    if len(names) > 1 and (svg is not None or what_if):
        raise UsageError("--svg and --what-if are for one model", "Name one, or leave them out.")
    if svg is not None and model is None:
        raise UsageError("--svg needs a model", "Write vlfit plan MODEL --svg FILE.")
    chosen = _with_card(machine_from_options(options), options)
    printer = Printer(json=options.json)
    elsewhere = options.machine is not None or options.gpu is not None
    on_processor = cost_model_on(wishes, chosen) is CPU
    if on_processor and what_if:
        raise UsageError(
            "--what-if is for GPUs, but this plan is for the processor",
            "Leave it out, or name a card with --gpu.",
        )
    if on_processor and not elsewhere:
        from vlfit.plan.processors import measured_machine

        chosen = measured_machine(chosen, again=calibrate)
    if backend == BackendName.vllm and not elsewhere:
        wishes, chosen = _for_vllm_here(wishes, chosen)
        if what_if and not chosen.gpus:
            raise UsageError(
                "--what-if is for GPUs, but this plan is for RAM",
                "Leave it out, or name a card with --gpu.",
            )
    elif backend == BackendName.vllm and vllm_version is None:
        wishes = _for_vllm_version_here(wishes, printer)
    if calibrate and (elsewhere or not on_processor):
        _calibrate(chosen, printer, elsewhere=elsewhere)
    _warn_broken_calibration(chosen, printer)
    if compare:
        from vlfit.cli.pages.plan_set import print_comparison

        _gpu_for(chosen, wishes)  # fail without a GPU before asking the hub
        if not print_comparison(names, chosen, wishes, printer, json=options.json):
            raise typer.Exit(DoesNotFit.exit_code)
        return
    if len(names) > 1:
        from vlfit.cli.pages.plan_set import print_set

        _gpu_for(chosen, wishes)  # fail without a GPU before asking the hub
        if not print_set(names, chosen, wishes, printer, json=options.json, elsewhere=elsewhere):
            raise typer.Exit(DoesNotFit.exit_code)
        return
    fits = (
        _plan_catalog(chosen, wishes, printer, what_if, options.json, with_text, elsewhere=elsewhere)
        if model is None
        else _plan_model(model, chosen, wishes, printer, what_if, options.json, svg, elsewhere=elsewhere)
    )
    if not fits:
        raise typer.Exit(DoesNotFit.exit_code)


def _device_name(options: CommandOptions) -> str:
    return (options.device or os.environ.get("VLFIT_DEVICE") or "auto").strip().lower()


def _device(options: CommandOptions) -> str | None:
    """cpu if it is asked for, typed or from the environment; else None. Raises ``UsageError`` if unknown."""
    from vlfit.plan.wishes import CPU

    name = _device_name(options)
    if name not in ("auto", CPU, "cuda") and not re.fullmatch(r"cuda:\d{1,3}", name):
        raise UsageError(f"unknown device {name!r}", "Use auto, cpu, cuda, or one card such as cuda:1.")
    if name == CPU and options.gpu is not None:
        raise UsageError("--device cpu and --gpu contradict each other", "Leave one of them out.")
    return CPU if name == CPU else None


def _with_card(machine: "Machine", options: CommandOptions) -> "Machine":
    """``machine`` with room only on the card that ``--device cuda:1`` names.

    Raises ``DeviceError`` if it is missing, or for ``--device cuda`` without any.
    """
    name = _device_name(options)
    if not name.startswith("cuda") or options.gpu is not None:
        return machine
    if not machine.gpus:
        raise DeviceError(
            f"--device {name}: there is no GPU to plan for: {machine.no_gpu_reason}",
            "Leave it out: the plan is for the processor then.",
        )
    index = name.partition(":")[2]
    if not index:
        return machine
    if int(index) not in [gpu.index for gpu in machine.gpus]:
        numbers = ", ".join(str(gpu.index) for gpu in machine.gpus)
        raise DeviceError(f"--device {name}: the GPUs here have the numbers {numbers}", "Name one of these.")
    # The others stay, full: the command has to name the card among them.
    full = (replace(gpu, free=0, desktop=gpu.total) for gpu in machine.gpus)
    gpus = tuple(
        gpu if gpu.index == int(index) else other for gpu, other in zip(machine.gpus, full, strict=True)
    )
    return replace(machine, gpus=gpus)


def _for_vllm_here(wishes: "Wishes", machine: "Machine") -> "tuple[Wishes, Machine]":
    """Wishes and machine for the vLLM found here, as ``vlfit serve`` starts it; it may be a CPU build."""
    from vlfit.backends.vllm.installed import find_vllm
    from vlfit.backends.vllm.planning import machine_for_build

    try:
        installed = find_vllm()
    except UsageError:
        return wishes, machine
    if wishes.vllm_version is None:
        wishes = replace(wishes, vllm_version=installed.version)
    return wishes, machine_for_build(installed, machine)


def _for_vllm_version_here(wishes: "Wishes", printer: Printer) -> "Wishes":
    """Wishes for the vLLM version found here, and say so; a CPU build counts as the same version for GPUs."""
    from vlfit.backends.vllm.installed import find_vllm

    try:
        installed = find_vllm()
    except UsageError:
        return wishes
    version = installed.version.partition("+")[0]
    kind = "CPU build" if installed.on_cpu else "vLLM"
    printer.note(
        f"planned for vLLM {version}, as the {kind} found here ({installed.program[0]}); --vllm-version names"
        " another"
    )
    return replace(wishes, vllm_version=version)


def _kv_dtype(options: CommandOptions) -> str | None:
    """KV cache dtype, typed or from the environment; None for auto."""
    if options.kv_dtype is None and not os.environ.get("VLFIT_KV_DTYPE"):
        return None  # importing settings takes 0.2 s
    from vlfit.settings import read_settings

    chosen = read_settings(kv_dtype=options.kv_dtype).kv_dtype
    return None if chosen == "auto" else chosen


def _speculate(options: CommandOptions, backend: BackendName | None) -> bool | None:
    """As ``Wishes.speculate``, typed or, for the native engine, from the environment."""
    if options.speculate is not None or not os.environ.get("VLFIT_SPECULATE"):
        return options.speculate
    if backend not in (None, BackendName.native):
        return None
    from vlfit.settings import read_settings

    return read_settings().speculate


def _plan_model(
    name: str,
    machine: "Machine",
    wishes: "Wishes",
    printer: Printer,
    what_if: bool,
    json: bool,
    svg: Path | None,
    *,
    elsewhere: bool,
) -> bool:
    from vlfit.plan.model_lookup import alternatives_to, find_models
    from vlfit.plan.planner import find_plan
    from vlfit.plan.recommend import advice_for, catalog_plans

    _gpu_for(machine, wishes)  # fail without a GPU before asking the hub
    repository = _gguf_repository(name)
    if repository is not None and not what_if and wishes.weights is None:
        return _plan_repository(repository, machine, wishes, printer, json=json, svg=svg, elsewhere=elsewhere)
    try:
        subject = find_models(name, wishes.weights)
    except UnknownArchitecture:
        if wishes.backend != "transformers":
            raise
        return _plan_any(name, machine, wishes, printer, json=json)
    if wishes.backend == "transformers" and subject.exact[0].state_bytes_per_sequence:
        return _plan_any(name, machine, wishes, printer, json=json)
    result = find_plan(
        subject.exact, machine, wishes, lambda: alternatives_to(subject.exact, name), subject.smaller_variants
    )
    family = result.model.family
    others = [
        each
        for each in (() if json else catalog_plans(machine, replace(wishes, weights=None)))
        if each.fits and each.model.family == family and each.model.name != result.model.name
    ]
    advice = advice_for(result, machine, wishes, others, elsewhere=elsewhere)
    rows = (
        _what_if(
            machine,
            wishes,
            lambda other: find_plan(subject.exact, other, wishes, smaller_variants=subject.smaller_variants),
        )
        if what_if
        else []
    )
    if svg is not None:
        _write_svg(svg, result)
        printer.note(f"saved to {svg}")
    if json:
        from vlfit.plan.report import context_to_json, plan_to_json, what_if_to_json

        longer = [context_to_json(each) for each in advice.longer]
        what_ifs = {"what_if": what_if_to_json(rows)} if what_if else {}
        printer.data({**plan_to_json(result), "longer_contexts": longer, **what_ifs})
    else:
        from vlfit.cli.pages.plan_page import model_page, what_if_page

        _print_pages([model_page(result, advice, others), *([what_if_page(rows)] if rows else [])])
    return result.fits


def _gguf_repository(name: str) -> str | None:
    """The hub's name of a repository of GGUF files, if ``name`` means all of one; else None."""
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.catalog import hub_name_of
    from vlfit.checkpoint.gguf.repository import may_be_gguf

    full_name = hub_name_of(name)
    if not hub.is_hub_name(full_name) or not may_be_gguf(full_name) or Path(name).expanduser().exists():
        return None
    # The page of one of its files, or a checkpoint in safetensors that is called so.
    is_one = full_name != name and ".gguf" in name.rpartition("/")[2].lower()
    return None if is_one or hub.cached_folder(full_name) is not None else full_name


def _plan_repository(
    name: str,
    machine: "Machine",
    wishes: "Wishes",
    printer: Printer,
    *,
    json: bool,
    svg: Path | None,
    elsewhere: bool,
) -> bool:
    """Print the best quantization of a repository of GGUF files, and all in one table."""
    from vlfit.checkpoint.source import nearest_names_in_hint
    from vlfit.plan.quantizations import plan_quantizations, repository_to_json
    from vlfit.plan.recommend import advice_for

    with nearest_names_in_hint(name):
        plans = plan_quantizations(name, machine, wishes)
    if plans.unlisted is not None:
        printer.note(f"only the quantizations that are here: {plans.unlisted.message}")
    best = plans.best
    if best is None:
        raise UnknownArchitecture(
            f"vlfit runs none of the files of {name}: {plans.quantizations[0].problem}", "Name another model."
        )
    if svg is not None:
        _write_svg(svg, best)
        printer.note(f"saved to {svg}")
    if json:
        printer.data(repository_to_json(plans))
    else:
        from vlfit.cli.models import repository_table
        from vlfit.cli.pages.plan_page import model_page

        advice = advice_for(best, machine, wishes, elsewhere=elsewhere)
        title = "All quantizations" if plans.unlisted is None else "Quantizations on this computer"
        _print_pages([model_page(best, advice), f"\n{title}\n{repository_table(plans)}"])
    return best.fits


def _plan_catalog(
    machine: "Machine",
    wishes: "Wishes",
    printer: Printer,
    what_if: bool,
    json: bool,
    with_text: bool,
    *,
    elsewhere: bool,
) -> bool:
    from vlfit.plan.recommend import (
        advice_for,
        catalog_plans,
        describe_other_series,
        other_series,
        recommended,
    )

    gpu = _gpu_for(machine, wishes)
    here = [] if elsewhere else _plans_here(machine, wishes, printer)
    plans = sorted([*catalog_plans(machine, wishes), *here], key=lambda each: each.rank)
    if not plans:
        raise UsageError("no model of the catalog supports all of these options", "Set fewer at once.")
    rows = _what_if(machine, wishes, lambda other: _to_take(catalog_plans(other, wishes))) if what_if else []
    best = recommended(plans)
    other = other_series(plans, best) if best is not None else None
    if json:
        from vlfit.plan.report import catalog_to_json

        printer.data(catalog_to_json(plans, gpu, machine.host.wsl2, rows, best, other))
    else:
        from vlfit.cli.pages.plan_page import table_page, what_if_page

        advice = advice_for(best or plans[0], machine, wishes, elsewhere=elsewhere)
        if best is not None and other is not None:
            advice = replace(advice, other_series=describe_other_series(best, other))
        page = table_page(plans, best, advice, with_text_models=with_text)
        _print_pages([page, *([what_if_page(rows)] if rows else [])])
    return plans[0].fits


def _gpu_for(machine: "Machine", wishes: "Wishes") -> "Gpu":
    """The GPU to plan for, or without one RAM; raises ``DeviceError`` for transformers, which needs a GPU."""
    from vlfit.machine.cards import KERNEL_CAPABILITY
    from vlfit.plan.gpus import emptiest_gpu
    from vlfit.plan.processors import ram_as_gpu

    if machine.gpus and wishes.device is None:
        native = wishes.backend == BackendName.native
        return emptiest_gpu(machine, KERNEL_CAPABILITY) if native else emptiest_gpu(machine)
    return emptiest_gpu(machine) if wishes.backend == BackendName.transformers else ram_as_gpu(machine)


def _plans_here(machine: "Machine", wishes: "Wishes", printer: Printer) -> "list[Plan]":
    """The plans that fit for GGUF models on this computer, which count beside the catalog's; best first.

    Empty if ``wishes`` name another backend, or a weights format.
    """
    if wishes.weights is not None or wishes.backend not in (None, BackendName.native):
        return []
    from vlfit.plan.gguf_shelf import read_shelf
    from vlfit.plan.model_choice import type_rank
    from vlfit.plan.planner import find_plan
    from vlfit.plan.processors import for_device

    shelf = read_shelf(for_device(machine, wishes.device))
    if shelf.left:
        printer.note(f"{shelf.left} GGUF models here were not looked at; vlfit models --all takes the time")
    plans = []
    for model in shelf.models:
        try:
            plans.append(find_plan([model], machine, wishes))
        except (UsageError, DoesNotFit):  # a wish that it does not support, or its offloaded layers
            continue
    return sorted((each for each in plans if each.fits), key=type_rank)


def _what_if(
    machine: "Machine", wishes: "Wishes", planned: "Callable[[Machine], Plan]"
) -> "list[tuple[str, Plan]]":
    from vlfit.plan.planner import what_if_machines

    gpu = _gpu_for(machine, wishes) if machine.gpus else None
    return [(what, planned(other)) for what, other in what_if_machines(machine, gpu)]


def _to_take(plans: "list[Plan]") -> "Plan":
    """The plan that the page's first line would name; the best of those that do not fit if none does."""
    from vlfit.plan.recommend import recommended

    return recommended(plans) or plans[0]


def _print_pages(pages: list[str]) -> None:
    """Print pages unescaped: they hold colours, and names in them are escaped already."""
    try:
        sys.stdout.write("\n".join(pages) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_error(error) from error


def _write_svg(file: Path, made: "Plan") -> None:
    from vlfit.atomic_write import write_whole
    from vlfit.plan.svg import draw_ledger

    try:
        write_whole(file, draw_ledger(made).encode())
    except OSError as error:
        raise VlfitError(
            f"cannot write {file}: {error.strerror}", "Choose a folder you can write to."
        ) from None


# --- --backend transformers, for models that the native engine does not know ---------------------------

_PROMPT_TOKENS = 128  # question and chat template, left free by the backend too
_BF16_BYTES = 2


def _plan_any(name: str, machine: "Machine", wishes: "Wishes", printer: Printer, *, json: bool) -> bool:
    """Print the ledger of ``name`` in bfloat16 on the emptiest GPU; returns whether it fits.

    Raises what reading config and headers raises; does not download weights.
    """
    from vlfit.cli.pages.plan_page import transformers_page
    from vlfit.plan.gpus import emptiest_gpu
    from vlfit.plan.transformers.cost import RunOptions, choose_context, lines_on_gpu, parse_text_shape

    gpu = emptiest_gpu(machine)
    checkpoint = _headers_of(name)
    shape = parse_text_shape(checkpoint.config)
    context = choose_context(shape, wishes.context)
    wish = RunOptions(context, min(wishes.image_tokens or context, context - _PROMPT_TOKENS), _BF16_BYTES)
    lines = lines_on_gpu(checkpoint, shape, gpu, wish)
    total = sum(line.bytes for line in lines)
    fits = total <= gpu.total
    if json:
        printer.data(_any_facts(checkpoint, gpu, wish.image_tokens, context, lines))
    else:
        printer.line(transformers_page(checkpoint, name, gpu, context, lines))
    return fits


def _headers_of(name: str) -> "AnyCheckpoint":
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.any_model import read_any_checkpoint
    from vlfit.checkpoint.remote_headers import read_remote_any_checkpoint
    from vlfit.checkpoint.source import resolve_name

    one = resolve_name(name)[0]
    folder = one.local_folder(hub.transformers_files(lambda _: None))
    return (
        read_any_checkpoint(one.name, folder) if folder is not None else read_remote_any_checkpoint(one.name)
    )


def _any_facts(
    checkpoint: "AnyCheckpoint", gpu: "Gpu", image_tokens: int, context: int, lines: "tuple[Line, ...]"
) -> dict[str, Any]:
    from vlfit.cli.pages.plan_page import GUESSED

    total = sum(line.bytes for line in lines)
    return {
        "version": 1,
        "model": checkpoint.name,
        "backend": "transformers",
        "fits": total <= gpu.total,
        "machine": {"gpu": gpu.name, "total": gpu.total, "free": gpu.free},
        "settings": {"context": context, "image_tokens": image_tokens, "sequences": 1, "dtype": "bfloat16"},
        "ledger": [
            {"line": line.line, "bytes": line.bytes, "how": line.how, "note": line.note} for line in lines
        ],
        "total": total,
        "headroom": gpu.total - total,
        "remarks": [GUESSED],
    }


# --- vlfit plan --calibrate ----------------------------------------------------------------------------


def _calibrate(machine: "Machine", printer: Printer, *, elsewhere: bool) -> None:
    """Measure this machine's GPU and save the constants. ``elsewhere``: the options name another machine.

    Raises ``UsageError`` for another machine, ``DeviceError`` without a GPU or a torch that sees it.
    """
    if elsewhere:
        raise UsageError(
            "--calibrate measures this machine, but --machine and --gpu name another",
            "Run vlfit plan --calibrate on that machine.",
        )
    if not machine.gpus:
        raise DeviceError(
            f"there is no GPU to measure: {machine.no_gpu_reason}",
            "Without a GPU, plans use the constants that ship with vlfit.",
        )
    from vlfit.machine.cards import KERNEL_CAPABILITY
    from vlfit.plan.calibration import save
    from vlfit.plan.gpus import emptiest_gpu

    try:
        from vlfit.tuning.calibration_run import calibrate
        from vlfit.tuning.tune import tune_gpu
    except ImportError as error:
        raise DeviceError(
            f"measuring needs torch, which cannot be imported: {error}", "Run vlfit doctor to find the cause."
        ) from None
    gpu = emptiest_gpu(machine, KERNEL_CAPABILITY)
    printer.note(f"Measuring {gpu.name}. This takes less than a minute.")
    measured = calibrate(gpu, lambda what: printer.note(f"  {what}"))
    path = save(measured)
    for line in _calibration_lines(measured):
        printer.note(f"  {line}")
    printer.note(f"Saved to {path}; plans for this GPU, driver and torch use it from now on.")
    printer.note("Tuning kernels for 1 to 16 rows.")
    tiles = tune_gpu(gpu, lambda what: printer.note(f"  {what}"))
    printer.note(f"Saved to {tiles}; the engine and plans for this GPU use it from now on.")


def _calibration_lines(measured: "Calibration") -> list[str]:
    """Calibration results, one line each."""
    link = measured.link_bandwidth
    return [
        f"CUDA context: {measured.context / MIB:,.0f} MiB; GEMM workspace "
        f"{measured.workspace / MIB:,.0f} MiB",
        f"torch's allocator beyond its tensors: {measured.vision_slack - 1:.0%} in the vision tower, "
        f"{measured.text_slack - 1:.0%} in the text model",
        f"copies at {format_bandwidth(round(measured.copy_bandwidth))}, "
        f"{'' if link is None else f'from RAM at {format_bandwidth(round(link))}, '}"
        f"{measured.multiplications / 1e12:,.0f} TFLOP/s in bf16, "
        f"{measured.launch * 1e3:.2f} ms to launch a layer",
    ]


def _warn_broken_calibration(machine: "Machine", printer: Printer) -> None:
    """Warn about saved calibrations that cannot be read."""
    from vlfit.plan.calibration import constants_for

    for gpu in machine.gpus:
        broken = constants_for(gpu).broken
        if broken:
            printer.note(
                f"warning: {broken}. Using the constants that ship with vlfit instead; "
                "vlfit plan --calibrate measures again."
            )


if TYPE_CHECKING:
    from collections.abc import Callable

    from vlfit.machine.model import Gpu, Machine
    from vlfit.plan.plans import Plan
    from vlfit.plan.wishes import Wishes

    Planner = Callable[[Machine], Plan]
