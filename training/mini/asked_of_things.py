"""Questions about single things of a scene and their true answers.

Each function draws one (question, answer) for a ``Teller``, or None if its scene offers none. An answer
follows from the scene and the question alone, so it can be judged by comparing words.
"""

from training.mini.phrases import (
    at_place,
    background_sentence,
    boxes,
    capital,
    empty_sentence,
    fenced,
    is_are,
)
from training.mini.scenes import CLEARLY_BIGGER, Scene, Thing, count_of, place_of
from training.mini.teller import Answered, Teller
from training.mini.vocabulary import COLOURS, GROUP_PLURALS, PLACES, UNCOUNTED, plural, with_article

# Centres that lie closer are neither left nor right of each other.
CLEARLY_APART = 0.15


def colour(teller: Teller) -> Answered:
    thing = teller.pick_thing([t for t in teller.unique if t.colour])
    if thing is None:
        return None
    name = thing.kind if thing.written else thing.name
    verb = is_are(name)
    question = teller.way("colour", NAME=name, IS=verb, DOES="do" if verb == "are" else "does")
    return question, f"The {name} {verb} {thing.colour}."


def shape(teller: Teller) -> Answered:
    shapes = [t for t in teller.scene.things if t.kind == "shape"]
    colours = [t.colour for t in teller.scene.things]
    thing = teller.pick_thing([t for t in shapes if colours.count(t.colour) == 1])
    if thing is None:
        return None
    if len(shapes) == 1 and teller.chance(0.4):
        return teller.way("shape only"), f"It is {with_article(thing.name)}."
    question = teller.way("shape", COLOUR=thing.colour)
    return question, f"The {thing.name} is {thing.colour}."


def name(teller: Teller) -> Answered:
    things = teller.scene.things
    if len(things) == 1 and not things[0].written and teller.chance(0.6):
        question = teller.way("name only")
        return question, f"It is {with_article(things[0].label)}."
    places = [place_of(thing) for thing in things]
    thing = teller.pick_thing(
        [t for t, place in zip(things, places, strict=True) if places.count(place) == 1 and not t.written]
    )
    # Every other thing must have a clear place too, or it might be meant as well.
    if thing is None or None in places:
        return None
    place = at_place(place_of(thing) or "")
    question = teller.way("name at", PLACE=place)
    return question, f"It is {with_article(thing.label)}."


def group(teller: Teller) -> Answered:
    """How many animals, which animal, or whether there is one."""
    groups = [t.group for t in teller.scene.things if t.group in GROUP_PLURALS]
    if teller.scene.sort == "photo":
        return None
    if not groups or teller.chance(0.25):
        asked = teller.pick(*groups) if groups and teller.chance(0.6) else teller.pick(*GROUP_PLURALS)
        article = with_article(asked)
        there = f"Yes, there is {article}." if asked in groups else f"No, there is no {one_of(asked)}."
        question = teller.way("group there", A=article, NAMES=GROUP_PLURALS[asked])
        return question, there
    asked = teller.pick(*groups)
    alike = [t for t in teller.scene.things if t.group == asked]
    if len(alike) == 1 and teller.chance(0.6):
        return teller.way("group which", NAME=one_of(asked)), f"It is {with_article(alike[0].name)}."
    several = GROUP_PLURALS[asked]
    question = teller.way("how many", NAMES=several)
    return question, there_are(len(alike), one_of(asked), several)


def one_of(group: str) -> str:
    """ "animal", "piece of food"."""
    return with_article(group).partition(" ")[2]


def count(teller: Teller) -> Answered:
    if teller.scene.sort == "photo":
        return None
    things = [t for t in teller.scene.things if t.kind in ("shape", "sprite") and t.name not in UNCOUNTED]
    draw = teller.random.random()
    thing = teller.pick_thing(things)
    if draw < 0.12 or thing is None:
        missing = plural(teller.absent(countable=True, like=thing if draw < 0.06 else None))
        question = teller.way("how many", NAMES=missing)
        return question, f"There are no {missing}."
    coloured = f"{thing.colour} " if draw < 0.4 and thing.kind == "shape" else ""
    number = count_of(teller.scene, thing.name, coloured.strip())
    several = coloured + plural(thing.name)
    question = teller.way("how many", NAMES=several)
    return question, there_are(number, coloured + thing.name, several)


