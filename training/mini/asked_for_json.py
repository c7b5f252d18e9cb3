"""Questions that want JSON, beside vlfit's own tasks: boxes by category, and forms that the question shows.

Each function draws one (question, answer) for a ``Teller``, or None if its scene offers none. The wordings
are those that people copy from Qwen3-VL's own examples.
"""

from training.mini.asked_of_groups import group_of
from training.mini.asked_of_things import one_of
from training.mini.phrases import fenced, groups
from training.mini.scenes import Thing
from training.mini.teller import Answered, Teller
from training.mini.vocabulary import GROUP_PLURALS

MOST_CATEGORIES = 3
# What a form may ask for, and how people show what stands there.
FORMS: dict[str, tuple[str, ...]] = {
    "count": ("number", "0", "int", "how many things"),
    "colours": ('["colour"]', "[..]", '["..."]', "list of colours"),
    "colour": ('"colour"', '"..."', "string"),
    "name": ('"name"', '"..."', "string"),
    "names": ('["name"]', "[..]", '["...", "..."]'),
    "objects": ('["name"]', "[..]", "list of names"),
    "text": ('["words"]', "[..]", '["..."]', "list of strings"),
    "background": ('"colour"', '"..."', "string"),
}


def categories(teller: Teller) -> Answered:
    """The boxes of all things of one to three categories, some of which may not be there."""
    if teller.scene.sort != "things":
        return None
    present = sorted({thing.name for thing in teller.scene.things if not thing.written})
    wanted = [present[int(index)] for index in teller.random.permutation(len(present))[:MOST_CATEGORIES]]
    wanted = wanted[: 1 + int(teller.random.random() * MOST_CATEGORIES)]
    if not wanted or (len(wanted) < MOST_CATEGORIES and teller.chance(0.3)):
        wanted.insert(int(teller.random.random() * (len(wanted) + 1)), teller.absent())
    between = teller.pick(", ", ", ", '", "', ",")
    question = teller.way("categories", NAMES=between.join(wanted))
    # Only quoted lists are quoted between their names.
    if f'"{wanted[0]}' not in question:
        question = question.replace('", "', ", ")
    return question, fenced(_labelled(teller, [t for t in teller.scene.things if t.name in wanted]))


def group_boxes(teller: Teller) -> Answered:
    """The boxes of all animals, all shapes, all vehicles."""
    if teller.scene.sort != "things":
        return None
    present = sorted({group_of(thing) for thing in teller.scene.things} & {*GROUP_PLURALS, "shape"})
    group = teller.pick(*present) if present and teller.chance(0.9) else teller.pick(*GROUP_PLURALS, "shape")
    one = "shape" if group == "shape" else one_of(group)
    several = "shapes" if group == "shape" else GROUP_PLURALS[group]
    question = teller.way("box of group", NAME=one, NAMES=several)
    return question, fenced(_labelled(teller, [t for t in teller.scene.things if group_of(t) == group]))


def _labelled(teller: Teller, things: list[Thing]) -> list[dict[str, object]]:
    """Boxes labelled by name, from left to right: what a category was called in the question."""
    return [{"bbox_2d": list(teller.scene.box(thing)), "label": thing.name} for thing in things]


def own_json(teller: Teller) -> Answered:
    """One to three facts in a form that the question shows."""
    known = _facts(teller)
    if not known:
        return None
    names = list(known)
    chosen = [names[int(index)] for index in teller.random.permutation(len(names))]
    chosen = chosen[: 1 + int(teller.random.random() * 3)]
    shown = ", ".join(f'"{name}": {teller.pick(*FORMS[name])}' for name in chosen)
    question = teller.way("own json", FORM="{" + shown + "}")
    return question, fenced({name: known[name] for name in chosen})


def _facts(teller: Teller) -> dict[str, object]:
    """What of ``FORMS`` can be told of the scene without an argument."""
    scene = teller.scene
    if scene.sort != "things":
        return {}
    things = scene.things
    names = [group[0].name for group in groups(scene)]
    facts: dict[str, object] = {"count": len(things), "text": scene.texts}
    if not any(thing.written for thing in things):
        facts["names"] = facts["objects"] = list(dict.fromkeys(names))
    if all(thing.colour for thing in things):
        facts["colours"] = list(dict.fromkeys(thing.colour for thing in things))
    if len(things) == 1:
        facts |= {"colour": things[0].colour} if things[0].colour else {}
        facts |= {} if things[0].written else {"name": things[0].name}
    if scene.background.kind == "plain":
        facts["background"] = scene.background.names[0]
    return facts
