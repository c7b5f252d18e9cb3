"""``vlfit``: the commands and the exit codes: 0 ok, 1 failed, 2 wrong usage, 3 does not fit, 130 interrupted.

Imports nothing slow, so that ``vlfit --help`` is instant: each command imports what it needs when it runs.
"""

import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable
from functools import partial, partialmethod
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import typer
from typer.core import TyperCommand, TyperGroup

from vlfit._version import __version__
from vlfit.cli.ask import ask, caption, embed
from vlfit.cli.batch import batch
from vlfit.cli.bench import EXAMPLES as _BENCH_EXAMPLES
from vlfit.cli.bench import bench
from vlfit.cli.chat import chat
from vlfit.cli.convert import convert
from vlfit.cli.doctor import EXAMPLES as _DOCTOR_EXAMPLES
from vlfit.cli.doctor import doctor
from vlfit.cli.machine import EXAMPLES as _MACHINE_EXAMPLES
from vlfit.cli.machine import machine
from vlfit.cli.mcp import mcp
from vlfit.cli.models import models_app, pull
from vlfit.cli.options import SETTINGS, normalize_server_arguments
from vlfit.cli.plan import EXAMPLES as _PLAN_EXAMPLES
from vlfit.cli.plan import plan
from vlfit.cli.printing import print_error, stdout_error, wrap_command
from vlfit.cli.scene import detect, scene
from vlfit.cli.search import search
from vlfit.cli.servers import SLEEP_EXAMPLES as _SLEEP_EXAMPLES
from vlfit.cli.servers import STATUS_EXAMPLES as _STATUS_EXAMPLES
from vlfit.cli.servers import STOP_EXAMPLES as _STOP_EXAMPLES
from vlfit.cli.servers import WAKE_EXAMPLES as _WAKE_EXAMPLES
from vlfit.cli.servers import sleep, status, stop, wake
from vlfit.cli.serving.serve import ServeCommand, serve
from vlfit.cli.signals import INTERRUPTED, is_interrupt
from vlfit.cli.top import EXAMPLES as _TOP_EXAMPLES
from vlfit.cli.top import top
from vlfit.cli.verify import EXAMPLES as _VERIFY_EXAMPLES
from vlfit.cli.verify import verify
from vlfit.errors import CannotWrite, UsageError, VlfitError, plain_reason

_OTHER_VARIABLES = {"VLFIT_HOME", "VLFIT_DEBUG", "VLFIT_PREFIX_CACHE"}  # beside those of options


class _Command(TyperCommand):
    """A command whose help fits the terminal, examples too, and shows arguments without Python's types."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                record = partial(_untyped_record, parameter.get_help_record)
                parameter.get_help_record = record  # type: ignore[method-assign]

    def get_help(self, ctx: Any) -> str:
        _narrow(ctx)
        return _fit_examples(super().get_help(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [_usage_piece(piece) for piece in super().collect_usage_pieces(ctx)]


class _ServeCommand(ServeCommand, _Command):
    """``vlfit serve``."""


class _Group(TyperGroup):
    """Commands whose summaries are printed whole: typer would cut them off on a narrow terminal."""

    def get_help(self, ctx: Any) -> str:
        _narrow(ctx)
        return _fit_examples(super().get_help(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [
            (name, _summary(command.help or ""))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _Commands(_Group):
    """The commands; rewrites other programs' words and ``--backend remote URL`` before typer parses them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, normalize_server_arguments(translate_foreign_commands(args)))
        except OSError as error:
            if "--install-completion" not in args:
                raise
            place = error.filename or "its script"
            raise CannotWrite(
                f"completion is not installed: {place} cannot be written: {error.strerror}",
                "vlfit completion prints the script; save it where the shell looks for it.",
            ) from error


def _usage_piece(piece: str) -> str:
    """An argument in the usage line without typer's braces, and with one pair of brackets at most."""
    piece = re.sub(r"^\[(\[.*\])\](\.\.\.)?$", r"\1", piece)
    required = re.fullmatch(r"\{(.*)\}(\.\.\.)?", piece)
    if required is None:
        return piece
    name, more = required[1], required[2] or ""
    return name if "..." in name else name + more


def _untyped_record(record: Callable[[Any], Any], ctx: Any) -> Any:
    """An argument's line of help without its type: ``PICTURE`` in place of ``PICTURE <list[str]>``."""
    found = record(ctx)
    return found and (re.sub(r" <[^<>]+>$", "", found[0]), found[1])