def count_all(teller: Teller) -> Answered:
    if teller.scene.sort != "things":
        return None
    question = teller.way("how many things")
    return question, there_are(len(teller.scene.things), "thing", "things")


def there_are(number: int, one: str, several: str) -> str:
    """ "There is 1 dog.", "There are 3 dogs.", "There are no dogs."."""
    if not number:
        return f"There are no {several}."
    return f"There is 1 {one}." if number == 1 else f"There are {number} {several}."


def place(teller: Teller) -> Answered:
    thing = teller.pick_thing([t for t in teller.unique if place_of(t)])
    if thing is None:
        return None
    named = teller.reference(thing)
    verb = is_are(thing.name)
    question = teller.way("where", NAME=named, IS=verb)
    return question, f"{capital(named)} {verb} {at_place(place_of(thing) or '')}."


def relation(teller: Teller) -> Answered:
    pair = teller.pair()
    if pair is None:
        return None
    first, second = pair
    sideways = teller.chance(0.5)
    apart = first.x - second.x if sideways else first.y - second.y
    if abs(apart) < CLEARLY_APART:
        return None
    side, opposite = ("left of", "right of") if sideways else ("above", "below")
    truth = side if apart < 0 else opposite
    one, other = teller.reference(first), teller.reference(second)
    verb = is_are(first.name)
    if teller.chance(0.5):
        question = teller.way("side or", ONE=one, OTHER=other, IS=verb, SIDE=side, OPPOSITE=opposite)
        return question, f"{capital(one)} {verb} {truth} {other}."
    asked = side if teller.chance(0.5) else opposite
    yes = "Yes" if asked == truth else "No"
    spoken = asked if not sideways or teller.chance(0.6) else f"to the {asked}"
    question = teller.way("side", ONE=one, OTHER=other, IS=verb, SIDE=spoken)
    return question, f"{yes}, {one} {verb} {truth} {other}."


def is_there(teller: Teller) -> Answered:
    if teller.scene.sort == "photo":
        return None
    things = [t for t in teller.scene.things if t.kind in ("shape", "sprite")]
    thing = teller.pick_thing(things)
    if thing is not None and teller.chance(0.5):
        label = thing.label if teller.chance(0.6) else thing.name
        present = True
    else:
        label, present = _missing(teller, thing), False
    article = label if is_are(label) == "are" else with_article(label)
    question = teller.way("is there", A=article, IS=is_are(label))
    there = f"there {is_are(label)}"
    return question, f"Yes, {there} {article}." if present else f"No, {there} no {label}."


def _missing(teller: Teller, thing: Thing | None) -> str:
    """What is not there, but nearly: the right shape in a wrong colour, another animal."""
    if thing is None or teller.chance(0.4):
        return teller.absent()
    if thing.kind == "sprite":
        return teller.absent(like=thing)
    other = teller.pick(*COLOURS)
    present = count_of(teller.scene, thing.name, other) > 0
    return teller.absent() if present else f"{other} {thing.name}"


def bigger(teller: Teller) -> Answered:
    """Which of two is bigger, which of all is the biggest, or whether one is large or small."""
    if teller.scene.sort != "things":
        return None
    draw = teller.random.random()
    if draw < 0.25:
        thing = teller.pick_thing([t for t in teller.unique if t.size_word])
        if thing is None:
            return None
        named, verb = teller.reference(thing), is_are(thing.name)
        answer = f"{capital(named)} {verb} {thing.size_word.strip()}."
        return teller.way("large or small", NAME=named, IS=verb), answer
    ordered = sorted(teller.scene.things, key=lambda thing: -thing.side)
    if draw < 0.5:
        clear = len(ordered) > 1 and ordered[0].side ** 2 > CLEARLY_BIGGER * ordered[1].side ** 2
        if not clear or ordered[0].written:
            return None
        question = teller.way("biggest")
        return question, f"The biggest thing is the {ordered[0].label}."
    pair = teller.pair()
    if pair is None or not _clearly_bigger(*pair):
        return None
    names = [teller.reference(thing) for thing in pair]
    word = teller.pick("bigger", "bigger", "smaller")
    wins = (pair[0].side > pair[1].side) == (word == "bigger")
    winner, verb = (names[0], is_are(pair[0].name)) if wins else (names[1], is_are(pair[1].name))
    question = teller.way("which is", WORD=word, ONE=names[0], OTHER=names[1])
    return question, f"{capital(winner)} {verb} {word}."


