"""``vlfit caption``: a sentence for each picture."""

from typing import Annotated

import typer

from vlfit.cli.options import CommonOptions, takes_common_options


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
    from vlfit.cli.pictures import for_each_picture, named_pictures
    from vlfit.cli.session import Session

    with Session(options, looks=True) as session:
        names = named_pictures(pictures)

        def work(name: str) -> None:
            from vlfit.tasks.pictures import load_picture, name_of

            picture = load_picture(name)
            words = session.model.stream_caption(picture, "long" if long else "short", **session.sampling)
            prefix = f"{name_of(name)}: " if len(names) > 1 else ""
            session.printer.say(words, prefix=prefix, facts={"picture": name})

        for_each_picture(names, work)