def _narrow(ctx: Any) -> None:
    """Wrap help to a terminal narrower than click's least width, 50 columns, too."""
    columns = shutil.get_terminal_size().columns
    if columns < _LEAST_OF_CLICK + 2:
        ctx.terminal_width = max(columns, _LEAST_COLUMNS)
        # Of options longer than this the help begins on the next line.
        write_dl = partialmethod(ctx.formatter_class.write_dl, col_max=_NAMES_COLUMNS)
        ctx.formatter_class = type("_NarrowFormatter", (ctx.formatter_class,), {"write_dl": write_dl})


_LEAST_OF_CLICK = 50
_LEAST_COLUMNS = 30
_NAMES_COLUMNS = 8


def _fit_examples(help_text: str) -> str:
    """Continue examples wider than the terminal with backslashes.

    All else is wrapped already, but options with long values.
    """
    width = shutil.get_terminal_size().columns
    lines, inside = [], False
    for line in help_text.splitlines():
        command = line.strip()
        inside = command == "Examples:" or (inside and line.startswith(" "))
        first = line[: len(line) - len(line.lstrip())]
        if len(line) <= width or not first:
            lines.append(line)
        elif inside:
            lines.append(wrap_command(command, first, width=width))
        else:
            more = first + "  "
            lines += textwrap.wrap(
                line, width, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)


def _summary(help_text: str) -> str:
    """The first sentence of a command's help."""
    paragraph = " ".join(help_text.split("\n\n", 1)[0].split())
    return f"{paragraph.removesuffix('.').partition('. ')[0]}."


_OTHER_WORDS = {
    "ps": ["status"],
    "list": ["models"],
    "ls": ["models"],
    "rm": ["models", "rm"],
    "version": ["--version"],
}


def translate_foreign_commands(arguments: list[str]) -> list[str]:
    """Replace a command that Ollama, docker or pip have (``ps``, ``list``, ``rm``) by vlfit's own.

    ``run MODEL`` becomes ``chat``, or ``ask`` if a question follows; ``help COMMAND`` becomes
    ``COMMAND --help``.
    """
    at = next((index for index, word in enumerate(arguments) if not word.startswith("-")), None)
    if at is None:
        return arguments
    before, word, after = arguments[:at], arguments[at], arguments[at + 1 :]
    if word in _OTHER_WORDS:
        return [*before, *_OTHER_WORDS[word], *after]
    if word == "help":
        return [*before, *after, "--help"]
    if word != "run":
        return arguments
    named = after[:1] and not after[0].startswith("-") and not Path(after[0]).is_file()
    model, rest = (["--model", after[0]], after[1:]) if named else ([], after)
    has_question = rest and not rest[-1].startswith("-") and " " in rest[-1].strip()
    return [*before, "ask" if has_question else "chat", *model, *rest]


