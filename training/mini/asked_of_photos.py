"""Questions about a photo, of which mini knows clothes, colours and light, and nothing else."""

from training.mini.phrases import join, photo_colours, photo_light
from training.mini.teller import Answered, Teller
from training.mini.vocabulary import CLOTHES, plural, with_article

CANNOT_TELL = "I cannot tell. In photos I only know clothes and colours."


def garment(teller: Teller) -> Answered:
    """Which piece of clothing; or that it is none that mini knows."""
    scene = teller.scene
    if scene.sort != "photo":
        return None
    question = teller.way("garment")
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
    return teller.way("one or other", ONE=first, OTHER=second), f"It is {truth}."


def photo_facts(teller: Teller) -> Answered:
    """Its colours, its light."""
    scene = teller.scene
    if not scene.facts:
        return None
    if teller.chance(0.65):
        question = teller.way("photo colours")
        return question, f"Mostly {join(photo_colours(scene))}."
    light = photo_light(scene)
    question = teller.way("photo light")
    return question, f"It is {light}." if light else "It is neither bright nor dark."


def photo_limits(teller: Teller) -> Answered:
    """Things mini knows from drawings, asked about a photo."""
    if teller.scene.sort != "photo":
        return None
    name = teller.absent(countable=True)
    question = teller.way("photo of what", NAME=name, NAMES=plural(name), A=with_article(name))
    return question, CANNOT_TELL
