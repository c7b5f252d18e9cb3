"""Topics: what mini is asked about a scene, how often each comes, and how questions make a conversation."""

from collections.abc import Callable

import numpy as np

from training.mini import (
    asked_for_json,
    asked_in_doubt,
    asked_of_charts,
    asked_of_groups,
    asked_of_photos,
    asked_of_screens,
    asked_of_things,
    brief,
)
from training.mini.phrases import analysis, caption, detail
from training.mini.scenes import Scene
from training.mini.teller import Answered, Exchange, Teller, as_typed
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, SCENE

# The prompts of vlfit's own tasks are asked word for word.
TASKS = frozenset({CAPTION_SHORT, CAPTION_LONG, SCENE})


def _caption_short(teller: Teller) -> Answered:
    if teller.scene.sort == "photo" and not teller.scene.facts:
        return None
    return CAPTION_SHORT if teller.chance(0.2) else teller.way("caption"), caption(teller.scene)


def _caption_long(teller: Teller) -> Answered:
    if teller.scene.sort == "photo" and not teller.scene.facts:
        return None
    return CAPTION_LONG if teller.chance(0.33) else teller.way("detail"), detail(teller.scene)


def _analysis(teller: Teller) -> Answered:
    if teller.scene.sort == "photo" and not teller.scene.facts:
        return None
    return SCENE, analysis(teller.scene)


def _brief(teller: Teller) -> Answered:
    """A question that ends with a wish for a short answer, and that answer."""
    topic = teller.pick(*brief.KEPT, *brief.YES_OR_NO)
    exchange = ask(teller, topic)
    short = brief.briefly(exchange) if exchange is not None else None
    return None if short is None else (short.question + teller.pick(*brief.AFTER), short.answer)


# Each topic with its questions and how often it is drawn, in thousandths.
TOPICS: dict[str, tuple[Callable[[Teller], Answered], int]] = {
    "caption": (_caption_short, 150),
    "detail": (_caption_long, 70),
    "analysis": (_analysis, 60),
    "colour": (asked_of_things.colour, 70),
    "shape": (asked_of_things.shape, 45),
    "name": (asked_of_things.name, 160),
    "group": (asked_of_things.group, 30),
    "count": (asked_of_things.count, 90),
    "count all": (asked_of_things.count_all, 20),
    "place": (asked_of_things.place, 65),
    "relation": (asked_of_things.relation, 70),
    "bigger": (asked_of_things.bigger, 40),
    "is there": (asked_of_things.is_there, 80),
    "written": (asked_of_things.written, 150),
    "background": (asked_of_things.background, 25),
    "grounding": (asked_of_things.grounding, 60),
    "locate all": (asked_of_things.locate_all, 35),
    "unanswerable": (asked_of_things.unanswerable, 30),
    "chart": (asked_of_charts.chart, 300),
    "kind": (asked_of_charts.kind_of_picture, 12),
    "garment": (asked_of_photos.garment, 300),
    "garment choice": (asked_of_photos.garment_choice, 100),
    "photo facts": (asked_of_photos.photo_facts, 80),
    "photo limits": (asked_of_photos.photo_limits, 50),
    "kindred": (asked_of_groups.kindred, 90),
    "coloured": (asked_of_groups.coloured, 70),
    "where several": (asked_of_groups.where_several, 45),
    "so many": (asked_of_groups.so_many, 40),
    "letters": (asked_of_groups.letters, 35),
    "is written": (asked_of_groups.is_written, 20),
    "is coloured": (asked_in_doubt.is_coloured, 50),
    "is at": (asked_in_doubt.is_at, 40),
    "person": (asked_in_doubt.person, 80),
    "brief": (_brief, 60),
    "screen": (asked_of_screens.screen, 300),
}
# Topics whose answers training does not judge as it goes on: JSON of other forms, and long.
UNJUDGED: dict[str, tuple[Callable[[Teller], Answered], int]] = {
    "categories": (asked_for_json.categories, 40),
    "group boxes": (asked_for_json.group_boxes, 25),
    "own json": (asked_for_json.own_json, 35),
}
_ALL = TOPICS | UNJUDGED
_NAMES = tuple(_ALL)
_SHARES = np.cumsum([share for _, share in _ALL.values()])
# The whole scene is told once in each way: a second telling would teach nothing new.
ONCE = frozenset(
    {"caption", "detail", "analysis", "background", "count all", "locate all", "kind", "photo facts"}
)


def ask(teller: Teller, topic: str) -> Exchange | None:
    """A question on a topic of ``TOPICS`` or ``UNJUDGED``, or None if this scene offers none."""
    if teller.scene.sort == "screen" and topic not in asked_of_screens.TOPICS:
        return None
    answered = _ALL[topic][0](teller)
    return None if answered is None else Exchange(topic, *answered)


def conversation(scene: Scene, random: np.random.Generator, count: int) -> list[Exchange]:
    """Up to ``count`` exchanges about a scene, no question twice, as people type them."""
    teller = Teller(scene, random)
    found: list[Exchange] = []
    told: set[str] = set()
    questions: set[str] = set()
    for draw in random.random(count * 4) * _SHARES[-1]:
        topic = _NAMES[int(np.searchsorted(_SHARES, draw, side="right"))]
        if topic in told:
            continue
        if topic in ONCE:
            told.add(topic)
        exchange = ask(teller, topic)
        if exchange is None or exchange.question in questions:
            continue
        questions.add(exchange.question)
        if exchange.question not in TASKS:
            exchange = Exchange(topic, as_typed(exchange.question, random), exchange.answer)
        found.append(exchange)
        if len(found) == count:
            break
    return found


def brief_conversation(scene: Scene, random: np.random.Generator, count: int) -> list[Exchange]:
    """Up to ``count`` exchanges with answers in a word, for a system prompt that asks for them."""
    short = (brief.briefly(exchange) for exchange in conversation(scene, random, 3 * count))
    return [exchange for exchange in short if exchange is not None][:count]


def dialogue(scene: Scene, random: np.random.Generator) -> list[Exchange]:
    """Several turns about one picture: about one thing called "it", or a question after another."""
    teller = Teller(scene, random)
    turns = asked_of_things.follow_up(teller) if teller.chance(0.6) else []
    if turns:
        return [Exchange("follow-up", *turn) for turn in turns]
    return [exchange for exchange in conversation(scene, random, 3) if exchange.topic != "analysis"]
