"""Questions about a photo, and what mini can truly say: clothes, colours, light. All else it cannot tell."""

from training.mini.phrases import join, photo_colours, photo_light
from training.mini.teller import Answered, Teller
from training.mini.vocabulary import CLOTHES, plural, with_article

CANNOT_TELL = "I cannot tell. In photos I only know clothes and colours."


def garment(teller: Teller) -> Answered:
    """Which piece of clothing; or that it is none that mini knows."""
    scene = teller.scene
    if scene.sort != "photo":
        return None
    question = teller.pick(
        "What piece of clothing is this?",
        "What piece of clothing is this?",
        "What kind of clothing is shown?",
        "What clothes are these?",
        "Which garment is this?",
    )
    if scene.garment:
        return question, f"It is {CLOTHES[scene.garment]}."
    return question, CANNOT_TELL


def garment_choice(teller: Teller) -> Answered:
    """One of two."""
    if not teller.scene.garment:
        return None
    truth = CLOTHES[teller.scene.garment]
    other = teller.pick(*(phrase for phrase in CLOTHES.values() if phrase != truth))
    first, second = (truth, other) if teller.chance(0.5) else (other, truth)
    return f"Is this {first} or {second}?", f"It is {truth}."


def photo_facts(teller: Teller) -> Answered:
    """Its colours, its light."""
    scene = teller.scene
    if not scene.facts:
        return None
    if teller.chance(0.65):
        question = teller.pick(
            "What colours are in the photo?", "Which colours does the photo have?",
            "What are the main colors?", "What are the dominant colours?",
        )  # fmt: skip
        return question, f"Mostly {join(photo_colours(scene))}."
    light = photo_light(scene)
    question = teller.pick("Is the photo bright or dark?", "How bright is the photo?")
    return question, f"It is {light}." if light else "It is neither bright nor dark."


def photo_limits(teller: Teller) -> Answered:
    """Things mini knows from drawings, asked about a photo."""
    if teller.scene.sort != "photo":
        return None
    name = teller.absent(countable=True)
    question = teller.pick(
        f"How many {plural(name)} are there?", f"Is there {with_article(name)}?", f"Where is the {name}?",
        f"Do you see {with_article(name)}?", "What is this?", "Who is this?", "Where was this taken?",
        "What is the person doing?", "How many people are there?", "What is in the background?",
        "What does the text say?",
    )  # fmt: skip
    return question, CANNOT_TELL