app = typer.Typer(
    name="vlfit",
    cls=_Commands,
    # Plain help: it reads the same in a terminal, in a pipe and in docs/cli.md.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vlfit {__version__}")
        raise typer.Exit


@app.callback()
def vlfit(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.  [env VLFIT_DEBUG]")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run vision-language models on your own GPU: captions, answers, boxes.

    Answers go to stdout, everything else to stderr. Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 does not
    fit in memory, 130 interrupted.

    \b
    Examples:
      vlfit caption photo.jpg
      vlfit ask photo.jpg "What colour is the car?"
      vlfit scene photo.jpg --json
      vlfit detect photo.jpg "cups" --draw found.png
      vlfit chat photo.jpg
      vlfit serve
    """
    if debug:
        # `main` reads it there, and so do servers started from here.
        os.environ["VLFIT_DEBUG"] = "1"


_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def _shells(incomplete: str) -> list[str]:
    return [shell for shell in _SHELLS if shell.startswith(incomplete)]


def completion(
    shell: Annotated[
        str | None,
        typer.Argument(
            metavar="[SHELL]",
            help="bash, zsh, fish or powershell.  [default: that of the variable SHELL]",
            autocompletion=_shells,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the script that completes vlfit's commands in a shell.

    `vlfit --install-completion` writes it where the shell looks for it. Completes commands, options, models,
    backends and cards.

    \b
    Examples:
      vlfit completion bash >> ~/.bashrc
      vlfit completion zsh > ~/.zfunc/_vlfit
      vlfit completion fish > ~/.config/fish/completions/vlfit.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell is None:
        shell = Path(os.environ.get("SHELL", "")).name
        if shell not in _SHELLS:
            raise UsageError("no shell is named, and SHELL names none that is known", _COMPLETION_HINT)
    elif shell not in _SHELLS:
        raise UsageError(f"there is no completion for {shell[:40]!r}", _COMPLETION_HINT)
    typer.echo(get_completion_script(prog_name="vlfit", complete_var="_VLFIT_COMPLETE", shell=shell))


_COMPLETION_HINT = "Write vlfit completion bash, zsh, fish or powershell."

_PULL_EXAMPLES = """\b
Examples:
  vlfit pull 4B
  vlfit pull Qwen/Qwen3-VL-2B-Instruct-FP8
  HF_HOME=/data/hub vlfit pull 4B-FP8
"""

_CONVERT_EXAMPLES = """\b
Examples:
  vlfit convert 8B --weights int4
  vlfit convert ~/models/my-qwen3-vl --weights fp8 --out /data/my-qwen3-vl-fp8
  vlfit convert mini -w fp8 && vlfit caption photo.jpg --model mini-FP8
"""

_MODELS_HELP = """List or remove checkpoints on this computer.

\b
Examples:
  vlfit models
  vlfit models --json
  vlfit models rm 2B-FP8
  vlfit models rm unsloth/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M
"""

app.command(cls=_Command)(caption)
app.command(cls=_Command)(ask)
app.command(cls=_Command)(scene)
app.command(cls=_Command)(detect)
app.command(cls=_Command)(batch)
app.command(cls=_Command)(embed)
app.command(cls=_Command)(search)
app.command(cls=_Command)(chat)
app.command(cls=_ServeCommand)(serve)
app.command(cls=_Command)(mcp)
app.command(cls=_Command, epilog=_STATUS_EXAMPLES)(status)
app.command(cls=_Command, epilog=_STOP_EXAMPLES)(stop)
app.command(cls=_Command, epilog=_SLEEP_EXAMPLES)(sleep)
app.command(cls=_Command, epilog=_WAKE_EXAMPLES)(wake)
app.command(cls=_Command, epilog=_PULL_EXAMPLES)(pull)
app.command(cls=_Command, epilog=_CONVERT_EXAMPLES)(convert)
app.command(cls=_Command, epilog=_MACHINE_EXAMPLES)(machine)
app.command(cls=_Command, epilog=_PLAN_EXAMPLES)(plan)
app.command(cls=_Command, epilog=_BENCH_EXAMPLES)(bench)
app.command(cls=_Command, epilog=_VERIFY_EXAMPLES)(verify)
app.command(cls=_Command, epilog=_DOCTOR_EXAMPLES)(doctor)
app.command(cls=_Command, epilog=_TOP_EXAMPLES)(top)
app.command(cls=_Command)(completion)
for each in models_app.registered_commands:
    each.cls = _Command
app.add_typer(models_app, name="models", cls=_Group, help=_MODELS_HELP)


def main() -> None:
    """Run ``vlfit`` on ``sys.argv`` and exit. Errors are printed as a message and a hint, no traceback."""
    try:
        _open_closed_streams()
        _escape_unencodable()
        _warn_of_misspelt_variables()
        try:
            code = app(prog_name="vlfit", standalone_mode=False)
        finally:
            _flush_stdout()
    except BrokenPipeError:
        # The reader of stdout has closed it (`| head`).
        _discard_stdout()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except typer.Abort as abort:  # a question answered with no, by the end of the input, or with Ctrl-C
        if is_interrupt(abort):
            typer.echo(err=True)  # ends the question's line
            sys.exit(INTERRUPTED)
        print_error(VlfitError("nothing was done"))
        sys.exit(1)
    except _ClickError as error:
        sys.exit(_report_usage(error))
    except VlfitError as error:
        _print_traceback_if_debugging()
        print_error(error)
        sys.exit(error.exit_code)
    except Exception as error:
        if _is_full_stdout(error):
            print_error(stdout_error(error))
            sys.exit(1)
        _print_traceback_if_debugging()
        hint = "This is a bug in vlfit: `vlfit --debug ...` shows the traceback."
        if isinstance(error, RuntimeError) and not _has_home():
            hint = "Set HOME to a folder that this user may write in."
        print_error(VlfitError(f"{type(error).__name__}: {error}", hint))
        sys.exit(1)
    # The exit code of `typer.Exit`; commands return None.
    sys.exit(code if isinstance(code, int) else 0)


# typer exports this one of click's errors, and carries a copy of click with it or not.
_ClickError: type[Exception] = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)


def _is_full_stdout(error: Exception) -> TypeGuard[OSError]:
    """Whether ``error`` is a write to a full disk that no command has handled: to stdout, without a buffer.

    With a buffer ``_flush_stdout`` fails again; with PYTHONUNBUFFERED each of many writers may.
    """
    from vlfit.atomic_write import is_no_space

    return isinstance(error, OSError) and error.filename is None and is_no_space(error)


def _has_home() -> bool:
    """Whether this user has a home folder; in a container a number may be all that is known of it."""
    try:
        Path.home()
    except RuntimeError:
        return False
    return True


def _report_usage(error: Any) -> int:
    """Print one of click's errors about arguments as all errors are printed; return its exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    text = " ".join(error.format_message().split())
    message, _, suggestion = text.partition(" Did you mean ")
    if not suggestion:
        message, _, suggestion = text.partition(" (Possible options: ")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else _typed_command()
    hint = f"{command} --help lists all."
    more = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)\.?", text)
    if more is not None and command.endswith(" detect"):
        things = getattr(context, "params", {}).get("things") or ""
        hint = f"{_how_to_quote_things(things, more[1])} {hint}"
    if getattr(error, "option_name", "") == "--mmproj" and command.endswith((" plan", " doctor")):
        hint = f"Write the vision tower's file behind the model's: MODEL.gguf+MMPROJ.gguf. {hint}"
    if suggestion:
        # "'status'?", or "--context, --seed)"
        hint = f"Did you mean {suggestion.rstrip('?)')}? {hint}"
    elif (parameter := getattr(error, "param", None)) is not None:
        hint = f"{_how_to_write(parameter)} {command} --help says more."
        before, separator, reason = message.partition(": ")
        message = before + separator + plain_reason(reason)
    print_error(VlfitError(message[:1].lower() + message[1:].rstrip("."), hint))
    return int(error.exit_code)


def _typed_command() -> str:
    """The command that was typed, ``vlfit models rm``, for an error that click does not say it of."""
    path, group = "vlfit", typer.main.get_command(app)
    for word in translate_foreign_commands(sys.argv[1:]):
        commands = getattr(group, "commands", {})
        if word in commands:
            path, group = f"{path} {word}", commands[word]
        elif not word.startswith("-"):
            break
    return path


def _how_to_quote_things(things: str, more: str) -> str:
    """How to write the objects that ``vlfit detect`` took for ``more`` arguments after ``things``."""
    if Path(things).is_file():
        return "It takes one picture, then the things."
    whole = shlex.quote(", ".join(word.rstrip(",") for word in (things, *more.split())))
    return f"Things are one argument, in quotes: vlfit detect PICTURE {whole}."


def _how_to_write(parameter: Any) -> str:
    """An option or argument as it is typed, and the first sentence of its help."""
    typed = parameter.opts[0] if parameter.param_type_name == "option" else ""
    sentence = (getattr(parameter, "help", None) or "").partition("  [")[0].partition(". ")[0].rstrip(".")
    written = f"{typed} {parameter.metavar or ''}".strip()
    if sentence[1:2].islower():  # no acronym
        sentence = sentence[:1].lower() + sentence[1:]
    return f"Write {written}: {sentence}." if sentence else f"Write {written}."


def _open_closed_streams() -> None:
    """Read a closed stdin as empty and drop what goes to a closed stderr.

    Else the next file that is opened would become theirs. Raises ``VlfitError`` if stdout is closed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        raise VlfitError("stdout is closed, and answers go there", "Write to a file, or to /dev/null.")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _flush_stdout() -> None:
    """Flush stdout. Raises ``VlfitError`` if it cannot be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        raise stdout_error(error) from error


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null: the interpreter flushes again at exit and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn_of_misspelt_variables() -> None:
    """Warn on stderr of each ``VLFIT_...`` variable that is no setting, but nearly is: it has no effect."""
    known = {f"VLFIT_{name.upper()}" for name in SETTINGS} | _OTHER_VARIABLES
    unknown = [name for name in os.environ if name.startswith("VLFIT_") and name not in known]
    if not unknown or "_VLFIT_COMPLETE" in os.environ:
        return
    from difflib import get_close_matches

    for name in unknown:
        if near := get_close_matches(name, known, 1, 0.9):
            typer.echo(f"warning: {name} has no effect. Did you mean {near[0]}?", err=True)


def _print_traceback_if_debugging() -> None:
    if os.environ.get("VLFIT_DEBUG", "").lower() in ("1", "true", "yes", "on"):
        traceback.print_exc()


def _escape_unencodable() -> None:
    """Escape characters that the terminal's encoding lacks instead of failing."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # tests and host programs may replace them
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")


if __name__ == "__main__":
    main()
