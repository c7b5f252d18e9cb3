"""Two or three pictures in one prompt, and questions about them together."""

import numpy as np

from training.mini.asked_of_things import there_are
from training.mini.atlas import Atlas
from training.mini.differences import changed, difference
from training.mini.lots import draw_scene
from training.mini.phrases import caption, join
from training.mini.scenes import Scene, Thing, count_of
from training.mini.teller import Exchange, Teller, as_typed
from training.mini.vocabulary import UNCOUNTED, plural, with_article

ORDINALS = ("first", "second", "third")
MOST = len(ORDINALS)
# So many pairs are the same picture twice but for one thing.
TWINS = 0.25
SORTS = ("single", "few", "few", "group", "written", "photo")


def draw_several(seed: int, size: tuple[int, int], count: int, atlas: Atlas) -> list[Scene]:
    """``count`` scenes (2 or 3) of one size that are shown together; photos only where the atlas has any."""
    random = np.random.default_rng(seed)
    sorts = SORTS if len(atlas.photos) else SORTS[:-1]
    # Every scene draws from a seed of its own; those of training lie above 2**30 whatever is added.
    scenes = [
        draw_scene(seed + 7919 * (number + 1), size, atlas, sort=sorts[int(random.integers(len(sorts)))])
        for number in range(count)
    ]
    if count == 2 and random.random() < TWINS and scenes[0].sort == "things":
        scenes[1] = changed(scenes[0], random, atlas)
    return scenes


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
    question = tellers[0].way("which shows", A=article)
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
    question = tellers[0].way("the kth", ORDINAL=ordinal, NUMBER=str(number + 1))
    return question, caption(tellers[number].scene)


def _each(tellers: list[Teller], _random: np.random.Generator) -> Answered:
    """All captions, one after the other."""
    question = tellers[0].way("each")
    told = [f"{ORDINALS[n].capitalize()}: {caption(t.scene)}" for n, t in enumerate(tellers)]
    return question, " ".join(told)


def _most(tellers: list[Teller], _random: np.random.Generator) -> Answered:
    """Which picture has more things than all others."""
    counts = [len(teller.scene.things) for teller in tellers]
    if any(teller.scene.sort == "photo" for teller in tellers) or counts.count(max(counts)) > 1:
        return None
    question = tellers[0].way("most")
    return question, f"The {ORDINALS[counts.index(max(counts))]} picture has the most things."


def _how_many(tellers: list[Teller], _random: np.random.Generator) -> Answered:
    """How many pictures there are."""
    question = tellers[0].way("how many pictures")
    return question, f"There are {len(tellers)} pictures."


def _count_in(tellers: list[Teller], random: np.random.Generator) -> Answered:
    """How many of a thing one of the pictures shows; of what only another one shows, none."""
    number = int(random.random() * len(tellers))
    if tellers[number].scene.sort == "photo":
        return None
    # Three times of four what this very picture shows, else what any of them does.
    asked = [tellers[number]] if random.random() < 0.75 else tellers
    names = [
        thing.name
        for teller in asked
        for thing in teller.scene.things
        if thing.kind in ("shape", "sprite") and thing.name not in UNCOUNTED
    ]
    if not names:
        return None
    name = tellers[0].pick(*names)
    question = tellers[0].way(
        "the kth has", NAMES=plural(name), ORDINAL=ORDINALS[number], NUMBER=str(number + 1)
    )
    told = there_are(count_of(tellers[number].scene, name), name, plural(name))
    return question, f"{told.rstrip('.')} in the {ORDINALS[number]} picture."


def _difference(tellers: list[Teller], _random: np.random.Generator) -> Answered:
    """What is different between two pictures that differ in one thing, or in all."""
    if len(tellers) != 2:
        return None
    told = difference(tellers[0].scene, tellers[1].scene)
    return (tellers[0].way("difference"), told) if told else None


def _photo_among(tellers: list[Teller], _random: np.random.Generator) -> Answered:
    """Which of the pictures is a photo."""
    photos = [number for number, teller in enumerate(tellers) if teller.scene.sort == "photo"]
    question = tellers[0].way("which is a photo")
    if not photos:
        return (question, "None of them is a photo.") if tellers[0].chance(0.3) else None
    if len(photos) == len(tellers):
        return question, "Both pictures are photos." if len(photos) == 2 else "All pictures are photos."
    if len(photos) == 1:
        return question, f"The {ORDINALS[photos[0]]} picture is a photo."
    return question, f"The {join([ORDINALS[number] for number in photos])} pictures are photos."


_KINDS = (
    _which, _which, _which, _one_of_them, _one_of_them, _each, _most, _how_many, _count_in, _count_in,
    _difference, _photo_among,
)  # fmt: skip
