"""A scene in words that nobody asked about: captions, descriptions, boxes and JSON.

Knows: how each kind of thing and background is put into words. All of it follows from the scene alone.
Does not know: questions (texts), pixels, tokens.
"""

import json

from training.mini.scenes import Scene, Thing, number_word, place_of
from training.mini.vocabulary import COLOURS, plural, with_article

PHOTO_LIMIT = "I can only name simple shapes, drawings and numbers."


def caption(scene: Scene) -> str:
    """One sentence: the things from left to right, like things together, then the background."""
    if scene.facts:
        return photo_sentence(scene)
    phrases = [group_phrase(group) for group in groups(scene)]
    sentence = f"{join(phrases)} {background_phrase(scene)}."
    return sentence[0].upper() + sentence[1:]


def groups(scene: Scene) -> list[list[Thing]]:
    """Things with the same label together, in order of the leftmost."""
    found: dict[str, list[Thing]] = {}
    for thing in scene.things:
        found.setdefault(thing.label, []).append(thing)
    return list(found.values())


def group_phrase(group: list[Thing]) -> str:
    """ "a red square", "three dogs", "the number 42", 'the word "STOP"'."""
    first = group[0]
    if first.kind == "number":
        return f"the number {first.name}"
    if first.kind == "word":
        return f'the word "{first.name}"'
    if len(group) == 1:
        return with_article(first.label)
    name = plural(first.name)
    return f"{number_word(len(group))} {first.colour + ' ' if first.colour else ''}{name}"


def join(phrases: list[str]) -> str:
    """ "a, b and c"."""
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def background_phrase(scene: Scene) -> str:
    """What the things stand on."""
    background = scene.background
    match background.kind:
        case "plain":
            return f"on {with_article(background.names[0])} background"
        case "gradient":
            return f"on a background that fades from {background.names[0]} to {background.names[1]}"
        case "landscape":
            return "on green grass under a blue sky"
    return "in front of a blurred photo"


def photo_sentence(scene: Scene) -> str:
    """Computed facts about a photo: true of any photo, whatever it shows."""
    names = [fact for fact in scene.facts if fact in COLOURS]
    light = [fact for fact in scene.facts if fact not in COLOURS]
    return f"A {light[0] + ' ' if light else ''}photo, mostly {join(names)}."


def detail(scene: Scene) -> str:
    """Several sentences: each group with its place, then the background."""
    if scene.facts:
        return f"{photo_sentence(scene)} {PHOTO_LIMIT}"
    sentences = []
    for group in groups(scene):
        phrase = group_phrase(group)
        place = place_of(group[0])
        if len(group) > 1:
            sentence = f"there are {phrase}"
        elif place is None:
            sentence = f"there is {phrase}"
        else:
            sentence = f"{phrase} is {at_place(place)}"
        if group[0].written:
            sentence += f", written in {group[0].colour}"
        sentences.append(sentence[0].upper() + sentence[1:] + ".")
    return " ".join([*sentences, background_sentence(scene)])


def background_sentence(scene: Scene) -> str:
    """The background as a sentence of its own."""
    background = scene.background
    match background.kind:
        case "plain":
            return f"The background is {background.names[0]}."
        case "gradient":
            return f"The background fades from {background.names[0]} to {background.names[1]}."
        case "landscape":
            return "The background is green grass under a blue sky."
    return "The background is a photo." if scene.facts else "The background is a blurred photo."


def at_place(place: str) -> str:
    """ "at the top left", "in the centre", "on the right"."""
    preposition = {"centre": "in", "left": "on", "right": "on"}.get(place, "at")
    return f"{preposition} the {place}"


def fenced(value: object) -> str:
    """JSON inside a ```json fence, as Qwen3-VL writes it."""
    return f"```json\n{json.dumps(value)}\n```"


def boxes(scene: Scene, things: list[Thing]) -> list[dict[str, object]]:
    """Boxes in Qwen3-VL's grounding form, from left to right."""
    return [{"bbox_2d": list(scene.box(thing)), "label": label_in_json(thing)} for thing in things]


def label_in_json(thing: Thing) -> str:
    """Written things are labelled by kind ("number"): what they say stands under "text"."""
    return thing.kind if thing.written else thing.label


def analysis(scene: Scene) -> str:
    """The answer to ``SCENE``, in exactly its form."""
    objects = [{"label": label_in_json(t), "bbox_2d": list(scene.box(t))} for t in scene.things]
    words = [thing.name for thing in scene.things if thing.written]
    return fenced({"summary": caption(scene), "objects": objects, "text": words})
