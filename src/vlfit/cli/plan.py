"""``vlfit plan``: what fits on this machine, where every MiB goes, how fast it will be, what to change."""

import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.machine import DesktopSize, GpuName, MachineFile, UnderWsl2, chosen_machine
from vlfit.cli.printing import Printer, cannot_write
from vlfit.errors import DeviceError, DoesNotFit, UnknownArchitecture, UsageError, VlfitError
from vlfit.units import MIB, format_bandwidth

if TYPE_CHECKING:
    from vlfit.machine.model import Machine
    from vlfit.plan.calibration import Measured


# ``vlfit plan --calibrate``: measures this machine's GPU, keeps the numbers, and says what they are.
#
# Knows words. Does not know how anything is measured (``tuning/calibration_run.py``, ``tuning/tune.py``) or
# kept (``plan/calibration.py``, ``plan/native/tiles.py``).


def measure(machine: "Machine", printer: Printer, *, elsewhere: bool) -> None:
    """Measure the GPU that is planned for. ``elsewhere``: the options name a machine that is not this one.

    Raises ``UsageError`` for another machine, ``DeviceError`` where there is no GPU or no torch that sees it.
    """
    if elsewhere:
        raise UsageError(
            "--calibrate measures this machine; --machine and --gpu name another",
            "run vlfit plan --calibrate on the machine itself",
        )
    if not machine.gpus:
        raise DeviceError(
            f"there is no GPU to measure: {machine.no_gpu_reason}",
            "without one, the plan counts with the table of constants that ships with vlfit",
        )
    from vlfit.plan.calibration import save
    from vlfit.plan.search import emptiest

    try:
        from vlfit.tuning.calibration_run import calibrate
        from vlfit.tuning.tune import tune_gpu
    except ImportError as error:
        raise DeviceError(
            f"measuring needs torch, which cannot be imported: {error}", "vlfit doctor looks for the cause"
        ) from None
    gpu = emptiest(machine)
    printer.note(f"Measuring {gpu.name}. This takes less than a minute.")
    measured = calibrate(gpu, lambda what: printer.note(f"  {what}"))
    path = save(measured)
    for line in summary(measured):
        printer.note(f"  {line}")
    printer.note(f"Kept in {path}; plans for this GPU, driver and torch count with it from now on.")
    printer.note("Measuring its kernels, for one to sixteen rows at once.")
    tiles = tune_gpu(gpu, lambda what: printer.note(f"  {what}"))
    printer.note(f"Kept in {tiles}; the engine and its plans on such a GPU use it from now on.")


def summary(measured: "Measured") -> list[str]:
    """The numbers in words."""
    link = measured.link_bandwidth
    return [
        f"CUDA and its libraries: {measured.context / MIB:,.0f} MiB; matrix products "
        f"{measured.workspace / MIB:,.0f} MiB",
        f"torch's pool above its tensors: {measured.vision_slack - 1:.0%} in the vision tower, "
        f"{measured.text_slack - 1:.0%} in the text model",
        f"copies at {format_bandwidth(round(measured.copy_bandwidth))}, "
        f"{'' if link is None else f'from RAM at {format_bandwidth(round(link))}, '}"
        f"{measured.multiplications / 1e12:,.0f} TFLOP/s in bf16, "
        f"{measured.launch * 1e3:.2f} ms to launch a layer",
    ]


def warn_of_broken(machine: "Machine", printer: Printer) -> None:
    """Say it where numbers that were measured cannot be used."""
    from vlfit.plan.calibration import constants_for

    for gpu in machine.gpus:
        broken = constants_for(gpu).broken
        if broken:
            printer.note(
                f"warning: {broken}. The table of constants that ships with vlfit is used instead; "
                "measure again with vlfit plan --calibrate."
            )


if TYPE_CHECKING:
    from collections.abc import Callable

    from vlfit.machine.model import Gpu, Machine
    from vlfit.plan.search import Plan
    from vlfit.plan.wishes import Wishes

    Planner = Callable[[Machine], Plan]

EXAMPLES = """\b
Examples:
  vlfit plan
  vlfit plan Qwen/Qwen3-VL-4B-Instruct-FP8 --context 4096
  vlfit plan 4B --gpu "RTX 5060" --desktop 951MiB --wsl2
  vlfit plan ~/models/my-qwen3-vl --weights int4 --json
  vlfit plan 8B --gpu "RTX 4090" --svg plan.svg
  vlfit plan --calibrate
  vlfit plan 4B --backend vllm --vllm-version 0.22
  vlfit plan 8B --weights fp8 --gpu "RTX 5060" --desktop 951MiB --offload auto
  vlfit plan 4B --kv-dtype fp8 --context 16384
"""


