"""Output: answers and data on stdout, everything else on stderr."""

import json
import os
import re
import shutil
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from unicodedata import category

import typer

from vlfit.errors import UsageError, VlfitError
from vlfit.units import counted, format_seconds

if TYPE_CHECKING:
    from vlfit.api.outputs import Answer, ImageSeen
    from vlfit.client import WordStream


PAGE_WIDTH = 100  # columns of a page of sentences, also on wider terminals
_NO_LIMIT = 10_000  # columns
# Notes on a picture that are true of most photos: with -v and in JSON only.
_ROUTINE_NOTES = ("turned upright", "converted from", "scaled down from", "seen at")


class Printer:
    """Prints answers on stdout, as text or JSON, and notes on stderr.

    ``json``: answers as JSON. ``stream``: print text as it is generated; None: if stdout is a terminal.
    ``quiet``: no notes. ``verbose``: print picture sizes, tokens and speed on stderr, too. Raises
    ``UsageError`` for ``quiet`` with ``verbose``, and ``json`` with ``stream``. Methods that write to
    stdout raise ``stdout_error`` if that fails.
    """

    def __init__(
        self, *, json: bool = False, stream: bool | None = None, quiet: bool = False, verbose: bool = False
    ) -> None:
        if quiet and verbose:
            raise UsageError("--quiet and --verbose exclude each other", "Choose one.")
        if json and stream:
            raise UsageError("--json cannot stream", "Leave --stream out.")
        self._json = json
        self._stream = sys.stdout.isatty() and not json if stream is None else stream
        self._quiet = quiet
        self.verbose = verbose
        self._noted: set[str] = set()

    @property
    def on_terminal(self) -> bool:
        """Whether stderr is a terminal that may show progress bars."""
        return sys.stderr.isatty() and not self._quiet

    def note(self, text: str) -> None:
        """Print a note on stderr, unless quiet."""
        if not self._quiet:
            self.warn(text)

    def note_once(self, text: str) -> None:
        """Print a note on stderr, unless it or one that differs only in numbers was printed before."""
        kind = re.sub(r"\d+", "#", text)
        if kind not in self._noted:
            self._noted.add(kind)
            self.note(text)

    def detail(self, text: str) -> None:
        """Print a note with ``--verbose`` only."""
        if self.verbose:
            self.note(text)

    def warn(self, text: str) -> None:
        """Print a warning on stderr, also if quiet."""
        typer.echo(escape_control(text, sys.stderr.isatty()), err=True)

    def say(self, words: "WordStream", *, prefix: str = "", facts: dict[str, Any] | None = None) -> None:
        """Print one answer on stdout: streamed, whole or as JSON. ``print_answer_notes`` follows it.

        ``prefix``: printed before the answer, not in JSON. ``facts``: more JSON fields, such as the picture;
        not in text. If the stream fails or is interrupted, the line is ended and the request cancelled.
        """
        with words:
            if self._json:
                self.data({**(facts or {}), **answer_json(words.answer())})
            elif self._stream:
                self._stream_answer(words, prefix)
            else:
                self.line(prefix + words.answer().text)
            self.print_answer_notes(words.answer())

    def _stream_answer(self, words: "WordStream", prefix: str) -> None:
        words.on_reasoning = lambda: self.note("  thinking ...")
        try:
            self._write(prefix)
            for piece in words:
                self._write(piece)
        finally:
            self._write("\n")

    def line(self, text: str) -> None:
        """Print ``text`` and a newline on stdout."""
        self._write(text + "\n")

    def data(self, facts: dict[str, Any]) -> None:
        """Print one JSON object on one line, on stdout."""
        # Escape what other encodings cannot represent.
        utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        _put(json.dumps(facts, ensure_ascii=not utf8) + "\n")

    def print_answer_notes(self, answer: "Answer") -> None:
        """Print notes on ``answer`` on stderr: how pictures were changed, and why it was cut off.

        With ``verbose`` also tokens, times and picture sizes. JSON output has the notes on pictures itself.
        """
        if self.verbose:
            self._print_usage(answer)
        elif not self._json:  # which has them
            for note in (note for image in answer.images for note in image.notes):
                if not note.startswith(_ROUTINE_NOTES):
                    self.note_once(f"  {note}")
        if answer.finish_reason == "length":
            tokens = counted(answer.usage.completion_tokens, "token")
            self.note(f"  cut off at {tokens}: --max-tokens sets the limit")
        elif answer.finish_reason == "loop":
            self.note("  stopped because the model began to repeat itself")

    def _print_usage(self, answer: "Answer") -> None:
        """Print tokens, times and picture sizes on stderr."""
        parts = [counted(answer.usage.completion_tokens, "token")]
        if answer.timings is not None:
            parts.append(f"first after {format_seconds(answer.timings.first_token_s)}")
            if answer.timings.decode_tokens_per_s:
                parts.append(f"then {answer.timings.decode_tokens_per_s:.1f} tokens/s")
        parts += [_picture_size(image) for image in answer.images]
        self.note(f"  [{answer.model}: {', '.join(parts)}]")

    def _write(self, text: str) -> None:
        _put(escape_control(text, sys.stdout.isatty()))


