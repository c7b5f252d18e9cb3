"""``vlfit caption``: a sentence for each picture."""

from pathlib import Path
from typing import Annotated

import typer

from vlfit.cli.options import CommonOptions, takes_common_options
from vlfit.errors import UsageError


@takes_common_options
def caption(
    pictures: Annotated[
        list[str],
        typer.Argument(metavar="PICTURE", help="Files, globs, URLs, or - for standard input."),
    ],
    long: Annotated[bool, typer.Option("--long", help="A paragraph instead of a sentence.")] = False,
    *,
    options: CommonOptions,
) -> None:
    """Say what each picture shows.

    One answer for each, with the picture's name before it when there are several. A picture that cannot be
    read is reported and the others go on; the exit code is 1 then.

    \b
    Examples:
      vlfit caption photo.jpg
      vlfit caption --long https://example.org/photo.jpg
      vlfit caption --json 'holiday/*.jpg' > captions.jsonl
      cat photo.jpg | vlfit caption -
      vlfit caption --backend remote http://gpu-box:8000 photo.jpg
    """
    from vlfit.cli.session import Session, for_each_picture, named_pictures

    with Session(options, looks=True) as session:
        names = named_pictures(pictures)

        def work(name: str) -> None:
            from vlfit.tasks.pictures import load_picture, name_of

            picture = load_picture(name)
            words = session.model.stream_caption(picture, "long" if long else "short", **session.sampling)
            prefix = f"{name_of(name)}: " if len(names) > 1 else ""
            session.printer.say(words, prefix=prefix, facts={"picture": name})

        for_each_picture(names, work)


# ``vlfit ask``: an answer to a question about pictures.


@takes_common_options
def ask(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar='PICTURE... "QUESTION"',
            help="Files, globs, URLs, or - for standard input; the question comes last.",
        ),
    ],
    system: Annotated[
        str,
        typer.Option(
            "--system", metavar="TEXT", help="Tell the model first how to answer.", show_default=False
        ),
    ] = "",
    *,
    options: CommonOptions,
) -> None:
    """Answer a question about pictures.

    About one picture, about several together, or about none.

    \b
    Examples:
      vlfit ask photo.jpg "What colour is the car?"
      vlfit ask before.jpg after.jpg "What has changed?"
      vlfit ask photo.jpg "How many people?" --json --max-tokens 50
      cat photo.jpg | vlfit ask - "What is this?"
    """
    from vlfit.cli.session import Session, named_pictures

    *patterns, question = arguments
    _refuse_missing_question(question)
    with Session(options, looks=bool(patterns)) as session:
        from vlfit.tasks.pictures import load_picture

        names = named_pictures(patterns) if patterns else []
        pictures = [load_picture(name) for name in names]
        words = session.model.stream(question, *pictures, system=system, **session.sampling)
        session.printer.say(words, facts={"pictures": names, "question": question})


def _refuse_missing_question(question: str) -> None:
    """Forgetting the question is the easy mistake here: the last picture would be asked as if it were one.

    An empty question is told apart: as a path it would be the folder one is in.
    """
    if not question.strip():
        raise UsageError(
            "the last argument is the question, and it is empty",
            'ask something, in quotes: vlfit ask photo.jpg "What is this?"',
        )
    is_picture = question == "-" or question.startswith(("http://", "https://", "data:"))
    # A question can be too long to be a file name, or hold characters that none may have.
    try:
        is_picture = is_picture or Path(question).exists()
    except (OSError, ValueError):
        is_picture = False
    if is_picture:
        from vlfit.tasks.pictures import name_of

        raise UsageError(
            f"the last argument is the question, but {name_of(question)} is a picture",
            'put the question last, in quotes: vlfit ask photo.jpg "What is this?"',
        )
