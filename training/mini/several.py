"""Two or three pictures in one prompt: which they are, and what is asked about them together.

Knows: ordinals, comparisons. Does not know: questions about one picture (texts), tokens.
"""

import numpy as np

from training.mini.atlas import Atlas
from training.mini.lots import draw_scene
from training.mini.phrases import caption, join
from training.mini.scenes import Scene, Thing
from training.mini.teller import Exchange, Teller, as_typed
from training.mini.vocabulary import with_article

ORDINALS = ("first", "second", "third")
MOST = len(ORDINALS)
SORTS = ("single", "few", "few", "group", "written", "photo")


def draw_several(seed: int, size: tuple[int, int], count: int, atlas: Atlas) -> list[Scene]:
    """``count`` scenes (2 or 3) of one size that are shown together; photos only where the atlas has any."""
    random = np.random.default_rng(seed)
    sorts = SORTS if len(atlas.photos) else SORTS[:-1]
    # Every scene draws from a seed of its own; those of training lie above 2**30 whatever is added.
    return [
        draw_scene(seed + 7919 * (number + 1), size, atlas, sort=sorts[int(random.integers(len(sorts)))])
        for number in range(count)
    ]


def ask_several(scenes: list[Scene], random: np.random.Generator, count: int = 6) -> list[Exchange]:
    """Up to ``count`` questions about the pictures together, none twice."""
    tellers = [Teller(scene, random) for scene in scenes]
    found: list[Exchange] = []
    for _ in range(count * 2):
        kind = _KINDS[int(random.random() * len(_KINDS))]
        answered = kind(tellers, random)
        if answered is not None and all(answered[0] != other.question for other in found):
            found.append(Exchange("several", *answered))
        if len(found) == count:
            break
    return [Exchange(e.topic, as_typed(e.question, random), e.answer) for e in found]


Answered = tuple[str, str] | None


def _which(tellers: list[Teller], random: np.random.Generator) -> Answered:
    """Which picture shows a thing: one, several or none of them."""
    shown = [
        thing for teller in tellers for thing in teller.scene.things if thing.kind in ("shape", "sprite")
    ]
    if any(teller.scene.sort == "photo" for teller in tellers) and not shown:
        return None
    if not shown or random.random() < 0.12:
        label = tellers[0].absent()
        if any(_shows(teller.scene, label) for teller in tellers):
            return None
    else:
        thing: Thing = shown[int(random.random() * len(shown))]
        label = thing.label if random.random() < 0.5 else thing.name
    article = with_article(label)
    holding = [number for number, teller in enumerate(tellers) if _shows(teller.scene, label)]
    question = tellers[0].pick(
        f"Which picture shows {article}?", f"Which one has {article}?", f"Which picture has {article}?",
        f"In which picture is there {article}?",
    )  # fmt: skip
    return question, f"{_these(holding, len(tellers))} {article}."


def _shows(scene: Scene, label: str) -> bool:
    return any(label in (thing.name, thing.label) for thing in scene.things)


def _these(numbers: list[int], count: int) -> str:
    """ "The second picture shows", "The first and third pictures show", "None of them shows"."""
    if not numbers:
        return "None of them shows"
    if len(numbers) == count:
        return "Both pictures show" if count == 2 else "All pictures show"
    if len(numbers) == 1:
        return f"The {ORDINALS[numbers[0]]} picture shows"
    return f"The {join([ORDINALS[number] for number in numbers])} pictures show"


def _one_of_them(tellers: list[Teller], random: np.random.Generator) -> Answered:
    """The caption of one of the pictures."""
    number = int(random.random() * len(tellers))
    ordinal = ORDINALS[number]
    question = tellers[0].pick(
        f"What is in the {ordinal} picture?", f"Describe the {ordinal} picture.",
        f"What does the {ordinal} picture show?", f"Describe picture {number + 1}.",
    )  # fmt: skip
    return question, caption(tellers[number].scene)


def _each(tellers: list[Teller], _random: np.random.Generator) -> Answered:
    """All captions, one after the other."""
    question = tellers[0].pick(
        "Describe each picture.", "What is in these pictures?", "Describe these pictures."
    )
    told = [f"{ORDINALS[n].capitalize()}: {caption(t.scene)}" for n, t in enumerate(tellers)]
    return question, " ".join(told)


def _most(tellers: list[Teller], _random: np.random.Generator) -> Answered:
    """Which picture has more things than all others."""
    counts = [len(teller.scene.things) for teller in tellers]
    if any(teller.scene.sort == "photo" for teller in tellers) or counts.count(max(counts)) > 1:
        return None
    question = tellers[0].pick("Which picture has the most things?", "Which picture has more objects?")
    return question, f"The {ORDINALS[counts.index(max(counts))]} picture has the most things."


def _how_many(tellers: list[Teller], _random: np.random.Generator) -> Answered:
    """How many pictures there are."""
    question = tellers[0].pick("How many pictures are there?", "How many images did I send?")
    return question, f"There are {len(tellers)} pictures."


_KINDS = (_which, _which, _which, _one_of_them, _one_of_them, _each, _most, _how_many)
