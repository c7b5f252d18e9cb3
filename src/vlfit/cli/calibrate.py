"""``vlfit plan --calibrate``: measures this machine's GPU, keeps the numbers, and says what they are.

Knows words. Does not know how anything is measured (``engine/calibrate.py``, ``engine/tune.py``) or kept
(``plan/measured.py``, ``plan/tuned.py``).
"""

from typing import TYPE_CHECKING

from vlfit.cli.printing import Printer
from vlfit.errors import DeviceError, UsageError
from vlfit.units import MIB, format_bandwidth

if TYPE_CHECKING:
    from vlfit.machine.model import Machine
    from vlfit.plan.measured import Measured


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
    from vlfit.plan.measured import save
    from vlfit.plan.search import emptiest

    try:
        from vlfit.engine.calibrate import calibrate
        from vlfit.engine.tune import tune_gpu
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
