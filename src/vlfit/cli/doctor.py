"""``vlfit doctor``: check this computer, or find the cause of a failure in a log."""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.machine import machine_from_options
from vlfit.cli.options import MACHINE, CommandOptions, complete_model, takes_options
from vlfit.cli.printing import PAGE_WIDTH, Printer, is_styled, wrap, wrap_command
from vlfit.errors import UsageError, VlfitError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from vlfit.doctor.checks import Check
    from vlfit.doctor.diagnose import LogReport


EXAMPLES = """\b
Examples:
  vlfit doctor
  vlfit doctor --model ollama:qwen3-vl:4b
  vlfit doctor --log vllm.log
  vlfit doctor verified.json
  vllm serve Qwen/Qwen3-VL-4B-Instruct 2>&1 | vlfit doctor --log -
  sudo dmesg -T | vlfit doctor --log - --json
  vlfit doctor --log friend.log --gpu "RTX 5060" --desktop 951MiB --wsl2
"""

_SIGNS = {"green": ("ok", "green"), "yellow": ("look", "yellow"), "red": ("bad", "red")}


@takes_options("json", *MACHINE)
def doctor(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="The same as --log.", show_default=False)
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Log of vLLM, transformers, llama.cpp, Ollama or the kernel, or a report of vlfit verify; -"
            " reads stdin.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            autocompletion=complete_model,
            help="Check the files of a model instead: whole, undamaged, of one model. MODEL.gguf+MMPROJ.gguf"
            " checks a pair.",
        ),
    ] = None,
    *,
    options: CommandOptions,
) -> None:
    """Check this computer or a model's files, or explain a failure in a log or a report of vlfit verify.

    Prints a command that helps. Without --log: every check is green, yellow or red; exit code 1 if any is
    red. With --log: exit code 1 if no cause is found; --machine or --gpu describe the machine the log is
    from.
    """
    if file is not None and log is not None:
        raise UsageError("FILE and --log are the same", "Name one file.")
    log = file if log is None else log
    if log is not None and model is not None:
        raise UsageError("--log and --model exclude each other", "Leave one of them out.")
    is_described = any(getattr(options, name) not in (None, False) for name in MACHINE)
    if log is None:
        if is_described:
            raise UsageError(
                "the checks are for this computer, but --machine and --gpu describe another",
                "Give --log FILE of that machine, or plan for it with vlfit plan.",
            )
        _run_checks(model, Printer(json=options.json), as_json=options.json)
    else:
        from vlfit.doctor.diagnose import diagnose_log

        where = machine_from_options(options) if is_described else None
        with _open_log(log) as stream:
            examined = diagnose_log(stream, where)
        if not examined.diagnoses:
            _refuse_binary_file(log)
        _print_diagnoses(examined, Printer(json=options.json), as_json=options.json)


def _refuse_binary_file(log: str) -> None:
    """Raise ``VlfitError`` if the file ``log`` is not text. PowerShell writes UTF-16, which is."""
    if log == "-":
        return
    with open(log, "rb") as file:
        head = file.read(1024)
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise VlfitError(
            f"{log} is not text",
            "Give what the program printed: vllm serve MODEL > vllm.log 2>&1; vlfit doctor --log vllm.log",
        )


def _run_checks(model: str | None, printer: Printer, *, as_json: bool) -> None:
    """Check this computer, or the files of ``model``."""
    from vlfit.doctor.checks import check_all, worst_level
    from vlfit.doctor.diagnose import checks_as_json

    if model is None:
        from vlfit.settings import read_settings

        checks = check_all(read_settings().port)
    else:
        from vlfit.doctor.model_check import check_model

        checks = check_model(model)
    if as_json:
        printer.data(checks_as_json(checks))
    else:
        for check in checks:
            _print_check(check, printer)
    if worst_level(checks) == "red":
        raise typer.Exit(1)


def _print_check(check: "Check", printer: Printer) -> None:
    word, colour = _SIGNS[check.level]
    sign = typer.style(f"{word:<5}", fg=colour, bold=True) if is_styled(sys.stdout.isatty()) else f"{word:<5}"
    typer.echo(sign + wrap(check.says, " " * 5, most=PAGE_WIDTH)[5:])
    if check.fix:
        printer.line(wrap(check.fix, "     -> ", most=PAGE_WIDTH))


def _print_diagnoses(examined: "LogReport", printer: Printer, *, as_json: bool) -> None:
    from vlfit.doctor.diagnose import NO_DIAGNOSIS, diagnoses_as_json, diagnosis_lines

    if examined.characters == 0:
        raise VlfitError("the log is empty", "Write one with: vllm serve MODEL > vllm.log 2>&1")
    if as_json:
        printer.data(diagnoses_as_json(examined))
    else:
        for heading, text in diagnosis_lines(examined):
            if heading == "also":
                printer.line("")
            start = f"{heading:<8}"
            if heading in ("run", "seen"):  # whole in a file, where it is searched for or copied from
                fit = wrap_command if heading == "run" else wrap
                starts = [start, *[" " * len(start)] * text.count("\n")]
                printer.line("\n".join(map(fit, text.splitlines(), starts)))
            else:
                printer.line(wrap(text, start, most=PAGE_WIDTH))
    if not examined.diagnoses:
        raise VlfitError(*NO_DIAGNOSIS)
    if examined.only_wrappers:
        raise typer.Exit(1)


@contextmanager
def _open_log(log: str) -> "Iterator[BinaryIO]":
    """The log as a byte stream. Raises ``UsageError`` if it cannot be read."""
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
            f"cannot read {log}: {error.strerror}", "Give --log a file, or - for stdin."
        ) from error
