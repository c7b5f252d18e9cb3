"""Captions, descriptions, boxes and JSON of a scene. All of it follows from the scene alone."""

import json

from training.mini.scenes import Background, Scene, Thing, place_of
from training.mini.vocabulary import COLOURS, MEASURES, NUMBER_WORDS, UNCOUNTED, plural, with_article

PHOTO_LIMIT = "In photos I can only name clothes and colours."
SCREEN_CAPTION = "A picture with text that I cannot read."
SCREEN_LIMIT = "I cannot read it. I only read single large words and numbers."


def caption(scene: Scene) -> str:
    """One sentence: the things from left to right, like things together, then the background."""
    match scene.sort:
        case "photo":
            return photo_sentence(scene)
        case "chart":
            count = NUMBER_WORDS[len(scene.things)]
            bars = join([f"{bar.colour} {bar.value}" for bar in scene.things])
            return f"A bar chart with {count} bars {background_phrase(scene.background)}: {bars}."
        case "empty":
            return empty_sentence(scene.background)
        case "screen":
            return SCREEN_CAPTION
    phrases = [group_phrase(group) for group in groups(scene)]
    return capital(f"{join(phrases)} {background_phrase(scene.background)}.")


def capital(sentence: str) -> str:
    """The first letter large."""
    return sentence[0].upper() + sentence[1:]


def is_are(name: str) -> str:
    """ "are" for what is plural though it is one thing: "the scissors are red", "the grapes are purple"."""
    one_thing = MEASURES.get(name, "a") == "a"
    return "is" if one_thing or plural(name) != name else "are"


def groups(scene: Scene) -> list[list[Thing]]:
    """Things with the same label together, in order of the leftmost."""
    found: dict[str, list[Thing]] = {}
    for thing in scene.things:
        found.setdefault(thing.label, []).append(thing)
    return list(found.values())


def group_phrase(group: list[Thing], sized: bool = False) -> str:
    """ "a red square", "three dogs", "the number 42", 'the word "STOP"'; ``sized``: "a large red square"."""
    first = group[0]
    if first.kind == "number":
        return f"the number {first.name}"
    if first.kind == "word":
        return f'the word "{first.name}"'
    if len(group) == 1:
        size = first.size_word if sized and first.name not in UNCOUNTED else ""
        return with_article(size + first.label)
    name = plural(first.name)
    return f"{NUMBER_WORDS[len(group)]} {first.colour + ' ' if first.kind == 'shape' else ''}{name}"


def join(phrases: list[str]) -> str:
    """ "a, b and c"."""
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def background_phrase(background: Background) -> str:
    """What the things stand on."""
    match background.kind:
        case "plain":
            return f"on {with_article(background.names[0])} background"
        case "gradient":
            return f"on a background that fades from {background.names[0]} to {background.names[1]}"
        case "landscape":
            return "on green grass under a blue sky"
    return "in front of a photo"


def background_sentence(background: Background) -> str:
    """The background as a sentence of its own."""
    match background.kind:
        case "plain":
            return f"The background is {background.names[0]}."
        case "gradient":
            return f"The background fades from {background.names[0]} to {background.names[1]}."
        case "landscape":
            return "The background is green grass under a blue sky."
    return "The background is a photo."


def empty_sentence(background: Background) -> str:
    """A background with nothing on it."""
    match background.kind:
        case "plain":
            return f"An empty {background.names[0]} background."
        case "gradient":
            return f"An empty background that fades from {background.names[0]} to {background.names[1]}."
    return "Green grass under a blue sky, with nothing on it."


def photo_sentence(scene: Scene) -> str:
    """Computed facts, true of any photo. No clothes: mini would see some in whatever a photo shows."""
    light, names = photo_light(scene), photo_colours(scene)
    coloured = f", mostly {join(names)}" if names else ""
    return f"A {light + ' ' if light else ''}photo{coloured}."


def photo_colours(scene: Scene) -> list[str]:
    """The main colours of a photo, the commonest first."""
    return [fact for fact in scene.facts if fact in COLOURS]


def photo_light(scene: Scene) -> str:
    """ "bright", "dark" or empty."""
    return next((fact for fact in scene.facts if fact not in COLOURS), "")


def detail(scene: Scene) -> str:
    """Several sentences: each group with its place, then the background."""
    background = background_sentence(scene.background)
    match scene.sort:
        case "photo":
            return f"{photo_sentence(scene)} {PHOTO_LIMIT}"
        case "chart":
            tallest = max(scene.things, key=lambda bar: bar.value)
            return f"{caption(scene)} The {tallest.label} is the tallest. {background}"
        case "empty":
            return f"There is nothing in the picture. {background}"
        case "screen":
            return f"{SCREEN_CAPTION} I only read single large words and numbers."
    return " ".join([*(group_sentence(group) for group in groups(scene)), background])


def group_sentence(group: list[Thing]) -> str:
    """ "A large red square is at the top left.", "There are three dogs."."""
    phrase = group_phrase(group, sized=True)
    place = place_of(group[0])
    if len(group) > 1:
        sentence = f"there are {phrase}"
    elif place is None:
        sentence = f"there is {phrase}"
    else:
        sentence = f"{phrase} is {at_place(place)}"
    if group[0].written:
        sentence += f", written in {group[0].colour}"
    return capital(sentence) + "."


def at_place(place: str) -> str:
    """ "at the top left", "in the centre", "on the right"."""
    preposition = {"centre": "in", "left": "on", "right": "on"}.get(place, "at")
    return f"{preposition} the {place}"


def fenced(value: object) -> str:
    """JSON inside a ```json fence, as Qwen3-VL writes it."""
    return f"```json\n{json.dumps(value)}\n```"


def boxes(scene: Scene, things: list[Thing] | tuple[Thing, ...]) -> list[dict[str, object]]:
    """Boxes in Qwen3-VL's grounding form, from left to right."""
    return [{"bbox_2d": list(scene.box(thing)), "label": label_in_json(thing)} for thing in things]


def label_in_json(thing: Thing) -> str:
    """Written things are labelled by kind ("number"): what they say stands under "text"."""
    return thing.kind if thing.written else thing.label


def analysis(scene: Scene) -> str:
    """The answer to ``SCENE``, in exactly its form."""
    objects = [{"label": label_in_json(t), "bbox_2d": list(scene.box(t))} for t in scene.things]
    return fenced({"summary": caption(scene), "objects": objects, "text": scene.texts})
