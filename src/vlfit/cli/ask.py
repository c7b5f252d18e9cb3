"""``vlfit caption``, ``vlfit ask`` and ``vlfit embed``: captions, answers and vectors of pictures."""

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import ANSWERING, MEDIA, SAMPLING, CommandOptions, media_options, takes_options
from vlfit.errors import CannotWrite, PictureNotFound, UsageError, VlfitError
from vlfit.units import counted

if TYPE_CHECKING:
    from vlfit.api.pooling import Vector
    from vlfit.backends.base import Backend
    from vlfit.cli.session import Session
    from vlfit.tasks.embeddings import EmbedInput, PooledAnswer
    from vlfit.tasks.files import MediaOptions

MAX_STDIN_TEXT = 16 * 1024**2  # bytes
_URLS = ("http://", "https://", "data:")

JSON_LINES = "Print one line of JSON per answer, with picture sizes, tokens and times."
Pictures = Annotated[
    list[str],
    typer.Argument(
        metavar="PICTURE", help="Pictures, PDFs (a.pdf#2-5), videos, globs, URLs, or - for stdin."
    ),
]


@takes_options(*MEDIA, *ANSWERING, json=JSON_LINES)
def caption(
    pictures: Pictures,
    long: Annotated[bool, typer.Option("--long", help="A paragraph instead of a sentence.")] = False,
    *,
    options: CommandOptions,
) -> None:
    """Describe each picture in a sentence.

    Several pictures: one caption each, after the picture's name. A picture that cannot be read is reported
    and the others go on; the exit code is then 1. Each page of a PDF is a picture; a video is one clip.

    \b
    Examples:
      vlfit caption photo.jpg
      vlfit caption --long https://example.org/photo.jpg
      vlfit caption --json 'holiday/*.jpg' > captions.jsonl
      cat photo.jpg | vlfit caption -
      vlfit caption scan.pdf clip.mp4
      vlfit caption --backend remote http://gpu-box:8000 photo.jpg
    """
    from vlfit.cli.session import Session, expand_patterns, for_each_picture, named_parts
    from vlfit.tasks.pictures import source_label

    media = media_options(options)
    with Session(options, needs_pictures=True) as session:
        names = expand_patterns(pictures)

        def work(name: str) -> None:
            from vlfit.tasks.files import single_parts

            for shown, part in named_parts(name, single_parts(session.load(name, media), clips=True)):
                words = session.model.stream_caption(part, "long" if long else "short", **session.sampling)
                prefix = f"{source_label(shown)}: " if len(names) > 1 or shown != name else ""
                session.printer.say(words, prefix=prefix, facts={"picture": shown})

        for_each_picture(names, work)


@takes_options(*MEDIA, *ANSWERING, json=JSON_LINES)
def ask(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar='PICTURE... "QUESTION"',
            help="Pictures, PDFs, videos, globs, URLs, or - for stdin; the question comes last.",
        ),
    ],
    system: Annotated[
        str,
        typer.Option("--system", metavar="TEXT", help="System prompt.", show_default=False),
    ] = "",
    *,
    options: CommandOptions,
) -> None:
    """Answer a question about pictures.

    About one picture, several together, or none.

    \b
    Examples:
      vlfit ask photo.jpg "What colour is the car?"
      vlfit ask before.jpg after.jpg "What has changed?"
      vlfit ask photo.jpg "How many people?" --json --max-tokens 50
      vlfit ask report.pdf#2-5 "What do the figures show?"
      vlfit ask clip.mp4 --every 2s "What happens?"
      cat photo.jpg | vlfit ask - "What is this?"
    """
    from vlfit.cli.session import Session, expand_patterns

    *patterns, question = arguments
    _refuse_missing_question(question)
    check_encoding(question, "the question")
    check_encoding(system, "the system prompt")
    media = media_options(options)
    with Session(options, needs_pictures=bool(patterns)) as session:
        names = expand_patterns(patterns) if patterns else []
        pictures = [session.load(name, media) for name in names]
        words = session.model.stream(question, *pictures, system=system, **session.sampling)
        session.printer.say(words, facts={"pictures": names, "question": question})


