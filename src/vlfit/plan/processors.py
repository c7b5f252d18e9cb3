"""The processor that a plan without a GPU is for: its RAM in place of a card, its speeds measured and kept.

``measured_machine`` measures this computer's processor once, in about a second, and keeps the numbers beside
the calibrations of GPUs. A measurement that other programs disturbed is made again by the next plan, and the
better numbers are kept.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from vlfit.errors import UsageError
from vlfit.machine import processor as processors
from vlfit.machine.model import Gpu, Machine, Processor, record_from_json, record_to_json
from vlfit.plan.calibration import cache_path, read_json_record, write_atomically
from vlfit.plan.wishes import CPU
from vlfit.units import counted, format_bandwidth

# Of models that most laptops are quick enough for: what is recommended where no speed is known. A choice.
MOST_PARAMETERS = 2_500_000_000
LEAST_TOKENS_PER_S = 6.0  # of what is recommended where it is: as fast as one reads, a choice
VERSION = 2  # 1: bandwidth was measured otherwise
_MOST = 2**16  # bytes of a file; real ones have some hundred
_CAPABILITY = (99, 0)  # of RAM in place of a card: it has bfloat16 and all kernels
_UNKNOWN = "a processor that the machine file does not describe"


_ANY = Processor(_UNKNOWN, "", ("avx2", "fma", "f16c"), 1, compiles=True)


@dataclass(frozen=True, slots=True)
class Ram(Gpu):
    """A machine's RAM in place of a card, to plan with; ``processor`` computes in it."""

    processor: Processor = _ANY


def ram_as_gpu(machine: Machine) -> Ram:
    """The machine's RAM as a ``Gpu`` named CPU.

    ``total`` and ``free`` are the RAM and what is available of it, ``bandwidth`` is that of the processor, if
    the machine has it or it was kept from an earlier measurement. A processor that the machine does not
    describe is taken for one with AVX2 and a C compiler.
    """
    host = machine.host
    processor = host.processor or replace(_ANY, threads=host.cores)
    processor = with_kept_speeds(processor)
    return Ram(
        index=0,
        name="CPU",
        total=host.ram_total,
        free=host.ram_available,
        desktop=host.ram_total - host.ram_available,
        processes=(),
        driver="",
        cuda="",
        compute_capability=_CAPABILITY,
        bandwidth=processor.bandwidth,
        bandwidth_how="unknown" if processor.bandwidth is None else "measured",
        pcie_bandwidth=None,
        processor=processor,
    )


def is_ram(gpu: Gpu) -> bool:
    """Whether ``gpu`` stands for RAM (``ram_as_gpu``)."""
    return isinstance(gpu, Ram)


def describe_processor(processor: Processor) -> str:
    """Name, threads, units and speeds in words."""
    units = _UNIT_NAMES.get(processors.vector_level(processor, {}).partition("_")[0], "")
    extra = [name for unit, name in _FURTHER_UNITS.items() if unit in processor.units]
    parts = [processor.name, counted(processor.threads, "thread")]
    parts += [each for each in (units, *extra) if each]
    if processor.bandwidth is None or processor.multiplications is None:
        return f"{', '.join(parts)}; not measured"
    how = f" (measured {processor.measured})" if processor.measured else ""
    return (
        f"{', '.join(parts)}; reads {format_bandwidth(processor.bandwidth)}, "
        f"{processor.multiplications / 1e9:,.0f} GFLOP/s in float32{how}"
    )


_UNIT_NAMES = {"amx": "AVX-512", "avx512": "AVX-512", "avx2": "AVX2"}
_FURTHER_UNITS = {"avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX", "asimd": "NEON", "sve": "SVE"}


def with_kept_speeds(processor: Processor) -> Processor:
    """``processor`` with speeds: its own, else those kept of a processor of its name and threads, if any."""
    if processor.bandwidth is not None and processor.multiplications is not None:
        return processor
    return load(processor) or processor


# --- speeds, measured once and kept ------------------------------------------------------------------------


def measured_machine(machine: Machine, *, again: bool = False) -> Machine:
    """This computer with the speeds of its processor: kept ones, or measured now, which takes a second.

    ``machine``: from ``survey``. ``again``: measure in any case, and keep only that. What was measured while
    other programs ran is measured once more, and the better numbers are kept. A file that cannot be written
    or read does no harm: then each call measures.
    """
    processor = machine.host.processor
    if processor is None:
        return machine
    kept = None if again else load(processor)
    if kept is None or not kept.quiet:
        now = processors.measure(processor)
        kept = now if kept is None else _better(now, kept)
        with suppress(UsageError):
            save(kept)
    return replace(machine, host=replace(machine.host, processor=kept))


def this_computer(device: str | None = None) -> Machine:
    """This computer, as ``survey`` finds it; if it has no GPU, with its processor measured.

    ``device``: as for ``for_device``. See ``measured_machine``.
    """
    from vlfit.machine.survey import survey

    machine = for_device(survey(), device)
    return machine if machine.gpus else measured_machine(machine)


def for_device(machine: Machine, device: str | None) -> Machine:
    """``machine``, without its GPUs if ``device`` (as ``--device`` has it) is ``cpu``."""
    return replace(machine, gpus=()) if device == CPU else machine


def _better(one: Processor, other: Processor) -> Processor:
    """The higher speeds of two measurements."""

    def best(speeds: Iterable[int | None]) -> int | None:
        return max((speed for speed in speeds if speed is not None), default=None)

    return replace(
        one,
        bandwidth=best((one.bandwidth, other.bandwidth)),
        multiplications=best((one.multiplications, other.multiplications)),
    )


def speeds_path(processor: Processor) -> Path:
    """The file with the speeds of processors of this name and thread count; it may not exist."""
    return cache_path("calibration", "cpu", processor.name, f"{processor.threads}-threads")


def save(processor: Processor) -> Path:
    """Keep the speeds of ``processor``; returns the file. Raises ``UsageError`` if it cannot be written."""
    path = speeds_path(processor)
    words = json.dumps({"version": VERSION, **record_to_json(processor)}, indent=2) + "\n"
    write_atomically(path, words, "measurement of the processor")
    return path


def load(processor: Processor) -> Processor | None:
    """``processor`` with the speeds kept of one of its name and threads; None without a readable file."""
    try:
        facts = read_json_record(speeds_path(processor), _MOST)
    except OSError:
        return None
    if not isinstance(facts, dict) or facts.pop("version", None) != VERSION:
        return None
    try:
        kept = record_from_json(Processor, {key: facts[key] for key in facts if key in _FIELDS})
        kept.check()
    except UsageError:
        return None
    if (kept.name, kept.threads) != (processor.name, processor.threads):
        return None
    return replace(
        processor,
        bandwidth=kept.bandwidth,
        multiplications=kept.multiplications,
        measured=kept.measured,
        quiet=kept.quiet,
    )


_FIELDS = {field.name for field in fields(Processor)}
