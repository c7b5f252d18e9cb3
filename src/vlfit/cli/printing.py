"""How answers reach a person: words on stdout and nothing else there; all that is about them on stderr.

Knows terminals and JSON. Does not know where answers come from.
"""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from unicodedata import category

import typer

from vlfit.errors import UsageError, VlfitError
from vlfit.units import format_seconds

if TYPE_CHECKING:
    from vlfit.api.outputs import Answer, ImageSeen
    from vlfit.client import WordStream


class Printer:
    """Prints answers as words or as JSON, whole or as they come."""

    def __init__(self, *, json: bool = False, stream: bool | None = None, quiet: bool = False) -> None:
        if json and stream:
            raise UsageError("--json prints whole answers and cannot stream", "leave out --stream")
        self._json = json
        self._stream = sys.stdout.isatty() and not json if stream is None else stream
        self._quiet = quiet

    @property
    def lively(self) -> bool:
        """Whether stderr is a terminal that may show something that moves."""
        return sys.stderr.isatty() and not self._quiet

    def note(self, text: str) -> None:
        """Say something about the work, on stderr."""
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Say on stderr what a person should read who wants no notes, too."""
        typer.echo(plain(text, sys.stderr.isatty()), err=True)

    def say(self, words: "WordStream", *, prefix: str = "", facts: dict[str, Any] | None = None) -> None:
        """Print one answer and its cost. ``facts`` (which picture, which question) go into its JSON.

        A stream that fails or is interrupted leaves the line ended and its request freed.
        """
        with words:
            if self._json:
                self.data({**(facts or {}), **answer_facts(words.answer())})
            elif self._stream:
                self._say_piecewise(words, prefix)
            else:
                self.line(prefix + words.answer().text)
            self.costs(words.answer())

    def _say_piecewise(self, words: "WordStream", prefix: str) -> None:
        try:
            self._write(prefix)
            for piece in words:
                self._write(piece)
        finally:
            self._write("\n")

    def line(self, text: str) -> None:
        """Print words, on stdout."""
        self._write(text + "\n")

    def data(self, facts: dict[str, Any]) -> None:
        """Print one JSON object on one line, on stdout."""
        # Other encodings cannot hold every letter as itself; escapes are JSON too.
        utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        _put(json.dumps(facts, ensure_ascii=not utf8) + "\n")

    def costs(self, answer: "Answer") -> None:
        """Say on stderr what an answer took, what became of the pictures, and if it was not whole."""
        parts = [f"{answer.usage.completion_tokens} tokens"]
        if answer.timings is not None:
            parts.append(f"first after {format_seconds(answer.timings.first_token_s)}")
            if answer.timings.decode_tokens_per_s:
                parts.append(f"then {answer.timings.decode_tokens_per_s:.1f} tokens/s")
        parts += [_picture_seen(image) for image in answer.images]
        self.note(f"  [{answer.model}: {', '.join(parts)}]")
        if answer.finish_reason == "length":
            self.note(f"  cut off at {answer.usage.completion_tokens} tokens: --max-tokens sets the limit")
        elif answer.finish_reason == "loop":
            self.note("  stopped because the model began to repeat itself")

    def _write(self, text: str) -> None:
        _put(plain(text, sys.stdout.isatty()))


def _put(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise cannot_write(error) from error


def cannot_write(error: OSError) -> VlfitError:
    """What to say when stdout takes no more words, of a full disk for example."""
    return VlfitError(f"cannot write the answer: {error.strerror}", "make room, or send it elsewhere")


def print_error(error: VlfitError, about: str = "") -> None:
    """What happened and what to do, on stderr; ``about`` names the picture if there are several."""
    lively = sys.stderr.isatty()
    what = f"{about}: {error.message}" if about and not error.message.startswith(about) else error.message
    typer.echo(typer.style("error: ", fg="red", bold=True) + plain(what, lively), err=True)
    if error.hint:
        typer.echo(typer.style("hint:  ", bold=True) + plain(error.hint, lively), err=True)


def answer_facts(answer: "Answer") -> dict[str, Any]:
    """An answer as JSON has it: words, what was seen of each picture, what it cost (times in seconds)."""
    facts: dict[str, Any] = {
        "model": answer.model,
        "text": answer.text,
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


def plain(text: str, terminal: bool) -> str:
    """``text`` fit to be shown: on a ``terminal``, characters that could drive it are made visible."""
    if not terminal:
        return text
    return "".join(
        repr(sign)[1:-1] if category(sign) == "Cc" and sign not in "\n\t" else sign for sign in text
    )


def _picture_seen(image: "ImageSeen") -> str:
    size = f"picture of {image.width}x{image.height}"
    if (image.seen_width, image.seen_height) != (image.width, image.height):
        size += f" seen as {image.seen_width}x{image.seen_height}"
    return f"{size} in {'; '.join((f'{image.tokens} tokens', *image.notes))}"
