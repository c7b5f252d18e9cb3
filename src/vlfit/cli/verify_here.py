"""One model verified in this process, for ``vlfit verify`` and ``vlfit pull --verify``; and the offer."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from vlfit.cli.options import engine_options
from vlfit.cli.printing import Printer, wrap
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.api.engine_options import EngineOptions
    from vlfit.api.stats import EngineSettings
    from vlfit.backends.base import Backend
    from vlfit.machine.model import Gpu
    from vlfit.parity.findings import CheckProgress, Level
    from vlfit.plan.actual import Expectation, Row
    from vlfit.settings import Settings
    from vlfit.verify.verify_run import VerifyResult

SETTINGS = (
    *("device", "dtype", "context", "kv_dtype", "image_tokens", "chunk", "offload", "speculate", "kernels"),
)


def verify_here(name: str, wanted: "EngineOptions", level: "Level", printer: Printer) -> "VerifyResult":
    """Verify the model ``name``, which is on this computer, and keep the result; progress goes to stderr.

    ``wanted``: options of its engine. Raises what opening and loading it raise.
    """
    from vlfit.api.engine_options import EngineOptions
    from vlfit.backends.held_memory import engine_gpu, expected_memory, ledger_rows
    from vlfit.backends.native import NativeBackend
    from vlfit.bench.card_row import driver_text
    from vlfit.bench.results import cpu_name, versions_of
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.machine.gpu import gpu_of_device, read_gpus
    from vlfit.machine.survey import survey
    from vlfit.plan.processors import measured_machine, ram_as_gpu
    from vlfit.verify.verify_outcome import keep_result, planned_model, with_prediction
    from vlfit.verify.verify_report import unusual_run
    from vlfit.verify.verify_run import SPEED_TOKENS
    from vlfit.verify.verify_run import verify as run

    checkpoint = open_checkpoint(name)
    gpus_before, _ = read_gpus()
    machine: dict[str, str] = {}
    ran_with: list[EngineSettings] = []

    def load(chosen: "EngineOptions") -> "Backend":
        backend = NativeBackend.load(checkpoint, chosen)
        ran_with.append(backend.account().settings)
        gpu = engine_gpu(backend.account(), gpus_before)
        machine["device"] = cpu_name() if gpu is None else gpu.name
        if gpu is not None:
            machine["driver"] = driver_text(gpu)
        return backend

    def promise(backend: "Backend") -> "tuple[tuple[Row, ...], Expectation]":
        account = backend.account()
        expectation = expected_memory(backend, gpus_before)
        if wanted.kernels != "auto":  # the plan predicts the kernels' speed
            expectation = replace(expectation, expected=None, slowest=None)
        rows = ledger_rows(account, engine_gpu(account, read_gpus()[0]), expectation)
        return (rows if expectation.lines else ()), expectation

    def say(progress: "CheckProgress") -> None:
        printer.note(f"  {progress.done + 1} of {progress.total}: {progress.name}")

    printer.note(f"{checkpoint.name}: loading, and measuring its speed")
    versions = versions_of("vlfit", "torch", "triton")
    result = run(checkpoint, wanted, level, load, promise, machine, versions, say)
    settings = ran_with[0]
    result = replace(result, unusual=unusual_run(wanted, settings))
    gpu: Gpu | None
    if settings.device == "cpu":
        gpu = ram_as_gpu(here := survey())
        if gpu.bandwidth is None:  # measured once, after the model: it takes a second of all cores
            gpu = ram_as_gpu(measured_machine(here))
    else:
        gpu = gpu_of_device(gpus_before, settings.gpu_uuid, settings.device)
    if gpu is None:  # NVML does not list it: nothing names this card
        return result
    model = planned_model(checkpoint, name)
    if model is not None and result.speed is not None and wanted.kernels == "auto":
        speed = with_prediction(result.speed, model, gpu, settings, SPEED_TOKENS[level])
        result = replace(result, speed=speed)
    usual = EngineOptions(device=wanted.device)
    as_planned = (wanted.dtype, wanted.kv_dtype, wanted.offload, wanted.kernels) == (
        usual.dtype,
        usual.kv_dtype,
        usual.offload,
        usual.kernels,
    )
    try:
        keep_result(
            result,
            gpu,
            model,
            as_planned=as_planned,
            torch=versions.get("torch", ""),
            vlfit=versions.get("vlfit", ""),
        )
    except UsageError as error:
        printer.note(error.message)
    return result


def offer_verification(
    name: str, device: str, gpu_uuid: str, weights_format: str, printer: Printer, *, json: bool
) -> None:
    """Say, once for a device and a format, that ``vlfit verify`` checks the model ``name`` that runs there.

    Only on a terminal, not if quiet or with ``json``, and not where a result is kept. ``device``: torch's
    name, ``gpu_uuid``: "" if it is not known.
    """
    if json or not printer.on_terminal:
        return
    from vlfit.machine.gpu import gpu_of_device, read_gpus
    from vlfit.machine.processor import read_processor
    from vlfit.plan.native.verified import Device, device_of, offer_once

    gpu = None if device == "cpu" else gpu_of_device(read_gpus()[0], gpu_uuid, device)
    if gpu is not None:
        where = device_of(gpu)
    elif device in ("cpu", "auto"):
        processor = read_processor()
        where = Device(processor.name, "", processor.threads)
    else:  # NVML does not list it
        return
    if offer_once(where, weights_format):
        printer.note(
            f"new here: `vlfit verify {shlex.quote(name)}` checks that {where.name} computes it rightly"
            " (--quick: in short)"
        )


def verify_options(settings: "Settings") -> "EngineOptions":
    """The engine options that verify takes, from ``settings``."""
    return engine_options(settings, *SETTINGS)


def report_text(result: "VerifyResult") -> str:
    """The ten lines, as wide as the terminal."""
    from vlfit.verify.verify_report import report_lines

    return "\n".join(
        wrap(line[15:], line[:15]) if line[12:15] == "   " else wrap(line) for line in report_lines(result)
    )
