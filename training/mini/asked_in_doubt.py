"""Yes-or-no questions and their true answers: a colour, what is at a place, a person.

Each function draws one (question, answer) for a ``Teller``, or None if its scene offers none; yes and no are
about as frequent.
"""

from training.mini.phrases import at_place, is_are
from training.mini.scenes import place_of
from training.mini.teller import Answered, Teller
from training.mini.vocabulary import COLOURS, with_article

PEOPLE = frozenset({"man", "woman", "baby"})
# Whether these are people can be argued about.
NEARLY_PEOPLE = frozenset(
    {"clown", "snowman", "ghost", "alien", "skull", "smiley", "robot", "teddy bear", "chess pawn", "painting"}
)


def is_coloured(teller: Teller) -> Answered:
    """Whether the circle is blue."""
    thing = teller.pick_thing([thing for thing in teller.unique if thing.colour])
    if thing is None or teller.scene.sort != "things":
        return None
    asked = thing.colour if teller.chance(0.5) else teller.pick(*(c for c in COLOURS if c != thing.colour))
    name = thing.kind if thing.written else thing.name
    verb = is_are(name)
    question = teller.way("coloured or not", NAME=name, IS=verb, COLOUR=asked)
    return question, f"{'Yes' if asked == thing.colour else 'No'}, the {name} {verb} {thing.colour}."


def is_at(teller: Teller) -> Answered:
    """Whether the thing at the top left is a dog."""
    things = teller.scene.things
    places = [place_of(thing) for thing in things]
    alone = [t for t, place in zip(things, places, strict=True) if places.count(place) == 1 and not t.written]
    thing = teller.pick_thing(alone)
    # Every other thing must have a clear place too, or it might be meant as well.
    if thing is None or None in places or teller.scene.sort != "things":
        return None
    draw = teller.random.random()
    if draw < 0.5:
        asked = thing.name
    elif draw < 0.75:
        asked = teller.absent(like=thing)
    else:
        asked = teller.pick(*(other.name for other in things if not other.written))
    yes = asked == thing.name
    place = at_place(place_of(thing) or "")
    question = teller.way("what or not", PLACE=place, A=with_article(asked))
    return question, f"{'Yes' if yes else 'No'}, it is {with_article(thing.label)}."


def person(teller: Teller) -> Answered:
    """Whether there is a person: a man, a woman or a baby."""
    names = [thing.name for thing in teller.scene.things]
    if teller.scene.sort != "things" or NEARLY_PEOPLE & set(names):
        return None
    people = sorted({name for name in names if name in PEOPLE})
    if any(names.count(name) > 1 for name in people):
        return None
    # Few scenes show people: without this nearly every answer would be no.
    if not people and not teller.chance(0.03):
        return None
    question = teller.way("person")
    if not people:
        return question, "No, there is no person."
    return question, f"Yes, there is {' and '.join(with_article(name) for name in people)}."
