"""``vlfit scene`` and ``vlfit detect``: objects in pictures, with their boxes."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.ask import JSON_LINES, Pictures, check_encoding
from vlfit.cli.options import ANSWERING, MEDIA, CommandOptions, media_options, takes_options
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.cli.printing import Printer
    from vlfit.tasks.boxes import SceneObject
    from vlfit.tasks.objects import Detection, Scene


@takes_options(*MEDIA, *ANSWERING, json=JSON_LINES)
def scene(
    pictures: Pictures,
    *,
    options: CommandOptions,
) -> None:
    """List the objects in each picture, with boxes.

    Prints a summary, the objects with their boxes, and the text in the picture. Boxes are left, top, right,
    bottom in pixels of the original picture; the model's own coordinates (0 to 1000) stand beside them. What
    had to be repaired or dropped in the model's answer is noted on stderr. In JSON that is "warnings", text
    in the picture is "words", and the raw answer is "text".

    \b
    Examples:
      vlfit scene photo.jpg
      vlfit scene photo.jpg --json | jq '.objects[].label'
    """
    from vlfit.cli.session import Session, expand_patterns, for_each_picture, named_parts

    media = media_options(options)
    with Session(options, needs_pictures=True) as session:
        names = expand_patterns(pictures)

        def work(name: str) -> None:
            from vlfit.tasks.files import single_parts
            from vlfit.tasks.pictures import source_label

            parts = single_parts(session.load(name, media), clips=False)  # before the model loads
            for shown, part in named_parts(name, parts):
                found = session.model.scene(part, **session.sampling)
                prefix = f"{source_label(shown)}: " if len(names) > 1 or shown != name else ""
                if options.json:
                    session.printer.data(_scene_facts(shown, found))
                else:
                    session.printer.line(_scene_text(found, prefix))
                _print_warnings(session.printer, found)

        for_each_picture(names, work)


def _scene_text(scene: "Scene", prefix: str) -> str:
    lines = [prefix + (scene.summary or "(no summary)")]
    if scene.objects:
        width = max(len(thing.label) for thing in scene.objects)
        lines += ["", "objects", *(f"  {object_line(thing, width)}" for thing in scene.objects)]
    if scene.text:
        lines += ["", "text", *(f"  {word}" for word in scene.text)]
    return "\n".join(lines)


def object_line(thing: "SceneObject", width: int) -> str:
    """One line: the object's label, padded to ``width``, and its box in pixels and in thousandths."""
    pixels = ", ".join(map(str, thing.box))
    thousandths = ", ".join(f"{edge:g}" for edge in thing.box_1000)
    return f"{thing.label:{width}}  ({pixels}) pixels  [{thousandths}] of 1000"


def _scene_facts(name: str, scene: "Scene") -> dict[str, Any]:
    from vlfit.cli.printing import answer_json

    return {
        "picture": name,
        "summary": scene.summary,
        "objects": [asdict(thing) for thing in scene.objects],
        "words": list(scene.text),
        "warnings": list(scene.warnings),
        **answer_json(scene.answer),
    }


def _print_warnings(printer: "Printer", scene: "Scene") -> None:
    for warning in scene.warnings:
        printer.note_once(f"  {warning}")
    printer.print_answer_notes(scene.answer)


@takes_options(*MEDIA, *ANSWERING, json=JSON_LINES)
def detect(
    picture: Annotated[str, typer.Argument(metavar="PICTURE", help="A file, a URL, or - for stdin.")],
    things: Annotated[
        str, typer.Argument(metavar="THINGS", help='Objects to find: "cups", or "cups, plates".')
    ],
    draw: Annotated[
        Path | None,
        typer.Option("--draw", metavar="FILE", help="Save the picture with its boxes to this file."),
    ] = None,
    *,
    options: CommandOptions,
) -> None:
    """Find objects in a picture.

    Prints a line per object: its label, and its box as left, top, right, bottom in pixels of the original
    picture, upright as its EXIF says; the model's own coordinates (0 to 1000) stand beside them. If nothing
    is found, it prints no line, says so on stderr, and exits with 0.

    \b
    Examples:
      vlfit detect table.jpg "cups"
      vlfit detect table.jpg "cups, plates" --draw found.png
      vlfit detect table.jpg cups --json | jq '.objects[].box'
    """
    from vlfit.cli.session import Session

    check_things(things)
    media = media_options(options)
    if draw is not None:
        from vlfit.tasks.drawing import check_drawing_path

        check_drawing_path(draw, picture)
    with Session(options, needs_pictures=True) as session:
        from vlfit.tasks.files import single_picture

        loaded = single_picture(session.load(picture, media))
        found = session.model.detect(loaded, things, **session.sampling)
        if options.json:
            session.printer.data(_detection_facts(picture, found))
        else:
            for line in _detection_lines(found):
                session.printer.line(line)
        if not found.objects:
            session.printer.note(f"  none found: {things}")
        for warning in found.warnings:
            session.printer.note(f"  {warning}")
        session.printer.print_answer_notes(found.answer)
        if draw is not None:
            from vlfit.tasks.drawing import draw_boxes, save_drawing

            save_drawing(draw_boxes(loaded, found.objects), draw, picture)
            session.printer.note(f"  drawn: {draw}")


def check_things(things: str) -> None:
    """Raise ``UsageError`` if ``things``, the argument of ``vlfit detect``, names no object to find."""
    check_encoding(things, "the name of the things")
    if not things.strip(" ,\t\n"):
        raise UsageError("no object to find is named", 'Name some, in quotes: "cups, plates".')


def _detection_lines(found: "Detection") -> list[str]:
    width = max((len(thing.label) for thing in found.objects), default=0)
    return [object_line(thing, width) for thing in found.objects]


def _detection_facts(name: str, found: "Detection") -> dict[str, Any]:
    from vlfit.cli.printing import answer_json

    return {
        "picture": name,
        "objects": [asdict(thing) for thing in found.objects],
        "width": found.width,
        "height": found.height,
        "warnings": list(found.warnings),
        **answer_json(found.answer),
    }