def _put(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_error(error) from error


def stdout_error(error: OSError) -> VlfitError:
    """The error to raise if writing to stdout failed with ``error``, e.g. on a full disk."""
    return VlfitError(
        f"cannot write the answer: {error.strerror}", "Free some disk space, or write elsewhere."
    )


def print_error(error: VlfitError, about: str = "") -> None:
    """Print message and hint on stderr. ``about``: put before the message, as the name of a picture."""
    on_terminal = sys.stderr.isatty()
    bold = is_styled(on_terminal)
    what = f"{about}: {error.message}" if about and not error.message.startswith(about) else error.message
    typer.echo(
        (typer.style("error: ", fg="red", bold=True) if bold else "error: ")
        + escape_control(what, on_terminal),
        err=True,
    )
    if error.hint:
        typer.echo(
            (typer.style("hint:  ", bold=True) if bold else "hint:  ")
            + escape_control(error.hint, on_terminal),
            err=True,
        )


def is_styled(on_terminal: bool) -> bool:
    """Whether words may be coloured or bold: ``on_terminal``, unless NO_COLOR is set or TERM is dumb."""
    return on_terminal and not os.environ.get("NO_COLOR") and not is_dumb()


def is_dumb() -> bool:
    """Whether the terminal says of itself that it knows no control sequences."""
    return os.environ.get("TERM", "").lower() == "dumb"


def terminal_width(most: int, *, on_terminal: bool | None = None) -> int:
    """Columns of the terminal, at most ``most``; if stdout is no terminal COLUMNS, if set, else ``most``.

    ``on_terminal``: whether stdout is one; None: find out.
    """
    on_terminal = sys.stdout.isatty() if on_terminal is None else on_terminal
    return min(most, shutil.get_terminal_size().columns) if on_terminal or has_columns() else most


def has_columns() -> bool:
    """Whether the environment states a width in COLUMNS, which is obeyed without a terminal, too."""
    stated = os.environ.get("COLUMNS", "")
    return stated.isdecimal() and int(stated[:9]) > 0


def wrap(text: str, first: str = "", *, most: int = _NO_LIMIT, on_terminal: bool | None = None) -> str:
    """``first`` and ``text``, wrapped at words to the terminal's width and at most ``most`` columns.

    Further lines are indented by the length of ``first``. Words longer than a line are broken on a terminal
    only. ``on_terminal``: as for ``terminal_width``.
    """
    on_terminal = sys.stdout.isatty() if on_terminal is None else on_terminal
    width = max(terminal_width(most, on_terminal=on_terminal), len(first) + 20)
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=on_terminal,
        break_on_hyphens=False,
    )


_SHELL_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|\S)+""")


def wrap_command(command: str, first: str = "", *, width: int | None = None) -> str:
    """``first`` and a shell ``command``, continued with backslashes where it is wider than the terminal.

    Can be pasted: quoted words stay whole, and options with their values where a line has room for both.
    ``width``: in place of the terminal's; files are not wrapped.
    """
    width = terminal_width(_NO_LIMIT) if width is None else width
    if len(first) + len(command) <= width:
        return first + command
    lines, indent = [first], " " * (len(first) + 2)
    words: list[str] = _SHELL_WORD.findall(command)
    for index, word in enumerate(words):
        value = words[index + 1 : index + 2] if word.startswith("-") else []
        together = word if not value or value[0].startswith("-") else f"{word} {value[0]}"
        if len(indent) + len(together) + len(" \\") > width:
            together = word
        if len(lines[-1]) + len(together) + len(" \\") > width and lines[-1].strip():
            lines.append(indent)
        lines[-1] += f"{word} "
    return "\\\n".join(lines).rstrip()


def answer_json(answer: "Answer") -> dict[str, Any]:
    """An answer as JSON: text, reasoning if there is any, picture sizes, tokens, times in seconds."""
    facts: dict[str, Any] = {
        "model": answer.model,
        "text": answer.text,
        **({"reasoning": answer.reasoning} if answer.reasoning else {}),
        "finish_reason": answer.finish_reason,
        "images": [asdict(image) for image in answer.images],
        "usage": {**asdict(answer.usage), "total_tokens": answer.usage.total_tokens},
        "timings": None,
    }
    if answer.timings is not None:
        facts["timings"] = {
            "queued_s": round(answer.timings.queued_s, 4),
            "first_token_s": round(answer.timings.first_token_s, 4),
            "total_s": round(answer.timings.total_s, 4),
            "decode_tokens_per_s": round(answer.timings.decode_tokens_per_s, 2),
        }
    return facts


def escape_control(text: str, terminal: bool) -> str:
    """``text`` with control characters escaped if it is for a terminal, which they could reprogram.

    ``terminal``: whether it is; False: ``text`` is returned unchanged.
    """
    if not terminal:
        return text
    return "".join(
        repr(char)[1:-1] if category(char) == "Cc" and char not in "\n\t" else char for char in text
    )


def _picture_size(image: "ImageSeen") -> str:
    size = f"picture of {image.width}x{image.height}"
    if (image.seen_width, image.seen_height) != (image.width, image.height):
        size += f" seen as {image.seen_width}x{image.seen_height}"
    return f"{size} in {'; '.join((counted(image.tokens, 'token'), *image.notes))}"
