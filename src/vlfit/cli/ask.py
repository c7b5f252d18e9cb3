"""``vlfit caption`` and ``vlfit ask``: captions, and answers about pictures."""

from pathlib import Path
from typing import Annotated

import typer

from vlfit.cli.options import ANSWERING, MEDIA, Options, media_options, takes_options
from vlfit.errors import UsageError


@takes_options(
    *MEDIA, *ANSWERING, json="Print one line of JSON per answer, with picture sizes, tokens and times."
)
def caption(
    pictures: Annotated[
        list[str],
        typer.Argument(
            metavar="PICTURE", help="Pictures, PDFs (a.pdf#2-5), videos, globs, URLs, or - for stdin."
        ),
    ],
    long: Annotated[bool, typer.Option("--long", help="A paragraph instead of a sentence.")] = False,
    *,
    options: Options,
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
            from vlfit.tasks.files import load_file, single_parts

            for shown, part in named_parts(name, single_parts(load_file(name, media), clips=True)):
                words = session.model.stream_caption(part, "long" if long else "short", **session.sampling)
                prefix = f"{source_label(shown)}: " if len(names) > 1 or shown != name else ""
                session.printer.say(words, prefix=prefix, facts={"picture": shown})

        for_each_picture(names, work)


@takes_options(
    *MEDIA, *ANSWERING, json="Print one line of JSON per answer, with picture sizes, tokens and times."
)
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
    options: Options,
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
    media = media_options(options)
    with Session(options, needs_pictures=bool(patterns)) as session:
        from vlfit.tasks.files import load_file

        names = expand_patterns(patterns) if patterns else []
        pictures = [load_file(name, media) for name in names]
        words = session.model.stream(question, *pictures, system=system, **session.sampling)
        session.printer.say(words, facts={"pictures": names, "question": question})


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
