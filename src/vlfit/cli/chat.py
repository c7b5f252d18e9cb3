"""``vlfit chat``: a conversation in a terminal, or one message per line from a pipe."""

import glob
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.ask import JSON_LINES
from vlfit.cli.options import ANSWERING, CommandOptions, takes_options
from vlfit.errors import UsageError, VlfitError

if TYPE_CHECKING:
    from vlfit.cli.session import Session
    from vlfit.client import ChatSession
    from vlfit.tasks.files import FilePart


_HELP = """  /image PICTURE   add pictures (files, globs or URLs) to your next message
  /reset           forget the conversation
  /help            show this list
  /quit            exit (as do /bye, /exit and Ctrl-D)
  Ctrl-C           stop the answer; at the prompt, exit"""

_ENDINGS = (["/quit"], ["/bye"], ["/exit"])


@takes_options(*ANSWERING, json=JSON_LINES)
def chat(
    pictures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PICTURE", help="Pictures for the first message: files, globs, URLs.", show_default=False
        ),
    ] = None,
    system: Annotated[
        str,
        typer.Option("--system", metavar="TEXT", help="System prompt.", show_default=False),
    ] = "",
    *,
    options: CommandOptions,
) -> None:
    """Chat about pictures.

    Type /help for the commands. Samples with the checkpoint's own settings unless --temperature is given.
    Ctrl-C stops an answer; at the prompt it exits. If stdin is not a terminal, each line is a message.

    \b
    Examples:
      vlfit chat
      vlfit chat photo.jpg --system "Answer in one word."
      printf 'What is this?\\nWhat colour is it?\\n' | vlfit chat photo.jpg
    """
    from vlfit.cli.session import Session

    with Session(options) as session:
        conversation = _Conversation(session, system)
        if pictures:
            conversation.add_pictures(pictures)
        conversation.run()


class _Conversation:
    """The conversation: reads lines, and holds pictures for the next message."""

    def __init__(self, session: "Session", system: str) -> None:
        self._session = session
        self._printer = session.printer
        self._pictures: list[FilePart] = []
        self._interactive = sys.stdin.isatty()
        self._failed = False
        self._system = system

    @cached_property
    def _chat(self) -> "ChatSession":
        """The conversation with the model, which is opened after its first pictures are read."""
        return self._session.model.chat(system=self._system, **self._session.sampling)

    def run(self) -> None:
        """Answer lines until the input ends. Exits with 1 if a line from a pipe failed."""
        _ = self._chat
        if self._interactive:
            self._printer.note(f"{self._session.model.model}; /help lists the commands")
        for line in _lines(self._interactive):
            if line.split()[:1] in _ENDINGS:
                break
            try:
                self._handle(line)
            except VlfitError as error:
                self._report(error)
        if self._failed and not self._interactive:
            raise typer.Exit(1)

    def add_pictures(self, patterns: list[str]) -> None:
        """Hold pictures for the next message."""
        from vlfit.cli.session import expand_patterns
        from vlfit.tasks.pictures import source_label

        if "-" in patterns and not self._interactive:
            raise UsageError(
                "- would read a picture from stdin, where the messages come from", "Name a file."
            )
        names = expand_patterns(patterns)
        self._pictures += [self._session.load(name) for name in names]
        _ = self._chat  # whoever is asked for a download is asked first
        self._printer.note(f"  showing {', '.join(map(source_label, names))} with your next message")

    def _handle(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/image":
            if not rest.strip():
                raise UsageError("/image needs a picture", "Write /image photo.jpg.")
            self.add_pictures(_picture_names(rest.strip()))
        elif command == "/reset":
            self._chat.reset()
            self._pictures.clear()
            self._printer.note("  conversation forgotten")
        elif command == "/help":
            self._printer.note(_HELP)
        elif command.startswith("/") and command[1:].isalpha():
            raise UsageError(f"unknown command {command}", "Type /help for the commands.")
        elif line:
            self._answer(line)

    def _answer(self, text: str) -> None:
        words = self._chat.stream(text, *self._pictures)
        # From here they are in the history, or the request was refused.
        self._pictures = []
        try:
            self._printer.say(words, facts={"message": text})
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._printer.note("  stopped")

    def _report(self, error: VlfitError) -> None:
        from vlfit.cli.printing import print_error

        print_error(error)
        self._failed = True


def _picture_names(text: str) -> list[str]:
    """The names after ``/image``, as a shell splits them; one that is there needs no quotes for spaces."""
    with suppress(OSError, RuntimeError, ValueError):
        whole = Path(text).expanduser()
        if whole.exists() or glob.glob(str(whole), recursive=True):
            return [text]
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.commenters = True, ""
    if os.name != "posix":  # Windows has backslashes in paths
        words.escape = ""
    try:
        return list(words)
    except ValueError:  # a quotation mark without a second one
        return [text]


def _lines(interactive: bool) -> Iterator[str]:
    """Lines of the input, stripped; ``interactive``: with a prompt."""
    if not interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    # readline edits lines, but prints its prompt on stdout, where only answers belong if that is a file.
    if sys.stdout.isatty():
        with suppress(ImportError):  # not on Windows, whose console edits lines itself
            import readline  # noqa: F401
    while True:
        try:
            yield (input("> ") if sys.stdout.isatty() else _prompted_line()).strip()
        except (EOFError, KeyboardInterrupt) as ending:
            typer.echo(err=True)  # the cursor is still behind the prompt
            if isinstance(ending, KeyboardInterrupt):
                raise
            return


def _prompted_line() -> str:
    typer.echo("> ", err=True, nl=False)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
