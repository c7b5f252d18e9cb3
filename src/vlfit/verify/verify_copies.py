"""Copies of one model beside the widest of them: what ``vlfit verify --against`` and ``--table`` measure."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.gguf.file_names import is_model_name
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import UsageError, VlfitError
from vlfit.parity.failed_checks import is_device_failure
from vlfit.parity.questions import CopyFigures, Question, make_questions
from vlfit.units import MIB
from vlfit.verify.verify_run import CHECK_CONTEXT

if TYPE_CHECKING:
    from vlfit.engine.engine import NativeEngine
    from vlfit.parity.copies import Original

VERSION = 1
MOST_COPIES = 64  # of one table
_HEADINGS = ("copy", "format", "MiB", "KLD", "top 1", "boxes IoU", "OCR exact", "counts")


@dataclass(frozen=True)
class CopyRow:
    """One line of the table: ``figures`` None, and why in ``error``, for a copy that could not be measured.

    ``bytes``: of its weights in the files, 0 if they cannot be read, as ``weights_format`` is "" then.
    ``is_widest``: the one that all are held against, the widest that runs. ``stored_format``:
    ``Checkpoint.stored_format``, for people; "" if it is ``weights_format``.
    """

    name: str
    weights_format: str
    bytes: int
    is_widest: bool
    figures: CopyFigures | None
    error: str = ""
    seconds: float = 0.0
    stored_format: str = ""

    @property
    def format_name(self) -> str:
        """The format of its weights as people call it: of GGUF models their type."""
        return self.stored_format or self.weights_format

    def as_json(self) -> dict[str, Any]:
        """The row as an object of ``copies`` in the JSON output."""
        return {
            "name": self.name,
            "weights_format": self.weights_format or None,
            "bytes": self.bytes or None,
            "widest": self.is_widest,
            "figures": None if self.figures is None else self.figures.as_json(),
            "error": self.error or None,
            "seconds": round(self.seconds, 3),
        }


def names_in(named: Sequence[str]) -> list[str]:
    """The models that ``named`` means: of a folder of copies each one in it, everything else as it is.

    A folder of copies has no config.json; its copies are GGUF files and folders of checkpoints, one level
    down, too. Raises ``UsageError`` for a folder with none, and for more than ``MOST_COPIES`` models.
    """
    found: list[str] = []
    for name in named:
        folder = Path(name)
        if not folder.is_dir() or (folder / "config.json").is_file():
            found.append(name)
            continue
        inside = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
        each = [model for path in (folder, *inside) for model in _models_at(path)]
        if not each:
            raise UsageError(
                f"{name!r} has no copies of a model",
                "Name a folder of folders with config.json, or of GGUF files.",
            )
        found += each
    found = list(dict.fromkeys(found))
    if len(found) > MOST_COPIES:
        raise UsageError(
            f"{len(found)} copies are more than a table takes, {MOST_COPIES}",
            "Name fewer, or a smaller folder.",
        )
    return found


def _models_at(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    if (path / "config.json").is_file():
        return [str(path)]
    return [str(file) for file in sorted(path.glob("*.gguf")) if is_model_name(file.name)]


def compare_copies(
    checkpoints: Sequence[Checkpoint],
    options: EngineOptions,
    on_copy: Callable[[str], None] | None = None,
) -> list[CopyRow]:
    """Measure ``checkpoints`` beside the one that runs whose weights take the most bytes.

    Engines run one at a time, with ``options`` but a short context, and without CUDA graphs, drafts and
    prefix cache, as tokens are put into them. Rows are in order of their size. ``on_copy``: called with the
    name of each as it begins. One that does not run is a row with its error. Raises ``UsageError`` for fewer
    than two and for a checkpoint of another shape; if none runs, the error of the widest.
    """
    if len(checkpoints) < 2:
        raise UsageError(
            f"a table compares two copies or more; there is {len(checkpoints)}",
            "Name another with --table, or a folder of copies.",
        )
    ordered = sorted(checkpoints, key=lambda each: -each.weight_bytes)
    widest = ordered[0]
    for other in ordered[1:]:
        _refuse_others(widest, other)
    questions = make_questions(sees=all(each.config.vision is not None for each in ordered))
    rows: list[CopyRow] = []
    first_error: Exception | None = None
    original: Original | None = None
    for checkpoint in ordered:
        began = time.perf_counter()
        if on_copy is not None:
            on_copy(checkpoint.name)
        figures, error = None, ""
        is_widest = original is None
        try:
            original, figures = _ask(checkpoint, options, questions, original)
        except Exception as failed:
            if not isinstance(failed, VlfitError) and not is_device_failure(failed):
                raise
            failed.__traceback__ = None  # its frames hold the engine
            first_error = first_error or failed
            error = str(failed)
        rows.append(
            CopyRow(
                checkpoint.name,
                checkpoint.weights_format,
                checkpoint.weight_bytes,
                is_widest and figures is not None,
                figures,
                error,
                time.perf_counter() - began,
                checkpoint.stored_format,
            )
        )
    if original is None and first_error is not None:
        raise first_error
    return rows


def _ask(
    checkpoint: Checkpoint, options: EngineOptions, questions: Sequence[Question], original: "Original | None"
) -> "tuple[Original, CopyFigures]":
    """Figures of one copy beside ``original``; None: this copy is the original. Returns both."""
    from vlfit.parity.copies import ask_copy, ask_original

    with _engine(checkpoint, options) as engine:
        if original is None:
            return ask_original(engine, questions)
        return original, ask_copy(engine, questions, original)


def unread_row(path: str | Path, error: VlfitError) -> CopyRow:
    """The row of a copy at ``path`` whose files cannot be read, for the reason ``error``."""
    return CopyRow(Path(path).name, "", 0, False, None, error.message)


@contextmanager
def _engine(checkpoint: Checkpoint, options: EngineOptions) -> "Iterator[NativeEngine]":
    from vlfit.engine.engine import NativeEngine

    small = replace(
        options,
        max_model_len=min(options.max_model_len or CHECK_CONTEXT, CHECK_CONTEXT),
        max_num_seqs=1,
        kv_tokens=None,
        prefix_cache=False,
        speculate=False,
        cuda_graphs=False,
        enforce_plan=False,
        idle_sleep=None,
    )
    engine = NativeEngine(checkpoint, small)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()


def _refuse_others(widest: Checkpoint, other: Checkpoint) -> None:
    """Raise ``UsageError`` unless both have the same layers and widths, and are of one family.

    A GGUF file without its tower is a text model: of such a pair the family may differ.
    """
    shapes = [
        (text.num_hidden_layers, text.hidden_size, text.intermediate_size, text.vocab_size)
        for text in (widest.config.text, other.config.text)
    ]
    one_sees = (widest.config.vision is None) != (other.config.vision is None)
    if widest.model_type != other.model_type and not one_sees:
        raise UsageError(
            f"{other.name} is no copy of {widest.name}: {other.model_type}, not {widest.model_type}",
            "Compare copies of one model; their formats may differ.",
        )
    if shapes[0] != shapes[1]:
        mine, theirs = (f"{each[0]} layers of {each[1]}, {each[3]:,} tokens" for each in shapes)
        raise UsageError(
            f"{other.name} is no copy of {widest.name}: {theirs}, not {mine}",
            "Compare copies of one model; their formats may differ.",
        )


def table_lines(rows: Sequence[CopyRow], name_width: int = 40) -> list[str]:
    """The table for a terminal, then what its columns are. Names longer than ``name_width`` are cut."""
    cells = [_HEADINGS, *(_cells(row, name_width) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    lines = []
    for line in cells:
        words = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(words).rstrip())
    lines += [f"{row.name}: {row.error}" for row in rows if row.error]
    if any(row.figures is not None and not row.figures.same_prompt for row in rows):
        names = [row.name for row in rows if row.figures is not None and not row.figures.same_prompt]
        lines.append(f"other prompts: {', '.join(names)} (another chat template, tokenizer or picture size)")
    widest = _widest(rows)
    figures = widest.figures
    assert figures is not None
    lines.append(
        f"KLD in nats over {figures.positions:,} tokens, top 1 over {figures.tokens:,}: along the answers of"
        f" {widest.name}."
    )
    return lines


def _widest(rows: Sequence[CopyRow]) -> CopyRow:
    """The row that the others are held against."""
    return next(row for row in rows if row.is_widest)


def _cells(row: CopyRow, name_width: int) -> tuple[str, ...]:
    name = row.name if len(row.name) <= name_width else f"{row.name[: name_width - 3]}..."
    size = f"{row.bytes / MIB:,.1f}" if row.bytes else "-"
    figures = row.figures
    if figures is None:
        return (name, row.format_name or "-", size, *["failed"] * 5)
    boxes = "-" if figures.boxes_iou is None else f"{figures.boxes_iou:.3f}"
    words = _of(figures.words_right, figures.words, figures.words_changed)
    counts = _of(figures.counts_right, figures.counts, figures.counts_changed)
    kld = "-" if row.is_widest else f"{figures.kld_mean:.5f}"
    top1 = "-" if row.is_widest else f"{figures.top1:.1%}"
    return (name, row.format_name, size, kld, top1, "-" if row.is_widest else boxes, words, counts)


def _of(right: int | None, asked: int | None, changed: int | None) -> str:
    if right is None or asked is None:
        return "-"
    return f"{right} of {asked}{f', {changed} changed' if changed else ''}"


def against_lines(rows: Sequence[CopyRow]) -> list[str]:
    """Two copies in words: the narrower beside the wider."""
    wide, copy = rows
    lines = [
        f"{copy.name} ({copy.format_name}, {copy.bytes / MIB:,.1f} MiB) beside {wide.name}"
        f" ({wide.format_name}, {wide.bytes / MIB:,.1f} MiB)"
    ]
    figures = copy.figures
    failed = wide if wide.figures is None else copy
    if figures is None or wide.figures is None:
        return [*lines, f"failed         {failed.name}: {failed.error}"]
    lines.append(
        f"next token     KLD {figures.kld_mean:.5f} nats, {figures.kld_most:.3f} at most, over"
        f" {figures.positions:,} tokens"
    )
    lines.append(f"top 1          {figures.top1:.1%} of {figures.tokens:,} tokens")
    if figures.boxes_iou is not None:
        lines.append(
            f"boxes          mean IoU {figures.boxes_iou:.3f} with the other's; {figures.boxes_true:.3f} with"
            f" the truth, the other {wide.figures.boxes_true:.3f}"
        )
    for heading, asked, changed, right, before in (
        ("words (OCR)", figures.words, figures.words_changed, figures.words_right, "words_right"),
        ("counts", figures.counts, figures.counts_changed, figures.counts_right, "counts_right"),
    ):
        if asked is not None:
            was = getattr(wide.figures, before)
            lines.append(f"{heading:15}{changed} of {asked} changed; {right} right, the other {was}")
    if not figures.same_prompt:
        lines.append("prompts        differ: another chat template, tokenizer or picture size")
    return lines


def rows_json(rows: Sequence[CopyRow]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {"version": VERSION, "widest": _widest(rows).name, "copies": [row.as_json() for row in rows]}
