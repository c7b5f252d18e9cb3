"""Questions about several things at once and their true answers: by group, shape, colour or number.

Each function draws one (question, answer) for a ``Teller``, or None if its scene offers none.
"""

from training.mini.asked_of_things import one_of, there_are
from training.mini.phrases import at_place, capital, is_are, join
from training.mini.scenes import Thing, count_of, place_of
from training.mini.teller import Answered, Teller
from training.mini.vocabulary import COLOURS, GROUP_PLURALS, UNCOUNTED, plural, with_article

# How often a group of so many is asked about when it comes up, so that each number is asked alike. Few scenes
# hold many of a group, and nearly all hold one or two.
KEPT = {0: 0.05, 1: 0.06, 2: 0.25, 3: 0.5}
# More than so many are not counted; of more than so many the places are not told one by one.
MOST = 9
MOST_PLACES = 3


def kindred(teller: Teller) -> Answered:
    """How many animals, vehicles or shapes there are; every number from 1 to 9 about as often."""
    if teller.scene.sort != "things":
        return None
    groups = sorted({group_of(thing) for thing in teller.scene.things} & {*GROUP_PLURALS, "shape"})
    if not groups or teller.chance(0.02):
        groups = sorted({*GROUP_PLURALS, "shape"})
    group = teller.pick(*groups)
    number = sum(group_of(thing) == group for thing in teller.scene.things)
    if number > MOST or not teller.chance(KEPT.get(number, 1.0)):
        return None
    one = "shape" if group == "shape" else one_of(group)
    several = "shapes" if group == "shape" else GROUP_PLURALS[group]
    return teller.way("how many", NAMES=several), there_are(number, one, several)


def group_of(thing: Thing) -> str:
    """What sort of thing it is: "shape", "animal", or empty."""
    return "shape" if thing.kind == "shape" else thing.group


def coloured(teller: Teller) -> Answered:
    """How many things are red, what is red, and where the red thing is."""
    colours = askable_colours(teller)
    if not colours:
        return None
    # One colour that is not there, beside those that are.
    absent = teller.pick(*(name for name in COLOURS if name not in teller.scene.background.names))
    colour = absent if teller.chance(0.15) else teller.pick(*colours)
    found = [thing for thing in teller.scene.things if thing.colour == colour]
    draw = teller.random.random()
    if draw < 0.35:
        question = teller.way("how many colour", COLOUR=colour)
        return question, there_are(len(found), f"{colour} thing", f"{colour} things")
    if draw < 0.65:
        return _what_is(teller, colour, found)
    return _where_is(teller, colour, found)


def askable_colours(teller: Teller) -> list[str]:
    """The colours that things have, where nothing else in the picture could be meant by them.

    None where a drawing of many colours, letters, or a background of the same colour leave room for argument.
    """
    scene = teller.scene
    plain = scene.sort == "things" and scene.background.kind in ("plain", "gradient")
    if not plain or any(thing.written or not thing.colour for thing in scene.things):
        return []
    return sorted({thing.colour for thing in scene.things} - set(scene.background.names))


def _what_is(teller: Teller, colour: str, found: list[Thing]) -> Answered:
    question = teller.way("what is coloured", COLOUR=colour)
    if not found:
        return question, f"Nothing is {colour}."
    names = [thing.name for thing in found]
    if len(names) > MOST_PLACES or len(set(names)) < len(names):
        return None
    verb = "are" if len(names) > 1 else is_are(names[0])
    return question, capital(f"{join([f'the {name}' for name in names])} {verb} {colour}.")


def _where_is(teller: Teller, colour: str, found: list[Thing]) -> Answered:
    named = f"the {colour} {teller.pick('thing', 'one', 'object')}"
    if not found:
        return teller.way("where", NAME=named, IS="is"), f"There is no {colour} thing in the picture."
    place = place_of(found[0])
    if len(found) > 1 or place is None:
        return None
    label, verb = found[0].label, is_are(found[0].name)
    return teller.way("where", NAME=named, IS="is"), f"The {label} {verb} {at_place(place)}."


def where_several(teller: Teller) -> Answered:
    """Where the circles are: two or three by their places, more by their number."""
    found = _several(teller)
    if not found:
        return None
    name = found[0].name
    question = teller.way("where", NAME=f"the {plural(name)}", IS="are")
    if len(found) > MOST_PLACES:
        return question, there_are(len(found), name, plural(name))
    places = [place_of(thing) for thing in found]
    if None in places or len(set(places)) < len(places):
        return None
    first, *others = (at_place(place or "") for place in places)
    told = [f"one {name} is {first}", *(f"one is {place}" for place in others)]
    return question, capital(join(told)) + "."


def _several(teller: Teller) -> list[Thing]:
    """All things of a name that several bear, or none."""
    things = [t for t in teller.scene.things if not t.written and t.name not in UNCOUNTED and t.kind != "bar"]
    model = teller.pick_thing([t for t in things if count_of(teller.scene, t.name) > 1])
    return [t for t in things if model is not None and t.name == model.name]


def so_many(teller: Teller) -> Answered:
    """Whether there are two circles, or more than one."""
    if teller.scene.sort != "things":
        return None
    things = [t for t in teller.scene.things if not t.written and t.name not in UNCOUNTED]
    thing = teller.pick_thing(things)
    missing = thing is None or teller.chance(0.1)
    name = thing.name if thing and not missing else teller.absent(countable=True, like=thing)
    number, several = count_of(teller.scene, name), plural(name)
    # Most things are alone: asked about as they come, nearly every answer would be no.
    if number > MOST or (number < 2 and teller.chance(0.85)):
        return None
    if teller.chance(0.4):
        question = teller.way("more than one", NAME=name, NAMES=several)
        # "Is there only one" turns the answer round.
        yes = (number == 1) if "only" in question else number > 1
        return question, _yes_or_no(yes, there_are(number, name, several))
    near = [near for near in (number - 2, number - 1, number + 1, number + 2) if 2 <= near <= 9]
    asked = number if number > 1 and teller.chance(0.5) else int(teller.pick(*map(str, near)))
    spoken = teller.pick(str(asked), _WORDS[asked])
    question = teller.way("so many", COUNT=spoken, NAMES=several)
    return question, _yes_or_no(asked == number, there_are(number, name, several))


def _yes_or_no(yes: bool, sentence: str) -> str:
    return f"{'Yes' if yes else 'No'}, {sentence[0].lower()}{sentence[1:]}"


_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def letters(teller: Teller) -> Answered:
    """The colour of the only text there is."""
    written = [thing for thing in teller.scene.things if thing.written]
    if len(written) != 1 or teller.scene.sort != "things":
        return None
    question = teller.way("colour of text")
    subject = "The letters are" if "letters" in question.lower() else "The text is"
    if written[0].kind == "number":
        subject = "The number is"
    return question, f"{subject} {written[0].colour}."


def is_written(teller: Teller) -> Answered:
    """Whether there is text, a word or a number."""
    if teller.scene.sort != "things":
        return None
    kind = teller.pick("word", "number")
    found = [thing for thing in teller.scene.things if thing.kind == kind]
    question = teller.way("is there", A=with_article(kind), IS="is")
    if not found:
        # Most scenes show no text: asked about as they come, nearly every answer would be no.
        return (question, f"No, there is no {kind}.") if teller.chance(0.2) else None
    if len(found) > 1:
        return None
    said = f'the word "{found[0].name}"' if kind == "word" else f"the number {found[0].name}"
    return question, f"Yes, there is {said}."
