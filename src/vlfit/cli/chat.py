"""``vlfit chat``: a conversation in a terminal, or line by line from a pipe.

Knows how lines are read and which of them are commands. The memory is the chat session's.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.cli.options import CommonOptions, takes_common_options
from vlfit.errors import UsageError, VlfitError

if TYPE_CHECKING:
    from vlfit.api.conversation import ImagePart
    from vlfit.cli.session import Session


_HELP = """  /image PICTURE   show a picture with your next message (a file, glob or URL)
  /reset           forget everything said so far
  /help            this list
  /quit            end (so does the end of the input)
  Ctrl-C           stop the answer that is being given; at the prompt, end"""


@takes_common_options
def chat(
    pictures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PICTURE", help="Pictures to begin with: files, globs, URLs.", show_default=False
        ),
    ] = None,
    system: Annotated[
        str,
        typer.Option(
            "--system", metavar="TEXT", help="Tell the model first how to answer.", show_default=False
        ),
    ] = "",
    *,
    options: CommonOptions,
) -> None:
    """Talk about pictures, with memory. Type /help inside for what else it understands.

    Samples by the checkpoint's own settings unless --temperature is given. Ctrl-C stops an answer that is
    being given; at the prompt it ends the program. When the input is no terminal, each line of it is a
    message.

    \b
    Examples:
      vlfit chat
      vlfit chat photo.jpg --system "Answer in one word."
      printf 'What is this?\\nWhat colour is it?\\n' | vlfit chat photo.jpg
    """
    from vlfit.cli.session import Session

    with Session(options) as session:
        talk = _Talk(session, system)
        if pictures:
            talk.show(pictures)
        talk.run()


class _Talk:
    """One run of the conversation: the lines read, the pictures waiting for the next message."""

    def __init__(self, session: "Session", system: str) -> None:
        self._session = session
        self._printer = session.printer
        self._waiting: list[ImagePart] = []
        self._interactive = sys.stdin.isatty()
        self._failed = False
        self._chat = session.model.chat(system=system, **session.sampling)

    def run(self) -> None:
        """Read and answer to the end. Ends with exit code 1 if a line from a pipe failed."""
        if self._interactive:
            self._printer.note(f"talking with {self._session.model.model}; /help lists what you can type")
        for line in _lines(self._interactive):
            if line.split()[:1] == ["/quit"]:
                break
            try:
                self._take(line)
            except VlfitError as error:
                self._report(error)
        if self._failed and not self._interactive:
            raise typer.Exit(1)

    def show(self, patterns: list[str]) -> None:
        """Keep pictures for the next message."""
        from vlfit.cli.session import named_pictures
        from vlfit.tasks.pictures import load_picture, name_of

        if "-" in patterns and not self._interactive:
            raise UsageError(
                "- would read a picture from where the messages come from", "name a file instead"
            )
        names = named_pictures(patterns)
        self._waiting += [load_picture(name) for name in names]
        self._printer.note(f"  showing {', '.join(map(name_of, names))} with your next message")

    def _take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/image":
            if not rest.strip():
                raise UsageError("/image needs a picture", "/image photo.jpg")
            self.show([rest.strip()])
        elif command == "/reset":
            self._chat.reset()
            self._waiting.clear()
            self._printer.note("  everything is forgotten")
        elif command == "/help":
            self._printer.note(_HELP)
        elif command.startswith("/") and command[1:].isalpha():
            raise UsageError(f"unknown command {command}", "/help lists those there are")
        elif line:
            self._answer(line)

    def _answer(self, text: str) -> None:
        words = self._chat.stream(text, *self._waiting)
        # The pictures are part of the history from here on, or of no use if the request was refused.
        self._waiting = []
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


def _lines(interactive: bool) -> Iterator[str]:
    """Messages, stripped, to the end of the input; with a prompt on stderr when a person types."""
    if not interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    # readline edits and remembers lines, but it would put its prompt on stdout, among the words.
    if sys.stdout.isatty():
        with suppress(ImportError):  # Windows has none, and edits lines by itself
            import readline  # noqa: F401
    while True:
        try:
            yield (input("> ") if sys.stdout.isatty() else _prompted_line()).strip()
        except (EOFError, KeyboardInterrupt) as ending:
            typer.echo(err=True)  # the cursor still stands behind the prompt
            if isinstance(ending, KeyboardInterrupt):
                raise
            return


def _prompted_line() -> str:
    typer.echo("> ", err=True, nl=False)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
