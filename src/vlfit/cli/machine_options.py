"""The options that say which machine is meant, for every command that plans: this one, a file's, or a card's.

Knows their names and how they exclude each other. Does not know how a machine is surveyed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.errors import UsageError
from vlfit.units import parse_bytes

if TYPE_CHECKING:
    from vlfit.machine.model import Machine

MachineFile = Annotated[
    Path | None,
    typer.Option(
        "--machine",
        metavar="FILE",
        help="A machine that `vlfit machine --save` wrote down, instead of this one; - reads stdin.",
    ),
]
GpuName = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help='This computer with another card, e.g. "RTX 5060" or "4060 Ti 16GB"; vlfit machine --cards lists'
        " them.",
    ),
]
DesktopSize = Annotated[
    str | None,
    typer.Option(
        "--desktop",
        metavar="SIZE",
        help="With --gpu: what other programs hold of the card, e.g. 951MiB.  [default: 0]",
    ),
]
UnderWsl2 = Annotated[bool, typer.Option("--wsl2", help="With --gpu: the card is used from WSL2.")]


def chosen_machine(
    machine: Path | None = None, gpu: str | None = None, desktop: str | None = None, wsl2: bool = False
) -> "Machine":
    """The machine that was asked for; this computer as it is now if nothing was.

    Raises ``UsageError`` for options that contradict each other, a card that is not in the table, a size that
    is none, and a file that is no machine file.
    """
    if machine is not None and gpu is not None:
        raise UsageError("--machine and --gpu both say which machine is meant", "leave one of them out")
    if gpu is None and (desktop is not None or wsl2):
        name = "--desktop" if desktop is not None else "--wsl2"
        raise UsageError(
            f"{name} describes a card that --gpu names", f'e.g. --gpu "RTX 5060" {name}'.rstrip()
        )
    if machine is not None:
        from vlfit.machine.file import load_machine

        return load_machine(machine)
    if gpu is not None:
        from vlfit.machine.cards import card

        return card(gpu, 0 if desktop is None else parse_bytes(desktop, "--desktop"), wsl2)
    from vlfit.machine.survey import survey

    return survey()
