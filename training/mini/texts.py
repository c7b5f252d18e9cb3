"""What mini is asked about a scene, and the true answers.

Knows: every question mini is taught. Each answer follows from the scene and the question alone, so that an
answer can be checked by comparing words.
Does not know: pixels, tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from training.mini.phrases import (
    analysis,
    at_place,
    background_sentence,
    boxes,
    caption,
    detail,
    fenced,
)
from training.mini.scenes import Scene, Thing, count_of, place_of
from training.mini.vocabulary import COLOURS, SHAPES, SPRITES, UNCOUNTED, plural, with_article
from vlfit.tasks.prompts import CAPTION_LONG, CAPTION_SHORT, SCENE

CAPTION_ASKED = (
    "What is in this picture?",
    "Describe this image.",
    "What do you see?",
    "Describe this picture.",
    "What is in this image?",
    "What does this picture show?",
    "Caption this image.",
    "Describe this image in one sentence.",
)
DETAIL_ASKED = (
    "Describe this image in detail.",
    "Describe everything you see.",
    "Give a detailed description.",
)


@dataclass(frozen=True)
class Exchange:
    """One question and its true answer. ``topic`` groups them for scores ("colour", "count", ...)."""

    topic: str
    question: str
    answer: str


class Teller:
    """Draws questions about one scene by lot."""

    def __init__(self, scene: Scene, random: np.random.Generator) -> None:
        self.scene = scene
        self.random = random
        self.unique = [t for t in scene.things if count_of(scene, t.name) == 1]

    def pick(self, *choices: str) -> str:
        """One of the choices."""
        return choices[int(self.random.integers(len(choices)))]

    def pick_thing(self, things: list[Thing]) -> Thing | None:
        """One of the things, or None when there is none."""
        return things[int(self.random.integers(len(things)))] if things else None

    def ask(self, topic: str) -> Exchange | None:
        """A question on a topic of ``TOPICS``, or None if this scene offers none."""
        exchange = TOPICS[topic](self)
        return None if exchange is None else Exchange(topic, *exchange)


Answered = tuple[str, str] | None


def _caption_short(teller: Teller) -> Answered:
    return teller.pick(CAPTION_SHORT, CAPTION_SHORT, CAPTION_SHORT, *CAPTION_ASKED), caption(teller.scene)


def _caption_long(teller: Teller) -> Answered:
    return teller.pick(CAPTION_LONG, CAPTION_LONG, *DETAIL_ASKED), detail(teller.scene)


def _analysis(teller: Teller) -> Answered:
    return SCENE, analysis(teller.scene)


def _colour(teller: Teller) -> Answered:
    thing = teller.pick_thing([t for t in teller.unique if t.colour])
    if thing is None:
        return None
    colour = teller.pick("colour", "color")
    name = thing.kind if thing.written else thing.name
    question = teller.pick(
        f"What {colour} is the {name}?",
        f"What {colour} is the {name}?",
        f"What is the {colour} of the {name}?",
        f"Which {colour} does the {name} have?",
    )
    return question, f"The {name} is {thing.colour}."


def _shape(teller: Teller) -> Answered:
    shapes = [t for t in teller.scene.things if t.kind == "shape"]
    if not shapes:
        return None
    colours = [t.colour for t in shapes]
    thing = teller.pick_thing([t for t in shapes if colours.count(t.colour) == 1])
    if thing is None:
        return None
    if len(shapes) == 1 and teller.random.random() < 0.4:
        return "What shape is in the picture?", f"It is {with_article(thing.name)}."
    question = teller.pick(f"What shape is {thing.colour}?", f"Which shape is {thing.colour}?")
    return question, f"The {thing.name} is {thing.colour}."


def _name(teller: Teller) -> Answered:
    things = teller.scene.things
    if len(things) == 1 and not things[0].written and teller.random.random() < 0.6:
        question = teller.pick("What is this?", "What is this?", "Name this.")
        return question, f"It is {with_article(things[0].label)}."
    placed = [(thing, place_of(thing)) for thing in things if not thing.written]
    places = [place for _, place in placed] + [place_of(thing) for thing in things if thing.written]
    thing = teller.pick_thing([t for t, place in placed if place and places.count(place) == 1])
    # Every other thing must have a clear place too, or it might be meant as well.
    if thing is None or None in places:
        return None
    place = at_place(place_of(thing) or "")
    question = teller.pick(
        f"What is {place}?", f"What is {place} of the picture?", f"What do you see {place}?"
    )
    return question, f"It is {with_article(thing.label)}."


def _count(teller: Teller) -> Answered:
    things = [t for t in teller.scene.things if not t.written and t.name not in UNCOUNTED]
    draw = teller.random.random()
    thing = teller.pick_thing(things)
    if draw < 0.12 or thing is None:
        thing_name = _absent(teller, countable=True)
        return teller.pick(
            f"How many {plural(thing_name)} are there?", f"How many {plural(thing_name)} do you see?"
        ), f"There are no {plural(thing_name)}."
    colour = thing.colour if draw < 0.4 and thing.colour else ""
    number = count_of(teller.scene, thing.name, colour)
    prefix = f"{colour} " if colour else ""
    question = teller.pick(
        f"How many {prefix}{plural(thing.name)} are there?",
        f"How many {prefix}{plural(thing.name)} are in the picture?",
        f"How many {prefix}{plural(thing.name)} do you see?",
        f"Count the {prefix}{plural(thing.name)}.",
    )
    if number == 1:
        return question, f"There is 1 {prefix}{thing.name}."
    return question, f"There are {number} {prefix}{plural(thing.name)}."


def _count_all(teller: Teller) -> Answered:
    if teller.scene.facts:
        return None
    number = len(teller.scene.things)
    question = teller.pick("How many things are there?", "How many objects are in the picture?")
    return question, "There is 1 thing." if number == 1 else f"There are {number} things."


def _place(teller: Teller) -> Answered:
    thing = teller.pick_thing([t for t in teller.unique if place_of(t)])
    if thing is None:
        return None
    name = _reference(teller, thing)
    question = teller.pick(
        f"Where is {name}?",
        f"Where is {name}?",
        f"Where is {name} in the picture?",
        f"In which part of the picture is {name}?",
    )
    pair = "The pair of scissors" if thing.name == "scissors" else name[0].upper() + name[1:]
    return question, f"{pair} is {at_place(place_of(thing) or '')}."


def _relation(teller: Teller) -> Answered:
    if len(teller.unique) < 2:
        return None
    first, second = (teller.unique[int(i)] for i in teller.random.permutation(len(teller.unique))[:2])
    across, down = first.x - second.x, first.y - second.y
    one, other = _reference(teller, first), _reference(teller, second)
    if teller.random.random() < 0.5:
        if abs(across) < 0.15:
            return None
        side, opposite = "left of", "right of"
        truth = side if across < 0 else opposite
    else:
        if abs(down) < 0.15:
            return None
        side, opposite = "above", "below"
        truth = side if down < 0 else opposite
    capital = one[0].upper() + one[1:]
    if teller.random.random() < 0.5:
        return f"Is {one} {side} or {opposite} {other}?", f"{capital} is {truth} {other}."
    asked = side if teller.random.random() < 0.5 else opposite
    return f"Is {one} {asked} {other}?", f"{'Yes' if asked == truth else 'No'}, {one} is {truth} {other}."


def _is_there(teller: Teller) -> Answered:
    thing = teller.pick_thing([t for t in teller.scene.things if not t.written])
    if thing is not None and teller.random.random() < 0.5:
        label = thing.label if teller.random.random() < 0.6 else thing.name
        present = True
    else:
        label, present = _absent(teller), False
        # Right shape, wrong colour: the negative that needs looking at both.
        if thing is not None and thing.kind == "shape" and teller.random.random() < 0.5:
            colour = teller.pick(*COLOURS)
            if count_of(teller.scene, thing.name, colour) == 0:
                label = f"{colour} {thing.name}"
    article = with_article(label)
    question = teller.pick(
        f"Is there {article}?", f"Is there {article} in the picture?", f"Do you see {article}?"
    )
    return question, f"Yes, there is {article}." if present else f"No, there is no {label}."


def _written(teller: Teller) -> Answered:
    thing = teller.pick_thing([t for t in teller.scene.things if t.written])
    if thing is None:
        return None
    if thing.kind == "number":
        question = teller.pick(
            "What number is written?", "What number is in the picture?", "Read the number."
        )
        return question, f"The number is {thing.name}."
    question = teller.pick("What word is written?", "What does the text say?", "Read the text.")
    return question, f'It says "{thing.name}".'


def _background(teller: Teller) -> Answered:
    colour = teller.pick("colour", "color")
    question = teller.pick(f"What {colour} is the background?", f"What is the {colour} of the background?")
    return question, background_sentence(teller.scene)


def _grounding(teller: Teller) -> Answered:
    thing = teller.pick_thing([t for t in teller.scene.things if not t.written])
    if thing is None:
        return None
    alike = [t for t in teller.scene.things if t.label == thing.label]
    label = thing.label
    named = f"the {label}" if len(alike) == 1 else f"every {label}"
    question = teller.pick(
        f"Locate {named} in this picture. Answer with JSON.",
        f"Locate {named}, output the bbox coordinates in JSON format.",
        f"Give the bounding box of {named} as JSON.",
        f"Where is {named}? Answer with bbox_2d as JSON.",
    )
    return question, fenced(boxes(teller.scene, alike))


def _reference(teller: Teller, thing: Thing) -> str:
    """How a question refers to a thing that is the only one of its name."""
    if thing.written:
        return f"the {thing.kind}"
    return f"the {thing.label if thing.colour and teller.random.random() < 0.5 else thing.name}"


def _absent(teller: Teller, countable: bool = False) -> str:
    """The name of something that is not in the scene."""
    names = [*SHAPES, *SPRITES]
    while True:
        name = names[int(teller.random.integers(len(names)))]
        if count_of(teller.scene, name) == 0 and not (countable and name in UNCOUNTED):
            return name


TOPICS: dict[str, Callable[[Teller], Answered]] = {
    "caption": _caption_short,
    "detail": _caption_long,
    "analysis": _analysis,
    "colour": _colour,
    "shape": _shape,
    "name": _name,
    "count": _count,
    "count all": _count_all,
    "place": _place,
    "relation": _relation,
    "is there": _is_there,
    "written": _written,
    "background": _background,
    "grounding": _grounding,
}

# How often each topic is drawn, in thousandths.
WEIGHTS = {
    "caption": 190, "detail": 90, "analysis": 70, "colour": 80, "shape": 70, "name": 110, "count": 110,
    "count all": 25, "place": 90, "relation": 70, "is there": 70, "written": 110, "background": 35,
    "grounding": 60,
}  # fmt: skip


def conversation(scene: Scene, random: np.random.Generator, count: int) -> list[Exchange]:
    """``count`` exchanges about a scene, no question twice."""
    teller = Teller(scene, random)
    topics = list(WEIGHTS)
    shares = np.array([WEIGHTS[topic] for topic in topics], np.float64)
    chosen = random.choice(len(topics), size=count * 3, p=shares / shares.sum())
    found: list[Exchange] = []
    told: set[str] = set()
    for index in chosen:
        topic = topics[int(index)]
        # The whole scene is told once in each way: a second telling would teach nothing new.
        if topic in told:
            continue
        if topic in ("caption", "detail", "analysis", "background", "count all"):
            told.add(topic)
        exchange = teller.ask(topic)
        if exchange is not None and all(exchange.question != other.question for other in found):
            found.append(exchange)
        if len(found) == count:
            break
    return found
