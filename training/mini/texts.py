"""What mini is asked about a scene, and the true answers.

Knows: every topic mini is taught, how often each comes, and how several questions make a conversation.
Does not know: the questions themselves (asked_of_*), pixels, tokens.
"""

from collections.abc import Callable

import numpy as np

from training.mini import asked_of_charts, asked_of_photos, asked_of_things
from training.mini.phrases import analysis, caption, detail
from training.mini.scenes import Scene
from training.mini.teller import Answered, Exchange, Teller, as_typed
from vlfit.tasks.prompts import CAPTION_LONG, CAPTION_SHORT, SCENE

CAPTION_ASKED = (
    "What is in this picture?",
    "What's in this picture?",
    "Describe this picture.",
    "Describe the picture.",
    "What do you see?",
    "What can you see?",
    "What does this picture show?",
    "Caption this picture.",
    "What is shown in this picture?",
    "Tell me what you see.",
    "Describe this picture in one short sentence.",
    "Give a short caption.",
)
DETAIL_ASKED = (
    "Describe this picture in great detail.",
    "Describe everything you see.",
    "Give a detailed description.",
    "Describe the picture in detail.",
)
# The prompts of vlfit's own tasks are asked word for word.
TASKS = frozenset({CAPTION_SHORT, CAPTION_LONG, SCENE})


def _caption_short(teller: Teller) -> Answered:
    if teller.scene.sort == "photo" and not teller.scene.facts:
        return None
    return teller.pick(CAPTION_SHORT, CAPTION_SHORT, CAPTION_SHORT, *CAPTION_ASKED), caption(teller.scene)


def _caption_long(teller: Teller) -> Answered:
    if teller.scene.sort == "photo" and not teller.scene.facts:
        return None
    return teller.pick(CAPTION_LONG, CAPTION_LONG, *DETAIL_ASKED), detail(teller.scene)


def _analysis(teller: Teller) -> Answered:
    if teller.scene.sort == "photo" and not teller.scene.facts:
        return None
    return SCENE, analysis(teller.scene)


# Each topic with its questions and how often it is drawn, in thousandths.
TOPICS: dict[str, tuple[Callable[[Teller], Answered], int]] = {
    "caption": (_caption_short, 150),
    "detail": (_caption_long, 70),
    "analysis": (_analysis, 60),
    "colour": (asked_of_things.colour, 70),
    "shape": (asked_of_things.shape, 45),
    "name": (asked_of_things.name, 110),
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
}
_NAMES = tuple(TOPICS)
_SHARES = np.cumsum([share for _, share in TOPICS.values()])
# The whole scene is told once in each way: a second telling would teach nothing new.
ONCE = frozenset(
    {"caption", "detail", "analysis", "background", "count all", "locate all", "kind", "photo facts"}
)


def ask(teller: Teller, topic: str) -> Exchange | None:
    """A question on a topic of ``TOPICS``, or None if this scene offers none."""
    answered = TOPICS[topic][0](teller)
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


def dialogue(scene: Scene, random: np.random.Generator) -> list[Exchange]:
    """Several turns about one picture: about one thing called "it", or a question after another."""
    teller = Teller(scene, random)
    turns = asked_of_things.follow_up(teller) if teller.chance(0.6) else []
    if turns:
        return [Exchange("follow-up", *turn) for turn in turns]
    return [exchange for exchange in conversation(scene, random, 3) if exchange.topic != "analysis"]