def check_encoding(text: str, what: str) -> None:
    """Raise ``UsageError`` if ``text``, an argument, has bytes that are not UTF-8. ``what``: its name."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise UsageError(
            f"{what} is not UTF-8: byte 0x{byte:02x} after {error.start} characters",
            "Type it in a terminal whose encoding is UTF-8, or convert it with iconv.",
        ) from None


def _refuse_missing_question(question: str) -> None:
    """Raise ``UsageError`` if the last argument is a picture or empty: the question was forgotten.

    Empty is checked first: as a path it would be the current folder.
    """
    if not question.strip():
        raise UsageError(
            "the last argument is the question, and it is empty",
            'Ask something, in quotes: vlfit ask photo.jpg "What is this?"',
        )
    is_picture = question == "-" or question.startswith(("http://", "https://", "data:"))
    # A question can be too long to be a file name, or hold characters that none may have.
    try:
        is_picture = is_picture or Path(question).exists() or Path(question.partition("#")[0]).is_file()
    except (OSError, ValueError):
        is_picture = False
    if is_picture:
        from vlfit.tasks.pictures import source_label

        raise UsageError(
            f"the last argument is the question, but {source_label(question)} is a picture",
            'Put the question last, in quotes: vlfit ask photo.jpg "What is this?"',
        )


@takes_options(
    *MEDIA,
    *(name for name in ANSWERING if name not in (*SAMPLING, "stream")),
    json="Also print the model, picture sizes, tokens and times of each.",
)
def embed(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ITEM",
            help="Pictures, PDFs (a.pdf#2-5), videos, globs, URLs; - for stdin: a picture, or a text in each"
            " line. What is none of these is a text.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", help="A text, whatever it looks like; may be repeated."),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="One vector of all items, pictures before texts.")
    ] = False,
    query: Annotated[
        bool, typer.Option("--query", help="Vectors to search with: the instruction for queries.")
    ] = False,
    instruction: Annotated[
        str | None,
        typer.Option(
            "--instruction",
            metavar="TEXT",
            help="What the vectors are for.  [default: the model's own]",
            show_default=False,
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            "--dimensions",
            metavar="N",
            help="Keep the first N components, normalized again.  [default: all]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the vectors to this .npy file: float32 [items, dimensions].",
            show_default=False,
        ),
    ] = None,
    *,
    options: CommandOptions,
) -> None:
    """Print the vector of each picture or text.

    One line of JSON for each. Vectors have length 1: the dot product of two says how alike they are. What
    cannot be read is reported and the others go on; the exit code is then 1. For folders of pictures there is
    vlfit batch --embed.

    \b
    Examples:
      vlfit embed photo.jpg "a red bicycle"
      vlfit embed 'holiday/*.jpg' -o holiday.npy
      vlfit embed --query "red bicycle at the beach" | jq -c .embedding
      vlfit embed photo.jpg "seen from above" --together
      cat words.txt | vlfit embed -
    """
    from vlfit.api.pooling import QUERY_INSTRUCTION
    from vlfit.cli.session import Session, for_each_picture

    if query and instruction is not None:
        raise UsageError("--query and --instruction are both instructions", "Leave one of them out.")
    if output is not None and output.suffix != ".npy":
        raise UsageError(f"{output} does not end in .npy", "Name it vectors.npy, or redirect the lines.")
    if dimensions is not None and dimensions < 1:
        raise UsageError(f"--dimensions is {dimensions}", "Use 1 or more.")
    if not arguments and not text:
        raise UsageError("nothing to embed is named", 'Name pictures, or texts in quotes: "a red bicycle".')
    media = media_options(options)
    session = Session(options, model_kind="embedding")
    inputs = _Inputs(session, media)
    items = [*inputs.named(arguments or ()), *inputs.texts(text or ())]
    if together:
        items = [inputs.joined(items)]
    upcoming = iter(items)
    printed = _Printed(
        session,
        dimensions,
        QUERY_INSTRUCTION if query else instruction,
        keeps=output is not None,
        whole=options.json,
    )
    try:
        # By their order: a text may be called as a picture is.
        for_each_picture([item.name for item in items], lambda _: printed.embed(next(upcoming)))
        if output is not None:
            _write(output, printed.vectors)
            session.printer.note(f"  written: {output}, {counted(len(printed.vectors), 'vector')}")
    finally:
        printed.close()


@dataclass(frozen=True, slots=True)
class _Item:
    """``name`` as it is printed; ``read`` returns the input, or raises ``PictureError``."""

    name: str
    read: "Callable[[], EmbedInput]"


class _Inputs:
    """Items of the arguments; pictures are read when it is their turn."""

    def __init__(self, session: "Session", media: "MediaOptions") -> None:
        self._session = session
        self._media = media

    def named(self, arguments: Sequence[str]) -> list[_Item]:
        """What ``arguments`` mean. Reads stdin for ``-``."""
        items: list[_Item] = []
        for argument in arguments:
            if argument == "-":
                items += self._read_stdin()
            elif argument.strip() and _is_file(argument):
                items.append(_Item(argument, partial(self._load, argument)))
            elif has_magic(argument) and (found := _matches(argument)):
                items += (_Item(name, partial(self._load, name)) for name in found)
            else:
                items += self.texts([argument])
        return items

    def texts(self, texts: Sequence[str]) -> list[_Item]:
        """An item for each text. Raises ``UsageError`` for an empty one."""
        from vlfit.tasks.embeddings import EmbedInput

        if any(not each.strip() for each in texts):
            raise UsageError("a text to embed is empty", "Leave it out.")
        return [_Item(each, partial(EmbedInput, each)) for each in texts]

    def joined(self, items: Sequence[_Item]) -> _Item:
        """One item of all ``items``."""

        def read() -> "EmbedInput":
            from vlfit.tasks.embeddings import EmbedInput

            inputs = [item.read() for item in items]
            files = tuple(file for each in inputs for file in each.files)
            return EmbedInput(" ".join(each.text for each in inputs if each.text), files)

        return _Item(" + ".join(item.name for item in items), read)

    def _load(self, name: str) -> "EmbedInput":
        from vlfit.tasks.embeddings import EmbedInput

        return EmbedInput("", (self._session.load(name, self._media),))

    def _read_stdin(self) -> list[_Item]:
        from vlfit.tasks.embeddings import EmbedInput
        from vlfit.tasks.files import load_file
        from vlfit.tasks.pictures import MAX_FILE_BYTES

        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(
                "- means standard input, but nothing is piped into it", "Write: vlfit embed - < words.txt"
            )
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        try:
            text = data.decode("utf-8-sig") if b"\0" not in data else None
        except UnicodeDecodeError:
            text = None
        if text is None:
            return [_Item("-", lambda: EmbedInput("", (load_file(data, self._media),)))]
        if len(data) > MAX_STDIN_TEXT:
            raise UsageError("stdin holds more than 16 MiB of text", "Send less at a time.")
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise UsageError("stdin is empty", "Send a picture, or a text in each line.")
        return self.texts(lines)


def _matches(pattern: str) -> list[str]:
    """Files that the glob ``pattern`` matches; empty for a text such as a question.

    Raises ``PictureNotFound`` if it looks like a pattern of files and matches none.
    """
    from vlfit.tasks.pictures import expand_globs

    try:
        return expand_globs([pattern])
    except PictureNotFound:
        if _has_file_extension(pattern):
            raise
        return []


def _has_file_extension(name: str) -> bool:
    """Whether ``name`` ends like a picture, document or video, and has no space."""
    from vlfit.images.file_kinds import HEIF_EXTENSIONS, PICTURE_EXTENSIONS
    from vlfit.images.media_kinds import MEDIA_EXTENSIONS
    from vlfit.tasks.batch.items import extension_of

    kinds = (PICTURE_EXTENSIONS, HEIF_EXTENSIONS, *MEDIA_EXTENSIONS.values())
    return " " not in name and any(extension_of(name) in each for each in kinds)


def _is_file(argument: str) -> bool:
    """Whether ``argument`` names a file or URL, or looks so much like a file that a typo is likely."""
    if argument.startswith(_URLS):
        return True
    plain = argument.partition("#")[0]
    try:
        if Path(argument).exists() or (plain and Path(plain).is_file()):
            return True
    except (OSError, ValueError):  # too long for a file name, or with characters that none has
        return False
    return not has_magic(argument) and _has_file_extension(plain)


@dataclass
class _Printed:
    """Computes vectors and prints them, or ``keeps`` them. The model is opened with the first.

    ``whole``: also print the model, picture sizes, tokens and times.
    """

    session: "Session"
    dimensions: int | None
    instruction: str | None
    keeps: bool
    whole: bool

    def __post_init__(self) -> None:
        self.vectors: list[Vector] = []
        self._backend: Backend | None = None

    def embed(self, item: _Item) -> None:
        """Print, or keep, the vector of ``item``."""
        from vlfit.tasks.embeddings import embed_parts

        given = item.read()
        if self._backend is None:
            self._backend = self._open()
        found = embed_parts(
            self._backend,
            given.text,
            *given.files,
            instruction=self.instruction,
            dimensions=self.dimensions,
        )
        for note in (note for image in found.images for note in image.notes):
            self.session.printer.note_once(f"  {note}")
        if self.keeps:
            self.vectors.append(found.vector)
        else:
            self.session.printer.data(self._facts(item.name, found, self._backend.model))

    def close(self) -> None:
        """Free the model's memory."""
        if self._backend is not None:
            self._backend.close()

    def _open(self) -> "Backend":
        from vlfit.backends.opening import open_backend
        from vlfit.tasks.embeddings import check_embeds

        backend = self.session.open(open_backend)
        check_embeds(backend)
        self.session.note_vectors(backend)
        return backend

    def _facts(self, name: str, found: "PooledAnswer", model: str) -> dict[str, Any]:
        from vlfit.tasks.embeddings import float_list
        from vlfit.tasks.pictures import source_label

        facts: dict[str, Any] = {"item": source_label(name), "embedding": float_list(found.vector)}
        if self.whole:
            timings = {} if found.timings is None else {"total_s": round(found.timings.total_s, 4)}
            usage = {**asdict(found.usage), "total_tokens": found.usage.total_tokens}
            facts |= {
                "model": model,
                "images": [asdict(image) for image in found.images],
                "usage": usage,
                "timings": timings,
            }
        return facts


def _write(path: Path, vectors: "list[Vector]") -> None:
    """Write ``vectors`` as one array, whole or not at all. Raises ``CannotWrite``."""
    import numpy as np

    from vlfit.atomic_write import write_whole

    if not vectors:
        raise VlfitError("there is no vector to write", "See the errors above.")
    encoded = io.BytesIO()
    np.save(encoded, np.stack(vectors))
    try:
        write_whole(path, encoded.getvalue())
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}", "Name another file.") from error
