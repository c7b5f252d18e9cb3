"""``vlfit doctor``: checks this computer, or reads the log of a program that failed and names the cause.

Knows the words on the screen and the exit codes. Does not know what is checked, nor any cause: that is
``vlfit.doctor``.
"""

import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.machine import DesktopSize, GpuName, MachineFile, UnderWsl2, chosen_machine
from vlfit.cli.printing import Printer
from vlfit.errors import UsageError, VlfitError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from vlfit.doctor.checks import Check
    from vlfit.doctor.diagnose import Examined


EXAMPLES = """\b
Examples:
  vlfit doctor
  vlfit doctor --log vllm.log
  vllm serve Qwen/Qwen3-VL-4B-Instruct 2>&1 | vlfit doctor --log -
  sudo dmesg -T | vlfit doctor --log - --json
  vlfit doctor --log friend.log --gpu "RTX 5060" --desktop 951MiB --wsl2
"""

_WIDTH = 100
_SIGNS = {"green": ("ok", "green"), "yellow": ("look", "yellow"), "red": ("bad", "red")}


def doctor(
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Read this log (- for stdin) of vLLM, transformers, llama.cpp, Ollama or the kernel.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    machine: MachineFile = None,
    gpu: GpuName = None,
    desktop: DesktopSize = None,
    wsl2: UnderWsl2 = False,
) -> None:
    """Check this computer, or find in a log why a program failed, with the command that helps.

    Without --log: every check is green, yellow or red, and the exit code is 1 if any is red. With --log: the
    exit code is 1 if the cause is not found; the options of a machine say where the log comes from.
    """
    described = machine is not None or gpu is not None or desktop is not None or wsl2
    if log is None:
        if described:
            raise UsageError(
                "the checks look at this computer, and --machine and --gpu describe another",
                "with --log FILE they say where the log comes from; `vlfit plan` plans for another machine",
            )
        _check(Printer(json=as_json), as_json=as_json)
    else:
        from vlfit.doctor.diagnose import examine

        where = chosen_machine(machine, gpu, desktop, wsl2) if described else None
        with _opened(log) as stream:
            examined = examine(stream, where)
        _tell(examined, Printer(json=as_json), as_json=as_json)


def _check(printer: Printer, *, as_json: bool) -> None:
    from vlfit.doctor.checks import check_all, worst
    from vlfit.doctor.diagnose import checks_as_json
    from vlfit.settings import read_settings

    checks = check_all(read_settings().port)
    if as_json:
        printer.data(checks_as_json(checks))
    else:
        for check in checks:
            _show(check, printer)
    if worst(checks) == "red":
        raise typer.Exit(1)


def _show(check: "Check", printer: Printer) -> None:
    word, colour = _SIGNS[check.level]
    sign = typer.style(f"{word:<5}", fg=colour, bold=True) if sys.stdout.isatty() else f"{word:<5}"
    typer.echo(sign + _wrapped(check.says, "     "))
    if check.fix:
        printer.line("     " + _wrapped(f"-> {check.fix}", "        "))


def _tell(examined: "Examined", printer: Printer, *, as_json: bool) -> None:
    from vlfit.doctor.diagnose import UNKNOWN, diagnoses_as_json, diagnosis_lines

    if examined.characters == 0:
        raise VlfitError(
            "the log is empty", "vllm serve MODEL > vllm.log 2>&1 writes what it says into a file"
        )
    if as_json:
        printer.data(diagnoses_as_json(examined))
    else:
        for heading, text in diagnosis_lines(examined):
            if heading == "also":
                printer.line("")
            # Evidence and commands are shown as they are, so that they can be searched for and pasted.
            whole = heading in ("seen", "run")
            shown = text.replace("\n", "\n        ") if whole else _wrapped(text, " " * 8)
            printer.line(f"{heading:<8}{shown}")
    if not examined.diagnoses:
        raise VlfitError(*UNKNOWN)
    if examined.only_wrappers:
        raise typer.Exit(1)


def _wrapped(text: str, indent: str) -> str:
    lines = textwrap.wrap(text, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{indent}".join(lines)


@contextmanager
def _opened(log: str) -> "Iterator[BinaryIO]":
    """The log as a stream of bytes. Raises ``UsageError`` if there is none."""
    if log == "-":
        if sys.stdin.isatty():
            typer.echo("paste the log, then press Ctrl-D", err=True)
        yield sys.stdin.buffer
        return
    try:
        with Path(log).expanduser().open("rb") as stream:
            yield stream
    except OSError as error:
        raise UsageError(
            f"cannot read {log}: {error.strerror}", "--log takes a file, or - for stdin"
        ) from error
