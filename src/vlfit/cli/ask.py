"""``vlfit ask``: an answer to a question about pictures."""

from pathlib import Path
from typing import Annotated

import typer

from vlfit.cli.options import CommonOptions, takes_common_options
from vlfit.errors import UsageError


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
    from vlfit.cli.pictures import named_pictures
    from vlfit.cli.session import Session

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