class Weights(StrEnum):
    """What ``--weights`` takes."""

    bf16 = "bf16"
    fp8 = "fp8"
    int4 = "int4"


class Backend(StrEnum):
    """What ``--backend`` takes."""

    native = "native"
    vllm = "vllm"
    transformers = "transformers"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a hub id or its address, mini, or a name of the catalog; 4B leaves the weights to"
            " the plan.  [default: all models of the catalog]",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of prompt and answer together.")
    ] = None,
    image_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of one picture (1024x1024 pixels are 1024).")
    ] = None,
    sequences: Annotated[int | None, typer.Option(metavar="N", help="Requests that run at once.")] = None,
    weights: Annotated[
        Weights | None, typer.Option("--weights", "-w", help="Weights format.", show_default=False)
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the KV cache: auto and bf16 are 16 bits; fp8: half the bytes, rounded."
            "  [env VLFIT_KV_DTYPE]",
        ),
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(help="Who runs the model.  [default: native]"),
    ] = None,
    vllm_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="With --backend vllm: plan for this one.  [default: the installed]"
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --backend vllm: cards that share each layer.  [default: as few as hold the model]",
        ),
    ] = None,
    data_parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --backend vllm: copies of the model.  [default: as many as the cards hold]",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="GIB",
            help="Let text layers wait in RAM so that the card holds so much less (2, 800MiB); auto: as few"
            " as make it fit, where nothing else does.",
        ),
    ] = None,
    machine: MachineFile = None,
    gpu: GpuName = None,
    desktop: DesktopSize = None,
    wsl2: UnderWsl2 = False,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also plan for this machine with more memory free, and others.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="First measure this GPU, in under a minute, and keep it."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the ledger of MODEL into an SVG file.")
    ] = None,
) -> None:
    """Say what fits on a GPU before anything is downloaded or loaded, and where every MiB goes.

    What you fix stays fixed. The rest is chosen in this order: the better model, a longer context, more image
    tokens, more requests at once, more exact weights; a context of 4096 and pictures of 1024 tokens before
    either grows. Without a MODEL: everything in the catalog, best first.
    Reads headers only. Exit code 0: it fits; 3: it does not, and the cheapest changes are listed.
    """
    from vlfit.plan.native.ram import parse_wish
    from vlfit.plan.wishes import Wishes

    wishes = Wishes(
        context,
        image_tokens,
        sequences,
        weights.value if weights else None,
        backend.value if backend else None,
        vllm_version,
        parse_wish(offload) if offload is not None else None,
        _kv_dtype(kv_dtype),
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
    )
    if svg is not None and model is None:
        raise UsageError("--svg draws the ledger of one model", "name it: vlfit plan MODEL --svg FILE")
    chosen = chosen_machine(machine, gpu, desktop, wsl2)
    if machine is not None and not chosen.gpus:
        raise DeviceError(
            f"the machine in {machine} has no GPU",
            "A plan is for a GPU's memory: name a file with one, or a card with --gpu (vlfit machine --cards "
            "lists them).",
        )
    printer = Printer(json=json)
    if backend == Backend.vllm and machine is None and gpu is None:
        wishes, chosen = _as_it_would_start(wishes, chosen)
        if what_if and not chosen.gpus:
            raise UsageError(
                "--what-if is about cards, and this plan is for RAM",
                "leave it out, or name a card with --gpu",
            )
    elif backend == Backend.vllm and vllm_version is None:
        wishes = _for_the_version_here(wishes, printer)
    if calibrate:
        measure(chosen, printer, elsewhere=machine is not None or gpu is not None)
    warn_of_broken(chosen, printer)
    fits = (
        _everything(chosen, wishes, printer, what_if, json)
        if model is None
        else _one(model, chosen, wishes, printer, what_if, json, svg)
    )
    if not fits:
        raise typer.Exit(DoesNotFit.exit_code)


def _as_it_would_start(wishes: "Wishes", machine: "Machine") -> "tuple[Wishes, Machine]":
    """The plan that ``vlfit serve`` would start here: for the vLLM that it finds, which may be a build for
    processors; without one for the newest that is known.
    """
    from vlfit.backends.vllm.installed import find
    from vlfit.backends.vllm.planning import machine_for

    try:
        installed = find()
    except UsageError:
        return wishes, machine
    if wishes.vllm_version is None:
        wishes = replace(wishes, vllm_version=installed.version)
    return wishes, machine_for(installed, machine)


