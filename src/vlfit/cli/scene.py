"""``vlfit scene``: what is in a picture, and where."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import CommonOptions, takes_common_options

if TYPE_CHECKING:
    from vlfit.cli.printing import Printer
    from vlfit.tasks.boxes import SceneObject
    from vlfit.tasks.objects import Detection, Scene


@takes_common_options
def scene(
    pictures: Annotated[
        list[str],
        typer.Argument(metavar="PICTURE", help="Files, globs, URLs, or - for standard input."),
    ],
    *,
    options: CommonOptions,
) -> None:
    """List what is in a picture, and where.

    Gives a summary, the objects with their boxes, and the words on it, for each picture. Boxes are
    left, top, right, bottom in pixels of the original picture; beside them stand the model's own numbers, in
    thousandths of width and height. What had to be mended or dropped of its answer is said on stderr. In
    JSON that is under "warnings", the words seen under "words", and the answer as it came under "text".

    \b
    Examples:
      vlfit scene photo.jpg
      vlfit scene photo.jpg --json | jq '.objects[].label'
    """
    from vlfit.cli.session import Session, for_each_picture, named_pictures

    with Session(options, looks=True) as session:
        names = named_pictures(pictures)

        def work(name: str) -> None:
            from vlfit.tasks.pictures import load_picture, name_of

            found = session.model.scene(load_picture(name), **session.sampling)
            if options.json:
                session.printer.data(_facts(name, found))
            else:
                session.printer.line(_words(found, f"{name_of(name)}: " if len(names) > 1 else ""))
            _remarks(session.printer, found)

        for_each_picture(names, work)


def _words(scene: "Scene", prefix: str) -> str:
    lines = [prefix + (scene.summary or "(no summary)")]
    if scene.objects:
        width = max(len(thing.label) for thing in scene.objects)
        lines += ["", "objects", *(f"  {object_line(thing, width)}" for thing in scene.objects)]
    if scene.text:
        lines += ["", "text", *(f"  {word}" for word in scene.text)]
    return "\n".join(lines)


def object_line(thing: "SceneObject", width: int) -> str:
    """Its label in ``width`` letters, and its box."""
    pixels = ", ".join(map(str, thing.box))
    thousandths = ", ".join(f"{edge:g}" for edge in thing.box_1000)
    return f"{thing.label:{width}}  ({pixels}) pixels  [{thousandths}] of 1000"


def _facts(name: str, scene: "Scene") -> dict[str, Any]:
    from vlfit.cli.printing import answer_facts

    return {
        "picture": name,
        "summary": scene.summary,
        "objects": [asdict(thing) for thing in scene.objects],
        "words": list(scene.text),
        "warnings": list(scene.warnings),
        **answer_facts(scene.answer),
    }


def _remarks(printer: "Printer", scene: "Scene") -> None:
    for warning in scene.warnings:
        printer.note(f"  {warning}")
    printer.costs(scene.answer)


# ``vlfit detect``: where things are in a picture, in pixels, or drawn over it.


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
            session.printer.data(_detection_facts(picture, found))
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

    width = max((len(thing.label) for thing in found.objects), default=0)
    return [object_line(thing, width) for thing in found.objects]


def _detection_facts(name: str, found: "Detection") -> dict[str, Any]:
    from vlfit.cli.printing import answer_facts

    return {
        "picture": name,
        "objects": [asdict(thing) for thing in found.objects],
        "width": found.width,
        "height": found.height,
        "warnings": list(found.warnings),
        **answer_facts(found.answer),
    }