def _clearly_bigger(one: Thing, other: Thing) -> bool:
    ratio = (one.side / other.side) ** 2
    return max(ratio, 1 / ratio) > CLEARLY_BIGGER


def written(teller: Teller) -> Answered:
    thing = teller.pick_thing([t for t in teller.scene.things if t.written])
    if thing is None:
        return None
    if thing.kind == "number":
        question = teller.way("number")
        return question, f"The number is {thing.name}."
    question = teller.way("word")
    return question, f'It says "{thing.name}".'


def background(teller: Teller) -> Answered:
    if teller.scene.sort == "photo":
        return None
    question = teller.way("background")
    return question, background_sentence(teller.scene.background)


def grounding(teller: Teller) -> Answered:
    """The box of one thing, or of all of its name; an empty list for what is not there."""
    if teller.scene.sort == "photo":
        return None
    thing = teller.pick_thing([t for t in teller.scene.things if not t.written])
    if thing is None or teller.chance(0.06):
        missing = teller.absent(like=thing)
        return teller.way("box of", NAME=f"the {missing}", IS=is_are(missing)), fenced([])
    alike = [t for t in teller.scene.things if t.label == thing.label]
    named = f"the {thing.label}" if len(alike) == 1 else f"every {thing.label}"
    return teller.way("box of", NAME=named, IS=is_are(thing.label)), fenced(boxes(teller.scene, alike))


def locate_all(teller: Teller) -> Answered:
    if teller.scene.sort == "photo":
        return None
    return teller.way("box of all"), fenced(boxes(teller.scene, teller.scene.things))


def unanswerable(teller: Teller) -> Answered:
    """Questions that take something for granted that is not there."""
    if teller.scene.sort == "photo":
        return None
    if teller.scene.sort == "empty":
        question = teller.way("nothing", PLACE=at_place(teller.pick(*(p for row in PLACES for p in row))))
        return question, empty_sentence(teller.scene.background)
    if not teller.scene.texts and teller.chance(0.3):
        question = teller.way("no text")
        return question, "There is no text in the picture."
    missing = teller.absent(like=teller.pick_thing(list(teller.scene.things)) if teller.chance(0.5) else None)
    verb = is_are(missing)
    question = teller.way("where missing", NAME=missing, IS=verb)
    return question, f"There {verb} no {missing} in the picture."


def follow_up(teller: Teller) -> list[tuple[str, str]]:
    """Two turns or three about one thing, which the later ones call "it"; empty if there is none."""
    scene: Scene = teller.scene
    thing = teller.pick_thing([t for t in teller.unique if not t.written and is_are(t.name) == "is"])
    if thing is None:
        return []
    article = with_article(thing.label)
    spot = place_of(thing)
    if len(scene.things) == 1 and teller.chance(0.5):
        turns = [("What is this?", f"It is {article}.")]
    else:
        turns = [(f"Is there {article}?", f"Yes, there is {article}.")]
    later = [(f"How many {plural(thing.name)} are there?", f"There is 1 {thing.name}.")]
    if thing.name in UNCOUNTED:
        later = []
    if spot:
        later += [
            ("Where is it?", f"It is {at_place(spot)}."),
            ("And where is it?", f"It is {at_place(spot)}."),
            ("In which part of the picture?", f"It is {at_place(spot)}."),
            ("And its position?", f"It is {at_place(spot)}."),
        ]
    if thing.colour:
        later += [
            ("What colour is it?", f"It is {thing.colour}."),
            ("What color is it?", f"It is {thing.colour}."),
            ("And its colour?", f"It is {thing.colour}."),
            ("Which color?", f"It is {thing.colour}."),
        ]
    if thing.size_word:
        later += [("How big is it?", f"It is {thing.size_word.strip()}.")]
        later += [("Is it large or small?", f"It is {thing.size_word.strip()}.")]
    later += [("And the background?", background_sentence(scene.background)), ("Thanks!", "You are welcome.")]
    chosen = teller.random.permutation(len(later))[: 1 + int(teller.chance(0.5))]
    return turns + [later[int(index)] for index in chosen]
