"""Short clips and questions about them: one thing that moves, comes, goes, changes size or does nothing."""

from dataclasses import dataclass, replace

import numpy as np

from training.mini.atlas import Atlas
from training.mini.lots import draw_scene
from training.mini.phrases import background_phrase, background_sentence, capital, group_phrase, is_are
from training.mini.scenes import Scene, Thing
from training.mini.teller import Exchange, Teller, as_typed
from training.mini.vocabulary import UNCOUNTED, plural, with_article
from vlfit.tasks.describe import CAPTION_SHORT

# What may happen to the thing, and how it is said of "it".
EVENTS = {
    "right": "moves to the right", "left": "moves to the left", "up": "moves up", "down": "moves down",
    "appears": "appears", "disappears": "disappears", "grows": "grows", "shrinks": "shrinks",
    "still": "does not move",
}  # fmt: skip
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
# What may happen without a way, as it is asked after.
CHANGES = {"appears": "appear", "disappears": "disappear", "grows": "grow", "shrinks": "shrink"}
CANNOT_COUNT = "I cannot count frames or seconds."
# How far a thing travels, as a fraction of the picture, and its size on the way.
TRAVEL = (0.35, 0.6)
SIDE = 0.28


@dataclass(frozen=True)
class Clip:
    """``frames`` from first to last; ``event``: a key of ``EVENTS``; ``thing``: what it happens to."""

    frames: tuple[Scene, ...]
    event: str
    thing: Thing


def draw_clip(seed: int, size: tuple[int, int], frames: int, atlas: Atlas) -> Clip:
    """The clip of a seed with so many frames."""
    random = np.random.default_rng(seed)
    scene = draw_scene(seed + 104_729, size, atlas, sort="single")
    while _unfit(scene):
        scene = draw_scene(int(random.integers(1 << 30, 1 << 62)), size, atlas, sort="single")
    event = tuple(EVENTS)[int(random.random() * len(EVENTS))]
    thing = _sized(scene.things[0], SIDE * float(random.uniform(0.8, 1.3)), size)
    start, end = _ends(event, thing, random)
    moments = []
    for number in range(frames):
        at = number / max(1, frames - 1)
        x, y = (start[axis] + (end[axis] - start[axis]) * at for axis in range(2))
        grown = {"grows": 0.55 + 0.75 * at, "shrinks": 1.3 - 0.75 * at}.get(event, 1.0)
        here = replace(thing, x=x, y=y, width=thing.width * grown, height=thing.height * grown)
        hidden = (event == "appears" and at < 0.5) or (event == "disappears" and at >= 0.5)
        moments.append(replace(scene, things=() if hidden else (here,), sort="empty" if hidden else "things"))
    return Clip(tuple(moments), event, thing)


def _unfit(scene: Scene) -> bool:
    thing = scene.things[0]
    return thing.written or is_are(thing.name) == "are" or scene.background.kind == "photo"


def _sized(thing: Thing, side: float, size: tuple[int, int]) -> Thing:
    """The same thing with sides of about ``side`` of the picture's short side."""
    pixels = side * min(size)
    aspect = (thing.width * size[0]) / (thing.height * size[1])
    across, down = pixels * aspect**0.5, pixels / aspect**0.5
    return replace(thing, width=min(0.6, across / size[0]), height=min(0.6, down / size[1]))


def _ends(
    event: str, thing: Thing, random: np.random.Generator
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where the centre is at first and at last; the thing stays inside the picture."""
    room = [(extent * 0.55, 1 - extent * 0.55) for extent in (thing.width, thing.height)]
    if event not in DIRECTIONS:
        spot = (float(random.uniform(0.3, 0.7)), float(random.uniform(0.3, 0.7)))
        return spot, spot
    axis = 0 if DIRECTIONS[event][0] else 1
    low, high = room[axis]
    travel = min(float(random.uniform(*TRAVEL)), high - low)
    first = float(random.uniform(low, max(low, high - travel)))
    across = float(random.uniform(*room[1 - axis]))
    ends = (first, first + travel) if sum(DIRECTIONS[event]) > 0 else (first + travel, first)
    points = [(end, across) if axis == 0 else (across, end) for end in ends]
    return points[0], points[1]


def ask_clip(clip: Clip, random: np.random.Generator) -> list[Exchange]:
    """Questions about what happens, none twice."""
    scene = clip.frames[0]
    teller = Teller(scene, random)
    thing = clip.thing
    article, named = group_phrase([thing]), f"the {thing.label}"
    happens = EVENTS[clip.event]
    told = f"{article} {happens} {background_phrase(scene.background)}."
    turns = [
        (CAPTION_SHORT, capital(told)),
        (
            teller.way("clip"),
            capital(told),
        ),
        (f"What does {named} do?", f"{capital(named)} {happens}."),
        ("What is in this video?", f"It is {with_article(thing.label)}."),
        ("What colour is the background?", background_sentence(scene.background)),
    ]  # fmt: skip
    if clip.event in DIRECTIONS:
        turns.append((teller.way("way", NAME=named), f"It moves {happens.removeprefix('moves ')}."))
    moves = clip.event in DIRECTIONS
    still = f"Yes, it {happens}." if moves else "No, it does not move."
    if clip.event not in ("appears", "disappears"):
        turns.append((teller.way("moves", NAME=named), still))
    if thing.colour:
        turns.append((f"What colour is {named.replace(thing.colour + ' ', '')}?", f"It is {thing.colour}."))
    turns += _in_doubt(clip, teller, named)
    # All of them seldom find room: each is to have its turn.
    turns = [turns[0], *(turns[1 + int(index)] for index in random.permutation(len(turns) - 1))]
    return [
        Exchange("clip", question if question == CAPTION_SHORT else as_typed(question, random), answer)
        for question, answer in turns
    ]


def _in_doubt(clip: Clip, teller: Teller, named: str) -> list[tuple[str, str]]:
    """Whether it moves to the left, whether it grows, how many there are, and what mini cannot tell."""
    turns = [(teller.way("frames"), CANNOT_COUNT)]
    thing, happens = clip.thing, EVENTS[clip.event]
    if clip.event not in ("appears", "disappears"):
        way = clip.event if clip.event in DIRECTIONS and teller.chance(0.5) else teller.pick(*DIRECTIONS)
        truth = happens if clip.event in DIRECTIONS else EVENTS["still"]
        question = teller.way("does it", NAME=named, WAY=EVENTS[way].removeprefix("moves "))
        turns.append((question, f"{'Yes' if way == clip.event else 'No'}, it {truth}."))
    else:
        turns.append((teller.way("moves", NAME=named), f"No, it {happens}."))
    asked = clip.event if clip.event in CHANGES and teller.chance(0.5) else teller.pick(*CHANGES)
    subject = teller.pick("it", named)
    yes = "Yes" if asked == clip.event else "No"
    turns.append((f"Does {subject} {CHANGES[asked]}?", f"{yes}, it {happens}."))
    if thing.name not in UNCOUNTED:
        turns.append((teller.way("how many", NAMES=plural(thing.name)), f"There is 1 {thing.name}."))
    missing = plural(teller.absent(countable=True, like=thing))
    turns.append((teller.way("how many", NAMES=missing), f"There are no {missing}."))
    return turns
