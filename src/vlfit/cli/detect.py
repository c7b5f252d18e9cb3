"""``vlfit detect``: where things are in a picture, in pixels, or drawn over it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import CommonOptions, takes_common_options

if TYPE_CHECKING:
    from vlfit.tasks.detect import Detection


@takes_common_options
def detect(
    picture: Annotated[
        str, typer.Argument(metavar="PICTURE", help="A file, a URL, or - for standard input.")
    ],
    things: Annotated[
        str, typer.Argument(metavar="THINGS", help='What to look for: "cups", or "cups, plates".')
    ],
    draw: Annotated[
        Path | None,
        typer.Option("--draw", metavar="FILE", help="Draw the boxes over the picture, into this file."),
    ] = None,
    *,
    options: CommonOptions,
) -> None:
    """Find things in a picture.

    Gives a line for each: its label, and its box as left, top, right, bottom in pixels of the original
    picture (upright, as its EXIF says); beside them the model's own numbers, in thousandths of width and
    height. Nothing found is no failure: there are no lines then, and stderr says so.

    \b
    Examples:
      vlfit detect table.jpg "cups"
      vlfit detect table.jpg "cups, plates" --draw found.png
      vlfit detect table.jpg cups --json | jq '.objects[].box'
    """
    from vlfit.cli.session import Session

    if draw is not None:
        from vlfit.tasks.drawing import check_drawing

        check_drawing(draw, picture)
    with Session(options, looks=True) as session:
        from vlfit.tasks.pictures import load_picture

        loaded = load_picture(picture)
        found = session.model.detect(loaded, things, **session.sampling)
        if options.json:
            session.printer.data(_facts(picture, found))
        else:
            for line in _lines(found):
                session.printer.line(line)
        if not found.objects:
            session.printer.note(f"  none found: {things}")
        for warning in found.warnings:
            session.printer.note(f"  {warning}")
        session.printer.costs(found.answer)
        if draw is not None:
            from vlfit.tasks.drawing import draw_boxes, save_drawing

            save_drawing(draw_boxes(loaded, found.objects), draw, picture)
            session.printer.note(f"  drawn: {draw}")


def _lines(found: "Detection") -> list[str]:
    from vlfit.cli.scene import object_line

    width = max((len(thing.label) for thing in found.objects), default=0)
    return [object_line(thing, width) for thing in found.objects]


def _facts(name: str, found: "Detection") -> dict[str, Any]:
    from vlfit.cli.printing import answer_facts

    return {
        "picture": name,
        "objects": [asdict(thing) for thing in found.objects],
        "width": found.width,
        "height": found.height,
        "warnings": list(found.warnings),
        **answer_facts(found.answer),
    }
