"""Progress of a batch on stderr: a bar on a terminal, else a line now and then; and its summary."""

import time
from typing import TYPE_CHECKING, Any

from vlfit.cli.printing import Printer, escape_control
from vlfit.errors import PrivateAddress, VlfitError
from vlfit.tasks.batch.runner import BatchProgress
from vlfit.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from vlfit.tasks.batch.executor import Outcome
    from vlfit.tasks.batch.output import Output
    from vlfit.tasks.batch.runner import Tally


_FIRST_LINE, _LINES = 10.0, 30.0  # seconds between lines, where stderr is no terminal
_MAX_SHOWN = 20  # failures printed; all go into the .failed.jsonl


class BatchPage(BatchProgress):
    """Progress of a batch run on stderr; a context manager.

    Call ``settled`` for each picture and ``tick`` now and then. ``before``: pictures done or failed in
    earlier runs.
    """

    def __init__(self, printer: Printer, before: int) -> None:
        super().__init__()
        self._printer = printer
        self._before = before
        self._shown = 0
        self._said_private = False
        self._next_line = 0.0
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "BatchPage":
        self._next_line = time.monotonic() + _FIRST_LINE
        if self._printer.on_terminal:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), TextColumn("{task.description}", markup=False))
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("beginning", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def settled(self, outcome: "Outcome") -> None:
        """Count a picture that is done or failed; print why it failed, for the first failures only."""
        super().settled(outcome)
        if outcome.error is None:
            return
        self._shown += 1
        if self._shown <= _MAX_SHOWN:
            reason = getattr(outcome.error, "message", str(outcome.error))
            key = outcome.item.key
            label, _, rest = reason.partition(": ")
            if rest and label.endswith(f"/{key}"):  # the same file by its whole path
                reason = rest
            words = reason if reason.startswith(key) else f"{key}: {reason}"
            self.note(f"failed: {_in_one_line(words)}")
            if isinstance(outcome.error, PrivateAddress) and not self._said_private:
                self._said_private = True
                self.note(f"  {outcome.error.hint}")
        elif self._shown == _MAX_SHOWN + 1:
            self.note("more failed: see the .failed.jsonl")

    def tick(self) -> None:
        """Update the bar; without a terminal, print a line every ``_LINES`` seconds."""
        super().tick()
        if self._bar is not None and self._task is not None:
            total = self.tally.total
            self._bar.update(
                self._task,
                total=total,
                completed=min(self._before + self.tally.settled, total or 0),
                description=self._status_line(),
            )
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINES
            self._printer.note(self._status_line())

    def note(self, text: str) -> None:
        """Print a note above the bar."""
        if self._bar is not None:
            self._bar.console.print(escape_control(text, terminal=True), markup=False, highlight=False)
        else:
            self._printer.note(text)

    def _status_line(self) -> str:
        tally = self.tally
        speed, tokens = tally.speeds()
        done = f"{self._before + tally.settled:,}"
        about = "about " if tally.about else ""
        of_all = f"{done} of {about}{tally.total:,}" if tally.total is not None else done
        parts = [f"{of_all} pictures" + (f" ({self._before:,} before)" if self._before else "")]
        if tally.settled:  # no speed while the model loads
            parts += [f"{speed:.1f}/s", f"{tokens:.0f} tokens/s"]
        if tally.failed:
            parts.append(f"{tally.failed:,} failed")
        left = tally.seconds_left(self._before)
        if left is not None:
            parts.append(f"{_format_long(left)} left")
        return ", ".join(parts)


def summary_json(tally: "Tally", output: "Output", error: BaseException | None = None) -> dict[str, Any]:
    """Summary of a run for JSON, times in seconds. ``error``: what ended the run; None: it finished."""
    seconds = tally.seconds
    return {
        "output": str(output.path),
        "failures": str(output.failed_path) if output.failed else None,
        "done": tally.done,
        "same": tally.same,
        "failed": tally.failed,
        "done_before": output.done_before,
        "failed_in_all": output.failed,
        "without_sidecar": output.without_sidecar,
        "stopped": tally.stopped,
        "error": _error_facts(error) if isinstance(error, Exception) else None,  # not for Ctrl-C
        "seconds": round(seconds, 3),
        "pictures_per_s": round(tally.done / seconds, 3) if seconds else None,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "tokens_per_s": round(tally.completion_tokens / seconds, 2) if seconds else None,
    }


def _error_facts(error: Exception) -> dict[str, str]:
    if isinstance(error, VlfitError):
        return {"code": error.code, "reason": error.message, "hint": error.hint}
    return {"code": VlfitError.code, "reason": f"{type(error).__name__}: {error}", "hint": ""}


def print_summary(tally: "Tally", output: "Output", printer: Printer) -> None:
    """Print on stderr how many pictures are done and failed, and what the next command could be."""
    facts = summary_json(tally, output)
    words = f"{counted(tally.done, 'picture')} done in {_format_long(tally.seconds)}"
    if tally.done:
        words += f", {facts['pictures_per_s']:.1f}/s, {facts['tokens_per_s']:.0f} tokens/s"
    if tally.same:
        words += f"; {tally.same:,} identical to others"
    if output.done_before:
        words += f"; {output.done_before:,} done before"
    printer.note(f"{words}: {output.path}")
    if output.done_before and not tally.skipped and tally.settled:
        printer.note("none of the pictures done before is among these: is it the same source?")
    if output.failed:
        printer.note(f"{output.failed:,} failed: see {output.failed_path}; --retry-failed retries them")
    if output.without_sidecar:
        have = counted(output.without_sidecar, "has", "have")
        printer.note(f"{have} no sidecar: {output.sidecar_problem}; --sidecar again retries")


def print_dry_run(facts: dict[str, Any], printer: Printer) -> None:
    """Print the results of a dry run (``estimate_batch``) on stdout."""
    many = facts["pictures"]
    count = "an unknown number of pictures" if many is None else counted(many, "picture")
    about = "about " if facts["about"] and many is not None else ""
    printer.line(f"{about}{count}, {facts['settled_before']:,} of them done or failed before")
    if not facts["tried"]:
        return
    words = f"the first {facts['tried']} took {_format_long(facts['seconds'])}"
    if facts["failed"]:
        words += f", {facts['failed']} of them failed"
    printer.line(f"{words}: {facts['pictures_per_s']:.2f} pictures/s")
    if facts["seconds_for_all"] is not None:
        size = format_bytes(facts["bytes_for_all"])
        printer.line(f"the rest would take {_format_long(facts['seconds_for_all'])} and {size} of output")


def _in_one_line(text: str) -> str:
    """Escape line breaks: file names may hold them, and a log has one line per failure."""
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _format_long(seconds: float) -> str:
    """``format_seconds``, with hours and days."""
    if seconds < 3600:
        return format_seconds(seconds)
    if seconds < 48 * 3600:
        return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"
    return f"{seconds / 86400:.1f} days"