def _for_the_version_here(wishes: "Wishes", printer: Printer) -> "Wishes":
    """A plan for a card that was named is for the version of the vLLM that is found here, which is said: one
    for processors stands for the same version for GPUs.
    """
    from vlfit.backends.vllm.installed import find

    try:
        installed = find()
    except UsageError:
        return wishes
    version = installed.version.partition("+")[0]
    what = "build for processors" if installed.on_cpu else "vLLM"
    printer.note(
        f"planned for vLLM {version}: the {what} that was found ({installed.program[0]}) is of that version"
        f"{', and runs on no GPU itself' if installed.on_cpu else ''}; --vllm-version names another"
    )
    return replace(wishes, vllm_version=version)


def _kv_dtype(given: str | None) -> str | None:
    """The KV cache's dtype as ``given``, else as the environment has it; None for auto."""
    if given is None and not os.environ.get("VLFIT_KV_DTYPE"):
        return None  # the table of settings takes a fifth of a second to import
    from vlfit.settings import read_settings

    chosen = read_settings(kv_dtype=given).kv_dtype
    return None if chosen == "auto" else chosen


def _one(
    name: str,
    machine: "Machine",
    wishes: "Wishes",
    printer: Printer,
    what_if: bool,
    json: bool,
    svg: Path | None,
) -> bool:
    from vlfit.plan.search import plan
    from vlfit.plan.subjects import instead_of, named

    _card(machine, wishes)  # without a GPU there is nothing to ask a hub for
    try:
        found = named(name, wishes.weights)
    except UnknownArchitecture:
        if wishes.backend != "transformers":
            raise
        from vlfit.cli.plan_page import plan_any

        return plan_any(name, machine, wishes, printer, json=json)
    made = plan(found.exact, machine, wishes, lambda: instead_of(found.exact, name), found.makers)
    rows = (
        _what_if(machine, lambda other: plan(found.exact, other, wishes, makers=found.makers))
        if what_if
        else []
    )
    if svg is not None:
        _write(svg, made)
        printer.note(f"drawn into {svg}")
    if json:
        from vlfit.plan.report import facts, what_if_facts

        printer.data({**facts(made), **({"what_if": what_if_facts(rows)} if what_if else {})})
    else:
        from vlfit.cli.plan_page import page, what_if_page

        _show([page(made), *([what_if_page(rows)] if rows else [])])
    return made.fits


def _everything(machine: "Machine", wishes: "Wishes", printer: Printer, what_if: bool, json: bool) -> bool:
    gpu = _card(machine, wishes)
    plans = _all_plans(machine, wishes)
    if not plans:
        raise UsageError("no model of the catalog can have all of these wishes", "wish for less at once")
    rows = _what_if(machine, lambda other: _all_plans(other, wishes)[0]) if what_if else []
    if json:
        from vlfit.plan.report import table_facts

        printer.data(table_facts(plans, gpu, machine.host.wsl2, rows))
    else:
        from vlfit.cli.plan_page import table_page, what_if_page

        _show([table_page(plans, gpu), *([what_if_page(rows)] if rows else [])])
    return plans[0].fits


def _card(machine: "Machine", wishes: "Wishes") -> "Gpu":
    """What a plan is for. Raises ``DeviceError`` where there is no GPU, and the backend needs one."""
    from vlfit.plan.search import emptiest
    from vlfit.plan.vllm.cpu import ram_as_gpu

    in_ram = wishes.backend == Backend.vllm and not machine.gpus
    return ram_as_gpu(machine) if in_ram else emptiest(machine)


def _all_plans(machine: "Machine", wishes: "Wishes") -> "list[Plan]":
    """A plan for each model of the catalog that can have the wishes at all, best first."""
    from vlfit.plan.search import plan
    from vlfit.plan.subjects import everything, makers_of

    plans = []
    for model in everything(wishes.weights):
        try:
            plans.append(plan([model], machine, wishes, makers=makers_of([model])))
        except UsageError:
            continue  # a wish that only this model cannot have, such as pictures for a text-only one
    return sorted(plans, key=lambda each: each.rank)


def _what_if(machine: "Machine", planned: "Planner") -> "list[tuple[str, Plan]]":
    from vlfit.plan.search import variants

    return [(what, planned(other)) for what, other in variants(machine)]


def _show(pages: list[str]) -> None:
    """Pages as they are: they hold the terminal's colours, and what came from outside was made harmless."""
    try:
        sys.stdout.write("\n".join(pages) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise cannot_write(error) from error


def _write(file: Path, made: "Plan") -> None:
    from vlfit.plan.svg import draw

    try:
        file.write_text(draw(made), encoding="utf-8")
    except OSError as error:
        raise VlfitError(
            f"cannot write {file}: {error.strerror}", "name a file in a folder of yours"
        ) from None
